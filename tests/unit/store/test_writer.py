"""An open store takes messages, returns them, and opens again as it was closed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.fs as pafs
import pytest

import logquarry as lq
from logquarry.errors import MessageRejected, StoreUnavailable, UsageError
from logquarry.format import sys_flag
from logquarry.log.filesystem import ArrowFileSystem, LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan, LogReader, Run
from logquarry.read.get_message import GetMessageStatus
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from logquarry.write import dispatcher
from logquarry.write.dispatcher import MessageArrival
from logquarry.write.put_result import PutStatus
from tests.helpers.failing_disk import EIO, ENOSPC, FaultyDisk
from tests.helpers.small_store import bodies, opened
from tests.helpers.waiting import eventually


@pytest.fixture(name="store")
def small_store(tmp_path: Path) -> Iterator[StoreWriter]:
    with opened(tmp_path / "store") as opened_store:
        yield opened_store


# -------------------------------------------------------------------------------- put and read
def test_what_is_put_can_be_had(store: StoreWriter) -> None:
    results = [
        store.put(lq.Message("t", b"%d" % number, queue_id=number % 2, keys=f"k{number}", tags="a"))
        for number in range(500)
    ]
    assert all(result.ok and result.status is PutStatus.PUT_OK for result in results)
    assert store.max_offset == results[-1].end_offset
    assert store.wait_dispatched(results[-1].end_offset, timeout=60)
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
    assert [m.body for m in store.scan("t", queue_id=0)][:2] == [b"0", b"2"]
    assert store.to_arrow(columns=["keys"]).read_all()["keys"][499].as_py() == "k499"
    assert [m.body for m in store.query("t", "k321", exact=True)] == [b"321"]
    assert store.message_by_id(results[77].message_id).body == b"77"
    assert store.message_at(results[78].physical_offset).queue_offset == 39
    time_of_3 = results[3].store_timestamp
    assert store.offset_by_time("t", 1, time_of_3 - 1_000_000) == 0
    assert store.is_live and store.has_abort


def test_what_is_not_there(store: StoreWriter) -> None:
    assert store.get("t", 0).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    assert store.queue("t", 0) is None and store.queues() == ()
    assert store.get("../..", 0).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    assert (store.min_offset, store.max_offset) == (0, 0)
    assert bodies(store) == [] and store.query("t", "k") == []
    assert store.wait_dispatched(timeout=60)
    with pytest.raises(lq.errors.MessageNotFound):
        store.message_at(0)
    result = store.put(lq.Message("t", b"x"))
    with pytest.raises(lq.errors.MessageNotFound, match="within the one at 0"):
        store.message_at(1)
    with pytest.raises(lq.errors.MessageNotFound):
        store.message_at(result.end_offset)


def test_a_get_right_after_the_dispatch(store: StoreWriter) -> None:
    for number in range(50):
        result = store.put(lq.Message("t", b"%d" % number))
        assert store.wait_dispatched(result.end_offset, timeout=60)
        answer = store.get("t", 0, result.queue_offset)
        assert [message.body for message in answer.messages] == [b"%d" % number]


def test_batches(store: StoreWriter) -> None:
    result = store.put_batch([lq.Message("t", b"a"), lq.Message("t", b"b", keys="k")])
    assert result.message_count == 2 and len(result.message_ids) == 2
    store.wait_dispatched()
    assert [m.body for m in store.get("t", 0).messages] == [b"a", b"b"]
    assert store.stats().topics["t"].messages == 2
    empty = "the batch has no messages"
    with pytest.raises(MessageRejected, match=empty):
        store.put_batch(wire=b"", message=lq.Message("t"))
    with pytest.raises(MessageRejected, match=empty):
        store.put_batch([])
    with pytest.raises(MessageRejected, match=empty):
        store.put_batch_async(wire=b"", message=lq.Message("t")).result()
    with pytest.raises(UsageError):
        store.put_batch([lq.Message("t"), lq.Message("u")])
    with pytest.raises(TypeError):
        store.put_batch()


def test_a_message_that_is_rejected(store: StoreWriter) -> None:
    with pytest.raises(MessageRejected) as rejected:
        store.put(lq.Message("../x"))
    assert rejected.value.status == "MESSAGE_ILLEGAL"
    future = store.put_async(lq.Message("t", b"x" * 20_000))
    assert isinstance(future.exception(), MessageRejected)
    with pytest.raises(MessageRejected):
        store.put_batch([lq.Message("t", delay_level=3)])
    future = store.put_batch_async([lq.Message("t", delay_level=3)])
    assert isinstance(future.exception(), MessageRejected)
    assert store.stats().put_failed == 4
    assert bodies(store) == []


def test_messages_that_are_in_no_queue(store: StoreWriter) -> None:
    store.put(lq.Message("t", b"half", sys_flag=sys_flag.TRANSACTION_PREPARED, keys="k"))
    assert store.wait_dispatched(timeout=60)
    assert store.queues() == ()
    assert [m.body for m in store.query("t", "k")] == [b"half"]


def test_without_an_index(tmp_path: Path) -> None:
    with opened(tmp_path, message_index_enable=False) as store:
        store.put(lq.Message("t", b"x", keys="k"))
        assert [m.body for m in store.query("t", "k")] == [b"x"]
    assert list((tmp_path / "index").iterdir()) == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_listeners(error: type[BaseException], store: StoreWriter) -> None:
    arrived: list[MessageArrival] = []

    def broken(arrival: MessageArrival) -> None:
        raise error(arrival)

    store.add_arrival_listener(broken)
    store.add_arrival_listener(arrived.append)
    store.add_arrival_listener(arrived.append)
    result = store.put(lq.Message("t", queue_id=2))
    store.put_batch([lq.Message("t"), lq.Message("t")])
    store.wait_dispatched(timeout=60)
    assert MessageArrival("t", 2, 1, 1, result.store_timestamp, frozenset({0})) in arrived
    assert sum(arrival.messages for arrival in arrived) == 3
    assert max(a.next_offset for a in arrived if a.queue_id == 0) == 2
    store.remove_arrival_listener(arrived.append)
    store.remove_arrival_listener(print)
    store.put(lq.Message("t"))
    store.wait_dispatched(timeout=60)
    assert sum(arrival.messages for arrival in arrived) == 3


def test_a_listener_cannot_close_the_store(store: StoreWriter) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def closing(arrival: MessageArrival) -> None:
        try:
            store.close()
        except UsageError as error:
            errors.append(error)
        done.set()

    consumer = store.consumer("g", "t")
    store.add_arrival_listener(closing)
    store.put(lq.Message("t"))
    assert done.wait(60) and len(errors) == 1
    assert store.put(lq.Message("t")).ok
    # Nor has the refusal ended any thread.
    assert not consumer.is_closed
    assert store.deliver_due() == 0


def test_a_listener_asks_for_a_service_while_one_is_started(store: StoreWriter) -> None:
    entered, go, done = threading.Event(), threading.Event(), threading.Event()

    def listener(_: MessageArrival) -> None:
        entered.set()
        assert go.wait(60)
        store.transaction(lq.Message("u"))
        done.set()

    store.add_arrival_listener(listener)
    store.put(lq.Message("t"))
    assert entered.wait(60)
    starting = threading.Thread(target=store.start_delivery)
    starting.start()
    # The call waits for the dispatcher, whose thread the listener occupies.
    while not store._engine._dispatching._waiting:
        starting.join(0.01)
    go.set()
    assert done.wait(60)
    starting.join(60)
    assert not starting.is_alive()


def test_a_listener_cannot_wait_for_the_dispatcher(store: StoreWriter) -> None:
    refused: list[str] = []

    def wait(_: MessageArrival) -> None:
        # A message counts as dispatched when all listeners were called with it.
        try:
            store.wait_dispatched(timeout=60)
        except UsageError as error:
            refused.append(str(error))

    store.add_arrival_listener(wait)
    result = store.put(lq.Message("t"))
    assert store.wait_dispatched(result.end_offset, timeout=60)
    assert len(refused) == 1 and "listener" in refused[0]


# -------------------------------------------------------------------------------------- flush
def test_synchronous_flush(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH") as store:
        result = store.put(lq.Message("t"))
        assert store._engine.log.flushed_offset >= result.end_offset
        disk.gate.clear()
        future = store.put_async(lq.Message("t"))
        batch = store.put_batch_async([lq.Message("t"), lq.Message("t")])
        assert not (future.done() or batch.done())
        assert store.put(lq.Message("t", wait_store_ok=False)).status is PutStatus.PUT_OK
        disk.gate.set()
        assert future.result(60).status is PutStatus.PUT_OK
        assert batch.result(60).status is PutStatus.PUT_OK
        assert batch.result().message_count == 2
        assert {f.result(60).ok for f in [store.put_async(lq.Message("t")) for _ in range(64)]} == {
            True
        }
    assert store.stats().put_messages == 69


def test_a_flush_that_takes_too_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH", sync_flush_timeout=700) as store:
        store.put(lq.Message("t"))
        disk.gate.clear()
        future = store.put_async(lq.Message("t"))
        result = store.put(lq.Message("t", b"late"))
        assert result.ok and result.status is PutStatus.FLUSH_DISK_TIMEOUT
        assert future.result(60).status is PutStatus.FLUSH_DISK_TIMEOUT
        disk.gate.set()
    assert "a put took" in caplog.text and "4 bytes of body" in caplog.text
    times = store.stats().put_times
    labels = list(times)
    assert sum(times[label] for label in labels[labels.index("500ms-1s") :]) >= 2
    assert store.stats().put_longest_ms > 500
    assert "a put waited" in caplog.text


@pytest.mark.parametrize("call", ["put", "put_async"])
def test_a_log_handler_may_put_its_records(call: str, tmp_path: Path) -> None:
    """The handler holds a lock while it waits for the sync. So the syncing thread must not log."""
    disk = FaultyDisk()
    done: list[PutStatus] = []

    class Records(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not record.name.startswith("logquarry"):
                message = lq.Message("t", record.getMessage().encode())
                is_async = call == "put_async"
                found = store.put_async(message).result() if is_async else store.put(message)
                done.append(found.status)

    handler = Records()
    with opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH", sync_flush_timeout=60_000) as store:
        store.put(lq.Message("t"))
        disk.gate.clear()
        logging.getLogger().addHandler(handler)
        try:
            talking = threading.Thread(
                target=logging.getLogger("application").error, args=("hello",), daemon=True
            )
            talking.start()
            time.sleep(0.7)  # the put is slow, so it is logged
            disk.gate.set()
            talking.join(60)
            assert done == [PutStatus.PUT_OK]
        finally:
            logging.getLogger().removeHandler(handler)


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
    assert (tmp_path / "abort").exists(), "the next opening must recover: a sync failed"
    with opened(tmp_path) as again:
        assert bodies(again)[0] == b"first"


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_a_master_that_has_to_wait_for_a_slave(flush: str, tmp_path: Path) -> None:
    """No slave is connected. (RocketMQ: no connection, SLAVE_NOT_AVAILABLE.)"""
    with opened(tmp_path, broker_role="SYNC_MASTER", flush_disk_type=flush) as store:
        alone = PutStatus.SLAVE_NOT_AVAILABLE
        result = store.put(lq.Message("t"))
        assert (result.status, result.ok) == (alone, True)
        assert store.put_async(lq.Message("t")).result(60).status is alone
        assert store.put_batch([lq.Message("t")]).status is alone
        assert store.put_many([lq.Message("t")]).status is alone
        nobody_waits = lq.Message("t", wait_store_ok=False)
        assert store.put(nobody_waits).status is PutStatus.PUT_OK
        assert store.put_async(nobody_waits).result(60).status is PutStatus.PUT_OK
        assert store.wait_dispatched(timeout=60)
        assert store.queue_offsets("t", 0).max == 6


@pytest.mark.parametrize("is_full", [False, True])
def test_queues_that_nobody_has_asked_for_can_be_read_on_a_bad_disk(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(descriptor: int, size: int) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    with opened(tmp_path) as store:
        for number in range(50):
            store.put(lq.Message("t", b"%d" % number))
    disk = FaultyDisk()
    with opened(tmp_path, disk) as store:
        store.put(lq.Message("other"))
        store.wait_dispatched()
        if is_full:
            monkeypatch.setattr(disk, "allocate", allocate)
        else:
            disk.failing["fdatasync"] = EIO
            with pytest.raises(StoreUnavailable):
                store.flush()
        answer = store.get("t", 0, 20)
        assert [message.body for message in answer.messages] == [b"%d" % n for n in range(20, 40)]
        assert store.queue_offsets("t", 0) == (0, 50)
        assert store.queue("t", 1) is None
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get("t", 0)


def test_a_failed_sync_of_many(tmp_path: Path) -> None:
    """The result lists the messages in the log, although they may not be on the disk."""
    disk = FaultyDisk()
    with opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH") as store:
        store.put(lq.Message("t"))
        disk.failing["fdatasync"] = EIO
        with pytest.raises(StoreUnavailable, match="sync failed") as failed:
            store.put_many([lq.Message("t", b"%d" % number) for number in range(5)])
        assert failed.value.appended.queue_offset.tolist() == [1, 2, 3, 4, 5]
        assert len(bodies(store)) == 6


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
        assert store.wait_dispatched(timeout=60)
        assert len(bodies(store)) == 300
        assert store.get("t", 0, 299).messages[0].body.startswith(b"299")
        store.put(lq.Message("t", b"last"))
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader)[-1] == b"last"
        assert not verify_store(reader.layout).has_damage


def test_what_is_committed_is_dispatched_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The dispatcher wakes only when a commit wakes it.
    monkeypatch.setattr(dispatcher, "_INTERVAL_MS", 3_600_000)
    with opened(tmp_path, transient_store_pool_enable=True) as store:
        arrived = threading.Event()
        store.add_arrival_listener(lambda _: arrived.set())
        for number in range(3):
            arrived.clear()
            store.put(lq.Message("t", b"%d" % number))
            assert arrived.wait(60)


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
        assert store.wait_dispatched(timeout=60)
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


# ---------------------------------------------------------------------------------------- stats
def test_stats(store: StoreWriter, caplog: pytest.LogCaptureFixture) -> None:
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


def test_stats_of_puts_that_fail(tmp_path: Path) -> None:
    """By each kind of put."""
    disk = FaultyDisk()
    nonsense = lq.Message("t", queue_id=1 << 40)
    with opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH") as store:
        for put in (
            lambda: store.put(nonsense),
            lambda: store.put_async(nonsense).result(),
            lambda: store.put_batch([nonsense]),
            lambda: store.put_many([nonsense]),
        ):
            with pytest.raises(UsageError):
                put()
        assert store.stats().put_failed == 4
        disk.failing["fdatasync"] = EIO
        with pytest.raises(StoreUnavailable, match="sync failed"):
            store.put_async(lq.Message("t")).result(60)
        eventually(lambda: store.stats().put_failed == 5)
        assert (store.stats().put_failed, store.stats().put_messages) == (5, 0)


def test_the_names_in_the_folder_while_it_is_open(store: StoreWriter) -> None:
    layout = StoreLayout.open(store.root)
    assert layout.has_abort and layout.is_live()


@pytest.mark.parametrize("kind", ["local", "arrow", "fsspec"])
def test_a_frame_that_is_being_written_is_no_damage(kind: str, tmp_path: Path) -> None:
    """A reader finds it incomplete, and the frame after it complete. pyarrow.fs and fsspec give
    copies of the bytes, which the reader must not use for the second read.
    """
    with opened(tmp_path) as store:
        results = [store.put(lq.Message("t", b"%d" % number)) for number in range(3)]
    log = tmp_path / "commitlog" / f"{0:020d}"
    whole = log.read_bytes()
    middle = results[1].physical_offset
    log.write_bytes(whole[:middle] + bytes(50) + whole[middle + 50 :])

    class Reader(LogReader):
        """The writer completes the frame before the reader goes on."""

        def _next_sound(self, start: int) -> int | None:
            with log.open("r+b") as file:
                file.write(whole)
            return super()._next_sound(start)

    folder: pafs.FileSystem = pafs.LocalFileSystem()
    if kind == "fsspec":
        folder = pafs.PyFileSystem(pafs.FSSpecHandler(fsspec.filesystem("file")))
    remote = ArrowFileSystem(folder, str(tmp_path), str(tmp_path))
    layout = StoreLayout(LocalFileSystem(tmp_path) if kind == "local" else remote)
    events = list(Reader(layout, live=True).events())
    assert not any(isinstance(event, DamagedSpan) for event in events)
    assert sum(len(event.rows) for event in events if isinstance(event, Run)) == 3
