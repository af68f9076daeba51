"""Lanes: threads that call the store, and return the results to the event loop.

A lane is one thread that runs jobs in order. If too many jobs wait, the lane refuses the next job,
and the client gets SYSTEM_BUSY.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
Job = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
"""Called in the event loop with the result of a job, or with its exception."""

_AT_ONCE: Final = 128
"""Maximum number of results that a lane collects before it passes them to the loop."""


class Mailbox(Generic[T]):
    """Passes items from any thread to the event loop, which takes the items in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._is_waking = False

    def post(self, *items: T) -> None:
        """Add items, and wake the event loop if no wakeup is pending."""
        self._items.extend(items)
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop is closed, so there are no clients to answer.
                self._items.clear()

    def _deliver(self) -> None:
        # Reset the flag before taking items: a post after this line must wake the loop again.
        self._is_waking = False
        items = self._items
        for _ in range(len(items)):
            item = items.popleft()
            try:
                self._take(item)
            except Exception:
                # Continue with the next items: they are answers to other clients.
                logger.exception("an item of another thread was not taken")


class Lane:
    """One thread that runs jobs in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, capacity: int) -> None:
        self._loop = loop
        self.capacity = capacity
        self._jobs: queue.SimpleQueue[list[tuple[Job, Done]] | None] = queue.SimpleQueue()
        self._new: list[tuple[Job, Done]] = []
        self._mailbox: Mailbox[tuple[Done, Any, BaseException | None]] = Mailbox(loop, self._finish)
        self.waiting = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> bool:
        """Queue a job; return False if too many jobs wait."""
        if self.waiting >= self.capacity:
            return False
        self._add(job, done)
        return True

    def _add(self, job: Job, done: Done) -> None:
        # One wakeup of the thread serves all jobs of a loop iteration.
        if not self._new:
            self._loop.call_soon(self._push)
        self.waiting += 1
        self._new.append((job, done))

    def _push(self) -> None:
        if self._new:
            self._jobs.put(self._new)
            self._new = []

    async def run(self, job: Callable[[], T]) -> T:
        """Queue a job even if too many jobs wait, and return its result."""
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._add(job, done)
        return await future

    async def close(self) -> None:
        """Run all waiting jobs, and end the thread."""
        self._push()
        self._jobs.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.005)

    def _finish(self, item: tuple[Done, Any, BaseException | None]) -> None:
        done, result, error = item
        self.waiting -= 1
        done(result, error)

    def _run(self) -> None:
        results: list[tuple[Done, Any, BaseException | None]] = []
        while (jobs := self._jobs.get()) is not None:
            for job, done in jobs:
                try:
                    results.append((done, job(), None))
                except BaseException as error:
                    results.append((done, None, error))
                if len(results) >= _AT_ONCE:
                    self._mailbox.post(*results)
                    results.clear()
            self._mailbox.post(*results)
            results.clear()
