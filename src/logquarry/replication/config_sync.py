"""Copies the files of a master's ``config/`` into a slave's store, as RocketMQ's
``SlaveSynchronize`` does.

Each copy requests all tables over one connection; a table is the content of one file. If one table
cannot be copied, the copy continues with the next table, and the next copy tries again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from logquarry import arguments
from logquarry.disk.config_file import ConfigTables
from logquarry.disk.service import Flag
from logquarry.errors import (
    LogquarryError,
    ProtocolViolation,
    StoreError,
    StoreNotFound,
    UsageError,
    is_at_limit,
)
from logquarry.protocol.remoting import RemotingCommand, RemotingReader, encode
from logquarry.protocol.remoting_codes import ResponseCode
from logquarry.replication.config_server import REQUESTS
from logquarry.replication.wire import Surroundings, Worker, address_text, require_peer
from logquarry.store.message_store import StoreWriter

logger = logging.getLogger(__name__)

_RECEIVE: Final = 1 << 16
_LONGEST_REMARK: Final = 200
_END_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSyncOptions:
    """Options of a ConfigSync.

    Attributes:
        interval: seconds between two copies.
        timeout: maximum number of seconds to wait for the connection, and for each answer.
        tls: None for no TLS.
        server_name: the name that the master's certificate must have; None for the master's host.
    """

    interval: float = 10.0
    timeout: float = 3.0
    tls: ssl.SSLContext | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        if self.interval <= 0 or self.timeout <= 0:
            raise UsageError(
                f"interval is {self.interval} s and timeout {self.timeout} s; both must be above 0"
            )


class ConfigSynced(NamedTuple):
    """Result of one copy.

    Attributes:
        written: files of ``config/`` that the copy has written, because the master's content was
            different.
        missing: files that the master does not have. The slave keeps its own copies.
        problems: tables that could not be copied, each with the reason. The slave keeps its own
            tables.
    """

    written: tuple[str, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]


class ConfigSyncStatus(NamedTuple):
    """State of a ConfigSync.

    Attributes:
        master: host:port of the master's broker.
        times: number of successful copies so far.
        last: result of the last successful copy; None before the first one.
        trouble: the reason why the latest copy failed. If the latest copy succeeded: its
            :attr:`ConfigSynced.problems` as text, or an empty text if there were none.
        has_ended: whether an error has stopped the thread that copies.
    """

    master: str
    times: int
    last: ConfigSynced | None
    trouble: str
    has_ended: bool


def _answer(
    connection: socket.socket, reader: RemotingReader, request: RemotingCommand, timeout_s: float
) -> RemotingCommand:
    """Send a request, and return its answer.

    Raise OSError if the broker does not answer in time, and ProtocolViolation if it sends invalid
    bytes.
    """
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    connection.sendall(encode(request))
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        data = connection.recv(_RECEIVE)
        if not data:
            raise ConnectionError("the master's broker ended the connection")
        # Skip answers to other requests, as RocketMQ does.
        for command in reader.receive_data(data):
            if command.is_response and command.opaque == request.opaque:
                return command
    raise TimeoutError(f"no answer to request {request.code} in {timeout_s:g} s")


def _is_passing(error: StoreError) -> bool:
    """Whether a later copy can succeed, because only the opening of a file failed."""
    return is_at_limit(error) or isinstance(error, StoreNotFound)


def sync_config(
    store: StoreWriter,
    host: str,
    port: int,
    *,
    options: ConfigSyncOptions | None = None,
) -> ConfigSynced:
    """Copy the tables of a master's ``config/`` once. Written files are synced.

    Args:
        store: the slave's store, open for writing with ``broker_role`` SLAVE.
        host: host of the master's broker, or of a
            :class:`~logquarry.replication.config_server.ConfigServer`.

    Raises:
        OSError: if the master's broker is unreachable, does not answer, or ends the connection.
        ProtocolViolation: if the broker sends invalid bytes.
        StoreNotFound: if a file of the slave's ``config/`` cannot be opened now.
        StoreUnavailable: if the store cannot be written.
        UsageError: if the store is not a slave.
    """
    return ConfigSync(store, host, port, options=options).sync()


class ConfigSync(Worker):
    """Copies the tables of a master's ``config/`` into a slave's store, at an interval.

    A thread makes the copies. Start it with :meth:`start` or a ``with`` block; it then makes the
    first copy. The store must be open for writing with ``broker_role`` SLAVE. Close this object
    before you close the store.

    Raises:
        StoreUnavailable: if the store is not open for writing.
        UsageError: if the store is not a slave.
    """

    def __init__(
        self,
        store: StoreWriter,
        host: str,
        port: int,
        *,
        options: ConfigSyncOptions | None = None,
    ) -> None:
        require_peer(store, host, port, options, ConfigSyncOptions)
        self._tables: ConfigTables = store.config_tables()
        self._host, self._port = host, port
        self._options = options or ConfigSyncOptions()
        self._syncing = threading.Lock()
        self._connection: socket.socket | None = None
        self._times = 0
        self._last: ConfigSynced | None = None
        self._trouble = ""
        self._wake = Flag()
        super().__init__(_END_SECONDS, {"config-sync": self._run})

    # -------------------------------------------------------------------------------------- life
    def _interrupt(self) -> None:
        self._wake.set()
        connection = self._connection
        if connection is not None:
            # End the connection: the thread may be waiting for an answer over it.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def abandon_in_child(self) -> None:
        """See :meth:`Worker.abandon_in_child`."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    @property
    def master(self) -> str:
        """host:port of the master's broker."""
        return address_text((self._host, self._port))

    def status(self) -> ConfigSyncStatus:
        """Return the current state."""
        return ConfigSyncStatus(
            self.master, self._times, self._last, self._trouble, self.error is not None
        )

    # ------------------------------------------------------------------------------------ copying
    def _run(self) -> None:
        while not self._is_closing:
            try:
                self.sync()
            except StoreError as error:
                if not _is_passing(error):
                    self.error = error
                    logger.error("copying of config/ ends: %s", error)
                    return
                logger.warning("%s: config/ was not copied: %s", self.master, error)
            except (OSError, ProtocolViolation) as error:
                if not self._is_closing:
                    logger.info("%s: config/ was not copied: %s", self.master, error)
            except Exception as error:
                logger.exception("copying config/ failed")
                self.error = LogquarryError(f"copying config/ failed: {error!r}")
                return
            self._wake.take(self._options.interval)

    def sync(self) -> ConfigSynced:
        """Copy all tables now, and return when this is done (:func:`sync_config`). Thread-safe."""
        with self._syncing:
            try:
                synced = self._sync()
            except (OSError, LogquarryError) as error:
                self._trouble = str(error)
                raise
            self._trouble = "; ".join(synced.problems)
            self._last = synced
            self._times += 1
            return synced

    def _sync(self) -> ConfigSynced:
        options = self._options
        connection = Surroundings().connect(self._host, self._port, options.timeout)
        try:
            if options.tls is not None:
                name = options.server_name or self._host
                connection = options.tls.wrap_socket(connection, server_hostname=name)
            self._connection = connection
            reader = RemotingReader()
            written: list[str] = []
            missing: list[str] = []
            problems: list[str] = []
            for opaque, request in enumerate(REQUESTS, 1):
                if self._is_closing:
                    raise ConnectionError("the copying was closed")
                command = RemotingCommand(code=request.code, opaque=opaque)
                answer = _answer(connection, reader, command, options.timeout)
                name = request.table.file
                try:
                    if answer.code == ResponseCode.SUCCESS:
                        if self._tables.take(request.table, answer.body):
                            written.append(name)
                    elif answer.code == ResponseCode.SYSTEM_ERROR and (
                        answer.remark == request.nothing
                    ):
                        missing.append(name)
                    else:
                        remark = (answer.remark or "nothing")[:_LONGEST_REMARK]
                        problems.append(f"{name}: the master refuses, code {answer.code}: {remark}")
                # For most invalid input, the decoders raise ValueError. Some invalid input causes
                # a TypeError or RecursionError.
                except (ValueError, TypeError, RecursionError) as error:
                    problems.append(f"{name}: the master's file is invalid: {error}")
        finally:
            self._connection = None
            connection.close()
        for problem in problems:
            logger.warning("%s: %s", self.master, problem)
        return ConfigSynced(tuple(written), tuple(missing), tuple(problems))
