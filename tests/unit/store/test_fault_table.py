"""What RocketMQ mishandles and this store survives: one test a row (docs/reliability.md).

The rows about replication, timers or retention have their tests beside the tests of those parts.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, StoreUnavailable
from logquarry.format import checkpoint
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from tests.helpers.failing_disk import EIO, ENOSPC, FaultyDisk
from tests.helpers.files import flip
from tests.helpers.small_store import bodies, config, message_files, opened
from tests.helpers.waiting import eventually

COUNT = 60


def filled(root: Path, count: int = COUNT) -> list[bytes]:
    """Make a cleanly closed store of some files; returns the bodies."""
    with opened(root) as store:
        for number in range(count):
            body = b"%03d" % number * 200
            store.put(lq.Message("t", body, queue_id=number % 2, keys=f"k{number}"))
        return bodies(store)


def crashed(root: Path) -> None:
    """Make a closed store look as if it had not been closed."""
    (root / "abort").touch()


def without_mark(root: Path) -> None:
    """Remove the durable offset, which RocketMQ does not write."""
    shutil.rmtree(root / ".logquarry", ignore_errors=True)


def read_all(root: Path) -> list[bytes]:
    """Open the store for writes; returns what consumers get, queue by queue, and checks puts."""
    with opened(root) as store:
        assert store.wait_dispatched(timeout=60)
        found = []
        for topic, queue_id in store.queues():
            offset, stop = store.queue_offsets(topic, queue_id)[:2]
            while offset < stop:
                answer = store.get(topic, queue_id, offset)
                found += [message.body for message in answer.messages]
                offset = answer.next_offset
        result = store.put(lq.Message("u", b"goes on"))
        assert store.wait_dispatched(result.end_offset, timeout=60)
        assert [m.body for m in store.get("u", 0, result.queue_offset).messages] == [b"goes on"]
    with lq.MessageStore.open(root) as reader:
        assert reader.has_abort is False
    return sorted(found)


def log_file(root: Path, number: int) -> Path:
    return sorted((root / "commitlog").iterdir())[number]


def test_01_a_sync_that_fails(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH")
    acked = store.put(lq.Message("t", b"first"))
    disk.failing["fdatasync"] = EIO
    with pytest.raises(StoreUnavailable, match="sync failed"):
        store.put(lq.Message("t", b"second"))
    assert store._engine.log.flushed_offset == acked.end_offset
    disk.failing.clear()
    with pytest.raises(StoreUnavailable):
        store.put(lq.Message("t", b"third"))
    assert store.message_at(0).body == b"first"
    store.close()
    assert (tmp_path / "abort").exists()
    assert b"first" in read_all(tmp_path)


def test_02_files_that_are_closed_during_a_flush(tmp_path: Path) -> None:
    """A flush raises an error, and its progress stays."""
    store = opened(tmp_path, flush_interval_commit_log=10**6)
    store.put(lq.Message("t", b"x"))
    before = store._engine.log.flushed_offset
    files = store._engine.log
    for file in files.open_files:
        file.close()
    with pytest.raises(ValueError, match="descriptor"):
        files.flush(0)
    assert files.flushed_offset == before
    store.close()
    assert (tmp_path / "abort").exists()


def test_03_a_second_opener_of_a_live_store(tmp_path: Path) -> None:
    with opened(tmp_path, flush_interval_consume_queue=10**6) as store:
        store.put(lq.Message("t", b"x"))
        store.wait_dispatched()
        store.flush()
        before = message_files(tmp_path)
        with pytest.raises(StoreUnavailable, match="process"):
            opened(tmp_path)
        assert message_files(tmp_path) == before
        store.put(lq.Message("t", b"y"))
        assert bodies(store) == [b"x", b"y"]


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("is_closed", [True, False])
def test_04_rot_in_the_last_files(is_marked: bool, is_closed: bool, tmp_path: Path) -> None:
    had = filled(tmp_path)
    assert len(list((tmp_path / "commitlog").iterdir())) >= 3
    flip(log_file(tmp_path, -2), 95)
    if not is_marked:
        without_mark(tmp_path)
    if not is_closed:
        crashed(tmp_path)
    found = read_all(tmp_path)
    assert len(found) == len(had) - 1 and set(found) < set(had)


def test_05_rot_in_older_files(tmp_path: Path) -> None:
    had = filled(tmp_path, 4 * COUNT)
    assert len(list((tmp_path / "commitlog").iterdir())) > 4
    flip(log_file(tmp_path, 0), 95)
    with opened(tmp_path) as store:
        with pytest.raises(CorruptFrame, match="BODYCRC"):
            store.get("t", 0, 0)
        with pytest.raises(CorruptFrame, match="BODYCRC"):
            store.message_at(0)
        assert len(list(store.scan(on_damage="skip"))) == len(had) - 1
    assert verify_store(StoreLayout.open(tmp_path)).has_damage


def test_06_torn_properties(tmp_path: Path) -> None:
    """The CRC covers bodies only: invalid text elsewhere is reported, and the frame is kept."""
    with opened(tmp_path) as store:
        result = store.put(lq.Message("t", b"x", properties_string="a\x01bcd"))
    flip(log_file(tmp_path, 0), result.size - 1)
    data = bytearray(log_file(tmp_path, 0).read_bytes())
    data[result.size - 1] = 0
    log_file(tmp_path, 0).write_bytes(data)
    report = verify_store(StoreLayout.open(tmp_path))
    assert "suspect_text" in {finding.kind for finding in report.findings}
    assert read_all(tmp_path) == [b"x"]


def test_07_what_was_dropped_stays_away(tmp_path: Path) -> None:
    """A torn message and later bytes do not come back when the log has grown over them."""
    filled(tmp_path)
    without_mark(tmp_path)
    crashed(tmp_path)
    with lq.MessageStore.open(tmp_path) as reader:
        last = list(reader.scan())[-1]
    file = log_file(tmp_path, -1)
    position = last.physical_offset - int(file.name)
    flip(file, position + 95)
    found = read_all(tmp_path)
    assert last.body not in found and len(found) == COUNT - 1
    for _ in range(3):
        crashed(tmp_path)
        assert last.body not in read_all(tmp_path)


def test_08_a_lost_page_of_a_queue(tmp_path: Path) -> None:
    had = filled(tmp_path)
    queue = tmp_path / "consumequeue" / "t" / "0"
    name = sorted(queue.iterdir())[-1]
    data = bytearray(name.read_bytes())
    data[2 * UNIT_SIZE : 4 * UNIT_SIZE] = bytes(2 * UNIT_SIZE)
    name.write_bytes(data)
    assert read_all(tmp_path) == sorted(had)


def test_09_a_gap_in_a_queue(tmp_path: Path) -> None:
    had = filled(tmp_path)
    for path in sorted((tmp_path / "consumequeue" / "t" / "1").iterdir())[1:]:
        path.unlink()
    assert read_all(tmp_path) == sorted(had)
    report = verify_store(StoreLayout.open(tmp_path))
    assert not report.has_damage, report.findings


def test_10_the_checkpoint_says_what_was_synced(tmp_path: Path) -> None:
    with opened(tmp_path, flush_interval_consume_queue=10**6) as store:
        before = store.checkpoint
        result = store.put(lq.Message("t", b"x"))
        store.wait_dispatched()
        assert store.checkpoint == before, "dispatched, and not on the disk yet"
        store.flush()
        found = store.checkpoint
        assert found is not None and found.logics_timestamp == result.store_timestamp


def test_11_a_clock_that_was_set_back(tmp_path: Path) -> None:
    now = [1_800_000_000_000]
    disk = FaultyDisk()
    with StoreWriter.start(tmp_path, config=config(), clock=lambda: now[0], disk=disk) as store:
        for number in range(COUNT):
            now[0] += -3_600_000 if number == COUNT // 2 else 1
            store.put(lq.Message("t", b"%03d" % number * 20))
        had = bodies(store)
    crashed(tmp_path)
    without_mark(tmp_path)
    (tmp_path / "checkpoint").write_bytes(
        checkpoint.encode(checkpoint.Checkpoint(now[0], now[0], now[0]))
    )
    shutil.rmtree(tmp_path / "consumequeue")
    assert read_all(tmp_path) == sorted(had)


def test_12_abort_is_there_before_anything_else(tmp_path: Path) -> None:
    calls: list[str] = []

    class Recording(FaultyDisk):
        def _called(self, name: str) -> None:
            calls.append(name)
            if name == "allocate":
                assert (tmp_path / "abort").exists()

    with opened(tmp_path, Recording()) as store:
        store.put(lq.Message("t"))
    assert calls.index("sync_folder") < calls.index("allocate")
    assert not (tmp_path / "abort").exists()


def test_13_keys_from_before_the_crash(tmp_path: Path) -> None:
    filled(tmp_path)
    crashed(tmp_path)
    with opened(tmp_path) as store:
        for number in range(COUNT):
            assert len(store.query("t", f"k{number}", exact=True)) == 1, number


def test_14_a_circle_in_the_index(tmp_path: Path) -> None:
    filled(tmp_path, 5)
    path = sorted((tmp_path / "index").iterdir())[0]
    shape = config().index_shape
    assert shape is not None
    data = bytearray(path.read_bytes())
    for number in range(1, 6):
        data[shape.entry_position(number) + 16 :][:4] = struct.pack(">i", number)
        struct.pack_into(">i", data, shape.entry_position(number) + 16, number)
    path.write_bytes(data)
    with lq.MessageStore.open(tmp_path, config=config()) as reader:
        for number in range(5):
            assert len(reader.query("t", f"k{number}")) <= 64
        assert "index_chain" in {finding.kind for finding in verify_store(reader.layout).findings}


@pytest.mark.parametrize("is_closed", [True, False])
def test_15_an_empty_next_file(is_closed: bool, tmp_path: Path) -> None:
    had = filled(tmp_path)
    last = log_file(tmp_path, -1)
    size = last.stat().st_size
    (last.parent / f"{int(last.name) + size:020d}").touch()
    if not is_closed:
        crashed(tmp_path)
    assert read_all(tmp_path) == sorted(had)


def test_16_a_file_that_does_not_belong_there(tmp_path: Path) -> None:
    had = filled(tmp_path)
    for folder in ("commitlog", "index", "consumequeue", "consumequeue/t/0"):
        (tmp_path / folder / "notes.txt").write_text("mine")
    assert read_all(tmp_path) == sorted(had)
    assert (tmp_path / "commitlog" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("size", [0x7FFFFFFF, -1, 1 << 20])
def test_17_an_absurd_size(size: int, tmp_path: Path) -> None:
    had = filled(tmp_path)
    path = log_file(tmp_path, -2)
    data = bytearray(path.read_bytes())
    struct.pack_into(">i", data, 0, size)
    path.write_bytes(data)
    crashed(tmp_path)
    assert len(read_all(tmp_path)) == len(had) - 1


def succeeds(call: Callable[[], object]) -> object:
    """The result of a call; None if the store refuses it."""
    try:
        return call()
    except StoreUnavailable:
        return None


def test_18_a_full_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        store.put(lq.Message("t", b"first"))
        store.wait_dispatched()
        disk.failing["allocate"] = ENOSPC
        stored = 1
        with pytest.raises(StoreUnavailable, match=r"no room|could not be dispatched") as refused:
            for _ in range(1_000):
                store.put(lq.Message("t", bytes(1_000)))
                stored += 1
        assert refused.value.status in ("CREATE_MAPEDFILE_FAILED", "SERVICE_NOT_AVAILABLE")
        assert [m.body for m in store.get("t", 0).messages][:1] == [b"first"]
        assert store.message_at(0).body == b"first"
        disk.failing.clear()
        eventually(lambda: succeeds(lambda: store.put(lq.Message("t", b"last"))))
        # The dispatcher may still raise the error of the full disk.
        eventually(lambda: succeeds(lambda: store.wait_dispatched(timeout=60)))
        assert len(bodies(store)) == stored + 1 and bodies(store)[-1] == b"last"
    assert not (tmp_path / "abort").exists()


def test_19_a_field_that_makes_no_sense(tmp_path: Path) -> None:
    """A message with a senseless field is still a message, and so are the next messages."""
    with opened(tmp_path) as store:
        odd = lq.Message("SCHEDULE_TOPIC_XXXX", b"odd", properties_string="DELAY\x011")
        result = store.put(odd)
        store.put(lq.Message("t", b"next"))
        had = len(bodies(store))
    file = log_file(tmp_path, 0)
    data = file.read_bytes().replace(b"DELAY\x011", b"DELAY\x01x", 1)
    assert data != file.read_bytes()
    file.write_bytes(data)
    shutil.rmtree(tmp_path / "consumequeue")
    crashed(tmp_path)
    with opened(tmp_path) as store:
        assert len(bodies(store)) == had
        assert store.message_at(result.physical_offset).body == b"odd"
        assert [message.body for message in store.get("t", 0).messages] == [b"next"]


def test_rot_in_a_closed_store_that_has_lost_its_queues(tmp_path: Path) -> None:
    """Nothing shows where the log ends, so the messages after the rot are kept."""
    had = filled(tmp_path)
    flip(log_file(tmp_path, 0), 95)
    without_mark(tmp_path)
    for name in ("consumequeue", "index"):
        shutil.rmtree(tmp_path / name)
    assert len(read_all(tmp_path)) == len(had) - 1


def harm_mark(root: Path) -> None:
    (root / ".logquarry" / "durable").write_bytes(os.urandom(4096))


@pytest.mark.parametrize("harm", [harm_mark, without_mark], ids=["torn", "gone"])
def test_a_lost_durable_mark(harm: Callable[[Path], None], tmp_path: Path) -> None:
    had = filled(tmp_path)
    harm(tmp_path)
    assert read_all(tmp_path) == sorted(had)


@pytest.mark.parametrize("is_closed", [True, False])
def test_26_an_empty_last_queue_file(is_closed: bool, tmp_path: Path) -> None:
    had = filled(tmp_path)
    folder = tmp_path / "consumequeue" / "t" / "0"
    last = sorted(folder.iterdir())[-1]
    (folder / f"{int(last.name) + last.stat().st_size:020d}").touch()
    if not is_closed:
        crashed(tmp_path)
    assert read_all(tmp_path) == sorted(had)
