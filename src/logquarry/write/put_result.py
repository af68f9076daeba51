"""What a put came to: RocketMQ's statuses, and :class:`PutResult`.

A result stands for a message that is in the log, be it late on disk or at the replica. What is
not in the log is an exception; :data:`OUTCOMES` says which status is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from logquarry.errors import MessageRejected, StoreError, StoreUnavailable
from logquarry.format import message_id


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
    """Never comes: 4.9.3 looks at the wrong variable before it would return it."""


class AppendStatus(Enum):
    """``AppendMessageStatus``."""

    PUT_OK = "PUT_OK"
    END_OF_FILE = "END_OF_FILE"
    MESSAGE_SIZE_EXCEEDED = "MESSAGE_SIZE_EXCEEDED"
    """Never comes from 4.9.3: the encoder finds it before anything is appended."""
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    """Never comes from 4.9.3, likewise."""
    UNKNOWN_ERROR = "UNKNOWN_ERROR"


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
"""What raises: None where the message is in the log, and the status is a :class:`PutResult`'s."""


class PutResult(NamedTuple):
    """A message or batch in the log (``PutMessageResult`` with its ``AppendMessageResult``).

    Attributes:
        status: PUT_OK, or why flush or replica were not waited out.
        append_status: PUT_OK; END_OF_FILE only from a single append that found no room.
        store_host: the broker, as the frame has it.
        physical_offset: where the frame, or a batch's first one, starts.
        queue_offset: index in the consume queue, of a batch the first one's.
        size: bytes in the log.
        message_count: messages in the log.
        store_timestamp: when the store took it, in milliseconds.
        elapsed_ms: how long the log was held.
        starts: of each frame, its place counted from ``physical_offset``.
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

    @property
    def ok(self) -> bool:
        """Whether the message is in the log, whatever became of flush and replica."""
        return self.append_status is AppendStatus.PUT_OK

    @property
    def message_ids(self) -> tuple[str, ...]:
        """The id of each message."""
        host, first = self.store_host, self.physical_offset
        return tuple(message_id.encode(host, first + start) for start in self.starts)

    @property
    def message_id(self) -> str:
        """The id of the message; those of a batch with commas between."""
        return ",".join(self.message_ids)

    @property
    def end_offset(self) -> int:
        """Physical offset behind the last frame: what a flush has to reach."""
        return self.physical_offset + self.size

    def settled(
        self, *, flush: PutStatus = PutStatus.PUT_OK, replica: PutStatus = PutStatus.PUT_OK
    ) -> PutResult:
        """The same once flush and replica are known; the replica's status overrides the flush's."""
        status = flush if replica is PutStatus.PUT_OK else replica
        return self if status is self.status else self._replace(status=status)


def refusal(status: PutStatus, message: str, *, reason: str = "") -> StoreError:
    """The exception that stands for a status without a message in the log."""
    kind = OUTCOMES[status]
    if kind is StoreUnavailable:
        return StoreUnavailable(message, status=status.value)
    assert kind is MessageRejected, f"{status} is a value"
    return MessageRejected(message, status=status.value, reason=reason)
