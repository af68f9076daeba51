"""Listens on the broker's port, the port for older clients, and the name server's port."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final

from logquarry.broker.connection import Connection, Handler, Handshake, Request, SparingLog
from logquarry.broker.core import Core
from logquarry.broker.options import BrokerOptions, listen_error
from logquarry.errors import UsageError
from logquarry.systems import file_limit

logger = logging.getLogger(__name__)
_refusals = SparingLog(logger)

OLDER_CLIENTS: Final = 2
"""The port for older clients is the broker's port minus this number (``MixAll.brokerVIPChannel``).
"""
_TRIES: Final = 20
_BACKLOG: Final = 1_024


class Port:
    """A port on which the process listens, and its connections.

    ``port`` is the number of the port, or 0 before it listens.
    """

    def __init__(
        self,
        core: Core,
        handlers: Mapping[int, Handler],
        disconnected: Callable[[Connection], None],
    ) -> None:
        self._core = core
        self._disconnected = disconnected
        self.handlers = handlers
        self.connections: set[Connection] = set()
        self.handshakes: set[Handshake] = set()
        self._servers: list[asyncio.Server] = []
        self.spawn = core.spawn
        self.port = 0
        # Three ports must leave a quarter of the open files to the store: without them, puts and
        # the dispatch into queues and index would fail.
        self._most_connections = min(core.options.max_connections, file_limit() // 4)

    async def listen(self, port: int, option: str) -> None:
        """Listen on a port; 0 for a port that the system chooses."""
        options = self._core.options
        try:
            sockets = await asyncio.to_thread(_bound_at_one_port, options.host, port)
        except OSError as error:
            raise listen_error(error, options.host, port, option) from error
        self.port = int(sockets[0].getsockname()[1])
        self._servers = [
            await self._core.loop.create_server(
                lambda: Connection(self) if options.tls is None else Handshake(self, options.tls),
                sock=one,
                backlog=_BACKLOG,
            )
            for one in sockets
        ]

    def stop_listening(self) -> None:
        """Accept no more connections. Connections that are open stay open."""
        for server in self._servers:
            server.close()

    def opened(self, connection: Connection) -> None:
        """See :class:`logquarry.broker.connection.Server`."""
        self.connections.add(connection)
        if len(self.connections) > self._most_connections:
            _refusals.warning("%s: too many connections", connection.address)
            connection.abort()

    def closed(self, connection: Connection) -> None:
        """See :class:`logquarry.broker.connection.Server`."""
        self.connections.discard(connection)
        self._core.clients.disconnected(connection)
        self._disconnected(connection)

    def buffer(self, change: int) -> int:
        """See :class:`logquarry.broker.connection.Server`."""
        self._core.buffered_bytes += change
        return self._core.buffered_bytes

    def admit(self, request: Request) -> None:
        """See :class:`logquarry.broker.connection.Server`."""
        self._core.counts.requests[request.command.code] += 1
        acl = self._core.options.acl
        if acl is not None:
            request.account = acl.admit(request.command, request.fields)


def _bound_at_one_port(host: str, port: int) -> list[socket.socket]:
    for _ in range(_TRIES - 1):
        try:
            return _bound(host, port)
        except OSError as error:
            # The system chose the port for the first address, and another process may use it at the
            # next address. In this case, try again with another port.
            if port or error.errno != errno.EADDRINUSE:
                raise
    return _bound(host, port)


def _bound(host: str, port: int) -> list[socket.socket]:
    # This runs in a thread, because the event loop must not resolve the host: uvloop's library
    # libuv would start threads for this, and a forked child process would crash when it ends them.
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            # Clients learn only one port. If the system chose it for the first address, use the
            # same port for the other addresses.
            chosen = port or (sockets[0].getsockname()[1] if sockets else 0)
            where = (address[0], chosen, *address[2:])
            sockets.append(socket.create_server(where, family=family, backlog=_BACKLOG))
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


async def listen_at_both(broker: Port, older: Port, options: BrokerOptions) -> None:
    """Listen on the broker's port, and on the port minus 2, which Java clients before RocketMQ 4.6
    use.

    - If the system chooses the broker's port, the function tries again until the lower port is free
      too.
    - If the options name the broker's port, but the lower port cannot be used, the function only
      logs a warning.
    """
    for left in reversed(range(_TRIES)):
        await broker.listen(options.port, "--listen")
        lower = broker.port - OLDER_CLIENTS
        try:
            if lower <= 0 or lower == options.name_port:
                raise UsageError(f"port {lower} is not free")
            await older.listen(lower, "--listen")
        except UsageError as error:
            if options.port == 0 and left:
                broker.stop_listening()
                continue
            logger.warning(
                "Java clients before RocketMQ 4.6 cannot send to this broker: they send to the "
                "port two below its own. %s",
                error,
            )
        return
