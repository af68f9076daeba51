"""Fetches the tables of a master's ``config/`` into a slave's store (``SlaveSynchronize``).

One connection for each time, and RocketMQ's four requests in its order. What one table lacks keeps
none of the others: it is a problem that is told, and tried again the next time.
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

from logquarry.disk.config_file import ConfigTables
from logquarry.disk.lifetime import abandon_in_children, stays
from logquarry.disk.service import Flag
from logquarry.errors import LogquarryError, ProtocolViolation, StoreError, UsageError
from logquarry.protocol.remoting import RemotingCommand, RemotingReader, ResponseCode, encode
from logquarry.replication.config_server import REQUESTS, TableRequest
from logquarry.replication.wire import Surroundings, address_text
from logquarry.store.message_store import StoreWriter

logger = logging.getLogger(__name__)

_RECEIVE: Final = 1 << 16
_LONGEST_REMARK: Final = 200
_END_SECONDS: Final = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSyncOptions:
    """How tables are fetched.

    Attributes:
        interval: seconds between two times.
        timeout: seconds for connecting, and for each answer.
        tls: connects by TLS,
        server_name: to a master of this name; default: its host.
    """

    interval: float = 10.0
    timeout: float = 3.0
    tls: ssl.SSLContext | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if self.interval <= 0 or self.timeout <= 0:
            raise UsageError("interval and timeout are seconds above 0")


class ConfigSynced(NamedTuple):
    """What came of one time.

    Attributes:
        written: files of ``config/`` that were written: they said something else before.
        missing: files that the master has not got; what is here stays.
        problems: tables that were not had, with the reason; what is here stays.
    """

    written: tuple[str, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]


class ConfigSyncStatus(NamedTuple):
    """How it goes.

    Attributes:
        master: who is asked.
        times: how often all tables were asked for.
        last: what came of the last of these times; None before the first.
        trouble: what is wrong now; empty where all is well.
        has_ended: whether it has ended for good.
    """

    master: str
    times: int
    last: ConfigSynced | None
    trouble: str
    has_ended: bool


class _Asker:
    """One connection to a master's broker: asks, and waits for the answer. For one thread."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._connection = connection
        self._timeout = timeout_s
        self._reader = RemotingReader()
        self._opaque = 0

    def ask(self, code: int) -> RemotingCommand:
        """The answer to a request.

        Raises:
            OSError: if there is none in time, or the connection ends.
            ProtocolViolation: if something else comes.
        """
        deadline = time.monotonic() + self._timeout
        self._opaque += 1
        self._connection.settimeout(self._timeout)
        self._connection.sendall(encode(RemotingCommand(code=code, opaque=self._opaque)))
        while (left := deadline - time.monotonic()) > 0:
            self._connection.settimeout(left)
            data = self._connection.recv(_RECEIVE)
            if not data:
                raise ConnectionError("the master's broker ended the connection")
            # What answers nothing that was asked is passed over, as RocketMQ does.
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
    surroundings: Surroundings | None = None,
) -> ConfigSynced:
    """Fetch the tables of a master's ``config/`` once, now.

    Args:
        store: the slave's store, open to be written, as a SLAVE.
        host: of the master's broker: RocketMQ's, or a
            :class:`~logquarry.replication.config_server.ConfigServer`.
        port: of the same.
        options: how they are fetched.
        surroundings: sockets.

    Returns:
        What came of it. What is fetched is on the disk.

    Raises:
        OSError: if the master's broker cannot be reached, does not answer, or ends the connection.
        ProtocolViolation: if it speaks another protocol.
        StoreUnavailable: if the store cannot be written.
        UsageError: if the store is no slave.
    """
    return ConfigSync(store, host, port, options=options, surroundings=surroundings).sync()


class ConfigSync:
    """Fetches the tables of a master's ``config/`` into a slave's store again and again.

    From :meth:`start` (or the ``with`` block) on, at once and then at an interval. Close it before
    the store.

    Args:
        store: the slave's store, open to be written, as a SLAVE.
        host: of the master's broker.
        port: of the same.
        options: how they are fetched.
        surroundings: sockets.

    Attributes:
        error: why it has ended for good, None where it has not.

    Raises:
        StoreUnavailable: if the store is not open to be written.
        UsageError: if it is no slave.
    """

    def __init__(
        self,
        store: StoreWriter,
        host: str,
        port: int,
        *,
        options: ConfigSyncOptions | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._tables: ConfigTables = store.config_tables()
        self._host, self._port = host, port
        self._options = options or ConfigSyncOptions()
        self._surroundings = surroundings or Surroundings()
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
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Fetch no more; once more does nothing."""
        self._is_closing = True
        self._wake.set()
        connection = self._connection
        if connection is not None:
            # Whoever waits for an answer finds the connection at its end.
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
        """See :mod:`logquarry.disk.lifetime`."""
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    @property
    def master(self) -> str:
        """host:port."""
        return address_text((self._host, self._port))

    def status(self) -> ConfigSyncStatus:
        """How it goes right now."""
        return ConfigSyncStatus(
            self.master, self._times, self._last, self._trouble, self.error is not None
        )

    # ------------------------------------------------------------------------------------ at work
    def _run(self) -> None:
        while not self._is_closing:
            try:
                self.sync()
            except StoreError as error:
                self.error = error
                logger.error("config/ is fetched no more: %s", error)
                return
            except (OSError, ProtocolViolation) as error:
                if not self._is_closing:
                    logger.info("%s: config/ is not fetched: %s", self.master, error)
            except Exception as error:
                logger.exception("fetching config/ failed")
                self.error = LogquarryError(f"fetching config/ failed: {error!r}")
                return
            self._wake.take(self._options.interval)

    def sync(self) -> ConfigSynced:
        """Fetch now, whoever calls, and wait for it; see :func:`sync_config`."""
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
        connection = self._surroundings.connect(self._host, self._port, options.timeout)
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
                    raise ConnectionError("it was closed")
                self._take(request, asker.ask(request.code), written, missing, problems)
        finally:
            self._connection = None
            connection.close()
        for problem in problems:
            logger.warning("%s: %s", self.master, problem)
        return ConfigSynced(tuple(written), tuple(missing), tuple(problems))

    def _take(
        self,
        request: TableRequest,
        answer: RemotingCommand,
        written: list[str],
        missing: list[str],
        problems: list[str],
    ) -> None:
        name = request.table.file
        if answer.code != ResponseCode.SUCCESS:
            if answer.code == ResponseCode.SYSTEM_ERROR and answer.remark == request.nothing:
                missing.append(name)
            else:
                remark = (answer.remark or "nothing")[:_LONGEST_REMARK]
                problems.append(f"{name}: the master refuses, code {answer.code}: {remark}")
            return
        try:
            if self._tables.take(request.table, answer.body):
                written.append(name)
        # The decoders check what they read, but a master is not to end its slave.
        except (ValueError, TypeError, RecursionError) as error:
            problems.append(f"{name}: what the master sends cannot be read: {error}")
