"""A master: sends its store's log to whoever asks for it, and hears how far they have it.

One thread serves all connections: sending is one system call for a mebibyte of the log, straight
from the map, and what is kept of a slave is a machine and what its socket did not take yet.
Whatever a peer sends, it costs no memory.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logquarry.errors import LogquarryError, ProtocolViolation, StoreUnavailable
from logquarry.protocol.ha import (
    ConnectionEnded,
    HaTimes,
    LogRange,
    MasterConnection,
    MasterEvent,
    MasterState,
    SlaveAcknowledged,
    SlaveRequested,
    TransferLimits,
)
from logquarry.replication.server import LONGEST_WAIT_MS, Peer, Server, ServerOptions
from logquarry.replication.wire import Surroundings, Waits, Wire
from logquarry.store.message_store import StoreWriter

logger = logging.getLogger(__name__)

_GATHER: Final = 1 << 20
"""Bytes of the log that are handed to the system at once."""
_TURN: Final = 8 << 20
"""Bytes that one slave gets before the next one's turn."""
_REPORTS: Final = 16 << 10
"""Bytes that one slave says before the next one's turn. A TLS record at least: of one that is taken
in part the rest is where no selector sees it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterOptions(ServerOptions):
    """How a master serves. A RocketMQ slave speaks no TLS.

    Attributes:
        limits: transfer size and rate, of each slave.
        times: heartbeats and housekeeping.
        full_history: whether a slave that has nothing gets the log from its first file on, and
            not, as with RocketMQ, from its last one.
    """

    limits: TransferLimits = field(default_factory=TransferLimits)
    times: HaTimes = field(default_factory=HaTimes)
    full_history: bool = False


class SlaveView(NamedTuple):
    """What a master knows of a slave.

    Attributes:
        peer: its address.
        next_offset: of the next byte that it is sent; None before its first report.
        acknowledged: what stands before it it has; None likewise.
        sent_bytes: of the log, over this connection.
    """

    peer: str
    next_offset: int | None
    acknowledged: int | None
    sent_bytes: int


class MasterStatus(NamedTuple):
    """How a master does.

    Attributes:
        address: where it listens.
        max_offset: where its log ends.
        acknowledged: what stands before it some slave has had since the store was opened.
        slaves: those who are connected.
        refused: connections that were refused, or ended for what they sent.
        has_ended: whether it has ended by itself, and serves nobody any more.
    """

    address: str
    max_offset: int
    acknowledged: int
    slaves: tuple[SlaveView, ...]
    refused: int
    has_ended: bool


class _Slave(Peer):
    """One connection."""

    __slots__ = ("machine", "sent")

    def __init__(self, wire: Wire, machine: MasterConnection) -> None:
        super().__init__(wire)
        self.machine = machine
        self.sent = 0

    def __str__(self) -> str:
        return f"slave {self.wire.peer}"


class HaMaster(Server[_Slave]):
    """Serves a store's log to slaves.

    Listens from the start on, and serves from :meth:`start` (or the ``with`` block) on. Close it
    before the store.

    Args:
        store: the store, open to be written.
        host: what to listen on.
        port: 0 for one that the system chooses.
        options: how it serves.
        surroundings: time and sockets.

    Attributes:
        error: why it has ended by itself, None where it has not.

    Raises:
        OSError: if it cannot listen there.
        StoreUnavailable: if the store is not open to be written.
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
        self._feed = store.log_feed()
        self._options = options or MasterOptions()
        super().__init__(
            "the master",
            "logquarry-ha-master",
            lambda sockets: [sockets.listen(host, port)],
            self._options,
            surroundings,
            _REPORTS,
        )

    def status(self) -> MasterStatus:
        """How it does right now."""
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
            self._admission.refused,
            self.error is not None,
        )

    # ------------------------------------------------------------------------------------ at work
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
        # Before the log is looked at: what comes to it from here on wakes.
        self._wake.arm()
        now = self._surroundings.now_ms()
        log = self._range()
        waits = [self._serve(slave, log, now) for slave in list(self._peers)]
        return min([*waits, LONGEST_WAIT_MS])

    def _range(self) -> LogRange:
        feed = self._feed
        first, end = feed.min_offset, feed.max_offset
        fresh = first
        if not self._options.full_history:
            fresh = max(first, end - end % feed.file_size)
        return LogRange(first, end, fresh)

    def _serve(self, slave: _Slave, log: LogRange, now: int) -> int:
        """Send what can be sent; milliseconds until there is something to do again."""
        machine, wire = slave.machine, slave.wire
        try:
            if not wire.is_ready:
                if not wire.handshake():
                    self._watch(slave, _mask(slave))
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
        self._watch(slave, _mask(slave))
        if going:
            return 0
        wait = machine.next_tick_ms() - now
        if machine.next_offset < log.max_offset and not wire.wants_write:
            wait = min(wait, machine.next_transfer_ms() - now)
        return wait

    def _send(self, slave: _Slave, log: LogRange, now: int) -> bool:
        """A turn's worth of the log; whether there is more that could go at once."""
        machine, wire = slave.machine, slave.wire
        if not wire.send(()):
            return False
        done = 0
        while done < _TURN:
            gathered = 0
            while gathered < _GATHER and (size := machine.transferable(log, now)):
                data = self._feed.select(machine.next_offset)
                if data is None:
                    raise OSError(f"the log has nothing at {machine.next_offset} any more")
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

    def _tick(self, slave: _Slave, log: LogRange, now: int) -> bool:
        """Whether the connection goes on."""
        return self._heard(slave, slave.machine.tick(log, now))

    def _read(self, slave: _Slave) -> None:
        if slave not in self._peers or not slave.wire.is_ready:
            return
        events: list[MasterEvent] = []
        try:
            count = slave.wire.receive_into(self._buffer)
            if count is not None:
                data, now = self._buffer[:count], self._surroundings.now_ms()
                events = slave.machine.receive_data(data, self._range(), now)
        except ProtocolViolation as violation:
            self._heard(slave, violation.events)
            with contextlib.suppress(OSError):
                slave.wire.send(slave.machine.data_to_send())
            self._admission.refuse(slave.wire.peer, str(violation))
            self._drop(slave, None)
        except OSError as error:
            self._drop(slave, str(error))
        else:
            self._heard(slave, events)

    def _heard(self, slave: _Slave, events: Sequence[MasterEvent]) -> bool:
        for event in events:
            if isinstance(event, SlaveAcknowledged):
                self._feed.replicas.acknowledge(event.offset, event.since)
            elif isinstance(event, SlaveRequested):
                how = "that has nothing " if event.is_fresh else ""
                logger.info("slave %s %sbegins at %d", slave.wire.peer, how, event.offset)
            elif isinstance(event, ConnectionEnded):
                self._drop(slave, event.reason)
                return False
        return True

    # -------------------------------------------------------------------------------- come and go
    def _new(self, wire: Wire) -> _Slave:
        machine = MasterConnection(
            self._surroundings.now_ms(), times=self._options.times, limits=self._options.limits
        )
        return _Slave(wire, machine)

    def _silence_of(self, slave: _Slave) -> str | None:
        return "it says nothing" if slave.machine.state is MasterState.AWAITING_REQUEST else None

    # Puts know of both before anybody else: who sees that no slave is there puts without one.
    def _came(self, slave: _Slave) -> None:
        if slave.wire.is_ready:
            self._feed.replicas.slave_came()

    def _went(self, slave: _Slave) -> None:
        if slave.wire.is_ready:
            self._feed.replicas.slave_went()


def _mask(slave: _Slave) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if slave.wire.wants_write else 0)
