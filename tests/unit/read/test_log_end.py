"""The log's end by the queues, and after a bad frame in its last file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame
from logquarry.format import queue_entry, sys_flag
from logquarry.format.queue_entry import FILLER, QueueEntry
from logquarry.log.batches import message_runs
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Span
from logquarry.read.log_end import (
    DamageMap,
    LogFrontier,
    last_entries,
    log_bound,
    sound_bound,
)
from logquarry.read.queue import ConsumeQueue
from logquarry.read.selection import Selection, plan_read, read_in_order, read_part
from logquarry.repair.verification import verify
from tests.helpers.files import flip
from tests.helpers.small_store import config, opened
from tests.helpers.store_maker import StoreMaker


@pytest.fixture
def maker() -> StoreMaker:
    maker = StoreMaker(log_file_size=1000)
    for number in range(20):
        maker.put(["orders", "payments"][number % 2], number % 3, body=bytes(50))
    return maker


def test_the_furthest_message_counts(maker: StoreMaker, tmp_path: Path) -> None:
    layout = StoreLayout.open(maker.write(tmp_path))
    last = maker.frames[-1]
    assert log_bound(layout) == last.physical_offset + last.size
    entries = last_entries(layout, ConsumeQueue.all_of(layout))
    assert len(entries) == 6
    ends = [entry.physical_offset + entry.size for entry in entries]
    assert ends == sorted(ends, reverse=True)


def test_after_a_crash_damage_after_the_durable_offset_ends_every_read(tmp_path: Path) -> None:
    """A user put back older files of `.logquarry/`: the durable offset is that of 3 messages."""
    root, kept, places = tmp_path / "store", tmp_path / "kept", [0]
    for _ in range(2):
        with opened(root) as store:
            places = [store.put(lq.Message("t", b"x" * 900)).physical_offset for _ in range(3)]
        if not kept.exists():
            shutil.copytree(root, kept)
    for name in (".logquarry/durable", "checkpoint"):
        shutil.copy(kept / name, root / name)
    (root / "abort").touch()
    flip(root / "commitlog" / f"{0:020d}", places[0] + 500)
    layout = StoreLayout.open(root, config())
    assert layout.durable_end == places[0]
    with lq.MessageStore.open(root, config=config()) as store:
        assert store.max_offset == places[0]
        assert len(list(store.scan(on_damage="skip"))) == 3
    assert "stale_frames" in {finding.kind for finding in verify(root, config=config()).findings}


def test_nothing_bounds_the_log(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    (tmp_path / "abort").touch()
    assert log_bound(StoreLayout.open(tmp_path)) is None
    assert sound_bound(StoreLayout.open(tmp_path), None) is None
    (tmp_path / "abort").unlink()
    for path in (tmp_path / "consumequeue").rglob("0*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    assert log_bound(StoreLayout.open(tmp_path)) is None


@pytest.mark.parametrize("past", [0, 1, 900])
def test_a_read_that_begins_in_the_lost_end_reports_it(
    maker: StoreMaker, tmp_path: Path, past: int
) -> None:
    maker.write(tmp_path)
    for path in sorted((tmp_path / "commitlog").iterdir())[-2:]:
        path.unlink()
    layout = StoreLayout.open(tmp_path)
    end = layout.commit_log.end
    bound = log_bound(layout)
    assert bound is not None and bound > end
    plan = plan_read(layout, Selection(start_offset=end + past))
    for events in (read_in_order(layout, plan), *(read_part(layout, plan, p) for p in plan.parts)):
        with pytest.raises(CorruptFrame, match="missing_file"):
            list(message_runs(events, "default"))


def test_units_that_cannot_be_meant(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    expected = log_bound(StoreLayout.open(tmp_path))
    end = StoreLayout.open(tmp_path).commit_log.end
    path = tmp_path
    for number, entry in enumerate(
        [FILLER, QueueEntry(5, 0x7FFFFFFF, 1), QueueEntry(end, 1001, 0)]
    ):
        path = tmp_path / f"consumequeue/strange/{number}/{0:020d}"
        path.parent.mkdir(parents=True)
        path.write_bytes(queue_entry.encode(entry))
    assert log_bound(StoreLayout.open(tmp_path)) == expected
    # The bytes of one file may be lost.
    path.write_bytes(queue_entry.encode(QueueEntry(end, 1000, 0)))
    assert log_bound(StoreLayout.open(tmp_path)) == end + 1000


def test_a_bad_frame_in_the_last_file_is_the_end(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    layout = StoreLayout.open(tmp_path)
    bound = log_bound(layout)
    assert sound_bound(layout, bound) == bound
    last_base = layout.commit_log.files[-1].base
    in_last = [frame for frame in maker.frames if frame.physical_offset >= last_base]
    harmed = in_last[len(in_last) // 2].physical_offset
    _flip(tmp_path, harmed + 100)
    assert sound_bound(StoreLayout.open(tmp_path), bound) == harmed


def test_a_bad_frame_in_an_earlier_file_is_damage(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    layout = StoreLayout.open(tmp_path)
    bound = log_bound(layout)
    _flip(tmp_path, 100)
    assert sound_bound(StoreLayout.open(tmp_path), bound) == bound
    # A file that was only made ahead is not the last file.
    (tmp_path / f"commitlog/{layout.commit_log.end:020d}").write_bytes(bytes(1000))
    assert sound_bound(StoreLayout.open(tmp_path), bound) == bound


def _flip(root: Path, offset: int) -> None:
    flip(root / f"commitlog/{offset // 1000 * 1000:020d}", offset % 1000)


@pytest.mark.parametrize("is_crashed", [False, True])
@pytest.mark.parametrize("has_durable", [False, True])
def test_the_end_of_a_log_without_its_last_files_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, has_durable: bool, is_crashed: bool
) -> None:
    root = tmp_path / "store"
    config = lq.StoreConfig(mapped_file_size_commit_log=16_384)
    end = 0
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for _ in range(60):
            end = store.put(lq.Message("t", bytes(500))).physical_offset
    if not has_durable:
        shutil.rmtree(root / ".logquarry")
    if is_crashed:
        (root / "abort").touch()
    max((root / "commitlog").iterdir()).unlink()
    layout = StoreLayout.open(root, config)
    assert LogFrontier().end_of(layout) > end >= layout.commit_log.end
    frontier = LogFrontier(skips_damage=True)
    found = {frontier.end_of(StoreLayout.open(root, config)) for _ in range(3)}
    assert len(found) == 1 and found.pop() <= layout.commit_log.end
    [warning] = [
        one.message for one in caplog.records if "bytes of the log are lost" in one.message
    ]
    assert f"logquarry verify {root}" in warning


def test_two_threads_may_ask_for_damage_at_once() -> None:
    spans = [Span(100, 10), Span(200, 10), Span(300, 10)]

    class Interrupted(Span):
        """A span whose offset another call reads, too, before this call has read it."""

        def __getattribute__(self, name: str) -> Any:
            if name == "offset" and (other := next(others, None)):
                assert 305 in other
            return super().__getattribute__(name)

    spans[1] = Interrupted(200, 10)
    damage = DamageMap(spans)
    others: Iterator[DamageMap] = iter([damage])
    assert 305 in damage and 205 in damage
    assert not any(offset in damage for offset in (0, 110, 250, 310, 10_000))
    spans.append(Span(400, 1))
    assert 400 in damage and 401 not in damage


def test_a_scan_goes_on_to_a_message_without_an_entry(tmp_path: Path, maker: StoreMaker) -> None:
    """Half messages have no queue entries. Scans with and without a start time agree."""
    half = maker.put("orders", 0, body=b"half", sys_flag=sys_flag.TRANSACTION_PREPARED)
    root = maker.write(tmp_path)
    flip(root / "commitlog" / f"{0:020d}", maker.frames[1].physical_offset + 90)
    with lq.MessageStore.open(root) as store:
        offsets = [message.physical_offset for message in store.scan(on_damage="skip")]
        since = [m.physical_offset for m in store.scan(since=1, on_damage="skip")]
    others = [f.physical_offset for f in maker.frames]
    del others[1]
    layout = StoreLayout.open(root)
    plan = plan_read(layout, Selection(), split_size=500, skip_damage=True)
    runs = [
        run
        for part in plan.parts
        for run in message_runs(read_part(layout, plan, part), "skip", None)
    ]
    by_parts = [run.window.base + int(row) for run in runs for row in run.rows[:, 0]]
    assert offsets == since == by_parts == others
    assert others[-1] == half.physical_offset
