"""Answers to what a slave's broker asks its master's, from the files in a store's ``config/``.

RocketMQ's four requests (``AdminBrokerProcessor``) get what the files say; every other one is "not
supported": nothing can be changed from outside. A file is read once for all who ask, until it
changes.
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
from typing import Any, Final, NamedTuple

from logquarry.disk.config_file import (
    CONSUMER_OFFSETS,
    DELAY_OFFSETS,
    SUBSCRIPTION_GROUPS,
    TOPICS,
    ConfigFile,
    ConfigTable,
    config_file,
)
from logquarry.disk.disk import LocalDisk
from logquarry.errors import ProtocolViolation, UsageError
from logquarry.protocol.remoting import (
    LARGEST_FRAME,
    RemotingCommand,
    RemotingReader,
    RequestCode,
    ResponseCode,
    encode,
    encode_head,
)
from logquarry.replication.server import LONGEST_WAIT_MS, Peer, Server, ServerOptions
from logquarry.replication.wire import Surroundings, Wire, address_text

logger = logging.getLogger(__name__)


class TableRequest(NamedTuple):
    """How a table is asked for.

    Attributes:
        code: the request.
        table: the table.
        nothing: the remark with which a broker that has none refuses.
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
"""In the order in which a RocketMQ slave asks."""
_BY_CODE: Final = {request.code.value: request for request in REQUESTS}

_SETTLED_NS: Final = 2_000_000_000
"""A file may change again, and its time not, if it is younger."""
_LARGEST_DOCUMENT: Final = LARGEST_FRAME - (1 << 12)
"""The rest is for a frame's header."""

_Signature = tuple[int, int, int]
"""Another one when a file was written: inode, time of its last change, bytes."""


class _Found(NamedTuple):
    """What a table's file was found to say.

    Attributes:
        signatures: of the file and of the one before it, then.
        document: that; None where there is none.
        is_spoilt: whether there is a file that cannot be served.
        is_sure: whether each file that was looked at could be read: what could not may be the next
            time, without another signature.
    """

    signatures: tuple[_Signature | None, ...]
    document: bytes | None
    is_spoilt: bool
    is_sure: bool


class ConfigAnswers:
    """Answers from the files of one store. For one thread.

    Args:
        root: the store's folder.

    Attributes:
        given: how many answers held a table.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = LocalDisk()
        self._known: dict[str, _Found] = {}
        self.given = 0

    def answer(self, command: RemotingCommand) -> list[bytes]:
        """The parts of the frame that answers a request."""
        request = _BY_CODE.get(command.code)
        if request is None:
            remark = f" request type {command.code} not supported"
            return [encode(command.answer(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark))]
        found = self._found(request.table)
        if found.document is None:
            # What is wrong with a file is nobody else's business.
            name = request.table.file
            remark = f"{name} cannot be served" if found.is_spoilt else request.nothing
            return [encode(command.answer(ResponseCode.SYSTEM_ERROR, remark=remark))]
        answer = command.answer(ResponseCode.SUCCESS, body=found.document)
        self.given += 1
        return [encode_head(answer), answer.body]

    def _found(self, table: ConfigTable) -> _Found:
        """What a table's file says; it is read again where it may say something else."""
        file = config_file(self._disk, self._root, table)
        now = time.time_ns()
        signatures = (_signature(file.path), _signature(file.backup))
        known = self._known.get(table.file)
        if known is None or known.signatures != signatures:
            known = _load(file, table, signatures)
            settled = (found is None or now - found[1] > _SETTLED_NS for found in signatures)
            if known.is_sure and all(settled):
                self._known[table.file] = known
        return known


def _load(
    file: ConfigFile[Any], table: ConfigTable, signatures: tuple[_Signature | None, ...]
) -> _Found:
    """Read a table's file, or the one before it."""
    loaded = file.load()
    if loaded.value is None:
        return _Found(signatures, None, bool(loaded.problems), not loaded.problems)
    try:
        document = table.encode(loaded.value).encode("utf-8", "backslashreplace")
    except ValueError as error:
        logger.warning("%s is not served: %s", loaded.path, error)
        return _Found(signatures, None, True, True)
    if len(document) > _LARGEST_DOCUMENT:
        logger.warning("%s is not served: it is too large for a frame", loaded.path)
        return _Found(signatures, None, True, True)
    return _Found(signatures, document, False, not loaded.problems)


def _signature(path: Path) -> _Signature | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


# --------------------------------------------------------------------------------------------------
# What a slave's broker asks its master's: the tables of a store's ``config/``.
#
# Sockets about :mod:`logquarry.replication.config_server`. A RocketMQ slave asks for the topics at
# another port, two below ("fast", or VIP channel), so this listens at both.
#
# Nobody gets a second answer before the first has gone, and nothing is read of whoever has an
# answer to come: what a peer sends costs no more than a request.

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
