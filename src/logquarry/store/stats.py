"""Counts the calls of an open store: puts, gets, times, rates (``StoreStatsService``).

Each thread counts in its own object, so that a put takes no lock; :meth:`StatsRecorder.snapshot`
sums them up. :mod:`logquarry.store.state` has the state of the store.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from logquarry.store.schedule.delivery import Delays
from logquarry.store.state import StoreState, TopicStats
from logquarry.write.put_many import PutManyResult
from logquarry.write.put_result import PutResult

Clock = Callable[[], float]

BUCKETS: Final = (
    ("<1ms", 0.001),
    ("1-10ms", 0.01),
    ("10-50ms", 0.05),
    ("50-100ms", 0.1),
    ("100-200ms", 0.2),
    ("200-500ms", 0.5),
    ("500ms-1s", 1.0),
    ("1-2s", 2.0),
    ("2-3s", 3.0),
    ("3-4s", 4.0),
    ("4-5s", 5.0),
    ("5-10s", 10.0),
    (">10s", float("inf")),
)
"""Durations of whole puts: RocketMQ's classes, and the upper bound of each, in seconds."""
WINDOWS: Final = (10, 60, 600)
"""Seconds over which rates are computed."""
SIZES: Final = (1 << 10, 4 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Upper bounds of the classes of message sizes, in bytes, as in RocketMQ 5. One more class has the
larger messages."""

_BOUNDS: Final = tuple(bound for _, bound in BUCKETS)
_FIRST_BOUND: Final = _BOUNDS[0]
_SMALL: Final = SIZES[0]
_MS: Final = 1_000


class Rates(NamedTuple):
    """Rates per second over the last 10, 60 and 600 seconds, or since the store was opened."""

    last_10_s: float
    last_60_s: float
    last_600_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """The counts, times and rates of a store object.

    Attributes:
        seconds: seconds since it was opened.
        put_messages: messages that were put; each message of a batch counts.
        put_bytes: their bytes in the log.
        put_failed: puts that were refused (``putMessageFailedTimes``).
        put_times: whole puts by how long they took (``putMessageDistributeTime``).
        put_longest_ms: the longest whole put (``putMessageEntireTimeMax``).
        lock_longest_ms: the longest time that a put held the log's lock.
        put_rates: messages put.
        topics: messages put, by topic.
        get_found: gets that returned messages.
        get_missed: gets that returned none.
        get_messages: messages that gets returned.
        get_rates: messages that gets returned (``getTransferedTps``).
        get_found_rates: gets that returned messages (``getFoundTps``).
        get_missed_rates: gets that returned none (``getMissTps``).
        get_longest_ms: the longest get (``getMessageEntireTimeMax``).
        dispatch_behind: bytes of the log that are in no queue yet (``dispatchBehindBytes``).
        flush_behind: bytes of the log that are not known to be on the disk.
        sizes: messages put by frame size: a class for each of :data:`SIZES`, and one for larger
            frames. A batch counts as messages of equal size.
        delays: by topic, delivered messages by their delay since they were born
            (:class:`Delays`).
        state: the store's current state; empty after the store was closed.
    """

    seconds: float
    put_messages: int
    put_bytes: int
    put_failed: int
    put_times: Mapping[str, int]
    put_longest_ms: float
    lock_longest_ms: float
    put_rates: Rates
    topics: Mapping[str, TopicStats]
    get_found: int
    get_missed: int
    get_messages: int
    get_rates: Rates
    get_found_rates: Rates
    get_missed_rates: Rates
    get_longest_ms: float
    dispatch_behind: int
    flush_behind: int
    sizes: tuple[int, ...]
    delays: Mapping[str, Delays]
    state: StoreState

    @property
    def put_average_size(self) -> float:
        """Average bytes of a frame (``putMessageAverageSize``)."""
        return self.put_bytes / self.put_messages if self.put_messages else 0.0

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON document."""
        document = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        document["put_times"] = dict(self.put_times)
        document["topics"] = {name: found._asdict() for name, found in self.topics.items()}
        for name in ("put_rates", "get_rates", "get_found_rates", "get_missed_rates"):
            document[name] = document[name]._asdict()
        document["sizes"] = list(self.sizes)
        document["delays"] = {
            name: dataclasses.asdict(found) for name, found in self.delays.items()
        }
        document["state"] = self.state.to_json()
        return document


class _Sample(NamedTuple):
    """The counts at one time."""

    time: float
    put: int
    get_messages: int
    get_found: int
    get_missed: int


class _Counts:
    """The counts of one thread."""

    __slots__ = (
        "failed",
        "get_found",
        "get_longest",
        "get_messages",
        "get_missed",
        "lock_longest_ms",
        "longest",
        "sizes",
        "times",
        "topics",
    )

    def __init__(self) -> None:
        self.failed = 0
        self.longest = 0.0
        self.lock_longest_ms = 0.0
        self.times = [0] * len(BUCKETS)
        # The first class is not counted: it is computed as the number of all messages minus the
        # other classes.
        self.sizes = [0] * (len(SIZES) + 1)
        # Messages and bytes by topic.
        self.topics: dict[str, list[int]] = {}
        self.get_found = self.get_missed = self.get_messages = 0
        self.get_longest = 0.0

    def add_topic(self, topic: str, messages: int, size: int) -> None:
        """Count messages of a topic, and their bytes."""
        found = self.topics.get(topic)
        if found is None:
            found = self.topics[topic] = [0, 0]
        found[0] += messages
        found[1] += size

    def longest_get(self, seconds: float) -> None:
        """Note a get that took longer than all before."""
        self.get_longest = seconds

    def add(self, other: _Counts) -> None:
        self.failed += other.failed
        self.longest = max(self.longest, other.longest)
        self.lock_longest_ms = max(self.lock_longest_ms, other.lock_longest_ms)
        self.times = [a + b for a, b in zip(self.times, other.times, strict=True)]
        self.sizes = [a + b for a, b in zip(self.sizes, other.sizes, strict=True)]
        self.get_longest = max(self.get_longest, other.get_longest)
        for topic, (messages, size) in list(other.topics.items()):
            self.add_topic(topic, messages, size)
        self.get_found += other.get_found
        self.get_missed += other.get_missed
        self.get_messages += other.get_messages


class StatsRecorder:
    """Counts the puts and gets of a store. Any thread may use it."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._change = threading.Lock()
        self._own = threading.local()
        self._threads: list[tuple[weakref.ref[threading.Thread], _Counts]] = []
        self._ended = _Counts()
        self._samples: deque[_Sample] = deque([_Sample(self._began, 0, 0, 0, 0)])

    def put(self, topic: str, result: PutResult, seconds: float) -> None:
        """Count a put whose message is in the log."""
        # This one function adds all counts: a further call would take longer than the counting.
        try:
            counts: _Counts = self._own.counts
        except AttributeError:
            counts = self._counts()
        _, _, _, _, _, size, messages, _, held_ms, _, _ = result
        found = counts.topics.get(topic)
        if found is None:
            counts.add_topic(topic, messages, size)
        else:
            found[0] += messages
            found[1] += size
        counts.lock_longest_ms = max(counts.lock_longest_ms, held_ms)
        if size > _SMALL and messages:
            counts.sizes[bisect_left(SIZES, size // messages)] += messages
        if seconds > counts.longest or seconds >= _FIRST_BOUND:
            self._whole(counts, seconds)
        else:
            counts.times[0] += 1

    def put_many(self, result: PutManyResult, seconds: float) -> None:
        """Count messages of one bulk put. The time in the log's lock is unknown."""
        counts = self._counts()
        for topic, (messages, size) in result.topics.items():
            counts.add_topic(topic, messages, size)
        large = result.size[result.size > _SMALL]
        if len(large):
            found = np.bincount(np.searchsorted(SIZES, large), minlength=len(counts.sizes))
            counts.sizes = [a + b for a, b in zip(counts.sizes, found.tolist(), strict=True)]
        self._whole(counts, seconds)

    def loaded(self, topic: str, messages: int, size: int) -> None:
        """Count messages of a load. Their single times and sizes are unknown."""
        self._counts().add_topic(topic, messages, size)

    @staticmethod
    def _whole(counts: _Counts, seconds: float) -> None:
        if seconds < _BOUNDS[0]:
            counts.times[0] += 1
        else:
            counts.times[bisect_left(_BOUNDS, seconds)] += 1
        counts.longest = max(counts.longest, seconds)

    def put_failed(self) -> None:
        """Count a put whose message is not in the log."""
        self._counts().failed += 1

    def got(self, messages: int, seconds: float = 0.0) -> None:
        """Count a get that returned some messages, and its duration."""
        try:
            counts: _Counts = self._own.counts
        except AttributeError:
            counts = self._counts()
        if seconds > counts.get_longest:
            counts.longest_get(seconds)
        if messages:
            counts.get_found += 1
            counts.get_messages += messages
        else:
            counts.get_missed += 1

    def _counts(self) -> _Counts:
        try:
            counts: _Counts = self._own.counts
        except AttributeError:
            counts = self._own.counts = _Counts()
            thread = weakref.ref(threading.current_thread())
            with self._change:
                self._fold_ended()
                self._threads.append((thread, counts))
        return counts

    def _fold_ended(self) -> None:
        """Add up the counts of ended threads, so that they take no memory."""
        alive = []
        for reference, counts in self._threads:
            thread = reference()
            if thread is None or not thread.is_alive():
                self._ended.add(counts)
            else:
                alive.append((reference, counts))
        self._threads = alive

    def _total(self) -> _Counts:
        total = _Counts()
        with self._change:
            total.add(self._ended)
            for _, counts in self._threads:
                total.add(counts)
        return total

    def sample(self) -> None:
        """Sample the counts for the rates; one thread calls this about once a second."""
        entry = self._entry(self._total())
        self._samples.append(entry)
        # Keep the last sample before the longest window.
        while len(self._samples) > 2 and self._samples[1][0] <= entry[0] - WINDOWS[-1]:
            self._samples.popleft()

    def _entry(self, total: _Counts) -> _Sample:
        put = sum(m for m, _ in total.topics.values())
        gets = total.get_messages, total.get_found, total.get_missed
        return _Sample(self._clock(), put, *gets)

    def snapshot(
        self,
        *,
        dispatch_behind: int = 0,
        flush_behind: int = 0,
        delays: Mapping[str, Delays] | None = None,
        state: StoreState | None = None,
    ) -> StoreStats:
        """The counts now."""
        total = self._total()
        now = self._entry(total)
        samples = list(self._samples)
        return StoreStats(
            seconds=now.time - self._began,
            put_messages=now.put,
            put_bytes=sum(size for _, size in total.topics.values()),
            put_failed=total.failed,
            put_times={
                label: count for (label, _), count in zip(BUCKETS, total.times, strict=True)
            },
            put_longest_ms=total.longest * _MS,
            lock_longest_ms=total.lock_longest_ms,
            put_rates=_rates(samples, now, 1),
            topics={name: TopicStats(*found) for name, found in sorted(total.topics.items())},
            get_found=total.get_found,
            get_missed=total.get_missed,
            get_messages=total.get_messages,
            get_rates=_rates(samples, now, 2),
            get_found_rates=_rates(samples, now, 3),
            get_missed_rates=_rates(samples, now, 4),
            get_longest_ms=total.get_longest * _MS,
            dispatch_behind=dispatch_behind,
            flush_behind=flush_behind,
            sizes=(max(0, now.put - sum(total.sizes[1:])), *total.sizes[1:]),
            delays=dict(delays or {}),
            state=StoreState() if state is None else state,
        )


def _rates(samples: list[_Sample], now: _Sample, which: int) -> Rates:
    return Rates(*(_rate(samples, now, which, window) for window in WINDOWS))


def _rate(samples: list[_Sample], now: _Sample, which: int, window: int) -> float:
    """The rate since the newest sample that has the window's age, else since the first."""
    since = samples[0]
    for sample in samples:
        if sample[0] > now[0] - window:
            break
        since = sample
    seconds = now[0] - since[0]
    return (now[which] - since[which]) / seconds if seconds > 0 else 0.0
