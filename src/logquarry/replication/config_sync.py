"""Copies the tables of a master's ``config/`` into a slave's store (``SlaveSynchronize``).

Each copy uses one connection. If one table fails, the copy continues with the next table; the next
copy tries the failed table again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from logquarry import arguments
from logquarry.disk.config_file import ConfigTables
from logquarry.disk.service import Flag, abandon_in_children, stays
from logquarry.errors import LogquarryError, ProtocolViolation, StoreError, UsageError
from logquarry.protocol.remoting import RemotingCommand, RemotingReader, encode
from logquarry.protocol.remoting_codes import ResponseCode
from logquarry.replication.config_server import REQUESTS
from logquarry.replication.wire import Surroundings, address_text, require_peer
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
        timeout: seconds to wait for the connection, and for each answer.
        tls: None for no TLS.
        server_name: the name in the master's certificate; None for the master's host.
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
        written: files of ``config/`` that the copy has written, because their content differed.
        missing: files that the master does not have; the slave keeps its files.
        problems: tables that failed, with the reason; the slave keeps its files.
    """

    written: tuple[str, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]


class ConfigSyncStatus(NamedTuple):
    """State of a ConfigSync.

    Attributes:
        master: host:port of the master's broker.
        times: number of copies.
        last: result of the last copy; None before the first copy.
        trouble: the reason why the last copy failed; empty if it succeeded.
        has_ended: whether an error has ended the copying.
    """

    master: str
    times: int
    last: ConfigSynced | None
    trouble: str
    has_ended: bool


class _Asker:
    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout = timeout_s
        self._reader = RemotingReader()
        self._opaque = 0

    def ask(self, code: int) -> RemotingCommand:
        # Raises OSError if the broker does not answer in time, and ProtocolViolation for invalid
        # bytes.
        deadline = time.monotonic() + self._timeout
        self._opaque += 1
        self._connection.settimeout(self._timeout)
        self._connection.sendall(encode(RemotingCommand(code=code, opaque=self._opaque)))
        while (left := deadline - time.monotonic()) > 0:
            self._connection.settimeout(left)
            data = self._connection.recv(_RECEIVE)
            if not data:
                raise ConnectionError("the master's broker ended the connection")
            # Like RocketMQ, skip answers to other requests.
            for command in self._reader.receive_data(data):
                if command.is_response and command.opaque == self._opaque:
                    return command
        raise TimeoutError(f"no answer to request {code} in {self._timeout:g} s")


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
        StoreUnavailable: if the store cannot be written.
        UsageError: if the store is not a slave.
    """
    return ConfigSync(store, host, port, options=options).sync()


class ConfigSync:
    """Copies the tables of a master's ``config/`` into a slave's store, at an interval.

    The thread makes the first copy after :meth:`start`, or at the start of the ``with`` block.
    Close this object before you close the store, which must be open for writing with
    ``broker_role`` SLAVE.

    Attributes:
        error: the error that ended the copying; None while the copying continues.

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
        self._is_closing = False
        self._wake = Flag()
        self.error: LogquarryError | None = None
        self._thread = threading.Thread(target=self._run, name="logquarry-config-sync", daemon=True)
        abandon_in_children(self)

    # -------------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Start the thread that copies."""
        self._thread.start()

    def close(self) -> None:
        """Stop copying. A second call does nothing."""
        self._is_closing = True
        self._wake.set()
        connection = self._connection
        if connection is not None:
            # End the connection, because the thread may wait for an answer.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(_END_SECONDS)
        stays(self)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def abandon_in_child(self) -> None:
        """Close the socket in a forked child; see :mod:`logquarry.disk.service`."""
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
                self.error = error
                logger.error("copying of config/ ends: %s", error)
                return
            except (OSError, ProtocolViolation) as error:
                if not self._is_closing:
                    logger.info("%s: config/ was not copied: %s", self.master, error)
            except Exception as error:
                logger.exception("copying config/ failed")
                self.error = LogquarryError(f"copying config/ failed: {error!r}")
                return
            self._wake.take(self._options.interval)

    def sync(self) -> ConfigSynced:
        """Copy the tables now, like :func:`sync_config`. Thread-safe."""
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
            asker = _Asker(connection, options.timeout)
            written: list[str] = []
            missing: list[str] = []
            problems: list[str] = []
            for request in REQUESTS:
                if self._is_closing:
                    raise ConnectionError("the copying was closed")
                answer = asker.ask(request.code)
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
                # The decoders check their input; catch invalid input that a decoder misses.
                except (ValueError, TypeError, RecursionError) as error:
                    problems.append(f"{name}: the master's file is invalid: {error}")
        finally:
            self._connection = None
            connection.close()
        for problem in problems:
            logger.warning("%s: %s", self.master, problem)
        return ConfigSynced(tuple(written), tuple(missing), tuple(problems))
