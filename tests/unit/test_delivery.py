"""Is each delayed message delivered once, in order, when its time has come, whatever happens?"""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import logquarry as lq
from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format import broker_config
from logquarry.format.delay import DEFAULT_LEVELS, SCHEDULE_TOPIC, parse_levels
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.message import Message
from logquarry.scan.walk import Run
from logquarry.store.disk.disk import LocalDisk
from logquarry.store.queue.consume_queue import UNIT_DTYPE, Queue, QueueSegment, Units
from logquarry.store.schedule.delivery import DelayedDelivery, Put
from logquarry.store.schedule.delivery_service import DeliveryService
from logquarry.store.schedule.progress import MARK_FILE, UNKNOWN, DelayProgress, Progress
from logquarry.store.writable_store import WritableStore
from logquarry.testing.clock import FakeClock
from tests.faulty_disk import ENOSPC, FaultyDisk, StoppedDisk
from tests.small_store import config as small_config

NOW = 1_700_000_000_000
LEVELS = parse_levels(DEFAULT_LEVELS)


# --------------------------------------------------------------------------- without any store
class FakeQueue(Queue):
    """A queue of the schedule topic in memory."""

    def __init__(self, queue_id: int) -> None:
        self.topic, self.queue_id, self.units_per_file = SCHEDULE_TOPIC, queue_id, 1_000
        self.entered: list[tuple[int, int, int]] = []
        self._units: Units = np.empty(0, UNIT_DTYPE)

    @property
    def min_offset(self) -> int:
        return 0

    @property
    def max_offset(self) -> int:
        return len(self.entered)

    @property
    def last_physical_end(self) -> int | None:
        return None

    @property
    def last_entry(self) -> QueueEntry | None:
        return None

    def segments(self) -> Iterator[QueueSegment]:
        yield QueueSegment(0, self.max_offset)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        if len(self._units) != len(self.entered):
            self._units = np.array(self.entered, UNIT_DTYPE)
        yield start, self._units[start:stop]


class FakeLog:
    """A log of delayed messages in memory."""

    start = 0

    def __init__(self, levels: int) -> None:
        self.frames: dict[int, Frame] = {}
        self.queues = [FakeQueue(queue_id) for queue_id in range(levels)]
        self.end = 0

    def put(self, level: int, body: bytes, due: int, properties: bytes | None = None) -> None:
        string = b"REAL_TOPIC\x01orders\x02DELAY\x01%d\x02REAL_QID\x013" % level
        made = Frame(SCHEDULE_TOPIC.encode(), body, string if properties is None else properties)
        self.frames[self.end] = made
        self.queues[level - 1].entered.append((self.end, made.size, due))
        self.end += made.size

    def schedule_queues(self) -> Sequence[int]:
        return range(len(self.queues))

    def schedule_queue(self, queue_id: int) -> Queue | None:
        return self.queues[queue_id]

    def message(self, offset: int, size: int) -> Frame | None:
        return self.frames.get(offset)

    def store_time_at(self, offset: int, size: int) -> int:
        return NOW

    def runs(self, start: int) -> Iterator[Run]:
        return iter(())


class Sink:
    """Takes what is delivered; refuses or fails when told to."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.room: int | None = None
        self.refused: set[bytes] = set()

    def __call__(self, messages: Sequence[Message]) -> Put:
        for number, message in enumerate(messages):
            if message.body in self.refused:
                refusal = MessageRejected("no", status="MESSAGE_ILLEGAL", reason="topic")
                return Put(0, refusal.of_message(number))
        count = len(messages) if self.room is None else min(len(messages), self.room)
        self.taken += messages[:count]
        if self.room is not None:
            self.room -= count
        error = None if count == len(messages) else StoreUnavailable("no room")
        return Put(count, error)

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(message.body) for message in self.taken]


def delivery(
    log: FakeLog, sink: Sink, root: Path, levels: Sequence[int] = LEVELS
) -> DelayedDelivery:
    return DelayedDelivery(log, sink, levels, DelayProgress(LocalDisk(), root, lambda: None))


def test_a_hundred_thousand_over_all_levels_in_order(tmp_path: Path) -> None:
    rng = random.Random(7)
    log, sink, count = FakeLog(len(LEVELS)), Sink(), 100_000
    expected: dict[bytes, int] = {}
    for number in range(count):
        level = rng.randrange(len(LEVELS))
        stored = NOW + number // 50
        expected[b"%d" % number] = stored + LEVELS[level]
        log.put(level + 1, b"%d" % number, stored + LEVELS[level])
    delivering = delivery(log, sink, tmp_path)
    now, delivered = NOW, 0
    while delivered < count:
        now += rng.choice([1, 900, 10_000, 100_000, 900_000])
        delivered += delivering.deliver(now)
        assert all(expected[bytes(m.body)] <= now for m in sink.taken[-1:])
        if delivered < count:
            late = min(
                due
                for q in log.queues
                for _, _, due in q.entered[delivering.offsets.get(q.queue_id + 1, 0) :][:1]
            )
            assert late > now, "what was due is delivered"
    dues = [expected[body] for body in sink.bodies]
    assert len(set(sink.bodies)) == len(sink.bodies) == count
    assert dues == sorted(dues)
    assert {m.topic for m in sink.taken} == {"orders"} and {m.queue_id for m in sink.taken} == {3}
    assert delivering.offsets == {q.queue_id + 1: q.max_offset for q in log.queues}


def test_levels_keep_their_order_when_the_clock_went_back_between_puts(tmp_path: Path) -> None:
    log, sink = FakeLog(1), Sink()
    for number, due in enumerate([500, 100, 300]):
        log.put(1, b"%d" % number, NOW + due)
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW + 499) == 0, "the first keeps those behind it waiting"
    assert delivering.deliver(NOW + 500) == 3
    assert sink.bodies == [b"0", b"1", b"2"]


def test_a_clock_that_was_set_back_delays_nobody_by_more_than_the_level(tmp_path: Path) -> None:
    log, sink = FakeLog(2), Sink()
    log.put(1, b"a", NOW + 1_000)
    log.put(2, b"b", NOW + 5_000)
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW) == 0
    assert delivering.deliver(NOW - 1) == 2, "due later than a level from now: due at once"


def test_a_jump_ahead_delivers_all_of_it_in_the_order_of_the_times(tmp_path: Path) -> None:
    log, sink = FakeLog(3), Sink()
    for number in range(30):
        log.put(number % 3 + 1, b"%d" % number, NOW + LEVELS[number % 3] + number)
    assert delivery(log, sink, tmp_path).deliver(NOW + 86_400_000) == 30
    assert sink.bodies == [b"%d" % n for first in range(3) for n in range(first, 30, 3)]


def test_a_queue_without_a_level_is_delivered_at_the_time_it_says(tmp_path: Path) -> None:
    """The table of levels was cut since: RocketMQ would never look there again."""
    log, sink = FakeLog(4), Sink()
    log.put(4, b"late", NOW + 30_000)
    delivering = delivery(log, sink, tmp_path, LEVELS[:2])
    assert delivering.deliver(NOW + 29_999) == 0
    assert delivering.deliver(NOW + 30_000) == 1


@pytest.mark.parametrize(
    "string",
    [
        b"",
        b"REAL_TOPIC\x01orders",
        b"REAL_TOPIC\x01orders\x02REAL_QID\x01x",
        b"REAL_QID\x010",
        b"REAL_TOPIC\x01RMQ_SYS_TRANS_HALF_TOPIC\x02REAL_QID\x010",
    ],
)
def test_what_nothing_can_be_made_of_keeps_nobody_waiting(
    tmp_path: Path, string: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    log, sink = FakeLog(1), Sink()
    log.put(1, b"a", NOW)
    log.put(1, b"bad", NOW, string)
    log.put(1, b"c", NOW)
    log.put(1, b"gone", NOW)
    log.frames.popitem()
    log.put(1, b"e", NOW)
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW) == 3 and sink.bodies == [b"a", b"c", b"e"]
    assert delivering.skipped == 2 and delivering.offsets == {1: 5}
    assert caplog.text.count("cannot be delivered") == 2


def test_what_the_store_refuses_keeps_nobody_waiting(tmp_path: Path) -> None:
    log, sink = FakeLog(2), Sink()
    for number in range(10):
        log.put(number % 2 + 1, b"%d" % number, NOW)
    sink.refused = {b"0", b"4", b"9"}
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW) == 7
    assert sorted(sink.bodies) == [b"%d" % n for n in (1, 2, 3, 5, 6, 7, 8)]
    assert delivering.skipped == 3 and delivering.offsets == {1: 5, 2: 5}


def test_a_put_that_fails_is_tried_again(tmp_path: Path) -> None:
    log, sink = FakeLog(2), Sink()
    for number in range(20):
        log.put(number % 2 + 1, b"%d" % number, NOW + number)
    delivering = delivery(log, sink, tmp_path)
    for room in (0, 3, 0, 1):
        sink.room = room
        with pytest.raises(StoreUnavailable):
            delivering.deliver(NOW + 100)
    assert len(sink.taken) == delivering.delivered == 4
    sink.room = None
    assert delivering.deliver(NOW + 100) == 16
    assert sink.bodies == [b"%d" % number for number in range(20)]


def test_a_limit_and_levels(tmp_path: Path) -> None:
    log, sink = FakeLog(3), Sink()
    for number in range(9):
        log.put(number % 3 + 1, b"%d" % number, NOW)
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW, limit=2, levels=[3]) == 2 and sink.bodies == [b"2", b"5"]
    assert delivering.deliver(NOW, limit=0) == 0
    assert delivering.deliver(NOW) == 7


def test_units_that_hold_no_message_are_passed_over(tmp_path: Path) -> None:
    log, sink = FakeLog(1), Sink()
    log.queues[0].entered += [(0, 0, 0), (0, 0x7FFFFFFF, 0)]
    log.put(1, b"a", NOW)
    log.queues[0].entered += [(0, 0, 0)]
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW) == 1 and delivering.deliver(NOW) == 0
    log.put(1, b"b", NOW)
    assert delivering.deliver(NOW) == 1 and sink.bodies == [b"a", b"b"]


# ----------------------------------------------------------------------------------- progress
def progress_of(root: Path, disk: FaultyDisk | None = None) -> DelayProgress:
    return DelayProgress(disk or LocalDisk(), root, lambda: None)


def test_progress_is_saved_with_its_place_in_the_log(tmp_path: Path) -> None:
    assert progress_of(tmp_path).load() is None
    saving = progress_of(tmp_path)
    assert saving.save(Progress({1: 2}, 100))
    assert not saving.save(Progress({1: 2}, 100 + (64 << 20) - 1)), "nothing was delivered"
    assert saving.save(Progress({1: 2}, 100 + (64 << 20)))
    assert progress_of(tmp_path).load() == Progress({1: 2}, 100 + (64 << 20))
    assert saving.save(Progress({1: 2}, 50)), "the log was cut"
    assert progress_of(tmp_path).load() == Progress({1: 2}, 50)


def test_a_place_counts_only_with_the_file_that_it_was_saved_for(tmp_path: Path) -> None:
    saving = progress_of(tmp_path)
    saving.save(Progress({1: 2}, 100))
    path = tmp_path / "config" / "delayOffset.json"
    path.write_text(broker_config.encode_delay_offsets({1: 3}))
    assert progress_of(tmp_path).load() == Progress({1: 3}, UNKNOWN)
    path.unlink()
    assert progress_of(tmp_path).load() == Progress({1: 2}, 100)


def test_whatever_call_a_save_dies_at_the_place_is_that_of_the_file(tmp_path: Path) -> None:
    first, second = Progress({1: 2}, 100), Progress({1: 5}, 300)
    found = []
    for number in range(100):
        root = tmp_path / str(number)
        progress_of(root).save(first)
        dying = progress_of(root, StoppedDisk(number))
        dying.load()
        try:
            dying.save(second)
            break
        except KeyboardInterrupt:
            found.append(progress_of(root).load())
    assert len(found) > 8
    turned = found.index(second)
    assert found == [first] * turned + [second] * (len(found) - turned)


BAD_MARKS = (
    b"",
    b"{",
    b"[1]",
    b'[{"offsets":[],"position":1}]',
    b'[{"position":1}]',
    b"{}",
    b"\xff",
)


@pytest.mark.parametrize("harm", BAD_MARKS)
def test_a_mark_that_cannot_be_read_counts_for_nothing(tmp_path: Path, harm: bytes) -> None:
    progress_of(tmp_path).save(Progress({1: 2}, 100))
    (tmp_path / ".logquarry" / MARK_FILE).write_bytes(harm)
    assert progress_of(tmp_path).load() == Progress({1: 2}, UNKNOWN)


# ------------------------------------------------------------------------------------ in a store
def opened(
    root: Path, clock: FakeClock, disk: FaultyDisk | None = None, **settings: object
) -> WritableStore:
    config = small_config(mapped_file_size_commit_log=65_536, **settings)
    return WritableStore.start(root, config=config, clock=clock, disk=disk)


def put_delayed(store: lq.MessageStore, count: int, *, first: int = 0, same: bool = False) -> None:
    store.put_many(
        [
            lq.Message(
                "orders",
                b"same" if same else b"%d" % number,
                queue_id=number % 2,
                delay_level=number % 3 + 1,
            )
            for number in range(first, first + count)
        ]
    )


def delivered_of(store: lq.MessageStore) -> list[bytes]:
    return [message.body for message in store.scan(topic="orders")]


def test_delivered_messages_can_be_had_like_others(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        store.put(lq.Message("orders", b"x", queue_id=1, tags="paid", keys="k", delay_level=2))
        assert store.deliver_due() == 0
        clock.advance(5_000)
        assert store.deliver_due() == 1
        store.wait_dispatched()
        message = store.get("orders", 1, 0, tag="paid").messages[0]
        assert (message.body, message.store_timestamp) == (b"x", NOW + 5_000)
        assert message.properties["DELAY"] == "2"
        assert [m.topic for m in store.query("orders", "k", exact=True)] == ["orders"]


def test_nothing_is_delivered_unless_somebody_asks(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        put_delayed(store, 6)
        clock.advance(86_400_000)
    assert not (tmp_path / "config").exists()
    with lq.MessageStore.open(tmp_path) as reader:
        assert delivered_of(reader) == []
        with pytest.raises(StoreUnavailable):
            reader.deliver_due()


def test_the_thread_delivers_and_closing_saves_how_far_it_came(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    arrived = threading.Event()
    with opened(tmp_path, clock, deliver_delayed=True) as store:
        store.start_delivery()
        store.add_arrival_listener(lambda a: arrived.set() if a.topic == "orders" else None)
        put_delayed(store, 3)
        clock.advance(10_000)
        assert arrived.wait(60)
    path = tmp_path / "config" / broker_config.DELAY_OFFSET_FILE
    known = broker_config.decode_delay_offsets(path.read_bytes())
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 3 - sum(known.values())
        assert sorted(delivered_of(store)) == [b"0", b"1", b"2"]


def test_progress_goes_on_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    for number in range(4):
        with opened(tmp_path, clock) as store:
            put_delayed(store, 9, first=number * 9)
            clock.advance(10_000)
            assert store.deliver_due() == 9
            assert len(delivered_of(store)) == 9 * (number + 1)
    assert "{1:12,2:12,3:12\n" in (tmp_path / "config" / "delayOffset.json").read_text()


@pytest.mark.parametrize("same", [False, True], ids=["told apart", "all alike"])
@pytest.mark.parametrize("lost", ["", "mark", "both"])
def test_what_was_delivered_since_the_last_save_is_in_the_log(
    tmp_path: Path, same: bool, lost: str
) -> None:
    """As a crash leaves it: files as they were saved, and a log that is further on."""
    clock, root = FakeClock(NOW), tmp_path / "store"
    mark, saved = root / ".logquarry" / MARK_FILE, tmp_path / "saved"
    with opened(root, clock) as store:
        put_delayed(store, 30, same=same)
        clock.advance(10_000)
        delivering = store._services.delivery
        delivering.deliver(clock(), limit=7)
        delivering.save()
        saved.mkdir()
        for path in (mark, root / "config" / "delayOffset.json"):
            shutil.copy(path, saved)
        delivering.deliver(clock(), limit=11)
        store.put(lq.Message("other", b"no delivery \x01DELAY\x01 2"))
    for path in saved.iterdir():
        shutil.copy(path, mark if path.name == MARK_FILE else root / "config" / path.name)
    if lost:
        mark.unlink()
    if lost == "both":
        shutil.rmtree(root / "config")
    with opened(root, clock) as store:
        again = store.deliver_due()
        found = delivered_of(store)
    if lost == "mark":
        # Then nothing tells what was noted from what was not, for messages without a UNIQ_KEY.
        assert again == 30 - 7
    else:
        assert again == 30 - 18
        assert sorted(found) == sorted([b"same"] * 30 if same else [b"%d" % n for n in range(30)])


def test_an_unreadable_file_is_kept_and_the_one_before_serves(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    path = tmp_path / "config" / "delayOffset.json"
    with opened(tmp_path, clock) as store:
        for _ in range(2):
            put_delayed(store, 9)
            clock.advance(10_000)
            assert store.deliver_due() == 9
    path.write_bytes(b"{")
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 0
    assert broker_config.decode_delay_offsets(path.read_bytes()) == {1: 6, 2: 6, 3: 6}
    aside = tmp_path / ".logquarry" / "quarantine" / "config" / path.name
    assert aside.read_bytes() == b"{"


@pytest.mark.parametrize(("offset", "again"), [(-5, 9), (7, 0), (1 << 40, 0)])
def test_offsets_beyond_the_queue_are_brought_back(tmp_path: Path, offset: int, again: int) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        put_delayed(store, 9)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "delayOffset.json").write_text(
        broker_config.encode_delay_offsets(dict.fromkeys((1, 2, 3), offset))
    )
    clock.advance(10_000)
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == again
        put_delayed(store, 3)
        clock.advance(10_000)
        assert store.deliver_due() == 3


def test_closing_saves_what_a_failed_put_ended(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        put_delayed(store, 9)
        store.wait_dispatched()
        clock.advance(10_000)
        delivering = store._services.delivery
        put = delivering._put
        delivering._put = lambda messages: Put(put(messages[:4]).appended, StoreUnavailable("full"))
        with pytest.raises(StoreUnavailable):
            store.deliver_due()
    text = (tmp_path / "config" / "delayOffset.json").read_bytes()
    assert sum(broker_config.decode_delay_offsets(text).values()) == 4


def test_a_full_disk_ends_no_thread(tmp_path: Path) -> None:
    clock, disk = FakeClock(NOW), FaultyDisk()
    with opened(tmp_path, clock, disk) as store:
        put_delayed(store, 9)
        store.wait_dispatched()
        clock.advance(10_000)
        delivering = store._services.delivery
        ticks = iter(range(0, 1_000, 10))
        service = DeliveryService(
            delivering,
            disk.health,
            clock=clock,
            save_interval_ms=1,
            monotonic=lambda: next(ticks),
        )
        disk.failing["open"] = ENOSPC
        service.run_once()
        assert delivering.delivered == 9, "there was room in the log"
        del disk.failing["open"]
        service.run_once()
        assert sum(delivering.offsets.values()) == 9
    text = (tmp_path / "config" / "delayOffset.json").read_bytes()
    assert sum(broker_config.decode_delay_offsets(text).values()) == 9


def test_progress_is_saved_behind_the_log_only(tmp_path: Path) -> None:
    """A power cut takes no delivery that the file says was made."""
    clock, disk = FakeClock(NOW), FaultyDisk()
    with opened(tmp_path, clock, disk) as store:
        put_delayed(store, 9)
        store.wait_dispatched()
        delivering = store._services.delivery
        clock.advance(10_000)
        delivering.deliver(clock())
        end = store._engine.log.wrote_offset
        flushed: list[int] = []
        replace = disk.replace

        def noting(path: Path, data: bytes) -> None:
            flushed.append(store._engine.log.flushed_offset)
            replace(path, data)

        disk.replace = noting  # type: ignore[method-assign]
        delivering.save()
        assert len(flushed) >= 2 and min(flushed) >= end
