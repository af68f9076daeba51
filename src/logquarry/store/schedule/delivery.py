"""Delivers delayed messages when they are due (``ScheduleMessageService``), in a background thread.

::

    schedule topic, queue = level - 1    entries: [physical offset][size][delivery time]
        | due: time <= now               in the order of the queue, level by level
        v
    due_message                          -> the real topic and queue
        v
    put, in bulk                         -> progress: next offset of each level

Each message is delivered once. Messages of one level are delivered in the order of their queue. Due
messages of different levels are delivered in the order of their due times. If a message cannot be
delivered, the delivery logs an error and continues with the next one.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import numpy as np

from logquarry.disk.service import Health, Service, monotonic_ms
from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format import properties as props
from logquarry.format.arrays import Int64
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.read.live_read import ServedLog
from logquarry.read.queue import Queue, Units, has_message
from logquarry.store.schedule.progress import (
    UNKNOWN,
    DelayProgress,
    Progress,
    Undeliverable,
    advance,
    due_message,
)
from logquarry.text import counted

logger = logging.getLogger(__name__)


AT_ONCE: Final = 2_048
"""Maximum number of queue entries per read, and of messages per put call."""
BYTES_AT_ONCE: Final = 8 << 20
_LEAST_TAGS_CODE: Final = -(1 << 31)
"""If the tags code of an entry is smaller, it is no delivery time, but an address in the
ConsumeQueueExt.
"""
DELAYS_S: Final = (60, 600, 3_600, 12 * 3_600, 24 * 3_600, 3 * 24 * 3_600)
"""Upper bounds, in seconds, of the classes of delays (RocketMQ 5).

One more class holds the delays above the last bound.
"""
_MS: Final = 1_000
PutInOrder = Callable[[Sequence[Message]], object]
_One = TypeVar("_One")


@dataclass(slots=True)
class Delays:
    """The delays of a topic's delivered messages: the number of messages in each class of DELAYS_S,
    and the sum of the delays in seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    seconds: int = 0

    def add(self, delay_ms: int) -> None:
        """Count one delivered message. The delay is truncated to whole seconds, as in RocketMQ."""
        seconds = max(0, delay_ms) // _MS
        self.counts[bisect_left(DELAYS_S, seconds)] += 1
        self.seconds += seconds


class Delivery(ABC):
    """Delivers messages whose delivery time has come. Thread-safe.

    ``put`` appends messages in their order. If ``put`` cannot append all messages, it raises an
    error, with the result for the appended messages in the attribute ``appended``.
    """

    def __init__(self, log: ServedLog, put: PutInOrder) -> None:
        self._log = log
        self._put = put
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def is_waiting(self) -> bool:
        """Whether messages may still wait after the last call of :meth:`deliver`."""

    @abstractmethod
    def deliver(self, now: int, *, limit: int | None = None) -> int:
        """Deliver the messages that are due at the time ``now`` (ms), at most ``limit``; return how
        many.

        Raises:
            StoreUnavailable: if the put of a message failed. The earlier messages stay delivered,
                and the next call continues with the failed message.
        """

    @abstractmethod
    def save(self) -> bool:
        """Save and sync the progress; return whether any file was written.

        Raises:
            StoreUnavailable: if the write failed. Then the progress of the previous save remains on
                the disk.
        """

    def _put_due(
        self, due: Iterable[_One], message: Callable[[_One], Message]
    ) -> Iterator[tuple[_One, Message | None, str | None]]:
        """For each item of ``due``, put the message that the function ``message`` returns. Yield
        three values for each item: the item, its message (None if there is no message to put), and
        the reason why the message cannot be delivered (None if it was delivered).

        After a rejected message, continue with the next one, so that a rejected message does not
        block all later messages.
        """
        left: list[tuple[_One, Message]] = []
        for one in due:
            try:
                left.append((one, message(one)))
            except Undeliverable as reason:
                yield one, None, str(reason)
        while left:
            error: StoreUnavailable | MessageRejected | None = None
            try:
                self._put([made for _, made in left])
                count = len(left)
            except (StoreUnavailable, MessageRejected) as failure:
                error = failure
                count = 0 if error.appended is None else error.appended.message_count
            yield from ((one, made, None) for one, made in left[:count])
            if error is None:
                return
            if isinstance(error, StoreUnavailable):
                raise error
            refused = count if count or error.index is None else error.index
            yield *left[refused], str(error)
            left = left[count:refused] + left[refused + 1 :]

    def _frame(self, physical_offset: int, size: int) -> Frame:
        frame = self._log.message(physical_offset, size)
        if frame is None:
            raise Undeliverable("there is no sound message at its offset")
        return frame


class _Due(NamedTuple):
    time: int
    level: int
    queue_offset: int
    physical_offset: int
    size: int


class DelayedDelivery(Delivery):
    """Delivers the messages that have a delay level.

    Attributes:
        offsets: for each delay level with delivered messages, the queue offset of the next message
            to deliver.
        delays: for each topic, the delays from a message's born time to its due time.
    """

    is_waiting = True

    def __init__(
        self,
        log: ServedLog,
        put: PutInOrder,
        levels_ms: Sequence[int],
        progress: DelayProgress,
    ) -> None:
        super().__init__(log, put)
        self._levels_ms = levels_ms
        self._progress = progress
        self._saving = threading.Lock()
        # Also deliver from the queues of higher levels: an earlier writer with more levels in its
        # configuration may have filled them.
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
            # Without a queue, continue at 0, where the queue will start.
            low, high = (0, 0) if queue is None else queue.bounds()
            if low <= self.offsets[level] <= high:
                continue
            logger.warning(
                "delay level %d: the saved offset is %d, but the queue has offsets %d to %d. The "
                "delivery continues at %d and skips messages whose delivery is in the log",
                *(level, self.offsets[level], low, high, low),
            )
            # QUIRK: Java continues at the queue's end (correctDelayOffset). Do not: if the progress
            # file belonged to another store, the delivery would skip messages.
            is_wrong |= self.offsets[level] > high
            self.offsets[level] = low
        waiting = self._waiting()
        if waiting:
            self._find_delivered(saved, min(waiting), is_wrong=is_wrong)

    def _queue(self, queue_id: int) -> Queue | None:
        return self._log.queue(props.SCHEDULE_TOPIC, queue_id)

    def _find_delivered(self, saved: Progress | None, first: int, *, is_wrong: bool) -> None:
        """Advance the offsets past messages whose deliveries are in the log from ``first`` on."""
        start, unique = first, True
        if saved is None:
            # There is no progress file: either nothing was delivered yet, or the file was lost. If
            # the file was lost, only a log that starts at 0 surely contains all deliveries.
            unique = self._log.start > 0
        elif saved.position != UNKNOWN and not is_wrong:
            # The saved position was written together with the offsets, so the position is used only
            # if no offset is wrong.
            if saved.position > self._log.end:
                return
            start, unique = max(first, saved.position), False
        known = advance(self.offsets, self._log.runs(start), self._pending_of, unique=unique)
        if known:
            were = counted(known, "delayed message was", "delayed messages were")
            logger.warning("%s already delivered: found in the log", were)

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
    def deliver(self, now: int, *, limit: int | None = None) -> int:
        """See :meth:`Delivery.deliver`."""
        count = 0
        with self._lock:
            while limit is None or count < limit:
                due = self._due(now)[: None if limit is None else limit - count]
                if not due:
                    break
                while due:
                    delivered, passed = self._deliver(due)
                    count += delivered
                    due = due[passed:]
        return count

    def _due(self, now: int) -> list[_Due]:
        """Return due messages in the order of delivery: at least one, if any is due."""
        found: list[_Due] = []
        until: int | None = None
        is_waiting = False
        for queue_id in self._queue_ids:
            level = queue_id + 1
            queue = self._queue(queue_id)
            if queue is None or self.offsets.get(level, 0) >= queue.max_offset:
                continue
            is_waiting = True
            due, is_cut = self._due_of(level, queue, now)
            found += due
            if is_cut and due:
                until = due[-1].time if until is None else min(until, due[-1].time)
        self.is_waiting = is_waiting
        found.sort()
        # _due_of reads only a limited number of messages of a level, so a level can have more due
        # messages than were read. `until` is then the due time of the last message that was read.
        # Later messages of other levels must wait, to keep the order of the due times.
        return found if until is None else [one for one in found if one.time <= until]

    def _due_of(self, level: int, queue: Queue, now: int) -> tuple[list[_Due], bool]:
        low, high = queue.bounds()
        start = max(self.offsets.get(level, 0), low)
        units = queue.units(start, start + AT_ONCE)
        times = self._times(level, units, now)
        late = np.flatnonzero(times > now)
        count = int(late[0]) if len(late) else len(units)
        # Even if the clock was set back between two puts, deliver in the order of the queue.
        order = np.maximum.accumulate(times[:count]).tolist()
        there = has_message(units[:count])
        offsets, sizes = units["physical_offset"].tolist(), units["size"].tolist()
        found = [
            _Due(order[at], level, start + at, offsets[at], sizes[at])
            for at in np.flatnonzero(there).tolist()
        ]
        if count and not found:
            # None of these entries has a message: they are unwritten or fillers, so skip them.
            self.offsets[level] = start + count
        return found, count == len(units) and start + count < high

    def _times(self, level: int, units: Units, now: int) -> Int64:
        """Return the time at which each entry's message is due (``correctDeliverTimestamp``).

        If a message would have to wait longer than the level's delay from now on, treat it as due
        now, as RocketMQ does. So no message waits longer than the level's delay, even if the clock
        was set back.
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
        """Put the first of the due messages, as many as fit into one call of ``put``.

        Returns:
            Two numbers: the number of delivered messages, and the number of all messages that were
            delivered or skipped.
        """
        passed: list[_Due] = []
        outcomes: dict[_Due, str | None] = {}
        room = BYTES_AT_ONCE
        for one in due[:AT_ONCE]:
            if room < 0:
                break
            room -= one.size
            passed.append(one)
        delivered = 0
        try:
            for one, message, why in self._put_due(passed, self._message):
                outcomes[one] = why
                if message is not None and why is None:
                    delivered += 1
                    self._count(one, message)
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
            # Other threads read the table, so replace it instead of changing it.
            self.delays = self.delays | {message.topic: (delays := Delays())}
        delays.add(one.time - message.born_timestamp)

    def _message(self, one: _Due) -> Message:
        return due_message(self._frame(one.physical_offset, one.size))

    def save(self) -> bool:
        """See :meth:`Delivery.save`."""
        with self._lock:
            progress = Progress(dict(sorted(self.offsets.items())), self._log.end)
        with self._saving:
            return self._progress.save(progress)


# --------------------------------------------------------------------------------------------------
# The thread that delivers while a store is open (``ScheduleMessageService``)

_INTERVAL_MS: Final = 100
"""How often the thread checks the queues, in milliseconds (``DELAY_FOR_A_WHILE``).

The thread does not sleep until the next due time, because the clock may be set in between.
"""
_IDLE_INTERVAL_MS: Final = 250
"""The interval while no message waits, in ms. RocketMQ's shortest delay is longer: 1 s."""
_BETWEEN_SAVES: Final = 20_000
"""After at most this many deliveries, the service checks whether a save is due."""


class DeliveryService(Service):
    """Delivers due messages, and saves the progress periodically. The clocks return milliseconds.

    ``dispatched`` returns the physical offset up to which the log is dispatched.
    """

    retried = (StoreUnavailable,)

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

    def run_once(self) -> None:
        """Deliver due messages."""
        dispatched = self._dispatched()
        # If no message waited at the last check and the log has not grown since, do not search the
        # queues. A search at each interval would take most of the processor time of an idle
        # process.
        if dispatched != self._idle_at:
            is_idle = self._deliver()
            self._idle_at = dispatched if is_idle else -1
            self.interval_ms = _IDLE_INTERVAL_MS if is_idle else _INTERVAL_MS
        self._save_if_due()

    def _deliver(self) -> bool:
        """Deliver due messages; return True if no message waits any longer."""
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
