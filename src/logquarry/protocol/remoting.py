"""RocketMQ's remoting protocol (``RemotingCommand`` of 4.9.3) without sockets.

Frames, and what reads them:

::

    [length 4][type 1, header length 3][header][body]       length: all that follows it

A header is JSON (type 0), or RocketMQ's binary form (type 1), which a broker or client speaks where
it was told to. Both are read; what is written is JSON, which everybody reads. An answer has its
request's ``opaque``, and the lowest bit of ``flag``.

Bytes may come in any pieces: the commands are the same. Whatever is no frame ends in
:class:`~logquarry.errors.ProtocolViolation`, as soon as it is known. What is kept of a peer's bytes
is never more than one frame, whose length is looked at before the rest of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from logquarry.errors import ProtocolViolation, UsageError
from logquarry.format import fastjson
from logquarry.format.fields import Field, Layout

PREFIX: Final = Layout(
    "remoting prefix",
    Field("length", "i", "bytes of the frame behind this field"),
    Field("header", "I", "highest byte: 0 JSON, 1 binary; the others: bytes of the header"),
)
BINARY_HEADER: Final = Layout(
    "binary remoting header",
    Field("code", "h", "what is asked, or how it went"),
    Field("language", "b", "of the sender: its place in LANGUAGES"),
    Field("version", "h", "of the sender: place in RocketMQ's list of versions"),
    Field("opaque", "i", "which request it is, and which one an answer is for"),
    Field("flag", "i", "1: an answer; 2: wants none"),
)
_SIZE: Final = struct.Struct(">i")
_KEY_SIZE: Final = struct.Struct(">h")
_HEADER_BITS: Final = 24

LARGEST_FRAME: Final = 1 << 24
"""Bytes of a frame, its length field included, that RocketMQ takes (``frameMaxLength``)."""
LANGUAGES: Final = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG"),
    *("RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS"),
)
VERSION: Final = 399
"""V4_9_3 in ``MQVersion``."""
_INT: Final = 1 << 31


class RequestCode(IntEnum):
    """What a slave's broker asks its master's (``SlaveSynchronize``)."""

    GET_ALL_TOPIC_CONFIG = 21
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201


class ResponseCode(IntEnum):
    """How it went."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    REQUEST_CODE_NOT_SUPPORTED = 3


class Flag(IntEnum):
    """Bits of ``flag``."""

    RESPONSE = 1
    ONEWAY = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RemotingCommand:
    """A request or an answer.

    Attributes:
        code: what is asked, or how it went: RequestCode, ResponseCode or any other number.
        opaque: which request it is; an answer has its request's.
        flag: bits of :class:`Flag`.
        language: of the sender.
        version: of the sender.
        remark: what went wrong, in words.
        ext_fields: what belongs to the code.
        body: what belongs to the code, as bytes.
    """

    code: int
    opaque: int
    flag: int = 0
    language: str = "PYTHON"
    version: int = VERSION
    remark: str | None = None
    ext_fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def is_response(self) -> bool:
        """Whether it answers a request."""
        return bool(self.flag & Flag.RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether it is a request that wants no answer."""
        return bool(self.flag & Flag.ONEWAY)

    def answer(self, code: int, *, remark: str | None = None, body: bytes = b"") -> RemotingCommand:
        """The answer to this request."""
        return RemotingCommand(
            code=code, opaque=self.opaque, flag=Flag.RESPONSE, remark=remark, body=body
        )


def encode(command: RemotingCommand) -> bytes:
    """The frame of a command, with a JSON header.

    Raises:
        UsageError: if no RocketMQ would take a frame of its size.
    """
    return encode_head(command) + command.body


def encode_head(command: RemotingCommand) -> bytes:
    """The frame of a command but for its body, which follows: a large one need not be copied.

    Raises:
        UsageError: if no RocketMQ would take a frame of its size.
    """
    header: dict[str, Any] = {
        "code": command.code,
        "flag": command.flag,
        "language": command.language,
        "opaque": command.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": command.version,
    }
    if command.ext_fields:
        header["extFields"] = dict(command.ext_fields)
    if command.remark is not None:
        header["remark"] = command.remark
    # Java writes the names in this order.
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    size = PREFIX.size + len(text) + len(command.body)
    if size > LARGEST_FRAME:
        raise UsageError(f"a frame of {size} bytes: RocketMQ takes at most {LARGEST_FRAME}")
    return PREFIX.struct.pack(size - _SIZE.size, len(text)) + text


class RemotingReader:
    """Makes commands of the bytes of one connection. For one thread.

    Args:
        largest: bytes of the largest frame that is taken, its length field included.
    """

    def __init__(self, largest: int = LARGEST_FRAME) -> None:
        assert largest >= PREFIX.size
        self._largest = largest
        self._received = bytearray()
        self._is_spoilt = False

    @property
    def pending(self) -> int:
        """Bytes of a frame that has not come whole."""
        return len(self._received)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[RemotingCommand]:
        """Take bytes as they came: the commands that are whole now.

        Raises:
            ProtocolViolation: if they are no frame; nothing more is read then. The commands before
                are in its ``events``.
        """
        if self._is_spoilt:
            return []
        self._received += data
        commands: list[RemotingCommand] = []
        position = 0
        try:
            while (end := self._frame_end(position)) is not None:
                commands.append(_decode(self._received[position:end]))
                position = end
        except ValueError as error:
            self._is_spoilt = True
            self._received.clear()
            raise ProtocolViolation(f"no remoting frame: {error}", events=commands) from error
        del self._received[:position]
        return commands

    def _frame_end(self, position: int) -> int | None:
        """Where the frame that begins somewhere ends; None where it has not come whole.

        Raises:
            ValueError: if none can begin like that.
        """
        received = self._received
        if len(received) - position < _SIZE.size:
            return None
        (length,) = _SIZE.unpack_from(received, position)
        if not PREFIX.size <= length + _SIZE.size <= self._largest:
            raise ValueError(f"its length is {length}, and {self._largest - _SIZE.size} at most")
        if len(received) - position < PREFIX.size:
            return None
        length, kind = PREFIX.struct.unpack_from(received, position)
        kind, header = divmod(kind, 1 << _HEADER_BITS)
        if kind not in _DECODERS:
            raise ValueError(f"its header is of type {kind}; there are 0 (JSON) and 1 (binary)")
        if header > length - _SIZE.size:
            raise ValueError(f"a header of {header} bytes, in {length} with its length")
        end = position + _SIZE.size + int(length)
        return end if len(received) >= end else None


def _decode(frame: bytearray) -> RemotingCommand:
    """The command of a frame whose lengths are right.

    Raises:
        ValueError: if its header is none.
    """
    _, kind = PREFIX.struct.unpack_from(frame)
    kind, size = divmod(kind, 1 << _HEADER_BITS)
    end = PREFIX.size + size
    return _DECODERS[kind](bytes(frame[PREFIX.size : end]), bytes(frame[end:]))


def _decode_json(header: bytes, body: bytes) -> RemotingCommand:
    document = fastjson.decode(header)
    if not isinstance(document, dict):
        raise ValueError("its header is no object")
    remark, language = document.get("remark"), document.get("language")
    fields = document.get("extFields")
    if remark is not None and not isinstance(remark, str):
        raise ValueError("its remark is no text")
    if fields is None:
        fields = {}
    if not isinstance(fields, dict) or not all(isinstance(v, str | None) for v in fields.values()):
        raise ValueError("its extFields are no texts")
    return RemotingCommand(
        code=_whole(document, "code"),
        opaque=_whole(document, "opaque"),
        flag=_whole(document, "flag", 0),
        language=language if isinstance(language, str) else LANGUAGES[0],
        version=_whole(document, "version", 0),
        remark=remark,
        ext_fields={key: value for key, value in fields.items() if value is not None},
        body=body,
    )


def _whole(document: Mapping[str, Any], name: str, missing: int | None = None) -> int:
    value = document.get(name, missing)
    if not isinstance(value, int) or isinstance(value, bool) or not -_INT <= value < _INT:
        raise ValueError(f"its {name} is no number of 32 bits")
    return value


def _decode_binary(header: bytes, body: bytes) -> RemotingCommand:
    if len(header) < BINARY_HEADER.size:
        raise ValueError(f"a binary header of {len(header)} bytes")
    code, language, version, opaque, flag = BINARY_HEADER.struct.unpack_from(header)
    remark, position = _sized(header, BINARY_HEADER.size, _SIZE)
    fields, position = _sized(header, position, _SIZE)
    if position != len(header):
        raise ValueError(f"{len(header) - position} bytes behind its binary header")
    found: dict[str, str] = {}
    position = 0
    while position < len(fields):
        key, position = _sized(fields, position, _KEY_SIZE)
        value, position = _sized(fields, position, _SIZE)
        found[key.decode()] = value.decode()
    return RemotingCommand(
        code=code,
        opaque=opaque,
        flag=flag,
        language=LANGUAGES[language] if 0 <= language < len(LANGUAGES) else "OTHER",
        version=version,
        remark=remark.decode() if remark else None,
        ext_fields=found,
        body=body,
    )


def _sized(data: bytes, position: int, width: struct.Struct) -> tuple[bytes, int]:
    """Bytes behind their size, and where they end."""
    start = position + width.size
    if start > len(data):
        raise ValueError("its binary header ends in the middle of a size")
    (size,) = width.unpack_from(data, position)
    if not 0 <= size <= len(data) - start:
        raise ValueError(f"its binary header has {len(data) - start} bytes where it says {size}")
    return data[start : start + size], start + size


_DECODERS: Final = {0: _decode_json, 1: _decode_binary}
