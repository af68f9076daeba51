"""The state and the threads (``ServiceThread``) of an open store: health, refusals, forks, exit.

- :class:`RunningFlags`: reasons why the store takes no messages now. Reads continue.
- :class:`Health`: whether the store may still be written and read. After a failed sync, the
  contents of the disk are unknown: the kernel marks the pages clean, and the next sync reports
  success. So the first failed sync ends writing for good. All waiting puts and later writes fail,
  and nothing is synced again, but reads continue. Opening the store again reads the disk's
  contents.
- :class:`Flag` and :class:`Done`: one thread sets such a flag, and another waits for it. Each is a
  bare lock: ``threading.Event`` is written in Python, so Ctrl-C inside it can leave its lock taken,
  and then the other thread waits for ever.
- :class:`Service`: a thread of the store that runs at an interval or when woken
  (``ServiceThread``).
- :func:`abandon_in_children`: a forked child has the store's objects, but neither its maps
  (``MADV_DONTFORK``) nor its threads, and only the parent may write the files. So the child
  abandons the store: every call raises StoreUnavailable, and the descriptors are closed. If the
  descriptor of the lock stayed open, the child would hold the lock as long as it lives.
- :func:`close_at_exit`: stores that are still open when the interpreter exits are closed, so that
  the next opening needs no recovery.
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
from logquarry.errors import StoreUnavailable

logger = logging.getLogger(__name__)


class Refusal(Enum):
    """Why a store takes no messages; the value is the error's text."""

    NOT_WRITEABLE = "the application has switched off messages"
    LOGICS_QUEUE_ERROR = "a consume queue could not be written"
    INDEX_FILE_ERROR = "an index file could not be written"
    DISK_FULL = "the disk is full"
    SLAVE = "it is a slave"
    CLOSED = "it is closed"


class RunningFlags(Refusals):
    """The reasons for which one store takes no messages now. Any thread may use it.

    Attributes:
        refusals: the reasons in force. The set is replaced, never changed, so that a put needs no
            lock to read it.
    """

    def __init__(self, *refusals: Refusal) -> None:
        self.refusals: frozenset[Refusal] = frozenset(refusals)
        self._change = threading.Lock()

    def set(self, refusal: Refusal) -> None:
        """Refuse messages from now on, for this reason."""
        with self._change:
            self.refusals |= {refusal}

    def clear(self, refusal: Refusal) -> None:
        """Remove a reason to refuse messages."""
        with self._change:
            self.refusals -= {refusal}

    @property
    def is_writeable(self) -> bool:
        """Whether the store takes messages."""
        return not self.refusals

    @property
    def why(self) -> str:
        """The reasons why the store takes no messages, as text."""
        return "; ".join(refusal.value for refusal in Refusal if refusal in self.refusals)


class Health(HealthReason):
    """Whether a store may be written and read.

    Attributes:
        reason: why the store may no longer be written, None if it may. Writers read this before
            each write.
        is_gone: whether reads have ended too: the store was closed, or this is a forked child,
            which does not have the maps.
        is_forked: whether this is a forked child, in which locks may be held for ever.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_gone = False
        self.is_forked = False

    def poison(self, reason: str) -> StoreUnavailable:
        """End writing for good, and return the error to raise. The first reason stays."""
        if self.reason is None:
            self.reason = reason
            logger.error("the store takes no more writes: %s", reason)
        return self.error()

    def end_reads(self) -> None:
        """End reading: the files are about to be closed, and a read could return wrong bytes."""
        self.is_gone = True

    def end(self, reason: str) -> None:
        """End reading and writing: the store was closed, or belongs to another process."""
        self.reason = reason
        self.is_gone = True

    def abandon_in_child(self) -> None:
        """See :func:`abandon_in_children`."""
        self.is_forked = True
        self.end("the store belongs to the process that this one was forked from")

    def error(self) -> StoreUnavailable:
        """The exception for a call that the store refuses; its text is :attr:`reason`."""
        return StoreUnavailable(self.reason or "the store cannot be written")

    def require_writable(self) -> None:
        """Raise StoreUnavailable unless the store may be written."""
        if self.reason is not None:
            raise self.error()

    def require_readable(self) -> None:
        """Raise StoreUnavailable unless the store may be read."""
        if self.is_gone:
            raise StoreUnavailable(self.reason or "the store was closed")


class Flag:
    """A flag that several threads set, and that the waiting thread clears.

    Attributes:
        is_unset: whether it is not set. A put calls this first, because it is cheaper than
            :meth:`set`.
    """

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._free.acquire()
        self.is_unset: Callable[[], bool] = self._free.locked

    def set(self) -> None:
        """Set it; a second call does nothing."""
        try:
            if self._free.locked():
                self._free.release()
        except RuntimeError:
            # Another thread set it first.
            pass

    def take(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, and clear it; returns whether it was set in time."""
        return self._free.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Done:
    """A flag that is set once and never cleared."""

    def __init__(self) -> None:
        self._is_set = False
        self._free = threading.Lock()
        self._free.acquire()

    def set(self) -> None:
        """Set it. Only one thread may call this."""
        if not self._is_set:
            self._is_set = True
            self._free.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set; returns whether it is."""
        if not self._is_set and self._free.acquire(timeout=timeout_s):
            # Let the next waiter through.
            self._free.release()
        return self._is_set


Clock = Callable[[], int]
"""Milliseconds; only differences have a meaning."""


def monotonic_ms() -> int:
    """The clock of intervals and timeouts; changes of the system time do not affect it."""
    return time.monotonic_ns() // 1_000_000


class Service(ABC):
    """A thread that runs at an interval, or when it is woken.

    :meth:`run_once` is the work, and can be called without a thread. The thread is a daemon. At the
    interpreter's exit, the store's close ends it (:func:`close_at_exit`).

    Args:
        health: the store's health. If the store is poisoned, the service ends. If the work raises
            any exception except StoreUnavailable, this is a bug: the service poisons the store,
            because no thread does the work any more.
        interval_ms: pause between two runs; None to run only when woken.
        is_timed: whether the pause is kept even after :meth:`wakeup`.
    """

    def __init__(
        self, name: str, health: Health, *, interval_ms: int | None, is_timed: bool = False
    ) -> None:
        self.name = name
        self.health = health
        self.interval_ms = interval_ms
        self.is_timed = is_timed
        self._wake = Flag()
        self._is_stopping = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"logquarry-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wakeup(self) -> None:
        """Run soon, without waiting for the interval."""
        if not self.is_timed:
            self._wake.set()

    @property
    def flag(self) -> Flag | None:
        """The flag that :meth:`wakeup` sets; None if :meth:`wakeup` does nothing."""
        return None if self.is_timed else self._wake

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after its current run and one last run; returns whether it ended in time.

        Does nothing in a forked child, which does not have the thread.
        """
        if self._process != os.getpid():
            return True
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("%s has not ended in %s s", self.name, timeout_s)
                return False
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
    def run_once(self) -> None:
        """Do the work that is due."""

    def run_last(self) -> None:  # noqa: B027
        """Do the remaining work when the service is stopped."""

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                pause = self.interval_ms
                self._wake.take(None if pause is None else pause / 1000)
                if not self._is_stopping:
                    self.run_once()
            self.run_last()
        except StoreUnavailable as error:
            logger.error("%s ended: %s", self.name, error)
        except BaseException as error:
            logger.exception("%s failed", self.name)
            self.health.poison(f"{self.name} failed: {error!r}")
        finally:
            self.ended()

    def ended(self) -> None:  # noqa: B027
        """Called in the thread when it ends, for any reason."""


class Abandonable(Protocol):
    """An object that must not be used in a forked child."""

    def abandon_in_child(self) -> None:
        """Release the parent's resources in the child. Must neither take locks nor raise."""


class Closable(Protocol):
    """An object to close at exit."""

    def close(self) -> None:
        """Close it; further calls do nothing."""


_NOT_IN_CHILDREN: Final[weakref.WeakSet[Abandonable]] = weakref.WeakSet()
_OPEN: Final[dict[int, Closable]] = {}


def abandon_in_children(thing: Abandonable) -> None:
    """Abandon ``thing`` in each child that this process forks. Its reference to it is weak."""
    _NOT_IN_CHILDREN.add(thing)


def stays(thing: Abandonable) -> None:
    """Undo :func:`abandon_in_children`."""
    _NOT_IN_CHILDREN.discard(thing)


def close_at_exit(thing: Closable) -> None:
    """Close ``thing`` at interpreter exit, last registered first.

    Keeps ``thing`` alive until :func:`was_closed`.
    """
    _OPEN[id(thing)] = thing


def was_closed(thing: Closable) -> None:
    """Undo :func:`close_at_exit`, because ``thing`` was closed."""
    _OPEN.pop(id(thing), None)


def _close_all() -> None:
    while _OPEN:
        _, thing = _OPEN.popitem()
        try:
            thing.close()
        except Exception:
            # The other stores must be closed too, and no caller could catch the error.
            logger.exception("a store could not be closed cleanly at exit")


def _abandon_all() -> None:
    # The child's exit must not close the parent's stores.
    _OPEN.clear()
    for thing in list(_NOT_IN_CHILDREN):
        thing.abandon_in_child()
    _NOT_IN_CHILDREN.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
