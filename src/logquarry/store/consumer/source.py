"""Reads queues for consumers, and waits for new messages.

If this process writes the store, the dispatcher wakes the waiting consumers. If another process
writes the store, a waiting consumer reads the ends of the queues repeatedly, with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, NamedTuple, Protocol

import numpy as np

from logquarry.disk.service import Flag
from logquarry.format import java
from logquarry.read.get_kernel import MessageGetter
from logquarry.read.get_message import LEAST_UNITS, GetMessageStatus, GetResult, TransferLimits
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, FileQueue, Queue
from logquarry.stored_message import StoredMessage

_SHORTEST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.2
_PAUSE_PER_LOOK: Final = 300.0
"""Minimum pause after a poll, as a multiple of the poll's duration. So polling uses at most 1/300
of a processor's time.
"""


class Arrivals:
    """A version number that increases when new messages may have arrived. Thread-safe."""

    def __init__(self) -> None:
        self.version = 0
        # Do not use threading.Condition: if Ctrl-C interrupts one of its methods, its lock can stay
        # locked. The dispatcher's thread would then wait for ever in `wake`.
        self._lock = threading.Lock()
        self._callbacks: set[Callable[[], None]] = set()

    def wake(self) -> None:
        """Wake all waiting consumers."""
        with self._lock:
            self.version += 1
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """Wait until the version differs from ``seen``; return False after the timeout.

        Args:
            seen: the version before the caller searched for messages and found none.
            timeout: in seconds (default: no limit).
        """
        flag = Flag()
        try:
            if self._is_seen(seen, flag.set):
                # A lock rejects a timeout above 292 years.
                flag.take(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            self._forget(flag.set)
        return self.version != seen

    async def wait_async(self, seen: int, timeout: float | None = None) -> bool:
        """Like :meth:`wait`, for a coroutine."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def tell() -> None:
            # If the event loop is already closed, ignore the error, because it must not reach the
            # thread that calls wake().
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        try:
            if self._is_seen(seen, tell):
                async with asyncio.timeout(timeout):
                    await event.wait()
        except TimeoutError:
            pass
        finally:
            self._forget(tell)
        return self.version != seen

    def _is_seen(self, seen: int, callback: Callable[[], None]) -> bool:
        """Register a function that each later ``wake`` calls. Return whether the version still
        equals ``seen``.
        """
        with self._lock:
            self._callbacks.add(callback)
            return self.version == seen

    def _forget(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks.discard(callback)


class PolledArrivals(Arrivals):
    """Arrivals in a store that another process writes.

    A waiting consumer calls ``look`` repeatedly. If there are new messages, the result of ``look``
    differs from its previous result.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self._look = look
        self._looking = threading.Lock()
        self._seen: object = None

    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait`."""
        for pause in self._pauses(seen, timeout):
            super().wait(seen, pause)
        return self.version != seen

    async def wait_async(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait_async`."""
        for pause in self._pauses(seen, timeout):
            await super().wait_async(seen, pause)
        return self.version != seen

    def _pauses(self, seen: int, timeout: float | None) -> Iterator[float]:
        """Poll until the version changes or the time runs out; yield the pause after each poll."""
        end = None if timeout is None else time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while self.version == seen:
            with self._looking:
                began = time.perf_counter()
                found = self._look()
                took = time.perf_counter() - began
                is_new, self._seen = found != self._seen, found
            if is_new:
                self.wake()
            pause = max(min(2 * pause, _LONGEST_PAUSE), took * _PAUSE_PER_LOOK)
            left = pause if end is None else min(pause, end - time.monotonic())
            if self.version != seen or left <= 0:
                return
            yield left


# --------------------------------------------------------------------------------------------------
# Reading queues

MOST_AT_ONCE: Final = 256
"""Maximum number of messages per read."""
AT_ONCE: Final = TransferLimits(
    memory_bytes=java.LONG_MAX,
    count=MOST_AT_ONCE,
    size=1 << 18,
    disk_count=MOST_AT_ONCE,
    disk_size=1 << 18,
)
"""Limits of one read of a queue.

The limits of ``get`` are smaller, because they suit responses over a network.
"""

_MOVED: Final = (GetMessageStatus.OFFSET_TOO_SMALL, GetMessageStatus.OFFSET_OVERFLOW_BADLY)


class QueueBatch(NamedTuple):
    """Messages of one queue.

    Attributes:
        positions: the queue offset of each message. A position can differ from the message's
            ``queue_offset``, because a message can be in several queues.
        is_moved: whether the queue has no entry at the requested offset, because the entry has
            expired or was never written. In this case the batch is empty, and the next read must
            start at ``next_offset``.
    """

    messages: Sequence[StoredMessage]
    positions: Sequence[int]
    next_offset: int
    is_moved: bool = False


def batch_of(queue: Queue, offset: int, result: GetResult) -> QueueBatch:
    """Return the messages of a ``get``, each with its position in the queue."""
    if result.status in _MOVED:
        return QueueBatch((), (), result.next_offset, is_moved=True)
    if result.status is GetMessageStatus.NO_MESSAGE_IN_QUEUE:
        return QueueBatch((), (), offset)
    after, messages = result.next_offset, result.messages
    if len(messages) == after - offset:
        return QueueBatch(messages, range(offset, after), after)
    return QueueBatch(messages, _positions(queue, offset, after, messages), after)


def _positions(
    queue: Queue, offset: int, after: int, messages: Sequence[StoredMessage]
) -> Sequence[int]:
    if not messages:
        return ()
    places = np.asarray(queue.units(offset, after)["physical_offset"], np.int64).tolist()
    found: list[int] = []
    at = -1
    for message in messages:
        at = places.index(message.physical_offset, at + 1)
        found.append(offset + at)
    return found


_NEW_FILES_SECONDS: Final = 1.0
_PAUSE_PER_REFRESH: Final = 300.0
"""Minimum pause after listing all folders of a store, as a multiple of the listing's duration."""


class StoreQueues(Protocol):
    """The queues of an open store, which another process may write."""

    def queues(self) -> Sequence[QueueKey]:
        """(topic, queue id) of each queue."""

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return one queue; None if the store does not have the queue."""

    def refresh(self) -> None:
        """List the folders of the store again, to find new files and queues."""


class QueueReader:
    """Reads the queues of a store that this process writes. Thread-safe."""

    def __init__(self, store: StoreQueues, getter: MessageGetter) -> None:
        self._store = store
        self._getter = getter
        self._lock: AbstractContextManager[object] = nullcontext()

    def queue_ids(self, topic: str) -> Sequence[int]:
        """Return the queue ids of a topic, sorted."""
        with self._lock:
            return sorted(queue_id for name, queue_id in self._store.queues() if name == topic)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Return (first queue offset, last queue offset + 1); (0, 0) if there is no such queue."""
        with self._lock:
            queue = self._store.queue(topic, queue_id)
            if queue is None:
                return 0, 0
            compacted = self._getter.compacted
            return compacted.bounds(queue) if topic in compacted.topics else queue.bounds()

    def read(
        self, topic: str, queue_id: int, offset: int, max_count: int, tags: frozenset[str] | None
    ) -> QueueBatch:
        """Read messages from ``offset`` on. Raises CorruptFrame if the first message is damaged."""
        with self._lock:
            queue = self._ready_queue(topic, queue_id, offset, max_count)
            if queue is None:
                return QueueBatch((), (), offset)
            found = self._getter.get(queue, offset, max_count, tags)
            if topic in self._getter.compacted.topics:
                queue = self._getter.compacted.queue_at(queue, offset)
            return batch_of(queue, offset, found)

    def _ready_queue(self, topic: str, queue_id: int, offset: int, max_count: int) -> Queue | None:
        return self._store.queue(topic, queue_id)

    def first_since(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """Return the queue offset of the first message that was stored at a time or later."""
        with self._lock:
            queue = self._store.queue(topic, queue_id)
            if queue is None:
                return 0
            offsets = range(*queue.bounds())

            def time_of(offset: int) -> int:
                place, size, _ = queue.units(offset, offset + 1)[0].item()
                found = self._getter.log.store_time_at(place, size)
                # If a message was lost, assume that its store time is the latest possible time. The
                # search may then return a lower offset than needed, but never skips a message.
                return java.LONG_MAX if found < 0 else found

            return offsets.start + bisect_left(offsets, timestamp_ms, key=time_of)


class PolledQueueReader(QueueReader):
    """Reads the queues of a store that another process may write.

    A lock admits one thread at a time.
    """

    def __init__(self, store: StoreQueues, getter: MessageGetter) -> None:
        super().__init__(store, getter)
        self._lock = threading.RLock()
        self._refresh = store.refresh
        self._refresh_at = 0.0
        self._refreshed_for = -1

    def look(self, topics: Iterable[str]) -> Hashable:
        """Return the end of each queue of the given topics.

        If new messages arrive, the next result differs from this result.
        """
        with self._lock:
            now = time.monotonic()
            if now >= self._refresh_at:
                self._refresh()
                took = time.monotonic() - now
                pause = max(_NEW_FILES_SECONDS, took * _PAUSE_PER_REFRESH)
                self._refresh_at = now + took + pause
            ends: list[tuple[str, int, int]] = []
            for topic in sorted(topics):
                for queue_id in self.queue_ids(topic):
                    queue = self._store.queue(topic, queue_id)
                    if isinstance(queue, FileQueue):
                        queue.refresh()
                    if isinstance(queue, ConsumeQueue):
                        queue.warn_of_lost_end()
                    if queue is not None:
                        ends.append((topic, queue_id, queue.max_offset))
            return tuple(ends)

    def _ready_queue(self, topic: str, queue_id: int, offset: int, max_count: int) -> Queue | None:
        queue = self._store.queue(topic, queue_id)
        if queue is not None:
            units = queue.units(max(0, offset), offset + max(LEAST_UNITS, max_count))
            end = int(np.max(units["physical_offset"], initial=-1))
            # An entry that points after the end of the known log files shows that the log has a new
            # file, so list the files again.
            if end >= self._getter.log.files.end and end > self._refreshed_for:
                self._refreshed_for = end
                self._refresh()
                queue = self._store.queue(topic, queue_id)
        return queue
