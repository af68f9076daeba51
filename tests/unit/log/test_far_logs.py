"""Logs whose physical offsets need more than 32 bits, as in all stores that wrote 2 GiB or more."""

from __future__ import annotations

from pathlib import Path

from logquarry.log.layout import StoreLayout
from logquarry.log.splits import frame_start, log_extent
from logquarry.testing.builder import StoreBuilder


def test_the_frame_at_an_offset_is_found(tmp_path: Path) -> None:
    with StoreBuilder(tmp_path / "store") as builder:
        builder.offset = 8 << 30
        frames = [builder.put("orders", b"%d" % number) for number in range(4)]
    layout = StoreLayout.open(tmp_path / "store")
    second, third = (frame.physical_offset for frame in frames[1:3])
    assert frame_start(layout, second + 5) == third
    # The last entry of a queue points into a frame.
    extent = log_extent(layout, second + 5, second + 5)
    assert (extent.stop, extent.tail) == (
        layout.commit_log.start + builder.offset - (8 << 30),
        third,
    )
