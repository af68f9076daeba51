"""Delivers delayed messages (``ScheduleMessageService``), and the thread that does it.

::

    schedule topic, queue = level - 1    entries: [physical offset][size][delivery time]
        | due: time <= now               in the order of the queue, level by level
        v
    due_message                          -> the real topic and queue
        v
    put, in bulk                         -> progress: next offset of each level

Guarantees: the messages of one level are delivered in the order of its queue, each once. The
delivery skips only messages that cannot be delivered: it logs a warning, and they stay in the log.
If messages of several levels are due together, they are delivered in the order of their due times.
The next call repeats a failed put. If the clock was set back, a message waits at most its level's
delay: as in RocketMQ, a message whose due time is later than now plus that delay is due at once.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from logquarry.disk.service import Health, Service, monotonic_ms
from logquarry.errors import MessageRejected, StoreUnavailable
from logquarry.format.frame import Frame
from logquarry.log.walk import Run
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

logger = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]

AT_ONCE: Final = 2_048
"""Maximum number of entries of a level to read at once, and of messages of one put call."""
BYTES_AT_ONCE: Final = 8 << 20
_LEAST_TAGS_CODE: Final = -(1 << 31)
"""Smaller values in an entry are addresses in ConsumeQueueExt, not delivery times."""
DELAYS_S: Final = (60, 600, 3_600, 12 * 3_600, 24 * 3_600, 3 * 24 * 3_600)
"""Upper bounds (s) of the classes of delays, as in RocketMQ 5; one more class has no bound."""
_MS: Final = 1_000


class Put(NamedTuple):
    """The result of a put: the number of appended messages, and why the others failed."""

    appended: int
    error: StoreUnavailable | MessageRejected | None


@dataclass(slots=True)
class Delays:
    """The delays of a topic's delivered messages.

    Attributes:
        counts: number of messages in each class of DELAYS_S, and in a last class of longer delays.
        seconds: the sum of all delays, each in whole seconds.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    seconds: int = 0

    def add(self, delay_ms: int) -> None:
        """Count a message. The delay is truncated to whole seconds, as in RocketMQ."""
        seconds = max(0, delay_ms) // _MS
        self.counts[bisect_left(DELAYS_S, seconds)] += 1
        self.seconds += seconds


class DueLog(Protocol):
    """The reading side of the delivery: the schedule topic's queues, and the log."""

    def schedule_queues(self) -> Iterable[int]:
        """The ids of the schedule queues."""

    def schedule_queue(self, queue_id: int) -> Queue | None:
        """One schedule queue."""

    def message(self, offset: int, size: int) -> Frame | None:
        """The message at a physical offset, None if no sound message of that size is there."""

    def store_time_at(self, offset: int, size: int) -> int:
        """The store time of the message at a physical offset, below 0 if there is none."""

    def runs(self, start: int) -> Iterator[Run]:
        """The frames of the log from a physical offset on, which may lie inside a frame."""

    @property
    def start(self) -> int:
        """The log's start."""

    @property
    def end(self) -> int:
        """The log's end."""


class _Due(NamedTuple):
    """One message that is due."""

    time: int
    level: int
    queue_offset: int
    physical_offset: int
    size: int


class DelayedDelivery:
    """The delivery of one store. Any thread may call it; calls run one at a time.

    Args:
        put: puts messages in order, all of them or the first ones.
        levels_ms: delay of each level, level 1 first.

    Attributes:
        offsets: delay level -> next queue offset, for each level that has delivered.
        skipped: number of messages that could not be delivered.
        delays: for each topic the delays of its delivered messages, from their born time.
        is_waiting: whether the last call of :meth:`deliver` may have left messages in the queues.
    """

    def __init__(
        self,
        log: DueLog,
        put: Callable[[Sequence[Message]], Put],
        levels_ms: Sequence[int],
        progress: DelayProgress,
    ) -> None:
        self._log = log
        self._put = put
        self._levels_ms = levels_ms
        self._progress = progress
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self.delivered = 0
        self.skipped = 0
        self.delays: dict[str, Delays] = {}
        self.offsets: dict[int, int] = {}
        self.is_waiting = True
        self._find_offsets()

    # ------------------------------------------------------------------------------------ start
    def _find_offsets(self) -> None:
        """Find the offsets to continue at: the saved ones, advanced past deliveries in the log."""
        saved = self._progress.load()
        if saved is not None:
            self.offsets = dict(saved.offsets)
        is_wrong = False
        for queue_id in self._log.schedule_queues():
            queue = self._log.schedule_queue(queue_id)
            level = queue_id + 1
            if level not in self.offsets:
                continue
            # If there is no queue, the level starts at 0, with the queue's first message.
            low, high = (0, 0) if queue is None else queue.bounds()
            if low <= self.offsets[level] <= high:
                continue
            logger.warning(
                "delay level %d: the saved offset is %d, but the queue has offsets %d to %d. The "
                "delivery continues at %d and skips messages whose delivery is in the log",
                *(level, self.offsets[level], low, high, low),
            )
            # QUIRK: Java (correctDelayOffset) continues at the queue's end. If the file is of
            # another store, that skips messages.
            is_wrong |= self.offsets[level] > high
            self.offsets[level] = low
        waiting = self._waiting()
        if waiting:
            self._find_delivered(saved, min(waiting), is_wrong=is_wrong)

    def _find_delivered(self, saved: Progress | None, first: int, *, is_wrong: bool) -> None:
        """Skip deliveries found in the log; the first waiting message is at offset ``first``."""
        start, unique = first, True
        if saved is None:
            # Either there was no delivery yet, or the file is lost. Then a log shows all deliveries
            # only if it starts at 0.
            unique = self._log.start > 0
        elif saved.position != UNKNOWN and not is_wrong:
            # If one saved offset is wrong, the position that was saved with it does not count.
            if saved.position > self._log.end:
                return
            start, unique = max(first, saved.position), False
        known = advance(self.offsets, self._log.runs(start), self._pending_of, unique=unique)
        if known:
            logger.warning("%d delayed messages were already delivered: found in the log", known)

    def _waiting(self) -> list[int]:
        """By level, the physical offset of the first message that is not known to be delivered."""
        found: list[int] = []
        for queue_id in self._log.schedule_queues():
            queue = self._log.schedule_queue(queue_id)
            if queue is not None:
                start = max(self.offsets.get(queue_id + 1, 0), queue.min_offset)
                found += [entry.physical_offset for _, entry in islice(queue.entries(start), 1)]
        return found

    def _pending_of(self, level: int, offset: int) -> Iterator[tuple[int, Frame | None]]:
        queue = self._log.schedule_queue(level - 1)
        if queue is None:
            return
        for at, entry in queue.entries(max(offset, queue.min_offset)):
            if not entry.is_filler:
                yield at, self._log.message(entry.physical_offset, entry.size)

    # ------------------------------------------------------------------------------------- work
    def deliver(
        self, now: int, *, limit: int | None = None, levels: Iterable[int] | None = None
    ) -> int:
        """Deliver due messages.

        Args:
            now: the time in milliseconds.
            levels: only these levels (default: all that have a queue).

        Raises:
            StoreUnavailable: if a put failed. Messages delivered before it stay delivered; the next
                call continues after them.
        """
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
        """The next due messages in order, or the first part of them."""
        found: list[_Due] = []
        until: int | None = None
        is_waiting = chosen is not None
        for queue_id in self._log.schedule_queues():
            level = queue_id + 1
            queue = self._log.schedule_queue(queue_id)
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
        # Messages whose entries are not read yet may be due before messages of other levels.
        return found if until is None else [one for one in found if one.time <= until]

    def _due_of(self, level: int, queue: Queue, now: int) -> tuple[list[_Due], bool]:
        low, high = queue.bounds()
        start = max(self.offsets.get(level, 0), low)
        units = queue.units(start, start + AT_ONCE)
        times = self._times(level, units, now)
        late = np.flatnonzero(times > now)
        count = int(late[0]) if len(late) else len(units)
        # Keep the order of the queue, even if the clock was set back between two puts.
        order = np.maximum.accumulate(times[:count]).tolist()
        there = has_message(units[:count])
        offsets, sizes = units["physical_offset"].tolist(), units["size"].tolist()
        found = [
            _Due(order[at], level, start + at, offsets[at], sizes[at])
            for at in np.flatnonzero(there).tolist()
        ]
        if count and not found:
            # These are only entries that were never written: skip them.
            self.offsets[level] = start + count
        return found, count == len(units) and start + count < high

    def _times(self, level: int, units: Units, now: int) -> Int64:
        """The due time of each entry (``correctDeliverTimestamp``)."""
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
        """Put due messages, at most as many as one put call takes.

        Returns:
            The number of delivered messages, and the number of delivered or skipped messages.
        """
        passed: list[_Due] = []
        taken: list[_Due] = []
        messages: list[Message] = []
        reasons: dict[_Due, str] = {}
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
                reasons[one] = str(error)
        delivered = 0
        failure: StoreUnavailable | None = None
        while messages:
            count, refusal = self._put(messages)
            delivered += count
            self.delivered += count
            self._count(taken[:count], messages)
            if refusal is None:
                break
            if isinstance(refusal, StoreUnavailable):
                failure = refusal
                passed = passed[: passed.index(taken[count])]
                break
            # Skip this message: it can never be delivered, and all messages after it would wait
            # forever.
            refused = count if count or refusal.index is None else refusal.index
            reasons[taken[refused]] = str(refusal)
            taken = taken[count:refused] + taken[refused + 1 :]
            messages = messages[count:refused] + messages[refused + 1 :]
        for one in passed:
            self.offsets[one.level] = one.queue_offset + 1
            if one in reasons:
                self._skip(one, reasons[one])
        if failure is not None:
            raise failure
        return delivered, len(passed)

    def _count(self, taken: list[_Due], messages: list[Message]) -> None:
        for one, message in zip(taken, messages, strict=False):
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

    def _skip(self, one: _Due, why: str) -> None:
        self.skipped += 1
        logger.error(
            "the delayed message at physical offset %d (level %d, offset %d) cannot be delivered: "
            "%s",
            *(one.physical_offset, one.level, one.queue_offset, why),
        )

    def save(self) -> bool:
        """Save the progress durably; returns whether anything was written.

        Raises:
            StoreUnavailable: if the write failed; the progress saved before stays valid.
        """
        with self._lock:
            progress = Progress(dict(sorted(self.offsets.items())), self._log.end)
        with self._saving:
            return self._progress.save(progress)


# --------------------------------------------------------------------------------------------------
# The thread that delivers while a store is open (``ScheduleMessageService``)

_INTERVAL_MS: Final = 100
"""Interval of the checks of the queues (``DELAY_FOR_A_WHILE``). A fixed interval, because the clock
may be set while the thread sleeps.
"""
_IDLE_INTERVAL_MS: Final = 250
"""The interval while no message waits. It is shorter than RocketMQ's shortest delay, 1 s."""
_BETWEEN_SAVES: Final = 20_000
"""Maximum number of deliveries between two checks whether to save the progress."""


class Delivery(Protocol):
    """Delivers messages that waited for their time."""

    @property
    def is_waiting(self) -> bool:
        """Whether the last call of :meth:`deliver` may have left messages in the queues."""

    def deliver(self, now: int, *, limit: int | None = None) -> int:
        """Deliver due messages; returns how many."""

    def save(self) -> bool:
        """Save the progress durably; returns whether anything was written."""


class DeliveryService(Service):
    """Delivers due messages, and saves the progress periodically.

    Args:
        clock: gives the time in milliseconds.
        dispatched: gives the physical offset up to which the queues have the log's messages.
        monotonic: the clock for that interval, in milliseconds.
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
            # If no message waits and none is new, do not search the queues: in an idle process
            # this search would take most of the store's processor time.
            if dispatched != self._idle_at:
                is_idle = self._deliver()
                self._idle_at = dispatched if is_idle else -1
                self.interval_ms = _IDLE_INTERVAL_MS if is_idle else _INTERVAL_MS
            self._save_if_due()
            self._is_failing = False
        except StoreUnavailable as error:
            self.health.require_writable()
            # The disk is full or busy: the next run tries again.
            if not self._is_failing:
                logger.warning("delivery of delayed messages failed, will be retried: %s", error)
            self._is_failing = True

    def _deliver(self) -> bool:
        """Deliver due messages; returns whether no message waits any more."""
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
