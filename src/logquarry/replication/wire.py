"""Sockets that never wait, plain or TLS, what wakes those who watch them, and the waiting itself.

Master and slave are written as generators that say what they wait for. :func:`drive` waits with
the system; a simulation goes on as soon as its own time has come.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import threading
from collections import deque
from collections.abc import Generator, Sequence
from itertools import islice
from typing import Final

from logquarry.disk.service import monotonic_ms
from logquarry.protocol.ha import Buffer

_AT_ONCE: Final = 64

Found = list[tuple[selectors.SelectorKey, int]]
"""What a selector gives."""
Waits = Generator[tuple[selectors.BaseSelector, float], Found, None]
"""Work that gives a selector and how many seconds it waits at most, and goes on with what came."""


def drive(waits: Waits) -> None:
    """Do some work to its end, and wait whenever it wants to."""
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
    """Wakes a thread that waits in a selector. Any thread may set it.

    Setting costs a look where the thread is at work: only when it is about to wait it asks to be
    woken (:meth:`arm`), and looks once more at what there is to do before it does.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_armed = False
        self._use = threading.Lock()

    def fileno(self) -> int:
        """For the selector."""
        return self._descriptor

    def arm(self) -> None:
        """Ask to be woken from here on."""
        self._is_armed = True

    def take(self) -> None:
        """Be woken no more, until the next :meth:`arm`."""
        self._is_armed = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def is_unset(self) -> bool:
        """Whether somebody wants to be woken."""
        return self._is_armed

    def set(self) -> None:
        """Wake whoever asked for it."""
        self._is_armed = False
        self.force()

    def force(self) -> None:
        """Wake the thread now, or when it next waits."""
        with self._use, contextlib.suppress(OSError):
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Let go of the descriptor."""
        with self._use:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


class Surroundings:
    """What master and slave stand on: the time and sockets. A simulation has its own."""

    def now_ms(self) -> int:
        """The time, by a clock that nobody sets."""
        return monotonic_ms()

    def listen(self, host: str, port: int) -> socket.socket:
        """A socket that listens, and never waits.

        Raises:
            OSError: if it cannot.
        """
        _require_name(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=64)
        listener.setblocking(False)
        return listener

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """A connected socket.

        Raises:
            OSError: if there is none.
        """
        _require_name(host)
        return socket.create_connection((host, port), timeout_s)

    def selector(self) -> selectors.BaseSelector:
        """What watches sockets."""
        return selectors.DefaultSelector()

    def wake(self) -> Wake:
        """What wakes those who watch them."""
        return Wake()


class Wire:
    """One connected socket. Any thread may use it; none waits.

    Args:
        connection: the socket.
        tls: makes it a TLS one.
        server_name: whom a client expects.

    Attributes:
        peer: the other side's address, for people.
        wants_write: whether something is to be sent that the socket did not take yet.
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
        """For the selector."""
        return self._socket.fileno()

    @property
    def is_ready(self) -> bool:
        """Whether a TLS handshake is done; of plain sockets always."""
        return self._is_shaken

    def handshake(self) -> bool:
        """Go on with the TLS handshake, as far as it goes; whether it is done.

        Raises:
            OSError: if the other side cannot do it.
        """
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
        """Bytes that have come: how many, 0 at the end, None if there are none now.

        Raises:
            OSError: if the connection is broken.
        """
        with self._use:
            try:
                return self._socket.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return None

    def send(self, parts: Sequence[Buffer]) -> bool:
        """Send these behind what is to be sent already; whether all of it went.

        They are not copied, and must not change before it has.

        Raises:
            OSError: if the connection is broken.
        """
        with self._use:
            self._out.extend(part for part in parts if part)
            if not self._is_shaken:
                return not self._out
            try:
                while self._out:
                    self._sent(self._send_some())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self.wants_write = True
                return False
            self.wants_write = False
            return True

    def _send_some(self) -> int:
        if self._is_tls:
            return self._socket.send(self._out[0])
        return self._socket.sendmsg(list(islice(self._out, _AT_ONCE)))

    def _sent(self, count: int) -> None:
        while count:
            first = self._out[0]
            if count < len(first):
                self._out[0] = memoryview(first)[count:]
                return
            count -= len(first)
            self._out.popleft()

    def abandon(self) -> None:
        """Let go of the descriptor in a forked child, where the lock may be held for ever."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def close(self) -> None:
        """Close the socket, and forget what was to be sent."""
        with self._use, contextlib.suppress(OSError):
            self._out.clear()
            self._socket.close()


def _require_name(host: str) -> None:
    """Raise OSError for what no host can be called: looking it up raises something else."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name of a host") from error


def address_text(address: tuple[object, ...] | str) -> str:
    """host:port, with brackets about an IPv6 host."""
    if not isinstance(address, tuple):
        return str(address)
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
