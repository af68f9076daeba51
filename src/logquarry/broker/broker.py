"""Starts and stops a broker and its name server in one process, to serve a store.

::

    async with Broker("/data/store") as broker:
        print(broker.name_server)          # give this address to a RocketMQ client

One event loop serves all connections. A few threads call the store (``core.py``).
:func:`background` runs a broker in a thread, for programs that do not use asyncio.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Final, Self, cast

from logquarry import arguments
from logquarry.arguments import Clock, now_ms
from logquarry.broker.admin import Admin, Queries
from logquarry.broker.clients import Clients
from logquarry.broker.connection import Connection, Handler
from logquarry.broker.consumers import Consuming, Progress
from logquarry.broker.core import Core, Lanes, Port, listen_at_both
from logquarry.broker.limits import SparingLog, line_of
from logquarry.broker.names import KeyValues, Names
from logquarry.broker.options import BrokerOptions, address_text, is_wildcard, make_offsets_folder
from logquarry.broker.pull import Pulling
from logquarry.broker.send import Replies, Retrying, Sending, Transactions
from logquarry.broker.statistics import Runtime, Statistics
from logquarry.broker.tables import Counts, Tables
from logquarry.config import StoreConfig, settings_of
from logquarry.errors import LogquarryError, StoreError, UsageError
from logquarry.format.frame import host_bytes
from logquarry.store.message_store import MessageStore, StoreWriter

logger = logging.getLogger(__name__)
_problems = SparingLog(logger)

_HOUSEKEEPING_SECONDS: Final = 5.0
_GRACE_SECONDS: Final = 10.0
_CAPACITY: Final = 100_000
_SMALL: Final = StoreConfig(
    mapped_file_size_commit_log=16 << 20,
    mapped_file_size_consume_queue=20 * 1_000,
    max_hash_slot_num=10_000,
    max_index_num=40_000,
)
"""File sizes of a temporary store."""
_SHM: Final = "/dev/shm"
_LEAST_MEMORY: Final = 1 << 30
"""The broker makes a temporary store in /dev/shm only if it has this many free bytes.

In a container, Docker limits /dev/shm to 64 MiB by default.
"""


class Broker:
    """Serves a store to RocketMQ's clients. A broker is an asynchronous context manager.

    Args:
        path: the folder of the store; created if it is missing. If None, the broker creates a
            temporary store, and deletes it when the broker stops. The temporary store is in
            /dev/shm if 1 GiB is free there.
        options: settings of the broker. By default, it listens only on the loopback address, on
            ports that the system chooses.
        clock: function that returns the current time in milliseconds; it determines when delays
            end, retries begin, and transactions are checked. Tests pass a
            :class:`logquarry.testing.clock.ShiftedClock`.
    """

    def __init__(
        self,
        path: str | PathLike[str] | None = None,
        *,
        options: BrokerOptions | None = None,
        config: StoreConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        if options is None:
            options = BrokerOptions()
        self.options = arguments.instance(options, "options", BrokerOptions, "BrokerOptions")
        self.close_problem: str | None = None
        self._path = path
        self._config = None if config is None else settings_of(config)
        self._clock = clock
        self._temporary: Path | None = None
        self._core: Core | None = None
        self._ports: list[Port] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._housekeeping: list[asyncio.Task[None]] = []
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    # --------------------------------------------------------------------------------------- start
    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Open the store, and serve it. If the call is cancelled, it stops the broker before it
        ends.

        Raises:
            StoreError: if the store cannot be opened.
            UsageError: if the broker is already running, or cannot listen on an address.
        """
        if self._starting is not None:
            raise UsageError("the broker runs already; start another Broker for another store")
        self._starting = asyncio.create_task(self._start())
        try:
            await _to_its_end(self._starting)
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        options = self.options
        if self._path is None and options.read_only:
            raise UsageError("read_only needs the path of a store")
        host = options.advertised()
        store: MessageStore | None = None
        lanes: Lanes | None = None
        try:
            if self._path is None:
                self._temporary = Path(tempfile.mkdtemp(prefix="logquarry-broker-", dir=_memory()))
            store = await asyncio.to_thread(self._open)
            is_writer = isinstance(store, StoreWriter)
            lanes = Lanes(loop, is_writer=is_writer, capacity=_CAPACITY)
            tables = await lanes.slow.run(partial(Tables, store, options))
            core = self._core = Core(
                loop=loop,
                options=options,
                store=store,
                writer=store if isinstance(store, StoreWriter) else None,
                lanes=lanes,
                tables=tables,
                clients=Clients(
                    lambda group: bool(
                        tables.groups.get(group, {}).get("notifyConsumerIdsChangedEnable", True)
                    )
                ),
                clock=self._clock or now_ms,
                spawn=self._spawn,
                counts=Counts(options.most_counts),
            )
            await self._listen(core, host)
        except BaseException:
            if self._core is None:
                if lanes is not None:
                    await lanes.close()
                if store is not None:
                    await asyncio.to_thread(store.close)
            raise

    def _open(self) -> MessageStore:
        options = self.options
        path = self._temporary or self._path
        assert path is not None
        if options.read_only:
            store = MessageStore.open(path, config=self._config, broker=options.name)
            if options.offsets is not None:
                try:
                    make_offsets_folder(options.offsets, store.root)
                except UsageError:
                    store.close()
                    raise
            return store
        config = self._config or (_SMALL if self._temporary is not None else StoreConfig())
        return MessageStore.open(
            path,
            mode="rw",
            config=replace(config, deliver_delayed=True),
            clock=self._clock,
            broker=options.name,
        )

    async def _listen(self, core: Core, host: str) -> None:
        options = self.options
        sending, pulling = Sending(core), Pulling(core)
        self._pulling = pulling
        self._consuming = Consuming(core)
        self._statistics = Statistics(core)
        parts = (
            sending,
            pulling,
            self._consuming,
            Queries(core),
            Retrying(core),
            Transactions(core),
            Replies(core),
            Admin(core, pulling),
            self._statistics,
            Runtime(core, self._statistics),
            Progress(core, self._statistics),
        )
        names = {**Names(core, lambda: server.port).handlers(), **KeyValues(core).handlers()}
        handlers: dict[int, Handler] = dict(names)
        for part in parts:
            handlers |= part.handlers()
        broker, older = (Port(core, handlers, pulling.disconnected) for _ in range(2))
        server = Port(core, names, pulling.disconnected)
        self._ports = [broker, server, older]
        await listen_at_both(broker, older, options)
        core.address = address_text(host, broker.port)
        core.host = _host_bytes(host, broker.port)
        await server.listen(options.name_port, "--name-port")
        works = [self._keep_house(core)]
        if core.writer is None:
            works.append(self._poll(core))
        self._housekeeping = [core.loop.create_task(work) for work in works]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --------------------------------------------------------------------------------------- state
    @property
    def core(self) -> Core:
        """The state that the parts of the broker share.

        Raises UsageError if the broker is not running.
        """
        if self._core is None:
            raise UsageError("the broker is not running")
        return self._core

    @property
    def store(self) -> StoreWriter:
        """The open store. In a read-only broker, the store's methods that write raise
        StoreUnavailable.
        """
        # The cast makes type checkers accept calls of all methods, even if the store is a reader.
        return cast(StoreWriter, self.core.store)

    @property
    def name_server(self) -> str:
        """The address (host:port) of the name server, which clients take as a setting."""
        host = self.core.address.rpartition(":")[0]
        return f"{host}:{self._ports[1].port}"

    @property
    def address(self) -> str:
        """The address (host:port) of the broker."""
        return self.core.address

    @property
    def is_address_chosen(self) -> bool:
        """Whether the broker chose the address for clients, because it listens on all addresses."""
        return self.options.advertise is None and is_wildcard(self.options.host)

    @property
    def connections(self) -> list[Connection]:
        """The open connections."""
        return [connection for port in self._ports for connection in port.connections]

    def lags(self) -> dict[str, int]:
        """Return the lag of each connected group, in messages.

        Expired messages are not counted. A queue whose end is unknown has the lag 0.
        """
        core = self.core
        found: dict[str, int] = {}
        for name, group in core.clients.consumers.items():
            lag = 0
            for topic in group.filters:
                offsets = core.tables.offsets.of(topic, name)
                for queue_id, offset in offsets.items():
                    first, end = self._pulling.bounds_of((topic, queue_id))
                    lag += max(0, end - max(first, offset))
            found[name] = lag
        return found

    # ------------------------------------------------------------------------------- housekeeping
    async def _keep_house(self, core: Core) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            try:
                now = time.monotonic()
                for connection in self.connections:
                    if connection.heard < now - self.options.idle_s:
                        connection.abort()
                for connection in core.clients.expire(now - self.options.expire_s):
                    connection.abort()
                self._consuming.expire_locks()
                self._statistics.sample()
            except Exception as error:
                _problems.warning("housekeeping: %s", line_of(error))
            await _save_tables(core)

    async def _poll(self, core: Core) -> None:
        """Periodically search for messages that another process has put into the store."""
        refresh_at = 0.0
        while True:
            await asyncio.sleep(self.options.poll_ms / 1_000)
            try:
                if core.loop.time() >= refresh_at:
                    refresh_at = core.loop.time() + _HOUSEKEEPING_SECONDS
                    core.tables.add_queues(await core.slow(partial(_refreshed, core.store)))
                keys = self._pulling.held_queues
                for key, end in (await core.slow(partial(_ends, core.store, keys))).items():
                    self._pulling.grown(key, end)
            except Exception as error:
                # After any error, continue: if this task ended, consumers would receive no new
                # messages.
                is_known = isinstance(error, StoreError | OSError)
                reason = str(error) if is_known else line_of(error)
                _problems.warning("%s: %s", core.store.root, reason)

    # ---------------------------------------------------------------------------------------- stop
    async def stop(self) -> None:
        """Finish the requests in progress, and close the store.

        If the call is cancelled, it still does all of this.
        """
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        await _to_its_end(self._stopping)

    async def _stop(self) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])
        try:
            await self._close()
        finally:
            self._starting = self._stopping = None

    async def _close(self) -> None:
        core, self._core = self._core, None
        for task in self._housekeeping:
            task.cancel()
        for port in self._ports:
            port.stop_listening()
        if core is not None:
            self._pulling.close()
            end = core.loop.time() + _GRACE_SECONDS
            for connection in self.connections:
                connection.drain()
            while any(c.pending for c in self.connections) and core.loop.time() < end:
                await asyncio.sleep(0.005)
            for connection in self.connections:
                connection.close()
            for task in self._tasks:
                task.cancel()
            await _save_tables(core)
            await core.lanes.close()
            await asyncio.to_thread(core.store.close)
            if core.writer is not None and self._temporary is None:
                self.close_problem = core.writer.close_problem
        self._ports = []
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = None


async def _to_its_end(task: asyncio.Task[None]) -> None:
    """Wait for a task to end.

    If the call is cancelled, it still waits for the task's end, and then raises CancelledError.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from None if task.cancelled() else task.exception()
    task.result()


def _memory() -> str | None:
    """Return /dev/shm if it has enough space for a temporary store, else None."""
    try:
        found = os.statvfs(_SHM)
    except (OSError, AttributeError):  # Python has no statvfs on Windows.
        return None
    is_free = found.f_bavail * found.f_frsize >= _LEAST_MEMORY
    return _SHM if is_free and os.access(_SHM, os.W_OK | os.X_OK) else None


def _host_bytes(host: str, port: int) -> bytes:
    try:
        return host_bytes(f"[{ipaddress.ip_address(host)}]:{port}")
    except ValueError:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
        except (socket.gaierror, UnicodeError) as error:
            raise UsageError(
                f"the host {host} is unknown; give an address of this machine (--advertise)"
            ) from error
        return host_bytes(f"[{found}]:{port}")


async def _save_tables(core: Core) -> None:
    # Log the error and continue. If it were raised, it would end the housekeeping, or keep a
    # stopping broker from closing its store.
    for what, save in (
        ("the offsets of the groups", core.tables.save_offsets),
        ("topics and groups", core.tables.save),
    ):
        try:
            await core.slow(save)
        except (LogquarryError, OSError) as error:
            _problems.warning("%s were not saved: %s", what, error)
        except Exception as error:
            _problems.warning("%s were not saved: %s", what, line_of(error))


def _refreshed(store: MessageStore) -> tuple[tuple[str, int], ...]:
    store.refresh()
    return store.queues()


def _ends(store: MessageStore, keys: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    found = {}
    for topic, queue_id in keys:
        try:
            end = store.queue_offsets(topic, queue_id).max
            # If a get starts at the known end, the store lists the queue's files again, and finds
            # new entries.
            found[topic, queue_id] = store.get(topic, queue_id, end, 1).max_offset
        except (StoreError, OSError) as error:
            _problems.warning("%s: topic %s, queue %d: %s", store.root, topic, queue_id, error)
    return found


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: of uvloop if it is installed, else of asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@contextmanager
def background(
    path: str | PathLike[str] | None = None,
    *,
    options: BrokerOptions | None = None,
    config: StoreConfig | None = None,
    clock: Clock | None = None,
) -> Iterator[Broker]:
    """Run a broker in a thread while a ``with`` block runs.

    The arguments are those of :class:`Broker`. Other threads may use only these attributes of the
    broker: ``name_server``, ``address``, ``store``. If the process forks inside the block, the
    broker does not run in the child process, and the end of the block does nothing there.
    """
    process = os.getpid()
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="logquarry-broker", daemon=True)
    thread.start()
    try:
        broker = Broker(path, options=options, config=config, clock=clock)
        try:
            asyncio.run_coroutine_threadsafe(broker.start(), loop).result()
            yield broker
        finally:
            # A forked child process has no thread that runs the loop. The parent process still uses
            # the sockets and the store, so leave them open.
            if os.getpid() == process:
                asyncio.run_coroutine_threadsafe(broker.stop(), loop).result()
    finally:
        if os.getpid() == process:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
