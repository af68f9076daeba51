"""RocketMQ's HA protocol (``HAService``, ``HAConnection``, ``HAClient`` of 4.9.3) without sockets.

::

    slave -> master    [offset 8]                           report, also a heartbeat
    master -> slave    [offset 8][size 4][data ``size``]    transfer; size 0 is a heartbeat

In its first report, the slave requests the log from a physical offset. If this offset is 0, the
slave has no bytes, and the master chooses where to start. Each later report acknowledges the bytes
before its offset. A transfer can end in the middle of a frame.

The caller passes received bytes and the time, and gets events and the bytes to send. The network
can divide the bytes of a transfer at any place. The division changes only the number of events.

A connection keeps received bytes only if they are an incomplete header or an incomplete report. If
a peer sends invalid bytes, :class:`~logquarry.errors.ProtocolViolation` is raised. A slave's report
can end the wait of a put only for a message that the master has sent over this connection. A slave
accepts only bytes that directly follow its own last byte.
"""

from __future__ import annotations

from typing import NoReturn

from logquarry.errors import ProtocolViolation
from logquarry.protocol import ha_messages as ha
from logquarry.text import counted


class MasterConnection:
    """A master's side of one connection (``HAConnection``). Not thread-safe.

    Times are in milliseconds of a monotonic clock. ``acknowledged`` is a physical offset: the slave
    has reported that it has all bytes before this offset. It is None before the first report.
    """

    def __init__(
        self,
        now_ms: int,
        *,
        times: ha.HaTimes | None = None,
        limits: ha.TransferLimits | None = None,
    ) -> None:
        self.state = ha.MASTER.start
        self.acknowledged: int | None = None
        self._times = times or ha.HaTimes()
        self._limits = limits or ha.TransferLimits()
        self._received = b""
        self._next = self._since = 0
        self._heard_ms = self._said_ms = now_ms
        self._outgoing: list[ha.Buffer] = []
        self._has_caught_up = False
        rate, portion = self._limits.bytes_per_second, self._limits.transfer_size
        if rate is not None:
            # A portion is the number of bytes sent at once. It must be so small that the rate
            # allows one portion in each heartbeat interval. Otherwise, a heartbeat between two
            # portions would tell the slave that it has the whole log.
            portion = max(1, min(portion, rate * self._times.heartbeat_ms // 1_000))
        self._bucket = Bucket(rate, portion, now_ms)

    @property
    def next_offset(self) -> int:
        """Physical offset of the next byte to send; 0 before the slave's first report."""
        return self._next

    def receive_data(self, data: ha.Buffer, log: ha.LogRange, now_ms: int) -> list[ha.MasterEvent]:
        """Process received bytes. Pass empty ``data`` if the slave has ended the connection.

        Raises:
            ProtocolViolation: if the bytes are invalid, or contain an offset outside of this log.
                The connection's state is then closed. The caller must still process the exception's
                ``events``, and send the bytes that :meth:`data_to_send` returns.
        """
        if self.state is ha.MasterState.CLOSED:
            return []
        if not data:
            self._move(ha.MasterInput.END)
            return [ha.ConnectionEnded("the slave ended the connection")]
        received = self._received + bytes(data)
        whole = len(received) - len(received) % ha.REPORT.size
        self._received = received[whole:]
        events: list[ha.MasterEvent] = []
        for (offset,) in ha.REPORT.struct.iter_unpack(received[:whole]):
            # Only a complete report shows that the slave is alive. A part of a report does not.
            self._heard_ms = now_ms
            self._report(offset, log, events)
        return events

    def _report(self, offset: int, log: ha.LogRange, events: list[ha.MasterEvent]) -> None:
        if self.state is ha.MasterState.AWAITING_REQUEST:
            self._request(offset, log, events)
        elif not 0 <= offset <= self._next:
            reason = f"it reports physical offset {offset}, and was sent bytes up to {self._next}"
            self._violated(reason, events)
        if self.acknowledged is None or offset > self.acknowledged:
            # Ignore a report with a lower offset: earlier acknowledgements stay valid.
            self.acknowledged = offset
            events.append(ha.SlaveAcknowledged(offset, self._since))

    def _request(self, offset: int, log: ha.LogRange, events: list[ha.MasterEvent]) -> None:
        if offset < 0 or offset > log.max_offset:
            self._refuse(log.max_offset)
            reason = f"its first report is {offset}, and the log ends at {log.max_offset}"
            self._violated(reason, events)
        if 0 < offset < log.min_offset:
            self._refuse(log.min_offset)
            reason = f"its first report is {offset}, and the log begins at {log.min_offset}"
            self._violated(reason, events)
        self._next = self._since = log.fresh_start if offset == 0 else offset
        events.append(ha.SlaveRequested(self._next, offset == 0))
        self._move(ha.MasterInput.REPORT)

    def _refuse(self, offset: int) -> None:
        self._outgoing.append(ha.HEADER.struct.pack(offset, 0))

    def _violated(self, reason: str, events: list[ha.MasterEvent]) -> NoReturn:
        self._move(ha.MasterInput.VIOLATION)
        raise ProtocolViolation(f"a slave's connection: {reason}", events=events)

    def is_behind(self, log: ha.LogRange) -> bool:
        """Return whether bytes are to be sent: the slave has sent its first report, and a part of
        the log was not sent yet.
        """
        return self.state is ha.MasterState.TRANSFERRING and self._next < log.max_offset

    def transferable(self, log: ha.LogRange, now_ms: int) -> int:
        """Return the maximum number of bytes of the next transfer. Return 0 if the whole log is
        sent, or if the rate allows no bytes yet.
        """
        if not self.is_behind(log):
            return 0
        available = min(log.max_offset - self._next, self._limits.transfer_size)
        return max(0, min(available, self._bucket.allowed(now_ms)))

    def send(self, data: memoryview, now_ms: int) -> None:
        """Send ``data``: bytes of the log from :attr:`next_offset` on, at most :meth:`transferable`
        bytes.

        The bytes are not copied: do not change them before they are sent.
        """
        size = len(data)
        assert 0 < size <= self._limits.transfer_size
        self._move(ha.MasterInput.SENT)
        self._outgoing += (ha.HEADER.struct.pack(self._next, size), data)
        self._next += size
        self._said_ms = now_ms
        self._bucket.take(size)

    def tick(self, log: ha.LogRange, now_ms: int) -> list[ha.MasterEvent]:
        """Send a heartbeat if it is due; end the connection if the slave is silent too long."""
        if self.state is ha.MasterState.CLOSED:
            return []
        if now_ms - self._heard_ms > self._times.housekeeping_ms:
            self._move(ha.MasterInput.SILENCE)
            reason = f"the slave sent no report for {self._times.housekeeping_ms} ms"
            return [ha.ConnectionEnded(reason)]
        if self.state is ha.MasterState.TRANSFERRING:
            # When the whole log is sent for the first time, send a heartbeat at once. It tells the
            # slave that it has the whole log.
            first = not self._has_caught_up and self._next >= log.max_offset
            if first or now_ms - self._said_ms > self._times.heartbeat_ms:
                self._said_ms = now_ms
                if self.transferable(log, now_ms):
                    # Send no heartbeat, because more bytes follow: a heartbeat would tell the slave
                    # that it has the whole log.
                    return []
                self._has_caught_up = self._has_caught_up or first
                self._move(ha.MasterInput.SENT)
                self._outgoing.append(ha.HEADER.struct.pack(self._next, 0))
        return []

    def next_tick_ms(self) -> int:
        """Return the time in milliseconds at which to call :meth:`tick` next, if no bytes are
        received or sent until then.
        """
        silence = self._heard_ms + self._times.housekeeping_ms
        if self.state is not ha.MasterState.TRANSFERRING:
            return silence + 1
        return min(silence, self._said_ms + self._times.heartbeat_ms) + 1

    def next_transfer_ms(self) -> int:
        """Return the time in milliseconds at which the rate allows the next transfer."""
        return self._bucket.next_ms()

    def data_to_send(self) -> list[ha.Buffer]:
        """Return the buffers to send, in order, and forget them."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _move(self, happened: ha.MasterInput) -> None:
        self.state = ha.MASTER.after(self.state, happened)


class SlaveConnection:
    """A slave's side of one connection (``HAClient``). Not thread-safe.

    Args:
        offset: physical offset from which the slave requests the log. If the offset is 0, the slave
            has no bytes, and the master chooses where to start.
        now_ms: time of a monotonic clock, in milliseconds.

    Attributes:
        received: physical offset after the last byte of the slave's log, including bytes received
            over this connection. None if the slave has no bytes and has received no header yet.
    """

    def __init__(self, offset: int, now_ms: int, *, times: ha.HaTimes | None = None) -> None:
        assert offset >= 0
        self.state = ha.SLAVE.start
        self.received: int | None = offset or None
        self.reported = offset
        self._times = times or ha.HaTimes()
        self._header = b""
        self._left = 0
        self._heard_ms = self._said_ms = now_ms
        self._outgoing: list[ha.Buffer] = [ha.REPORT.struct.pack(offset)]

    def receive_data(self, data: ha.Buffer, now_ms: int) -> list[ha.SlaveEvent]:
        """Process received bytes. Pass empty ``data`` if the master has ended the connection.

        The events contain views of ``data``: process them before you change these bytes.

        Raises:
            ProtocolViolation: if the bytes are invalid. The state of the connection is then closed.
            The caller must still process the exception's ``events``.
        """
        if self.state is ha.SlaveState.CLOSED:
            return []
        if not data:
            self._move(ha.SlaveInput.END)
            return [ha.ConnectionEnded("the master ended the connection")]
        self._heard_ms = now_ms
        events: list[ha.SlaveEvent] = []
        rest = memoryview(data)
        while rest and self._is_open:
            if self.state is ha.SlaveState.AWAITING_DATA:
                rest = self._take_data(rest, events)
                continue
            lacking = ha.HEADER.size - len(self._header)
            self._header += rest[:lacking]
            rest = rest[lacking:]
            if len(self._header) == ha.HEADER.size:
                offset, size = ha.HEADER.struct.unpack(self._header)
                self._header = b""
                self._take_header(offset, size, events)
        return events

    @property
    def _is_open(self) -> bool:
        return self.state is not ha.SlaveState.CLOSED

    def _take_data(self, data: memoryview, events: list[ha.SlaveEvent]) -> memoryview:
        assert self.received is not None
        part = data[: self._left]
        events.append(ha.DataReceived(self.received, part))
        self.received += len(part)
        self._left -= len(part)
        if not self._left:
            self._move(ha.SlaveInput.DATA)
        return data[len(part) :]

    def _take_header(self, offset: int, size: int, events: list[ha.SlaveEvent]) -> None:
        if offset < 0 or not 0 <= size <= ha.LARGEST_TRANSFER:
            self._violated(
                f"a transfer of {counted(size, 'byte')} at physical offset {offset}", events
            )
        if self.received is None:
            # The slave has no bytes: the offset in the first header is the start that the master
            # has chosen. The first header can belong to a transfer or to a heartbeat.
            self.received = offset
        if offset != self.received:
            if size:
                reason = f"bytes at physical offset {offset}; the next byte is {self.received}"
                self._violated(reason, events)
            self._move(ha.SlaveInput.ELSEWHERE)
            events.append(ha.MasterElsewhere(offset))
        elif size:
            self._move(ha.SlaveInput.HEADER)
            self._left = size
        else:
            self._move(ha.SlaveInput.HEARTBEAT)
            events.append(ha.HeartbeatReceived(offset))

    def _violated(self, reason: str, events: list[ha.SlaveEvent]) -> NoReturn:
        self._move(ha.SlaveInput.VIOLATION)
        raise ProtocolViolation(f"the master sends {reason}", events=events)

    def report(self, offset: int, now_ms: int) -> None:
        """Acknowledge all bytes before ``offset``, which must lie between :attr:`reported` and
        :attr:`received`.
        """
        if self.state is ha.SlaveState.CLOSED or offset == self.reported:
            return
        assert self.received is not None and self.reported <= offset <= self.received
        self.reported = offset
        self._say(now_ms)

    def tick(self, now_ms: int) -> list[ha.SlaveEvent]:
        """Send a heartbeat if it is due; end the connection if the master is silent too long."""
        if self.state is ha.SlaveState.CLOSED:
            return []
        if now_ms - self._heard_ms > self._times.housekeeping_ms:
            self._move(ha.SlaveInput.SILENCE)
            reason = f"the master sent nothing for {self._times.housekeeping_ms} ms"
            return [ha.ConnectionEnded(reason)]
        if now_ms - self._said_ms > self._times.heartbeat_ms:
            self._say(now_ms)
        return []

    def next_tick_ms(self) -> int:
        """Return the time in milliseconds at which to call :meth:`tick` next, if no bytes are
        received or sent until then.
        """
        times = self._times
        return min(self._heard_ms + times.housekeeping_ms, self._said_ms + times.heartbeat_ms) + 1

    def data_to_send(self) -> bytes:
        """Return the bytes to send, and forget them."""
        outgoing, self._outgoing = self._outgoing, []
        return b"".join(outgoing)

    def _say(self, now_ms: int) -> None:
        self._outgoing.append(ha.REPORT.struct.pack(self.reported))
        self._said_ms = now_ms

    def _move(self, happened: ha.SlaveInput) -> None:
        self.state = ha.SLAVE.after(self.state, happened)


class Bucket:
    """Limits the number of bytes per second, as a token bucket. At the start, one portion is
    allowed.

    Only whole portions are allowed, so that no transfer is tiny.
    """

    def __init__(self, rate: int | None, portion: int, now_ms: int) -> None:
        self._rate = rate
        self._portion = portion
        # Count in thousandths of a byte, because the bytes per millisecond can be a fraction.
        self._held = 1_000 * portion
        self._filled_ms = now_ms

    def allowed(self, now_ms: int) -> int:
        """Return the number of bytes that may be sent now: one portion, or 0."""
        if self._rate is None:
            return self._portion
        # Save at most the bytes of one second, so that a long pause does not allow a larger burst.
        most = 1_000 * max(self._portion, self._rate)
        passed = max(0, now_ms - self._filled_ms)
        self._held = min(most, self._held + passed * self._rate)
        self._filled_ms = max(self._filled_ms, now_ms)
        return self._portion if self._held >= 1_000 * self._portion else 0

    def take(self, size: int) -> None:
        """Subtract ``size`` bytes that were sent."""
        if self._rate is not None:
            self._held -= 1_000 * size

    def next_ms(self) -> int:
        """Return the time in milliseconds at which the next portion is allowed."""
        if self._rate is None:
            return self._filled_ms
        lacking = max(0, 1_000 * self._portion - self._held)
        return self._filled_ms - (-lacking // self._rate)
