"""What a slave's broker asks its master's: the tables of a store's ``config/``.

Sockets about :mod:`logquarry.replication.config_answers`. A RocketMQ slave asks for the topics at
another port, two below ("fast", or VIP channel), so this listens at both.

One thread serves all connections, by a selector. Nobody gets a second answer before the first has
gone, and nothing is read of whoever has an answer to come: what a peer sends costs no more than a
request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Self

from logquarry.errors import LogquarryError, ProtocolViolation, ReplicationError, UsageError
from logquarry.protocol.remoting import RemotingCommand, RemotingReader
from logquarry.replication.admission import Admission, Networks, networks
from logquarry.replication.config_answers import ConfigAnswers
from logquarry.replication.wire import Surroundings, Waits, Wire, address_text, drive
from logquarry.store.disk.lifetime import abandon_in_children, stays

logger = logging.getLogger(__name__)

FAST_PORT: Final = -2
"""From a broker's port to the one at which a RocketMQ slave asks for topics."""
_LARGEST_REQUEST: Final = 1 << 16
_READ: Final = 1 << 14
_LONGEST_WAIT_MS: Final = 1_000
_PAUSE_SECONDS: Final = 0.01
_END_SECONDS: Final = 10.0
_TRIES: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigServerOptions:
    """How ``config/`` is served.

    Attributes:
        max_connections: how many may be connected.
        idle_ms: after how long without a request a connection ends
            (``serverChannelMaxIdleTimeSeconds``).
        allow: addresses or networks that may connect; None for any that reach the port, which by
            default is nobody outside of this machine.
        tls: serves TLS.
        fast_port: whether to listen two ports below, too: a RocketMQ slave asks for topics there.
    """

    max_connections: int = 16
    idle_ms: int = 120_000
    allow: tuple[str, ...] | None = None
    tls: ssl.SSLContext | None = None
    fast_port: bool = True

    def __post_init__(self) -> None:
        if self.max_connections <= 0:
            raise UsageError(f"max_connections is {self.max_connections}, and must be above 0")
        if self.idle_ms <= 0:
            raise UsageError(f"idle_ms is {self.idle_ms}, and must be above 0")
        self.networks()

    def networks(self) -> Networks | None:
        """What ``allow`` means."""
        return networks(self.allow)


class ConfigServerStatus(NamedTuple):
    """How a server does.

    Attributes:
        address: where it listens.
        connections: how many there are.
        answered: requests that were answered with a table.
        refused: connections that were refused, or ended for what they sent.
        has_ended: whether it has ended for good.
    """

    address: str
    connections: int
    answered: int
    refused: int
    has_ended: bool


class _Peer:
    """One connection."""

    __slots__ = ("asked", "has_asked", "heard_ms", "mask", "reader", "wire")

    def __init__(self, wire: Wire, now_ms: int) -> None:
        self.wire = wire
        self.reader = RemotingReader(_LARGEST_REQUEST)
        self.asked: deque[RemotingCommand] = deque()
        self.has_asked = False
        self.heard_ms = now_ms
        self.mask = selectors.EVENT_READ


class ConfigServer:
    """Serves the tables of a store's ``config/`` to slaves, RocketMQ's or ours.

    Listens from the start on, and serves from :meth:`start` (or the ``with`` block) on.

    Args:
        root: the store's folder. The store may be open or not: its files are read for each request.
        host: what to listen on.
        port: 0 for one that the system chooses.
        options: how it serves.
        surroundings: time and sockets.

    Attributes:
        error: why it has ended for good, None where it has not.

    Raises:
        OSError: if it cannot listen there.
        UsageError: if there is no port two below.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        options: ConfigServerOptions | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._answers = ConfigAnswers(Path(root))
        self._options = options or ConfigServerOptions()
        self._surroundings = surroundings or Surroundings()
        self._admission = Admission(self._options.networks(), self._surroundings.now_ms)
        with contextlib.ExitStack() as made:
            # A port that nobody serves is not to stay taken where descriptors run out.
            self._listeners = self._listen(host, port)
            for listener in self._listeners:
                made.enter_context(contextlib.closing(listener))
            self.host, self.port = self._listeners[0].getsockname()[:2]
            self._wake = made.enter_context(contextlib.closing(self._surroundings.wake()))
            self._selector = made.enter_context(contextlib.closing(self._surroundings.selector()))
            self._selector.register(self._wake, selectors.EVENT_READ, None)
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, listener)
            made.pop_all()
        self.error: LogquarryError | None = None
        self._peers: list[_Peer] = []
        self._buffer = memoryview(bytearray(_READ))
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="logquarry-config", daemon=True)
        abandon_in_children(self)

    def _listen(self, host: str, port: int) -> list[socket.socket]:
        """Sockets that listen: at the port, and at the one two below."""
        listen = self._surroundings.listen
        if not self._options.fast_port:
            return [listen(host, port)]
        if 0 < port <= -FAST_PORT:
            raise UsageError(f"port {port}: there is none two below, where slaves ask for topics")
        tries = 1 if port else _TRIES
        for left in reversed(range(tries)):
            main = listen(host, port)
            below = main.getsockname()[1] + FAST_PORT
            try:
                return [main, listen(host, below)]
            except OSError as error:
                main.close()
                if not left:
                    reason = f"{error.strerror}; a RocketMQ slave asks for topics there"
                    raise OSError(error.errno, reason, address_text((host, below))) from error
        raise AssertionError

    # -------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End all connections, and listen no more; once more does nothing."""
        self._is_closing = True
        self._wake.force()
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        else:
            self._end()
        stays(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.store.disk.lifetime`: no peer is to wait for a child to end."""
        for peer in self._peers:
            peer.wire.abandon()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.close()

    @property
    def address(self) -> str:
        """host:port."""
        return address_text((self.host, self.port))

    def status(self) -> ConfigServerStatus:
        """How it does right now."""
        return ConfigServerStatus(
            self.address,
            len(self._peers),
            self._answers.given,
            self._admission.refused,
            self.error is not None,
        )

    # ------------------------------------------------------------------------------------ at work
    def _run(self) -> None:
        drive(self.serving())

    def serving(self) -> Waits:
        """All of its work, for whoever drives it without a thread, instead of :meth:`start`."""
        try:
            while not self._is_closing:
                yield from self._turn()
        except Exception as error:
            logger.exception("the server of config/ failed")
            self.error = ReplicationError(f"the server of config/ failed: {error!r}")
        finally:
            self._end()

    def _end(self) -> None:
        for peer in list(self._peers):
            self._drop(peer, None)
        self._selector.close()
        for listener in self._listeners:
            listener.close()
        self._wake.close()

    def _turn(self) -> Waits:
        now = self._surroundings.now_ms()
        waits = [self._serve(peer, now) for peer in list(self._peers)]
        found = yield self._selector, max(0, min(waits, default=_LONGEST_WAIT_MS)) / 1_000
        for key, mask in found:
            if key.data is None:
                self._wake.take()
            elif isinstance(key.data, _Peer):
                if mask & selectors.EVENT_READ:
                    self._read(key.data)
            else:
                self._accept(key.data)

    def _serve(self, peer: _Peer, now: int) -> int:
        """Answer one request, if the one before has gone; milliseconds until there is more."""
        wire = peer.wire
        left = peer.heard_ms + self._options.idle_ms - now
        if left <= 0:
            self._drop(peer, f"it asked nothing for {self._options.idle_ms} ms")
            return _LONGEST_WAIT_MS
        try:
            if (wire.is_ready or wire.handshake()) and wire.send(()) and peer.asked:
                command = peer.asked.popleft()
                peer.has_asked = True
                peer.heard_ms = now
                if not (command.is_response or command.is_oneway):
                    wire.send(self._answers.answer(command))
                # TLS may have more of it, which no selector sees.
                self._read(peer)
                left = 0
            self._watch(peer)
        except (OSError, ValueError) as error:
            self._drop(peer, str(error))
        return min(left, _LONGEST_WAIT_MS)

    def _watch(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        # Where both are false its next request is served in the next turn.
        mask = selectors.EVENT_WRITE if peer.wire.wants_write else selectors.EVENT_READ
        if mask != peer.mask:
            self._selector.modify(peer.wire, mask, peer)
            peer.mask = mask

    def _read(self, peer: _Peer) -> None:
        if peer not in self._peers or not peer.wire.is_ready:
            return
        try:
            while not peer.asked and not peer.wire.wants_write:
                count = peer.wire.receive_into(self._buffer)
                if count is None:
                    return
                if count == 0:
                    self._drop(peer, "it ended the connection")
                    return
                peer.asked.extend(peer.reader.receive_data(self._buffer[:count]))
        except ProtocolViolation as violation:
            self._admission.refuse(peer.wire.peer, str(violation))
            self._drop(peer, None)
        except OSError as error:
            self._drop(peer, str(error))

    # -------------------------------------------------------------------------------- come and go
    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, address = listener.accept()
        except OSError as error:
            # It may last, and the listener stays ready: others are to have the processor meanwhile.
            self._admission.refuse("?", str(error))
            time.sleep(_PAUSE_SECONDS)
            return
        name = address_text(address)
        if not self._admission.allows(address[0]):
            # Counted first: whoever sees the connection end may ask.
            self._admission.refuse(name, "it is not on the list of those who may connect")
            connection.close()
            return
        if len(self._peers) >= self._options.max_connections and not self._make_room():
            self._admission.refuse(name, f"{len(self._peers)} are connected")
            connection.close()
            return
        try:
            wire = Wire(connection, tls=self._options.tls)
        except (OSError, ValueError) as error:
            connection.close()
            self._admission.refuse(name, str(error))
            return
        peer = _Peer(wire, self._surroundings.now_ms())
        try:
            self._selector.register(wire, selectors.EVENT_READ, peer)
        except (OSError, ValueError) as error:
            # Not the socket that was accepted: TLS has made another one of it.
            wire.close()
            self._admission.refuse(name, str(error))
            return
        self._peers.append(peer)

    def _make_room(self) -> bool:
        """Let go of who has been there for longest and never asked anything; if there is one."""
        for peer in self._peers:
            if not peer.has_asked:
                self._admission.refuse(peer.wire.peer, "it asks nothing, and another one has come")
                self._drop(peer, None)
                return True
        return False

    def _drop(self, peer: _Peer, reason: str | None) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.wire)
        peer.wire.close()
        if reason is not None:
            logger.info("%s is gone: %s", peer.wire.peer, reason)
