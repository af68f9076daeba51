"""Retentions that run: the rest of the store stays whole, also if it is open."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.disk.name_guard import link_of
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import INTENT, LOADS
from logquarry.read.get_message import GetMessageStatus
from logquarry.repair.verification import verify_store
from logquarry.store.load.ledger import Intent, Ledger, LoadId
from logquarry.store.message_store import StoreWriter
from logquarry.store.retention.retain import RetentionService
from logquarry.store.retention.rules import DiskUse
from logquarry.testing.clock import FakeClock
from tests.helpers.failing_disk import FaultyDisk, StoppedDisk
from tests.helpers.files import bytes_of, leaves_nothing_open
from tests.helpers.retention_stores import END, FILE, check_cut, messages, put_all, retain
from tests.helpers.small_store import (
    NOW,
    config,
    facts,
    forget_start,
    held_by_a_broker,
    message_files,
)


# ------------------------------------------------------------------------------------- afterwards
@pytest.mark.parametrize("age", [0, 50_000, 200_000])
def test_what_stays_is_whole(store_root: Path, age: int) -> None:
    before = messages(store_root)
    plan = retain(store_root, older_than_ms=age, apply=True)
    check_cut(store_root, before, plan)
    assert not any((store_root / file.path).exists() for file in plan.files)
    again = retain(store_root, older_than_ms=age)
    assert not again.files
    # A queue whose messages have all expired continues at its end.
    with StoreWriter.start(store_root, config=config()) as store:
        result = store.put(lq.Message("early", b"late"))
        assert result.queue_offset == 10
        store.wait_dispatched()
        assert store.get("early", 0, 10).messages[0].body == b"late"
        assert store.get("early", 0, 3).status is not GetMessageStatus.FOUND


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_open", [False, True])
def test_deleted_files_take_no_more_space_on_the_disk(store_root: Path, is_open: bool) -> None:
    if not is_open:
        with leaves_nothing_open(store_root):
            assert retain(store_root, older_than_ms=100_000, apply=True).files
        return
    store = StoreWriter.start(store_root, config=config(), clock=FakeClock(END))
    with store, leaves_nothing_open(store_root / "consumequeue" / "early"):
        rules = lq.RetentionRules(older_than_ms=100_000)
        assert store._engine.retention.run(rules).queues


def test_a_crash_later_brings_nothing_back(store_root: Path) -> None:
    before = messages(store_root)
    plan = retain(store_root, older_than_ms=100_000, apply=True)
    (store_root / "abort").touch()
    lq.recover(store_root, apply=True, config=config())
    check_cut(store_root, before, plan)
    with StoreWriter.start(store_root, config=config()) as store:
        assert store.put(lq.Message("early", b"late")).queue_offset == 10


def test_a_second_name_brings_no_deleted_file_back(store_root: Path) -> None:
    before = messages(store_root)
    for path in (store_root / "commitlog").iterdir():
        os.link(path, link_of(path))
    plan = retain(store_root, keep_bytes=5 * FILE, apply=True)
    assert plan.log
    StoreWriter.start(store_root, config=config()).close()
    check_cut(store_root, before, plan)


@pytest.mark.parametrize("linked", [1, 4])
def test_files_that_a_broker_deleted_stay_deleted(store_root: Path, linked: int) -> None:
    """After a crash of the writer, a broker recovered the store, deleted files and shut down."""
    before = messages(store_root)
    paths = sorted((store_root / "commitlog").iterdir())
    os.link(paths[linked], link_of(paths[linked]))
    for path in paths[:5]:
        path.unlink()
    forget_start(store_root)
    plan = retain(store_root, keep_bytes=3 * FILE, apply=True)
    assert sorted((store_root / "commitlog").iterdir()) == paths[5:]
    assert not any(link_of(paths[0]).parent.iterdir())
    check_cut(store_root, before, plan)


def test_an_interrupt_anywhere(store_root: Path, tmp_path: Path) -> None:
    """The next retention has the same result; before it, the store counts as cleanly closed."""
    before = messages(store_root)
    disk = StoppedDisk()
    whole = tmp_path / "whole"
    shutil.copytree(store_root, whole)
    plan = retain(whole, older_than_ms=100_000, apply=True, disk=disk)

    def numbered(root: Path) -> dict[str, bytes]:
        return {name: data for name, data in bytes_of(root).items() if name[-1].isdigit()}

    left = numbered(whole)
    assert disk.counts["unlink"] == len(plan.files)
    for number in range(len(disk.order)):
        copy = tmp_path / "copy"
        shutil.copytree(store_root, copy)
        with pytest.raises(KeyboardInterrupt):
            retain(copy, older_than_ms=100_000, apply=True, disk=StoppedDisk(number))
        assert not lq.recover(copy, config=config()).is_needed
        after = messages(copy)
        assert after == [one for one in before if one[0] >= after[0][0]]
        retain(copy, older_than_ms=100_000, apply=True)
        assert numbered(copy) == left, f"call {number}, {disk.order[number]}"
        shutil.rmtree(copy)
    check_cut(whole, before, plan)


def test_a_disk_that_does_not_delete(store_root: Path) -> None:
    before = messages(store_root)
    disk = FaultyDisk()
    disk.failing["unlink"] = 5
    with pytest.raises(StoreUnavailable, match="commitlog"):
        retain(store_root, keep_bytes=0, apply=True, disk=disk)
    assert messages(store_root) == before


# --------------------------------------------------------------------------------------- refusals
def test_a_store_in_use_is_left_alone(store_root: Path) -> None:
    with StoreWriter.start(store_root, config=config()):
        before = message_files(store_root)
        plan = retain(store_root, older_than_ms=0)
        assert plan.refused is not None
        assert "this program" in plan.refused
        assert "open for writing already" in plan.refused
        with pytest.raises(StoreUnavailable, match="open for writing already"):
            retain(store_root, older_than_ms=0, apply=True)
        assert message_files(store_root) == before
    with held_by_a_broker(store_root):
        plan = retain(store_root, older_than_ms=0)
        assert plan.refused == "the store is open in another program: stop that program first"


def test_a_crashed_store_is_left_alone(store_root: Path) -> None:
    (store_root / "abort").touch()
    before = facts(store_root)
    assert retain(store_root, older_than_ms=0).refused is not None
    with pytest.raises(StoreUnavailable, match="recover it first"):
        retain(store_root, older_than_ms=0, apply=True)
    assert facts(store_root) == before


def test_a_load_that_died_is_left_alone(store_root: Path) -> None:
    Ledger(Disk(), store_root).begin(Intent(LoadId("job", 1), 100, LOADS, ()))
    with pytest.raises(StoreUnavailable, match="a load is unfinished"):
        retain(store_root, older_than_ms=0, apply=True)
    (store_root / LOADS / INTENT).write_text("{}")
    with pytest.raises(StoreUnavailable, match="load"):
        retain(store_root, older_than_ms=0, apply=True)


def test_where_there_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        retain(tmp_path / "none", older_than_ms=0, apply=True)
    assert not (tmp_path / "none").exists()
    with pytest.raises(UsageError, match="local"):
        lq.retain("s3://bucket/store", lq.RetentionRules(keep_bytes=0))
    (tmp_path / "empty" / "commitlog").mkdir(parents=True)
    assert not retain(tmp_path / "empty", older_than_ms=0, apply=True).files


# ----------------------------------------------------------------------------------- while it runs
def live(root: Path, clock: Callable[[], int], **settings: Any) -> StoreWriter:
    return StoreWriter.start(root, config=config(**settings), clock=clock)


def test_while_it_is_written(tmp_path: Path) -> None:
    root, clock = tmp_path / "store", FakeClock(NOW)
    with live(root, clock) as store:
        put_all(store, clock)
        rules = lq.RetentionRules(older_than_ms=100_000)
        held = store.get("t", 0, 0).messages
        bodies = [message.body for message in held]
        scanning = store.scan()
        first = next(scanning)
        before = [message.physical_offset for message in store.scan()]
        # Messages that are not on the disk yet stay.
        store.flush()
        plan = store.retain(rules)
        assert plan.log
        assert plan.index
        assert store.min_offset == 0
        assert store.retain(rules, apply=True).log == plan.log
        assert store.min_offset == plan.new_min_offset
        assert [message.body for message in held] == bodies
        assert first.body.startswith(b"0000")
        for _ in scanning:
            pass
        kept = [message.physical_offset for message in store.scan()]
        assert kept == [offset for offset in before if offset >= plan.new_min_offset]
        low, high = store.queue_offsets("t", 0)
        assert store.get("t", 0, 0).status is GetMessageStatus.OFFSET_TOO_SMALL
        assert store.get("t", 0, 0).next_offset == low
        assert store.get("t", 0, low).status is GetMessageStatus.FOUND
        put_all(store, clock, 50)
        assert store.queue_offsets("t", 0)[1] > high
        assert not any((root / file.path).exists() for file in plan.files)
    all_of_it = messages(root)
    assert [one[0] for one in all_of_it][: len(kept)] == kept
    report = verify_store(StoreLayout.open(root, config()))
    assert not report.has_damage, report.findings


def test_a_closed_store_deletes_nothing(tmp_path: Path) -> None:
    root, clock = tmp_path / "store", FakeClock(NOW)
    with live(root, clock) as store:
        put_all(store, clock)
    with pytest.raises(StoreUnavailable):
        store.retain(lq.RetentionRules(keep_bytes=0), apply=True)
    assert messages(root)[0][0] == 0


def test_a_load_that_is_going_on_stays(tmp_path: Path) -> None:
    """After a crash, the load's first message is searched for where the load began."""
    root, clock = tmp_path / "store", FakeClock(NOW)
    rules = lq.RetentionRules(keep_bytes=0)
    with live(root, clock) as store:
        put_all(store, clock)
        store.flush()
        ledger = Ledger(Disk(), root)
        ledger.begin(Intent(LoadId("job", 1), 3 * FILE + 100, LOADS, ()))
        assert store.retain(rules).new_min_offset == 3 * FILE
        ledger.end()
        assert store.retain(rules).new_min_offset > 3 * FILE


def test_looking_opens_no_queue(store_root: Path) -> None:
    """A broker has thousands of queues, and each file that is open for writes keeps a map."""
    with live(store_root, FakeClock(NOW)) as store:
        assert store.stats().state.retained["t"].messages > 100
        assert store.retain(lq.RetentionRules(keep_bytes=0)).queues
        assert not [files for files in store._engine.queues if files.open_files]
        before = store.stats().state.retained
        put_all(store, FakeClock(NOW), 30)
        after = store.stats().state.retained
        assert sum(one.messages for one in after.values()) == 30 + sum(
            one.messages for one in before.values()
        )


def service_of(store: StoreWriter) -> RetentionService | None:
    found = [one for one in store._engine._services if isinstance(one, RetentionService)]
    return found[0] if found else None


def test_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store deletes expired files by itself only with ``clean_expired_files``."""
    hour = datetime.fromtimestamp(END / 1_000, UTC).astimezone().hour
    settings: dict[str, Any] = {"file_reserved_time": 0, "delete_when": f"{hour:02d}"}
    root, clock = tmp_path / "store", FakeClock(NOW)
    with live(root, clock, **settings) as store:
        assert service_of(store) is None
        put_all(store, clock)
    settings |= {"clean_expired_files": True, "clean_resource_interval": 3_600_000}
    settings |= {"delete_commit_log_files_interval": 0, "delete_files_batch_max": 3}
    with live(root, clock, **settings) as store:
        service = service_of(store)
        assert service is not None
        service.run_once()
        assert store.min_offset == 3 * FILE
        service.run_once()
        assert store.min_offset == 6 * FILE
        # Only in this hour, on a disk that has room.
        monkeypatch.setattr("logquarry.store.retention.rules.disk_use", lambda _: DiskUse(1, 9))
        clock.advance(3_600_000)
        service.run_once()
        assert store.min_offset == 6 * FILE


def test_a_running_store_deletes_files_without_the_offsets_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the disk would fill up."""
    hour = datetime.fromtimestamp(END / 1_000, UTC).astimezone().hour
    settings: dict[str, Any] = {"file_reserved_time": 0, "delete_when": f"{hour:02d}"}
    settings |= {"clean_expired_files": True, "clean_resource_interval": 3_600_000}
    settings |= {"delete_commit_log_files_interval": 0, "delete_files_batch_max": 3}
    root, clock = tmp_path / "store", FakeClock(NOW)
    path, opened = root / "config/consumerOffset.json", os.open

    def refuse(at: Any, *more: Any, **options: Any) -> int:
        if str(at) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), at)
        return opened(at, *more, **options)

    with live(root, clock, **settings) as store:
        put_all(store, clock)
        store.flush()
        path.write_text('{"offsetTable": {"t@g": {"0": 3}}}')
        service = service_of(store)
        assert service is not None
        monkeypatch.setattr(os, "open", refuse)
        assert service.run_once()
        assert store.min_offset == 3 * FILE and str(path) not in caplog.text
        rules = lq.RetentionRules(keep_bytes=0, most_files=2)
        # A program can depend on the plan's list.
        with pytest.raises(StoreNotFound, match=f"{path}: cannot be read"):
            store.retain(rules)
        plan = store.retain(rules, apply=True)
        assert (store.min_offset, plan.unread) == (5 * FILE, ())
        assert f"{path}: cannot be read: Permission denied; the plan lists no" in caplog.text
        monkeypatch.undo()
        assert {one.group for one in store.retain(rules, apply=True).unread} == {"g"}


def test_an_hour_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hours"):
        live(tmp_path / "store", FakeClock(NOW), clean_expired_files=True, delete_when="25")


READER = """
import sys
import logquarry as lq

with lq.MessageStore.open(sys.argv[1], config=lq.StoreConfig()) as store:
    found = store.get("early", 0, 0)
    print(found.status.name, flush=True)
    sys.stdin.readline()
    # The bytes are still there, though no name leads to them; what is asked for anew is gone.
    print(b"|".join(message.body for message in found.messages).decode(), flush=True)
    store.refresh()
    print(store.get("early", 0, 0).status.name, store.min_offset, flush=True)
"""


def test_another_process_keeps_what_it_reads(store_root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(store_root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "FOUND\n"
        plan = retain(store_root, older_than_ms=0, apply=True)
        reader.stdin.write("\n")
        reader.stdin.flush()
        bodies = reader.stdout.readline().strip().split("|")
        assert [int(body[:4]) for body in bodies] == list(range(0, 20, 2))
        status, low = reader.stdout.readline().split()
        assert status != "FOUND"
        assert int(low) == plan.new_min_offset
    assert reader.returncode == 0


def test_views_of_a_deleted_file_stay_good(store_root: Path) -> None:
    """A local window is the map itself: the file's blocks stay while it is held."""
    layout = StoreLayout.open(store_root, config())
    view = layout.open_file(f"commitlog/{0:020d}")
    window = view.window(0, FILE)
    data = bytes(window)
    plan = retain(store_root, older_than_ms=0, apply=True)
    assert plan.log[0].base == 0
    assert not (store_root / "commitlog" / f"{0:020d}").exists()
    assert bytes(window) == data
    assert any(data)


def test_a_missing_middle_file_is_refused_before_anything_is_deleted(store_root: Path) -> None:
    missing = sorted((store_root / "commitlog").iterdir())[1]
    missing.unlink()
    before = facts(store_root)
    refused = retain(store_root, older_than_ms=0).refused
    assert refused is not None
    assert f"{missing.name}: the log has no file for {FILE} to {2 * FILE}" in refused
    with pytest.raises(StoreUnavailable, match="run verify and recover the store first"):
        retain(store_root, older_than_ms=0, apply=True)
    assert facts(store_root) == before
