"""The index shows messages that neither log nor queues have."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Span
from logquarry.read.index_file import indexed_frames, last_indexed
from logquarry.read.log_end import last_entries
from tests.helpers.small_store import opened


@pytest.fixture
def store(tmp_path: Path) -> tuple[Path, list[int]]:
    root = tmp_path / "store"
    with opened(root) as writer:
        for number in range(300):
            writer.put(lq.Message("orders", b"%06d " % number * 10, keys=f"k{number}"))
        return root, [message.physical_offset for message in writer.scan()]


def offsets_of(layout: StoreLayout, least: int) -> list[int]:
    places: list[int] = indexed_frames(layout, least, ())[0].tolist()
    return places


def test_the_last_message_and_all_others(store: tuple[Path, list[int]]) -> None:
    root, offsets = store
    layout = StoreLayout.open(root)
    found = last_indexed(layout, 0)
    assert found is not None and found.physical_offset == offsets[-1]
    assert (
        found.physical_offset + found.size == last_entries(layout)[0].physical_offset + found.size
    )
    assert offsets_of(layout, 0) == offsets
    assert offsets_of(layout, offsets[250]) == offsets[250:]
    assert last_indexed(layout, offsets[-1] + 1) is None


def test_a_lost_message_has_the_size_of_the_smallest(store: tuple[Path, list[int]]) -> None:
    root, offsets = store
    max((root / "commitlog").iterdir()).unlink()
    found = last_indexed(StoreLayout.open(root), 0)
    assert found is not None
    assert (found.physical_offset, found.size) == (offsets[-1], FIXED_SIZE_V1)


def test_sizes_are_those_up_to_the_next_message(store: tuple[Path, list[int]]) -> None:
    root, offsets = store
    layout = StoreLayout.open(root)
    with lq.MessageStore.open(root) as reader:
        real = [message.size for message in reader.scan()]
    places, sizes = indexed_frames(layout, 0, ())
    # A blank ends each file.
    is_last = [a // 16_384 != b // 16_384 for a, b in pairwise(places.tolist())]
    assert [s for s, last in zip(sizes.tolist(), is_last, strict=False) if not last] == [
        s for s, last in zip(real, is_last, strict=False) if not last
    ]
    assert all(estimate >= size for estimate, size in zip(sizes[:-1], real, strict=False))
    # Sound messages that the index lacks may follow the damage.
    assert indexed_frames(layout, 0, [Span(offsets[5], 95)])[1][5] == 95


def test_a_header_without_its_entry_is_rot(store: tuple[Path, list[int]]) -> None:
    root, _ = store
    path = max((root / "index").iterdir())
    data = bytearray(path.read_bytes())
    data[24:32] = (1 << 40).to_bytes(8, "big")
    path.write_bytes(data)
    layout = StoreLayout.open(root)
    assert last_indexed(layout, 0) is None
    assert 1 << 40 not in offsets_of(layout, 0)


def test_no_index(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    layout = StoreLayout.open(tmp_path)
    assert last_indexed(layout, 0) is None and not offsets_of(layout, 0)
