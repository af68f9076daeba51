"""The state of an open store (health, refusals), the base class of its threads (``ServiceThread``),
and the functions that close the store in a forked child or at exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Final, Protocol

from logquarry.disk.file_place import HealthReason, Refusals
from logquarry.errors import StoreError, StoreUnavailable

logger = logging.getLogger(__name__)


class Refusal(Enum):
    """The reasons why a store takes no messages. The value of a reason is the text of the error."""

    NOT_WRITEABLE = "the application has switched off messages"
    LOGICS_QUEUE_ERROR = "a message could not be dispatched to queues and index"
    INDEX_FILE_ERROR = "an index file could not be written"
    DISK_FULL = "the disk is full"
    SLAVE = "it is a slave"
    CLOSED = "it is closed"


class RunningFlags(Refusals):
    """The reasons why a store takes no messages now.

    The store can still be read. Any thread may use the object. Each change replaces the whole set
    ``refusals``, so a put can read the set without a lock.
    """

    def __init__(self, *refusals: Refusal) -> None:
        self.refusals: frozenset[Refusal] = frozenset(refusals)
        self._causes: dict[Refusal, str] = {}
        self._change = threading.Lock()

    def set(self, refusal: Refusal, cause: str | None = None) -> None:
        """Refuse messages from now on. ``cause`` is the error that led to the refusal."""
        with self._change:
            if cause is not None:
                self._causes[refusal] = cause
            self.refusals |= {refusal}

    def clear(self, refusal: Refusal) -> None:
        """Remove a reason. When no reason is left, the store takes messages again."""
        with self._change:
            self.refusals -= {refusal}

    @property
    def why(self) -> str:
        """The reasons as text, each with its cause."""
        found = [refusal for refusal in Refusal if refusal in self.refusals]
        return "; ".join(": ".join((one.value, *self._cause(one))) for one in found)

    def _cause(self, refusal: Refusal) -> tuple[str, ...]:
        cause = self._causes.get(refusal)
        return () if cause is None else (cause,)


class Health(HealthReason):
    """Whether a store may be written and read.

    After a failed sync, it is unknown which bytes are on the disk. The operating system marks the
    unwritten pages as clean, so the next sync would report success without writing these pages. So
    the first failed sync ends all writes until the store is opened again (the store is *poisoned*).
    From then on no file is synced, and waiting puts fail, but the store can still be read.

    Attributes:
        reason: why the store may no longer be written, None if the store may be written.
        is_gone: True if the store cannot be read any more: it was closed, or this process is a
            forked child.
        is_forked: whether this is a forked child. In a forked child a lock may stay taken forever,
            because the thread that held the lock exists only in the parent.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_gone = False
        self.is_forked = False

    def poison(self, reason: str) -> StoreUnavailable:
        """End all writes, and return the error to raise. Later calls do not change the reason."""
        if self.reason is None:
            self.reason = reason
            logger.error("the store takes no more writes: %s", reason)
        return self.error()

    def end_reads(self) -> None:
        """End all reads, because the files are about to be closed."""
        self.is_gone = True

    def end(self, reason: str) -> None:
        """End all reads and writes, because the store was closed or belongs to another process."""
        self.reason = reason
        self.is_gone = True

    def abandon_in_child(self) -> None:
        """End reads and writes in a forked child; see :func:`abandon_in_children`."""
        self.is_forked = True
        self.end("the store belongs to the process that this one was forked from")

    def error(self) -> StoreUnavailable:
        """Make the exception for a call that the store refuses in its current state."""
        return StoreUnavailable(self.reason or "the store cannot be written")

    def require_writable(self) -> None:
        """Raise StoreUnavailable unless the store may be written."""
        if self.reason is not None:
            raise self.error()

    def require_readable(self) -> None:
        """Raise StoreUnavailable unless the store may be read."""
        if self.is_gone:
            raise StoreUnavailable(self.reason or "the store was closed")


class SyncDelayed(StoreUnavailable):
    """A sync could not begin, because the process lacks a resource. Nothing is lost, and the next
    flush tries again.
    """


class Flag:
    """A flag that any thread can set. One thread waits for the flag, and clears it.

    The flag is a bare lock instead of a ``threading.Event``. The methods of an Event are written in
    Python. If Ctrl-C interrupts such a method, the Event's lock can stay taken, and another thread
    then waits for ever. To save time, a put calls ``is_unset`` first, and calls :meth:`set` only if
    the flag is not set.
    """

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._free.acquire()
        self.is_unset: Callable[[], bool] = self._free.locked

    def set(self) -> None:
        """Set the flag. A second call does nothing."""
        try:
            if self._free.locked():
                self._free.release()
        except RuntimeError:
            pass

    def take(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set, and clear it. Return whether the flag was set in time."""
        return self._free.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Done:
    """A flag that is set once and never cleared. Like :class:`Flag`, this flag is a bare lock."""

    def __init__(self) -> None:
        self._is_set = False
        self._free = threading.Lock()
        self._free.acquire()

    def set(self) -> None:
        """Set the flag. Only one thread may call this method."""
        if not self._is_set:
            self._is_set = True
            self._free.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the flag is set. Return whether the flag is set."""
        if not self._is_set and self._free.acquire(timeout=timeout_s):
            # This thread has taken the lock. Release the lock, so that the next waiting thread
            # wakes too.
            self._free.release()
        return self._is_set


Clock = Callable[[], int]
"""A clock that returns milliseconds from an arbitrary start, so only differences have a meaning."""


def monotonic_ms() -> int:
    """Return milliseconds for intervals and timeouts. Changes of the system time have no effect."""
    return time.monotonic_ns() // 1_000_000


class Service(ABC):
    """A daemon thread that runs :meth:`run_once` at an interval, or after :meth:`wakeup`.

    If :meth:`run_once` raises SyncDelayed, the service runs again after the interval. If the store
    may still be written, the service also runs again after an exception of a class in ``retried``.
    After any other exception, the service poisons the store and ends.

    If several runs fail in a row, the service logs the first failure. It logs a later failure only
    if its text differs from the text of the previous failure. The service also logs the first
    success after a failure.

    Args:
        interval_ms: pause between two runs; None to run only after :meth:`wakeup`.
        is_timed: True if the service runs only at the interval, and :meth:`wakeup` has no effect.
    """

    retried: tuple[type[StoreError], ...] = (SyncDelayed,)

    def __init__(
        self, name: str, health: Health, *, interval_ms: int | None, is_timed: bool = False
    ) -> None:
        self.name = name
        self.health = health
        self.interval_ms = interval_ms
        self.is_timed = is_timed
        self._wake = Flag()
        self._is_stopping = False
        self._retried_error: str | None = None
        self._exited = Done()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"logquarry-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wakeup(self) -> None:
        """Make the thread call :meth:`run_once` now, before the end of the interval."""
        if not self.is_timed:
            self._wake.set()

    @property
    def flag(self) -> Flag | None:
        """The flag that :meth:`wakeup` sets; None if :meth:`wakeup` does nothing."""
        return None if self.is_timed else self._wake

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after its current run and :meth:`run_last`. Return False if the thread is
        still running after ``timeout_s``.
        """
        if self._process != os.getpid():
            return True
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            # Do not use the thread's own state: in Python 3.11, after Ctrl-C has interrupted a
            # join, a thread that still runs is reported as ended.
            if not self._exited.wait(timeout_s):
                logger.warning("%s has not ended in %s s", self.name, timeout_s)
                return False
            self._thread.join(timeout_s)
        return True

    @property
    def is_current(self) -> bool:
        """Whether the caller is this service's own thread."""
        return self._thread is threading.current_thread()

    @property
    def is_stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._is_stopping

    @abstractmethod
    def run_once(self) -> bool | None:
        """Do the work that is due. Return False if no work is due: such a run does not count as a
        success.
        """

    def run_last(self) -> None:  # noqa: B027
        """Do the remaining work after :meth:`stop`."""

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                pause = self.interval_ms
                self._wake.take(None if pause is None else pause / 1000)
                if not self._is_stopping:
                    self._run_once()
            self.run_last()
        except StoreUnavailable as error:
            logger.error("%s ended: %s", self.name, error)
            if not self._is_stopping:
                # Without this service, a put could be acknowledged and never be synced.
                self.health.poison(str(error))
        except BaseException as error:
            logger.exception("%s failed", self.name)
            # The repr of an OSError has no path.
            reason = str(error) if isinstance(error, OSError) else repr(error)
            self.health.poison(f"{self.name} failed: {reason}")
        finally:
            try:
                self.ended()
            finally:
                self._exited.set()

    def _run_once(self) -> None:
        try:
            has_worked = self.run_once() is not False
        except self.retried as error:
            if not isinstance(error, SyncDelayed):
                # After a failed sync, no later run can succeed. So this call raises an error, which
                # ends the service.
                self.health.require_writable()
            if str(error) != self._retried_error:
                logger.warning("%s failed, and will be retried: %s", self.name, error)
            self._retried_error = str(error)
        else:
            if has_worked and self._retried_error is not None:
                logger.warning("%s works again", self.name)
                self._retried_error = None

    def ended(self) -> None:  # noqa: B027
        """Called in the thread when the thread ends, for any reason."""


class Abandonable(Protocol):
    """An object that must not be used in a forked child."""

    def abandon_in_child(self) -> None:
        """Release, in the child, the resources that the child got from its parent. Implementations
        must not take locks, and must not raise errors.
        """


class Closable(Protocol):
    """An object to close at exit."""

    def close(self) -> None:
        """Close the object. Further calls do nothing."""


_NOT_IN_CHILDREN: Final[weakref.WeakSet[Abandonable]] = weakref.WeakSet()
_OPEN: Final[dict[int, Closable]] = {}


def abandon_in_children(thing: Abandonable) -> None:
    """In each child that this process forks, call ``thing.abandon_in_child``. Only a weak reference
    to ``thing`` is kept.

    A forked child lacks the store's maps (``MADV_DONTFORK``) and the store's threads. So in a child
    every call raises StoreUnavailable, and the descriptors are closed. The store's lock belongs to
    a descriptor. If the child kept this descriptor open, the store would stay locked until the
    child ends.
    """
    _NOT_IN_CHILDREN.add(thing)


def stays(thing: Abandonable) -> None:
    """Undo :func:`abandon_in_children`."""
    _NOT_IN_CHILDREN.discard(thing)


def close_at_exit(thing: Closable) -> None:
    """Close ``thing`` at interpreter exit, so that the next opening needs no recovery."""
    _OPEN[id(thing)] = thing


def was_closed(thing: Closable) -> None:
    """Undo :func:`close_at_exit`."""
    _OPEN.pop(id(thing), None)


def _close_all() -> None:
    while _OPEN:
        _, thing = _OPEN.popitem()
        try:
            thing.close()
        except Exception:
            # Log the error and continue, because the other stores must be closed too.
            logger.exception("a store could not be closed cleanly at exit")


_forks = 0


def forks() -> int:
    """Return the number of forks between the process that loaded this module and this process."""
    return _forks


def _abandon_all() -> None:
    global _forks  # noqa: PLW0603 - the one count of the process
    _forks += 1
    # The child's exit must not close the parent's stores.
    _OPEN.clear()
    for thing in list(_NOT_IN_CHILDREN):
        thing.abandon_in_child()
    _NOT_IN_CHILDREN.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
