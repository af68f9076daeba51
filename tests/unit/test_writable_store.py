"""An open store takes messages, gives them back, and is found again as it was closed."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import (
    MessageRejected,
    StoreError,
    StoreNotFound,
    StoreUnavailable,
    UsageError,
)
from logquarry.files.layout import StoreLayout
from logquarry.format import sys_flag
from logquarry.scan.walk import DamagedSpan, LogReader, Run
from logquarry.store.arrivals import MessageArrival
from logquarry.store.get_message import GetMessageStatus
from logquarry.store.put_result import PutStatus
from logquarry.store.writable_store import WritableStore
from logquarry.verify import verify_store
from tests.faulty_disk import EIO, ENOSPC, FaultyDisk

NOW = 1_700_000_000_000
SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 16_384,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 50,
    "max_index_num": 200,
}


def config(**settings: Any) -> lq.StoreConfig:
    return lq.StoreConfig(**(SMALL | settings))


def opened(root: Path, disk: FaultyDisk | None = None, **settings: Any) -> WritableStore:
    return WritableStore.start(root, config=config(**settings), disk=disk)


@pytest.fixture(name="store")
def small_store(tmp_path: Path) -> Iterator[WritableStore]:
    with opened(tmp_path / "store") as opened_store:
        yield opened_store


def facts(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def bodies(store: lq.MessageStore) -> list[bytes]:
    return [message.body for message in store.scan()]


# -------------------------------------------------------------------------------- put and read
def test_what_is_put_can_be_had(store: WritableStore) -> None:
    results = [
        store.put(lq.Message("t", b"%d" % number, queue_id=number % 2, keys=f"k{number}", tags="a"))
        for number in range(500)
    ]
    assert all(result.ok and result.status is PutStatus.PUT_OK for result in results)
    assert store.max_offset == results[-1].end_offset
    assert store.wait_dispatched(results[-1].end_offset, timeout=20)
    assert store.queues() == (("t", 0), ("t", 1)) and store.topics == ("t",)
    assert store.queue_offsets("t", 1) == (0, 250)
    found: list[bytes] = []
    offset = 0
    while (answer := store.get("t", 1, offset)).status is GetMessageStatus.FOUND:
        found += [message.body for message in answer.messages]
        offset = answer.next_offset
    assert answer.status is GetMessageStatus.OFFSET_OVERFLOW_ONE
    assert found == [b"%d" % number for number in range(1, 500, 2)]
    assert bodies(store) == [b"%d" % number for number in range(500)]
    assert [m.body for m in store.scan(topic="t", queue_id=0)][:2] == [b"0", b"2"]
    assert store.to_arrow(columns=["keys"]).read_all()["keys"][499].as_py() == "k499"
    assert [m.body for m in store.query("t", "k321", exact=True)] == [b"321"]
    assert store.message_by_id(results[77].message_id).body == b"77"
    assert store.message_at(results[78].physical_offset).queue_offset == 39
    time_of_3 = results[3].store_timestamp
    assert store.offset_by_time("t", 1, time_of_3 - 1_000_000) == 0
    assert store.is_live and store.has_abort


def test_what_is_not_there(store: WritableStore) -> None:
    assert store.get("t", 0).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    assert store.queue("t", 0) is None and store.queues() == ()
    assert store.get("../..", 0).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    assert (store.min_offset, store.max_offset) == (0, 0)
    assert bodies(store) == [] and store.query("t", "k") == []
    assert store.wait_dispatched(timeout=5)
    with pytest.raises(lq.errors.MessageNotFound):
        store.message_at(0)
    result = store.put(lq.Message("t", b"x"))
    with pytest.raises(lq.errors.MessageNotFound, match="within the one at 0"):
        store.message_at(1)
    with pytest.raises(lq.errors.MessageNotFound):
        store.message_at(result.end_offset)


def test_a_get_right_after_the_dispatch(store: WritableStore) -> None:
    for number in range(50):
        result = store.put(lq.Message("t", b"%d" % number))
        assert store.wait_dispatched(result.end_offset, timeout=20)
        answer = store.get("t", 0, result.queue_offset)
        assert [message.body for message in answer.messages] == [b"%d" % number]


def test_batches(store: WritableStore) -> None:
    result = store.put_batch([lq.Message("t", b"a"), lq.Message("t", b"b", keys="k")])
    assert result.message_count == 2 and len(result.message_ids) == 2
    store.wait_dispatched()
    assert [m.body for m in store.get("t", 0).messages] == [b"a", b"b"]
    assert store.stats().topics["t"].messages == 2
    assert store.put_batch(wire=b"", message=lq.Message("t")).message_count == 0
    with pytest.raises(UsageError):
        store.put_batch([lq.Message("t"), lq.Message("u")])
    with pytest.raises(TypeError):
        store.put_batch()


def test_a_message_that_is_rejected(store: WritableStore) -> None:
    with pytest.raises(MessageRejected) as rejected:
        store.put(lq.Message("../x"))
    assert rejected.value.status == "MESSAGE_ILLEGAL"
    future = store.put_async(lq.Message("t", b"x" * 20_000))
    assert isinstance(future.exception(), MessageRejected)
    with pytest.raises(MessageRejected):
        store.put_batch([lq.Message("t", delay_level=3)])
    assert store.stats().put_failed == 3
    assert bodies(store) == []


def test_messages_that_are_in_no_queue(store: WritableStore) -> None:
    store.put(lq.Message("t", b"half", sys_flag=sys_flag.TRANSACTION_PREPARED, keys="k"))
    assert store.wait_dispatched(timeout=20)
    assert store.queues() == ()
    assert [m.body for m in store.query("t", "k")] == [b"half"]


def test_without_an_index(tmp_path: Path) -> None:
    with opened(tmp_path, message_index_enable=False) as store:
        store.put(lq.Message("t", b"x", keys="k"))
        assert [m.body for m in store.query("t", "k")] == [b"x"]
    assert list((tmp_path / "index").iterdir()) == []


def test_listeners(store: WritableStore) -> None:
    arrived: list[MessageArrival] = []

    def broken(arrival: MessageArrival) -> None:
        raise ValueError(arrival)

    store.add_arrival_listener(broken)
    store.add_arrival_listener(arrived.append)
    store.add_arrival_listener(arrived.append)
    result = store.put(lq.Message("t", queue_id=2))
    store.put_batch([lq.Message("t"), lq.Message("t")])
    store.wait_dispatched(timeout=20)
    assert MessageArrival("t", 2, 1, 1, result.store_timestamp) in arrived
    assert sum(arrival.messages for arrival in arrived) == 3
    assert max(a.next_offset for a in arrived if a.queue_id == 0) == 2
    store.remove_arrival_listener(arrived.append)
    store.remove_arrival_listener(print)
    store.put(lq.Message("t"))
    store.wait_dispatched(timeout=20)
    assert sum(arrival.messages for arrival in arrived) == 3


def test_a_listener_cannot_close_the_store(store: WritableStore) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def closing(arrival: MessageArrival) -> None:
        try:
            store.close()
        except UsageError as error:
            errors.append(error)
        done.set()

    store.add_arrival_listener(closing)
    store.put(lq.Message("t"))
    assert done.wait(20) and len(errors) == 1
    assert store.put(lq.Message("t")).ok


# -------------------------------------------------------------------------------------- flush
def test_synchronous_flush(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH") as store:
        result = store.put(lq.Message("t"))
        assert store._engine.log.flushed_offset >= result.end_offset
        disk.gate.clear()
        future = store.put_async(lq.Message("t"))
        assert not future.done() and not future.cancel()
        assert store.put(lq.Message("t", wait_store_ok=False)).status is PutStatus.PUT_OK
        disk.gate.set()
        assert future.result(20).status is PutStatus.PUT_OK
        assert {f.result(20).ok for f in [store.put_async(lq.Message("t")) for _ in range(64)]} == {
            True
        }
    assert store.stats().put_messages == 67


def test_a_flush_that_takes_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH", sync_flush_timeout=700) as store:
        store.put(lq.Message("t"))
        disk.gate.clear()
        future = store.put_async(lq.Message("t"))
        result = store.put(lq.Message("t", b"late"))
        assert result.ok and result.status is PutStatus.FLUSH_DISK_TIMEOUT
        assert future.result(20).status is PutStatus.FLUSH_DISK_TIMEOUT
        disk.gate.set()
    assert "a put took" in caplog.text and "4 bytes of body" in caplog.text
    assert store.stats().put_times["500ms-1s"] + store.stats().put_times["1-2s"] == 2
    assert store.stats().put_longest_ms > 500
    assert "a put waited" in caplog.text


def test_a_failed_sync_poisons_the_store(tmp_path: Path) -> None:
    disk = FaultyDisk()
    store = opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH")
    store.put(lq.Message("t", b"first"))
    store.wait_dispatched()
    disk.failing["fdatasync"] = EIO
    with pytest.raises(StoreUnavailable, match="sync failed"):
        store.put(lq.Message("t"))
    assert isinstance(store.put_async(lq.Message("t")).exception(), StoreUnavailable)
    with pytest.raises(StoreUnavailable):
        store.flush()
    assert [m.body for m in store.get("t", 0).messages][:1] == [b"first"]
    disk.failing.clear()
    store.close()
    assert (tmp_path / "abort").exists(), "nobody knows what is on the disk"
    with pytest.raises(StoreUnavailable, match="not closed in order"):
        opened(tmp_path)
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader)[0] == b"first"


def test_flush_on_demand(tmp_path: Path) -> None:
    with opened(tmp_path, flush_interval_commit_log=10**6, flush_interval_consume_queue=10**6) as s:
        result = s.put(lq.Message("t", keys="k"))
        s.wait_dispatched()
        assert s.stats().flush_behind == result.size
        assert s.flush() == result.end_offset
        assert s.stats().flush_behind == 0
        times = s.checkpoint
        assert times is not None
        assert times.physic_timestamp == times.logics_timestamp == result.store_timestamp


def test_the_transient_pool(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"transient_store_pool_enable": True, "transient_store_pool_size": 2}
    with opened(tmp_path, **settings) as store:
        for number in range(300):
            store.put(lq.Message("t", b"%d" % number + bytes(100)))
        assert store.wait_dispatched(timeout=20)
        assert len(bodies(store)) == 300
        assert store.get("t", 0, 299).messages[0].body.startswith(b"299")
        store.put(lq.Message("t", b"last"))
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader)[-1] == b"last"
        assert not verify_store(reader.layout).has_damage


@pytest.mark.parametrize(
    "settings",
    [
        {"warm_mapped_file_enable": True},
        {"transient_store_pool_enable": True, "fast_fail_if_no_buffer_in_store_pool": True},
        {"flush_commit_log_timed": False},
        {"broker_role": "SYNC_MASTER", "flush_disk_type": "SYNC_FLUSH"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    acked = []
    with opened(tmp_path, **settings) as store:
        for number in range(200):
            try:
                store.put(lq.Message("t", body := b"%d" % number + bytes(200)))
            except StoreUnavailable as error:
                assert error.status == "CREATE_MAPEDFILE_FAILED"
                time.sleep(0.01)
                continue
            acked.append(body)
        assert store.wait_dispatched(timeout=20)
        assert store.queue_offsets("t", 0).max == len(acked) > 0
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == acked


def test_a_full_index_file_is_in_the_checkpoint(tmp_path: Path) -> None:
    with opened(tmp_path, flush_consume_queue_thorough_interval=1) as store:
        for number in range(450):
            store.put(lq.Message("t", keys=f"k{number}"))
        store.wait_dispatched()
        store.flush()
        times = store.checkpoint
        assert times is not None and times.index_timestamp > 0
        assert len(list((tmp_path / "index").iterdir())) == 3
        assert store.query("t", "k3") and store.query("t", "k449")
        guarded = list((tmp_path / ".logquarry/names/index").iterdir())
        assert [path.name for path in guarded] == [max(os.listdir(tmp_path / "index"))]  # noqa: PTH208


# ------------------------------------------------------------------------------ open and close
def test_opened_again(tmp_path: Path) -> None:
    expected = []
    for round_ in range(4):
        with opened(tmp_path) as store:
            for number in range(37 + round_):
                expected.append(body := b"%d %d" % (round_, number))
                store.put(lq.Message("t", body, queue_id=number % 3, keys="k"))
            assert bodies(store) == expected
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == expected
        assert sum(reader.queue_offsets("t", q).max for q in range(3)) == len(expected)
        assert not reader.has_abort and not reader.is_live
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings
        # None of them is indexed twice.
        assert len(reader.query("t", "k", max_count=64)) == 64
        counts = Counter(m.physical_offset for m in reader.query("t", "k", max_count=64))
        assert set(counts.values()) == {1}


def test_sizes_are_those_of_the_files(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(lq.Message("t", keys="k"))
    with lq.MessageStore.open(tmp_path, mode="rw") as store:
        assert store.config == config()
        store.put(lq.Message("t"))
    with pytest.raises(lq.errors.CorruptStore):
        opened(tmp_path, mapped_file_size_commit_log=8192)
    assert not (tmp_path / "abort").exists(), "it can be opened again"
    with opened(tmp_path) as store:
        assert len(bodies(store)) == 2


def test_an_empty_store_is_opened_again(tmp_path: Path) -> None:
    for _ in range(3):
        opened(tmp_path / "a" / "b").close()
    with lq.MessageStore.open(tmp_path / "a" / "b") as reader:
        assert bodies(reader) == []


def test_a_full_file_at_the_end(tmp_path: Path) -> None:
    """The log ends exactly where its last file does."""
    with opened(tmp_path) as store:
        while store.max_offset < 16_384:
            store.put(lq.Message("t", bytes(1_000)))
    (tmp_path / "commitlog" / f"{16_384:020d}").unlink()
    shutil.rmtree(tmp_path / "consumequeue")
    with opened(tmp_path) as store:
        assert store.put(lq.Message("t")).physical_offset == 16_384


def test_a_folder_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("private")
    with pytest.raises(StoreNotFound, match=r"diary\.txt"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]
    with pytest.raises(StoreNotFound, match="not a folder"):
        opened(tmp_path / "diary.txt")
    with pytest.raises(UsageError, match="local"):
        lq.MessageStore.open("s3://bucket/store", mode="rw")


def test_queues_are_made_from_the_log(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(100):
            store.put(lq.Message("t", keys=f"k{number}"))
    shutil.rmtree(tmp_path / "consumequeue")
    shutil.rmtree(tmp_path / "index")
    with opened(tmp_path) as store:
        assert store.queue_offsets("t", 0) == (0, 100)
        assert store.put(lq.Message("t")).queue_offset == 100
        assert len(store.query("t", "k7")) == 1


def test_a_log_that_ends_before_its_queues(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        results = [store.put(lq.Message("t", b"x" * 50)) for _ in range(20)]
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[results[12].physical_offset + 90] ^= 1
    data[results[19].physical_offset + 90] ^= 1
    log.write_bytes(data)
    before = facts(tmp_path)
    with pytest.raises(StoreUnavailable, match="sound only up to"):
        opened(tmp_path)
    after = facts(tmp_path)
    assert after == before, "nothing was cut"


def test_messages_behind_the_end(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first = store.put(lq.Message("t", b"x" * 50))
        half = [
            store.put(lq.Message("t", b"half", sys_flag=sys_flag.TRANSACTION_PREPARED))
            for _ in range(2)
        ]
    log = tmp_path / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    data[half[0].physical_offset + 90] ^= 1
    log.write_bytes(data)
    before = facts(tmp_path)
    with pytest.raises(StoreUnavailable, match="there are messages from"):
        opened(tmp_path)
    assert facts(tmp_path) == before
    # Without a message behind it, it is what some recovery left.
    data[half[1].physical_offset :] = bytes(len(data) - half[1].physical_offset)
    log.write_bytes(data)
    shutil.rmtree(tmp_path / "index")
    with opened(tmp_path) as store:
        assert store.max_offset == first.end_offset
        assert bytes(log.read_bytes()[first.end_offset :]).strip(b"\0") == b""


def test_closed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(lq.Message("t"))
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: store.put(lq.Message("t")),
        lambda: store.put_batch([lq.Message("t")]),
        lambda: store.put_async(lq.Message("t")).result(),
        lambda: store.append_data(0, b""),
        store.flush,
        store.wait_dispatched,
        lambda: store.get("t", 0),
        lambda: store.query("t", "k"),
        lambda: store.max_offset,
        store.scan,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="closed") as refused:
            call()
        assert refused.value.status == "SERVICE_NOT_AVAILABLE"
    assert store.stats().put_messages == 1


def test_open_for_reading(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with lq.MessageStore.open(tmp_path) as reader:
        for call in (
            lambda: reader.put(lq.Message("t")),
            lambda: reader.put_async(lq.Message("t")),
            lambda: reader.put_batch([]),
            lambda: reader.append_data(0, b""),
            reader.flush,
            reader.wait_dispatched,
            reader.stats,
            lambda: reader.add_arrival_listener(print),
            lambda: reader.remove_arrival_listener(print),
        ):
            with pytest.raises(StoreUnavailable, match="for reading") as refused:
                call()
            assert refused.value.status == "SERVICE_NOT_AVAILABLE"


def test_a_slave(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        for number in range(100):
            master.put(lq.Message("t", b"%d" % number, keys=f"k{number}"))
        log = b"".join(
            (tmp_path / f"master/commitlog/{base:020d}").read_bytes()
            for base in range(0, 16_384, 16_384)
        )[: master.max_offset]
    with opened(tmp_path / "slave", broker_role="SLAVE") as slave:
        with pytest.raises(StoreUnavailable, match="slave") as refused:
            slave.put(lq.Message("t"))
        assert refused.value.status == "SERVICE_NOT_AVAILABLE"
        for at in range(0, len(log), 1_000):
            assert slave.append_data(at, log[at : at + 1_000])
        assert not slave.append_data(5, b"no")
        assert slave.wait_dispatched(timeout=20)
        assert slave.get("t", 0, 99).messages[0].body == b"99"
    # It goes on as a master.
    with opened(tmp_path / "slave") as store:
        assert store.put(lq.Message("t")).queue_offset == 100


def test_own_messages_behind_those_of_a_master(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        ends = [master.put(lq.Message("t", b"%d" % number)).end_offset for number in range(10)]
        log = (tmp_path / f"master/commitlog/{0:020d}").read_bytes()
    with opened(tmp_path / "copy") as store:
        assert store.append_data(0, log[: ends[8] + 5])
        with pytest.raises(StoreUnavailable, match="within a message") as refused:
            store.put(lq.Message("t"))
        assert refused.value.status == "SERVICE_NOT_AVAILABLE"
        assert store.append_data(ends[8] + 5, log[ends[8] + 5 : ends[9]])
        assert store.put(lq.Message("t")).queue_offset == 10
        assert store.append_data(store.max_offset, log[:5])
    with opened(tmp_path / "copy") as store:
        assert len(bodies(store)) == 11, "the beginning of a message is no message"


# ------------------------------------------------------------------------------------- others
def test_a_second_opener_is_refused_before_it_reads(tmp_path: Path) -> None:
    # Only what the opener does is to be seen, not the flushes of the store itself.
    with opened(tmp_path, flush_interval_consume_queue=10**6) as store:
        store.put(lq.Message("t", keys="k"))
        store.wait_dispatched()
        store.flush()
        before = facts(tmp_path)
        with pytest.raises(StoreUnavailable, match=f"process {os.getpid()}"):
            lq.MessageStore.open(tmp_path, mode="rw")
        done = run(
            """
            import sys, logquarry as lq
            try:
                lq.MessageStore.open(sys.argv[1], mode="rw")
            except lq.errors.StoreUnavailable as error:
                print(error)
            """,
            tmp_path,
        )
        assert f"process {os.getpid()}" in done.stdout, done.stderr
        assert facts(tmp_path) == before
        assert store.put(lq.Message("t")).queue_offset == 1


def test_the_clock_gives_store_times(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path, mode="rw", config=config(), clock=lambda: NOW) as store:
        assert store.put(lq.Message("t")).store_timestamp == NOW
        assert store.message_at(0).born_timestamp == NOW
        assert store.broker == tmp_path.name


def test_a_full_disk(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        store.put(lq.Message("t", b"first"))
        store.wait_dispatched()
        disk.failing["allocate"] = ENOSPC
        refused = None
        stored = 1
        for _ in range(100):
            try:
                store.put(lq.Message("t", bytes(1_000)))
                stored += 1
            except StoreUnavailable as error:
                refused = error
                break
        assert refused is not None
        assert refused.status in ("CREATE_MAPEDFILE_FAILED", "SERVICE_NOT_AVAILABLE")
        assert [m.body for m in store.get("t", 0).messages][:1] == [b"first"]
        disk.failing.clear()
        deadline = time.monotonic() + 20
        while True:
            try:
                store.put(lq.Message("t", b"room again"))
                break
            except StoreUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert store.wait_dispatched(timeout=20)
        assert len(bodies(store)) == stored + 1
    assert not (tmp_path / "abort").exists()


def test_a_put_that_holds_the_log_too_long(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, os_page_cache_busy_time_out_mills=50) as store:
        store.put(lq.Message("t"))
        with store._engine.writer.lock:
            store._engine.writer._held_since = time.monotonic() - 1
            with pytest.raises(StoreUnavailable) as refused:
                store.put(lq.Message("t"))
            assert refused.value.status == "OS_PAGECACHE_BUSY"
            store._engine.writer._held_since = 0.0


def test_what_others_delete_comes_back(tmp_path: Path) -> None:
    """As a Java store does that is opened on ours (reliability.md, rule 1)."""
    with opened(tmp_path) as store:
        for number in range(150):
            store.put(lq.Message("t", b"%d" % number, keys=f"k{number}"))
        store.wait_dispatched()
        for path in [*(tmp_path / "index").iterdir(), *(tmp_path / "commitlog").iterdir()]:
            path.unlink()
        (tmp_path / "abort").unlink()
        queue = sorted((tmp_path / "consumequeue/t/0").iterdir())
        queue[-1].unlink()
        # Where Java made the file that comes next.
        following = queue[-1].with_name(f"{int(queue[-1].name) + 400:020d}")
        following.write_bytes(b"\xff" * 400)
        deadline = time.monotonic() + 20
        while not (tmp_path / "abort").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in range(150, 200):
            store.put(lq.Message("t", b"%d" % number, keys=f"k{number}"))
        store.wait_dispatched()
    assert not (tmp_path / "abort").exists()
    with lq.MessageStore.open(tmp_path) as reader:
        assert len(bodies(reader)) == 200
        assert reader.queue_offsets("t", 0) == (0, 200)
        assert reader.query("t", "k140") and reader.query("t", "k199")
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings


# ------------------------------------------------------------------------------------ processes
def run(code: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


OPEN = """
    import os, signal, sys, threading
    import logquarry as lq
    config = lq.StoreConfig(
        mapped_file_size_commit_log=16384, mapped_file_size_consume_queue=400,
        max_hash_slot_num=50, max_index_num=200,
    )
    store = lq.MessageStore.open(sys.argv[1], mode="rw", config=config)
    result = store.put(lq.Message("t", b"first", keys="k"))
"""


def test_the_interpreters_end_closes_the_store(tmp_path: Path) -> None:
    done = run(OPEN, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "abort").exists()
    with opened(tmp_path) as store:
        assert store.queue_offsets("t", 0) == (0, 1)


def test_a_kill_leaves_abort(tmp_path: Path) -> None:
    done = run(OPEN + "    os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "abort").exists()
    with pytest.raises(StoreUnavailable, match='mode="r"'):
        opened(tmp_path)
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == [b"first"]


def test_a_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    code = (
        OPEN
        + """
    import warnings
    warnings.simplefilter("ignore")
    store.wait_dispatched()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: store.put(lq.Message("t")),
            lambda: store.put_async(lq.Message("t")).result(),
            lambda: store.get("t", 0),
            lambda: store.wait_dispatched(),
            lambda: store.flush(),
            lambda: list(store.scan()),
            lambda: store.append_data(result.end_offset, b"x"),
        ):
            try:
                call()
            except lq.errors.StoreUnavailable:
                refused += 1
        store.close()
        sys.exit(refused)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), os.path.exists(os.path.join(sys.argv[1], "abort")))
    print(store.put(lq.Message("t", b"second")).queue_offset)
    store.close()
    """
    )
    done = run(code, tmp_path)
    assert done.stdout.split() == ["7", "True", "1"], done.stderr
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == [b"first", b"second"] and not reader.has_abort


# -------------------------------------------------------------------------------------- threads
def many_writers(root: Path, each: int, settings: lq.StoreConfig, threads: int = 8) -> None:
    """Threads that put, and one that reads all queues meanwhile; then a look at the files."""
    queues = 4
    offsets: list[list[tuple[int, int]]] = [[] for _ in range(threads)]
    seen: Counter[bytes] = Counter()
    writing = threading.Event()
    failures: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for count in range(each):
                body = b"%d-%d" % (number, count)
                result = store.put(lq.Message("t", body, queue_id=(number + count) % queues))
                offsets[number].append(((number + count) % queues, result.queue_offset))
        except BaseException as error:
            failures.append(error)

    def read() -> None:
        at = dict.fromkeys(range(queues), 0)
        try:
            while True:
                was_writing = writing.is_set()
                before = dict(at)
                for queue_id in at:
                    answer = store.get("t", queue_id, at[queue_id])
                    for place, message in enumerate(answer.messages):
                        assert message.queue_offset == at[queue_id] + place
                        seen[message.body] += 1
                    if answer.messages:
                        at[queue_id] = answer.next_offset
                if at == before:
                    if not was_writing:
                        return
                    time.sleep(0.001)
        except BaseException as error:
            failures.append(error)

    with lq.MessageStore.open(root, mode="rw", config=settings) as store:
        writing.set()
        writers = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
        reader = threading.Thread(target=read)
        for thread in (*writers, reader):
            thread.start()
        for thread in writers:
            thread.join()
        assert store.wait_dispatched(timeout=120)
        writing.clear()
        reader.join()
        assert failures == []
    total = threads * each
    assert len(seen) == total and set(seen.values()) == {1}
    given = sorted(place for found in offsets for place in found)
    for queue_id in range(queues):
        numbers = [offset for queue, offset in given if queue == queue_id]
        assert numbers == list(range(len(numbers))), "gaps, or one given twice"
    with lq.MessageStore.open(root) as reread:
        counted = sum(len(batch) for batch in reread.to_arrow(columns=["body"]))
        assert counted == total
        report = verify_store(reread.layout)
        assert not report.has_damage, report.findings[:3]


def test_eight_writers_and_a_reader(tmp_path: Path) -> None:
    many_writers(tmp_path, 500, config())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_eight_writers_and_a_reader_for_two_million_messages(tmp_path: Path) -> None:
    many_writers(
        tmp_path,
        250_000,
        lq.StoreConfig(
            mapped_file_size_commit_log=64 << 20, max_hash_slot_num=5_000, max_index_num=20_000
        ),
    )


def test_interrupted_puts(tmp_path: Path) -> None:
    """Ctrl-C comes anywhere, and a program may go on after it."""

    class InterruptedHere(BaseException):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedHere

    # Not the alarm of pytest's timeout.
    before = signal.signal(signal.SIGVTALRM, interrupt)
    rng = random.Random(1)
    acked = interrupted = 0
    store = opened(
        tmp_path, mapped_file_size_commit_log=65_536, mapped_file_size_consume_queue=20_000
    )
    try:
        while interrupted < 200:
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, rng.uniform(0.0003, 0.003))
                while True:
                    store.put(lq.Message("t", bytes(40), keys="k"))
                    acked += 1
            except InterruptedHere:
                interrupted += 1
            except RuntimeError as error:
                # Python's own conditions do not take it well.
                assert isinstance(error.__context__, InterruptedHere)
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    store.close()
    with lq.MessageStore.open(tmp_path) as reader:
        assert not reader.has_abort
        offsets = [message.queue_offset for message in reader.scan()]
        # One that was interrupted may be in the log all the same.
        assert acked <= len(offsets) <= acked + interrupted
        assert offsets == list(range(len(offsets)))
        assert reader.queue_offsets("t", 0) == (0, len(offsets))
        assert not verify_store(reader.layout).has_damage


def test_closing_while_others_put(tmp_path: Path) -> None:
    """What was acknowledged is there, and what was refused is not."""
    store = opened(tmp_path)
    acked: list[bytes] = []
    change = threading.Lock()

    def write(number: int) -> None:
        for count in range(100_000):
            body = b"%d-%d" % (number, count)
            try:
                store.put(lq.Message("t", body))
            except StoreError:
                return
            with change:
                acked.append(body)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    store.close()
    for thread in threads:
        thread.join()
    with lq.MessageStore.open(tmp_path) as reader:
        assert sorted(bodies(reader)) == sorted(acked)
        assert reader.queue_offsets("t", 0) == (0, len(acked))
        assert not reader.has_abort


def test_reading_beside_the_writer(tmp_path: Path) -> None:
    """Scans of a growing log see a growing prefix."""
    with opened(tmp_path) as store:
        stop = threading.Event()

        def write() -> None:
            number = 0
            while not stop.is_set() and number < 20_000:
                store.put(lq.Message("t", b"%d" % number + bytes(number % 300)))
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        seen = 0
        for _ in range(10):
            found = [message.physical_offset for message in store.scan()]
            assert len(found) >= seen and found == sorted(set(found))
            seen = len(found)
            with lq.MessageStore.open(tmp_path) as other:
                assert len(list(other.scan())) >= seen
        stop.set()
        writer.join()


# ---------------------------------------------------------------------------------------- stats
def test_stats(store: WritableStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(10):
        store.put(lq.Message("t" if number % 2 else "u", bytes(number)))
    store.wait_dispatched()
    store.get("t", 0)
    store.get("none", 0)
    stats = store.stats()
    assert (stats.put_messages, stats.put_failed) == (10, 0)
    assert stats.put_bytes == store.max_offset
    assert {name: found.messages for name, found in stats.topics.items()} == {"t": 5, "u": 5}
    assert sum(stats.put_times.values()) == 10
    assert (stats.get_found, stats.get_missed, stats.get_messages) == (1, 1, 5)
    assert stats.put_rates.last_10_s > 0 and stats.get_rates.last_600_s > 0
    assert stats.dispatch_behind == 0
    assert stats.to_json()["topics"]["t"]["messages"] == 5


def test_the_names_in_the_folder_while_it_is_open(store: WritableStore) -> None:
    layout = StoreLayout.open(store.root)
    assert layout.has_abort and layout.is_live()


def test_a_frame_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    """A reader meets it half done, and what stands behind it whole."""
    with opened(tmp_path) as store:
        results = [store.put(lq.Message("t", b"%d" % number)) for number in range(3)]
    log = tmp_path / "commitlog" / f"{0:020d}"
    whole = log.read_bytes()
    middle = results[1].physical_offset
    log.write_bytes(whole[:middle] + bytes(50) + whole[middle + 50 :])

    class Reader(LogReader):
        """The writer is done with it when the reader looks further."""

        def _next_sound(self, start: int) -> int | None:
            with log.open("r+b") as file:
                file.write(whole)
            return super()._next_sound(start)

    events = list(Reader(StoreLayout.open(tmp_path), live=True).events())
    assert not any(isinstance(event, DamagedSpan) for event in events)
    assert sum(len(event.rows) for event in events if isinstance(event, Run)) == 3
