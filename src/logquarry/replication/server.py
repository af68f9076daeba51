"""The base class of both replication servers, which accepts connections and runs the server's
thread.

One thread serves all connections with a selector. If ``max_connections`` connections are open, a
new connection replaces a connection that has sent no request. If all connections have sent
requests, the server refuses the new connection. :class:`~logquarry.replication.master.HaMaster` and
:class:`~logquarry.replication.config_server.ConfigServer` add their protocols.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import selectors
import socket
import ssl
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from logquarry import arguments
from logquarry.errors import LogquarryError, ProtocolViolation, ReplicationError, UsageError
from logquarry.replication.wire import Surroundings, Waits, Wire, Worker, address_text, drive
from logquarry.text import counted

logger = logging.getLogger(__name__)

Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


LONGEST_WAIT_MS: Final = 1_000
_PAUSE_SECONDS: Final = 0.01
_END_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Options that both servers have.

    Attributes:
        allow: addresses or networks that may connect, for example "10.0.0.0/8"; None for all.
        tls: None for no TLS.
    """

    max_connections: int = 16
    allow: tuple[str, ...] | None = None
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        arguments.count(self.max_connections, "max_connections")
        self.networks()

    def networks(self) -> Networks | None:
        """Return the networks in ``allow``. None means that all addresses may connect."""
        if self.allow is None:
            return None
        try:
            return tuple(ipaddress.ip_network(text, strict=False) for text in self.allow)
        except ValueError as error:
            raise UsageError(f"allow takes addresses and networks: {error}") from error


class Peer:
    """One connection. ``mask`` is the set of events for which the selector waits."""

    __slots__ = ("mask", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.mask = selectors.EVENT_READ

    def __str__(self) -> str:
        return self.wire.peer


P = TypeVar("P", bound=Peer)


class Server(Worker, Generic[P]):
    """A server with one thread. The constructor opens the port; :meth:`start` or a ``with`` block
    starts the thread.

    Args:
        listen: returns the listening sockets. The server's address is the first socket's address.
        surroundings: provides clock and sockets. A test passes an object that simulates both.
        read_size: maximum number of bytes to read at once.
    """

    def __init__(
        self,
        name: str,
        thread: str,
        listen: Callable[[Surroundings], list[socket.socket]],
        options: ServerOptions,
        surroundings: Surroundings | None,
        read_size: int,
    ) -> None:
        self._name = name
        self._surroundings = surroundings or Surroundings()
        self._max_connections, self._tls = options.max_connections, options.tls
        self._allowed = options.networks()
        self._refused = 0
        self._noted_ms: int | None = None
        with contextlib.ExitStack() as made:
            # If the next lines fail, for example because no descriptor is free, close the
            # listeners, so that the port is free again.
            self._listeners = listen(self._surroundings)
            for listener in self._listeners:
                made.enter_context(contextlib.closing(listener))
            self.host, self.port = self._listeners[0].getsockname()[:2]
            self._wake = made.enter_context(contextlib.closing(self._surroundings.wake()))
            self._selector = made.enter_context(contextlib.closing(self._surroundings.selector()))
            self._selector.register(self._wake, selectors.EVENT_READ, None)
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, listener)
            made.pop_all()
        self._peers: list[P] = []
        self._buffer = memoryview(bytearray(read_size))
        super().__init__(_END_SECONDS, {thread: self._run})

    # -------------------------------------------------------------------------------------- life
    def _interrupt(self) -> None:
        self._wake.force()

    def abandon_in_child(self) -> None:
        """See :meth:`Worker.abandon_in_child`."""
        for peer in self._peers:
            peer.wire.abandon()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.close()

    @property
    def address(self) -> str:
        """host:port at which the server listens."""
        return address_text((self.host, self.port))

    # ------------------------------------------------------------------------------------ serving
    def _run(self) -> None:
        drive(self.serving())

    def serving(self) -> Waits:
        """Do all work of the server, as a generator, so that a test can run it with
        simulated time.
        """
        try:
            while not self._is_closing:
                yield from self._turn()
        except Exception as error:
            self.error = self._failed(error)
        finally:
            self._end()

    def _failed(self, error: Exception) -> LogquarryError:
        # Returns the exception that becomes :attr:`error`.
        logger.exception("%s failed", self._name)
        return ReplicationError(f"{self._name} failed: {error!r}")

    def _end(self) -> None:
        for peer in list(self._peers):
            self._drop(peer, None)
        self._selector.close()
        for listener in self._listeners:
            listener.close()
        self._wake.close()

    def _turn(self) -> Waits:
        wait = self._serve_all()
        found = yield self._selector, max(0, wait) / 1_000
        for key, mask in found:
            if key.data is None:
                self._wake.take()
            elif not isinstance(key.data, Peer):
                self._accept(key.data)
            elif mask & selectors.EVENT_READ:
                self._read_from(key.data)  # type: ignore[arg-type]

    @abstractmethod
    def _serve_all(self) -> int:
        """Do all work that can be done now. Return the number of milliseconds until
        the next call.
        """

    def _read_from(self, peer: P) -> None:
        """Read the bytes that a peer has sent. If the peer was removed meanwhile, do nothing."""
        if peer not in self._peers or not peer.wire.is_ready:
            return
        try:
            self._read(peer)
        except ProtocolViolation as violation:
            self._refuse(peer.wire.peer, str(violation))
            self._drop(peer, None)
        except OSError as error:
            self._drop(peer, str(error))

    @abstractmethod
    def _read(self, peer: P) -> None:
        """Read the bytes that a connected peer has sent. Errors end the connection."""

    # -------------------------------------------------------------------------------- connections
    def _allows(self, host: str) -> bool:
        if self._allowed is None:
            return True
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._allowed)

    def _refuse(self, peer: str, reason: str) -> None:
        self._refused += 1
        # Log at most one line per second, so that repeated connections do not fill the disk.
        now = self._surroundings.now_ms()
        if self._noted_ms is None or now - self._noted_ms >= 1_000:
            self._noted_ms = now
            logger.warning("%s was refused: %s (%d so far)", peer, reason, self._refused)

    @abstractmethod
    def _new(self, wire: Wire) -> P:
        """Return the object that represents a new connection."""

    @abstractmethod
    def _silence_of(self, peer: P) -> str | None:
        """Return the reason why a new connection may replace this peer; None if it may not."""

    def _came(self, peer: P) -> None:
        """Called before the server adds a new peer."""

    def _went(self, peer: P) -> None:
        """Called before the server removes a peer."""

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:
            # The process has no free descriptor, or the peer has already disconnected. Without a
            # free descriptor, the selector reports the listener again at once. Pause, or this loop
            # would use a whole CPU.
            self._refuse("?", str(error))
            time.sleep(_PAUSE_SECONDS)
            return
        name = address_text(address)
        if not self._allows(address[0]):
            # Count the refusal before the close: as soon as the peer sees the close, status() must
            # include the refusal.
            self._refuse(name, "the address is not in allow")
            connection.close()
            return
        if len(self._peers) >= self._max_connections and not self._make_room():
            self._refuse(
                name, counted(len(self._peers), "peer is", "peers are") + " connected (the maximum)"
            )
            connection.close()
            return
        try:
            wire = Wire(connection, tls=self._tls)
        except (OSError, ValueError) as error:
            connection.close()
            self._refuse(name, str(error))
            return
        peer = self._new(wire)
        try:
            self._selector.register(wire, selectors.EVENT_READ, peer)
        except (OSError, ValueError) as error:
            # Close the wire, not the accepted socket: with TLS, the wire has its own socket.
            wire.close()
            self._refuse(name, str(error))
            return
        self._came(peer)
        self._peers.append(peer)

    def _make_room(self) -> bool:
        for peer in self._peers:
            reason = self._silence_of(peer)
            if reason is not None:
                self._refuse(peer.wire.peer, f"{reason}, and a new peer needs its place")
                self._drop(peer, None)
                return True
        return False

    def _watch(self, peer: P, mask: int) -> None:
        if mask != peer.mask:
            self._selector.modify(peer.wire, mask, peer)
            peer.mask = mask

    def _drop(self, peer: P, reason: str | None) -> None:
        if peer not in self._peers:
            return
        self._went(peer)
        self._peers.remove(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.wire)
        peer.wire.close()
        if reason is not None:
            logger.info("connection to %s closed: %s", peer, reason)
