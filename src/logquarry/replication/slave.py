"""The slave of replication: copies a master's log into its own store, and acknowledges the bytes.
Before the slave's store is opened, :func:`failed_attempts` waits for the master.

One thread receives, appends and checks bytes. If few bytes arrive at once, this thread also syncs
them. If many bytes arrive at once, a second thread syncs them, so that the receiving thread does
not wait for the disk. If the connection ends, the slave connects again after a pause, which doubles
while no bytes arrive. If the logs have diverged or the disk fails, the slave ends, and its
attribute ``error`` has the reason.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import ssl
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logquarry import arguments
from logquarry.disk.service import Done, Flag
from logquarry.errors import (
    LogsDiverged,
    ProtocolViolation,
    ReplicationError,
    StoreError,
    UsageError,
)
from logquarry.protocol import ha_messages as ha
from logquarry.protocol.ha_connection import SlaveConnection
from logquarry.replication.replica import OVERLAP, Replica, SpoiltReplica
from logquarry.replication.wire import (
    Found,
    Surroundings,
    Waits,
    Wire,
    Worker,
    address_text,
    drive,
    require_peer,
)
from logquarry.store.message_store import StoreWriter

logger = logging.getLogger(__name__)

ACKNOWLEDGE: Final = ("flushed", "received")
_RECEIVE: Final = 4 << 20
_ANSWER: Final = 4_096
_READS: Final = 16
_LARGE: Final = 256 << 10
_SYNC_MS: Final = 20
"""Minimum number of milliseconds between two syncs while _LARGE bytes or more arrive at once."""
_CONNECT_SECONDS: Final = 5.0
_LONGEST_WAIT_MS: Final = 1_000
_END_SECONDS: Final = 600.0
_LONG_SECONDS: Final = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlaveOptions:
    """Options of an HaSlave.

    Attributes:
        start: physical offset at which an empty log begins. With 0, the master's whole log is
            copied. If None, the master chooses. A RocketMQ master chooses the start of its last
            file.
        acknowledge: with ``"flushed"``, the slave acknowledges bytes after their sync. With
            ``"received"``, it acknowledges bytes that are only in memory, as RocketMQ's slave does.
        check_crc: whether to check the CRC of bodies.
        overlap: number of bytes at the log's end that the slave compares with the master's log
            after each connection. The slave always compares the last message.
        first_pause: seconds to wait after the first failed connection.
        longest_pause: maximum number of seconds to wait between two attempts to connect.
        tls: None for no TLS.
        server_name: the name that the master's certificate must have; None for the master's host.
    """

    start: int | None = None
    acknowledge: str = ACKNOWLEDGE[0]
    check_crc: bool = True
    overlap: int = OVERLAP
    times: ha.HaTimes = field(default_factory=ha.HaTimes)
    first_pause: float = 0.1
    longest_pause: float = 5.0
    tls: ssl.SSLContext | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        arguments.choice(self.acknowledge, "acknowledge", ACKNOWLEDGE)
        arguments.optional(arguments.offset, self.start, "start")
        arguments.offset(self.overlap, "overlap")
        if not 0 < self.first_pause <= self.longest_pause:
            raise UsageError(
                f"first_pause is {self.first_pause} s and longest_pause {self.longest_pause} s: "
                "the first must be above 0 and at most the second"
            )


class SlaveStatus(NamedTuple):
    """State of an HaSlave.

    Attributes:
        max_offset: physical offset of the log's end.
        acknowledged: last acknowledged physical offset; None if the slave is not connected.
        received_bytes: number of bytes of the log that the slave has received since its start.
        connections: number of connections that the slave has made since its start.
        has_all: whether the slave has the master's whole log, according to the master's last
            message.
        trouble: the reason why the slave is not connected or has ended; empty if there is no
            problem.
        failures: number of failed connections since the master last sent something.
    """

    master: str
    is_connected: bool
    max_offset: int
    acknowledged: int | None
    received_bytes: int
    connections: int
    has_all: bool
    trouble: str
    has_ended: bool
    failures: int


class HaSlave(Worker):
    """Copies a master's log into a store, as RocketMQ's ``HAClient`` does.

    Call :meth:`start` or use a ``with`` block to start the slave. Close the slave before you close
    its store. Other threads and processes may read the store while the slave runs.

    Args:
        store: the store, open for writing with ``broker_role`` SLAVE, so that it rejects puts.
        surroundings: provides clock and sockets. A test passes an object that simulates both.

    Raises:
        UsageError: if the store's ``broker_role`` is not SLAVE.
        StoreUnavailable: if the store is not open for writing.
    """

    def __init__(
        self,
        store: StoreWriter,
        host: str,
        port: int,
        *,
        options: SlaveOptions | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        require_peer(store, host, port, options, SlaveOptions)
        self._options = options or SlaveOptions()
        self._surroundings = surroundings or Surroundings()
        feed = store.log_feed()
        if store.config.broker_role != "SLAVE":
            raise UsageError(
                f"{store.root}: its broker_role is not SLAVE: open it with broker_role='SLAVE'"
            )
        self._host, self._port = host, port
        self._replica = Replica(
            feed,
            str(store.root),
            start=self._options.start,
            check_crc=self._options.check_crc,
            overlap=self._options.overlap,
            acknowledges_unchecked=self._options.acknowledge == "received",
        )
        self._wake = self._surroundings.wake()
        self._sync_wanted = Flag()
        # Protects the protocol state and the socket of the current connection.
        self._use = threading.Lock()
        self._machine: SlaveConnection | None = None
        self._wire: Wire | None = None
        self._buffer = memoryview(bytearray(_RECEIVE))
        self._received = 0
        self._synced_ms = 0
        self._owes_sync = False
        self._connections = 0
        self._trouble = ""
        self._failures = 0
        self._ended = Done()
        super().__init__(_END_SECONDS, {"ha-slave": self._run, "ha-slave-sync": self._run_sync})

    # -------------------------------------------------------------------------------------- life
    def close(self) -> None:
        """See :meth:`Worker.close`."""
        super().close()
        self._wake.close()

    def _interrupt(self) -> None:
        self._wake.force()
        self._sync_wanted.set()

    def _end(self) -> None:
        self._ended.set()
        self._sync_wanted.set()

    def abandon_in_child(self) -> None:
        """See :meth:`Worker.abandon_in_child`."""
        wire = self._wire
        if wire is not None:
            wire.abandon()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the slave has ended, by :meth:`close` or an :attr:`error`. Return False if
        this takes longer than ``timeout_s`` seconds.
        """
        while not self._ended.wait(_LONG_SECONDS if timeout_s is None else timeout_s):
            if timeout_s is not None:
                return False
        return True

    def _goes_on(self) -> bool:
        return not self._is_closing and self.error is None

    @property
    def master(self) -> str:
        """host:port of the master."""
        return address_text((self._host, self._port))

    def status(self) -> SlaveStatus:
        """Return the current state."""
        machine = self._machine
        return SlaveStatus(
            self.master,
            machine is not None,
            self._replica.feed.wrote_offset,
            None if machine is None else machine.reported,
            self._received,
            self._connections,
            machine is not None and self._replica.has_all,
            self._trouble,
            self.error is not None,
            self._failures,
        )

    # --------------------------------------------------------------------------------- connections
    def _run(self) -> None:
        drive(self.following())

    def following(self) -> Waits:
        """Do all work of the receiving thread, as a generator. A test runs this generator and
        :meth:`syncing` with simulated time.
        """
        pause = self._options.first_pause
        try:
            while self._goes_on():
                before = self._received
                try:
                    yield from self._follow()
                except (LogsDiverged, SpoiltReplica):
                    raise
                except (OSError, ProtocolViolation) as error:
                    self._trouble = f"{self.master}: {error}"
                if not self._goes_on():
                    return
                self._failures += 1
                if self._received > before:
                    pause = self._options.first_pause
                logger.info("%s; connecting again in %.1f s", self._trouble, pause)
                yield from self._rest(pause)
                pause = min(2 * pause, self._options.longest_pause)
        except Exception as error:
            self._fail(error)
        finally:
            self._end()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, ReplicationError | StoreError):
            logger.exception("the slave failed")
            error = ReplicationError(f"the slave failed: {error!r}")
        if self.error is None:
            self.error = error
            self._trouble = str(error)
            logger.error("the slave ends: %s", error)

    def _rest(self, seconds: float) -> Waits:
        end = self._surroundings.now_ms() + round(1_000 * seconds)
        with self._surroundings.selector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            while self._goes_on() and (left := end - self._surroundings.now_ms()) > 0:
                found = yield selector, left / 1_000
                if found:
                    self._wake.take()

    def _follow(self) -> Waits:
        request = self._replica.request()
        connection = self._surroundings.connect(self._host, self._port, _CONNECT_SECONDS)
        try:
            name = self._options.server_name or self._host
            tls = self._options.tls
            wire = Wire(connection, tls=tls, server_name=None if tls is None else name)
        except BaseException:
            connection.close()
            raise
        self._connections += 1
        machine = SlaveConnection(request, self._surroundings.now_ms(), times=self._options.times)
        with self._use:
            self._wire, self._machine = wire, machine
        self._trouble = ""
        try:
            with self._surroundings.selector() as selector:
                selector.register(self._wake, selectors.EVENT_READ)
                selector.register(wire, selectors.EVENT_READ)
                goes_on = True
                while goes_on and self._goes_on():
                    wait = self._say(selector, wire, machine)
                    found = yield selector, wait / 1_000
                    goes_on = self._hear(found, wire, machine)
        finally:
            with self._use:
                self._wire = self._machine = None
            wire.close()

    def _say(self, selector: selectors.BaseSelector, wire: Wire, machine: SlaveConnection) -> int:
        # Sends as much as possible now. Returns the number of milliseconds until the next call.
        if wire.is_ready or wire.handshake():
            with self._use:
                wire.send([machine.data_to_send()])
        wait = machine.next_tick_ms() - self._surroundings.now_ms()
        if self._owes_sync:
            wait = min(wait, _SYNC_MS)
        selector.modify(wire, wire.events)
        return min(max(0, wait), _LONGEST_WAIT_MS)

    def _hear(self, found: Found, wire: Wire, machine: SlaveConnection) -> bool:
        # Returns whether the connection continues.
        for key, ready in found:
            if key.fileobj is self._wake:
                self._wake.take()
            elif ready & selectors.EVENT_READ and wire.is_ready and not self._read(wire, machine):
                return False
        if not found and self._owes_sync:
            self._sync(is_small=False)
        with self._use:
            events = machine.tick(self._surroundings.now_ms())
        return self._happened(events)

    def _sync(self, *, is_small: bool) -> None:
        """Acknowledge the received bytes. By default, sync them first."""
        self._owes_sync = False
        if not is_small:
            self._synced_ms = self._surroundings.now_ms()
        if self._options.acknowledge != "flushed":
            self._acknowledge(self._replica.position)
        elif is_small:
            # A sync of few bytes in this thread takes no longer than waking the other thread.
            self._acknowledge(self._replica.sync())
        else:
            # The other thread syncs while this thread receives more bytes.
            self._sync_wanted.set()

    def _read(self, wire: Wire, machine: SlaveConnection) -> bool:
        # Returns whether the connection continues.
        before = self._received
        for _ in range(_READS):
            count = wire.receive_into(self._buffer)
            if count is None:
                break
            events: Sequence[ha.SlaveEvent]
            violation: ProtocolViolation | None = None
            with self._use:
                try:
                    events = machine.receive_data(self._buffer[:count], self._surroundings.now_ms())
                except ProtocolViolation as error:
                    events, violation = error.events, error
            goes_on = self._happened(events)
            self._owes_sync = True
            if self._received - before < _LARGE:
                self._sync(is_small=True)
            elif self._surroundings.now_ms() - self._synced_ms >= _SYNC_MS:
                self._sync(is_small=False)
            if violation is not None:
                raise violation
            if not goes_on:
                return False
        return True

    def _happened(self, events: Sequence[ha.SlaveEvent]) -> bool:
        try:
            return all(self._goes_on_after(event) for event in events)
        finally:
            # Check the frames once, after all events: a check of many bytes takes hardly longer
            # than a check of few bytes.
            self._replica.check()

    def _goes_on_after(self, event: ha.SlaveEvent) -> bool:
        replica = self._replica
        if isinstance(event, ha.DataReceived):
            replica.take(event.offset, event.data)
            self._failures = 0
            self._received += len(event.data)
        elif isinstance(event, ha.HeartbeatReceived):
            replica.heartbeat(event.offset)
            self._failures = 0
        elif isinstance(event, ha.MasterElsewhere):
            replica.elsewhere(event.offset)
            self._trouble = f"{self.master}: its log begins or ends at offset {event.offset}"
            return False
        elif isinstance(event, ha.ConnectionEnded):
            self._trouble = f"{self.master}: {event.reason}"
            return False
        return True

    # ---------------------------------------------------------------------------- acknowledgements
    def _run_sync(self) -> None:
        for sync_wanted in self.syncing():
            sync_wanted.take()

    def syncing(self) -> Generator[Flag, None, None]:
        """Do all work of the syncing thread, as a generator. Before each sync, the generator yields
        a flag, and the caller waits until the flag is set.
        """
        try:
            while self._goes_on() and not self._ended.wait(0):
                yield self._sync_wanted
                self._acknowledge(self._replica.sync())
        except Exception as error:
            self._fail(error)
        finally:
            self._wake.force()

    def _acknowledge(self, offset: int) -> None:
        # Acknowledge only bytes that were received over the present connection.
        with self._use:
            machine, wire = self._machine, self._wire
            if machine is None or wire is None or machine.received is None:
                return
            offset = min(offset, machine.received, self._replica.position)
            if offset <= machine.reported:
                return
            if wire.wants_write:
                # The socket accepts no bytes now. Report the newest offset later.
                self._owes_sync = True
                return
            machine.report(offset, self._surroundings.now_ms())
            # Ignore a broken connection here: the next read raises the error.
            with contextlib.suppress(OSError):
                wire.send([machine.data_to_send()])


# ------------------------------------------------------------------- before the store is opened
def failed_attempts(host: str, port: int, options: SlaveOptions) -> Iterator[str]:
    """Try to connect to a master until the master answers a report; for each failed attempt, yield
    the reason.

    The report has the offset 0, so it acknowledges nothing. ``replicate`` calls this function
    before it opens the slave's store, because opening a store for writing changes files.
    """
    pause = options.first_pause
    while True:
        try:
            _ask(host, port, options)
        except (OSError, ProtocolViolation) as error:
            yield f"{address_text((host, port))}: {error}"
            time.sleep(pause)
            pause = min(2 * pause, options.longest_pause)
        else:
            return


def _ask(host: str, port: int, options: SlaveOptions) -> None:
    """Return when the master has sent a valid answer."""
    surroundings = Surroundings()
    connection = surroundings.connect(host, port, _CONNECT_SECONDS)
    with contextlib.ExitStack() as opened:
        opened.callback(connection.close)
        name = None if options.tls is None else options.server_name or host
        wire = Wire(connection, tls=options.tls, server_name=name)
        opened.callback(wire.close)
        machine = SlaveConnection(0, surroundings.now_ms(), times=options.times)
        selector = opened.enter_context(surroundings.selector())
        selector.register(wire, wire.events)
        buffer = memoryview(bytearray(_ANSWER))
        while True:
            if wire.is_ready or wire.handshake():
                wire.send([machine.data_to_send()])
                count = wire.receive_into(buffer)
                if count is not None and _has_answered(machine, buffer[:count]):
                    return
            _require_open(machine.tick(surroundings.now_ms()))
            wait = max(0, machine.next_tick_ms() - surroundings.now_ms())
            selector.modify(wire, wire.events)
            selector.select(wait / 1_000)


def _has_answered(machine: SlaveConnection, data: memoryview) -> bool:
    events = machine.receive_data(data, Surroundings().now_ms())
    _require_open(events)
    return bool(events)


def _require_open(events: list[ha.SlaveEvent]) -> None:
    for event in events:
        if isinstance(event, ha.ConnectionEnded):
            raise ProtocolViolation(event.reason)
