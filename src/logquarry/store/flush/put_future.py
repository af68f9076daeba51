"""What a put waits for when its message is in the log (``handleDiskFlush``, ``handleHA``).

::

                       SYNC_FLUSH              ASYNC_FLUSH
    WAIT (default)     the next fdatasync      nothing
    WAIT=false         nothing                 nothing

On a SYNC_MASTER a put with WAIT is also told of its replica. There is none yet, as on a broker that
no slave is connected to: SLAVE_NOT_AVAILABLE.

Waiting is done by the caller (:meth:`FlushWait.settle`), or by nobody: the future that
:meth:`FlushWait.settle_later` gives is resolved by the thread that syncs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

from logquarry.errors import LogquarryError
from logquarry.store.put.append import SLOW_PUT
from logquarry.store.put.put_result import PutResult, PutStatus

logger = logging.getLogger(__name__)


class Flusher(Protocol):
    """What syncs the log for those who wait (:class:`.group_commit.GroupCommitService`)."""

    def wait(self, offset: int) -> bool:
        """Wait until the log is on the disk up to an offset; whether it was in time."""

    def resolve_later(
        self,
        offset: int,
        future: Future[Any],
        result_of: Callable[[bool], Any],
        failed: Callable[[], None],
    ) -> None:
        """Have a future of the caller's resolved then, with a result that is made of the same."""


_MS: Final = 1_000
_FINISHED: Final = "FINISHED"
# Between those who settle a future and those who begin to wait for it. Held for a few steps.
_change = threading.Lock()


class PutFuture(Future[PutResult]):
    """A future that costs little where nobody waits for it before it is done.

    Each of the library's has a condition, which takes longer to make than a message to append.
    Here it is made when it is first asked for: by whoever waits, or wants to be called back.
    Nobody can cancel it: the message is in the log.
    """

    def __init__(self) -> None:
        self._made: threading.Condition | None = None
        self._state = "RUNNING"
        self._result: PutResult | None = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[PutResult]], object]] = []

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        if self._made is None:
            with _change:
                if self._made is None:
                    self._made = threading.Condition()
        return self._made

    def set_result(self, result: PutResult) -> None:
        """See :meth:`concurrent.futures.Future.set_result`."""
        with _change:
            if self._made is None and self._state != _FINISHED:
                # Whoever comes from here on finds it done, and nobody came before.
                self._result = result
                self._state = _FINISHED
                return
        super().set_result(result)

    def done(self) -> bool:
        """See :meth:`concurrent.futures.Future.done`."""
        return self._state == _FINISHED

    def result(self, timeout: float | None = None) -> PutResult:
        """See :meth:`concurrent.futures.Future.result`."""
        if self._state == _FINISHED and self._result is not None:
            return self._result
        return super().result(timeout)


class FlushWait:
    """Settles puts.

    Args:
        flusher: syncs the log; None where no put waits for that (ASYNC_FLUSH).
        appended: told of each put that nobody waits for, so that it gets to the disk in time.
        replica: what becomes of the replica of each put with WAIT.
    """

    def __init__(
        self,
        flusher: Flusher | None,
        appended: Callable[[], None],
        *,
        replica: PutStatus = PutStatus.PUT_OK,
    ) -> None:
        self._flusher = flusher
        self.appended = appended
        self._replica = replica

    def settle(self, result: PutResult, wait: bool) -> PutResult:
        """The result once the disk has the message, as far as the put waits for that.

        Raises:
            StoreUnavailable: if the sync failed: nobody knows what the disk has.
        """
        if self._flusher is None or not wait or not result.size:
            self.appended()
            return self._replicated(result, wait)
        return self._flushed(result, self._flusher.wait(result.end_offset))

    def settle_later(
        self,
        result: PutResult,
        wait: bool,
        done: Callable[[PutResult], None],
        failed: Callable[[], None],
    ) -> Future[PutResult]:
        """A future of the same. Nobody can cancel it: the message is in the log.

        Args:
            result: what the append came to.
            wait: whether the put waits for the disk.
            done: told of the result before the future's callbacks are.
            failed: likewise, if the sync failed.
        """
        future = PutFuture()
        if self._flusher is None or not wait or not result.size:
            self.appended()
            result = self._replicated(result, wait)
            done(result)
            future.set_result(result)
            return future
        settling = _Settling(result, done, self._flushed)
        self._flusher.resolve_later(result.end_offset, future, settling.settled, failed)
        return future

    def _flushed(self, result: PutResult, in_time: bool) -> PutResult:
        flush = PutStatus.PUT_OK if in_time else PutStatus.FLUSH_DISK_TIMEOUT
        return result.settled(flush=flush, replica=self._replica)

    def _replicated(self, result: PutResult, wait: bool) -> PutResult:
        return result.settled(replica=self._replica) if wait else result


class _Settling:
    """A put whose future waits for the disk."""

    __slots__ = ("_began", "_done", "_flushed", "_result")

    def __init__(
        self,
        result: PutResult,
        done: Callable[[PutResult], None],
        flushed: Callable[[PutResult, bool], PutResult],
    ) -> None:
        self._result = result
        self._flushed = flushed
        self._done = done
        self._began = time.monotonic()

    def settled(self, in_time: bool) -> PutResult:
        settled = self._flushed(self._result, in_time)
        if (took := time.monotonic() - self._began) > SLOW_PUT:
            logger.warning("a put waited %d ms for the disk: %s", took * _MS, settled)
        self._done(settled)
        return settled


def failed_future(error: LogquarryError) -> Future[PutResult]:
    """The future of a put that failed."""
    future = PutFuture()
    future.set_exception(error)
    return future
