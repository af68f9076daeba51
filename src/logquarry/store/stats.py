"""Counts the calls of an open store, their durations and rates (``StoreStatsService``)."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from logquarry.store.schedule.delivery import Delays
from logquarry.store.single_calls import BUCKETS, SIZES, CallCounter, CallCounts
from logquarry.store.state import StoreState, TopicStats
from logquarry.text import document
from logquarry.write.put_many import PutManyResult

Clock = Callable[[], float]

WINDOWS: Final = (10, 60, 600)
"""The lengths of time, in seconds, over which rates are computed."""
_MS: Final = 1_000


class Rates(NamedTuple):
    """Averages per second over the last 10, 60 and 600 seconds. If the store has been open for a
    shorter time, the average begins at the opening.
    """

    last_10_s: float
    last_60_s: float
    last_600_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """The counts, durations and rates of the calls of one store object.

    Attributes:
        seconds: seconds since the store was opened.
        put_messages: number of messages that were put. The messages of a batch are counted one by
            one.
        put_bytes: total size in the log of the messages that were put.
        put_failed: number of puts that the store refused (``putMessageFailedTimes``).
        put_times: number of puts in each class of durations (``putMessageDistributeTime``). The
            duration of a put includes the time that it waits for the flush and for a replica.
        put_longest_ms: the longest duration of a put (``putMessageEntireTimeMax``).
        lock_longest_ms: the longest time that a put held the lock of the log.
        put_rates: messages put per second.
        topics: for each topic, the number and the bytes of the messages that were put.
        get_found: number of gets that returned messages.
        get_missed: number of gets that returned no message.
        get_messages: number of messages returned by gets.
        get_rates: messages returned by gets, per second (``getTransferedTps``).
        get_found_rates: gets that returned messages, per second (``getFoundTps``).
        get_missed_rates: gets that returned no message, per second (``getMissTps``).
        get_longest_ms: the longest duration of a get (``getMessageEntireTimeMax``).
        dispatch_behind: number of bytes at the log's end that are not dispatched to the queues yet
            (``dispatchBehindBytes``).
        flush_behind: number of bytes at the log's end that are not known to be synced; 0 also if
            :attr:`StoreState.flush_behind` is unknown.
        sizes: number of messages whose frame has a size in each class of :data:`SIZES`; the last
            number is for larger frames. All frames of a batch are counted with the average size of
            the batch.
        delays: for each topic, the delays of its delivered messages, measured from their born time
            (:class:`Delays`).
        state: the state of the store at the same time; empty if the store is closed.
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
        """The average size of a message's frame in bytes (``putMessageAverageSize``)."""
        return self.put_bytes / self.put_messages if self.put_messages else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as a JSON document."""
        return document(self)


class _Sample(NamedTuple):
    time: float
    put: int
    get_messages: int
    get_found: int
    get_missed: int


class StatsRecorder(CallCounter):
    """Counts the puts and gets of a store. Any thread may call the methods."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._began = clock()
        self._samples: deque[_Sample] = deque([_Sample(self._began, 0, 0, 0, 0)])

    def put_many(self, result: PutManyResult, seconds: float) -> None:
        """Count the messages of one bulk put.

        The time for which the put held the log's lock is not measured.
        """
        counts = self.counts()
        for topic, (messages, size) in result.topics.items():
            counts.add_topic(topic, messages, size)
        large = result.size[result.size > SIZES[0]]
        if len(large):
            found = np.bincount(np.searchsorted(SIZES, large), minlength=len(counts.sizes))
            counts.sizes = [a + b for a, b in zip(counts.sizes, found.tolist(), strict=True)]
        counts.whole(seconds)

    def loaded(self, topic: str, messages: int, size: int) -> None:
        """Count the messages that a load has added to one topic.

        The duration of the load and the sizes of single messages are not counted.
        """
        self.counts().add_topic(topic, messages, size)

    def sample(self) -> None:
        """Record the counts at this time, for the computation of rates.

        A thread calls this method about once a second.
        """
        entry = self._entry(self.total())
        self._samples.append(entry)
        # Keep one sample that is older than the longest of the `WINDOWS`, to compute the rate over
        # this window.
        while len(self._samples) > 2 and self._samples[1][0] <= entry[0] - WINDOWS[-1]:
            self._samples.popleft()

    def _entry(self, total: CallCounts) -> _Sample:
        put = sum(found.messages for found in total.topics.values())
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
        """Return the counts and rates up to now."""
        total = self.total()
        now = self._entry(total)
        samples = list(self._samples)
        return StoreStats(
            seconds=now.time - self._began,
            put_messages=now.put,
            put_bytes=sum(found.size for found in total.topics.values()),
            put_failed=total.failed,
            put_times={
                label: count for (label, _), count in zip(BUCKETS, total.all_times(), strict=True)
            },
            put_longest_ms=total.longest * _MS,
            lock_longest_ms=total.lock_longest_ms,
            put_rates=_rates(samples, now, 1),
            topics={
                name: TopicStats(found.messages, found.size)
                for name, found in sorted(total.topics.items())
            },
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
    """Compute the rate since the newest sample that is at least ``window`` seconds old.

    If no sample is so old, compute the rate since the oldest sample.
    """
    since = samples[0]
    for sample in samples:
        if sample[0] > now[0] - window:
            break
        since = sample
    seconds = now[0] - since[0]
    return (now[which] - since[which]) / seconds if seconds > 0 else 0.0
