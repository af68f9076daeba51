"""A client's connection: receives the client's requests, and sends answers and the broker's own
requests.

If a client does not read its answers, the broker stops reading from the connection, and starts no
more of the client's requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from logquarry.broker.acl import Account
from logquarry.broker.limits import SparingLog, UnreadAnswers, is_near_limit, line_of
from logquarry.broker.options import address_text
from logquarry.errors import LogquarryError, ProtocolViolation
from logquarry.format import broker_json
from logquarry.format.frame import host_bytes
from logquarry.protocol.remoting import (
    Flag,
    RemotingCommand,
    RemotingReader,
    encode_head,
)
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode, parse

logger = logging.getLogger(__name__)
_failures, _violations = SparingLog(logger), SparingLog(logger)

_WRITE_LIMIT: Final = 1 << 20
"""If more bytes than this wait to be sent to a client, the broker stops reading its requests."""
_TLS_PIECE: Final = 64 << 10
"""Maximum number of bytes in one write to a connection with TLS.

If the client does not read, the TLS transport soon stops passing encrypted bytes on to the socket's
transport. It counts all unsent bytes except those that it has passed on. With small pieces, the
uncounted bytes are only a small part of a large answer.
"""
_MOST_PENDING: Final = 2_048
"""Maximum number of requests of one connection that are in progress. Long polls are not counted."""
_MOST_BUFFERED: Final = 1 << 30
"""Maximum total bytes of the incomplete frames of all connections."""
_NO_HOST: Final = bytes(8)
_SUCCESS: Final = int(ResponseCode.SUCCESS)
_HANDSHAKE_SECONDS: Final = 10.0
_MOST_HANDSHAKES: Final = 256


@dataclass(slots=True)
class Request:
    """A request of a client.

    ``account`` is the account that signed the request. ``account`` is None if the broker has no
    accounts, or if the request is not signed and needs no account.
    """

    command: RemotingCommand
    fields: dict[str, Any]
    connection: Connection
    account: Account | None = None

    def require(self, topic: str, permission: str) -> None:
        """Raise Refused if the request's account lacks a permission for a topic."""
        if self.account is not None:
            self.account.require_topic(topic, permission)

    def reply(
        self,
        code: int = _SUCCESS,
        remark: str | None = None,
        *,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> None:
        """Answer the request. For a one-way request, nothing is sent."""
        self.connection.answer(
            self.command,
            self.command.answer(code, remark=remark, fields=fields or {}, body=body),
        )

    def reply_json(self, document: Mapping[str, Any], *, quote_keys: bool = False) -> None:
        """Answer with a JSON document.

        As in Java, a surrogate without its pair becomes a question mark.
        """
        text = broker_json.compact(document, quote_keys=quote_keys)
        self.reply(body=text.encode("utf-8", "replace"))

    def fail(self, error: BaseException) -> None:
        """Answer with the code and the text of an error."""
        code = getattr(error, "code", ResponseCode.SYSTEM_ERROR)
        if not isinstance(error, LogquarryError | Refused):
            code_and_peer = self.command.code, self.connection.address
            _failures.warning("request %d of %s failed: %s", *code_and_peer, line_of(error))
            logger.debug("call stack of the failed request", exc_info=error)
        self.reply(code, str(error) or repr(error))


Handler = Callable[[Request], Awaitable[None] | None]
"""A function that answers a request with :meth:`Request.reply`.

The function may call this method before it returns, or later. If the function returns an awaitable,
the awaitable may call this method.
"""


class Server(Protocol):
    """The server that accepted a connection."""

    handlers: Mapping[int, Handler]
    handshakes: set[Handshake]
    unread_answers: UnreadAnswers

    def opened(self, connection: Connection) -> None:
        """Register a new connection."""

    def closed(self, connection: Connection) -> None:
        """Remove a connection that has ended."""

    def buffer(self, change: int) -> int:
        """Add ``change`` to the bytes of incomplete frames of all connections; return the sum."""

    def admit(self, request: Request) -> None:
        """Count a request. Raise Refused if the client is not allowed to make this request."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, which the server cancels when it stops."""


class Connection(asyncio.Protocol):
    """A client's connection. Only the event loop uses this object.

    Attributes:
        file: the number of the socket; -1 if it is not known.
        host: the client's address and port, in the binary form of the hosts in a frame.
        pending: number of requests in progress, without long polls.
        heard: time at which the last bytes were received, in seconds by ``time.monotonic``.
        is_writable: False while too many bytes wait to be sent, because the client does not read
            its answers.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._reader = RemotingReader()
        self._backlog: deque[RemotingCommand] = deque()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._has_tls = False
        self._buffered = 0
        self.pending = 0
        self._is_stopped = False
        self._is_working = False
        self._opaque = 0
        self._asked: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._resumed: list[Callable[[], object]] = []
        self.file = -1
        self.address = ""
        self.host = _NO_HOST
        self.heard = 0.0
        self.is_open = False
        self.is_writable = True

    # ------------------------------------------------------------------------------- the transport
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        # The cast is necessary because uvloop's transports do not inherit from asyncio's.
        transport = self._transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(_WRITE_LIMIT)
        self._has_tls = transport.get_extra_info("sslcontext") is not None
        found = transport.get_extra_info("socket")
        if found is not None:
            self.file = found.fileno()
        name = transport.get_extra_info("peername")
        if name:
            self.address = address_text(*name[:2])
            self.host = host_bytes(self.address)
        self.heard = time.monotonic()
        self.is_open = True
        self._server.opened(self)

    def connection_lost(self, _: Exception | None) -> None:
        """See :class:`asyncio.Protocol`."""
        self.is_open = False
        self._buffer(0)
        self._backlog.clear()
        self._out.clear()
        self._server.unread_answers.note(self, 0)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionError(f"{self.address}: the client disconnected"))
        self._server.closed(self)
        self._resume()

    def data_received(self, data: bytes) -> None:
        """See :class:`asyncio.Protocol`."""
        self.heard = time.monotonic()
        try:
            self._backlog.extend(self._reader.receive_data(data))
        except ProtocolViolation as violation:
            _violations.warning("%s: %s; the connection is closed", self.address, violation)
            self._backlog.extend(violation.events)
            self._work()
            self.close()
            return
        pending = self._reader.pending
        if pending != self._buffered:
            self._buffer(pending)
        self._work()

    def _buffer(self, pending: int) -> None:
        change = pending - self._buffered
        self._buffered = pending
        if self._server.buffer(change) > _MOST_BUFFERED and change > 0:
            _violations.warning(
                "%s: incomplete requests of all clients together have more than %d bytes; "
                "the connection is closed",
                *(self.address, _MOST_BUFFERED),
            )
            self._buffer(0)
            self.abort()

    def pause_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self.is_writable = False
        self._throttle()

    def resume_writing(self) -> None:
        """See :class:`asyncio.Protocol`."""
        self.is_writable = True
        self._server.unread_answers.note(self, self.unread())
        self._resume()
        self._work()

    def when_writable(self, call: Callable[[], object]) -> None:
        """Call a function as soon as the client has read enough answers, or has disconnected."""
        self._resumed.append(call)

    def _resume(self) -> None:
        resumed, self._resumed = self._resumed, []
        for call in resumed:
            call()

    def close(self) -> None:
        """Send the bytes that wait to be sent, and close the connection."""
        self._flush()
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def drain(self) -> None:
        """Start no more requests of the client, but still receive its answers."""
        self._is_stopped = True

    def abort(self) -> None:
        """Close the connection at once. Bytes that wait to be sent are lost."""
        if self._transport is not None:
            self._transport.abort()

    def _throttle(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._backlog or not self.is_writable:
            transport.pause_reading()
        else:
            transport.resume_reading()

    # ------------------------------------------------------------------------------------ requests
    def _work(self) -> None:
        if self._is_working:
            # The loop below is running: it has called a handler, and the handler has called this
            # method. The loop itself will start the next request.
            return
        self._is_working = True
        backlog = self._backlog
        try:
            while backlog and self.is_writable and self.pending < _MOST_PENDING and self.is_open:
                command = backlog.popleft()
                if command.is_response:
                    self._answered(command)
                elif not self._is_stopped:
                    self._start(command)
        finally:
            self._is_working = False
        self._throttle()

    def _start(self, command: RemotingCommand) -> None:
        self.pending += 1
        server = self._server
        handler = server.handlers.get(command.code)
        if handler is None:
            remark = f" request type {command.code} not supported"
            code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            self.answer(command, command.answer(code, remark=remark))
            return
        request = Request(command, {}, self)
        try:
            request.fields = parse(command.code, command.ext_fields)
            server.admit(request)
            work = handler(request)
        except Exception as error:
            request.fail(error)
            return
        if work is not None:
            server.spawn(self._finish(request, work))

    async def _finish(self, request: Request, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            request.fail(error)

    def hold(self) -> None:
        """Stop counting a request as in progress, because it has become a long poll."""
        self.pending -= 1
        if self._backlog:
            self._work()

    def unhold(self) -> None:
        """Count a long poll as a request in progress again: its answer is being prepared."""
        self.pending += 1

    def answer(self, command: RemotingCommand, answer: RemotingCommand) -> None:
        """Send the answer to a request."""
        self.pending -= 1
        if not command.is_oneway:
            self._send(answer)
        if self._backlog and self.pending < _MOST_PENDING:
            self._work()

    def _send(self, command: RemotingCommand) -> None:
        if not self.is_open:
            return
        try:
            head = encode_head(command)
        except LogquarryError as error:
            command = RemotingCommand(
                code=ResponseCode.SYSTEM_ERROR,
                opaque=command.opaque,
                flag=Flag.RESPONSE,
                remark=str(error),
            )
            head = encode_head(command)
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(head)
        if command.body:
            self._out.append(command.body)
        self._out_bytes += len(head) + len(command.body)
        if self._out_bytes > _WRITE_LIMIT:
            # The received bytes can contain many requests, each with a large answer. So send the
            # waiting answers before the broker answers the next request.
            self._flush()

    def _flush(self) -> None:
        transport = self._transport
        if self._out and transport is not None and not transport.is_closing():
            # The first call of note() records what the client has read since the last flush. Only
            # then add new bytes.
            note = self._server.unread_answers.note
            note(self, self.unread())
            data = b"".join(self._out)
            piece = _TLS_PIECE if self._has_tls else len(data)
            for start in range(0, len(data), piece):
                transport.write(data[start : start + piece])
            note(self, self.unread())
        self._out.clear()
        self._out_bytes = 0

    def unread(self) -> int:
        """Return the number of bytes of answers that the client has not read yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    # -------------------------------------------------------------------- requests of the broker
    async def until_writable(self) -> None:
        """Wait until the client has read enough of the bytes sent to it, or has disconnected."""
        while self.is_open and not self.is_writable:
            resumed = asyncio.Event()
            self.when_writable(resumed.set)
            await resumed.wait()

    def tell(
        self, code: RequestCode, fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Send a one-way request. Drop the request if too many bytes already wait to be sent."""
        # Dropping a request only delays its effect: clients rebalance at intervals anyway, and the
        # broker checks an open transaction again.
        if not self.is_writable:
            return
        self._opaque += 1
        self._send(
            RemotingCommand(
                code=code,
                opaque=self._opaque,
                flag=Flag.ONEWAY,
                ext_fields=fields or {},
                body=body,
            )
        )

    async def ask(
        self,
        code: RequestCode,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_s: float,
    ) -> RemotingCommand:
        """Send a request, and wait for the client's answer.

        If too many bytes already wait to be sent, first wait until the client has read enough.

        Raises:
            TimeoutError: if the client has not answered after ``timeout_s`` seconds.
            ConnectionError: if the client disconnects.
        """
        async with asyncio.timeout(timeout_s):
            await self.until_writable()
            if not self.is_open:
                raise ConnectionError(f"{self.address}: the client disconnected")
            self._opaque += 1
            opaque = self._opaque
            future: asyncio.Future[RemotingCommand] = asyncio.get_running_loop().create_future()
            self._asked[opaque] = future
            try:
                self._send(
                    RemotingCommand(code=code, opaque=opaque, ext_fields=fields or {}, body=body)
                )
                return await future
            finally:
                del self._asked[opaque]

    def _answered(self, command: RemotingCommand) -> None:
        future = self._asked.get(command.opaque)
        if future is not None and not future.done():
            future.set_result(command)


class Handshake(asyncio.Protocol):
    """The TLS handshake of a client, after which a :class:`Connection` serves the client."""

    # For a server with TLS, asyncio calls a protocol only after the handshake. To limit the number
    # of handshakes, the broker accepts clients without TLS, and starts each handshake itself.

    def __init__(self, server: Server, context: ssl.SSLContext) -> None:
        self._server = server
        self._context = context

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See :class:`asyncio.Protocol`."""
        transport = cast(asyncio.Transport, transport)
        found = transport.get_extra_info("socket")
        is_full = len(self._server.handshakes) >= _MOST_HANDSHAKES
        if is_full or is_near_limit(found.fileno()):
            _violations.warning("too many TLS handshakes or open files: a client is disconnected")
            transport.abort()
            return
        # The handshake needs the first bytes of the client. uvloop reads them even after
        # pause_reading, so start_tls would not receive them. So close this transport, and let a
        # second one take over the socket.
        taken = socket.fromfd(found.fileno(), found.family, found.type)
        taken.setblocking(False)
        transport.abort()
        self._server.handshakes.add(self)
        self._server.spawn(self._shake(taken))

    async def _shake(self, taken: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self._server),
                taken,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
        except (OSError, EOFError) as error:
            # If the client disconnects, the error has no text.
            reason = str(error) or "the client disconnected"
            _violations.warning("a TLS handshake failed: %s", reason)
        finally:
            self._server.handshakes.discard(self)
