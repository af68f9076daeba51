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
from logquarry.write.append import SLOW_PUT
from logquarry.write.flush_wait import ReplicaWait, Request, Waiter, nothing
from logquarry.write.put_result import PutResult, PutStatus

logger = logging.getLogger(__name__)


class Flusher(Protocol):
    """What syncs the log for those who wait (:class:`.group_commit.GroupCommitService`)."""

    def wait(self, offset: int) -> bool:
        """Wait until the log is on the disk up to an offset; whether it was in time."""

    def add(self, request: Waiter) -> None:
        """Tell somebody then, who has the same to wait for."""


_MS: Final = 1_000
_FINISHED: Final = "FINISHED"
_monotonic = time.monotonic
_Lock = threading.Lock
# Between those who settle a future and those who begin to wait for it. Held for a few steps.
_change = threading.Lock()


class PutFuture(Future[PutResult]):
    """A future that costs little where nobody waits for it before it is done.

    Each of the library's has a condition, which takes longer to make than a message to append.
    Here it is made when it is first asked for: by whoever waits, or wants to be called back; and
    with it the lists of those, who are looked at behind the condition only. Nobody can cancel it:
    the message is in the log.
    """

    # Of one that nobody has touched yet.
    _made: threading.Condition | None = None
    _state = "RUNNING"
    _result: PutResult | None = None
    _exception: BaseException | None = None

    def __init__(self) -> None:
        pass

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        if self._made is None:
            with _change:
                if self._made is None:
                    self._waiters: list[Any] = []
                    self._done_callbacks: list[Callable[[Future[PutResult]], object]] = []
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


class WaitingPut(PutFuture):
    """The future of a put that waits for one thing, the disk or a slave, and is told of it itself.

    See :class:`~logquarry.write.flush_wait.Waiter`.

    Args:
        result: what the append came to.
        in_time: its status if the log gets there in time,
        late: and if it does not.
        done: told of the result before the future's callbacks are.
        failed: likewise, if the sync failed.
    """

    def __init__(
        self,
        result: PutResult,
        in_time: PutStatus,
        late: PutStatus,
        done: Callable[[PutResult], None],
        failed: Callable[[], None],
    ) -> None:
        self.offset = result.end_offset
        self.deadline = 0
        self._appended = result
        self._in_time = in_time
        self._late = late
        self._tell = done
        self._tell_failed = failed
        self._began = _monotonic()
        self._open = _Lock()

    @property
    def is_open(self) -> bool:
        """See :class:`~logquarry.write.flush_wait.Waiter`."""
        return not self._open.locked()

    def resolve(self, in_time: bool) -> None:
        """See :class:`~logquarry.write.flush_wait.Waiter`."""
        if self._open.acquire(False):
            status, result = self._in_time if in_time else self._late, self._appended
            if status is not result.status:
                result = result._replace(status=status)
            _note_slow(self._began, result)
            self._tell(result)
            self.set_result(result)

    def fail(self, error: StoreUnavailable) -> None:
        """See :class:`~logquarry.write.flush_wait.Waiter`."""
        if self._open.acquire(False):
            self._tell_failed()
            self.set_exception(error)


Asked = tuple[PutStatus, ReplicaWait | None]
"""The status as far as the replica is concerned, and whom to wait for, None for nobody."""


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

    def asked(self, result: PutResult, wait: bool) -> Asked:
        """What becomes of the replica, as far as it is known, and who knows the rest.

        To be asked before anybody is told of the message: a slave that goes when it gets the
        message was there when it was put (``submitReplicaRequest``).
        """
        replicas = self._replicas
        if replicas is None or not wait:
            return PutStatus.PUT_OK, None
        if replicas.is_available(result.end_offset):
            return PutStatus.PUT_OK, replicas
        return PutStatus.SLAVE_NOT_AVAILABLE, None

    def settle(self, result: PutResult, wait: bool, asked: Asked) -> PutResult:
        """The result once disk and slave have the message, as far as the put waits for that.

        Args:
            result: what the append came to.
            wait: whether the put waits for the disk and a slave.
            asked: what :meth:`asked` told.

        Raises:
            StoreUnavailable: if the sync failed: nobody knows what the disk has.
        """
        replica, slave = asked
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
        asked: Asked,
        done: Callable[[PutResult], None],
        failed: Callable[[], None],
    ) -> Future[PutResult]:
        """A future of the same. Nobody can cancel it: the message is in the log.

        Args:
            result: what the append came to.
            wait: whether the put waits for the disk and a slave.
            asked: what :meth:`asked` told.
            done: told of the result before the future's callbacks are.
            failed: likewise, if the sync failed.
        """
        replica, slave = asked
        flusher = self._flusher
        if flusher is None or not wait or not result.size:
            self.appended()
            flusher = None
        future: PutFuture
        if slave is None:
            if flusher is None:
                future = PutFuture()
                result = result.settled(replica=replica)
                done(result)
                future.set_result(result)
                return future
            late = PutStatus.FLUSH_DISK_TIMEOUT if replica is PutStatus.PUT_OK else replica
            future = WaitingPut(result, replica, late, done, failed)
            flusher.add(future)
        elif flusher is None:
            future = WaitingPut(
                result, PutStatus.PUT_OK, PutStatus.FLUSH_SLAVE_TIMEOUT, done, failed
            )
            slave.add(future)
        else:
            future = PutFuture()
            both = _Both(future, _Settling(result, done), failed)
            slave.add(Request(result.end_offset, both.replica, bool, nothing))
            flusher.add(Request(result.end_offset, both, bool, nothing))
        return future


def _flush_status(in_time: bool) -> PutStatus:
    return PutStatus.PUT_OK if in_time else PutStatus.FLUSH_DISK_TIMEOUT


def _replica_status(in_time: bool) -> PutStatus:
    return PutStatus.PUT_OK if in_time else PutStatus.FLUSH_SLAVE_TIMEOUT


def _note_slow(began: float, result: PutResult) -> None:
    if (took := _monotonic() - began) > SLOW_PUT:
        logger.warning("a put waited %d ms for disk and slave: %s", took * _MS, result)


class _Settling:
    """A put whose future waits for the disk and for a slave.

    Attributes:
        flush: what became of the disk,
        replica: and of the slave.
    """

    __slots__ = ("_began", "_done", "_result", "flush", "replica")

    def __init__(self, result: PutResult, done: Callable[[PutResult], None]) -> None:
        self._result = result
        self.flush = self.replica = PutStatus.PUT_OK
        self._done = done
        self._began = _monotonic()

    def settled(self) -> PutResult:
        """The result when both are known."""
        settled = self._result.settled(flush=self.flush, replica=self.replica)
        _note_slow(self._began, settled)
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
        self._settling.flush = _flush_status(in_time)
        self.heard()

    def set_exception(self, error: StoreUnavailable) -> None:
        """The sync failed: whatever the slave has."""
        self._failed()
        # Whoever hears of the slave is the first then, and leaves the future to a second one.
        self._future.set_exception(error)

    def heard(self) -> None:
        """One of the two is known."""
        if not self._is_first.acquire(blocking=False):
            self._future.set_result(self._settling.settled())


class _ReplicaOfBoth:
    """The other half of :class:`_Both`."""

    __slots__ = ("_both",)

    def __init__(self, both: _Both) -> None:
        self._both = both

    def set_result(self, in_time: bool) -> None:
        """A slave has it, or not in time."""
        self._both._settling.replica = _replica_status(in_time)
        self._both.heard()

    def set_exception(self, error: StoreUnavailable) -> None:
        """It never fails."""
        raise AssertionError(error)


def failed_future(error: LogquarryError) -> Future[PutResult]:
    """The future of a put that failed."""
    future = PutFuture()
    future.set_exception(error)
    return future
