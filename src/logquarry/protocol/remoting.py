"""RocketMQ's remoting protocol (``RemotingCommand`` of 4.9.3) without sockets.

::

    [length 4][type 1, header length 3][header][body]       length: all bytes after this field

The header is JSON (type 0) or RocketMQ's binary form (type 1). :class:`RemotingReader` reads both,
and an answer has the form of its request. It also has the ``opaque`` of its request, and the lowest
bit of ``flag`` set. :mod:`logquarry.protocol.remoting_codes` has the codes and their fields.

The commands do not depend on how the network cuts the bytes. Invalid bytes raise
:class:`~logquarry.errors.ProtocolViolation` as soon as the reader detects them. The reader checks a
frame's length first, and buffers at most one frame.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from json.encoder import encode_basestring_ascii as _quoted
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from logquarry.errors import ProtocolViolation, UsageError
from logquarry.format import fastjson
from logquarry.format.fields import Field, Layout

PREFIX: Final = Layout(
    "remoting prefix",
    Field("length", "i", "bytes of the frame after this field"),
    Field("header", "I", "highest byte: 0 JSON, 1 binary; other three: bytes of the header"),
)
BINARY_HEADER: Final = Layout(
    "binary remoting header",
    Field("code", "h", "request code or response code"),
    Field("language", "b", "the sender's language: position in LANGUAGES"),
    Field("version", "h", "the sender's version: position in RocketMQ's MQVersion"),
    Field("opaque", "i", "number of the request; its answer has the same"),
    Field("flag", "i", "1: an answer; 2: a request without answer"),
)
_SIZE: Final = struct.Struct(">i")
_KEY_SIZE: Final = struct.Struct(">h")
_unpack: Final = struct.Struct(">iI").unpack_from
_HEADER_BITS: Final = 24
_HEADER_MASK: Final = (1 << _HEADER_BITS) - 1

LARGEST_FRAME: Final = 1 << 24
"""Most bytes of a frame that RocketMQ accepts, with the length field (``frameMaxLength``)."""
LANGUAGES: Final = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG"),
    *("RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS"),
)
VERSION: Final = 399
"""V4_9_3 in RocketMQ's ``MQVersion``."""
_OTHER: Final = LANGUAGES.index("OTHER")
_INT: Final = 1 << 31
_NO_FIELDS: Final[Mapping[str, str]] = MappingProxyType({})
_LANGUAGE: Final = "PYTHON"


class Flag(IntEnum):
    """Bits of ``flag``."""

    RESPONSE = 1
    ONEWAY = 2


# A look-up in an enum takes longer than the rest of the test of a flag.
_RESPONSE: Final = int(Flag.RESPONSE)
_ONEWAY: Final = int(Flag.ONEWAY)


# A tuple is made in a third of the time of a dataclass.
class RemotingCommand(NamedTuple):
    """A request or an answer.

    Attributes:
        code: a RequestCode, a ResponseCode or any other number.
        opaque: number of the request; its answer has the same.
        flag: bits of :class:`Flag`.
        language: the sender's language, one of LANGUAGES.
        version: the sender's version, as a number of RocketMQ's ``MQVersion``.
        remark: error text of an answer.
        ext_fields: named fields that depend on the code.
        body: bytes that depend on the code.
        is_binary: whether the header is in RocketMQ's binary form.
    """

    code: int
    opaque: int
    flag: int = 0
    language: str = _LANGUAGE
    version: int = VERSION
    remark: str | None = None
    ext_fields: Mapping[str, str] = _NO_FIELDS
    body: bytes = b""
    is_binary: bool = False

    @property
    def is_response(self) -> bool:
        """Whether this is an answer."""
        return bool(self.flag & _RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether this is a request without answer."""
        return bool(self.flag & _ONEWAY)

    def answer(
        self,
        code: int,
        *,
        remark: str | None = None,
        fields: Mapping[str, str] = _NO_FIELDS,
        body: bytes = b"",
    ) -> RemotingCommand:
        """Make the answer to this request, in the form of its header."""
        return RemotingCommand(
            *(code, self.opaque, _RESPONSE, _LANGUAGE, VERSION, remark, fields, body),
            self.is_binary,
        )


def encode(command: RemotingCommand) -> bytes:
    """Encode a command as a frame.

    Raises:
        UsageError: if the frame is larger than LARGEST_FRAME.
    """
    return encode_head(command) + command.body


def encode_head(command: RemotingCommand) -> bytes:
    """Encode a frame without its body, so that the caller can send a large body without a copy.

    Raises:
        UsageError: if the frame is larger than LARGEST_FRAME, or a number or text does not fit
            RocketMQ's binary form.
    """
    header = _binary_header(command) if command.is_binary else _json_header(command)
    size = PREFIX.size + len(header) + len(command.body)
    if size > LARGEST_FRAME:
        raise UsageError(f"a frame has {size} bytes: RocketMQ accepts at most {LARGEST_FRAME}")
    kind = command.is_binary << _HEADER_BITS
    return PREFIX.struct.pack(size - _SIZE.size, kind | len(header)) + header


def _json_header(command: RemotingCommand) -> bytes:
    # Put together by hand: json.dumps takes longer than all other work for an answer. RocketMQ's
    # fastjson writes the names in this order.
    fields = ""
    if command.ext_fields:
        items = [
            f"{_NAMES.get(key) or _quoted(key)}:{_quoted(value)}"
            for key, value in command.ext_fields.items()
        ]
        fields = f'"extFields":{{{",".join(items)}}},'
    remark = "" if command.remark is None else f'"remark":{_quoted(command.remark)},'
    return (
        f'{{"code":{int(command.code)},{fields}"flag":{int(command.flag)},'
        f'"language":{_quoted(command.language)},"opaque":{command.opaque},{remark}'
        f'"serializeTypeCurrentRPC":"JSON","version":{command.version}}}'
    ).encode("ascii")


def _binary_header(command: RemotingCommand) -> bytes:
    language = LANGUAGES.index(command.language) if command.language in LANGUAGES else _OTHER
    try:
        parts = [
            BINARY_HEADER.struct.pack(
                command.code, language, command.version, command.opaque, command.flag
            )
        ]
        remark = b"" if command.remark is None else command.remark.encode("utf-8", "replace")
        parts += _SIZE.pack(len(remark)), remark
        fields: list[bytes] = []
        for key, value in command.ext_fields.items():
            name, text = key.encode("utf-8", "replace"), value.encode("utf-8", "replace")
            fields += _KEY_SIZE.pack(len(name)), name, _SIZE.pack(len(text)), text
    except struct.error as error:
        raise UsageError(f"a command does not fit RocketMQ's binary header: {error}") from error
    return b"".join((*parts, _SIZE.pack(sum(map(len, fields))), *fields))


class RemotingReader:
    """Decodes the bytes of one connection into commands. Not thread-safe.

    Args:
        largest: most bytes of a frame, with the length field.
    """

    def __init__(self, largest: int = LARGEST_FRAME) -> None:
        assert largest >= PREFIX.size
        self._largest = largest
        self._received = bytearray()
        self._wanted = 0
        self._is_spoilt = False

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._received)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[RemotingCommand]:
        """Process bytes, and return the commands that are complete now.

        Raises:
            ProtocolViolation: if the bytes are no frame; its ``events`` are the commands before
                them. The reader ignores all later bytes.
        """
        if self._is_spoilt:
            return []
        if self._received:
            self._received += data
            if len(self._received) < self._wanted:
                # Copying each part of a large frame again would take quadratic time.
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
        self._wanted = _SIZE.size
        if len(self._received) >= PREFIX.size:
            self._wanted = _SIZE.size + int(_SIZE.unpack_from(self._received)[0])
        return commands

    def _take(self, received: bytes, position: int, commands: list[RemotingCommand]) -> int:
        """Decode the frame at a position, and return its end; the position if it is incomplete.

        Raises:
            ValueError: if the bytes cannot start a frame, or its header is invalid.
        """
        left = len(received) - position
        if left < _SIZE.size:
            return position
        length, kind = (
            _unpack(received, position)
            if left >= PREFIX.size
            else (int(_SIZE.unpack_from(received, position)[0]), 0)
        )
        if not PREFIX.size <= length + _SIZE.size <= self._largest:
            most = self._largest - _SIZE.size
            raise ValueError(f"its length is {length}; it must be {_SIZE.size} to {most}")
        decode, size = _DECODERS.get(kind >> _HEADER_BITS), kind & _HEADER_MASK
        if decode is None:
            raise ValueError(
                f"its header has type {kind >> _HEADER_BITS}; types are 0 (JSON) and 1 (binary)"
            )
        if size > length - _SIZE.size:
            raise ValueError(f"its header has {size} bytes, but the frame has {length}")
        if left < _SIZE.size + length:
            return position
        start, end = position + PREFIX.size, position + _SIZE.size + int(length)
        commands.append(decode(received[start : start + size], received[start + size : end]))
        return end


def _decode_json(header: bytes, body: bytes) -> RemotingCommand:
    text = header.decode()
    document: Any = None
    try:
        # As json.loads, without its searches for white space.
        document, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration):
        end = -1
    if end != len(text):
        document = fastjson.decode(header)
    if not isinstance(document, dict):
        raise ValueError("its header is no JSON object")
    remark, language = document.get("remark"), document.get("language")
    fields = document.get("extFields")
    if remark is not None and not isinstance(remark, str):
        raise ValueError("its remark is no string")
    if fields is None:
        fields = {}
    elif not isinstance(fields, dict):
        raise ValueError("its extFields are no JSON object")
    else:
        try:
            # The quickest test that all are text.
            "".join(fields.values())
        except TypeError:
            fields = _texts(fields)
    code: Any = document.get("code")
    opaque: Any = document.get("opaque")
    flag, version = document.get("flag", 0), document.get("version", 0)
    if not (
        type(code) is type(opaque) is type(flag) is type(version) is int
        and -_INT <= code < _INT
        and -_INT <= opaque < _INT
        and -_INT <= flag < _INT
        and -_INT <= version < _INT
    ):
        values = {"code": code, "opaque": opaque, "flag": flag, "version": version}
        wrong = [
            name
            for name, value in values.items()
            if type(value) is not int or not -_INT <= value < _INT
        ]
        raise ValueError(f"its {wrong[0]} is no 32-bit integer")
    if type(language) is not str:
        language = LANGUAGES[0]
    return _command((code, opaque, flag, language, version, remark, fields, body, False))


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """The fields as fastjson reads them: clients in C++ and JavaScript write numbers unquoted."""
    found: dict[str, str] = {}
    for key, value in fields.items():
        if isinstance(value, dict | list):
            raise ValueError("one of its extFields is no scalar")
        if value is not None:
            found[key] = value if isinstance(value, str) else json.dumps(value)
    return found


def _decode_binary(header: bytes, body: bytes) -> RemotingCommand:
    if len(header) < BINARY_HEADER.size:
        raise ValueError(f"its binary header has only {len(header)} bytes")
    code, language, version, opaque, flag = BINARY_HEADER.struct.unpack_from(header)
    remark, position = _sized(header, BINARY_HEADER.size, _SIZE)
    fields, position = _sized(header, position, _SIZE)
    if position != len(header):
        raise ValueError(f"{len(header) - position} extra bytes follow its binary header")
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
        is_binary=True,
    )


def _sized(data: bytes, position: int, width: struct.Struct) -> tuple[bytes, int]:
    """Read bytes that follow their size; return them and the position after them."""
    start = position + width.size
    if start > len(data):
        raise ValueError("its binary header ends inside a size field")
    (size,) = width.unpack_from(data, position)
    if not 0 <= size <= len(data) - start:
        raise ValueError(f"a field of its binary header has {size} bytes, {len(data) - start} left")
    return data[start : start + size], start + size


# raw_decode without a Python call around it; the type stubs lack it.
_scan: Final = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_command: Final = RemotingCommand._make
_NAMES: Final = {
    name: _quoted(name)
    for name in (
        *("msgId", "queueId", "queueOffset", "MSG_REGION", "TRACE_ON", "transactionId"),
        *("suggestWhichBrokerId", "nextBeginOffset", "minOffset", "maxOffset"),
    )
}
"""Fields of most answers, in quotes."""
_DECODERS: Final = {0: _decode_json, 1: _decode_binary}
