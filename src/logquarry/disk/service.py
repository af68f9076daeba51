"""What keeps a store from taking messages, or anything else does (``RunningFlags``).

Reads go on whatever stands here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum

from logquarry.errors import StoreUnavailable


class Refusal(Enum):
    """Why a store takes no messages: what is wrong, in words."""

    NOT_WRITEABLE = "it was told to take no messages"
    LOGICS_QUEUE_ERROR = "a consume queue could not be written"
    INDEX_FILE_ERROR = "an index file could not be written"
    DISK_FULL = "the disk is full"
    SLAVE = "it is a slave"
    CLOSED = "it is closed"


class RunningFlags:
    """The refusals of one store that are in force. Any thread may set, clear and ask.

    Attributes:
        refusals: those that are; replaced, never changed, so that asking takes no lock.
    """

    def __init__(self, *refusals: Refusal) -> None:
        self.refusals = frozenset(refusals)
        self._change = threading.Lock()

    def set(self, refusal: Refusal) -> None:
        """From now on the store takes no messages for this reason."""
        with self._change:
            self.refusals |= {refusal}

    def clear(self, refusal: Refusal) -> None:
        """This reason no longer holds."""
        with self._change:
            self.refusals -= {refusal}

    @property
    def is_writeable(self) -> bool:
        """Whether nothing keeps the store from taking messages."""
        return not self.refusals

    @property
    def why(self) -> str:
        """What keeps it from that, in words."""
        return "; ".join(refusal.value for refusal in Refusal if refusal in self.refusals)


# --------------------------------------------------------------------------------------------------
# Whether a store may still be written: one answer for all of its parts.
#
# A sync that failed leaves nobody knowing what is on the disk: the kernel marks the pages clean and
# the next sync says "all is well". So the first failure ends writing for good (reliability.md,
# rule 4): all waiters and all later writes fail, nothing is synced again, reads go on. Only opening
# the store anew, which reads what the disk really has, starts afresh.

logger = logging.getLogger(__name__)


class Health:
    """What keeps a store from being written, if anything does.

    Attributes:
        reason: why nothing may be written any more, None while all is well. Writers look at this
            before each write.
        is_gone: whether reads are over too: the store was closed, or this is a forked child, in
            which the maps are not there.
        is_forked: whether this is a forked child, in which locks may be held for ever.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_gone = False
        self.is_forked = False

    def poison(self, reason: str) -> StoreUnavailable:
        """End writing, for good; the first reason stays. Returns the error to raise."""
        if self.reason is None:
            self.reason = reason
            logger.error("the store takes no more writes: %s", reason)
        return self.error()

    def end_reads(self) -> None:
        """End reading: the files are about to be closed, and what one finds then is no answer."""
        self.is_gone = True

    def end(self, reason: str) -> None:
        """End reading and writing: the store was closed, or belongs to another process."""
        self.reason = reason
        self.is_gone = True

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.disk.lifetime`."""
        self.is_forked = True
        self.end("the store belongs to the process that this one was forked from")

    def error(self) -> StoreUnavailable:
        """The error that says why; only where there is a reason."""
        return StoreUnavailable(self.reason or "the store cannot be written")

    def require_writable(self) -> None:
        """Raise StoreUnavailable unless the store may be written."""
        if self.reason is not None:
            raise self.error()

    def require_readable(self) -> None:
        """Raise StoreUnavailable unless the store may be read."""
        if self.is_gone:
            raise StoreUnavailable(self.reason or "the store was closed")


# --------------------------------------------------------------------------------------------------
# Something that one thread waits for and another says, whatever a signal interrupts.
#
# ``threading.Event`` is written in Python: Ctrl-C in the middle of it leaves its lock taken, and
# the other thread waits for ever. A bare lock is taken and let go in one step.


class Flag:
    """Set by some threads, and taken away by the one that waits for it.

    Attributes:
        is_unset: whether it is not set; for those to whom a call of :meth:`set` is too much.
    """

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._free.acquire()
        self.is_unset: Callable[[], bool] = self._free.locked

    def set(self) -> None:
        """Set it; once more changes nothing."""
        try:
            if self._free.locked():
                self._free.release()
        except RuntimeError:
            # Another thread was quicker.
            pass

    def take(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, and take it away; whether it was set in time."""
        return self._free.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Done:
    """Set once, for good."""

    def __init__(self) -> None:
        self._is_set = False
        self._free = threading.Lock()
        self._free.acquire()

    def set(self) -> None:
        """Set it; only one thread may."""
        if not self._is_set:
            self._is_set = True
            self._free.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set; whether it is."""
        if not self._is_set and self._free.acquire(timeout=timeout_s):
            # For the others who wait.
            self._free.release()
        return self._is_set


# --------------------------------------------------------------------------------------------------
# A thread of the store that does something now and then (``ServiceThread``).
#
# :meth:`Service.run_once` is the work, and can be called without any thread. The thread is a
# daemon: the interpreter's end waits for none of them, but stops them through the store's close
# (:mod:`logquarry.disk.lifetime`).

Clock = Callable[[], int]
"""Milliseconds; only differences count."""


def monotonic_ms() -> int:
    """The clock of intervals and timeouts, which nobody sets."""
    return time.monotonic_ns() // 1_000_000


class Service(ABC):
    """Something that runs at an interval, or when it is woken.

    Args:
        name: the thread's name.
        health: of the store. Poisoned, the service ends; and if its work fails with anything but
            StoreUnavailable, which is a bug, it poisons the store: nobody would do the work.
        interval_ms: pause between two runs; None to run only when woken.
        is_timed: whether :meth:`wakeup` is not to cut the pause short.
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
        """Begin."""
        self._thread.start()

    def wakeup(self) -> None:
        """Run soon, and not only after the interval."""
        if not self.is_timed:
            self._wake.set()

    @property
    def flag(self) -> Flag | None:
        """What :meth:`wakeup` sets, None where it does nothing."""
        return None if self.is_timed else self._wake

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the run that is going on and a last one; whether it has ended in time.

        Does nothing in a forked child, where the thread never was.
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
        """Do what remains when the service is stopped."""

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
        """Called in the thread when it ends, for whatever reason."""
