"""Gets messages from a store that is open for writing, puts one message or one batch into it, and
counts these calls.

Each thread has its own :class:`CallCounts`, so counting a call takes no lock. The duration of a put
includes the time that the put waits for the flush and for the replica. The module is compiled at
the installation if possible (``hatch_build.py``).
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from logquarry import arguments
from logquarry.errors import LogquarryError
from logquarry.format.properties import parse_tags
from logquarry.message import Message, require_message, require_messages
from logquarry.read.get_kernel import KernelGet
from logquarry.read.log_queues import QueueKey, empty_queue
from logquarry.store.log_reads import get_arguments
from logquarry.write.commit_log_writer import batch_size, log_slow
from logquarry.write.frame_append import SLOW_PUT
from logquarry.write.put_parts import Recent
from logquarry.write.settling import PutFuture, failed_future

if TYPE_CHECKING:
    from logquarry.disk.service import Health
    from logquarry.read.get_message import GetResult
    from logquarry.read.queue import Queue
    from logquarry.store.writer_files import LogFeed
    from logquarry.write.commit_log_writer import CommitLogWriter
    from logquarry.write.put_result import PutResult
    from logquarry.write.settling import LogGrowth

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
_SLOW = SLOW_PUT
_monotonic = time.monotonic
_Message = Message
_LEAST, _MOST, _MOST_COUNT = arguments.LONG_MIN, arguments.LONG_MAX, arguments.INT_MAX


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
        # In compiled code, calling the method through the class is faster than through ``self``,
        # because the call does not check whether a subclass overrides the method.
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
            # First check whether the thread is the same as at the last call. This check takes a
            # fifth of the time that reading a thread-local value takes.
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


class _Count:
    """Counts a put when its final result is known."""

    def __init__(self, counter: CallCounter, topic: str) -> None:
        self._counter = counter
        self._topic = topic
        self._began = ticks_ns() if cython.compiled else _monotonic()

    def settled(self, result: PutResult) -> None:
        if cython.compiled:
            self._counter.put(self._topic, result, (ticks_ns() - self._began) / 1e9)
        else:
            self._counter.put(self._topic, result, _monotonic() - self._began)

    def failed(self) -> None:
        self._counter.put_failed()


def _batch_arguments(
    messages: Sequence[Message] | None, wire: bytes | None, field: str
) -> tuple[Sequence[Message] | None, bytes | None]:
    # A list is not checked here, because the code that encodes its messages checks each of them.
    if messages is not None and type(messages) is not list:
        messages = require_messages(messages, field)
    if wire is not None and type(wire) is not bytes:
        wire = bytes(arguments.data(wire, "wire"))
    return messages, wire


class SingleCalls:
    """The part of :class:`~logquarry.store.reader.LiveStore` that gets messages of a queue, and
    puts one message or one batch.
    """

    _live_queues: Mapping[QueueKey, Queue]
    _health: Health
    _counter: CallCounter
    _kernel: KernelGet | None
    _path: CommitLogWriter
    _feed: LogFeed
    _growth: LogGrowth

    def _start_puts(
        self, path: CommitLogWriter, counter: CallCounter, feed: LogFeed, growth: LogGrowth
    ) -> None:
        """Make attributes for the objects that each put uses, so that a put finds them fast."""
        self._path = path
        self._counter = counter
        self._feed = feed
        self._growth = growth

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int = 0,
        max_count: int = 32,
        tag: str | None = None,
    ) -> GetResult:
        """See :meth:`~logquarry.store.reads.StoreReads.get`."""
        began = exact_ns() if cython.compiled else _monotonic()
        # The type is Any, because this method also uses attributes that only the subclass defines.
        store: Any = self
        if not (type(queue_id) is int and type(offset) is int and type(max_count) is int):
            topic, queue_id, offset, max_count, tag = get_arguments(
                topic, queue_id, offset, max_count, tag
            )
        wanted = None
        if tag is not None:
            wanted = parse_tags(arguments.text(tag, "tag"))
        queue: Queue | None = None
        if type(topic) is str:
            queue = self._live_queues.get((topic, queue_id))
        if queue is None or self._health.is_gone:
            queue = store.queue(topic, queue_id) or empty_queue(topic, queue_id)
        result = None
        if _LEAST <= offset <= _MOST and 0 <= max_count <= _MOST_COUNT:
            kernel = self._kernel
            if kernel is None:
                kernel = self._kernel = store._getter.kernel
            result = kernel.get(queue, offset, max_count, wanted)
        if result is None:
            store._require_open()
            get_arguments(topic, queue_id, offset, max_count, tag)
            result = store._getter.reference(queue, offset, max_count, wanted)
        took = (exact_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        count = len(cython.cast(tuple, result)[1] if cython.compiled else result.messages)
        CallCounter.got(self._counter, count, took)
        return result

    def put(self, message: Message) -> PutResult:
        """Put one message.

        Wait for the flush and for a replica if the settings and the message's WAIT require this.

        Returns:
            The offsets of the message, and the status, which shows whether the message is synced
            and replicated.

        Raises:
            StoreUnavailable: if the store accepts no messages now. The attribute ``status`` of the
                error is the status that RocketMQ would return. After a failed sync, it is unknown
                whether the message is on the disk.
            MessageRejected: if the message violates a rule of the store, for example on its size.
            UsageError: if a number does not fit its field, or if ``message`` is not a Message.
        """
        began = ticks_ns() if cython.compiled else _monotonic()
        try:
            if self._path.bar is not None:
                self._path.check_status()
                self._feed.adopt()
            result = self._path.put(message)
            topic = cython.cast(tuple, message)[0] if cython.compiled else message.topic
        except LogquarryError:
            self._counter.put_failed()
            raise
        except (AttributeError, TypeError, ValueError):
            # Check the type only after a failure, to save the time of this check in all other puts.
            require_message(message)
            raise
        took = (ticks_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        if took > _SLOW:
            log_slow(took, len(message.body), result)
        # In compiled code, calling the method through the class is faster than through the object,
        # because the call does not check whether a subclass overrides the method.
        CallCounter.put(self._counter, topic, result, took)
        return result

    def put_async(self, message: Message) -> PutFuture:
        """Put one message; return a future that is done when the waits for the flush and for a
        replica are over.

        When this method returns, the message is already in the log, or the future has an exception.
        In the log, the messages have the order of the calls. A sync, or the acknowledgement of a
        slave, ends the last wait. The thread that handles this event calls the future's callbacks,
        so the callbacks must return quickly.
        """
        try:
            if type(message) is not _Message:
                require_message(message)
            return self._append(message)[1]
        except LogquarryError as error:
            return failed_future(error)

    def _append(self, message: Message) -> tuple[PutResult, PutFuture]:
        """Append a message; return its result, and a future that is done after the waits."""
        count = _Count(self._counter, message.topic)
        try:
            if self._path.bar is not None:
                self._path.check_status()
                self._feed.adopt()
            result, waits = self._path.append_message(message)
        except LogquarryError:
            count.failed()
            raise
        return result, self._growth.settle_later(result, waits, count.settled, count.failed)

    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """Put several messages of one topic and queue: either all of them, or none
        (``putMessages``).

        Args:
            messages: the messages. Pass either ``messages``, or ``wire`` and ``message``.
            wire: the messages as a client sends them (``MessageDecoder.encodeMessages``).
            message: the fields that all messages in ``wire`` share. Its properties are added to the
                properties of each message.

        Raises:
            StoreUnavailable, MessageRejected: in the same cases as :meth:`put`.
            UsageError: if the messages do not all belong to the same queue.
        """
        messages, wire = _batch_arguments(messages, wire, "put_batch")
        began = ticks_ns() if cython.compiled else _monotonic()
        try:
            if self._path.bar is not None:
                self._path.check_status()
                self._feed.adopt()
            result = self._path.put_batch(messages, wire=wire, message=message)
        except LogquarryError:
            self._counter.put_failed()
            raise
        took = (ticks_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        shared = message if message is not None else messages[0] if messages else None
        if took > _SLOW:
            log_slow(took, batch_size(messages, wire), result)
        if shared is not None:
            self._counter.put(shared.topic, result, took)
        return result

    def put_batch_async(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutFuture:
        """Put a batch like :meth:`put_batch`, but return a future like :meth:`put_async`."""
        try:
            messages, wire = _batch_arguments(messages, wire, "put_batch_async")
            shared = message if message is not None else messages[0] if messages else None
            count = _Count(self._counter, getattr(shared, "topic", ""))
            try:
                if self._path.bar is not None:
                    self._path.check_status()
                    self._feed.adopt()
                result, waits = self._path.append_batch(messages, wire, message)
            except LogquarryError:
                count.failed()
                raise
            return self._growth.settle_later(result, waits, count.settled, count.failed)
        except LogquarryError as error:
            return failed_future(error)
