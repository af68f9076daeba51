"""Listens on the ports of a broker: its own port, the one for older clients, the name server's."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Final

from logquarry.broker.connection import Connection, Handler, Handshake, Request
from logquarry.broker.core import Core
from logquarry.broker.options import BrokerOptions, listen_error
from logquarry.errors import UsageError

logger = logging.getLogger(__name__)

OLDER_CLIENTS: Final = 2
"""The port for older clients is this much below the broker's (``MixAll.brokerVIPChannel``)."""
_TRIES: Final = 20
_BACKLOG: Final = 1_024


class Port:
    """One listening port.

    Attributes:
        port: its number; 0 if the broker does not listen there.
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

    async def listen(self, port: int, option: str) -> None:
        """Listen at a port; 0: the system chooses."""
        options = self._core.options
        try:
            sockets = await asyncio.to_thread(_bound, options.host, port)
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
        """Accept no further connections; open connections stay."""
        for server in self._servers:
            server.close()

    def opened(self, connection: Connection) -> None:
        """See :class:`logquarry.broker.connection.Server`."""
        self.connections.add(connection)
        if len(self.connections) > self._core.options.max_connections:
            logger.warning("%s: too many connections", connection.address)
            connection.abort()

    def closed(self, connection: Connection) -> None:
        """See :class:`logquarry.broker.connection.Server`."""
        self.connections.discard(connection)
        self._core.clients.disconnected(connection)
        self._disconnected(connection)

    def admit(self, request: Request) -> None:
        """See :class:`logquarry.broker.connection.Server`."""
        self._core.counts.requests[request.command.code] += 1
        acl = self._core.options.acl
        if acl is not None:
            request.account = acl.admit(request.command, request.fields)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Make a socket for each address of a host.

    The loop must not resolve the host: libuv would start threads for it, and a forked child would
    crash when it ends them.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            sockets.append(socket.create_server(address, family=family, backlog=_BACKLOG))
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


async def listen_at_both(broker: Port, older: Port, options: BrokerOptions) -> None:
    """Listen at the broker's port, and for Java clients before 4.6 at the port two below it.

    If the system chooses the broker's port, both ports must be free. If you choose it and the lower
    port is in use, the broker logs this and continues: newer clients do not need that port.
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
