"""What each side of an HA connection is doing: tables that run the machines, and draw the docs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from logquarry.errors import UsageError
from logquarry.format.fields import Field, Layout
from logquarry.protocol.machine import Transitions


class MasterState(Enum):
    """What a master's connection is doing."""

    AWAITING_REQUEST = "nothing is known of the slave; it counts as connected"
    TRANSFERRING = "the log is sent"
    CLOSED = "nothing more is read or sent"


class MasterInput(Enum):
    """What may happen to it; the values are the diagram's labels."""

    REPORT = "report within the log"
    SENT = "transfer or heartbeat"
    VIOLATION = "report outside of it"
    SILENCE = "20 s without a report"
    END = "connection ended"


MASTER: Final = Transitions(
    MasterState.AWAITING_REQUEST,
    {
        (MasterState.AWAITING_REQUEST, MasterInput.REPORT): MasterState.TRANSFERRING,
        (MasterState.TRANSFERRING, MasterInput.REPORT): MasterState.TRANSFERRING,
        (MasterState.TRANSFERRING, MasterInput.SENT): MasterState.TRANSFERRING,
        (MasterState.AWAITING_REQUEST, MasterInput.VIOLATION): MasterState.CLOSED,
        (MasterState.TRANSFERRING, MasterInput.VIOLATION): MasterState.CLOSED,
        (MasterState.AWAITING_REQUEST, MasterInput.SILENCE): MasterState.CLOSED,
        (MasterState.TRANSFERRING, MasterInput.SILENCE): MasterState.CLOSED,
        (MasterState.AWAITING_REQUEST, MasterInput.END): MasterState.CLOSED,
        (MasterState.TRANSFERRING, MasterInput.END): MasterState.CLOSED,
    },
)


class SlaveState(Enum):
    """What a slave's connection is doing."""

    AWAITING_HEADER = "the next transfer's header is to come, or the rest of it"
    AWAITING_DATA = "the data of a transfer is to come, or the rest of it"
    CLOSED = "nothing more is read or sent"


class SlaveInput(Enum):
    """What may happen to it; the values are the diagram's labels."""

    HEARTBEAT = "heartbeat at the next byte"
    HEADER = "header of the next bytes"
    DATA = "the last of the data"
    ELSEWHERE = "heartbeat at another byte"
    VIOLATION = "a header that cannot be"
    SILENCE = "20 s without a word"
    END = "connection ended"


SLAVE: Final = Transitions(
    SlaveState.AWAITING_HEADER,
    {
        (SlaveState.AWAITING_HEADER, SlaveInput.HEARTBEAT): SlaveState.AWAITING_HEADER,
        (SlaveState.AWAITING_HEADER, SlaveInput.HEADER): SlaveState.AWAITING_DATA,
        (SlaveState.AWAITING_DATA, SlaveInput.DATA): SlaveState.AWAITING_HEADER,
        (SlaveState.AWAITING_HEADER, SlaveInput.ELSEWHERE): SlaveState.CLOSED,
        (SlaveState.AWAITING_HEADER, SlaveInput.VIOLATION): SlaveState.CLOSED,
        (SlaveState.AWAITING_HEADER, SlaveInput.SILENCE): SlaveState.CLOSED,
        (SlaveState.AWAITING_DATA, SlaveInput.SILENCE): SlaveState.CLOSED,
        (SlaveState.AWAITING_HEADER, SlaveInput.END): SlaveState.CLOSED,
        (SlaveState.AWAITING_DATA, SlaveInput.END): SlaveState.CLOSED,
    },
)


# --------------------------------------------------------------------------------------------------
# What goes over an HA connection, and what either side tells of it: tables, settings, events.

REPORT: Final = Layout("report", Field("offset", "q", "what the slave has; 0: nothing"))
HEADER: Final = Layout(
    "transfer header",
    Field("offset", "q", "physical offset of the data's first byte"),
    Field("size", "i", "bytes of data that follow; 0: a heartbeat"),
)
assert (REPORT.size, HEADER.size) == (8, 12)

LARGEST_TRANSFER: Final = (4 << 20) - HEADER.size
"""What fits into the buffer of a Java slave (``READ_MAX_BUFFER_SIZE``) behind its header."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class HaTimes:
    """Settings of both sides, in milliseconds.

    Attributes:
        heartbeat_ms: after how long without a word one is said (``haSendHeartbeatInterval``).
        housekeeping_ms: after how long without a word the other side counts as gone
            (``haHousekeepingInterval``). A Java slave says nothing in its first five seconds.
    """

    heartbeat_ms: int = 5_000
    housekeeping_ms: int = 20_000

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_ms < self.housekeeping_ms:
            raise UsageError(
                f"heartbeats every {self.heartbeat_ms} ms and an end after "
                f"{self.housekeeping_ms} ms of silence: the first must be above 0 and below the "
                "second"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferLimits:
    """How much a master sends.

    Attributes:
        transfer_size: most bytes of data in one transfer (``haTransferBatchSize``).
        bytes_per_second: to one slave, on average; None for as fast as it goes.
    """

    transfer_size: int = 32 * 1024
    bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.transfer_size <= LARGEST_TRANSFER:
            raise UsageError(
                f"a transfer of {self.transfer_size} bytes: it must be above 0 and not above "
                f"{LARGEST_TRANSFER}"
            )
        if self.bytes_per_second is not None and self.bytes_per_second <= 0:
            raise UsageError(f"{self.bytes_per_second} bytes a second: it must be above 0")


class LogRange(NamedTuple):
    """What a master has of its log right now.

    Attributes:
        min_offset: where its first file begins.
        max_offset: where what can be read ends.
        fresh_start: where a slave that has nothing begins.
    """

    min_offset: int
    max_offset: int
    fresh_start: int


class SlaveRequested(NamedTuple):
    """A slave has told where it wants the log from.

    Attributes:
        offset: where sending begins.
        is_fresh: whether it had nothing, and the master chose.
    """

    offset: int
    is_fresh: bool


class SlaveAcknowledged(NamedTuple):
    """A slave has what stands before an offset: its first report says so too.

    Attributes:
        offset: the offset.
        since: where sending began. What stands before that came over no connection that is known:
            a slave that lacks it, or has other bytes there, asks in the same way as one that has
            it. So nobody may rely on it.
    """

    offset: int
    since: int


class DataReceived(NamedTuple):
    """The next bytes of the log. Good until the next call: they are the caller's own buffer.

    Attributes:
        offset: physical offset of the first.
        data: the bytes.
    """

    offset: int
    data: memoryview


class HeartbeatReceived(NamedTuple):
    """The master lives, and its next byte is this one."""

    offset: int


class MasterElsewhere(NamedTuple):
    """The master's next byte is another one than this slave's: nothing more will come.

    A master that has nothing at the offset that it was asked for says so in this way: by a
    heartbeat at its log's end where the slave is ahead of it, and at its log's start where the
    slave is too far behind.
    """

    offset: int


class ConnectionEnded(NamedTuple):
    """Nothing more will come or go: close the socket.

    Attributes:
        reason: in words.
    """

    reason: str


MasterEvent = SlaveRequested | SlaveAcknowledged | ConnectionEnded
SlaveEvent = DataReceived | HeartbeatReceived | MasterElsewhere | ConnectionEnded
