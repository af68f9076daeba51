"""Those who wait for the log to get somewhere: to the disk, or to a slave.

A request has an offset, a deadline and somebody to tell. Whoever comes first tells: the thread
that got there, or the one that watches deadlines.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, Final, Protocol

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.health import Health
from logquarry.store.disk.service import Service
from logquarry.store.disk.signal_flag import Done

_LONG_SECONDS: Final = 3_600.0


class Settled(Protocol):
    """What is told how it went: a future, or what stands for one."""

    def set_result(self, result: Any, /) -> None:
        """It went so."""

    def set_exception(self, error: StoreUnavailable, /) -> None:
        """It failed."""


class Answer:
    """A future for one thread that waits at once.

    Those of :mod:`concurrent.futures` are written in Python: Ctrl-C in the middle of one leaves its
    lock taken, and the thread that syncs waits for it for ever
    (:mod:`logquarry.store.disk.signal_flag`).
    """

    def __init__(self) -> None:
        self._done = Done()
        self._in_time = False
        self._error: StoreUnavailable | None = None

    def set_result(self, in_time: bool) -> None:
        """See :class:`Settled`."""
        self._in_time = in_time
        self._done.set()

    def set_exception(self, error: StoreUnavailable) -> None:
        """See :class:`Settled`."""
        self._error = error
        self._done.set()

    def result(self) -> bool:
        """Wait for it: whether the log got there in time."""
        while not self._done.wait(_LONG_SECONDS):
            pass
        if self._error is not None:
            raise self._error
        return self._in_time


def nothing() -> None:
    """Nobody is to be told."""


class Waiter(Protocol):
    """Who waits for the log to get somewhere up to an offset.

    Attributes:
        offset: physical offset that the log has to get to.
        deadline: when it is too late, in milliseconds of the clock of whom it waits for.
    """

    offset: int
    deadline: int

    @property
    def is_open(self) -> bool:
        """Whether nobody has told the owner yet."""

    def resolve(self, in_time: bool) -> None:
        """Tell the owner whether the log got there in time; only the first word counts."""

    def fail(self, error: StoreUnavailable) -> None:
        """Tell the owner that nobody knows."""


class Request:
    """A waiter that tells a future, or what stands for one."""

    __slots__ = ("_open", "deadline", "failed", "future", "offset", "result_of")

    def __init__(
        self,
        offset: int,
        future: Settled,
        result_of: Callable[[bool], Any],
        failed: Callable[[], None],
    ) -> None:
        self.offset = offset
        self.failed = failed
        self.deadline = 0
        self.future = future
        self.result_of = result_of
        # The one who takes it tells the owner: the syncing thread and the timeout may meet.
        self._open = threading.Lock()

    def resolve(self, in_time: bool) -> None:
        """See :class:`Waiter`."""
        if self._open.acquire(blocking=False):
            # As contextlib.suppress does it, which takes as long as all the rest.
            try:
                self.future.set_result(self.result_of(in_time))
            except InvalidStateError:
                return

    def fail(self, error: StoreUnavailable) -> None:
        """See :class:`Waiter`."""
        if self._open.acquire(blocking=False):
            self.failed()
            with contextlib.suppress(InvalidStateError):
                self.future.set_exception(error)

    @property
    def is_open(self) -> bool:
        """See :class:`Waiter`."""
        return not self._open.locked()


class DeadlineWatch(Service):
    """Ends the waiting of those whose time is over: a thread that is stuck cannot.

    It needs no waking: a request that comes while it sleeps has all of its time still before it.
    """

    def __init__(
        self, name: str, expire: Callable[[], int | None], health: Health, timeout_ms: int
    ) -> None:
        super().__init__(name, health, interval_ms=timeout_ms, is_timed=True)
        self._expire = expire
        self._timeout_ms = timeout_ms

    def run_once(self) -> None:
        """Expire, and sleep until the next deadline there may be."""
        left = self._expire()
        self.interval_ms = max(1, self._timeout_ms if left is None else left)
