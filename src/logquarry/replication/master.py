"""The master of replication: sends a store's log to slaves, and receives their acknowledgements.

One thread serves all connections. The master sends bytes directly from the memory map of the log,
so waiting for a slow slave takes little memory.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logquarry.errors import LogquarryError, ProtocolViolation, StoreUnavailable
from logquarry.protocol import ha_messages as ha
from logquarry.protocol.ha_connection import MasterConnection
from logquarry.replication.server import LONGEST_WAIT_MS, Peer, Server, ServerOptions
from logquarry.replication.wire import Surroundings, Waits, Wire, require_peer
from logquarry.store.message_store import StoreWriter

logger = logging.getLogger(__name__)

_GATHER: Final = 1 << 20
"""Maximum number of bytes of the log that are sent with one system call."""
_TURN: Final = 8 << 20
"""Maximum number of bytes to send to one slave before the thread continues with the next slave."""
_REPORTS: Final = 16 << 10
"""Maximum number of bytes to read from one slave before the thread continues with the next slave.

This number must be at least the size of a TLS record, because the selector does not report the
unread part of a record.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterOptions(ServerOptions):
    """Options of an HaMaster. RocketMQ slaves do not support TLS.

    Attributes:
        limits: transfer size and rate for each slave.
        full_history: whether a slave with an empty log gets all files of the log. If False, the
            master sends such a slave only the last file and all later bytes, as RocketMQ's master
            does.
    """

    limits: ha.TransferLimits = field(default_factory=ha.TransferLimits)
    times: ha.HaTimes = field(default_factory=ha.HaTimes)
    full_history: bool = False


class SlaveView(NamedTuple):
    """The state of one slave. The offsets are None before the slave's first report.

    Attributes:
        next_offset: physical offset of the next byte to send.
        acknowledged: the slave has reported that it has all bytes before this physical offset.
        sent_bytes: number of bytes of the log that were sent over this connection.
    """

    peer: str
    next_offset: int | None
    acknowledged: int | None
    sent_bytes: int


class MasterStatus(NamedTuple):
    """State of an HaMaster.

    Attributes:
        max_offset: physical offset of the log's end.
        acknowledged: highest physical offset that any slave has acknowledged since the store was
            opened.
        refused: number of connections that were refused, or closed because the slave sent invalid
            bytes.
        has_ended: whether an error has ended the master, so that it no longer serves slaves.
    """

    address: str
    max_offset: int
    acknowledged: int
    slaves: tuple[SlaveView, ...]
    refused: int
    has_ended: bool


class _Slave(Peer):
    __slots__ = ("machine", "sent")

    def __init__(self, wire: Wire, machine: MasterConnection) -> None:
        super().__init__(wire)
        self.machine = machine
        self.sent = 0

    def __str__(self) -> str:
        return f"slave {self.wire.peer}"


class HaMaster(Server[_Slave]):
    """Sends a store's log to slaves, as RocketMQ's ``HAService`` does.

    The constructor opens the port. If ``port`` is 0, the system chooses the port. Call
    :meth:`start` or use a ``with`` block to start serving slaves. The store must be open for
    writing. Close the master before you close the store.

    Raises:
        OSError: if the master cannot listen at the address.
        StoreUnavailable: if the store is not open for writing.
    """

    def __init__(
        self,
        store: StoreWriter,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        options: MasterOptions | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        require_peer(store, host, port, options, MasterOptions)
        self._feed = store.log_feed()
        self._options = options or MasterOptions()
        super().__init__(
            "the master",
            "ha-master",
            lambda sockets: [sockets.listen(host, port)],
            self._options,
            surroundings,
            _REPORTS,
        )

    def status(self) -> MasterStatus:
        """Return the current state."""
        views = []
        for slave in list(self._peers):
            machine = slave.machine
            known = machine.acknowledged is not None
            views.append(
                SlaveView(
                    slave.wire.peer,
                    machine.next_offset if known else None,
                    machine.acknowledged,
                    slave.sent,
                )
            )
        feed = self._feed
        return MasterStatus(
            self.address,
            feed.max_offset,
            feed.replicas.acknowledged,
            tuple(views),
            self._refused,
            self.error is not None,
        )

    # ------------------------------------------------------------------------------------ serving
    def serving(self) -> Waits:
        """See :meth:`Server.serving`."""
        self._feed.follow(self._wake)
        yield from super().serving()

    def _failed(self, error: Exception) -> LogquarryError:
        if isinstance(error, StoreUnavailable):
            logger.error("the master ends: %s", error)
            return error
        return super()._failed(error)

    def _end(self) -> None:
        self._feed.unfollow(self._wake)
        super()._end()

    def _serve_all(self) -> int:
        # Call arm() before reading the log's end, so that a put after the reading wakes this
        # thread.
        self._wake.arm()
        now = self._surroundings.now_ms()
        log = self._range()
        waits = [self._serve(slave, log, now) for slave in list(self._peers)]
        return min([*waits, LONGEST_WAIT_MS])

    def _range(self) -> ha.LogRange:
        feed = self._feed
        first, end = feed.min_offset, feed.max_offset
        fresh = first
        if not self._options.full_history:
            fresh = max(first, end - end % feed.file_size)
        return ha.LogRange(first, end, fresh)

    def _serve(self, slave: _Slave, log: ha.LogRange, now: int) -> int:
        # Sends as much as possible now. Returns the number of milliseconds until the next call.
        machine, wire = slave.machine, slave.wire
        try:
            if not wire.is_ready:
                if not wire.handshake():
                    self._watch(slave, wire.events)
                    return machine.next_tick_ms() - now if self._tick(slave, log, now) else 0
                self._feed.replicas.slave_came()
            going = self._send(slave, log, now)
            if not self._tick(slave, log, now):
                return LONGEST_WAIT_MS
            parts = machine.data_to_send()
            if parts:
                wire.send(parts)
        except (OSError, ValueError) as error:
            self._drop(slave, str(error))
            return LONGEST_WAIT_MS
        self._watch(slave, wire.events)
        if going:
            return 0
        wait = machine.next_tick_ms() - now
        if machine.is_behind(log) and not wire.wants_write:
            wait = min(wait, machine.next_transfer_ms() - now)
        return wait

    def _send(self, slave: _Slave, log: ha.LogRange, now: int) -> bool:
        # Sends at most _TURN bytes of the log. Returns whether more bytes can be sent immediately.
        machine, wire = slave.machine, slave.wire
        if not wire.send(()):
            return False
        done = 0
        while done < _TURN:
            gathered = 0
            while gathered < _GATHER and (size := machine.transferable(log, now)):
                data = self._feed.select(machine.next_offset, size)
                if data is None:
                    raise OSError(
                        f"the log's file at physical offset {machine.next_offset} was deleted"
                    )
                part = data[:size]
                machine.send(part, now)
                gathered += len(part)
            if not gathered:
                return False
            slave.sent += gathered
            done += gathered
            if not wire.send(machine.data_to_send()):
                return False
        return True

    def _tick(self, slave: _Slave, log: ha.LogRange, now: int) -> bool:
        # Returns whether the connection continues.
        return self._heard(slave, slave.machine.tick(log, now))

    def _read(self, slave: _Slave) -> None:
        count = slave.wire.receive_into(self._buffer)
        if count is None:
            return
        data, now = self._buffer[:count], self._surroundings.now_ms()
        try:
            events = slave.machine.receive_data(data, self._range(), now)
        except ProtocolViolation as violation:
            self._heard(slave, violation.events)
            with contextlib.suppress(OSError):
                slave.wire.send(slave.machine.data_to_send())
            raise
        self._heard(slave, events)

    def _heard(self, slave: _Slave, events: Sequence[ha.MasterEvent]) -> bool:
        for event in events:
            if isinstance(event, ha.SlaveAcknowledged):
                self._feed.replicas.acknowledge(event.offset, event.since)
            elif isinstance(event, ha.SlaveRequested):
                how = "is empty and begins" if event.is_fresh else "continues"
                logger.info("slave %s %s at physical offset %d", slave.wire.peer, how, event.offset)
            elif isinstance(event, ha.ConnectionEnded):
                self._drop(slave, event.reason)
                return False
        return True

    # -------------------------------------------------------------------------------- connections
    def _new(self, wire: Wire) -> _Slave:
        machine = MasterConnection(
            self._surroundings.now_ms(), times=self._options.times, limits=self._options.limits
        )
        return _Slave(wire, machine)

    def _silence_of(self, slave: _Slave) -> str | None:
        is_silent = slave.machine.state is ha.MasterState.AWAITING_REQUEST
        return "it sent no report" if is_silent else None

    # The base class calls this method before status() lists the slave, because puts must wait for
    # each listed slave.
    def _came(self, slave: _Slave) -> None:
        if slave.wire.is_ready:
            self._feed.replicas.slave_came()

    def _went(self, slave: _Slave) -> None:
        if slave.wire.is_ready:
            self._feed.replicas.slave_went()
