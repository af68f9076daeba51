"""Waiting for messages without asking for them over and over.

A store that this process writes tells of what it dispatches. One that another process writes has
to be looked at: the longer nothing comes, the less often, and so much less often than a look takes
that the looks cost next to nothing.
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
from logquarry.message import StoredMessage
from logquarry.read.consume_queue import Queue
from logquarry.read.get_message import GetMessageStatus, GetResult, TransferLimits

_SHORTEST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.2
_PAUSE_PER_LOOK: Final = 300.0
"""How much longer than a look the pause after it is, at least: looks take 0.3 % of a processor."""


class Arrivals(ABC):
    """A number that grows when there may be something new. Any thread may wait for that.

    Attributes:
        version: that number.
    """

    def __init__(self) -> None:
        self.version = 0
        self._changed = threading.Condition()
        self._callbacks: set[Callable[[], None]] = set()

    def wake(self) -> None:
        """Have everybody who waits look again."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    @abstractmethod
    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """Wait until the version is another one than was seen.

        Args:
            seen: the version before one found nothing.
            timeout: in seconds (default: as long as it takes).

        Returns:
            Whether it is; False where the time was over.
        """

    @abstractmethod
    async def wait_async(self, seen: int, timeout: float | None = None) -> bool:
        """The same for a coroutine."""

    async def _woken(self, seen: int, timeout: float | None) -> bool:
        """Wait in a coroutine for :meth:`wake` alone."""
        loop = asyncio.get_running_loop()
        event = asyncio.Event()

        def tell() -> None:
            # The loop may be closed by now, and whoever wakes is not to suffer from that.
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
    """Of a store that tells: somebody calls :meth:`wake`. Waiting costs nothing."""

    def wait(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait`."""
        # No lock waits for longer: 292 years.
        longest = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        with self._changed:
            return self._changed.wait_for(lambda: self.version != seen, longest)

    async def wait_async(self, seen: int, timeout: float | None = None) -> bool:
        """See :meth:`Arrivals.wait_async`."""
        return await self._woken(seen, timeout)


class PolledArrivals(Arrivals):
    """Of a store that another process writes.

    Args:
        look: gives something that is another thing when there is something new.
    """

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
        """Look, unless somebody was faster; the pause after it grows."""
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
# What consumers ask of a store's queues.

MOST_AT_ONCE: Final = 256
"""Messages of one read."""
AT_ONCE: Final = TransferLimits(
    memory_bytes=java.LONG_MAX,
    count=MOST_AT_ONCE,
    size=1 << 18,
    disk_count=MOST_AT_ONCE,
    disk_size=1 << 18,
)
"""How much one read gives: more than a ``get``, whose caps are for answers over a network."""

_MOVED: Final = (GetMessageStatus.OFFSET_TOO_SMALL, GetMessageStatus.OFFSET_OVERFLOW_BADLY)


class QueueBatch(NamedTuple):
    """Messages of one queue.

    Attributes:
        messages: the messages.
        positions: the queue offset of each. Where a message was put into further queues, its own
            ``queue_offset`` is that of its first one.
        next_offset: the queue offset to read from next.
        is_moved: whether the queue has nothing at the offset that was asked for, which expired or
            never was; then there are no messages, and ``next_offset`` is where to go on.
    """

    messages: Sequence[StoredMessage]
    positions: Sequence[int]
    next_offset: int
    is_moved: bool = False


class QueueReader(Protocol):
    """The queues of one store. Any thread may ask."""

    def queue_ids(self, topic: str) -> Sequence[int]:
        """The queues of a topic, sorted."""

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """First queue offset, and one past the last; (0, 0) for a queue that is not there."""

    def read(
        self, topic: str, queue_id: int, offset: int, max_count: int, tags: frozenset[str] | None
    ) -> QueueBatch:
        """Messages from a queue offset on.

        Raises:
            CorruptFrame: if the first of them is damaged.
        """

    def first_since(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The queue offset of the first message that was stored at a time or later."""


def batch_of(queue: Queue, offset: int, result: GetResult) -> QueueBatch:
    """What a ``get`` gave, with the place in the queue of each message."""
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
