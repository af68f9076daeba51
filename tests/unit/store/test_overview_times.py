"""The store times of an overview, if a frame is unreadable."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.store.overview import overview
from tests.helpers.small_store import config, opened


@pytest.mark.parametrize("harmed", [0, 1, 2])
def test_the_time_of_an_unreadable_frame_is_unknown(harmed: int, tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        puts = [store.put(lq.Message("t", b"x")) for _ in range(3)]
    (path,) = (tmp_path / "s" / "commitlog").glob("0*0")
    data = bytearray(path.read_bytes())
    data[puts[harmed].physical_offset + 4] ^= 1
    path.write_bytes(data)
    with lq.MessageStore.open(tmp_path / "s", config=config()) as reader:
        found = overview(reader)
    first, last = puts[0].store_timestamp, puts[2].store_timestamp
    assert found.first_time == (None if harmed == 0 else first)
    assert found.last_time == (None if harmed == 2 else last)
