"""Delivers delayed messages: the work of ``ScheduleMessageService``, without any thread.

::

    schedule topic, queue = level - 1    units: [physical offset][size][time of delivery]
        | due: time <= now               in the order of the queue, level by level
        v
    due_message                          -> the real topic and queue
        v
    put, in bulk                         -> progress: next offset of each level

Guarantees: of one level, messages are delivered in the order of its queue, each once, and none is
passed over but those that nothing can be made of (they are logged, and stay in the log). Over all
levels, what is due at the same time is delivered in the order of the due times. A put that fails
is tried again by the next call. A clock that was set back delays nobody by more than their level:
RocketMQ's rule, a message that is due later than now plus its delay is due at once.
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
from logquarry.read.consume_queue import Queue, Units, has_message
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

_AT_ONCE: Final = 2_048
"""Most messages of a level that are looked at in one go, and most that are put by one call."""
_BYTES_AT_ONCE: Final = 8 << 20
_LEAST_TAGS_CODE: Final = -(1 << 31)
"""What is below is an address in ConsumeQueueExt, and no time."""
DELAYS_S: Final = (60, 600, 3_600, 12 * 3_600, 24 * 3_600, 3 * 24 * 3_600)
"""Seconds that each class of delays reaches to, as RocketMQ 5 has them; there is one more."""
_MS: Final = 1_000


class Put(NamedTuple):
    """What came of putting some messages: how many are in the log, and why not all of them."""

    appended: int
    error: StoreUnavailable | MessageRejected | None


@dataclass(slots=True)
class Delays:
    """For how long the messages of a topic were delayed, as they were delivered.

    Attributes:
        counts: messages by their delay, a class for each of DELAYS_S and one for what is longer.
        seconds: the sum of all delays, in whole seconds each.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(DELAYS_S) + 1))
    seconds: int = 0

    def add(self, delay_ms: int) -> None:
        """Count a message. RocketMQ's remainder is dropped towards 0, and so is ours."""
        seconds = max(0, delay_ms) // _MS
        self.counts[bisect_left(DELAYS_S, seconds)] += 1
        self.seconds += seconds


class DueLog(Protocol):
    """What delivery reads: the schedule topic's queues, and the log."""

    def schedule_queues(self) -> Iterable[int]:
        """The ids of the queues that there are."""

    def schedule_queue(self, queue_id: int) -> Queue | None:
        """One of them."""

    def message(self, offset: int, size: int) -> Frame | None:
        """The message at a place of the log, None if no sound one of that size is there."""

    def store_time_at(self, offset: int, size: int) -> int:
        """The store time of the message there, below 0 if there is none."""

    def runs(self, start: int) -> Iterator[Run]:
        """The frames of the log from a place on, which need not be a frame's."""

    @property
    def start(self) -> int:
        """Where the log begins,"""

    @property
    def end(self) -> int:
        """and where it ends."""


class _Due(NamedTuple):
    """One message whose time has come."""

    time: int
    level: int
    queue_offset: int
    physical_offset: int
    size: int


class DelayedDelivery:
    """Delivery of one store. Any thread may call; one is at work at a time.

    Args:
        log: what is read.
        put: puts messages in order, all of them or the first ones.
        levels_ms: delay of each level, level 1 first.
        progress: where progress is kept.

    Attributes:
        offsets: delay level -> next queue offset. A level is there once anything was delivered.
        delivered: messages that this object has delivered,
        skipped: and those that nothing could be made of.
        delays: topic -> for how long what was delivered to it was to be delayed, since it was born.
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
        self._find_offsets()

    # ------------------------------------------------------------------------------------ start
    def _find_offsets(self) -> None:
        """Where delivery goes on: as saved, and behind what the log says was delivered since."""
        saved = self._progress.load()
        if saved is not None:
            self.offsets = dict(saved.offsets)
        for queue_id in self._log.schedule_queues():
            queue = self._log.schedule_queue(queue_id)
            level = queue_id + 1
            if level not in self.offsets:
                continue
            # As Java has it (correctDelayOffset): the queue may not be what it was at that time.
            # One that is not there begins at 0 with its first message.
            low, high = (0, 0) if queue is None else queue.bounds()
            kept = min(max(self.offsets[level], low), high)
            if kept != self.offsets[level]:
                logger.warning(
                    "delay level %d: the next offset is said to be %d, and the queue reaches from "
                    "%d to %d: it goes on at %d",
                    *(level, self.offsets[level], low, high, kept),
                )
                self.offsets[level] = kept
        waiting = self._waiting()
        if waiting:
            self._find_delivered(saved, min(waiting))

    def _find_delivered(self, saved: Progress | None, first: int) -> None:
        """Pass what the log says was delivered; ``first`` is where what waits begins in it."""
        start, unique = first, True
        if saved is None:
            # Nobody has delivered yet, or the file is lost: then a whole log knows.
            unique = self._log.start > 0
        elif saved.position != UNKNOWN:
            if saved.position > self._log.end:
                return
            start, unique = max(first, saved.position), False
        known = advance(self.offsets, self._log.runs(start), self._pending_of, unique=unique)
        if known:
            logger.warning("%d delayed messages were delivered and not noted", known)

    def _waiting(self) -> list[int]:
        """Where in the log the first message of each level stands that is not known delivered."""
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
        """Deliver what is due.

        Args:
            now: the time, in milliseconds.
            limit: most messages.
            levels: only these (default: all that have a queue).

        Returns:
            How many were delivered.

        Raises:
            StoreUnavailable: if a put failed. What was delivered before is; the rest is still to
                be, and the next call begins with it.
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
        """What is due next, in order; not all of it if that is much."""
        found: list[_Due] = []
        until: int | None = None
        for queue_id in self._log.schedule_queues():
            level = queue_id + 1
            queue = self._log.schedule_queue(queue_id)
            if queue is None or (chosen is not None and level not in chosen):
                continue
            due, is_cut = self._due_of(level, queue, now)
            found += due
            if is_cut and due:
                until = due[-1].time if until is None else min(until, due[-1].time)
        found.sort()
        # What comes behind those that were looked at may be due before others of other levels.
        return found if until is None else [one for one in found if one.time <= until]

    def _due_of(self, level: int, queue: Queue, now: int) -> tuple[list[_Due], bool]:
        low, high = queue.bounds()
        start = self.offsets.get(level, 0)
        if start >= high:
            return [], False
        start = max(start, low)
        units = queue.units(start, start + _AT_ONCE)
        times = self._times(level, units, now)
        late = np.flatnonzero(times > now)
        count = int(late[0]) if len(late) else len(units)
        # In the order of the queue, also where the clock went back between two puts.
        order = np.maximum.accumulate(times[:count]).tolist()
        there = has_message(units[:count])
        offsets, sizes = units["physical_offset"].tolist(), units["size"].tolist()
        found = [
            _Due(order[at], level, start + at, offsets[at], sizes[at])
            for at in np.flatnonzero(there).tolist()
        ]
        if count and not found:
            # Nothing but room that was never written: there is nothing to deliver in it.
            self.offsets[level] = start + count
        return found, count == len(units) and start + count < high

    def _times(self, level: int, units: Units, now: int) -> Int64:
        """When each unit's message is due (``correctDeliverTimestamp``)."""
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
        """Put what is due, as far as one call may hold.

        Returns:
            How many were delivered, and how many are done with.
        """
        passed: list[_Due] = []
        taken: list[_Due] = []
        messages: list[Message] = []
        reasons: dict[_Due, str] = {}
        room = _BYTES_AT_ONCE
        for one in due[:_AT_ONCE]:
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
            # Nobody could ever deliver that one: all behind it would wait for ever.
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
                # Others look at them meanwhile.
                self.delays = self.delays | {message.topic: (delays := Delays())}
            delays.add(one.time - message.born_timestamp)

    def _message(self, one: _Due) -> Message:
        frame = self._log.message(one.physical_offset, one.size)
        if frame is None:
            raise Undeliverable("no sound message stands there")
        return due_message(frame)

    def _skip(self, one: _Due, why: str) -> None:
        self.skipped += 1
        logger.error(
            "the delayed message at %d of the log (level %d, offset %d) cannot be delivered: %s",
            *(one.physical_offset, one.level, one.queue_offset, why),
        )

    def save(self) -> bool:
        """Save the progress, durably; whether there was anything to save.

        Raises:
            StoreUnavailable: if that cannot be done; then what was saved before still counts.
        """
        with self._lock:
            progress = Progress(dict(sorted(self.offsets.items())), self._log.end)
        with self._saving:
            return self._progress.save(progress)


# --------------------------------------------------------------------------------------------------
# The thread that delivers delayed messages while a store is open (``ScheduleMessageService``).

_INTERVAL_MS: Final = 100
"""How often the queues are looked at (``DELAY_FOR_A_WHILE``). Not slept until the next message is
due: somebody may set the clock."""
_BETWEEN_SAVES: Final = 20_000
"""Most deliveries between two looks at whether progress is to be saved."""


class DeliveryService(Service):
    """Delivers what is due, and saves the progress now and then.

    Args:
        delivery: does it.
        health: of the store.
        clock: the time, in milliseconds.
        save_interval_ms: how often progress is saved.
        monotonic: the clock of that interval, likewise.
    """

    def __init__(
        self,
        delivery: DelayedDelivery,
        health: Health,
        *,
        clock: Callable[[], int],
        save_interval_ms: int,
        monotonic: Callable[[], int] = monotonic_ms,
    ) -> None:
        super().__init__("delivery", health, interval_ms=_INTERVAL_MS)
        self._delivery = delivery
        self._clock = clock
        self._save_interval = save_interval_ms
        self._monotonic = monotonic
        self._save_at = monotonic() + save_interval_ms
        self._is_failing = False

    def run_once(self) -> None:
        """Deliver what is due."""
        try:
            while self._delivery.deliver(self._clock(), limit=_BETWEEN_SAVES):
                self._save_if_due()
                if self.is_stopping:
                    return
            self._save_if_due()
            self._is_failing = False
        except StoreUnavailable as error:
            self.health.require_writable()
            # A full disk, a busy one: the next look tries again.
            if not self._is_failing:
                logger.warning("delayed messages are not delivered now: %s", error)
            self._is_failing = True

    def _save_if_due(self) -> None:
        if self._monotonic() >= self._save_at:
            self._delivery.save()
            self._save_at = self._monotonic() + self._save_interval
