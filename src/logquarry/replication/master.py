"""A master: sends its store's log to whoever asks for it, and hears how far they have it.

One thread serves all connections, by a selector: sending is one system call for a mebibyte of the
log, straight from the map, and what is kept of a slave is a machine and what its socket did not
take yet. Whatever a peer sends, it costs no memory: there are ``max_connections`` of them, and a
stranger who says nothing has to go when somebody else comes.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from logquarry.errors import (
    LogquarryError,
    ProtocolViolation,
    ReplicationError,
    StoreUnavailable,
    UsageError,
)
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
from logquarry.replication.admission import Admission, Networks, networks
from logquarry.replication.wire import Surroundings, Waits, Wire, address_text, drive
from logquarry.store.disk.lifetime import abandon_in_children, stays
from logquarry.store.message_store import MessageStore

logger = logging.getLogger(__name__)

_GATHER: Final = 1 << 20
"""Bytes of the log that are handed to the system at once."""
_TURN: Final = 8 << 20
"""Bytes that one slave gets before the next one's turn."""
_REPORTS: Final = 16 << 10
"""Bytes that one slave says before the next one's turn. A TLS record at least: of one that is taken
in part the rest is where no selector sees it."""
_LONGEST_WAIT_MS: Final = 1_000
_PAUSE_SECONDS: Final = 0.01
_END_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MasterOptions:
    """How a master serves.

    Attributes:
        limits: transfer size and rate, of each slave.
        times: heartbeats and housekeeping.
        full_history: whether a slave that has nothing gets the log from its first file on, and
            not, as with RocketMQ, from its last one.
        max_connections: how many may be connected.
        allow: addresses or networks that may connect ("10.0.0.0/8"); None for any that reach the
            port, which by default is nobody outside of this machine.
        tls: serves TLS, which a RocketMQ slave does not speak.
    """

    limits: TransferLimits = field(default_factory=TransferLimits)
    times: HaTimes = field(default_factory=HaTimes)
    full_history: bool = False
    max_connections: int = 16
    allow: tuple[str, ...] | None = None
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if self.max_connections <= 0:
            raise UsageError(f"max_connections is {self.max_connections}, and must be above 0")
        self.networks()

    def networks(self) -> Networks | None:
        """What ``allow`` means."""
        return networks(self.allow)


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


class _Slave:
    """One connection."""

    __slots__ = ("machine", "mask", "sent", "wire")

    def __init__(self, wire: Wire, machine: MasterConnection) -> None:
        self.wire = wire
        self.machine = machine
        self.mask = selectors.EVENT_READ
        self.sent = 0


class HaMaster:
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
        store: MessageStore,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        options: MasterOptions | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._feed = store.log_feed()
        self._options = options or MasterOptions()
        self._surroundings = surroundings or Surroundings()
        self._admission = Admission(self._options.networks(), self._surroundings.now_ms)
        self.error: LogquarryError | None = None
        with contextlib.ExitStack() as made:
            # A port that nobody serves is not to stay taken where descriptors run out.
            self._listener = made.enter_context(
                contextlib.closing(self._surroundings.listen(host, port))
            )
            self.host, self.port = self._listener.getsockname()[:2]
            self._wake = made.enter_context(contextlib.closing(self._surroundings.wake()))
            self._selector = made.enter_context(contextlib.closing(self._surroundings.selector()))
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            self._selector.register(self._wake, selectors.EVENT_READ, self._wake)
            made.pop_all()
        self._slaves: list[_Slave] = []
        self._buffer = memoryview(bytearray(_REPORTS))
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="logquarry-ha-master", daemon=True)
        abandon_in_children(self)

    # -------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begin."""
        try:
            self._thread.start()
        except RuntimeError:
            # No more threads: whoever asks by ``with`` closes nothing that did not begin.
            self.close()
            raise

    def close(self) -> None:
        """End all connections, and listen no more; once more does nothing."""
        self._is_closing = True
        self._wake.force()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
            if self._thread.is_alive():
                logger.warning("the master has not ended in %s s", _END_SECONDS)
        else:
            self._end()
        stays(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.store.disk.lifetime`: no slave is to wait for a child to end."""
        for slave in self._slaves:
            slave.wire.abandon()
        with contextlib.suppress(OSError):
            self._listener.close()

    @property
    def address(self) -> str:
        """host:port."""
        return address_text((self.host, self.port))

    def status(self) -> MasterStatus:
        """How it does right now."""
        views = []
        for slave in list(self._slaves):
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
    def _run(self) -> None:
        drive(self.serving())

    def serving(self) -> Waits:
        """All of its work, for whoever drives it without a thread, instead of :meth:`start`."""
        self._feed.follow(self._wake)
        try:
            while not self._is_closing:
                yield from self._turn()
        except StoreUnavailable as error:
            logger.error("the master ends: %s", error)
            self.error = error
        except Exception as error:
            logger.exception("the master failed")
            self.error = ReplicationError(f"the master failed: {error!r}")
        finally:
            self._end()

    def _end(self) -> None:
        self._feed.unfollow(self._wake)
        for slave in list(self._slaves):
            self._drop(slave, None)
        self._selector.close()
        self._listener.close()
        self._wake.close()

    def _turn(self) -> Waits:
        """Whatever is to be done now, and then wait for more."""
        # Before the log is looked at: what comes to it from here on wakes.
        self._wake.arm()
        now = self._surroundings.now_ms()
        log = self._range()
        wait = _LONGEST_WAIT_MS
        for slave in list(self._slaves):
            wait = min(wait, self._serve(slave, log, now))
        found = yield self._selector, max(0, wait) / 1_000
        for key, mask in found:
            if key.data is self._wake:
                self._wake.take()
            elif key.data is None:
                self._accept()
            elif mask & selectors.EVENT_READ:
                self._read(key.data)

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
                    self._watch(slave)
                    return machine.next_tick_ms() - now if self._tick(slave, log, now) else 0
                self._feed.replicas.slave_came()
            going = self._send(slave, log, now)
            if not self._tick(slave, log, now):
                return _LONGEST_WAIT_MS
            parts = machine.data_to_send()
            if parts:
                wire.send(parts)
        except (OSError, ValueError) as error:
            self._drop(slave, str(error))
            return _LONGEST_WAIT_MS
        self._watch(slave)
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

    def _watch(self, slave: _Slave) -> None:
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if slave.wire.wants_write else 0)
        if mask != slave.mask:
            self._selector.modify(slave.wire, mask, slave)
            slave.mask = mask

    def _read(self, slave: _Slave) -> None:
        if slave not in self._slaves or not slave.wire.is_ready:
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
    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            # Out of descriptors, or the peer is gone already. The former may last, and the listener
            # stays ready: others are to have the processor meanwhile.
            self._admission.refuse("?", str(error))
            time.sleep(_PAUSE_SECONDS)
            return
        peer = address_text(address)
        if not self._admission.allows(address[0]):
            # Counted first: whoever sees the connection end may ask.
            self._admission.refuse(peer, "it is not on the list of those who may connect")
            connection.close()
            return
        if len(self._slaves) >= self._options.max_connections and not self._make_room():
            self._admission.refuse(peer, f"{len(self._slaves)} are connected")
            connection.close()
            return
        try:
            wire = Wire(connection, tls=self._options.tls)
        except (OSError, ValueError) as error:
            connection.close()
            self._admission.refuse(peer, str(error))
            return
        slave = self._new(wire)
        try:
            self._selector.register(wire, selectors.EVENT_READ, slave)
        except (OSError, ValueError) as error:
            # Not the socket that was accepted: TLS has made another one of it.
            wire.close()
            self._admission.refuse(peer, str(error))
            return
        # As in _drop.
        if wire.is_ready:
            self._feed.replicas.slave_came()
        self._slaves.append(slave)

    def _new(self, wire: Wire) -> _Slave:
        machine = MasterConnection(
            self._surroundings.now_ms(), times=self._options.times, limits=self._options.limits
        )
        return _Slave(wire, machine)

    def _make_room(self) -> bool:
        """Let go of whoever has been silent for longest, and was never a slave; if there is one."""
        for slave in self._slaves:
            if slave.machine.state is MasterState.AWAITING_REQUEST:
                self._admission.refuse(slave.wire.peer, "it says nothing, and another one has come")
                self._drop(slave, None)
                return True
        return False

    def _drop(self, slave: _Slave, reason: str | None) -> None:
        if slave not in self._slaves:
            return
        # Puts know of it before anybody else: who sees that no slave is there puts without one.
        if slave.wire.is_ready:
            self._feed.replicas.slave_went()
        self._slaves.remove(slave)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(slave.wire)
        slave.wire.close()
        if reason is not None:
            logger.info("slave %s is gone: %s", slave.wire.peer, reason)
