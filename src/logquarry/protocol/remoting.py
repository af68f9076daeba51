"""RocketMQ's remoting protocol (``RemotingCommand`` of 4.9.3) without sockets.

This module is compiled to C if a C compiler is available at the installation.

::

    [length 4][type 1, header length 3][header][body]       length: all bytes after this field

The header is JSON (type 0) or RocketMQ's binary form (type 1). The header of an answer has the same
form and the same ``opaque`` as the header of the request. In an answer, the lowest bit of ``flag``
is set. :mod:`logquarry.protocol.remoting_codes` lists the codes and their fields.
"""

from __future__ import annotations

from typing import Final

from logquarry.errors import ProtocolViolation
from logquarry.protocol.remoting_header import (
    HEADER_BITS,
    LANGUAGES,
    LARGEST_FRAME,
    PREFIX,
    SIZE,
    VERSION,
    Flag,
    RemotingCommand,
    decode_binary,
    decode_json,
    encode_head,
)
from logquarry.text import counted

__all__ = [
    "LANGUAGES",
    "LARGEST_FRAME",
    "VERSION",
    "Flag",
    "RemotingCommand",
    "RemotingReader",
    "encode",
    "encode_head",
]

_SIZE, _PREFIX_SIZE = SIZE.size, PREFIX.size
_unpack: Final = PREFIX.struct.unpack_from
_unpack_size: Final = SIZE.unpack_from
_HEADER_MASK: Final = (1 << HEADER_BITS) - 1
_LARGEST_HEADER: Final = 2 << 20
"""Maximum number of bytes of a header.

While the event loop parses a header, it serves no other request, and parsing a header of 16 MiB can
take seconds. A message's properties have at most 32,767 bytes, so no client needs a larger header.
"""


def encode(command: RemotingCommand) -> bytes:
    """Encode a command as a frame. Raises UsageError for the same commands as ``encode_head``."""
    return encode_head(command) + command.body


class RemotingReader:
    """Decodes the bytes of one connection into commands. Not thread-safe.

    The reader keeps at most one incomplete frame in memory. ``largest`` is the maximum size of a
    frame in bytes, including the length field.
    """

    def __init__(self, largest: int = LARGEST_FRAME) -> None:
        assert largest >= PREFIX.size
        self._largest = largest
        self._received = bytearray()
        self._wanted = 0
        self._is_spoilt = False

    @property
    def pending(self) -> int:
        """Number of buffered bytes of an incomplete frame."""
        return len(self._received)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[RemotingCommand]:
        """Process received bytes, and return the commands that are complete by now.

        Raises:
            ProtocolViolation: if the bytes are not a frame. The exception's ``events`` are the
                commands before the invalid bytes. After that, the reader ignores all further bytes.
        """
        if self._is_spoilt:
            return []
        if self._received:
            self._received += data
            if len(self._received) < self._wanted:
                # Copy the frame only when it is complete: a copy for each received part would take
                # quadratic time.
                return []
            data = bytes(self._received)
        elif type(data) is not bytes:
            data = bytes(data)
        commands: list[RemotingCommand] = []
        position = 0
        try:
            while (end := self._take(data, position, commands)) != position:
                position = end
        except ValueError as error:
            self._is_spoilt = True
            self._received.clear()
            raise ProtocolViolation(f"no remoting frame: {error}", events=commands) from error
        if position or not self._received:
            self._received = bytearray(data[position:])
        self._wanted = _SIZE
        if len(self._received) >= _PREFIX_SIZE:
            self._wanted = _SIZE + int(_unpack_size(self._received)[0])
        return commands

    def _take(self, received: bytes, position: int, commands: list[RemotingCommand]) -> int:
        # Decodes the frame at a position. Returns the frame's end, or ``position`` if the frame is
        # incomplete.
        left = len(received) - position
        if left < _SIZE:
            return position
        length, kind = (
            _unpack(received, position)
            if left >= _PREFIX_SIZE
            else (_unpack_size(received, position)[0], 0)
        )
        if not _PREFIX_SIZE <= length + _SIZE <= self._largest:
            most = self._largest - _SIZE
            raise ValueError(f"its length is {length}; it must be {_SIZE} to {most}")
        form, size = kind >> HEADER_BITS, kind & _HEADER_MASK
        if form > 1:
            raise ValueError(f"its header has type {form}; types are 0 (JSON) and 1 (binary)")
        if size > length - _SIZE:
            raise ValueError(f"its header has {counted(size, 'byte')}, but the frame has {length}")
        if size > _LARGEST_HEADER:
            raise ValueError(f"its header has {size} bytes; the maximum is {_LARGEST_HEADER}")
        if left < _SIZE + length:
            return position
        start = position + _PREFIX_SIZE
        end: int = position + _SIZE + length
        header, body = received[start : start + size], received[start + size : end]
        commands.append(decode_binary(header, body) if form else decode_json(header, body))
        return end
