"""Commands of the remoting protocol, and their headers as bytes.

If a C compiler is available at the installation, this module is compiled to C. Then
:func:`scan_json` and :func:`_json_head` convert common headers in C, and the Python code converts
the other headers. tests/property/test_remoting.py checks that the C code and the Python code give
the same results.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from enum import IntEnum
from json.encoder import encode_basestring_ascii as _quoted
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from logquarry.errors import UsageError
from logquarry.format import broker_json
from logquarry.format.fields import Field, Layout
from logquarry.text import counted

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING, PyBytes_FromStringAndSize
    from cython.cimports.cpython.unicode import PyUnicode_DecodeUTF8

PREFIX: Final = Layout(
    "remoting prefix",
    Field("length", "i", "bytes of the frame after this field"),
    Field(
        "header",
        "I",
        "the highest byte shows the format of the header (0: JSON, 1: binary); the other three "
        "bytes are the length of the header",
    ),
)
BINARY_HEADER: Final = Layout(
    "binary remoting header",
    Field("code", "h", "request code or response code"),
    Field("language", "b", "the sender's language: position in LANGUAGES"),
    Field("version", "h", "the sender's version: position in RocketMQ's MQVersion"),
    Field("opaque", "i", "number of the request; its answer has the same"),
    Field("flag", "i", "1: an answer; 2: a request without answer"),
)
SIZE: Final = struct.Struct(">i")
_KEY_SIZE: Final = struct.Struct(">h")
_pack_prefix: Final = PREFIX.struct.pack
_unpack_size: Final = SIZE.unpack_from
_unpack_key_size: Final = _KEY_SIZE.unpack_from
_unpack_binary: Final = BINARY_HEADER.struct.unpack_from
HEADER_BITS: Final = 24

LARGEST_FRAME: Final = 1 << 24
"""Maximum number of bytes of a frame in RocketMQ, including the length field
(``frameMaxLength``).
"""
LANGUAGES: Final = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG"),
    *("RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS"),
)
VERSION: Final = 399
"""The number of version 4.9.3 in RocketMQ's ``MQVersion``."""
_OTHER: Final = LANGUAGES.index("OTHER")
_LEAST, _MOST = -1 << 31, (1 << 31) - 1
_NO_FIELDS: Final[Mapping[str, str]] = MappingProxyType({})
_LANGUAGE: Final = "PYTHON"
_PREFIX_SIZE, _LARGEST = PREFIX.size, LARGEST_FRAME
_MOST_DIGITS = 18
"""A number with at most this many digits fits into 64 bits."""


class Flag(IntEnum):
    """Bits of a command's ``flag``."""

    RESPONSE = 1
    ONEWAY = 2


# Keep the flags as integers too: a test of an integer takes less time than the lookup of an enum's
# member.
_RESPONSE: Final = int(Flag.RESPONSE)
_ONEWAY: Final = int(Flag.ONEWAY)


# A command is a tuple: creating a dataclass takes three times as long.
class RemotingCommand(NamedTuple):
    """A request or an answer.

    Attributes:
        code: a RequestCode, a ResponseCode or any other number.
        opaque: number of the request. The answer has the same number, so the sender finds the
            request that it belongs to.
        version: the sender's version, as a number of RocketMQ's ``MQVersion``.
        remark: error text of an answer.
        is_binary: whether the header has RocketMQ's binary form, and not JSON.
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
        """Whether the command is an answer."""
        return bool(self.flag & _RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether the command is a request to which the sender expects no answer."""
        return bool(self.flag & _ONEWAY)

    def answer(
        self,
        code: int,
        *,
        remark: str | None = None,
        fields: Mapping[str, str] = _NO_FIELDS,
        body: bytes = b"",
    ) -> RemotingCommand:
        """Return an answer to this request. The answer's header has the same form as the request's
        header.
        """
        # This is the same as RemotingCommand(...), but saves the time of a Python call.
        return _new(
            RemotingCommand,
            (code, self[1], _RESPONSE, _LANGUAGE, VERSION, remark, fields, body, self[8]),
        )


_new = tuple.__new__


# ------------------------------------------------------------------------------------------ encode
def encode_head(command: RemotingCommand) -> bytes:
    """Encode a frame, but leave its body out, so that the caller can send a large body without a
    copy.

    Raises:
        UsageError: if the frame is larger than LARGEST_FRAME, or a number or text does not fit
            RocketMQ's binary form.
    """
    code, opaque, flag, language, version, remark, fields, body, is_binary = command
    if cython.compiled and not is_binary and remark is None:
        made = _json_head(code, opaque, flag, language, version, fields, len(body))
        if made is not None:
            return made
    header = _binary_header(command) if is_binary else _json_header(command)
    size = PREFIX.size + len(header) + len(body)
    if size > LARGEST_FRAME:
        raise UsageError(f"a frame has {size} bytes: RocketMQ accepts at most {LARGEST_FRAME}")
    return _pack_prefix(size - SIZE.size, is_binary << HEADER_BITS | len(header)) + header


def _json_header(command: RemotingCommand) -> bytes:
    # Do not use json.dumps, which would take longer than all other work for an answer. The names
    # have the same order as those of RocketMQ's fastjson.
    fields = ""
    if command.ext_fields:
        items = [f"{_quoted(key)}:{_quoted(value)}" for key, value in command.ext_fields.items()]
        fields = f'"extFields":{{{",".join(items)}}},'
    remark = "" if command.remark is None else f'"remark":{_quoted(command.remark)},'
    return (
        f'{{"code":{int(command.code)},{fields}"flag":{int(command.flag)},'
        f'"language":{_quoted(command.language)},"opaque":{command.opaque},{remark}'
        f'"serializeTypeCurrentRPC":"JSON","version":{command.version}}}'
    ).encode("ascii")


def _json_head(
    code: int,
    opaque: int,
    flag: int,
    language: str,
    version: int,
    fields: Mapping[str, str],
    body_size: int,
) -> bytes | None:
    """Encode a frame without its body. The command must not have a remark. Return None if the
    header is long or needs escapes. Only the compiled module calls this function.
    """
    head.size, head.is_plain = _PREFIX_SIZE, True
    out = cython.address(head)
    put_bytes(out, b'{"code":', 8)
    put_number(out, code)
    count = 0
    for key, value in fields.items():
        put_bytes(out, b',"' if count else b',"extFields":{"', 2 if count else 15)
        put_text(out, key)
        put_bytes(out, b'":"', 3)
        put_text(out, value)
        put_bytes(out, b'"', 1)
        count += 1
    put_bytes(out, b'},"flag":' if count else b',"flag":', 9 if count else 8)
    put_number(out, flag)
    put_bytes(out, b',"language":"', 13)
    put_text(out, language)
    put_bytes(out, b'","opaque":', 11)
    put_number(out, opaque)
    put_bytes(out, b',"serializeTypeCurrentRPC":"JSON","version":', 44)
    put_number(out, version)
    put_bytes(out, b"}", 1)
    if not head.is_plain or head.size + body_size > _LARGEST:
        return None
    put_prefix(out, body_size)
    made: bytes = PyBytes_FromStringAndSize(head.bytes, head.size)
    return made


def _binary_header(command: RemotingCommand) -> bytes:
    language = LANGUAGES.index(command.language) if command.language in LANGUAGES else _OTHER
    try:
        parts = [
            BINARY_HEADER.struct.pack(
                command.code, language, command.version, command.opaque, command.flag
            )
        ]
        remark = b"" if command.remark is None else command.remark.encode("utf-8", "replace")
        parts += SIZE.pack(len(remark)), remark
        fields: list[bytes] = []
        for key, value in command.ext_fields.items():
            name, text = key.encode("utf-8", "replace"), value.encode("utf-8", "replace")
            fields += _KEY_SIZE.pack(len(name)), name, SIZE.pack(len(text)), text
    except struct.error as error:
        raise UsageError(f"a command does not fit RocketMQ's binary header: {error}") from error
    return b"".join((*parts, SIZE.pack(sum(map(len, fields))), *fields))


# ------------------------------------------------------------------------------------------ decode
def decode_json(header: bytes, body: bytes) -> RemotingCommand:
    """Decode a frame with a JSON header. Raises ValueError for an invalid header."""
    document = scan_json(header)
    if document is None:
        document = broker_json.decode(header)
    if not isinstance(document, dict):
        raise ValueError("its header is not a JSON object")
    remark, language = document.get("remark"), document.get("language")
    fields = document.get("extFields")
    if remark is not None and not isinstance(remark, str):
        raise ValueError("its remark is not a string")
    if fields is None:
        fields = {}
    elif not isinstance(fields, dict):
        raise ValueError("its extFields are not a JSON object")
    else:
        try:
            # join() is the fastest check for strings: any other value raises TypeError.
            "".join(fields.values())
        except TypeError:
            fields = _texts(fields)
    code: Any = document.get("code")
    opaque: Any = document.get("opaque")
    flag, version = document.get("flag", 0), document.get("version", 0)
    if not (_is_int(code) and _is_int(opaque) and _is_int(flag) and _is_int(version)):
        values = {"code": code, "opaque": opaque, "flag": flag, "version": version}
        wrong = [name for name, value in values.items() if not _is_int(value)]
        raise ValueError(f"its {wrong[0]} is not a 32-bit integer")
    if type(language) is not str:
        language = LANGUAGES[0]
    return _new(
        RemotingCommand, (code, opaque, flag, language, version, remark, fields, body, False)
    )


def _is_int(value: Any) -> bool:
    if cython.compiled:
        return is_int(value)  # type: ignore[no-any-return]
    return type(value) is int and _LEAST <= value <= _MOST


def scan_json(header: bytes) -> Any:
    """Parse a header. Return None if the header is not standard JSON.

    If compiled, also return None if the header contains anything except strings, integers and one
    level of nested objects. Raises ValueError if a string is not UTF-8.
    """
    if cython.compiled:
        scan.at = PyBytes_AS_STRING(header)
        scan.end = scan.at + len(header)
        found = _scan_object(cython.address(scan), 0)
        # Accept a line feed at the end, which the C++ client's library jsoncpp adds.
        if scan.at < scan.end and scan.at[0] == b"\n":
            scan.at += 1
        return found if scan.at == scan.end else None
    text = header.decode()
    try:
        # Do what json.loads does, but do not search for white space.
        document, end = _scan(text, 0)
    except (ValueError, RecursionError, StopIteration):
        return None
    return document if end == len(text) else None


def _scan_object(scan: Any, depth: int) -> dict[str, Any] | None:
    """Parse an object. Return None if only the module json can parse the object. Only the compiled
    module calls this function.
    """
    found: dict[str, Any] = {}
    if scan.at == scan.end or scan.at[0] != b"{":
        return None
    scan.at += 1
    if scan.at < scan.end and scan.at[0] == b"}":
        scan.at += 1
        return found
    while True:
        key = _scan_text(scan)
        if key is None or scan.at == scan.end or scan.at[0] != b":":
            return None
        scan.at += 1
        if scan.at == scan.end:
            return None
        value: Any
        if scan.at[0] == b'"':
            value = _scan_text(scan)
        elif scan.at[0] == b"{" and not depth:
            value = _scan_object(scan, 1)
        else:
            value = _scan_number(scan)
        if value is None or scan.at == scan.end:
            return None
        found[key] = value
        byte = scan.at[0]
        scan.at += 1
        if byte == b"}":
            return found
        if byte != b",":
            return None


def _scan_text(scan: Any) -> str | None:
    """Parse a string. Return None if there is no string, or if the string has an escape of a
    non-ASCII character. Only the compiled module calls this function.
    """
    if scan.at == scan.end or scan.at[0] != b'"':
        return None
    scan.at += 1
    start = scan.at
    skip_plain(scan)
    if scan.at == scan.end:
        return None
    if scan.at[0] == b'"':
        scan.at += 1
        plain: str = PyUnicode_DecodeUTF8(start, scan.at - start - 1, cython.NULL)
        return plain
    # The unescaped text fits into this buffer, because each escape is longer than the character
    # that it represents.
    made = PyBytes_FromStringAndSize(start, scan.end - start)
    to = PyBytes_AS_STRING(made)
    size = unescape(scan, start, to)
    text: str | None = None
    if size >= 0:
        text = PyUnicode_DecodeUTF8(to, size, cython.NULL)
    return text


def _scan_number(scan: Any) -> int | None:
    """Parse an integer. Return None if there is no integer at the current position. If the integer
    has more than 18 digits, stop after the first 18. Only the compiled module calls this function.
    """
    start = scan.at
    is_negative = scan.at[0] == b"-"
    if is_negative:
        scan.at += 1
    first = scan.at
    value = 0
    while scan.at < scan.end and b"0" <= scan.at[0] <= b"9" and scan.at - first < _MOST_DIGITS:
        value = value * 10 + digit_of(scan.at[0])
        scan.at += 1
    digits = scan.at - first
    if not digits or (digits > 1 and first[0] == b"0"):
        scan.at = start
        return None
    return -value if is_negative else value


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    # Convert all values to text, as fastjson does, because C++ and JavaScript clients send numbers
    # without quotes.
    found: dict[str, str] = {}
    for key, value in fields.items():
        if isinstance(value, dict | list):
            raise ValueError("one of its extFields is not a scalar")
        if value is not None:
            found[key] = value if isinstance(value, str) else json.dumps(value)
    return found


def decode_binary(header: bytes, body: bytes) -> RemotingCommand:
    """Decode a frame with RocketMQ's binary header. Raises ValueError for an invalid header."""
    size = len(header)
    if size < BINARY_HEADER.size:
        raise ValueError(f"its binary header has only {counted(size, 'byte')}")
    code, language, version, opaque, flag = _unpack_binary(header)
    start = BINARY_HEADER.size + SIZE.size
    position = _end_of(header, start, size, SIZE.size)
    remark = header[start:position].decode() if position > start else None
    start = position + SIZE.size
    end = _end_of(header, start, size, SIZE.size)
    if end != size:
        raise ValueError(
            f"{counted(size - end, 'extra byte follows', 'extra bytes follow')} its binary header"
        )
    found: dict[str, str] = {}
    while start < end:
        start += _KEY_SIZE.size
        position = _end_of(header, start, end, _KEY_SIZE.size)
        key = header[start:position].decode()
        start = position + SIZE.size
        position = _end_of(header, start, end, SIZE.size)
        found[key] = header[start:position].decode()
        start = position
    name = LANGUAGES[language] if 0 <= language < len(LANGUAGES) else "OTHER"
    return _new(RemotingCommand, (code, opaque, flag, name, version, remark, found, body, True))


def _end_of(data: bytes, start: int, end: int, width: int) -> int:
    # Returns the end of the field that begins at ``start``. The field's size is in the ``width``
    # bytes before ``start``. Raises ValueError if the field ends after ``end``.
    if start > end:
        raise ValueError("its binary header ends inside a size field")
    (size,) = (_unpack_size if width == 4 else _unpack_key_size)(data, start - width)
    if not 0 <= size <= end - start:
        raise ValueError(
            f"a field of its binary header has {counted(size, 'byte')}, {end - start} left"
        )
    return start + int(size)


# ------------------------------------------------------------------------------------------ fields
REQUIRED: Final = object()
TEXT: Final = 0
BOOL: Final = 1


class HeaderField(NamedTuple):
    """A header field of a request.

    ``kind`` is TEXT, BOOL, or the number of bits (without the sign) of an integer: 31 or 63.
    ``key`` is the field's name in the header. ``default`` is the value of a missing field, or
    REQUIRED if the field must not be missing.
    """

    name: str
    kind: int
    default: Any
    key: str


def parse_fields(
    expected: tuple[tuple[str, int, Any, str], ...], ext_fields: Mapping[str, str]
) -> dict[str, Any]:
    """Parse the header fields of a request, and ignore unknown fields.

    ``expected`` has each :class:`HeaderField` as a plain tuple. Raises ValueError if a field is
    invalid, or missing although it is required.
    """
    found: dict[str, Any] = {}
    texts = ext_fields if type(ext_fields) is dict else dict(ext_fields)
    for name, kind, default, key in expected:
        text = texts.get(key)
        if text is None:
            if default is _REQUIRED:
                raise ValueError(f"the custom field <{name}> is null")
            found[name] = default
        elif kind == _TEXT:
            found[name] = text
        elif kind == _BOOL:
            found[name] = text == "true" or text.lower() == "true"
        elif cython.compiled and read_number(text, kind, cython.address(number)):
            found[name] = number
        else:
            found[name] = _number(name, kind, text)
    return found


def _number(name: str, bits: int, text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"the custom field <{name}> is not a number: {text[:80]!r}")
    if not -1 << bits <= (value := int(text)) < 1 << bits:
        raise ValueError(f"the custom field <{name}> is too large: {text[:80]!r}")
    return value


_TEXT, _BOOL, _REQUIRED = TEXT, BOOL, REQUIRED
_INTEGER: Final = re.compile(r"[+-]?\d{1,99}")  # Java accepts neither blanks nor underscores.
# raw_decode only calls scan_once, so calling scan_once directly saves a Python call. The type stubs
# lack scan_once.
_scan: Final = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
