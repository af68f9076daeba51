"""What a put waits for when its message is in the log (``handleDiskFlush``, ``handleHA``).

::

                       SYNC_FLUSH              ASYNC_FLUSH
    WAIT (default)     the next fdatasync      nothing
    WAIT=false         nothing                 nothing

On a SYNC_MASTER a put with WAIT also waits for a slave, at the same time: it is in both places
when it is done. What became of the slave overrides what became of the disk, unless the sync failed.

Waiting is done by the caller (:meth:`FlushWait.settle`), or by nobody: the future that
:meth:`FlushWait.settle_later` gives is resolved by the thread that syncs, or the one that hears of
the slave.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, Protocol

from logquarry.errors import LogquarryError, StoreUnavailable
from logquarry.store.flush.replica_wait import ReplicaWait
from logquarry.store.flush.waiting import Settled
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
        future: Settled,
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
        replicas: knows of the slaves; None where no put waits for one (ASYNC_MASTER).
    """

    def __init__(
        self,
        flusher: Flusher | None,
        appended: Callable[[], None],
        *,
        replicas: ReplicaWait | None = None,
    ) -> None:
        self._flusher = flusher
        self.appended = appended
        self._replicas = replicas

    def settle(self, result: PutResult, wait: bool) -> PutResult:
        """The result once disk and slave have the message, as far as the put waits for that.

        Raises:
            StoreUnavailable: if the sync failed: nobody knows what the disk has.
        """
        replica, slave = self._asked(result, wait)
        # Before the sync, so that one goes on while the other does.
        answer = None if slave is None else slave.ask(result.end_offset)
        flush = PutStatus.PUT_OK
        if self._flusher is None or not wait or not result.size:
            self.appended()
        else:
            flush = _flush_status(self._flusher.wait(result.end_offset))
        if answer is not None:
            replica = _replica_status(answer.result())
        return result.settled(flush=flush, replica=replica)

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
            wait: whether the put waits for the disk and a slave.
            done: told of the result before the future's callbacks are.
            failed: likewise, if the sync failed.
        """
        future = PutFuture()
        replica, slave = self._asked(result, wait)
        flusher = self._flusher
        if flusher is None or not wait or not result.size:
            self.appended()
            flusher = None
        if flusher is None and slave is None:
            result = result.settled(replica=replica)
            done(result)
            future.set_result(result)
            return future
        end = result.end_offset
        settling = _Settling(result, replica, done)
        if slave is None:
            assert flusher is not None
            flusher.resolve_later(end, future, settling.settled, failed)
        elif flusher is None:
            slave.resolve_later(end, future, settling.replicated)
        else:
            both = _Both(future, settling, failed)
            slave.resolve_later(end, both.replica, bool)
            flusher.resolve_later(end, both, bool, _nothing)
        return future

    def _asked(self, result: PutResult, wait: bool) -> tuple[PutStatus, ReplicaWait | None]:
        """What becomes of the replica, as far as it is known, and who knows the rest."""
        replicas = self._replicas
        if replicas is None or not wait:
            return PutStatus.PUT_OK, None
        if replicas.is_available(result.end_offset):
            return PutStatus.PUT_OK, replicas
        return PutStatus.SLAVE_NOT_AVAILABLE, None


def _flush_status(in_time: bool) -> PutStatus:
    return PutStatus.PUT_OK if in_time else PutStatus.FLUSH_DISK_TIMEOUT


def _replica_status(in_time: bool) -> PutStatus:
    return PutStatus.PUT_OK if in_time else PutStatus.FLUSH_SLAVE_TIMEOUT


def _nothing() -> None:
    pass


class _Settling:
    """A put whose future waits for the disk, for a slave, or for both."""

    __slots__ = ("_began", "_done", "_flush", "_replica", "_result")

    def __init__(
        self, result: PutResult, replica: PutStatus, done: Callable[[PutResult], None]
    ) -> None:
        self._result = result
        self._flush = PutStatus.PUT_OK
        self._replica = replica
        self._done = done
        self._began = time.monotonic()

    def settled(self, in_time: bool) -> PutResult:
        """The result when it is known whether the disk had it in time."""
        self._flush = _flush_status(in_time)
        return self._settled()

    def replicated(self, in_time: bool) -> PutResult:
        """The result when it is known whether a slave had it in time."""
        self._replica = _replica_status(in_time)
        return self._settled()

    def _settled(self) -> PutResult:
        settled = self._result.settled(flush=self._flush, replica=self._replica)
        if (took := time.monotonic() - self._began) > SLOW_PUT:
            logger.warning("a put waited %d ms for disk and slave: %s", took * _MS, settled)
        self._done(settled)
        return settled


class _Both:
    """Stands for a future that waits for the disk and a slave; itself it hears of the disk.

    Attributes:
        replica: hears of the slave.
    """

    __slots__ = ("_failed", "_future", "_is_first", "_settling", "replica")

    def __init__(
        self, future: Future[PutResult], settling: _Settling, failed: Callable[[], None]
    ) -> None:
        self._future = future
        self._settling = settling
        self._failed = failed
        self._is_first = threading.Lock()
        self.replica = _ReplicaOfBoth(self)

    def set_result(self, in_time: bool) -> None:
        """The disk has it, or not in time."""
        self._settling._flush = _flush_status(in_time)
        self.heard()

    def set_exception(self, error: StoreUnavailable) -> None:
        """The sync failed: whatever the slave has."""
        self._failed()
        # Whoever hears of the slave is the first then, and leaves the future to a second one.
        self._future.set_exception(error)

    def heard(self) -> None:
        """One of the two is known."""
        if not self._is_first.acquire(blocking=False):
            self._future.set_result(self._settling._settled())


class _ReplicaOfBoth:
    """The other half of :class:`_Both`."""

    __slots__ = ("_both",)

    def __init__(self, both: _Both) -> None:
        self._both = both

    def set_result(self, in_time: bool) -> None:
        """A slave has it, or not in time."""
        self._both._settling._replica = _replica_status(in_time)
        self._both.heard()

    def set_exception(self, error: StoreUnavailable) -> None:
        """It never fails."""
        raise AssertionError(error)


def failed_future(error: LogquarryError) -> Future[PutResult]:
    """The future of a put that failed."""
    future = PutFuture()
    future.set_exception(error)
    return future
