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
from collections.abc import Callable
from typing import Final

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
        with self._changed:
            return self._changed.wait_for(lambda: self.version != seen, timeout)

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
