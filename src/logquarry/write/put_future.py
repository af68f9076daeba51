"""The future of a put. Threads, callbacks and coroutines can wait for it. The module is compiled if
possible.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

from logquarry import arguments
from logquarry.disk.service import Done, forks
from logquarry.errors import LogquarryError, StoreUnavailable
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)

_LONG_SECONDS: Final = 3_600.0


class _Wakes:
    """Wakes coroutines of one event loop. One call in the loop wakes all coroutines whose puts the
    same sync has completed.
    """

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()
        self._is_due = False

    def add(self, loop: Any, waiter: Any, _: PutFuture) -> None:
        self._waiters.append(waiter)
        if not self._is_due and not loop.is_closed():
            self._is_due = True
            loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Reset the flag before taking the first waiter. A waiter that is added later then schedules
        # a new call.
        self._is_due = False
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


_wakes: WeakKeyDictionary[Any, _Wakes] = WeakKeyDictionary()
"""Event loop -> its waiting coroutines. Only the thread of a loop adds the loop."""


class PutFuture:
    """The future result of a put. The message is already in the log, but may not be on the disk
    yet.

    ::

        future = store.put_async(message)
        result = future.result(timeout=5)          # a thread waits
        future.add_done_callback(print)            # a function is called
        result = await future                      # a coroutine waits, and blocks no thread

    Any thread may use the future. It cannot be cancelled, because the message is already in the
    log. This class does not use :class:`concurrent.futures.Future`, because creating the lock and
    condition of such a future takes longer than appending a message, and Ctrl-C could leave its
    lock taken.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[PutFuture], object]] | None = None
        self._result: PutResult | None = None
        self._error: LogquarryError | None = None
        self._forks = 0

    @classmethod
    def pending(cls) -> PutFuture:
        """Make a future without a result. :meth:`set_result` or :meth:`set_exception` completes it
        later.
        """
        future = cls()
        future._callbacks = []
        future._forks = forks()
        return future

    def done(self) -> bool:
        """Whether the result or the error is known."""
        return self._result is not None or self._error is not None

    def result(self, timeout: float | None = None) -> PutResult:
        """Wait for the result, at most ``timeout`` seconds (default: no limit).

        Raises:
            TimeoutError: if the result is not known after ``timeout`` seconds.
            StoreUnavailable: if a sync failed. It is then unknown whether the message is on the
                disk. Also in a forked child, if the put was not done before the fork.
            MessageRejected: if the store refused the message.
        """
        if self._result is not None and timeout is None:
            return self._result
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> LogquarryError | None:
        """Wait until the put is done, and return its error or None. Raise TimeoutError after
        ``timeout`` seconds.
        """
        timeout = arguments.optional(arguments.seconds, timeout, "timeout")
        if not self.done():
            done = Done()
            self.add_done_callback(lambda _: done.set())
            if timeout is not None:
                # ``Done.wait`` does not accept a negative time.
                done.wait(max(0.0, timeout))
                if not self.done():
                    raise TimeoutError
            else:
                while not done.wait(_LONG_SECONDS):
                    pass
        return self._error

    def add_done_callback(self, function: Callable[[PutFuture], object]) -> None:
        """Call a function with this future when the put is done, or now if the put is done already.

        The thread that syncs, or the thread that receives the slave's acknowledgement, calls the
        function. So the function must be quick, and must not wait for a put. Exceptions of the
        function are logged.
        """
        arguments.function(function, "function")
        callbacks = self._callbacks
        if callbacks is None:
            self._call(function)
            return
        if not self.done() and self._forks != forks():
            # After a fork, the child process has no thread that would complete the future.
            raise StoreUnavailable("the put belongs to the process that this one was forked from")
        callbacks.append(function)
        if self.done():
            self._call_all()

    def __await__(self) -> Generator[Any, None, PutResult]:
        if not self.done():
            # A program that uses coroutines has already imported asyncio, so this import takes
            # almost no time.
            import asyncio

            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            wakes = _wakes.get(loop)
            if wakes is None:
                wakes = _wakes[loop] = _Wakes()
            self.add_done_callback(partial(wakes.add, loop, waiter))
            yield from waiter
        return self.result()

    def __repr__(self) -> str:
        state = repr(self._result or self._error) if self.done() else "pending"
        return f"<{type(self).__name__} {state}>"

    # ------------------------------------------------------------------------- for the store only
    def set_result(self, result: PutResult) -> None:
        """Complete the future with a result. Call this method only once."""
        self._result = result
        if self._callbacks:
            self._call_all()

    def set_exception(self, error: LogquarryError) -> None:
        """Complete the future with an error. Call this method only once."""
        self._error = error
        if self._callbacks:
            self._call_all()

    def _call_all(self) -> None:
        # This needs no lock. The thread that adds a callback first adds it, and then checks whether
        # the put is done. The thread that completes the put first completes it, and then checks for
        # callbacks. So at least one of the two threads finds the callback, and pop() returns the
        # callback to only one of them.
        callbacks = self._callbacks
        while callbacks:
            try:
                function = callbacks.pop(0)
            except IndexError:
                return
            self._call(function)

    def _call(self, function: Callable[[PutFuture], object]) -> None:
        try:
            function(self)
        except BaseException as error:
            # Ctrl-C and sys.exit() end a program only in its main thread. Here the thread may be
            # the one that syncs the log. An exception would end this thread, and no later put could
            # be synced.
            ends = isinstance(error, KeyboardInterrupt | SystemExit)
            if ends and threading.current_thread() is threading.main_thread():
                raise
            logger.exception("a callback of %r raised", self)


def failed_future(error: LogquarryError) -> PutFuture:
    """Return a future that already has the error of a failed put."""
    future = PutFuture()
    future.set_exception(error)
    return future
