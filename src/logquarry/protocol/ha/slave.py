"""A slave's side of an HA connection, without a socket."""

from __future__ import annotations

from typing import NoReturn

from logquarry.errors import ProtocolViolation
from logquarry.protocol.ha.messages import (
    HEADER,
    LARGEST_TRANSFER,
    REPORT,
    SLAVE,
    Buffer,
    ConnectionEnded,
    DataReceived,
    HaTimes,
    HeartbeatReceived,
    MasterElsewhere,
    SlaveEvent,
    SlaveInput,
    SlaveState,
)


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
