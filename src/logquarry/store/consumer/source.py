"""The interface through which consumers read queues, and how they wait for new messages.

If this process writes the store, the dispatcher signals new messages. If another process writes the
store, a waiting consumer polls. The pauses grow while no message arrives. They are long compared
with a poll, so polls take almost no processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from logquarry.format import java
from logquarry.read.get_message import GetMessageStatus, GetResult, TransferLimits
from logquarry.read.queue import Queue
from logquarry.stored_message import StoredMessage

_SHORTEST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.2
_PAUSE_PER_LOOK: Final = 300.0
"""The pause after a poll is at least this many times as long as the poll, so that polls take at
most 0.3 % of a processor."""


class Arrivals(ABC):
    """A number that grows when there may be new messages. Any thread may wait until it grows."""

    def __init__(self) -> None:
        self.version = 0
        self._changed = threading.Condition()
        self._callbacks: set[Callable[[], None]] = set()

    def wake(self) -> None:
        """Wake all waiting consumers."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    @abstractmethod
    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """Wait until the version differs from ``seen``.

        Args:
            seen: the version read before a search that found nothing.
            timeout: in seconds (default: no limit).

        Returns:
            Whether the version differs; False if the time ran out.
        """

    @abstractmethod
    async def wait_async(self, seen: int, timeout: float | None = None) -> bool:
        """Like :meth:`wait`, for a coroutine."""

    async def _woken(self, seen: int, timeout: float | None) -> bool:
        """Wait in a coroutine for :meth:`wake` only."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def tell() -> None:
            # The loop may be closed by now. The thread that calls wake() must not fail then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if self.version != seen:
                return True
            self._callbacks.add(tell)
        try:
            async with asyncio.timeout(timeout):
                await event.wait()
        except TimeoutError:
            pass
        finally:
            with self._changed:
                self._callbacks.discard(tell)
        return self.version != seen


class ToldArrivals(Arrivals):
    """Arrivals of a store that this process writes: the dispatcher calls :meth:`wake`."""

    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait`."""
        # The longest wait that a lock supports: 292 years.
        longest = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(lambda: self.version != seen, longest)

    async def wait_async(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait_async`."""
        return await self._woken(seen, timeout)


class PolledArrivals(Arrivals):
    """Arrivals of a store that another process writes."""

    def __init__(self, look: Callable[[], object]) -> None:
        super().__init__()
        self._look = look
        self._looking = threading.Lock()
        self._seen: object = None
        self._pause = _SHORTEST_PAUSE

    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        self._pause = _SHORTEST_PAUSE
        while not self._has_new(seen):
            pause = self._next_pause(end)
            if pause <= 0:
                return False
            with self._changed:
                self._changed.wait_for(lambda: self.version != seen, pause)
        return True

    async def wait_async(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait_async`."""
        end = None if timeout is None else time.monotonic() + timeout
        self._pause = _SHORTEST_PAUSE
        while not self._has_new(seen):
            pause = self._next_pause(end)
            if pause <= 0:
                return False
            await self._woken(seen, pause)
        return True

    def _next_pause(self, end: float | None) -> float:
        pause = self._pause
        return pause if end is None else min(pause, end - time.monotonic())

    def _has_new(self, seen: int) -> bool:
        """Poll, unless the version has changed already; sets the pause until the next poll."""
        if self.version != seen:
            return True
        with self._looking:
            began = time.perf_counter()
            found = self._look()
            took = time.perf_counter() - began
            is_new, self._seen = found != self._seen, found
            self._pause = max(min(2 * self._pause, _LONGEST_PAUSE), took * _PAUSE_PER_LOOK)
        if is_new:
            self.wake()
        return self.version != seen


# --------------------------------------------------------------------------------------------------
# Reading queues

MOST_AT_ONCE: Final = 256
"""Maximum number of messages of one read."""
AT_ONCE: Final = TransferLimits(
    memory_bytes=java.LONG_MAX,
    count=MOST_AT_ONCE,
    size=1 << 18,
    disk_count=MOST_AT_ONCE,
    disk_size=1 << 18,
)
"""Limits of one read: larger than for ``get``, whose limits suit responses over a network."""

_MOVED: Final = (GetMessageStatus.OFFSET_TOO_SMALL, GetMessageStatus.OFFSET_OVERFLOW_BADLY)


class QueueBatch(NamedTuple):
    """Messages of one queue.

    Attributes:
        positions: the queue offset of each message. It differs from the message's own
            ``queue_offset`` if the message is in several queues.
        is_moved: whether the queue has no entry at the requested offset (expired, or never
            written). Then there are no messages, and the next read must start at ``next_offset``.
    """

    messages: Sequence[StoredMessage]
    positions: Sequence[int]
    next_offset: int
    is_moved: bool = False


class QueueReader(Protocol):
    """The queues of one store. Any thread may use it."""

    def queue_ids(self, topic: str) -> Sequence[int]:
        """The queues of a topic, sorted."""

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """First queue offset, and one past the last; (0, 0) if there is no such queue."""

    def read(
        self, topic: str, queue_id: int, offset: int, max_count: int, tags: frozenset[str] | None
    ) -> QueueBatch:
        """Read messages from a queue offset on.

        Raises:
            CorruptFrame: if the first of them is damaged.
        """

    def first_since(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The queue offset of the first message stored at a time or later."""


def batch_of(queue: Queue, offset: int, result: GetResult) -> QueueBatch:
    """The result of a ``get`` with the queue offset of each message."""
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
