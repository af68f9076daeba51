"""The result of a put: RocketMQ's statuses, and :class:`PutResult`.

If the message is in the log, the put returns a result, even if the sync or the slave was not in
time. If the message is not in the log, the put raises an exception; :data:`OUTCOMES` has its class
for each status.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

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
        """Return the result with the status of the replica wait. If that is PUT_OK, use the status
        of the flush wait.
        """
        status = flush if replica is PutStatus.PUT_OK else replica
        return self if status is self.status else self._replace(status=status)


def refusal(status: PutStatus, message: str, *, reason: str = "") -> StoreError:
    """Return the exception for a put whose message is not in the log. The exception's class depends
    on the status.
    """
    kind = OUTCOMES[status]
    if kind is StoreUnavailable:
        return StoreUnavailable(message, status=status.value)
    assert kind is MessageRejected, f"{status} is a value"
    return MessageRejected(message, status=status.value, reason=reason)
