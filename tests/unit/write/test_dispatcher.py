"""The log's frames come into queues and index in order, once, and at once."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Refusal, RunningFlags
from logquarry.errors import CorruptFile, CorruptFrame
from logquarry.format import frame, queue_entry, sys_flag
from logquarry.format.frame import Frame
from logquarry.format.index import IndexShape
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.log.follow import DispatchRequests
from logquarry.message import Message
from logquarry.read.queue import UNIT_DTYPE
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.dispatcher import (
    ArrivalListeners,
    Dispatcher,
    DispatchService,
    MessageArrival,
)
from logquarry.write.index_writer import IndexWriter
from logquarry.write.queue_table import QueueTable
from logquarry.write.queue_writer import QueuePart

NOW = 1_700_000_000_000


class Store:
    """A log with its dispatcher, queues and index."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.disk = Disk()
        self.config = StoreConfig(
            mapped_file_size_consume_queue=4 * UNIT_SIZE,
            # Otherwise a put fails if another thread stops for a second while it holds the log.
            os_page_cache_busy_time_out_mills=60_000,
            **settings,
        )
        self.flags = RunningFlags()
        self.files = MappedFileQueue(self.disk, root / "commitlog", 2_000)
        self.writer = CommitLogWriter(
            self.files, self.config, clock=lambda: NOW, flags=self.flags, health=self.disk.health
        )
        self.arrived: list[DispatchRequests] = []
        self.queues = QueueTable(self.disk, root, self.config, {}, self.files)
        self.index = IndexWriter(self.disk, root / "index", IndexShape(5, 100), clock=lambda: NOW)
        self.dispatcher = self.dispatcher_from(0)

    def dispatcher_from(self, start: int) -> Dispatcher:
        return Dispatcher(
            self.files,
            self.queues.writer,
            self.index.put,
            self.config,
            start=start,
            dispatched=lambda requests, _: self.arrived.append(requests),
        )

    def queue(self, topic: str, queue_id: int = 0) -> list[QueueEntry]:
        writer = self.queues.writer((topic, queue_id))
        assert writer is not None
        found = []
        for base in writer.files.bases:
            data = writer.files.select(base)
            for at in range(0, len(data or b""), UNIT_SIZE):
                assert data is not None
                found.append(queue_entry.decode_at(data, at))
        return found

    @property
    def keys(self) -> int:
        return 0 if self.index.last is None else self.index.last.header.entry_count - 1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def test_as_they_come(store: Store) -> None:
    expected: dict[int, list[QueueEntry]] = {0: [], 1: []}
    for number in range(60):
        tags = "polygenelubricants" if number % 2 else None
        message = Message("t", bytes(number), queue_id=number % 2, tags=tags, keys="a b")
        result = store.writer.put(message)
        code = -(1 << 31) if tags else 0
        expected[number % 2].append(QueueEntry(result.physical_offset, result.size, code))
        if number % 7 == 0:
            assert store.dispatcher.dispatch_until() == store.files.max_offset
    store.dispatcher.dispatch_until()
    assert {queue_id: store.queue("t", queue_id) for queue_id in (0, 1)} == expected
    assert len(store.files.bases) > 3
    last = store.index.last
    assert last is not None and last.header.entry_count <= 100
    assert sum(len(requests.size) for requests in store.arrived) == 60


def test_until_an_offset(store: Store) -> None:
    ends = [store.writer.put(Message("t")).end_offset for _ in range(3)]
    assert store.dispatcher.dispatch_until(0) == 0
    assert store.dispatcher.dispatch_until(1) >= ends[0]
    assert store.dispatcher.dispatch_until(10_000) == ends[2]


def test_once_more_from_the_start(store: Store) -> None:
    for number in range(30):
        store.writer.put(Message("t", bytes(number), keys="k"))
    store.dispatcher.dispatch_until()
    before, keys = store.queue("t"), store.keys
    store.dispatcher_from(0).dispatch_until()
    assert store.queue("t") == before
    # The last message is indexed again, as in RocketMQ.
    assert store.keys == keys + 1


def test_transactions(store: Store) -> None:
    for kind in (
        sys_flag.TRANSACTION_PREPARED,
        sys_flag.TRANSACTION_COMMIT,
        sys_flag.TRANSACTION_ROLLBACK,
        sys_flag.TRANSACTION_NOT,
    ):
        store.writer.put(Message("t", sys_flag=kind, keys="k"))
    store.dispatcher.dispatch_until()
    assert len(store.queue("t")) == 2
    assert store.keys == 3


def test_delayed_messages_carry_their_delivery_time(store: Store) -> None:
    store.writer.put(Message("t", delay_level=3))
    store.dispatcher.dispatch_until()
    assert [unit.tags_code for unit in store.queue("SCHEDULE_TOPIC_XXXX", 2)] == [NOW + 10_000]


def test_a_message_comes_once_into_a_queue_that_it_names_again(tmp_path: Path) -> None:
    store = Store(tmp_path, enable_multi_dispatch=True, enable_lmq=True)
    places = []
    for number in range(6):
        names = {"INNER_MULTI_DISPATCH": "%LMQ%a,own"} if number % 2 else {}
        topic = "own" if number % 3 else "other"
        places.append(store.writer.put(Message(topic, properties=names)).physical_offset)
    store.dispatcher.dispatch_until()
    assert [u.physical_offset for u in store.queue("%LMQ%a")] == [places[n] for n in (1, 3, 5)]
    assert [u.physical_offset for u in store.queue("own")] == [places[n] for n in (1, 2, 3, 4, 5)]


def test_frames_that_come_in_pieces(store: Store, tmp_path: Path) -> None:
    for number in range(30):
        store.writer.put(Message("t", bytes(number), keys="k"))
    slave = Store(tmp_path / "slave")
    for base in store.files.bases:
        data = store.files.select(base)
        assert data is not None
        for at in range(0, len(data), 37):
            assert slave.writer.append_data(base + at, data[at : at + 37])
            slave.dispatcher.dispatch_until()
            end = slave.dispatcher.offset
            assert end <= slave.files.max_offset or end == base + 2_000
    store.dispatcher.dispatch_until()
    assert slave.dispatcher.offset == store.dispatcher.offset
    assert slave.queue("t") == store.queue("t")
    assert slave.keys == store.keys


def test_bytes_that_are_no_frame(store: Store) -> None:
    end = store.writer.put(Message("t")).end_offset
    store.writer.append_data(end, b"no frame, no blank, and nothing else")
    with pytest.raises(CorruptFrame, match="magic") as error:
        store.dispatcher.dispatch_until()
    assert (error.value.offset, store.dispatcher.offset) == (end, end)
    assert len(store.queue("t")) == 1


def test_a_unit_that_is_missing(store: Store) -> None:
    ends = [store.writer.put(Message("t")).end_offset for _ in range(4)]
    store.dispatcher.dispatch_until(1)
    behind = store.dispatcher_from(ends[3])
    store.writer.put(Message("t"))
    assert store.queue("t")
    if store.dispatcher.offset == ends[3]:
        # All four came at once: begin a queue that lacks them.
        store.writer.queue_offsets["t", 0] += 2
        store.writer.put(Message("t"))
    with pytest.raises(CorruptFile, match="missing"):
        behind.dispatch_until()


def test_a_topic_that_names_another_folder(store: Store, tmp_path: Path) -> None:
    made = Frame(b"../../outside", properties=b"KEYS\x01k").with_crc()
    store.writer.append_data(0, frame.encode(made))
    assert store.dispatcher.dispatch_until() == made.size
    assert not list(tmp_path.rglob("outside")) and not (tmp_path.parent / "outside").exists()
    assert store.keys == 1


def test_in_the_background(store: Store) -> None:
    service = DispatchService(store.dispatcher, store.flags, store.disk.health)
    assert not service.wait_dispatched(1, timeout_s=0)
    service.start()
    try:

        def put() -> None:
            for _ in range(50):
                store.writer.put(Message("t", keys="k"))
                service.wakeup()

        threads = [threading.Thread(target=put) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert service.wait_dispatched(store.files.max_offset, timeout_s=30)
        assert len(store.queue("t")) == 200
        store.writer.put(Message("t"))
    finally:
        assert service.stop()
    # The last messages are dispatched, too.
    assert len(store.queue("t")) == 201
    assert not service.wait_dispatched(1 << 40)


def test_in_the_background_a_failure_stops_the_store(store: Store) -> None:
    service = DispatchService(store.dispatcher, store.flags, store.disk.health)
    service.start()
    try:
        store.writer.append_data(0, b"no frame, no blank, and nothing else")
        with pytest.raises(CorruptFrame, match="magic"):
            service.wait_dispatched(1, timeout_s=30)
        assert store.flags.refusals
        start = f"{Refusal.LOGICS_QUEUE_ERROR.value}: the message at physical offset 0: "
        assert store.flags.why.startswith(start) and "magic" in store.flags.why
    finally:
        service.stop()


def test_listeners_that_come_while_another_goes() -> None:
    comparing = threading.Event()

    class Slow:
        def __call__(self, arrival: MessageArrival) -> None:
            """Nothing."""

        def __ne__(self, other: object) -> bool:
            comparing.set()
            time.sleep(0.1)
            return self is not other

    listeners = ArrivalListeners()
    told: list[MessageArrival] = []
    listeners.add(Slow())
    removing = threading.Thread(target=listeners.remove, args=(print,))
    removing.start()
    assert comparing.wait(60)
    listeners.add(told.append)
    removing.join()
    one = np.zeros(1, np.int64)
    requests = SimpleNamespace(store_timestamp=one)
    listeners.tell(cast("Any", requests), {("t", 0): QueuePart(one, one, np.zeros(1, UNIT_DTYPE))})
    assert [arrival.topic for arrival in told] == ["t"]
