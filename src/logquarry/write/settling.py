"""The last steps of a put, after the append of its message: wake the services that follow the log,
wait for the disk (flush wait) and for a slave (replica wait), and return the result. The put may
also return a future at once; then no thread of the caller waits.

The module is compiled if possible. See :mod:`logquarry.write.put_result` for which puts wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from logquarry import arguments
from logquarry.disk.service import Done, Service, forks
from logquarry.errors import LogquarryError, StoreUnavailable
from logquarry.write.frame_append import SLOW_PUT
from logquarry.write.put_parts import Wakes
from logquarry.write.put_result import PutResult, PutStatus

if TYPE_CHECKING:
    from logquarry.write.flush import GroupCommitService
    from logquarry.write.put_result import ReplicaWait

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

logger = logging.getLogger(__name__)

_LONG_SECONDS: Final = 3_600.0
_MS: Final = 1_000
_OK, _LATE_DISK, _LATE_SLAVE, _ALONE = (
    PutStatus.PUT_OK,
    PutStatus.FLUSH_DISK_TIMEOUT,
    PutStatus.FLUSH_SLAVE_TIMEOUT,
    PutStatus.SLAVE_NOT_AVAILABLE,
)
_monotonic = time.monotonic
_Lock = threading.Lock


class _LoopWakes:
    """Wakes coroutines of one event loop. If a sync completes several
    puts, one call in the loop wakes the coroutines of all these puts.
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
        # Reset the flag before the first waiter is taken. So if a waiter is added after the loop
        # below has ended, :meth:`add` schedules a new call.
        self._is_due = False
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)


_wakes: WeakKeyDictionary[Any, _LoopWakes] = WeakKeyDictionary()
"""Event loop -> its waiting coroutines. Only the thread of a loop adds the loop."""


class PutFuture:
    """The future result of a put. The message is already in the log, but may not be on the disk
    yet.

    ::

        future = store.put_async(message)
        result = future.result(timeout=5)          # a thread waits
        future.add_done_callback(print)            # a function is called
        result = await future                      # a coroutine waits, and blocks no thread

    Any thread may use the future. The future cannot be cancelled, because the message is already in
    the log. This class does not use :class:`concurrent.futures.Future`: creating the lock and the
    condition of such a future takes longer than appending a message. Ctrl-C could also leave this
    lock taken.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[PutFuture], object]] | None = None
        self._result: PutResult | None = None
        self._error: LogquarryError | None = None
        self._forks = 0

    @classmethod
    def pending(cls) -> PutFuture:
        """Make a future that has no result yet. Later, :meth:`set_result` or :meth:`set_exception`
        completes the future.
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
                disk. The error is also raised in a forked child, if the put was not done before the
                fork.
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
                wakes = _wakes[loop] = _LoopWakes()
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
        # This method needs no lock. The thread that adds a callback first adds it, and then checks
        # whether the put is done. The thread that completes the put first completes it, and then
        # checks for callbacks. So at least one of the two threads finds the callback, and pop()
        # returns the callback to only one of them.
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
            # Ctrl-C and sys.exit() end a program only in its main thread. But this may be the
            # thread that syncs the log. An exception would end the thread, and no later put could
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


# --------------------------------------------------------------------------------------------------
# The waits of a put


class Once:
    """A token that can be taken only once. Any thread may call :meth:`take`; only the first call
    gets the token.
    """

    def __init__(self) -> None:
        self._is_taken = False
        if not cython.compiled:
            self._lock = _Lock()

    def take(self) -> bool:
        """Take the token. Return False if an earlier call has already taken the token."""
        if cython.compiled:
            # Python does not switch to another thread between these two lines.
            if self._is_taken:
                return False
            self._is_taken = True
            return True
        return self._lock.acquire(False)

    @property
    def is_open(self) -> bool:
        """Whether the token is still free."""
        return not (self._is_taken if cython.compiled else self._lock.locked())


class WaitingPut(PutFuture):
    """The future of a put that waits for the disk, for a slave, or for both. ``parts`` is the
    number of these waits.

    When the put is done, the future first calls ``done`` or, if the sync failed, ``failed``. Then
    it calls the callbacks.
    """

    def __init__(
        self,
        result: PutResult,
        replica: PutStatus,
        parts: int,
        done: Callable[[PutResult], None],
        failed: Callable[[], None],
    ) -> None:
        self._callbacks = []
        self._forks = forks()
        self._result = self._error = None
        self._appended = result
        self._flush = _OK
        self._replica = replica
        self._settled = done
        self._failed = failed
        self._began = _monotonic()
        self._took = 0.0
        # If the put has two waits, the wait that ends first takes the token _first, and does
        # nothing else. The second wait, or a failure, takes the token _open, and completes the
        # future. A single wait needs no token, because a PutWait reports its end only once.
        self._first = Once() if parts > 1 else None
        self._open = Once() if parts > 1 else None

    def flushed(self, in_time: bool) -> None:
        """End the flush wait."""
        if not in_time:
            self._flush = _LATE_DISK
        self._heard()

    def replicated(self, in_time: bool) -> None:
        """End the replica wait."""
        if not in_time:
            self._replica = _LATE_SLAVE
        self._heard()

    def _heard(self) -> None:
        if self._first is not None and self._first.take():
            return
        if self._open is not None and not self._open.take():
            return
        result = self._appended.settled(flush=self._flush, replica=self._replica)
        self._took = _monotonic() - self._began
        self._settled(result)
        self.set_result(result)

    def result(self, timeout: float | None = None) -> PutResult:
        """See :meth:`PutFuture.result`. The first call also logs a put that was slow.

        The thread that syncs must not log: a log handler that puts its records into the store holds
        a lock while it waits for this thread.
        """
        result = PutFuture.result(self, timeout)
        if self._took > SLOW_PUT:
            took, self._took = self._took, 0.0
            logger.warning("a put waited %d ms for disk and slave: %s", took * _MS, result)
        return result

    def fail(self, error: StoreUnavailable) -> None:
        """Complete the future with the error of a failed sync, even if a slave has the message."""
        if self._open is None or self._open.take():
            self._failed()
            self.set_exception(error)


class PutWait(Once):
    """One wait of a :class:`WaitingPut`; implements :class:`~logquarry.write.put_result.Waiter`."""

    def __init__(
        self,
        offset: int,
        heard: Callable[[bool], None],
        fail: Callable[[StoreUnavailable], None],
    ) -> None:
        super().__init__()
        self.offset = offset
        self.deadline = 0
        self._heard = heard
        self._fail = fail

    def resolve(self, in_time: bool) -> None:
        """See :class:`~logquarry.write.put_result.Waiter`."""
        if self.take():
            self._heard(in_time)

    def fail(self, error: StoreUnavailable) -> None:
        """See :class:`~logquarry.write.put_result.Waiter`."""
        if self.take():
            self._fail(error)


class Wakeable(Protocol):
    """A flag that is set when the log has grown (:class:`~logquarry.disk.service.Flag`)."""

    def is_unset(self) -> bool:
        """Whether the flag is not set yet. Each put calls this method, so it must be fast."""

    def set(self) -> None:
        """Set the flag: the log has grown."""


class LogGrowth:
    """Wakes the services that follow the log, and settles puts. Any thread may call the methods.

    With some settings of a store, no put waits for the disk or a slave. Puts then call
    ``settle_now`` instead of :meth:`settle`.

    Args:
        dispatching: the service that adds new messages to queues and index.
        flushing: the service that syncs the messages of puts that do not wait for a sync.
        flusher: syncs the log; None if no put waits for a sync (ASYNC_FLUSH).
        replicas: the replica wait; None if no put waits for a slave (ASYNC_MASTER).
    """

    def __init__(
        self,
        dispatching: Service,
        flushing: Service,
        flusher: GroupCommitService | None,
        replicas: ReplicaWait | None,
    ) -> None:
        self._dispatching = dispatching
        self._flushing = flushing
        self._appended = flushing.wakeup
        self._flusher = flusher
        self._replicas = replicas
        self._change = _Lock()
        self.settle_now = Wakes()
        self._wake_followers = Wakes()
        self._set(())

    def follow(self, flag: Wakeable) -> None:
        """From now on, set a flag whenever the log grows."""
        with self._change:
            self._set((*self._followers, flag))

    def unfollow(self, flag: Wakeable) -> None:
        """No longer set a flag when the log grows."""
        with self._change:
            self._set(tuple(other for other in self._followers if other is not flag))

    def _set(self, followers: tuple[Wakeable, ...]) -> None:
        self._followers = followers
        dispatch, flush = self._dispatching.flag, self._flushing.flag
        after_append = followers if dispatch is None else (dispatch, *followers)
        self._wake_followers.use(after_append)
        self.settle_now.use(after_append if flush is None else (*after_append, flush))

    def wake(self) -> None:
        """Wake the dispatcher and all followers, after an append to the log."""
        self._wake_followers.wake()

    def wake_all(self) -> None:
        """Do the same as :meth:`wake`, and also wake the flush service.

        Call this method if the log has new bytes that no put appended. In this case, no put wakes
        the flush service.
        """
        self.wake()
        self._appended()

    # ----------------------------------------------------------------------------------- settle
    def settle(self, result: PutResult, wait: bool) -> PutResult:
        """Wake the followers, after the message was written to the log. If ``wait`` is true, also
        wait for the disk and for a slave, if the store's settings require this. Return the result.

        Raise StoreUnavailable if the sync failed. It is then unknown whether the message is on the
        disk.
        """
        # Do not call WaitingPut.result: it would log a slow put, which the caller logs too.
        return PutFuture.result(self.settle_later(result, wait, _nothing, _nothing))

    def settle_later(
        self,
        result: PutResult,
        wait: bool,
        done: Callable[[PutResult], None],
        failed: Callable[[], None],
    ) -> PutFuture:
        """Do the same as :meth:`settle`, but return a future (:class:`WaitingPut`) instead of
        waiting.
        """
        replica, replicas = _OK, self._replicas if wait else None
        end = result.end_offset
        # Check for slaves before the followers are woken, because the followers send the message to
        # slaves, and a slave may disconnect while it receives the message. RocketMQ also checks at
        # this time (submitReplicaRequest).
        if replicas is not None and not replicas.is_available(end):
            replica, replicas = _ALONE, None
        self.wake()
        flusher = self._flusher if wait and result.size else None
        if flusher is None:
            self._appended()
        parts = (flusher is not None) + (replicas is not None)
        if not parts:
            ready = PutFuture()
            result = result.settled(replica=replica)
            done(result)
            ready.set_result(result)
            return ready
        future = WaitingPut(result, replica, parts, done, failed)
        # Start the replica wait before the sync, so that both run at the same time.
        if replicas is not None:
            replicas.add(PutWait(end, future.replicated, future.fail))
        if flusher is not None:
            flusher.add(PutWait(end, future.flushed, future.fail))
        return future


def _nothing(*_: object) -> None:
    """Do nothing; :meth:`LogGrowth.settle` passes this function to ``settle_later`` as callback."""
