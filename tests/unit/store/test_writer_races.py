"""Threads of one store that meet: users', services', listeners' and callbacks'."""

from __future__ import annotations

import signal
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

import logquarry as lq
from logquarry import compiled
from logquarry.errors import StoreUnavailable
from logquarry.log import codec
from logquarry.read.get_message import GetResult
from logquarry.store import store_engine
from logquarry.write import commit_log_writer, frame_append, message_rules
from logquarry.write.dispatcher import MessageArrival
from logquarry.write.put_result import Waiter
from tests.helpers.failing_disk import FaultyDisk
from tests.helpers.small_store import bodies, opened
from tests.helpers.waiting import eventually

SECONDS = 60


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_two_flushes_at_once(tmp_path: Path) -> None:
    """Each full index file is synced once, and then closed."""
    disk = FaultyDisk()
    store = opened(tmp_path, disk, flush_interval_consume_queue=3_600_000)
    for number in range(450):
        store.put(lq.Message("t", keys=f"k{number}"))
    store.wait_dispatched()
    store._engine.log.flush()
    for queue in store._engine.queues:
        queue.flush()
    # Only the index still needs a sync.
    disk.gate.clear()
    ended = []

    def flush() -> None:
        store.flush()
        ended.append(True)

    threads = [start(flush) for _ in range(2)]
    threads[1].join(0.2)
    disk.gate.set()
    for thread in threads:
        thread.join(SECONDS)
    assert len(ended) == 2
    times = store.checkpoint
    assert times is not None and times.index_timestamp > 0
    store.close()
    assert not (tmp_path / "abort").exists()


def test_a_flush_after_the_files_are_closed(tmp_path: Path) -> None:
    """It must not take a closed file for a failed disk: the store would not close cleanly."""
    store = opened(tmp_path)
    store.put(lq.Message("t", keys="k"))
    store.wait_dispatched()
    abort = store._engine._abort
    remove = abort.remove
    refused = []

    def flush() -> None:
        try:
            store.flush()
        except StoreUnavailable as error:
            refused.append(str(error))

    def remove_later() -> None:
        start(flush).join(SECONDS)
        remove()

    abort.remove = remove_later  # type: ignore[method-assign]
    store.close()
    assert refused == ["the store was closed"]
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("who", ["listener", "callback"])
def test_closing_while_a_service_puts(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put has passed the checks; if it waited for the log, the close would wait for the put."""
    monkeypatch.setattr(store_engine, "_PATIENCE_SECONDS", SECONDS)
    disk = FaultyDisk()
    store = opened(tmp_path, disk, flush_disk_type="SYNC_FLUSH")
    passed, go_on = threading.Event(), threading.Event()
    topic_bytes, own = message_rules.topic_bytes, threading.current_thread()

    def wait_behind_checks(topic: str, check: str) -> bytes:
        if threading.current_thread() is not own:
            passed.set()
            go_on.wait(SECONDS)
        return topic_bytes(topic, check)

    for module in (commit_log_writer, frame_append):
        monkeypatch.setattr(module, "topic_bytes", wait_behind_checks)
    ended = []

    def put(_: object) -> None:
        ended.append(store.put_async(lq.Message("u")).exception(SECONDS))

    if who == "listener":
        store.add_arrival_listener(put)
        store.put(lq.Message("t", b"1"))
    else:
        # The callback is added before the sync; otherwise this thread could call it.
        disk.gate.clear()
        store.put_async(lq.Message("t", b"1")).add_done_callback(put)
        disk.gate.set()
    assert passed.wait(SECONDS)
    began = time.monotonic()
    closing = start(store.close)
    eventually(lambda: any(service.is_stopping for service in store._engine._services))
    go_on.set()
    closing.join(2 * SECONDS)
    assert time.monotonic() - began < SECONDS / 2
    assert [getattr(error, "status", None) for error in ended] == ["SERVICE_NOT_AVAILABLE"]
    assert not (tmp_path / "abort").exists()
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == [b"1"]


@pytest.mark.parametrize("way", ["common", "uncommon", "many"])
def test_a_put_between_the_bytes_of_a_master(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The put passed all checks before the bytes: its queue offset follows theirs, or it fails."""
    with opened(tmp_path / "master") as master:
        ends = [master.put(lq.Message("t", b"%d" % number)).end_offset for number in range(3)]
        log = (tmp_path / f"master/commitlog/{0:020d}").read_bytes()
    own = lq.Message("t", b"own", properties={} if way == "uncommon" else None)
    with opened(tmp_path / "copy") as store:
        writer = store._writer
        # The call between the checks and the lock of the log.
        owner, name = {
            "common": (
                frame_append if compiled.is_compiled() else commit_log_writer,
                "topic_bytes",
            ),
            "uncommon": (writer.encoder, "encode"),
            "many": (writer, "check_status"),
        }[way]
        behind_checks = getattr(owner, name)
        came: list[bool] = []

        def receive_in_between(*args: object) -> object:
            found = behind_checks(*args)
            if not came:
                came.append(True)
                assert store.append_data(0, log[: ends[2]])
            return found

        monkeypatch.setattr(owner, name, receive_in_between)
        with pytest.raises(StoreUnavailable, match="another store's log") as refused:
            if way == "many":
                store.put_many([own, own])
            else:
                store.put(own)
        assert refused.value.status == "SERVICE_NOT_AVAILABLE"
        assert store.put(own).queue_offset == 3
        assert [message.queue_offset for message in store.scan()] == [0, 1, 2, 3]


def test_a_put_that_waits_for_the_disk_when_the_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is already in the log, and the close brings it to the disk."""
    store = opened(tmp_path, flush_disk_type="SYNC_FLUSH")
    growth = store._engine.growth
    flusher = growth._flusher
    assert flusher is not None

    def close_and_add(request: Waiter) -> None:
        store.close()
        flusher.add(request)

    monkeypatch.setattr(growth, "_flusher", types.SimpleNamespace(add=close_and_add))
    assert store.put(lq.Message("t", b"1")).status is lq.PutStatus.PUT_OK
    with lq.MessageStore.open(tmp_path) as reader:
        assert bodies(reader) == [b"1"] and not reader.has_abort


@pytest.mark.parametrize("what", ["put", "wait"])
def test_ctrl_c_while_waiting(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no lock held that a thread of the store needs.

    The interrupt comes in the Python code of a condition right after it has taken the lock.
    (Repeated real signals hit that moment within seconds.)
    """

    class InterruptedHere(BaseException):
        pass

    enter, own = threading.Condition.__enter__, threading.current_thread()

    def interrupted(self: threading.Condition) -> bool:
        taken = enter(self)
        if threading.current_thread() is own:
            raise InterruptedHere
        return taken

    with opened(tmp_path, flush_disk_type="SYNC_FLUSH") as store:
        with monkeypatch.context() as patched, suppress(InterruptedHere):
            patched.setattr(threading.Condition, "__enter__", interrupted)
            if what == "put":
                store.put(lq.Message("t"))
            else:
                store.wait_dispatched(1 << 40, 0.1)
        putting = start(lambda: store.put(lq.Message("own")))
        putting.join(SECONDS)
        assert not putting.is_alive()
        eventually(lambda: store.queue_offsets("own", 0).max == 1)
        assert store.queue_offsets("own", 0).max == 1


def test_a_get_while_another_thread_loads_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the second get called a kernel at address 0, which ended the process."""
    kernels, found = codec.require_kernels(), list[GetResult | None]()

    def find_address() -> int:
        if not found:
            found.append(None)
            found.append(store.get("t", 0))
        return int(kernels.get_frames_address())

    loading = types.SimpleNamespace(get_frames=kernels.get_frames, get_frames_address=find_address)
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"x"))
        store.wait_dispatched()
        with monkeypatch.context() as patched:
            patched.setattr(codec, "kernels", lambda: loading)
            found.append(store.get("t", 0))
    assert {message.body for got in found if got is not None for message in got.messages} == {b"x"}
    assert len(found) == (3 if compiled.is_compiled() else 1)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals to one thread")
def test_no_thread_writes_after_an_interrupted_close(tmp_path: Path) -> None:
    """The next writer may already have the files open."""
    store = opened(tmp_path)
    may_go_on = threading.Event()

    def hold(arrival: MessageArrival) -> None:
        may_go_on.wait(SECONDS)

    store.add_arrival_listener(hold)
    for number in range(10):
        store.put(lq.Message("t", b"%d" % number))

    def interrupt(*_: object) -> None:
        threading.Timer(0.3, may_go_on.set).start()
        raise KeyboardInterrupt

    own = threading.get_ident()

    def interrupt_close() -> None:
        eventually(lambda: store._engine._dispatching.is_stopping)
        signal.pthread_kill(own, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    interrupting = start(interrupt_close)
    try:
        with pytest.raises(KeyboardInterrupt):
            store.close()
    finally:
        interrupting.join(SECONDS)
        signal.signal(signal.SIGUSR1, before)
    assert may_go_on.is_set()
    assert all(service.stop(0) for service in store._engine._services)
    store.close()
    assert bodies(lq.MessageStore.open(tmp_path)) == [b"%d" % number for number in range(10)]
    with opened(tmp_path) as again:
        assert again.queue_offsets("t", 0).max == 10


def test_a_close_that_is_interrupted_before_its_first_step(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(lq.Message("t", b"x"))
    with (
        mock.patch.object(store._engine.writer, "end", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        store.close()
    store.close()
    # The lock is free.
    with opened(tmp_path) as again:
        assert bodies(again) == [b"x"]
