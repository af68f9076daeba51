"""Splits of any size together give what one walk gives, and each damage once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.log.layout import StoreLayout
from logquarry.log.splits import LogExtent, LogSplit, log_extent, plan_splits, split_events
from logquarry.log.store_files import COMMIT_LOG
from logquarry.log.walk import LogReader
from logquarry.read.log_end import sound_bound
from logquarry.testing import strategies
from tests.helpers.damage import damaged
from tests.helpers.memory_stores import Told, layout_of, told
from tests.helpers.small_log import small_log


def by_walk(layout: StoreLayout, bound: int | None) -> list[Told]:
    return [e for e in told(LogReader(layout, bound=bound).events()) if e[0] != "end"]


def by_splits(layout: StoreLayout, bound: int | None, split_size: int) -> list[Told]:
    extent = log_extent(layout, bound, bound)
    if bound is not None and (broken := sound_bound(layout, bound)) is not None and broken < bound:
        # As in selection.plan_read: the last split holds the break, and reports it.
        extent = LogExtent(extent.start, broken + 1, bound)
    events: list[Told] = []
    for split in plan_splits(layout, extent, split_size=split_size):
        reader = LogReader(layout, bound=extent.bound)
        events += [e for e in told(split_events(reader, split)) if e[0] != "end"]
    return events


@given(strategies.logs(min_frames=1), st.integers(1, 600))
def test_of_a_sound_log(log: strategies.Log, split_size: int) -> None:
    layout = layout_of(log.named_files(), file_size=log.file_size)
    for bound in (None, log.end):
        assert by_splits(layout, bound, split_size) == by_walk(layout, bound)


@given(strategies.logs(min_frames=1), st.integers(1, 600), st.data())
def test_of_a_damaged_log(log: strategies.Log, split_size: int, data: st.DataObject) -> None:
    files = data.draw(damaged(log.named_files()))
    ends = [item.physical_offset + item.size for item in log.frames]
    bound = data.draw(st.sampled_from([None, *ends]))
    layout = layout_of(files, file_size=log.file_size)
    assert by_splits(layout, bound, split_size) == by_walk(layout, bound)


@pytest.mark.parametrize("bound", [False, True])
def test_cut_at_every_byte(bound: bool) -> None:
    log = small_log(start=1)
    files = log.named_files()
    first = min(files)
    broken = bytearray(files[first])
    broken[log.frames[1].physical_offset - log.start + 5] ^= 0xFF
    broken[log.frames[2].physical_offset - log.start + 30] ^= 0xFF
    layout = layout_of(files | {first: bytes(broken)}, file_size=log.file_size)
    extent = log_extent(layout, log.end if bound else None, log.end)
    whole = by_walk(layout, extent.bound)
    assert [event[0] for event in whole] == ["frame", "damage", "frame", "blank", "frame"]
    for cut in range(extent.start + 1, extent.stop):
        found: list[Told] = []
        for split in (LogSplit(extent.start, cut), LogSplit(cut, extent.stop)):
            reader = LogReader(layout, bound=extent.bound)
            found += [e for e in told(split_events(reader, split)) if e[0] != "end"]
        assert found == whole


@given(strategies.logs(min_frames=1), st.integers(1, 600), st.integers(1, 20))
def test_they_tile_the_log(log: strategies.Log, split_size: int, least: int) -> None:
    layout = layout_of(log.named_files(), file_size=log.file_size)
    extent = log_extent(layout, log.end, log.end)
    splits = plan_splits(layout, extent, split_size=split_size, min_splits=least)
    assert splits[0].start == extent.start == log.start
    assert splits[-1].stop == extent.stop
    for before, after in itertools.pairwise(splits):
        assert before.stop == after.start
    assert all(0 < split.length <= split_size for split in splits)
    if extent.stop - extent.start >= least**2:
        assert len(splits) >= least


@given(strategies.logs(min_frames=2), st.data())
def test_a_part_of_the_log(log: strategies.Log, data: st.DataObject) -> None:
    layout = layout_of(log.named_files(), file_size=log.file_size)
    extent = log_extent(layout, log.end, log.end)
    start = data.draw(st.integers(log.start, log.end))
    stop = data.draw(st.integers(start, log.end))
    size = data.draw(st.integers(1, 400))
    splits = plan_splits(layout, extent, start=start, stop=stop, split_size=size)
    found: list[Told] = []
    for split in splits:
        found += told(split_events(LogReader(layout, bound=extent.bound), split))
    frames = [event for event in found if event[0] == "frame"]
    assert frames == [
        ("frame", item.physical_offset, item.size)
        for item in log.frames
        if start <= item.physical_offset < stop
    ]
    assert not [event for event in found if event[0] == "damage"]


def test_a_gap_of_exabytes_is_not_cut_into_pieces() -> None:
    log = small_log(start=0)
    files = log.named_files()
    far = 2**61 - 2**61 % log.file_size
    layout = layout_of(files | {f"{COMMIT_LOG}/{far:020d}": b""}, file_size=log.file_size)
    # A wrong entry of a queue can name any end.
    extent = LogExtent(0, 2**62)
    splits = plan_splits(layout, extent, split_size=log.file_size)
    assert len(splits) <= len(files) + 3
    assert (splits[0].start, splits[-1].stop) == (0, 2**62)
    for before, after in itertools.pairwise(splits):
        assert before.stop == after.start
