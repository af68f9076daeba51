"""The state that a broker's modules share: store, threads, tables, clients, counts and ports.

A lane is a thread with a list of jobs. Each job is a call of the store. The lane runs the jobs in
their order, and passes the results to the event loop. If too many jobs wait, the lane does not
accept another job, and the client receives SYSTEM_BUSY.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from logquarry.arguments import Clock
from logquarry.broker.clients import Clients
from logquarry.broker.connection import Connection, Handler, Handshake, Request
from logquarry.broker.limits import NewQueues, SparingLog, UnreadAnswers, is_near_limit
from logquarry.broker.options import BrokerOptions, listen_error
from logquarry.broker.tables import READ, Counts, Tables
from logquarry.errors import UsageError
from logquarry.format.broker_json import TopicConfig
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from logquarry.store.message_store import MessageStore, StoreWriter
from logquarry.systems import file_limit
from logquarry.text import counted

logger = logging.getLogger(__name__)
_refusals = SparingLog(logger)

T = TypeVar("T")
Job = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
"""A function that is called in the event loop with the result of a job, or with its exception."""

_AT_ONCE: Final = 128
"""Maximum number of results that a lane collects before it passes them to the event loop."""


class Mailbox(Generic[T]):
    """Passes items from other threads to the event loop, which handles them in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._is_waking = False

    def post(self, *items: T) -> None:
        """Add items. Wake the event loop unless it was already woken."""
        self._items.extend(items)
        if not self._is_waking:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The event loop is closed, so no client waits for an answer.
                self._items.clear()

    def _deliver(self) -> None:
        # Reset the flag before taking the items, because an item that is added later must wake the
        # loop again.
        self._is_waking = False
        items = self._items
        for _ in range(len(items)):
            item = items.popleft()
            try:
                self._take(item)
            except Exception:
                # Continue with the next item, because other clients wait for the next items.
                logger.exception("the handling of an item from another thread failed")


class Lane:
    """A thread that runs jobs in their order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, capacity: int) -> None:
        self._loop = loop
        self.capacity = capacity
        self._jobs: queue.SimpleQueue[list[tuple[Job, Done]] | None] = queue.SimpleQueue()
        self._new: list[tuple[Job, Done]] = []
        self._mailbox: Mailbox[tuple[Done, Any, BaseException | None]] = Mailbox(loop, self._finish)
        self.waiting = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> bool:
        """Add a job; return False if too many jobs wait already."""
        if self.waiting >= self.capacity:
            return False
        self._add(job, done)
        return True

    def _add(self, job: Job, done: Done) -> None:
        # Collect the jobs of one iteration of the event loop, to wake the thread only once for all
        # of them.
        if not self._new:
            self._loop.call_soon(self._push)
        self.waiting += 1
        self._new.append((job, done))

    def _push(self) -> None:
        if self._new:
            self._jobs.put(self._new)
            self._new = []

    async def run(self, job: Callable[[], T]) -> T:
        """Add a job, even if too many jobs wait. Wait for the job, and return its result."""
        future: asyncio.Future[T] = self._loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._add(job, done)
        return await future

    async def close(self) -> None:
        """Run all jobs that wait, and end the thread."""
        self._push()
        self._jobs.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.005)

    def _finish(self, item: tuple[Done, Any, BaseException | None]) -> None:
        done, result, error = item
        self.waiting -= 1
        done(result, error)

    def _run(self) -> None:
        results: list[tuple[Done, Any, BaseException | None]] = []
        while (jobs := self._jobs.get()) is not None:
            for job, done in jobs:
                try:
                    results.append((done, job(), None))
                except BaseException as error:
                    results.append((done, None, error))
                if len(results) >= _AT_ONCE:
                    self._mailbox.post(*results)
                    results.clear()
            self._mailbox.post(*results)
            results.clear()


_Method = TypeVar("_Method", bound=Callable[..., Any])

BUSY: Final = "[REJECTREQUEST]system busy, start flow control for a while"
_FAQ: Final = "see docs/broker.md"
_PAUSE_SECONDS: Final = 1.0


def log_failure(_: Any, error: BaseException | None) -> None:
    """Log the error if a write of the tables failed. The next change writes the tables again."""
    if error is not None:
        logger.error("%s", error)


class Lanes:
    """The threads that call the store: one for puts, one for gets, and one for all other (slow)
    calls.

    If the store is open only for reading, one thread runs all calls.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, is_writer: bool, capacity: int) -> None:
        self.gets = Lane(loop, "broker-get", capacity)
        self.puts = self.slow = self.gets
        if is_writer:
            self.puts = Lane(loop, "broker-put", capacity)
            self.slow = Lane(loop, "broker-slow", capacity)

    async def close(self) -> None:
        """Run all jobs that wait, then end the threads."""
        for lane in dict.fromkeys((self.puts, self.slow, self.gets)):
            await lane.close()


@dataclass(slots=True)
class Core:
    """The state that the parts of a broker share.

    Attributes:
        writer: the same object as ``store`` if the store is open for writing; None in a read-only
            broker.
        clock: function that returns the current time in milliseconds.
        spawn: runs a coroutine as a task, which the broker cancels when it stops.
        address: the broker's address (host:port), which clients learn from the name server.
        host: the broker's address and port, in the binary form of the hosts in a frame.
        buffered_bytes: number of received bytes of incomplete frames, of all connections.
        new_queues: the queues whose files are open, and the new queues.
        unread_answers: the answers that clients have not read yet, of all connections.
        large_answers: lock of :meth:`reply_large`.
    """

    loop: asyncio.AbstractEventLoop
    options: BrokerOptions
    store: MessageStore
    writer: StoreWriter | None
    lanes: Lanes
    tables: Tables
    clients: Clients
    clock: Clock
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    counts: Counts
    address: str = ""
    host: bytes = bytes(8)
    is_saving: bool = False
    buffered_bytes: int = 0
    new_queues: NewQueues = field(default_factory=NewQueues)
    unread_answers: UnreadAnswers = field(default_factory=UnreadAnswers)
    large_answers: asyncio.Lock = field(default_factory=asyncio.Lock)

    def require_topic(self, name: str, permission: int) -> TopicConfig:
        """Return a topic. Raise Refused if the topic does not exist or lacks a permission."""
        topic = self.tables.topic(name)
        if topic is None:
            raise Refused(
                f"topic[{name[:200]}] not exist, apply first please! {_FAQ}",
                ResponseCode.TOPIC_NOT_EXIST,
            )
        if not topic.perm & permission:
            raise Refused(f"the topic[{name}] is forbidden", ResponseCode.NO_PERMISSION)
        return topic

    def require_queue(self, name: str, queue_id: int, permission: int) -> TopicConfig:
        """Return the topic of a queue.

        Raise Refused if the topic lacks a permission or has no such queue.
        """
        topic = self.require_topic(name, permission)
        # For READ, allow only the queues that can be read. For other permissions, allow all
        # queues that can be read or written. If write_queues was reduced, the removed
        # queues can still have messages and offsets.
        count = topic.read_queues if permission == READ else max(topic[1:3])
        if not 0 <= queue_id < count:
            raise Refused(
                f"queueId[{queue_id}] is illegal, topic:[{name}] has {counted(count, 'queue')}"
            )
        return topic

    def require_group(self, name: str) -> dict[str, Any]:
        """Return the settings of a subscription group.

        If the group is missing, create it; raise Refused if the option ``create_groups`` is off. A
        read-only broker ignores this option: it creates each missing group in memory.
        """
        found = self.tables.groups.get(name)
        if found is None:
            if self.writer is not None and not self.options.create_groups:
                raise Refused(
                    f"subscription group [{name[:200]}] does not exist",
                    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                )
            found = self.tables.create_group(name)
            self.save_soon()
        return found

    def create_topic(self, name: str, queues: int) -> None:
        """Create a topic in memory. The tables are saved soon."""
        self.tables.create_topic(name, queues)
        self.save_soon()

    def save_soon(self) -> None:
        """Let the thread for slow calls save the tables soon.

        One write saves all changes of an iteration of the event loop.
        """
        if not self.is_saving:
            self.is_saving = True
            self.loop.call_soon(self._save)

    def _save(self) -> None:
        self.is_saving = False
        if not self.lanes.slow.submit(self.tables.save, log_failure):
            self.is_saving = True
            self.loop.call_later(_PAUSE_SECONDS, self._save)

    async def slow(self, job: Callable[[], T]) -> T:
        """Call the store in the thread for slow calls, and wait for the result."""
        return await self.lanes.slow.run(job)

    async def reply_large(self, request: Request, make: Callable[[], str]) -> None:
        """Answer with a text that takes long to make; the thread for slow calls makes it.

        As in Java, a surrogate without its pair becomes a question mark. The thread makes only one
        such answer at a time. It makes no answer for a client that does not read its earlier
        answers.
        """
        connection = request.connection
        while connection.is_open:
            await connection.until_writable()
            async with self.large_answers:
                # The client may have disconnected while other answers were made.
                if connection.is_writable and connection.is_open:
                    job = partial(_encoded, make)
                    request.reply(body=await self.slow(job))
                    return

    def queue_key(self, topic: str, queue_id: int) -> dict[str, Any]:
        """Return RocketMQ's document ``MessageQueue`` for a queue of this broker."""
        return {"brokerName": self.options.name, "queueId": queue_id, "topic": topic}


def answers(*codes: RequestCode) -> Callable[[_Method], _Method]:
    """Mark a method of a :class:`Part` as the handler of requests with these codes."""

    def mark(method: _Method) -> _Method:
        vars(method)["codes"] = codes
        return method

    return mark


class Part:
    """A part of the broker that answers some kinds of requests.

    The methods with the decorator :func:`answers` are the handlers of requests.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers of the requests that this part answers, by request code."""
        return {
            code: getattr(self, name)
            for name, method in vars(type(self)).items()
            for code in getattr(method, "codes", ())
        }


def _encoded(make: Callable[[], str]) -> bytes:
    return make().encode("utf-8", "replace")


# ------------------------------------------------------------------------------ ports
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
        self.unread_answers = core.unread_answers
        self.port = 0
        # Each of the broker's three ports may use at most a quarter of the files and sockets that
        # the process may have open. The store needs the rest: without it, puts and the dispatch
        # into queues and index would fail. For the same reason, :meth:`opened` closes a socket with
        # a number near the limit.
        self._most_connections = min(core.options.max_connections, file_limit() // 4)
        # The event loop can accept this many connections before it calls opened() for one of them.
        self._backlog = min(_BACKLOG, file_limit() // 32 + 1)

    async def listen(self, port: int, option: str) -> None:
        """Listen on a port. If it is 0, the system chooses a port."""
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
                backlog=self._backlog,
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
        if len(self.connections) > self._most_connections or is_near_limit(connection.file):
            _refusals.warning(
                "%s: too many connections or open files; the connection is closed. Raise "
                "max_connections or the limit of open files (ulimit -n)",
                connection.address,
            )
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
        self._core.counts.add_request(request.command.code)
        acl = self._core.options.acl
        if acl is not None:
            request.account = acl.admit(request.command, request.fields)


def _bound_at_one_port(host: str, port: int) -> list[socket.socket]:
    for _ in range(_TRIES - 1):
        try:
            return _bound(host, port)
        except OSError as error:
            # The system chose a port that is free at the first address, but another process may use
            # this port at the next address. In this case, try another port.
            if port or error.errno != errno.EADDRINUSE:
                raise
    return _bound(host, port)


def _bound(host: str, port: int) -> list[socket.socket]:
    # Call this function in a thread, because the event loop must not resolve the host. uvloop's
    # library libuv would start threads for this, and if the process forks, the child process would
    # crash when it ends these threads.
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            # Clients learn only one port. If the system chose the port for the first address, use
            # the same port for the other addresses.
            chosen = port or (sockets[0].getsockname()[1] if sockets else 0)
            where = (address[0], chosen, *address[2:])
            sockets.append(socket.create_server(where, family=family, backlog=_BACKLOG))
    except OSError:
        for one in sockets:
            one.close()
        raise
    return sockets


async def listen_at_both(broker: Port, older: Port, options: BrokerOptions) -> None:
    """Listen on the broker's port, and on the port for Java clients before RocketMQ 4.6: the
    broker's port minus 2.

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
                "Java clients before RocketMQ 4.6 cannot send to this broker, because they send "
                "to the broker's port minus 2: %s",
                error,
            )
        return
