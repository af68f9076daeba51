"""The data types of the HA protocol: messages, settings, events, and tables of states
(docs/replicate.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, TypeVar

from logquarry import arguments
from logquarry.errors import UsageError
from logquarry.format.fields import Field, Layout

State = TypeVar("State", bound=Enum)
Input = TypeVar("Input", bound=Enum)


class Transitions(Generic[State, Input]):
    """The table of a state machine: (state, input) -> next state, for each pair that can occur."""

    def __init__(self, start: State, table: Mapping[tuple[State, Input], State]) -> None:
        self.start: Final = start
        self.table: Final = MappingProxyType(dict(table))

    def after(self, state: State, happened: Input) -> State:
        """Return the next state."""
        following = self.table.get((state, happened))
        assert following is not None, f"{happened} in {state}"
        return following

    def diagram(self) -> str:
        """Return the table as a Mermaid state diagram. Each arrow's label is the value of its
        input.
        """
        lines = ["stateDiagram-v2", f"    [*] --> {self.start.name}"]
        lines += [
            f"    {state.name} --> {following.name}: {happened.value}"
            for (state, happened), following in self.table.items()
        ]
        return "\n".join(lines)


class MasterState(Enum):
    """States of a master's connection."""

    AWAITING_REQUEST = "the slave is connected and has not reported yet"
    TRANSFERRING = "the master sends the log"
    CLOSED = "the connection reads and sends nothing more"


class MasterInput(Enum):
    """Inputs of a master's connection. Each value is a label in the diagram."""

    REPORT = "report within the log"
    SENT = "transfer or heartbeat sent"
    VIOLATION = "report outside the log"
    SILENCE = "20 s without a report"
    END = "connection ended"


MASTER: Final = Transitions(
    MasterState.AWAITING_REQUEST,
    {
        (MasterState.AWAITING_REQUEST, MasterInput.REPORT): MasterState.TRANSFERRING,
        (MasterState.TRANSFERRING, MasterInput.REPORT): MasterState.TRANSFERRING,
        (MasterState.TRANSFERRING, MasterInput.SENT): MasterState.TRANSFERRING,
    }
    | {
        (state, happened): MasterState.CLOSED
        for happened in (MasterInput.VIOLATION, MasterInput.SILENCE, MasterInput.END)
        for state in (MasterState.AWAITING_REQUEST, MasterState.TRANSFERRING)
    },
)


class SlaveState(Enum):
    """States of a slave's connection."""

    AWAITING_HEADER = "the header of the next transfer is incomplete"
    AWAITING_DATA = "the data of a transfer is incomplete"
    CLOSED = "the connection reads and sends nothing more"


class SlaveInput(Enum):
    """Inputs of a slave's connection. Each value is a label in the diagram."""

    HEARTBEAT = "heartbeat at the next byte"
    HEADER = "header of the next bytes"
    DATA = "data complete"
    ELSEWHERE = "heartbeat at another byte"
    VIOLATION = "invalid header"
    SILENCE = "20 s without a byte"
    END = "connection ended"


SLAVE: Final = Transitions(
    SlaveState.AWAITING_HEADER,
    {
        (SlaveState.AWAITING_HEADER, SlaveInput.HEARTBEAT): SlaveState.AWAITING_HEADER,
        (SlaveState.AWAITING_HEADER, SlaveInput.HEADER): SlaveState.AWAITING_DATA,
        (SlaveState.AWAITING_DATA, SlaveInput.DATA): SlaveState.AWAITING_HEADER,
        (SlaveState.AWAITING_HEADER, SlaveInput.ELSEWHERE): SlaveState.CLOSED,
        (SlaveState.AWAITING_HEADER, SlaveInput.VIOLATION): SlaveState.CLOSED,
    }
    | {
        (state, happened): SlaveState.CLOSED
        for happened in (SlaveInput.SILENCE, SlaveInput.END)
        for state in (SlaveState.AWAITING_HEADER, SlaveState.AWAITING_DATA)
    },
)


# ----------------------------------------------------------------- messages, settings and events
REPORT: Final = Layout(
    "report", Field("offset", "q", "end offset of the slave's log; 0 if it is empty")
)
HEADER: Final = Layout(
    "transfer header",
    Field("offset", "q", "physical offset of the data's first byte"),
    Field("size", "i", "number of data bytes that follow; 0 in a heartbeat"),
)
assert (REPORT.size, HEADER.size) == (8, 12)

LARGEST_TRANSFER: Final = (4 << 20) - HEADER.size
"""Maximum number of bytes of data in a transfer. Header and data must fit into the buffer of a
RocketMQ slave (``READ_MAX_BUFFER_SIZE``).
"""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class HaTimes:
    """Intervals of master and slave, in milliseconds.

    Attributes:
        heartbeat_ms: if master or slave has sent nothing for this time, it sends a heartbeat
            (``haSendHeartbeatInterval``).
        housekeeping_ms: if master or slave has received nothing for this time, it closes the
            connection (``haHousekeepingInterval``). The value should be more than 5 seconds,
            because a RocketMQ slave sends nothing in its first 5 seconds.
    """

    heartbeat_ms: int = 5_000
    housekeeping_ms: int = 20_000

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        if not 0 < self.heartbeat_ms < self.housekeeping_ms:
            raise UsageError(
                f"haSendHeartbeatInterval is {self.heartbeat_ms} ms and haHousekeepingInterval "
                f"{self.housekeeping_ms} ms: the first must be above 0 and below the second"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferLimits:
    """Limits to the number of bytes that a master sends.

    Attributes:
        transfer_size: maximum number of bytes of data in one transfer (``haTransferBatchSize``).
        bytes_per_second: maximum average number of bytes per second to one slave; None for no
            limit.
    """

    transfer_size: int = 32 * 1024
    bytes_per_second: int | None = None

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        if not 0 < self.transfer_size <= LARGEST_TRANSFER:
            raise UsageError(
                f"the transfer size is {self.transfer_size} bytes: it must be above 0 and at most "
                f"{LARGEST_TRANSFER}"
            )
        if self.bytes_per_second is not None and self.bytes_per_second <= 0:
            raise UsageError(f"the rate is {self.bytes_per_second} bytes/s: it must be above 0")


class LogRange(NamedTuple):
    """The range of the log that a master can send now.

    ``fresh_start`` is the physical offset from which a slave without bytes gets the log.
    """

    min_offset: int
    max_offset: int
    fresh_start: int


class SlaveRequested(NamedTuple):
    """The slave has requested the log from a physical offset.

    If ``is_fresh``, the slave has no bytes, and the master has chosen the offset.
    """

    offset: int
    is_fresh: bool


class SlaveAcknowledged(NamedTuple):
    """The slave has reported that it has all bytes before ``offset``.

    ``since`` is the physical offset at which the master began to send over this connection. The
    slave had the bytes before ``since`` already, and these may differ from the bytes of the master.
    So a put that waits for a slave must not end because of these bytes.
    """

    offset: int
    since: int


class DataReceived(NamedTuple):
    """The next bytes of the log; ``offset`` is the physical offset of the first byte.

    ``data`` is a view of the caller's buffer; use the view before the buffer changes.
    """

    offset: int
    data: memoryview


class HeartbeatReceived(NamedTuple):
    """The master has sent a heartbeat. ``offset`` is the physical offset of the next byte that the
    master will send.
    """

    offset: int


class MasterElsewhere(NamedTuple):
    """The master does not have the log at the offset that the slave requested, and sends nothing
    more.

    If the requested offset is after the end of the master's log, ``offset`` is this end. If the
    requested offset is before the start of the master's log, ``offset`` is this start.
    """

    offset: int


class ConnectionEnded(NamedTuple):
    """The connection has ended: the caller must close the socket."""

    reason: str


MasterEvent = SlaveRequested | SlaveAcknowledged | ConnectionEnded
SlaveEvent = DataReceived | HeartbeatReceived | MasterElsewhere | ConnectionEnded
