"""The result of a put. Its status depends on two waits: the flush wait (until the message is on the
disk) and the replica wait (until a slave has the message).

If the message is in the log, the put returns a result, even if the sync or the slave was not in
time. If the message is not in the log, the put raises an exception; :data:`OUTCOMES` maps each
status to the class of this exception.

The waits follow ``handleDiskFlush``, ``handleHA``, ``HAService.GroupTransferService`` and
``CommitLog.submitReplicaRequest``.

::

                       SYNC_FLUSH              ASYNC_FLUSH
    WAIT (default)     the next fdatasync      no wait
    WAIT=false         no wait                 no wait

On a SYNC_MASTER, a put also waits for a slave, unless its message has WAIT=false. The waits for
disk and slave run at the same time. If neither is successful, the put returns the status of the
replica wait.
If the sync fails, the put raises an error. Either the caller's thread waits, or the caller gets a
future that another thread completes (:mod:`logquarry.write.settling`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from logquarry.disk.service import Clock, Health, Service, monotonic_ms
from logquarry.errors import MessageRejected, StoreError, StoreUnavailable
from logquarry.format.frame import encode_id


class PutStatus(Enum):
    """``PutMessageStatus``."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    CREATE_MAPEDFILE_FAILED = "CREATE_MAPEDFILE_FAILED"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    OS_PAGECACHE_BUSY = "OS_PAGECACHE_BUSY"
    UNKNOWN_ERROR = "UNKNOWN_ERROR"
    LMQ_CONSUME_QUEUE_NUM_EXCEEDED = "LMQ_CONSUME_QUEUE_NUM_EXCEEDED"
    """No put returns this status, because 4.9.3 first checks the wrong variable."""


class AppendStatus(Enum):
    """``AppendMessageStatus``."""

    PUT_OK = "PUT_OK"
    END_OF_FILE = "END_OF_FILE"
    MESSAGE_SIZE_EXCEEDED = "MESSAGE_SIZE_EXCEEDED"
    """Never returned by 4.9.3, because the encoder fails before the append."""
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    """Never returned by 4.9.3, because the encoder fails before the append."""
    UNKNOWN_ERROR = "UNKNOWN_ERROR"


# Keep the members in variables, because looking up a member of an enum takes 0.15 us in Python
# 3.11.
_APPENDED: Final = AppendStatus.PUT_OK

OUTCOMES: Final[Mapping[PutStatus, type[StoreError] | None]] = MappingProxyType(
    {
        PutStatus.PUT_OK: None,
        PutStatus.FLUSH_DISK_TIMEOUT: None,
        PutStatus.FLUSH_SLAVE_TIMEOUT: None,
        PutStatus.SLAVE_NOT_AVAILABLE: None,
        PutStatus.SERVICE_NOT_AVAILABLE: StoreUnavailable,
        PutStatus.CREATE_MAPEDFILE_FAILED: StoreUnavailable,
        PutStatus.OS_PAGECACHE_BUSY: StoreUnavailable,
        PutStatus.MESSAGE_ILLEGAL: MessageRejected,
        PutStatus.PROPERTIES_SIZE_EXCEEDED: MessageRejected,
        PutStatus.UNKNOWN_ERROR: MessageRejected,
        PutStatus.LMQ_CONSUME_QUEUE_NUM_EXCEEDED: MessageRejected,
    }
)
"""The exception of each status; None if the message is in the log and has a result."""


class PutResult(NamedTuple):
    """A message or batch in the log (``PutMessageResult`` with its ``AppendMessageResult``).

    Attributes:
        status: PUT_OK, or the reason why the wait for flush or replica was not successful.
        append_status: always PUT_OK, because a put raises an error if the append fails.
        store_host: the broker's address in the frame.
        physical_offset: physical offset of the frame, or of the first frame of a batch.
        queue_offset: queue offset of the message, or of the first message of a batch.
        size: number of bytes in the log.
        message_count: number of messages in the log.
        store_timestamp: store time, in milliseconds.
        elapsed_ms: milliseconds for which the put held the log's lock.
        starts: start of each frame, relative to ``physical_offset``.
        page_cache_ms: milliseconds for copying the bytes into the page cache (``pagecacheRT``).
    """

    status: PutStatus
    append_status: AppendStatus
    store_host: bytes
    physical_offset: int
    queue_offset: int
    size: int
    message_count: int
    store_timestamp: int
    elapsed_ms: float
    starts: tuple[int, ...] = (0,)
    page_cache_ms: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the message is in the log (possibly not yet on the disk or at the replica)."""
        return self.append_status is _APPENDED

    @property
    def message_ids(self) -> tuple[str, ...]:
        """The id of each message."""
        host, first = self.store_host, self.physical_offset
        return tuple(encode_id(host, first + start) for start in self.starts)

    @property
    def message_id(self) -> str:
        """The id of the message; for a batch, all ids with commas between them."""
        if len(self.starts) == 1:
            return encode_id(self.store_host, self.physical_offset + self.starts[0])
        return ",".join(self.message_ids)

    @property
    def end_offset(self) -> int:
        """Physical offset after the last frame. If the log is synced up to this offset, the put is
        on the disk.
        """
        return self.physical_offset + self.size

    def settled(
        self, *, flush: PutStatus = PutStatus.PUT_OK, replica: PutStatus = PutStatus.PUT_OK
    ) -> PutResult:
        """Return this result with another status: the status of the replica wait or, if that is
        PUT_OK, the status of the flush wait.
        """
        status = flush if replica is PutStatus.PUT_OK else replica
        return self if status is self.status else self._replace(status=status)


def refusal(status: PutStatus, message: str, *, reason: str = "") -> StoreError:
    """Return the exception that a put raises if its message is not in the log. The class of the
    exception depends on the status.
    """
    kind = OUTCOMES[status]
    if kind is StoreUnavailable:
        return StoreUnavailable(message, status=status.value)
    assert kind is MessageRejected, f"{status} is a value"
    return MessageRejected(message, status=status.value, reason=reason)


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

    A thread that adds a wait does not need to wake this thread: the current sleep of this thread
    ends before the deadline of the new wait.
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
            # The acknowledged range already contains the new range. Compare the starts of both
            # ranges too: a slow slave may acknowledge bytes before the range that a faster slave
            # has acknowledged.
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
        """End overdue waits. Return the milliseconds to the next deadline; None if no put waits."""
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
