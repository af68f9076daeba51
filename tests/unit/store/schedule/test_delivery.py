"""Is each delayed message delivered once, in order, when its time has come, whatever happens?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from logquarry.disk.disk import Disk
from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format.frame import Frame
from logquarry.format.properties import DEFAULT_LEVELS, SCHEDULE_TOPIC, parse_levels
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.walk import Run
from logquarry.message import Message
from logquarry.read.queue import UNIT_DTYPE, Queue, QueueSegment, Units
from logquarry.store.schedule.delivery import BYTES_AT_ONCE, DelayedDelivery
from logquarry.store.schedule.progress import DelayProgress

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

    def queue_ids(self, topic: str) -> Sequence[int]:
        return range(len(self.queues))

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        return self.queues[queue_id] if queue_id < len(self.queues) else None

    def frame_at(self, offset: int) -> Frame | None:
        return self.frames.get(offset)

    def message(self, offset: int, size: int) -> Frame | None:
        return self.frames.get(offset)

    def store_time_at(self, offset: int, size: int) -> int:
        return NOW

    def runs(self, start: int) -> Iterator[Run]:
        return iter(())


class Sink:
    """Takes delivered messages; refuses or fails on request."""

    def __init__(self) -> None:
        self.taken: list[Message] = []
        self.room: int | None = None
        self.refused: set[bytes] = set()

    def __call__(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            if message.body in self.refused:
                refusal = MessageRejected("no", status="MESSAGE_ILLEGAL", reason="topic")
                raise refusal.of_message(number)
        count = len(messages) if self.room is None else min(len(messages), self.room)
        self.taken += messages[:count]
        if self.room is not None:
            self.room -= count
        if count < len(messages):
            error = StoreUnavailable("no room")
            error.appended = mock.Mock(message_count=count)
            raise error

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(message.body) for message in self.taken]


def delivery(
    log: FakeLog, sink: Sink, root: Path, levels: Sequence[int] = LEVELS
) -> DelayedDelivery:
    return DelayedDelivery(log, sink, levels, DelayProgress(Disk(), root, lambda: None))


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
    """The table of levels is shorter now: RocketMQ would never read that queue again."""
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
    assert delivering.offsets == {1: 5}
    assert caplog.text.count("cannot be delivered") == 2


def test_what_the_store_refuses_keeps_nobody_waiting(tmp_path: Path) -> None:
    log, sink = FakeLog(2), Sink()
    for number in range(10):
        log.put(number % 2 + 1, b"%d" % number, NOW)
    sink.refused = {b"0", b"4", b"9"}
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW) == 7
    assert sorted(sink.bodies) == [b"%d" % n for n in (1, 2, 3, 5, 6, 7, 8)]
    assert delivering.offsets == {1: 5, 2: 5}


def test_a_put_that_fails_is_tried_again(tmp_path: Path) -> None:
    log, sink = FakeLog(2), Sink()
    for number in range(20):
        log.put(number % 2 + 1, b"%d" % number, NOW + number)
    delivering = delivery(log, sink, tmp_path)
    for room in (0, 3, 0, 1):
        sink.room = room
        with pytest.raises(StoreUnavailable):
            delivering.deliver(NOW + 100)
    assert len(sink.taken) == sum(delivering.offsets.values()) == 4
    sink.room = None
    assert delivering.deliver(NOW + 100) == 16
    assert sink.bodies == [b"%d" % number for number in range(20)]


def test_a_limit(tmp_path: Path) -> None:
    log, sink = FakeLog(3), Sink()
    for number in range(9):
        log.put(number % 3 + 1, b"%d" % number, NOW)
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW, limit=2) == 2 and sink.bodies == [b"0", b"3"]
    assert delivering.deliver(NOW, limit=0) == 0
    assert delivering.deliver(NOW) == 7


def test_one_call_puts_a_limited_number_of_bytes(tmp_path: Path) -> None:
    log, sink = FakeLog(1), Sink()
    for _ in range(5):
        log.put(1, bytes(BYTES_AT_ONCE // 2), NOW)
    calls = []

    def put(messages: Sequence[Message]) -> None:
        calls.append(len(messages))
        sink(messages)

    delivering = DelayedDelivery(log, put, LEVELS, DelayProgress(Disk(), tmp_path, lambda: None))
    assert delivering.deliver(NOW) == 5
    assert calls == [2, 2, 1], "a call stops after the message that exceeds the limit"


def test_units_that_hold_no_message_are_passed_over(tmp_path: Path) -> None:
    log, sink = FakeLog(1), Sink()
    log.queues[0].entered += [(0, 0, 0), (0, 0x7FFFFFFF, 0)]
    log.put(1, b"a", NOW)
    log.queues[0].entered += [(0, 0, 0)]
    delivering = delivery(log, sink, tmp_path)
    assert delivering.deliver(NOW) == 1 and delivering.deliver(NOW) == 0
    log.put(1, b"b", NOW)
    assert delivering.deliver(NOW) == 1 and sink.bodies == [b"a", b"b"]
