"""The two waits of a put after its append: for the disk (flush wait), and for a slave (replica
wait).

Follows ``handleDiskFlush``, ``handleHA``, ``HAService.GroupTransferService`` and
``CommitLog.submitReplicaRequest``.

::

                       SYNC_FLUSH              ASYNC_FLUSH
    WAIT (default)     the next fdatasync      no wait
    WAIT=false         no wait                 no wait

On a SYNC_MASTER, a put also waits for a slave, unless its message has WAIT=false. The waits for
disk and slave run at the same time. If neither is successful, the put returns the status of the
replica wait.
If the sync fails, the put raises an error. The caller's thread waits, or gets a future that another
thread completes (:mod:`logquarry.write.settling`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from logquarry.disk.service import Clock, Health, Service, monotonic_ms
from logquarry.errors import StoreUnavailable


class Waiter(Protocol):
    """A wait until the disk or a slave has the log up to a physical offset.

    Several threads may try to end the wait at the same time; only the first one has an effect. The
    deadline is a time in milliseconds of the clock that the service uses.
    """

    offset: int
    deadline: int

    @property
    def is_open(self) -> bool:
        """Whether the wait has not ended yet."""

    def resolve(self, in_time: bool) -> None:
        """End the wait. ``in_time`` is True if the disk or the slave has the log up to the offset,
        and False if the deadline has passed.
        """

    def fail(self, error: StoreUnavailable) -> None:
        """End the wait because the sync failed. It is then unknown whether the message is on the
        disk.
        """


class DeadlineWatch(Service):
    """Ends the waits whose deadline has passed, even while the thread that syncs is stuck.

    A new wait does not need to wake this thread, because the thread's current sleep ends before the
    deadline of the new wait.
    """

    def __init__(
        self, name: str, expire: Callable[[], int | None], health: Health, timeout_ms: int
    ) -> None:
        super().__init__(name, health, interval_ms=timeout_ms, is_timed=True)
        self._expire = expire
        self._timeout_ms = timeout_ms

    def run_once(self) -> None:
        """End waits, and sleep until the next deadline."""
        left = self._expire()
        self.interval_ms = max(1, self._timeout_ms if left is None else left)


# --------------------------------------------------------------------------------------------------
# The replica wait. A put waits for the acknowledgement of one slave. As in RocketMQ, a put waits if
# a slave is connected, and the acknowledgement of a slave stays valid after the slave
# disconnects. Unlike in RocketMQ, an acknowledgement ends only waits for bytes that the slave has
# received since it connected. The slave's log may lack the earlier bytes, or may have other bytes
# in their place, from another master.

SLAVE_TIMEOUT_MS: Final = 3_000
FALL_BEHIND_MAX: Final = 256 << 20


class ReplicaWait:
    """The puts that wait for a slave. Any thread may call the methods.

    Args:
        timeout_ms: how long a put waits (``slaveTimeout``).
        fall_behind_max: a put waits for a slave only if fewer than this many bytes of the log have
            no acknowledgement yet (``haSlaveFallbehindMax``).

    Attributes:
        acknowledged: the highest physical offset that any slave has acknowledged since the master
            was started (``push2SlaveMaxOffset``); 0 if there is none.
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
        # The waits are sorted by offset. Usually this is also the order of their deadlines. The two
        # orders differ if two threads append in one order, and add their waits in the other order.
        self._waiting: deque[Waiter] = deque()
        self._is_mixed = False
        self._has_ended = False
        # The acknowledged range: a slave has acknowledged all bytes between these two physical
        # offsets.
        self._held_from = self._held_to = 0

    # ------------------------------------------------------------- for the replication server
    def slave_came(self) -> None:
        """Count a slave that has connected."""
        with self._change:
            self.connected += 1

    def slave_went(self) -> None:
        """Count a slave that has disconnected."""
        with self._change:
            self.connected -= 1
            assert self.connected >= 0

    def acknowledge(self, offset: int, since: int = 0) -> None:
        """Record that a slave has the log up to an offset, and end all waits for this and earlier
        offsets.

        ``since`` is the physical offset of the first byte that the slave received in this
        connection.
        """
        waiting = self._waiting
        if self._held_from <= since and offset <= self._held_to and not waiting:
            # The acknowledged range already contains the new range. Compare both ends: a slave that
            # is behind another slave may acknowledge bytes that are before the acknowledged range.
            # Then do not return here.
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
        """Extend the acknowledged range by a new range. If the new range does not touch the
        acknowledged range, keep only the later of the two ranges.
        """
        if since <= self._held_to and self._held_from <= offset:
            self._held_from = min(self._held_from, since)
            self._held_to = max(self._held_to, offset)
        elif offset > max(since, self._held_to):
            self._held_from, self._held_to = since, offset

    # --------------------------------------------------------------------------------- for puts
    def is_available(self, offset: int) -> bool:
        """Whether a put should wait for a slave: a slave is connected, and close enough to the
        log's end (``isSlaveOK``).
        """
        return self.connected > 0 and offset - self.acknowledged < self._fall_behind_max

    def add(self, waiter: Waiter) -> None:
        """Add a wait. The wait ends at its deadline, or when a slave has the log up to the wait's
        offset.
        """
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
        """End overdue waits. Return the milliseconds to the next deadline; None without waits."""
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
        """End all waits; a later wait ends at once. A second call has no effect."""
        with self._change:
            self._has_ended = True
            left = list(self._waiting)
            self._waiting.clear()
        for waiter in left:
            waiter.resolve(False)


def _place(waiting: deque[Waiter], offset: int) -> int:
    """Return the index at which to insert a wait, so that the waits stay sorted by offset. The
    search begins at the end, because the index is usually close to it.
    """
    at = len(waiting)
    while at and waiting[at - 1].offset > offset:
        at -= 1
    return at
