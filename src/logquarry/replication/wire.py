"""Non-blocking sockets, with or without TLS, and the loop that waits for their events.

Master and slave run as generators. When they must wait, they yield a selector, and :func:`drive`
waits for its events. A test advances a simulated clock instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice
from typing import Final, Self

from logquarry import arguments
from logquarry.disk.service import abandon_in_children, monotonic_ms, stays
from logquarry.errors import LogquarryError
from logquarry.protocol.ha_messages import Buffer
from logquarry.store.message_store import MessageStore

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 64

Found = list[tuple[selectors.SelectorKey, int]]
"""The result of a selector's ``select``."""
Waits = Generator[tuple[selectors.BaseSelector, float], Found, None]
"""A generator that yields a selector and a timeout in seconds, and receives the
selector's result.
"""


def drive(waits: Waits) -> None:
    """Run a generator to its end. Each time the generator yields a selector, wait for the
    selector's events, and send them to the generator.
    """
    with contextlib.suppress(StopIteration):
        selector, seconds = next(waits)
        while True:
            try:
                found = selector.select(seconds)
            except OSError as error:
                selector, seconds = waits.throw(error)
            else:
                selector, seconds = waits.send(found)


class Wake:
    """Wakes a thread that waits in a selector. Thread-safe.

    The thread calls :meth:`arm` before it checks for work, and is armed until it is woken. A put
    calls :meth:`set` only if :meth:`is_unset` returns True: the thread is then armed. So
    while the thread works, a put needs no system call.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_armed = False
        self._use = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor for the selector."""
        return self._descriptor

    def arm(self) -> None:
        """Arm the thread: the next :meth:`set` wakes it."""
        self._is_armed = True

    def take(self) -> None:
        """Reset the descriptor after a wakeup, so that the selector waits again. Call :meth:`arm`
        before the next wait.
        """
        self._is_armed = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def is_unset(self) -> bool:
        """Whether the thread is armed, and nothing has woken it yet."""
        return self._is_armed

    def set(self) -> None:
        """Wake the thread, and disarm it."""
        self._is_armed = False
        self.force()

    def force(self) -> None:
        """Wake the thread even if it is not armed."""
        with self._use, contextlib.suppress(OSError):
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Close the descriptor. Later calls of :meth:`set` do nothing."""
        with self._use:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


def require_peer(store: object, host: object, port: object, options: object, kind: type) -> None:
    """Check the constructor's arguments of a master, a slave or a ConfigSync."""
    takes = 'a store, opened with MessageStore.open(path, mode="rw")'
    # Accept a store that is open for reading: log_feed later raises a clearer error for such a
    # store. Also accept other objects that have a log_feed, because a test passes a model of a
    # store.
    if not isinstance(store, MessageStore) and not hasattr(store, "log_feed"):
        arguments.refuse_type(store, "store", takes)
    require_address(host, port, options, kind)


def require_address(host: object, port: object, options: object, kind: type) -> None:
    """Check the address and the options of a server or client."""
    arguments.text(host, "host", takes="the name or address of a host")
    arguments.port(port)
    if options is not None:
        arguments.instance(options, "options", kind, kind.__name__)


class Worker(ABC):
    """Base of an object that runs threads. :meth:`start` or a ``with`` block starts the threads.

    Args:
        patience_s: maximum number of seconds that :meth:`close` waits for each thread.
        threads: the name of each thread, and the function that it runs.

    Attributes:
        error: the error that has ended the threads; None while they run.
    """

    def __init__(self, patience_s: float, threads: Mapping[str, Callable[[], None]]) -> None:
        self.error: LogquarryError | None = None
        self._is_closing = False
        self._patience_s = patience_s
        self._threads = [
            threading.Thread(target=run, name=f"logquarry-{name}", daemon=True)
            for name, run in threads.items()
        ]
        abandon_in_children(self)

    def start(self) -> None:
        """Start the threads."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            # The system allows no more threads. Close here, because ``with`` does not call __exit__
            # if __enter__ raises.
            self.close()
            raise

    def close(self) -> None:
        """End all connections and the threads. A second call does nothing."""
        self._is_closing = True
        self._interrupt()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self._patience_s)
                if thread.is_alive():
                    logger.warning("%s has not ended in %s s", thread.name, self._patience_s)
        if self._threads[0].ident is None:
            self._end()
        stays(self)

    @abstractmethod
    def _interrupt(self) -> None:
        """Wake the threads, so that they notice the closing."""

    def _end(self) -> None:  # noqa: B027
        """Clean up when the first thread ends. If no thread was started, :meth:`close` calls this
        method.
        """

    @abstractmethod
    def abandon_in_child(self) -> None:
        """Close the sockets in a forked child; see :mod:`logquarry.disk.service`.

        While the child has a copy of a socket open, the peer does not notice that the connection
        has ended.
        """

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Surroundings:
    """Provides clock and sockets for master and slave. A test passes an object that
    simulates them.
    """

    def now_ms(self) -> int:
        """Return the time of a monotonic clock in milliseconds."""
        return monotonic_ms()

    def listen(self, host: str, port: int) -> socket.socket:
        """Make a non-blocking listening socket."""
        _require_name(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=64)
        listener.setblocking(False)
        return listener

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Connect to an address."""
        _require_name(host)
        return socket.create_connection((host, port), timeout_s)

    def selector(self) -> selectors.BaseSelector:
        """Make a selector."""
        return selectors.DefaultSelector()

    def wake(self) -> Wake:
        """Make a Wake."""
        return Wake()


class Wire:
    """One connected, non-blocking socket. Thread-safe.

    Args:
        server_name: only with TLS: the name that the server's certificate must have. A server
            passes None.

    Attributes:
        wants_write: whether there are bytes to send that the socket does not accept yet.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> None:
        self.peer = address_text(connection.getpeername())
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_tls = tls is not None
        if tls is not None:
            connection = tls.wrap_socket(
                connection,
                server_side=server_name is None,
                do_handshake_on_connect=False,
                server_hostname=server_name,
            )
        self._socket = connection
        self._out: deque[Buffer] = deque()
        self._use = threading.Lock()
        self.wants_write = False
        self._is_shaken = tls is None

    def fileno(self) -> int:
        """Return the descriptor for the selector."""
        return self._socket.fileno()

    @property
    def is_ready(self) -> bool:
        """Whether the TLS handshake is complete. Without TLS, this is always True."""
        return self._is_shaken

    @property
    def events(self) -> int:
        """The events for which the selector waits: always reading; writing if bytes are unsent."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self.wants_write else 0)

    def handshake(self) -> bool:
        """Continue the TLS handshake. Return whether it is complete."""
        assert isinstance(self._socket, ssl.SSLSocket)
        with self._use:
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                self.wants_write = False
                return False
            except ssl.SSLWantWriteError:
                self.wants_write = True
                return False
            self.wants_write = False
            self._is_shaken = True
            return True

    def receive_into(self, buffer: memoryview) -> int | None:
        """Read into a buffer. Return the number of bytes, 0 if the peer has ended the connection,
        None if no bytes have arrived.
        """
        with self._use:
            try:
                return self._socket.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send buffers. First send the rest of the buffers of earlier calls. Return whether all
        bytes are sent now.

        The buffers are not copied: do not change them before they are sent.
        """
        with self._use:
            self._out.extend(part for part in parts if part)
            if not self._is_shaken:
                return not self._out
            try:
                while self._out:
                    if self._is_tls:
                        self._sent(self._socket.send(self._out[0]))
                    else:
                        self._sent(self._socket.sendmsg(list(islice(self._out, _AT_ONCE))))
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.wants_write = True
                return False
            self.wants_write = False
            return True

    def _sent(self, count: int) -> None:
        while count:
            first = self._out[0]
            if count < len(first):
                self._out[0] = memoryview(first)[count:]
                return
            count -= len(first)
            self._out.popleft()

    def abandon(self) -> None:
        """Close the descriptor in a forked child. Do not take the lock, because the lock may stay
        locked forever in the child.
        """
        with contextlib.suppress(OSError):
            self._socket.close()

    def close(self) -> None:
        """Close the socket. Bytes that are not sent yet are dropped."""
        with self._use, contextlib.suppress(OSError):
            self._out.clear()
            self._socket.close()


def _require_name(host: str) -> None:
    # Raise OSError for an invalid host name, for which the resolver would raise UnicodeError.
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a host name") from error


def address_text(address: tuple[object, ...] | str) -> str:
    """Return an address as the text host:port, with brackets around an IPv6 host."""
    if not isinstance(address, tuple):
        return str(address)
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
