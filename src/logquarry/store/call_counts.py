"""Counts puts and gets.

Each thread has its own :class:`CallCounts`, so counting a call takes no lock. The duration of a put
includes the time that the put waits for the flush and for the replica. The module is compiled at
the installation if possible (``hatch_build.py``).
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from typing import Final

from logquarry.write.put_parts import Recent
from logquarry.write.put_result import PutResult

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.pythread import PyThread_get_thread_ident

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
"""Classes of put durations, as in RocketMQ, and the upper bound of each class in seconds."""
SIZES: Final = (1 << 10, 4 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Upper bounds, in bytes, of the classes of message sizes (RocketMQ 5).

One more class holds the messages above the last bound.
"""

_BOUNDS: Final = tuple(bound for _, bound in BUCKETS)
_FIRST_BOUND = _BOUNDS[0]
_SMALL = SIZES[0]


class TopicCount:
    """The number of messages that one topic received, and their total size in the log in bytes."""

    def __init__(self) -> None:
        self.messages = 0
        self.size = 0


class CallCounts:
    """The counts of one thread.

    Attributes:
        failed: number of puts that the store refused.
        quick: number of puts in the first class of :data:`BUCKETS`.
        longest: the longest duration of a put, in seconds.
        lock_longest_ms: the longest time, in milliseconds, that a put held the lock of the log.
        times: number of puts in each class of :data:`BUCKETS` except the first class.
        sizes: number of messages in each class of :data:`SIZES` except the first class.
        get_missed: number of gets that returned no message.
        get_longest: the longest duration of a get, in seconds.
    """

    def __init__(self) -> None:
        self.failed = 0
        self.quick = 0
        self.longest = 0.0
        self.lock_longest_ms = 0.0
        self.times = [0] * len(BUCKETS)
        self.sizes = [0] * (len(SIZES) + 1)
        self.topics: dict[str, TopicCount] = {}
        self.get_found = self.get_missed = self.get_messages = 0
        self.get_longest = 0.0
        if cython.compiled:
            self._recent = Recent()

    def topic(self, topic: str) -> TopicCount:
        """Return the counts of a topic."""
        if cython.compiled:
            recent: TopicCount | None = cython.cast(TopicCount, self._recent.get(topic))
            if recent is not None:
                return recent
        found = self.topics.get(topic)
        if found is None:
            found = self.topics[topic] = TopicCount()
        if cython.compiled:
            self._recent.put(topic, found)
        return found

    def add_topic(self, topic: str, messages: int, size: int) -> None:
        """Count messages of a topic, and their bytes."""
        found = self.topic(topic)
        found.messages += messages
        found.size += size

    def whole(self, seconds: float) -> None:
        """Count a put, and its duration in seconds."""
        if seconds < _FIRST_BOUND:
            self.quick += 1
        else:
            self.times[bisect_left(_BOUNDS, seconds)] += 1
        self.longest = max(self.longest, seconds)

    def add(self, other: CallCounts) -> None:
        """Add the counts of another thread."""
        self.failed += other.failed
        self.quick += other.quick
        self.longest = max(self.longest, other.longest)
        self.lock_longest_ms = max(self.lock_longest_ms, other.lock_longest_ms)
        self.times = [a + b for a, b in zip(self.times, other.times, strict=True)]
        self.sizes = [a + b for a, b in zip(self.sizes, other.sizes, strict=True)]
        self.get_longest = max(self.get_longest, other.get_longest)
        for topic, found in list(other.topics.items()):
            self.add_topic(topic, found.messages, found.size)
        self.get_found += other.get_found
        self.get_missed += other.get_missed
        self.get_messages += other.get_messages

    def all_times(self) -> list[int]:
        """Number of puts in each class of :data:`BUCKETS`."""
        return [self.quick + self.times[0], *self.times[1:]]


class CallCounter:
    """Counts the calls of all threads. :class:`~logquarry.store.stats.StatsRecorder` extends it."""

    def __init__(self) -> None:
        self._change = threading.Lock()
        self._own = threading.local()
        self._threads: list[tuple[weakref.ref[threading.Thread], CallCounts]] = []
        self._ended = CallCounts()
        self._last: CallCounts | None = None
        self._last_thread = 0

    def put(self, topic: str, result: PutResult, seconds: float) -> None:
        """Count a put after its message was written to the log."""
        # In compiled code, calling the method through the class is faster than through ``self``:
        # the call does not check whether a subclass overrides the method.
        counts = CallCounter.counts(self)
        if cython.compiled:
            fields = cython.cast(tuple, result)
            size, messages, held_ms = fields[5], fields[6], fields[8]
        else:
            # Unpacking the whole tuple takes half as long as reading three fields by name.
            _, _, _, _, _, size, messages, _, held_ms, _, _ = result
        found = counts.topic(topic)
        found.messages += messages
        found.size += size
        counts.lock_longest_ms = max(counts.lock_longest_ms, held_ms)
        if size > _SMALL and messages:
            counts.sizes[bisect_left(SIZES, size // messages)] += messages
        if seconds < _FIRST_BOUND and seconds <= counts.longest:
            counts.quick += 1
        else:
            counts.whole(seconds)

    def put_failed(self) -> None:
        """Count a put that wrote no message to the log."""
        counts = self.counts()
        counts.failed += 1

    def got(self, messages: int, seconds: float = 0.0) -> None:
        """Count a get, the messages that it returned, and its duration in seconds."""
        counts = self.counts()
        counts.get_longest = max(counts.get_longest, seconds)
        if messages:
            counts.get_found += 1
            counts.get_messages += messages
        else:
            counts.get_missed += 1

    def counts(self) -> CallCounts:
        """Return the counts of the calling thread."""
        if cython.compiled:
            # First check whether the thread is the same as at the last call, because reading a
            # thread-local value takes five times as long.
            thread = PyThread_get_thread_ident()
            if self._last is not None and self._last_thread == thread:
                return self._last
            self._last, self._last_thread = self._own_counts(), thread
            return self._last
        return self._own_counts()

    def _own_counts(self) -> CallCounts:
        try:
            counts: CallCounts = self._own.counts
        except AttributeError:
            counts = self._own.counts = CallCounts()
            thread = weakref.ref(threading.current_thread())
            with self._change:
                self._fold_ended()
                self._threads.append((thread, counts))
        return counts

    def _fold_ended(self) -> None:
        """Add the counts of ended threads to one sum, so that their own objects can be freed."""
        # Forget the thread of the last call: the system may give its number to a new thread.
        self._last = None
        alive = []
        for reference, counts in self._threads:
            thread = reference()
            if thread is None or not thread.is_alive():
                self._ended.add(counts)
            else:
                alive.append((reference, counts))
        self._threads = alive

    def total(self) -> CallCounts:
        """Return the sum of the counts of all threads."""
        total = CallCounts()
        with self._change:
            total.add(self._ended)
            for _, counts in self._threads:
                total.add(counts)
        return total
