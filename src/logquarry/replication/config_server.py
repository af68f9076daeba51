"""What a slave's broker asks its master's: the tables of a store's ``config/``.

Sockets about :mod:`logquarry.replication.config_answers`. A RocketMQ slave asks for the topics at
another port, two below ("fast", or VIP channel), so this listens at both.

Nobody gets a second answer before the first has gone, and nothing is read of whoever has an answer
to come: what a peer sends costs no more than a request.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from logquarry.errors import ProtocolViolation, UsageError
from logquarry.protocol.remoting import RemotingCommand, RemotingReader
from logquarry.replication.config_answers import ConfigAnswers
from logquarry.replication.server import LONGEST_WAIT_MS, Peer, Server, ServerOptions
from logquarry.replication.wire import Surroundings, Wire, address_text

FAST_PORT: Final = -2
"""From a broker's port to the one at which a RocketMQ slave asks for topics."""
_LARGEST_REQUEST: Final = 1 << 16
_READ: Final = 1 << 14
_TRIES: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigServerOptions(ServerOptions):
    """How ``config/`` is served.

    Attributes:
        idle_ms: after how long without a request a connection ends
            (``serverChannelMaxIdleTimeSeconds``).
        fast_port: whether to listen two ports below, too: a RocketMQ slave asks for topics there.
    """

    idle_ms: int = 120_000
    fast_port: bool = True

    def __post_init__(self) -> None:
        # Not by super(): a dataclass with slots is another class than the one written here.
        ServerOptions.__post_init__(self)
        if self.idle_ms <= 0:
            raise UsageError(f"idle_ms is {self.idle_ms}, and must be above 0")


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


class _Asking(Peer):
    """One connection."""

    __slots__ = ("asked", "has_asked", "heard_ms", "reader")

    def __init__(self, wire: Wire, now_ms: int) -> None:
        super().__init__(wire)
        self.reader = RemotingReader(_LARGEST_REQUEST)
        self.asked: deque[RemotingCommand] = deque()
        self.has_asked = False
        self.heard_ms = now_ms


class ConfigServer(Server[_Asking]):
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
        super().__init__(
            "the server of config/",
            "logquarry-config",
            lambda sockets: _listeners(sockets, host, port, fast=self._options.fast_port),
            self._options,
            surroundings,
            _READ,
        )

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
    def _serve_all(self) -> int:
        now = self._surroundings.now_ms()
        waits = [self._serve(peer, now) for peer in list(self._peers)]
        return min(waits, default=LONGEST_WAIT_MS)

    def _serve(self, peer: _Asking, now: int) -> int:
        """Answer one request, if the one before has gone; milliseconds until there is more."""
        wire = peer.wire
        left = peer.heard_ms + self._options.idle_ms - now
        if left <= 0:
            self._drop(peer, f"it asked nothing for {self._options.idle_ms} ms")
            return LONGEST_WAIT_MS
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
            if peer in self._peers:
                # Where it wants to write its next request is served when that has gone.
                wants_write = wire.wants_write
                self._watch(peer, selectors.EVENT_WRITE if wants_write else selectors.EVENT_READ)
        except (OSError, ValueError) as error:
            self._drop(peer, str(error))
        return min(left, LONGEST_WAIT_MS)

    def _read(self, peer: _Asking) -> None:
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
    def _new(self, wire: Wire) -> _Asking:
        return _Asking(wire, self._surroundings.now_ms())

    def _silence_of(self, peer: _Asking) -> str | None:
        return None if peer.has_asked else "it asks nothing"


def _listeners(sockets: Surroundings, host: str, port: int, *, fast: bool) -> list[socket.socket]:
    """Sockets that listen: at the port, and at the one two below."""
    if not fast:
        return [sockets.listen(host, port)]
    if 0 < port <= -FAST_PORT:
        raise UsageError(f"port {port}: there is none two below, where slaves ask for topics")
    tries = 1 if port else _TRIES
    for left in reversed(range(tries)):
        main = sockets.listen(host, port)
        below = main.getsockname()[1] + FAST_PORT
        try:
            return [main, sockets.listen(host, below)]
        except OSError as error:
            main.close()
            if not left:
                reason = f"{error.strerror}; a RocketMQ slave asks for topics there"
                raise OSError(error.errno, reason, address_text((host, below))) from error
    raise AssertionError
