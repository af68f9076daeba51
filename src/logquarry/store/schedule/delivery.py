"""Delivers delayed messages (``ScheduleMessageService``), in a background thread.

::

    schedule topic, queue = level - 1    entries: [physical offset][size][delivery time]
        | due: time <= now               in the order of the queue, level by level
        v
    due_message                          -> the real topic and queue
        v
    put, in bulk                         -> progress: next offset of each level

Each message is delivered once. Messages of one level are delivered in the order of their queue. Due
messages of several levels are delivered in the order of their due times. The delivery skips a
message that cannot be delivered, and logs an error.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from logquarry.disk.service import Health, Service, monotonic_ms
from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format import properties as props
from logquarry.format.arrays import Int64
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.read.queue import Queue, Units, has_message
from logquarry.store.schedule.progress import (
    UNKNOWN,
    DelayProgress,
    Progress,
    Undeliverable,
    advance,
    due_message,
)
from logquarry.store.transaction.half import ServedLog

logger = logging.getLogger(__name__)


AT_ONCE: Final = 2_048
"""Maximum number of queue entries per read, and of messages per put call."""
BYTES_AT_ONCE: Final = 8 << 20
_LEAST_TAGS_CODE: Final = -(1 << 31)
"""Smaller values in an entry are addresses in ConsumeQueueExt, not delivery times."""
DELAYS_S: Final = (60, 600, 3_600, 12 * 3_600, 24 * 3_600, 3 * 24 * 3_600)
"""Upper bounds of the classes of delays in seconds, as in RocketMQ 5; a last class has no bound."""
_MS: Final = 1_000


class Put(NamedTuple):
    """The number of messages that a put appended, and the error of the next message, if any."""

    appended: int
    error: StoreUnavailable | MessageRejected | None


@dataclass(slots=True)
class Delays:
    """Delays of a topic's delivered messages: a count per class of DELAYS_S, and their sum in s."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    seconds: int = 0

    def add(self, delay_ms: int) -> None:
        """Count a message. The delay is truncated to whole seconds, as in RocketMQ."""
        seconds = max(0, delay_ms) // _MS
        self.counts[bisect_left(DELAYS_S, seconds)] += 1
        self.seconds += seconds


class Delivery(ABC):
    """Delivers messages that waited for their time. Thread-safe.

    ``put`` puts messages in order: either all of them, or only the first messages.
    """

    def __init__(self, log: ServedLog, put: Callable[[Sequence[Message]], Put]) -> None:
        self._log = log
        self._put = put
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether messages may wait in the queues after the last call of :meth:`deliver`."""

    @abstractmethod
    def deliver(self, now: int, *, limit: int | None = None) -> int:
        """Deliver at most ``limit`` messages that are due at a time (ms); return their number.

        Raises:
            StoreUnavailable: if a put failed. The messages before the failed message stay
                delivered, and the next call continues after them.
        """

    @abstractmethod
    def save(self) -> bool:
        """Save and sync the progress; return whether any file was written.

        Raises:
            StoreUnavailable: if the write failed; the previously saved progress stays valid.
        """

    def _put_all(self, messages: Sequence[Message]) -> Iterator[tuple[int, str | None]]:
        """Put messages; for each message, yield its number, and the reason if the store rejects it.

        The delivery continues after a rejected message, which would otherwise block all later
        messages.
        """
        numbers = list(range(len(messages)))
        while numbers:
            count, refusal = self._put([messages[number] for number in numbers])
            yield from ((number, None) for number in numbers[:count])
            if refusal is None:
                return
            if isinstance(refusal, StoreUnavailable):
                raise refusal
            refused = count if count or refusal.index is None else refusal.index
            yield numbers[refused], str(refusal)
            numbers = numbers[count:refused] + numbers[refused + 1 :]


class _Due(NamedTuple):
    time: int
    level: int
    queue_offset: int
    physical_offset: int
    size: int


class DelayedDelivery(Delivery):
    """The delivery of the messages with a delay level.

    Attributes:
        offsets: next queue offset of each delay level that has delivered messages.
        delays: for each topic, the delays of delivered messages since their born time.
    """

    is_waiting = True

    def __init__(
        self,
        log: ServedLog,
        put: Callable[[Sequence[Message]], Put],
        levels_ms: Sequence[int],
        progress: DelayProgress,
    ) -> None:
        super().__init__(log, put)
        self._levels_ms = levels_ms
        self._progress = progress
        self._saving = threading.Lock()
        # A writer with more levels in its configuration may have filled further queues.
        known = {*range(len(levels_ms)), *log.queue_ids(props.SCHEDULE_TOPIC)}
        self._queue_ids = sorted(queue_id for queue_id in known if queue_id >= 0)
        self.delays: dict[str, Delays] = {}
        self.offsets: dict[int, int] = {}
        self._find_offsets()

    # ------------------------------------------------------------------------------------ start
    def _find_offsets(self) -> None:
        saved = self._progress.load()
        if saved is not None:
            self.offsets = dict(saved.offsets)
        is_wrong = False
        for queue_id in self._queue_ids:
            queue = self._queue(queue_id)
            level = queue_id + 1
            if level not in self.offsets:
                continue
            # If there is no queue, the level starts at the first message that the queue will have.
            low, high = (0, 0) if queue is None else queue.bounds()
            if low <= self.offsets[level] <= high:
                continue
            logger.warning(
                "delay level %d: the saved offset is %d, but the queue has offsets %d to %d. The "
                "delivery continues at %d and skips messages whose delivery is in the log",
                *(level, self.offsets[level], low, high, low),
            )
            # QUIRK: Java (correctDelayOffset) continues at the queue's end, and so skips messages
            # if the progress file belongs to another store.
            is_wrong |= self.offsets[level] > high
            self.offsets[level] = low
        waiting = self._waiting()
        if waiting:
            self._find_delivered(saved, min(waiting), is_wrong=is_wrong)

    def _queue(self, queue_id: int) -> Queue | None:
        return self._log.queue(props.SCHEDULE_TOPIC, queue_id)

    def _find_delivered(self, saved: Progress | None, first: int, *, is_wrong: bool) -> None:
        """Skip messages whose deliveries are in the log, from physical offset ``first`` on."""
        start, unique = first, True
        if saved is None:
            # Nothing was delivered yet, or the progress file is lost. If the file is lost, only a
            # log that starts at 0 shows all deliveries.
            unique = self._log.start > 0
        elif saved.position != UNKNOWN and not is_wrong:
            # If a saved offset is wrong, the saved position cannot be trusted either.
            if saved.position > self._log.end:
                return
            start, unique = max(first, saved.position), False
        known = advance(self.offsets, self._log.runs(start), self._pending_of, unique=unique)
        if known:
            logger.warning("%d delayed messages were already delivered: found in the log", known)

    def _waiting(self) -> list[int]:
        """Return the physical offset of each level's first message that may be undelivered."""
        found: list[int] = []
        for queue_id in self._queue_ids:
            queue = self._queue(queue_id)
            if queue is not None:
                start = max(self.offsets.get(queue_id + 1, 0), queue.min_offset)
                found += [entry.physical_offset for _, entry in islice(queue.entries(start), 1)]
        return found

    def _pending_of(self, level: int, offset: int) -> Iterator[tuple[int, Frame | None]]:
        queue = self._queue(level - 1)
        if queue is None:
            return
        for at, entry in queue.entries(max(offset, queue.min_offset)):
            if not entry.is_filler:
                yield at, self._log.message(entry.physical_offset, entry.size)

    # ------------------------------------------------------------------------------------- work
    def deliver(
        self, now: int, *, limit: int | None = None, levels: Iterable[int] | None = None
    ) -> int:
        """See :meth:`Delivery.deliver`; if ``levels`` is given, deliver only these levels."""
        chosen = None if levels is None else set(levels)
        count = 0
        with self._lock:
            while limit is None or count < limit:
                due = self._due(now, chosen)[: None if limit is None else limit - count]
                if not due:
                    break
                while due:
                    delivered, passed = self._deliver(due)
                    count += delivered
                    due = due[passed:]
        return count

    def _due(self, now: int, chosen: set[int] | None) -> list[_Due]:
        """Return due messages in order, at least the first due message."""
        found: list[_Due] = []
        until: int | None = None
        is_waiting = chosen is not None
        for queue_id in self._queue_ids:
            level = queue_id + 1
            queue = self._queue(queue_id)
            if queue is None or (chosen is not None and level not in chosen):
                continue
            if self.offsets.get(level, 0) >= queue.max_offset:
                continue
            is_waiting = True
            due, is_cut = self._due_of(level, queue, now)
            found += due
            if is_cut and due:
                until = due[-1].time if until is None else min(until, due[-1].time)
        self.is_waiting = is_waiting
        found.sort()
        # If a level has more due messages than were read, later messages of other levels wait.
        return found if until is None else [one for one in found if one.time <= until]

    def _due_of(self, level: int, queue: Queue, now: int) -> tuple[list[_Due], bool]:
        low, high = queue.bounds()
        start = max(self.offsets.get(level, 0), low)
        units = queue.units(start, start + AT_ONCE)
        times = self._times(level, units, now)
        late = np.flatnonzero(times > now)
        count = int(late[0]) if len(late) else len(units)
        # Deliver in the order of the queue, even if the clock was set back between two puts.
        order = np.maximum.accumulate(times[:count]).tolist()
        there = has_message(units[:count])
        offsets, sizes = units["physical_offset"].tolist(), units["size"].tolist()
        found = [
            _Due(order[at], level, start + at, offsets[at], sizes[at])
            for at in np.flatnonzero(there).tolist()
        ]
        if count and not found:
            # All entries that were read are unwritten or fillers: skip them.
            self.offsets[level] = start + count
        return found, count == len(units) and start + count < high

    def _times(self, level: int, units: Units, now: int) -> Int64:
        """Return the due time of each entry (``correctDeliverTimestamp``).

        Like RocketMQ, treat a message as due now if its due time is later than now plus the level's
        delay. So even if the clock was set back, a message waits at most for the level's delay.
        """
        times: Int64 = units["tags_code"].astype(np.int64)
        known = level <= len(self._levels_ms)
        delay_ms = self._levels_ms[level - 1] if known else 0
        for at in np.flatnonzero(times < _LEAST_TAGS_CODE).tolist():
            offset, size, _ = units[at].item()
            times[at] = self._log.store_time_at(offset, size) + delay_ms
        if known:
            times[times > now + delay_ms] = now
        return times

    def _deliver(self, due: list[_Due]) -> tuple[int, int]:
        """Put due messages, as many as one call of ``put`` accepts.

        Returns:
            The number of delivered messages, and the number of messages that were delivered or
            skipped.
        """
        passed: list[_Due] = []
        taken: list[_Due] = []
        messages: list[Message] = []
        outcomes: dict[_Due, str | None] = {}
        room = BYTES_AT_ONCE
        for one in due[:AT_ONCE]:
            if room < 0:
                break
            room -= one.size
            passed.append(one)
            try:
                messages.append(self._message(one))
                taken.append(one)
            except Undeliverable as error:
                outcomes[one] = str(error)
        delivered = 0
        try:
            for number, why in self._put_all(messages):
                outcomes[taken[number]] = why
                if why is None:
                    delivered += 1
                    self._count(taken[number], messages[number])
        finally:
            for one in passed:
                if one not in outcomes:
                    break
                self.offsets[one.level] = one.queue_offset + 1
                why = outcomes[one]
                if why is not None:
                    logger.error(
                        "the delayed message at physical offset %d (level %d, offset %d) cannot be "
                        "delivered: %s",
                        *(one.physical_offset, one.level, one.queue_offset, why),
                    )
        return delivered, len(passed)

    def _count(self, one: _Due, message: Message) -> None:
        assert message.born_timestamp is not None
        delays = self.delays.get(message.topic)
        if delays is None:
            # Replace the table instead of changing it: other threads read it.
            self.delays = self.delays | {message.topic: (delays := Delays())}
        delays.add(one.time - message.born_timestamp)

    def _message(self, one: _Due) -> Message:
        frame = self._log.message(one.physical_offset, one.size)
        if frame is None:
            raise Undeliverable("there is no sound message at its offset")
        return due_message(frame)

    def save(self) -> bool:
        """See :meth:`Delivery.save`."""
        with self._lock:
            progress = Progress(dict(sorted(self.offsets.items())), self._log.end)
        with self._saving:
            return self._progress.save(progress)


# --------------------------------------------------------------------------------------------------
# The thread that delivers while a store is open (``ScheduleMessageService``)

_INTERVAL_MS: Final = 100
"""Interval of the checks of the queues (``DELAY_FOR_A_WHILE``). The interval is fixed, because the
clock may be set while the thread sleeps.
"""
_IDLE_INTERVAL_MS: Final = 250
"""The interval while no message waits; RocketMQ's shortest delay is 1 s."""
_BETWEEN_SAVES: Final = 20_000
"""After at most this many deliveries, the service checks whether it must save the progress."""


class DeliveryService(Service):
    """Delivers due messages, and saves the progress periodically. All clocks return ms.

    ``dispatched`` returns the physical offset up to which the log is dispatched.
    """

    def __init__(
        self,
        deliveries: Sequence[Delivery],
        health: Health,
        *,
        clock: Callable[[], int],
        dispatched: Callable[[], int],
        save_interval_ms: int,
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        super().__init__("delivery", health, interval_ms=_INTERVAL_MS)
        self._deliveries = deliveries
        self._clock = clock
        self._dispatched = dispatched
        self._idle_at = -1
        self._save_interval = save_interval_ms
        self._monotonic = monotonic
        self._save_at = monotonic() + save_interval_ms
        self._is_failing = False

    def run_once(self) -> None:
        """Deliver due messages."""
        try:
            dispatched = self._dispatched()
            # If no message waits and the log has not grown, do not search the queues: in an idle
            # process, the search would take most of the processor time.
            if dispatched != self._idle_at:
                is_idle = self._deliver()
                self._idle_at = dispatched if is_idle else -1
                self.interval_ms = _IDLE_INTERVAL_MS if is_idle else _INTERVAL_MS
            self._save_if_due()
            self._is_failing = False
        except StoreUnavailable as error:
            self.health.require_writable()
            if not self._is_failing:
                logger.warning("delivery of delayed messages failed, will be retried: %s", error)
            self._is_failing = True

    def _deliver(self) -> bool:
        """Deliver due messages; return whether no message waits any more."""
        for delivery in self._deliveries:
            while delivery.deliver(self._clock(), limit=_BETWEEN_SAVES):
                self._save_if_due()
                if self.is_stopping:
                    return False
        return not any(delivery.is_waiting for delivery in self._deliveries)

    def _save_if_due(self) -> None:
        if self._monotonic() >= self._save_at:
            for delivery in self._deliveries:
                delivery.save()
            self._save_at = self._monotonic() + self._save_interval
