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
        self, offset: int, future: Future[Any], result_of: Callable[[bool], Any]
    ) -> None:
        """Have a future of the caller's resolved then, with a result that is made of the same."""


_MS: Final = 1_000


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
        future = started_future()
        if self._flusher is None or not wait or not result.size:
            self.appended()
            result = self._replicated(result, wait)
            done(result)
            future.set_result(result)
            return future
        began = time.monotonic()

        def settled_result(in_time: bool) -> PutResult:
            settled = self._flushed(result, in_time)
            if (took := time.monotonic() - began) > SLOW_PUT:
                logger.warning("a put waited %d ms for the disk: %s", took * _MS, settled)
            done(settled)
            return settled

        future.add_done_callback(lambda told: None if told.exception() is None else failed())
        self._flusher.resolve_later(result.end_offset, future, settled_result)
        return future

    def _flushed(self, result: PutResult, in_time: bool) -> PutResult:
        flush = PutStatus.PUT_OK if in_time else PutStatus.FLUSH_DISK_TIMEOUT
        return result.settled(flush=flush, replica=self._replica)

    def _replicated(self, result: PutResult, wait: bool) -> PutResult:
        return result.settled(replica=self._replica) if wait else result


def failed_future(error: LogquarryError) -> Future[PutResult]:
    """The future of a put that failed."""
    future = started_future()
    future.set_exception(error)
    return future


def started_future() -> Future[PutResult]:
    """A future that cannot be cancelled any more."""
    future: Future[PutResult] = Future()
    future.set_running_or_notify_cancel()
    return future
