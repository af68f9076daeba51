"""Which parts of a store expire, and what stays whole then."""

from __future__ import annotations

import json
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
from logquarry.disk.disk import LocalDisk
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import INTENT, LOADS
from logquarry.read.get_message import GetMessageStatus
from logquarry.repair.verify import verify_store
from logquarry.store.load.ledger import Intent, Ledger, LoadId
from logquarry.store.message_store import StoreWriter
from logquarry.store.retention import rules as rules_of_disk
from logquarry.store.retention.retain import RetentionService
from logquarry.store.retention.rules import DiskUse
from tests.helpers.failing_disk import FaultyDisk, StoppedDisk
from tests.helpers.small_store import NOW, config, facts, message_files

COUNT = 300
STEP = 1_000
END = NOW + COUNT * STEP
FILE = 16_384
Message = tuple[int, str, int, int, bytes]


class Clock:
    now = NOW

    def __call__(self) -> int:
        return self.now


def put_all(store: lq.StoreWriter, clock: Clock, count: int = COUNT) -> None:
    """Put a message each second, in two topics; those of a third topic end soon."""
    for number in range(count):
        clock.now += STEP
        topic = "early" if number < 20 else "t" if number % 3 else "u"
        body = b"%04d " % number * 60
        store.put(lq.Message(topic, body, queue_id=number % 2, keys=f"k{number}"))
    store.wait_dispatched()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "store"
    clock = Clock()
    with StoreWriter.start(root, config=config(), clock=clock) as store:
        put_all(store, clock)
    return root


@pytest.fixture
def store_root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


def messages(root: Path) -> list[Message]:
    with lq.MessageStore.open(root, config=config()) as store:
        return [
            (m.physical_offset, m.topic, m.queue_id, m.queue_offset, m.body) for m in store.scan()
        ]


def queued(root: Path) -> dict[tuple[str, int], list[bytes]]:
    """The messages that a consumer gets from each queue from its min offset on."""
    found: dict[tuple[str, int], list[bytes]] = {}
    with lq.MessageStore.open(root, config=config()) as store:
        for key in store.queues():
            offset, end = store.queue_offsets(*key)
            bodies = found[key] = []
            while offset < end:
                answer = store.get(*key, offset)
                bodies += [message.body for message in answer.messages]
                offset = max(answer.next_offset, offset + 1)
    return found


def retain(root: Path, *, now: int = END, apply: bool = False, **rules: Any) -> lq.RetentionPlan:
    return lq.retain(
        root, lq.RetentionRules(**rules), apply=apply, config=config(), clock=lambda: now
    )


def check_cut(root: Path, before: list[Message], plan: lq.RetentionPlan) -> None:
    """Check that every way to read gives all messages from the new begin on, without damage."""
    after = messages(root)
    assert after == [one for one in before if one[0] >= plan.new_min_offset]
    kept: dict[tuple[str, int], list[bytes]] = {}
    for _, topic, queue_id, _, body in after:
        kept.setdefault((topic, queue_id), []).append(body)
    assert {key: bodies for key, bodies in queued(root).items() if bodies} == kept
    report = verify_store(StoreLayout.open(root, config()))
    assert not report.has_damage, report.findings
    with lq.MessageStore.open(root, config=config()) as store:
        assert store.min_offset == plan.new_min_offset
        number = int(after[0][4][:4])
        topic = after[0][1]
        assert [m.body for m in store.query(topic, key=f"k{number}")] == [after[0][4]]
        assert not store.query("early", key="k3")


# ------------------------------------------------------------------------------------------ plans
def test_a_plan_changes_nothing(store_root: Path) -> None:
    before = facts(store_root)
    plan = retain(store_root, older_than_ms=0)
    assert plan.files
    assert facts(store_root) == before
    document = plan.to_json()
    assert json.loads(json.dumps(document)) == document
    assert len(document["log"]) == len(plan.log)


def test_by_age_of_the_last_message(store_root: Path) -> None:
    before = messages(store_root)
    last: dict[int, int] = {}
    with lq.MessageStore.open(store_root, config=config()) as store:
        for message in store.scan():
            last[message.physical_offset // FILE] = message.store_timestamp
    bases = sorted(last)
    for which in (0, 3, len(bases) - 2):
        limit = END - last[bases[which]]
        plan = retain(store_root, older_than_ms=limit)
        assert [file.base // FILE for file in plan.log] == bases[: which + 1]
        assert [file.last_timestamp for file in plan.log] == [last[b] for b in bases[: which + 1]]
        # A file that is a millisecond younger stays.
        assert len(retain(store_root, older_than_ms=limit + 1).log) == which
    # The last file never expires.
    plan = retain(store_root, older_than_ms=0, now=END + 10**12, apply=True)
    assert len(plan.log) == len(bases) - 1
    assert plan.stays_because == "it is the log's last file"
    check_cut(store_root, before, plan)


def test_modification_times_say_nothing(store_root: Path) -> None:
    rules: dict[str, Any] = {"older_than_ms": 100_000}
    plan = retain(store_root, **rules)
    for path in (store_root / "commitlog").iterdir():
        os.utime(path, (10**9, 10**9))
    assert retain(store_root, **rules).log == plan.log
    for path in (store_root / "commitlog").iterdir():
        os.utime(path, (END, END))
    assert retain(store_root, **rules).log == plan.log


def test_a_file_of_the_future_stays(store_root: Path) -> None:
    plan = retain(store_root, older_than_ms=0, now=NOW)
    assert not plan.log
    assert "in the future" in plan.stays_because


def test_bytes_that_stay(store_root: Path) -> None:
    end = retain(store_root, keep_bytes=0).max_offset
    for keep in (0, 1, FILE, 3 * FILE + 5, 10 * FILE, 1 << 40):
        plan = retain(store_root, keep_bytes=keep)
        # All files that can expire, and no others.
        assert plan.new_min_offset == max(0, min(end - keep, end - 1) // FILE * FILE)


def test_rules_that_are_given_agree(store_root: Path) -> None:
    by_age = retain(store_root, older_than_ms=150_000)
    by_bytes = retain(store_root, keep_bytes=2 * FILE)
    assert 0 < len(by_age.log) < len(by_bytes.log)
    both = retain(store_root, older_than_ms=150_000, keep_bytes=2 * FILE)
    assert [file.path for file in both.log] == [file.path for file in by_age.log]
    assert all("; " in file.reason for file in both.log)


def test_so_many_at_a_time(store_root: Path) -> None:
    before = messages(store_root)
    plan = retain(store_root, older_than_ms=0, most_files=2, apply=True)
    assert len(plan.log) == 2
    assert plan.stays_because == "one run deletes at most 2 log files"
    check_cut(store_root, before, plan)
    assert retain(store_root, older_than_ms=0, most_files=2).min_offset == plan.new_min_offset


def full_disk(monkeypatch: pytest.MonkeyPatch, used: int, usable: int) -> None:
    monkeypatch.setattr(rules_of_disk, "disk_use", lambda _: DiskUse(used, usable))


def test_as_long_as_the_disk_is_too_full(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = (store_root / "commitlog" / f"{0:020d}").stat().st_blocks * 512
    full_disk(monkeypatch, 80 * freed, 20 * freed)
    plan = retain(store_root, max_disk_ratio=0.775)
    # 80, 79 and 78 percent are too full, and 77 percent is not.
    assert len(plan.log) == 3
    assert plan.stays_because.endswith("the disk is 77.0% full; 77.5% are allowed")
    assert not retain(store_root, max_disk_ratio=0.8).log
    both = retain(store_root, max_disk_ratio=0.775, older_than_ms=250_000)
    assert len(both.log) == 1
    monkeypatch.setattr(rules_of_disk, "disk_use", lambda _: None)
    assert "is unknown" in retain(store_root, max_disk_ratio=0.775).stays_because


def test_nothing_goes_in_vain(
    store_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting a file that a backup has by another name frees no room."""
    full_disk(monkeypatch, 80, 20)
    os.link(store_root / "commitlog" / f"{0:020d}", tmp_path / "backup")
    plan = retain(store_root, max_disk_ratio=0.5)
    assert not plan.log
    assert "second name" in plan.stays_because
    assert retain(store_root, older_than_ms=0).log


def test_a_file_without_a_message_is_as_old_as_what_follows(store_root: Path) -> None:
    path = store_root / "commitlog" / f"{FILE:020d}"
    path.write_bytes(bytes(FILE))
    plan = retain(store_root, older_than_ms=END - NOW - 10_000)
    assert not plan.log
    plan = retain(store_root, older_than_ms=100_000)
    assert len(plan.log) > 3
    times = [file.last_timestamp for file in plan.log]
    assert None not in times
    assert times == sorted(times, key=lambda time: time or 0)


def test_a_file_of_another_size_stays(store_root: Path) -> None:
    path = store_root / "commitlog" / f"{FILE:020d}"
    path.write_bytes(path.read_bytes()[:-10])
    plan = retain(store_root, older_than_ms=0)
    assert len(plan.log) == 1
    assert "verify" in plan.stays_because


def test_a_queue_file_that_is_not_in_order_stays(store_root: Path) -> None:
    queue = store_root / "consumequeue" / "t" / "0"
    path = sorted(queue.iterdir())[0]
    whole = len(dict(retain(store_root, older_than_ms=0).queues)["t", 0])
    assert whole > 1
    data = bytearray(path.read_bytes())
    data[0:8] = (10**9).to_bytes(8, "big")
    path.write_bytes(data)
    assert ("t", 0) not in dict(retain(store_root, older_than_ms=0).queues)


def test_messages_and_readers_are_told(store_root: Path) -> None:
    folder = store_root / "config"
    folder.mkdir(exist_ok=True)
    table = {"t@slow": {"0": 5, "1": 10_000}, "u@new": {"0": 0}, "gone@g": {"0": 0}}
    (folder / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    (folder / "delayOffset.json").write_text("no json")
    before = messages(store_root)
    plan = retain(store_root, older_than_ms=100_000)
    went = [one for one in before if one[0] < plan.new_min_offset]
    for topic in ("early", "t", "u"):
        assert plan.messages[topic] == sum(one[1] == topic for one in went)
    unread = {(one.group, one.topic, one.queue_id): one.messages for one in plan.unread}
    assert unread == {
        ("slow", "t", 0): sum(one[1:3] == ("t", 0) and one[3] >= 5 for one in went),
        # The group reads all queues of a topic in which it has an offset.
        ("new", "u", 0): sum(one[1:3] == ("u", 0) for one in went),
        ("new", "u", 1): sum(one[1:3] == ("u", 1) for one in went),
    }


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


def test_a_crash_later_brings_nothing_back(store_root: Path) -> None:
    before = messages(store_root)
    plan = retain(store_root, older_than_ms=100_000, apply=True)
    (store_root / "abort").touch()
    lq.recover(store_root, apply=True, config=config())
    check_cut(store_root, before, plan)
    with StoreWriter.start(store_root, config=config()) as store:
        assert store.put(lq.Message("early", b"late")).queue_offset == 10


def test_an_interrupt_anywhere(store_root: Path, tmp_path: Path) -> None:
    """The next retention has the same result; before it, the store counts as cleanly closed."""
    rules = lq.RetentionRules(older_than_ms=100_000)
    before = messages(store_root)
    disk = StoppedDisk()
    whole = tmp_path / "whole"
    shutil.copytree(store_root, whole)
    plan = lq.retain(whole, rules, apply=True, config=config(), clock=lambda: END, disk=disk)
    left = {
        path.relative_to(whole): path.read_bytes()
        for path in whole.rglob("*[0-9]")
        if path.is_file()
    }
    assert disk.counts["unlink"] == len(plan.files)
    for number in range(len(disk.order)):
        copy = tmp_path / "copy"
        shutil.copytree(store_root, copy)
        with pytest.raises(KeyboardInterrupt):
            lq.retain(
                copy,
                rules,
                apply=True,
                config=config(),
                clock=lambda: END,
                disk=StoppedDisk(number),
            )
        assert not lq.recover(copy, config=config()).is_needed
        after = messages(copy)
        assert after == [one for one in before if one[0] >= after[0][0]]
        lq.retain(copy, rules, apply=True, config=config(), clock=lambda: END)
        found = {
            path.relative_to(copy): path.read_bytes()
            for path in copy.rglob("*[0-9]")
            if path.is_file()
        }
        assert found == left, f"call {number}, {disk.order[number]}"
        shutil.rmtree(copy)
    check_cut(whole, before, plan)


def test_a_disk_that_does_not_delete(store_root: Path) -> None:
    before = messages(store_root)
    disk = FaultyDisk()
    disk.failing["unlink"] = 5
    with pytest.raises(StoreUnavailable, match="commitlog"):
        lq.retain(
            store_root, lq.RetentionRules(keep_bytes=0), apply=True, config=config(), disk=disk
        )
    assert messages(store_root) == before


# --------------------------------------------------------------------------------------- refusals
def test_a_store_in_use_is_left_alone(store_root: Path) -> None:
    with StoreWriter.start(store_root, config=config()):
        before = message_files(store_root)
        plan = retain(store_root, older_than_ms=0)
        assert plan.refused is not None
        assert "open in another program" in plan.refused
        with pytest.raises(StoreUnavailable, match="open in another program"):
            retain(store_root, older_than_ms=0, apply=True)
        assert message_files(store_root) == before


def test_a_crashed_store_is_left_alone(store_root: Path) -> None:
    (store_root / "abort").touch()
    before = facts(store_root)
    assert retain(store_root, older_than_ms=0).refused is not None
    with pytest.raises(StoreUnavailable, match="recover it first"):
        retain(store_root, older_than_ms=0, apply=True)
    assert facts(store_root) == before


def test_a_load_that_died_is_left_alone(store_root: Path) -> None:
    Ledger(LocalDisk(), store_root).begin(Intent(LoadId("job", 1), 100, LOADS, ()))
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
    root, clock = tmp_path / "store", Clock()
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
    root, clock = tmp_path / "store", Clock()
    with live(root, clock) as store:
        put_all(store, clock)
    with pytest.raises(StoreUnavailable):
        store.retain(lq.RetentionRules(keep_bytes=0), apply=True)
    assert messages(root)[0][0] == 0


def test_a_load_that_is_going_on_stays(tmp_path: Path) -> None:
    """After a crash, the load's first message is searched for where the load began."""
    root, clock = tmp_path / "store", Clock()
    rules = lq.RetentionRules(keep_bytes=0)
    with live(root, clock) as store:
        put_all(store, clock)
        store.flush()
        ledger = Ledger(LocalDisk(), root)
        ledger.begin(Intent(LoadId("job", 1), 3 * FILE + 100, LOADS, ()))
        assert store.retain(rules).new_min_offset == 3 * FILE
        ledger.end()
        assert store.retain(rules).new_min_offset > 3 * FILE


def test_looking_opens_no_queue(store_root: Path) -> None:
    """A broker has thousands of queues, and each file that is open for writes keeps a map."""
    with live(store_root, Clock()) as store:
        assert store.stats().state.retained["t"].messages > 100
        assert store.retain(lq.RetentionRules(keep_bytes=0)).queues
        assert not [files for files in store._engine.queues if files.open_files]
        before = store.stats().state.retained
        put_all(store, Clock(), 30)
        after = store.stats().state.retained
        assert sum(one.messages for one in after.values()) == 30 + sum(
            one.messages for one in before.values()
        )


def service_of(store: StoreWriter) -> RetentionService | None:
    found = [one for one in store._engine._services if isinstance(one, RetentionService)]
    return found[0] if found else None


def test_it_is_asked_for(tmp_path: Path) -> None:
    """A store deletes expired files by itself only with ``clean_expired_files``."""
    hour = datetime.fromtimestamp(END / 1_000, UTC).astimezone().hour
    settings: dict[str, Any] = {"file_reserved_time": 0, "delete_when": f"{hour:02d}"}
    root, clock = tmp_path / "store", Clock()
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
        service._use = lambda _: DiskUse(1, 9)
        clock.now += 3_600_000
        service.run_once()
        assert store.min_offset == 6 * FILE


def test_an_hour_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hours"):
        live(tmp_path / "store", Clock(), clean_expired_files=True, delete_when="25")


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
