"""Sends the files of a store's ``config/`` to slaves, as RocketMQ's ``AdminBrokerProcessor`` does.

The server answers only four of RocketMQ's requests, one for each table (the content of one file).
To limit memory, the server reads no bytes from a peer until the previous answer to this peer is
sent.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from logquarry import arguments
from logquarry.disk.config_file import (
    CONSUMER_OFFSETS,
    DELAY_OFFSETS,
    SUBSCRIPTION_GROUPS,
    TOPICS,
    ConfigFile,
    ConfigTable,
)
from logquarry.disk.disk import Disk
from logquarry.errors import UsageError
from logquarry.protocol import remoting
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from logquarry.replication.server import LONGEST_WAIT_MS, Peer, Server, ServerOptions
from logquarry.replication.wire import Surroundings, Wire, address_text, require_address

logger = logging.getLogger(__name__)


class TableRequest(NamedTuple):
    """A request for a table. ``nothing`` is the error text in RocketMQ's answer if the table does
    not exist.
    """

    code: RequestCode
    table: ConfigTable
    nothing: str


REQUESTS: Final = (
    TableRequest(RequestCode.GET_ALL_TOPIC_CONFIG, TOPICS, "No topic in this broker"),
    TableRequest(
        RequestCode.GET_ALL_CONSUMER_OFFSET, CONSUMER_OFFSETS, "No consumer offset in this broker"
    ),
    TableRequest(RequestCode.GET_ALL_DELAY_OFFSET, DELAY_OFFSETS, "No delay offset in this broker"),
    TableRequest(
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        SUBSCRIPTION_GROUPS,
        "No subscription group in this broker",
    ),
)
"""The requests for tables, in the order in which a RocketMQ slave sends them."""
_BY_CODE: Final = {request.code.value: request for request in REQUESTS}

_SETTLED_NS: Final = 2_000_000_000
"""The server keeps a file's content in memory only if the file's last change is at least this many
nanoseconds old. If the last change is more recent, another change could leave the modification time
as it is.
"""
_LARGEST_DOCUMENT: Final = remoting.LARGEST_FRAME - (1 << 12)
"""Maximum number of bytes of a table as JSON. A frame must have room for the table and a header."""

_Signature = tuple[int, int, int]
"""Inode, modification time and size of a file. A write changes at least one of the three values.
Only a write directly after another write may change none (see _SETTLED_NS).
"""


class _Found(NamedTuple):
    # ``document`` is None if there is no table to send. ``is_sure`` is False if the file could not
    # be read. In this case, the server reads the file again at the next request, even if the
    # signature of the file is the same.

    signatures: tuple[_Signature | None, ...]
    document: bytes | None
    is_spoilt: bool
    is_sure: bool


def _load(
    file: ConfigFile, table: ConfigTable, signatures: tuple[_Signature | None, ...]
) -> _Found:
    # A slave that gets the older document asks again.
    loaded = file.load(skips_unopened=True)
    if loaded.value is None:
        return _Found(signatures, None, bool(loaded.problems), not loaded.problems)
    try:
        document = table.encode(loaded.value).encode("utf-8", "backslashreplace")
    except ValueError as error:
        logger.warning("%s is not served: %s", loaded.path, error)
        return _Found(signatures, None, True, True)
    if len(document) > _LARGEST_DOCUMENT:
        logger.warning(
            "%s is not served: it has %d bytes, and a frame holds at most %d",
            loaded.path,
            len(document),
            _LARGEST_DOCUMENT,
        )
        return _Found(signatures, None, True, True)
    return _Found(signatures, document, False, not loaded.problems)


def _signature(path: Path) -> _Signature | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


# --------------------------------------------------------------------------------------- the server
FAST_PORT: Final = -2
"""A RocketMQ slave sends its request for topics to the broker's port minus 2 (its VIP channel)."""
_LARGEST_REQUEST: Final = 1 << 16
_READ: Final = 1 << 14
_TRIES: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigServerOptions(ServerOptions):
    """Options of a ConfigServer.

    Attributes:
        idle_ms: the server closes a connection if no request arrives for this many milliseconds
            (``serverChannelMaxIdleTimeSeconds``).
        fast_port: whether to listen at the port minus 2 too, to which RocketMQ slaves send their
            request for topics.
    """

    idle_ms: int = 120_000
    fast_port: bool = True

    def __post_init__(self) -> None:
        # Call the base class by name: super() fails, because dataclass(slots=True) makes a new
        # class.
        ServerOptions.__post_init__(self)
        arguments.count(self.idle_ms, "idle_ms")


class ConfigServerStatus(NamedTuple):
    """State of a ConfigServer.

    Attributes:
        answered: number of answers that contained a table.
        refused: number of connections that were refused, or closed because the peer sent invalid
            bytes.
        has_ended: whether an error has ended the server, so that it no longer answers.
    """

    address: str
    connections: int
    answered: int
    refused: int
    has_ended: bool


class _Asking(Peer):
    __slots__ = ("asked", "has_asked", "heard_ms", "reader")

    def __init__(self, wire: Wire, now_ms: int) -> None:
        super().__init__(wire)
        self.reader = remoting.RemotingReader(_LARGEST_REQUEST)
        self.asked: deque[remoting.RemotingCommand] = deque()
        self.has_asked = False
        self.heard_ms = now_ms


class ConfigServer(Server[_Asking]):
    """Sends the tables of a store's ``config/`` to slaves, both RocketMQ's and logquarry's.

    The constructor opens the port. If ``port`` is 0, the system chooses the port. Call
    :meth:`start` or use a ``with`` block to start answering requests. The store need not be open.

    Raises:
        OSError: if the server cannot listen at the address.
        UsageError: if ``fast_port`` is set, and ``port`` minus 2 is no valid port.
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
        require_address(host, port, options, ConfigServerOptions)
        self._root, self._disk = Path(arguments.path(root, "root")), Disk()
        self._known: dict[str, _Found] = {}
        self._answered = 0
        self._options = options or ConfigServerOptions()
        super().__init__(
            "the server of config/",
            "config",
            lambda sockets: _listeners(sockets, host, port, fast=self._options.fast_port),
            self._options,
            surroundings,
            _READ,
        )

    def status(self) -> ConfigServerStatus:
        """Return the current state."""
        return ConfigServerStatus(
            self.address,
            len(self._peers),
            self._answered,
            self._refused,
            self.error is not None,
        )

    # ------------------------------------------------------------------------------------ serving
    def _serve_all(self) -> int:
        now = self._surroundings.now_ms()
        waits = [self._serve(peer, now) for peer in list(self._peers)]
        return min(waits, default=LONGEST_WAIT_MS)

    def _serve(self, peer: _Asking, now: int) -> int:
        # If the previous answer was sent completely, answers the peer's next request. Returns the
        # number of milliseconds until the next call.
        wire = peer.wire
        left = peer.heard_ms + self._options.idle_ms - now
        if left <= 0:
            self._drop(peer, f"it sent no request for {self._options.idle_ms} ms")
            return LONGEST_WAIT_MS
        try:
            if (wire.is_ready or wire.handshake()) and wire.send(()) and peer.asked:
                command = peer.asked.popleft()
                peer.has_asked = True
                peer.heard_ms = now
                if not (command.is_response or command.is_oneway):
                    wire.send(self._answer(command))
                # Read now: TLS may have buffered further bytes, which the selector does not report.
                self._read_from(peer)
                left = 0
            if peer in self._peers:
                # While an answer is not fully sent, do not read: wait only until the socket is
                # writable.
                wants_write = wire.wants_write
                self._watch(peer, selectors.EVENT_WRITE if wants_write else selectors.EVENT_READ)
        except (OSError, ValueError) as error:
            self._drop(peer, str(error))
        return min(left, LONGEST_WAIT_MS)

    def _read(self, peer: _Asking) -> None:
        while not peer.asked and not peer.wire.wants_write:
            count = peer.wire.receive_into(self._buffer)
            if count is None:
                return
            if count == 0:
                raise OSError("it ended the connection")
            peer.asked.extend(peer.reader.receive_data(self._buffer[:count]))

    # ------------------------------------------------------------------------------------ answers
    def _answer(self, command: remoting.RemotingCommand) -> list[bytes]:
        """Return the frame of the answer, as buffers to send one after the other."""
        request = _BY_CODE.get(command.code)
        if request is None:
            code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            remark = f" request type {command.code} not supported"
            return [remoting.encode(command.answer(code, remark=remark))]
        found = self._found(request.table)
        if found.document is None:
            # Do not send the reason why the file is invalid: the peer must not learn it.
            name = request.table.file
            remark = f"{name} cannot be served" if found.is_spoilt else request.nothing
            return [remoting.encode(command.answer(ResponseCode.SYSTEM_ERROR, remark=remark))]
        answer = command.answer(ResponseCode.SUCCESS, body=found.document)
        self._answered += 1
        return [remoting.encode_head(answer), answer.body]

    def _found(self, table: ConfigTable) -> _Found:
        file = ConfigFile(self._disk, self._root, table)
        now = time.time_ns()
        signatures = (_signature(file.path), _signature(file.backup))
        known = self._known.get(table.file)
        if known is None or known.signatures != signatures:
            known = _load(file, table, signatures)
            settled = (found is None or now - found[1] > _SETTLED_NS for found in signatures)
            if known.is_sure and all(settled):
                self._known[table.file] = known
        return known

    # -------------------------------------------------------------------------------- connections
    def _new(self, wire: Wire) -> _Asking:
        return _Asking(wire, self._surroundings.now_ms())

    def _silence_of(self, peer: _Asking) -> str | None:
        return None if peer.has_asked else "it sent no request"


def _listeners(sockets: Surroundings, host: str, port: int, *, fast: bool) -> list[socket.socket]:
    if not fast:
        return [sockets.listen(host, port)]
    if 0 < port <= -FAST_PORT:
        raise UsageError(f"port {port}: there is no port two below, at which slaves request topics")
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
