"""A master's side of an HA connection, without a socket."""

from __future__ import annotations

from typing import NoReturn

from logquarry.errors import ProtocolViolation
from logquarry.protocol.ha.messages import (
    HEADER,
    MASTER,
    REPORT,
    Buffer,
    ConnectionEnded,
    HaTimes,
    LogRange,
    MasterEvent,
    MasterInput,
    MasterState,
    SlaveAcknowledged,
    SlaveRequested,
    TransferLimits,
)
from logquarry.protocol.machine import Bucket


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
