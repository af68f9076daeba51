"""Who may connect to us, and who was refused."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import selectors
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from logquarry.disk.lifetime import abandon_in_children, stays
from logquarry.errors import LogquarryError, ReplicationError, UsageError
from logquarry.replication.wire import Surroundings, Waits, Wire, address_text, drive

logger = logging.getLogger(__name__)

Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def networks(allow: Sequence[str] | None) -> Networks | None:
    """Addresses and networks ("10.0.0.7", "10.0.0.0/8") as such; None for whoever comes.

    Raises:
        UsageError: if one is none.
    """
    if allow is None:
        return None
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in allow)
    except ValueError as error:
        raise UsageError(f"allow: {error}") from error


class Admission:
    """Tells who may connect, and notes who was refused. For one thread.

    Args:
        allowed: who may; None for whoever comes.
        now_ms: the time, by a clock that nobody sets.

    Attributes:
        refused: how many were.
    """

    def __init__(self, allowed: Networks | None, now_ms: Callable[[], int]) -> None:
        self._allowed = allowed
        self._now_ms = now_ms
        self._noted_ms: int | None = None
        self.refused = 0

    def allows(self, host: str) -> bool:
        """Whether an address may connect."""
        if self._allowed is None:
            return True
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._allowed)

    def refuse(self, peer: str, reason: str) -> None:
        """Note that somebody was."""
        self.refused += 1
        # Whoever knocks all day is not to fill a disk with it.
        now = self._now_ms()
        if self._noted_ms is None or now - self._noted_ms >= 1_000:
            self._noted_ms = now
            logger.warning("%s was refused: %s (%d so far)", peer, reason, self.refused)


# --------------------------------------------------------------------------------------------------
# What listens and serves many connections: how it starts and ends, who may come, who has to go.
#
# One thread serves all connections, by a selector. There are ``max_connections`` of them, and a
# stranger who says nothing has to go when somebody else comes. What is said and sent is the matter
# of those who build on this: :class:`~logquarry.replication.master.HaMaster` and
# :class:`~logquarry.replication.config_server.ConfigServer`.

LONGEST_WAIT_MS: Final = 1_000
_PAUSE_SECONDS: Final = 0.01
_END_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Who may connect, and how.

    Attributes:
        max_connections: how many may be connected.
        allow: addresses or networks that may connect ("10.0.0.0/8"); None for any that reach the
            port, which by default is nobody outside of this machine.
        tls: serves TLS.
    """

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


class Peer:
    """One connection.

    Attributes:
        wire: its socket.
        mask: what the selector watches it for.
    """

    __slots__ = ("mask", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.mask = selectors.EVENT_READ

    def __str__(self) -> str:
        return self.wire.peer


P = TypeVar("P", bound=Peer)


class Server(ABC, Generic[P]):
    """Listens from the start on, and serves from :meth:`start` (or the ``with`` block) on.

    Args:
        name: what it is called where it fails.
        thread: what its thread is called.
        listen: makes the sockets that listen; the first one is the server's address.
        options: who may connect, and how.
        surroundings: time and sockets.
        read_size: bytes that are read at once.

    Attributes:
        error: why it has ended by itself, None where it has not.

    Raises:
        OSError: if it cannot listen there.
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
        self._admission = Admission(options.networks(), self._surroundings.now_ms)
        self.error: LogquarryError | None = None
        with contextlib.ExitStack() as made:
            # A port that nobody serves is not to stay taken where descriptors run out.
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
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=thread, daemon=True)
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
                logger.warning("%s has not ended in %s s", self._name, _END_SECONDS)
        else:
            self._end()
        stays(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.disk.lifetime`: no peer is to wait for a child to end."""
        for peer in self._peers:
            peer.wire.abandon()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.close()

    @property
    def address(self) -> str:
        """host:port."""
        return address_text((self.host, self.port))

    # ------------------------------------------------------------------------------------ at work
    def _run(self) -> None:
        drive(self.serving())

    def serving(self) -> Waits:
        """All of its work, for whoever drives it without a thread, instead of :meth:`start`."""
        try:
            while not self._is_closing:
                yield from self._turn()
        except Exception as error:
            self.error = self._failed(error)
        finally:
            self._end()

    def _failed(self, error: Exception) -> LogquarryError:
        """What has ended it, which is told; called while the exception is handled."""
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
        """Whatever is to be done now, and then wait for more."""
        wait = self._serve_all()
        found = yield self._selector, max(0, wait) / 1_000
        for key, mask in found:
            if key.data is None:
                self._wake.take()
            elif not isinstance(key.data, Peer):
                self._accept(key.data)
            elif mask & selectors.EVENT_READ:
                self._read(key.data)  # type: ignore[arg-type]

    @abstractmethod
    def _serve_all(self) -> int:
        """Do what is due for all peers; milliseconds until there is something to do again."""

    @abstractmethod
    def _read(self, peer: P) -> None:
        """Take what has come of a peer, who may have gone meanwhile."""

    # -------------------------------------------------------------------------------- come and go
    @abstractmethod
    def _new(self, wire: Wire) -> P:
        """What is kept of a connection."""

    @abstractmethod
    def _silence_of(self, peer: P) -> str | None:
        """Why a peer may have to go for another one: it never said what it came for. Else None."""

    def _came(self, peer: P) -> None:
        """Called before a peer is one of those who are there."""

    def _went(self, peer: P) -> None:
        """Called before it is none of them any more."""

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:
            # Out of descriptors, or the peer is gone already. The former may last, and the listener
            # stays ready: others are to have the processor meanwhile.
            self._admission.refuse("?", str(error))
            time.sleep(_PAUSE_SECONDS)
            return
        name = address_text(address)
        if not self._admission.allows(address[0]):
            # Counted first: whoever sees the connection end may ask.
            self._admission.refuse(name, "it is not on the list of those who may connect")
            connection.close()
            return
        if len(self._peers) >= self._max_connections and not self._make_room():
            self._admission.refuse(name, f"{len(self._peers)} are connected")
            connection.close()
            return
        try:
            wire = Wire(connection, tls=self._tls)
        except (OSError, ValueError) as error:
            connection.close()
            self._admission.refuse(name, str(error))
            return
        peer = self._new(wire)
        try:
            self._selector.register(wire, selectors.EVENT_READ, peer)
        except (OSError, ValueError) as error:
            # Not the socket that was accepted: TLS has made another one of it.
            wire.close()
            self._admission.refuse(name, str(error))
            return
        self._came(peer)
        self._peers.append(peer)

    def _make_room(self) -> bool:
        """Let go of who has been silent for longest and never said anything; if there is one."""
        for peer in self._peers:
            reason = self._silence_of(peer)
            if reason is not None:
                self._admission.refuse(peer.wire.peer, f"{reason}, and another one has come")
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
            logger.info("%s is gone: %s", peer, reason)
