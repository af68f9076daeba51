"""Those who wait for the log to get somewhere: to the disk, or to a slave.

A request has an offset, a deadline and somebody to tell. Whoever comes first tells: the thread
that got there, or the one that watches deadlines.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any, Final, Protocol

from logquarry.disk.service import Clock, Done, Health, Service, monotonic_ms
from logquarry.errors import StoreUnavailable

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
    (:mod:`logquarry.disk.service`).
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


# --------------------------------------------------------------------------------------------------
# Waiting for a slave (``HAService.GroupTransferService``, ``CommitLog.submitReplicaRequest``).
#
# Whoever serves slaves tells how many are connected and up to where one has acknowledged; whoever
# puts asks whether a slave is near enough, and waits for it. One slave's word is enough, whichever
# it is. No thread stands behind a waiter: the one that brings the acknowledgement tells all whom it
# concerns, and one watch ends those whose time is over.
#
# As in RocketMQ a slave counts from its connecting on, before it has acknowledged anything, and
# what was acknowledged stays so when it goes.
#
# Not as there, an acknowledgement tells those who wait of what the slave got since it connected,
# and of nothing before: it may have begun behind that, with another master's log, or with nothing
# at all.

SLAVE_TIMEOUT_MS: Final = 3_000
FALL_BEHIND_MAX: Final = 256 << 20


class ReplicaWait:
    """Puts that wait for a slave. Any thread may ask and tell.

    Args:
        health: of the store.
        timeout_ms: how long one waits (``slaveTimeout``).
        fall_behind_max: how far behind a slave may be to be waited for (``haSlaveFallbehindMax``).

    Attributes:
        acknowledged: what stands before it some slave has (``push2SlaveMaxOffset``). It begins at
            0 whenever a master starts, and never falls.
        connected: how many slaves are connected.
    """

    def __init__(
        self,
        health: Health,
        *,
        timeout_ms: int = SLAVE_TIMEOUT_MS,
        fall_behind_max: int = FALL_BEHIND_MAX,
        clock: Clock = monotonic_ms,
    ) -> None:
        self.acknowledged = 0
        self.connected = 0
        self.watch = DeadlineWatch("replica watch", self.expire, health, max(1, timeout_ms))
        self._timeout_ms = timeout_ms
        self._fall_behind_max = fall_behind_max
        self._clock = clock
        self._change = threading.Lock()
        # By their offsets. That is also as they came, and by their deadlines, unless it is mixed:
        # of two threads that put one may come here late.
        self._waiting: deque[Waiter] = deque()
        self._is_mixed = False
        self._has_ended = False
        # Of what stands between the two some slave has said that it got it.
        self._held_from = self._held_to = 0

    # ------------------------------------------------------------------------ who serves slaves
    def slave_came(self) -> None:
        """One more is connected."""
        with self._change:
            self.connected += 1

    def slave_went(self) -> None:
        """One less is connected."""
        with self._change:
            self.connected -= 1
            assert self.connected >= 0

    def acknowledge(self, offset: int, since: int = 0) -> None:
        """A slave has what stands before an offset; whoever waited for that goes on.

        Args:
            offset: the offset.
            since: where what it got begins. Those who wait for less are not told.
        """
        waiting = self._waiting
        if self._held_from <= since and offset <= self._held_to and not waiting:
            # No news. An offset alone may be: another slave's may have told of less before it.
            return
        reached: list[Waiter] = []
        others: list[Waiter] = []
        with self._change:
            self.acknowledged = max(self.acknowledged, offset)
            self._note(since, offset)
            while waiting and waiting[0].offset <= offset:
                waiter = waiting.popleft()
                if waiter.offset > since:
                    reached.append(waiter)
                elif waiter.is_open:
                    others.append(waiter)
            waiting.extendleft(reversed(others))
        for waiter in reached:
            waiter.resolve(True)

    def _note(self, since: int, offset: int) -> None:
        """Keep what is held; of two stretches that do not meet the later one."""
        if since <= self._held_to and self._held_from <= offset:
            self._held_from = min(self._held_from, since)
            self._held_to = max(self._held_to, offset)
        elif offset > max(since, self._held_to):
            self._held_from, self._held_to = since, offset

    # ------------------------------------------------------------------------------- who puts
    def is_available(self, offset: int) -> bool:
        """Whether there is a slave to wait for (``isSlaveOK``).

        Args:
            offset: where the message ends.
        """
        return self.connected > 0 and offset - self.acknowledged < self._fall_behind_max

    def ask(self, offset: int) -> Answer:
        """What tells one thread whether a slave had it in time."""
        answer = Answer()
        self.resolve_later(offset, answer, bool)
        return answer

    def resolve_later(
        self,
        offset: int,
        future: Settled,
        result_of: Callable[[bool], Any],
        failed: Callable[[], None] = nothing,
    ) -> None:
        """Have a future resolved when a slave has what stands before an offset.

        Args:
            offset: where the message ends.
            future: is resolved then, or when the time is over, or the store is closed; it never
                fails, as the message is in the log.
            result_of: makes its result of whether a slave had it in time.
            failed: has no use here.
        """
        self.add(Request(offset, future, result_of, failed))

    def add(self, waiter: Waiter) -> None:
        """Tell somebody when a slave has the log up to where they wait for, or does not in time."""
        waiter.deadline = self._clock() + self._timeout_ms
        offset, waiting = waiter.offset, self._waiting
        with self._change:
            is_held = self._held_from < offset <= self._held_to
            is_over = self._has_ended or is_held
            if not is_over:
                if not waiting or waiting[-1].offset <= offset:
                    waiting.append(waiter)
                else:
                    self._is_mixed = True
                    waiting.insert(_place(waiting, offset), waiter)
        if is_over:
            waiter.resolve(is_held)

    # ------------------------------------------------------------------------------------- time
    def expire(self) -> int | None:
        """Tell those whose time is over; milliseconds until the next one's is, None for none."""
        now = self._clock()
        late: list[Waiter] = []
        with self._change:
            waiting = self._waiting
            while waiting and (waiting[0].deadline <= now or not waiting[0].is_open):
                late.append(waiting.popleft())
            left = waiting[0].deadline - now if waiting else None
            if self._is_mixed:
                late += [waiter for waiter in waiting if waiter.deadline <= now]
                kept = [w for w in waiting if w.deadline > now and w.is_open]
                waiting.clear()
                waiting.extend(kept)
                left = min((waiter.deadline - now for waiter in kept), default=None)
                self._is_mixed = bool(kept)
        for waiter in late:
            waiter.resolve(False)
        return left

    def end(self) -> None:
        """Let go of all who wait, and of whoever will; once more does nothing."""
        with self._change:
            self._has_ended = True
            left = list(self._waiting)
            self._waiting.clear()
        for waiter in left:
            waiter.resolve(False)


def _place(waiting: deque[Waiter], offset: int) -> int:
    """Where somebody belongs who came late; mostly close to the end."""
    at = len(waiting)
    while at and waiting[at - 1].offset > offset:
        at -= 1
    return at
