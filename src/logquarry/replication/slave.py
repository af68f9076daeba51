"""A slave: fetches a master's log into its own store, and says how far it has it.

Two threads. One receives, appends and checks, and brings to the disk what little came. Where much
comes the other does that, so that receiving does not wait for the disk. Where the connection ends
the slave comes again, after a pause that doubles each time nothing came. Where the logs do not fit
together, or the disk fails, it ends for good and says why.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import ssl
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from logquarry.disk.lifetime import abandon_in_children, stays
from logquarry.disk.service import Done, Flag
from logquarry.errors import (
    LogquarryError,
    LogsDiverged,
    ProtocolViolation,
    ReplicationError,
    StoreError,
    UsageError,
)
from logquarry.protocol.ha import (
    ConnectionEnded,
    DataReceived,
    HaTimes,
    HeartbeatReceived,
    MasterElsewhere,
    SlaveConnection,
    SlaveEvent,
)
from logquarry.replication.replica import OVERLAP, Replica, SpoiltReplica
from logquarry.replication.wire import Found, Surroundings, Waits, Wire, address_text, drive
from logquarry.store.message_store import StoreWriter

logger = logging.getLogger(__name__)

ACKNOWLEDGE: Final = ("flushed", "received")
_LARGEST_OFFSET: Final = (1 << 63) - 1
_RECEIVE: Final = 4 << 20
_READS: Final = 16
_LARGE: Final = 256 << 10
_SYNC_MS: Final = 20
"""While so many bytes come at once the disk is asked this often, and not for each of them."""
_CONNECT_SECONDS: Final = 5.0
_LONGEST_WAIT_MS: Final = 1_000
_END_SECONDS: Final = 600.0
_LONG_SECONDS: Final = 3_600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlaveOptions:
    """How a slave follows.

    Attributes:
        start: where a log that is empty begins: a physical offset, 0 for the master's whole log,
            or None for where the master says, which with RocketMQ is its last file.
        acknowledge: ``"flushed"`` for what is on the disk, ``"received"`` for what is in memory,
            as RocketMQ's slave does.
        check_crc: whether bodies are compared with their CRC before they are acknowledged.
        overlap: bytes of the log's end that are compared with the master's at each connection;
            its last message always is.
        times: heartbeats and housekeeping.
        first_pause: seconds before the second try to connect,
        longest_pause: and before any later one.
        tls: connects by TLS,
        server_name: to a master of this name; default: its host.
    """

    start: int | None = None
    acknowledge: str = ACKNOWLEDGE[0]
    check_crc: bool = True
    overlap: int = OVERLAP
    times: HaTimes = field(default_factory=HaTimes)
    first_pause: float = 0.1
    longest_pause: float = 5.0
    tls: ssl.SSLContext | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.acknowledge not in ACKNOWLEDGE:
            raise UsageError(
                f"acknowledge is {self.acknowledge!r}, and must be one of {', '.join(ACKNOWLEDGE)}"
            )
        if self.start is not None and not 0 <= self.start <= _LARGEST_OFFSET:
            raise UsageError(f"start is {self.start}, and must be 0 to {_LARGEST_OFFSET}")
        if self.overlap < 0:
            raise UsageError(f"overlap is {self.overlap}, below 0")
        if not 0 < self.first_pause <= self.longest_pause:
            raise UsageError("pauses must be above 0, and the first no longer than the longest")


class SlaveStatus(NamedTuple):
    """How a slave does.

    Attributes:
        master: whom it follows.
        is_connected: whether it is connected.
        max_offset: where its log ends.
        acknowledged: what it has told the master that it has; None where it is not connected.
        received_bytes: of the log, since it was started.
        connections: how many there were.
        has_all: whether the master's last word was that there is no more of its log.
        trouble: why it is not connected, or has ended; empty where all is well.
        has_ended: whether it has ended for good.
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


class HaSlave:
    """Follows a master with a store.

    Follows from :meth:`start` (or the ``with`` block) on. Close it before the store. Others may
    read the store meanwhile, and cannot put: its ``broker_role`` is SLAVE.

    Args:
        store: the store, open to be written, as a SLAVE.
        host: of the master.
        port: of the master.
        options: how it follows.
        surroundings: time and sockets.

    Attributes:
        error: why it has ended for good, None where it has not.

    Raises:
        UsageError: if the store takes messages of its own.
        StoreUnavailable: if it is not open to be written.
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
        self._options = options or SlaveOptions()
        self._surroundings = surroundings or Surroundings()
        feed = store.log_feed()
        if store.config.broker_role != "SLAVE":
            raise UsageError(f"{store.root}: its broker_role is not SLAVE: it may take messages")
        self._host, self._port = host, port
        self._replica = Replica(
            feed,
            str(store.root),
            start=self._options.start,
            check_crc=self._options.check_crc,
            overlap=self._options.overlap,
        )
        self._wake = self._surroundings.wake()
        self._sync_wanted = Flag()
        # Guards the machine and the wire of the connection that there is.
        self._use = threading.Lock()
        self._machine: SlaveConnection | None = None
        self._wire: Wire | None = None
        self._buffer = memoryview(bytearray(_RECEIVE))
        self._received = 0
        self._synced_ms = 0
        self._owes_sync = False
        self._connections = 0
        self._trouble = ""
        self._is_closing = False
        self._ended = Done()
        self.error: LogquarryError | None = None
        self._threads = [
            threading.Thread(target=run, name=f"logquarry-{name}", daemon=True)
            for name, run in (("ha-slave", self._run), ("ha-slave-sync", self._run_sync))
        ]
        abandon_in_children(self)

    # -------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begin."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            # No more threads: whoever asks by ``with`` closes nothing that did not begin.
            self.close()
            raise

    def close(self) -> None:
        """End the connection, and follow no more; once more does nothing."""
        self._is_closing = True
        self._wake.force()
        self._sync_wanted.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_END_SECONDS)
        if self._threads[0].ident is None:
            # Nobody else says so to those who wait.
            self._ended.set()
        self._wake.close()
        stays(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.disk.lifetime`: no master is to wait for a child to end."""
        wire = self._wire
        if wire is not None:
            wire.abandon()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; whether it has. :attr:`error` tells why, if it was not closed.

        Args:
            timeout_s: seconds; by default as long as it takes.
        """
        while not self._ended.wait(_LONG_SECONDS if timeout_s is None else timeout_s):
            if timeout_s is not None:
                return False
        return True

    def _goes_on(self) -> bool:
        return not self._is_closing and self.error is None

    @property
    def master(self) -> str:
        """host:port."""
        return address_text((self._host, self._port))

    def status(self) -> SlaveStatus:
        """How it does right now."""
        machine = self._machine
        return SlaveStatus(
            self.master,
            machine is not None,
            self._replica.wrote,
            None if machine is None else machine.reported,
            self._received,
            self._connections,
            machine is not None and self._replica.has_all,
            self._trouble,
            self.error is not None,
        )

    # --------------------------------------------------------------------------------- connections
    def _run(self) -> None:
        drive(self.following())

    def following(self) -> Waits:
        """All work of the thread that receives, for whoever drives it without one.

        It takes :meth:`syncing` beside it, instead of :meth:`start`.
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
                if self._received > before:
                    pause = self._options.first_pause
                logger.info("%s; the next try in %.1f s", self._trouble, pause)
                yield from self._rest(pause)
                pause = min(2 * pause, self._options.longest_pause)
        except (ReplicationError, StoreError) as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the slave failed")
            self._fail(ReplicationError(f"the slave failed: {error!r}"))
        finally:
            self._ended.set()
            self._sync_wanted.set()

    def _fail(self, error: LogquarryError) -> None:
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
        """One connection, from its beginning to its end.

        Raises:
            OSError: if there is none, or it breaks.
            ReplicationError: if master and slave cannot go on with each other.
            StoreError: if the log does not take what comes.
        """
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
        now = self._surroundings.now_ms()
        machine = SlaveConnection(request, now, times=self._options.times)
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
        """Send what can be sent; milliseconds to wait for more to do."""
        if wire.is_ready or wire.handshake():
            with self._use:
                wire.send([machine.data_to_send()])
        wait = machine.next_tick_ms() - self._surroundings.now_ms()
        if self._owes_sync:
            wait = min(wait, _SYNC_MS)
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.wants_write else 0)
        selector.modify(wire, mask)
        return min(max(0, wait), _LONGEST_WAIT_MS)

    def _hear(self, found: Found, wire: Wire, machine: SlaveConnection) -> bool:
        """Take what has come, and do what is due; whether the connection goes on."""
        for key, ready in found:
            if key.fileobj is self._wake:
                self._wake.take()
            elif ready & selectors.EVENT_READ and wire.is_ready and not self._read(wire, machine):
                return False
        if not found and self._owes_sync:
            self._ask_sync()
        with self._use:
            events = machine.tick(self._surroundings.now_ms())
        return self._happened(events)

    def _sync_here(self) -> None:
        """Bring a little to the disk at once: another thread would take as long to be woken."""
        self._owes_sync = False
        if self._options.acknowledge == "flushed":
            self._acknowledge(self._replica.sync())
        else:
            self._acknowledge(self._replica.position)

    def _ask_sync(self) -> None:
        """Have the other thread bring much to the disk, while more of it comes."""
        self._owes_sync = False
        self._synced_ms = self._surroundings.now_ms()
        if self._options.acknowledge == "flushed":
            self._sync_wanted.set()
        else:
            self._acknowledge(self._replica.position)

    def _read(self, wire: Wire, machine: SlaveConnection) -> bool:
        """Take what has come; whether the connection goes on."""
        before = self._received
        for _ in range(_READS):
            count = wire.receive_into(self._buffer)
            if count is None:
                break
            events: Sequence[SlaveEvent]
            violation: ProtocolViolation | None = None
            with self._use:
                try:
                    events = machine.receive_data(self._buffer[:count], self._surroundings.now_ms())
                except ProtocolViolation as error:
                    events, violation = error.events, error
            goes_on = self._happened(events)
            self._owes_sync = True
            if self._received - before < _LARGE:
                self._sync_here()
            elif self._surroundings.now_ms() - self._synced_ms >= _SYNC_MS:
                self._ask_sync()
            if violation is not None:
                raise violation
            if not goes_on:
                return False
        return True

    def _happened(self, events: Sequence[SlaveEvent]) -> bool:
        replica = self._replica
        try:
            return all(self._goes_on_after(event) for event in events)
        finally:
            # Once for all of them: most of a look is the way to it.
            replica.check()

    def _goes_on_after(self, event: SlaveEvent) -> bool:
        replica = self._replica
        if isinstance(event, DataReceived):
            replica.take(event.offset, event.data)
            self._received += len(event.data)
        elif isinstance(event, HeartbeatReceived):
            replica.heartbeat(event.offset)
        elif isinstance(event, MasterElsewhere):
            replica.elsewhere(event.offset)
            self._trouble = f"{self.master}: its log begins or ends at {event.offset}"
            return False
        elif isinstance(event, ConnectionEnded):
            self._trouble = f"{self.master}: {event.reason}"
            return False
        return True

    # -------------------------------------------------------------------------------------- acks
    def _run_sync(self) -> None:
        for sync_wanted in self.syncing():
            sync_wanted.take()

    def syncing(self) -> Generator[Flag, None, None]:
        """All work of the thread that syncs: gives what is to be taken before it goes on."""
        try:
            while self._goes_on() and not self._ended.wait(0):
                yield self._sync_wanted
                self._acknowledge(self._replica.sync())
        except StoreError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("the slave failed")
            self._fail(ReplicationError(f"the slave failed: {error!r}"))
        finally:
            self._wake.force()

    def _acknowledge(self, offset: int) -> None:
        """Say that what stands before an offset is here, as far as this connection knows of it."""
        with self._use:
            machine, wire = self._machine, self._wire
            if machine is None or wire is None or machine.received is None:
                return
            offset = min(offset, machine.received, self._replica.position)
            if offset <= machine.reported:
                return
            if wire.wants_write:
                # The master does not read: what is news then is said when it does, all at once.
                self._owes_sync = True
                return
            machine.report(offset, self._surroundings.now_ms())
            # A connection that broke is found broken where it is read.
            with contextlib.suppress(OSError):
                wire.send([machine.data_to_send()])
