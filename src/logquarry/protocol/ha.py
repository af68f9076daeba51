"""RocketMQ's HA protocol (``HAService``, ``HAConnection``, ``HAClient`` of 4.9.3) without sockets.

::

    slave -> master    [offset 8]                           report: what the slave has; heartbeat
    master -> slave    [offset 8][size 4][data ``size``]    transfer; size 0 is a heartbeat

The slave's first report says where it wants the log from; 0 stands for "I have nothing", and the
master chooses. Later ones acknowledge. Transfers are cut wherever a file ends or the transfer size
is reached, never at frames: offsets may lie anywhere in a frame.

Both machines are fed with bytes and the time, and give events and bytes. Bytes may come in any
pieces: the events are the same, but for the data of a transfer, which is passed on as it comes,
so that nothing is kept. Whatever else a stranger sends ends in
:class:`~logquarry.errors.ProtocolViolation`; what is kept of a peer's bytes is never more than a
part of one header.

Guarantees: the master acknowledges to its waiters no more than what was sent to the slave since its
first report, which lies within the log. The slave takes no byte but the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, NoReturn

from logquarry.errors import ProtocolViolation, UsageError
from logquarry.format.fields import Field, Layout
from logquarry.protocol.machine import Transitions
from logquarry.protocol.rate import Bucket

REPORT: Final = Layout("report", Field("offset", "q", "what the slave has; 0: nothing"))
HEADER: Final = Layout(
    "transfer header",
    Field("offset", "q", "physical offset of the data's first byte"),
    Field("size", "i", "bytes of data that follow; 0: a heartbeat"),
)
assert (REPORT.size, HEADER.size) == (8, 12)

LARGEST_TRANSFER: Final = (4 << 20) - HEADER.size
"""What fits into the buffer of a Java slave (``READ_MAX_BUFFER_SIZE``) behind its header."""

LARGEST_OFFSET: Final = (1 << 63) - 1

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


# ------------------------------------------------------------------------------------- events
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


# ------------------------------------------------------------------------------------- states
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


class MasterConnection:
    """A master's side of one connection. For one thread.

    Args:
        now_ms: the time; any clock that nobody sets.
        times: when heartbeats are due, and how long silence may last.
        limits: how much is sent.

    Attributes:
        state: what it is doing.
        acknowledged: what stands before it the slave has; None before its first report.
    """

    def __init__(
        self,
        now_ms: int,
        *,
        times: HaTimes | None = None,
        limits: TransferLimits | None = None,
    ) -> None:
        self.state = MASTER.start
        self.acknowledged: int | None = None
        self._times = times or HaTimes()
        self._limits = limits or TransferLimits()
        self._received = b""
        self._next = self._since = 0
        self._heard_ms = self._said_ms = now_ms
        self._outgoing: list[Buffer] = []
        self._has_caught_up = False
        rate, portion = self._limits.bytes_per_second, self._limits.transfer_size
        if rate is not None:
            # Heartbeats between two portions would look as if there were no more.
            portion = max(1, min(portion, rate * self._times.heartbeat_ms // 1_000))
        self._bucket = Bucket(rate, portion, now_ms)

    @property
    def next_offset(self) -> int:
        """Physical offset of the next byte to send; 0 before the slave's first report."""
        return self._next

    def receive_data(self, data: Buffer, log: LogRange, now_ms: int) -> list[MasterEvent]:
        """Take bytes of the slave.

        Args:
            data: as they came; none at all if the slave has ended the connection.
            log: what there is of the log now.
            now_ms: the time.

        Raises:
            ProtocolViolation: if no slave of this log would send that. The machine is closed
                then; its ``events`` count still, and what :meth:`data_to_send` gives may be sent.
        """
        if self.state is MasterState.CLOSED:
            return []
        if not data:
            self._move(MasterInput.END)
            return [ConnectionEnded("the slave ended the connection")]
        received = self._received + bytes(data)
        whole = len(received) - len(received) % REPORT.size
        self._received = received[whole:]
        events: list[MasterEvent] = []
        for (offset,) in REPORT.struct.iter_unpack(received[:whole]):
            # Before it is judged: a part of a report does not prove a living slave.
            self._heard_ms = now_ms
            self._report(offset, log, events)
        return events

    def _report(self, offset: int, log: LogRange, events: list[MasterEvent]) -> None:
        if self.state is MasterState.AWAITING_REQUEST:
            self._request(offset, log, events)
        elif not 0 <= offset <= self._next:
            reason = f"it reports {offset}, and was sent nothing behind {self._next}"
            self._violated(reason, events)
        if self.acknowledged is None or offset > self.acknowledged:
            # One that falls back takes nothing back: what is acknowledged stays so.
            self.acknowledged = offset
            events.append(SlaveAcknowledged(offset, self._since))

    def _request(self, offset: int, log: LogRange, events: list[MasterEvent]) -> None:
        if offset < 0 or offset > log.max_offset:
            self._refuse(log.max_offset)
            reason = f"its first report is {offset}, and the log ends at {log.max_offset}"
            self._violated(reason, events)
        if 0 < offset < log.min_offset:
            self._refuse(log.min_offset)
            reason = f"its first report is {offset}, and the log begins at {log.min_offset}"
            self._violated(reason, events)
        self._next = self._since = log.fresh_start if offset == 0 else offset
        events.append(SlaveRequested(self._next, offset == 0))
        self._move(MasterInput.REPORT)

    def _refuse(self, offset: int) -> None:
        self._outgoing.append(HEADER.struct.pack(offset, 0))

    def _violated(self, reason: str, events: list[MasterEvent]) -> NoReturn:
        self._move(MasterInput.VIOLATION)
        raise ProtocolViolation(f"a slave's connection: {reason}", events=events)

    def transferable(self, log: LogRange, now_ms: int) -> int:
        """Most bytes of data that may be sent from :attr:`next_offset` on now, in one transfer.

        0 where none are there, or none are allowed yet.
        """
        if self.state is not MasterState.TRANSFERRING:
            return 0
        there = min(log.max_offset - self._next, self._limits.transfer_size)
        return max(0, min(there, self._bucket.allowed(now_ms)))

    def send(self, data: memoryview, now_ms: int) -> None:
        """Send the log's next bytes in one transfer. They are not copied, and must not change.

        Args:
            data: bytes of the log from :attr:`next_offset` on, as many as :meth:`transferable`
                allows at most.
            now_ms: the time.
        """
        size = len(data)
        assert 0 < size <= self._limits.transfer_size
        self._move(MasterInput.SENT)
        self._outgoing += (HEADER.struct.pack(self._next, size), data)
        self._next += size
        self._said_ms = now_ms
        self._bucket.take(size)

    def tick(self, log: LogRange, now_ms: int) -> list[MasterEvent]:
        """Do what is due at a time: a heartbeat, or the end of a slave that is silent."""
        if self.state is MasterState.CLOSED:
            return []
        if now_ms - self._heard_ms > self._times.housekeeping_ms:
            self._move(MasterInput.SILENCE)
            return [ConnectionEnded(f"nothing came for {self._times.housekeeping_ms} ms")]
        if self.state is MasterState.TRANSFERRING:
            # At once when all is sent for the first time: a slave that has more learns it then.
            first = not self._has_caught_up and self._next >= log.max_offset
            if first or now_ms - self._said_ms > self._times.heartbeat_ms:
                self._said_ms = now_ms
                if self.transferable(log, now_ms):
                    # It waits for the slave to read: to say that there is no more would be wrong.
                    return []
                self._has_caught_up = self._has_caught_up or first
                self._move(MasterInput.SENT)
                self._outgoing.append(HEADER.struct.pack(self._next, 0))
        return []

    def next_tick_ms(self) -> int:
        """When :meth:`tick` has something to do at the earliest, if nothing happens before."""
        silence = self._heard_ms + self._times.housekeeping_ms
        if self.state is not MasterState.TRANSFERRING:
            return silence + 1
        return min(silence, self._said_ms + self._times.heartbeat_ms) + 1

    def next_transfer_ms(self) -> int:
        """When the rate allows the next transfer."""
        return self._bucket.next_ms()

    def data_to_send(self) -> list[Buffer]:
        """What is to be sent, in order; once."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _move(self, happened: MasterInput) -> None:
        self.state = MASTER.after(self.state, happened)


class SlaveConnection:
    """A slave's side of one connection. For one thread.

    Args:
        offset: where the log is wanted from; what stands before it the slave has. 0: it has
            nothing, and the master chooses.
        now_ms: the time; any clock that nobody sets.
        times: when heartbeats are due, and how long silence may last.

    Attributes:
        state: what it is doing.
        received: what stands before it has come; None while a slave that has nothing does not
            know where the master begins.
        reported: what was last reported.
    """

    def __init__(self, offset: int, now_ms: int, *, times: HaTimes | None = None) -> None:
        assert offset >= 0
        self.state = SLAVE.start
        self.received: int | None = offset or None
        self.reported = offset
        self._times = times or HaTimes()
        self._header = b""
        self._left = 0
        self._heard_ms = self._said_ms = now_ms
        self._outgoing: list[Buffer] = [REPORT.struct.pack(offset)]

    def receive_data(self, data: Buffer, now_ms: int) -> list[SlaveEvent]:
        """Take bytes of the master.

        Args:
            data: as they came; none at all if the master has ended the connection. The events
                look into it: it must not change before they are dealt with.
            now_ms: the time.

        Raises:
            ProtocolViolation: if no master would send that; the machine is closed then. Events of
                the bytes before are in its ``events``.
        """
        if self.state is SlaveState.CLOSED:
            return []
        if not data:
            self._move(SlaveInput.END)
            return [ConnectionEnded("the master ended the connection")]
        self._heard_ms = now_ms
        events: list[SlaveEvent] = []
        rest = memoryview(data)
        while rest and self._is_open:
            if self.state is SlaveState.AWAITING_DATA:
                rest = self._take_data(rest, events)
                continue
            lacking = HEADER.size - len(self._header)
            self._header += rest[:lacking]
            rest = rest[lacking:]
            if len(self._header) == HEADER.size:
                offset, size = HEADER.struct.unpack(self._header)
                self._header = b""
                self._take_header(offset, size, events)
        return events

    @property
    def _is_open(self) -> bool:
        return self.state is not SlaveState.CLOSED

    def _take_data(self, data: memoryview, events: list[SlaveEvent]) -> memoryview:
        assert self.received is not None
        part = data[: self._left]
        events.append(DataReceived(self.received, part))
        self.received += len(part)
        self._left -= len(part)
        if not self._left:
            self._move(SlaveInput.DATA)
        return data[len(part) :]

    def _take_header(self, offset: int, size: int, events: list[SlaveEvent]) -> None:
        if offset < 0 or not 0 <= size <= LARGEST_TRANSFER:
            self._violated(f"a transfer of {size} bytes at offset {offset}", events)
        if self.received is None:
            # Where the master begins it has decided for good, whether or not data comes with it.
            self.received = offset
        if offset != self.received:
            if size:
                self._violated(f"bytes at offset {offset}, and not at {self.received}", events)
            self._move(SlaveInput.ELSEWHERE)
            events.append(MasterElsewhere(offset))
        elif size:
            self._move(SlaveInput.HEADER)
            self._left = size
        else:
            self._move(SlaveInput.HEARTBEAT)
            events.append(HeartbeatReceived(offset))

    def _violated(self, reason: str, events: list[SlaveEvent]) -> NoReturn:
        self._move(SlaveInput.VIOLATION)
        raise ProtocolViolation(f"the master sends {reason}", events=events)

    def report(self, offset: int, now_ms: int) -> None:
        """Acknowledge what stands before an offset; nothing is sent where that is not news.

        Args:
            offset: at most :attr:`received`, and not below what was reported.
            now_ms: the time.
        """
        if self.state is SlaveState.CLOSED or offset == self.reported:
            return
        assert self.received is not None and self.reported <= offset <= self.received
        self.reported = offset
        self._say(now_ms)

    def tick(self, now_ms: int) -> list[SlaveEvent]:
        """Do what is due at a time: a heartbeat, or the end of a master that is silent."""
        if self.state is SlaveState.CLOSED:
            return []
        if now_ms - self._heard_ms > self._times.housekeeping_ms:
            self._move(SlaveInput.SILENCE)
            return [ConnectionEnded(f"nothing came for {self._times.housekeeping_ms} ms")]
        if now_ms - self._said_ms > self._times.heartbeat_ms:
            self._say(now_ms)
        return []

    def next_tick_ms(self) -> int:
        """When :meth:`tick` has something to do at the earliest, if nothing happens before."""
        times = self._times
        return min(self._heard_ms + times.housekeeping_ms, self._said_ms + times.heartbeat_ms) + 1

    def data_to_send(self) -> bytes:
        """What is to be sent; once."""
        outgoing, self._outgoing = self._outgoing, []
        return b"".join(outgoing)

    def _say(self, now_ms: int) -> None:
        self._outgoing.append(REPORT.struct.pack(self.reported))
        self._said_ms = now_ms

    def _move(self, happened: SlaveInput) -> None:
        self.state = SLAVE.after(self.state, happened)
