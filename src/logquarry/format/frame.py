"""Encodes and decodes the frames and blanks of the commit log in pure Python. This module is the
reference for the compiled kernels.

A frame, big-endian, as ``CommitLog.checkMessageAndReturnSize`` reads it::

    | HEAD, 48 bytes | BORNHOST 8|20 | STORETIMESTAMP 8 | STOREHOST 8|20 | RECONSUMETIMES 4 |
    | PREPAREDTRANSACTIONOFFSET 8 | BODYLEN 4 | BODY | TOPICLEN 1 | TOPIC | PROPERTIESLEN 2 |
    | PROPERTIES |

With RocketMQ 5's second magic (``MESSAGE_MAGIC_CODE_V2``) TOPICLEN has two bytes; logquarry reads
such frames but never writes them. A blank begins with ``[bytes left in the file 4][magic 4]``.
After these eight bytes, a blank can contain any bytes.

In a DLedger log, each entry (``DLedgerEntry``) has a head of 48 bytes, and then one frame.
PHYSICALOFFSET, consume queues and index contain the offset of the frame, not of the head. If an
entry does not fit into the rest of a file, DLedger writes it to the next file. The unused rest of
the file then begins with eight bytes: the magic -1, and the length of the rest.
"""

from __future__ import annotations

import enum
import ipaddress
import mmap
import struct
import zlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from logquarry.errors import UsageError
from logquarry.format import java, sys_flag
from logquarry.format import properties as props
from logquarry.format.fields import Field, Layout
from logquarry.text import counted

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGICS: Final = (MAGIC_V1, MAGIC_V2)
MAGIC_BLANK: Final = 0xCBD43194

HEAD = Layout(
    "frame head",
    Field("size", "i", "TOTALSIZE: size of the whole frame"),
    Field("magic", "I", "MAGICCODE: daa320a7; in 5.x also daa320ab"),
    Field("body_crc", "i", "BODYCRC: CRC-32 of the body as stored, sign bit cleared"),
    Field("queue_id", "i", "QUEUEID"),
    Field("flag", "i", "FLAG: flag bits that the application sets"),
    Field("queue_offset", "q", "QUEUEOFFSET: queue offset of the message"),
    Field("physical_offset", "q", "PHYSICALOFFSET: start of this frame in the log"),
    Field(
        "sys_flag", "i", "SYSFLAG: RocketMQ's flag bits: compression, transaction type, IPv6 hosts"
    ),
    Field("born_timestamp", "q", "BORNTIMESTAMP: ms, the producer's clock"),
)

STORE_TIME = Layout(
    "store time", Field("store_timestamp", "q", "STORETIMESTAMP: ms, the broker's clock")
)

TAIL = Layout(
    "after the hosts",
    Field(
        "reconsume_times",
        "i",
        "RECONSUMETIMES: how often a consumer sent the message back for a retry",
    ),
    Field(
        "prepared_transaction_offset",
        "q",
        "PREPAREDTRANSACTIONOFFSET: physical offset of the half message",
    ),
    Field("body_length", "i", "BODYLEN: size of the body in bytes"),
)

TOPIC_LENGTH_V1 = Layout("topic length", Field("topic_length", "b", "TOPICLEN, signed"))
TOPIC_LENGTH_V2 = Layout("topic length", Field("topic_length", "h", "TOPICLEN of 5.x, signed"))
PROPERTIES_LENGTH = Layout(
    "properties length", Field("properties_length", "h", "PROPERTIESLEN, signed")
)
BLANK = Layout(
    "blank",
    Field("size", "i", "bytes from here to the end of the file"),
    Field("magic", "I", "cbd43194"),
)

ENTRY_HEAD = Layout(
    "DLedger entry head",
    Field("magic", "i", "1"),
    Field("size", "i", "bytes of the entry: head and frame"),
    Field("index", "q", "number of the entry, from 0"),
    Field("term", "q", "term of the leader that wrote it"),
    Field("position", "q", "position of the head in the log"),
    Field("channel", "i", "0"),
    Field("chain_crc", "i", "0"),
    Field("body_crc", "i", "0"),
    Field("body_size", "i", "bytes of the frame"),
)
ENTRY_MAGIC: Final = 1
ENTRY_BLANK_MAGIC: Final = -1
ENTRY_BLANK_SIZE: Final = 8

HOST_SIZE_V4: Final = 8
HOST_SIZE_V6: Final = 20
ID_LENGTH_V4: Final = 2 * (HOST_SIZE_V4 + 8)
ID_LENGTH_V6: Final = 2 * (HOST_SIZE_V6 + 8)
FIXED_SIZE_V1: Final = (
    HEAD.size
    + STORE_TIME.size
    + TAIL.size
    + 2 * HOST_SIZE_V4
    + TOPIC_LENGTH_V1.size
    + PROPERTIES_LENGTH.size
)
BODY_POSITION: Final = HEAD.size + STORE_TIME.size + TAIL.size + 2 * HOST_SIZE_V4
"""Start of the body in a frame with two IPv4 hosts. Each IPv6 host is 12 bytes longer."""

assert HEAD.size == ENTRY_HEAD.size == 48 and BLANK.size == 8
assert FIXED_SIZE_V1 == 91 and BODY_POSITION == 88


class DamageKind(enum.IntEnum):
    """The reason why bytes are not a frame. The numbers are the kernels' return codes."""

    ZEROED = 1
    """Size and magic are zero: these bytes were never written."""
    TRUNCATED = 2
    """Fewer bytes are left in the file than the smallest frame or blank has."""
    BAD_MAGIC = 3
    BAD_SIZE = 4
    """TOTALSIZE is smaller than the fixed fields or reaches beyond the file."""
    BAD_PHYSICAL_OFFSET = 5
    BAD_BODY_LENGTH = 6
    BAD_TOPIC_LENGTH = 7
    BAD_PROPERTIES_LENGTH = 8
    BAD_LENGTH_SUM = 9
    """The lengths of the parts do not add up to TOTALSIZE."""
    BAD_BODY_CRC = 10
    BAD_BLANK = 11
    """The length in a blank is not the number of bytes to the end of the file."""
    UNREADABLE = 12
    """The disk cannot read some of the bytes. No kernel returns this code."""

    @property
    def label(self) -> str:
        """The kind's name in findings and reports."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it is stored in the log. The tables of fields above explain the attributes."""

    topic: bytes
    body: bytes = b""
    properties: bytes = b""
    queue_id: int = 0
    flag: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    born_host: bytes = bytes(HOST_SIZE_V4)
    store_timestamp: int = 0
    store_host: bytes = bytes(HOST_SIZE_V4)
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    body_crc: int = 0
    magic: int = MAGIC_V1

    @property
    def size(self) -> int:
        """TOTALSIZE."""
        return fixed_size(self.magic, self.sys_flag) + (
            len(self.body) + len(self.topic) + len(self.properties)
        )

    @property
    def queue_key(self) -> tuple[str, int]:
        """The queue that the frame names: topic and queue id."""
        return self.topic.decode("utf-8", java.UTF8_ERRORS), self.queue_id

    def is_copied_to(self, topic: str) -> bool:
        """Whether multi-dispatch adds an entry for this frame to a queue of ``topic`` too. The
        result is False if ``topic`` is the frame's own topic.
        """
        if self.topic.decode("utf-8", java.UTF8_ERRORS) == topic:
            return False
        found = props.decode_bytes(self.properties)
        named = found.get(props.INNER_MULTI_DISPATCH, "").split(props.MULTI_SEPARATOR)
        return topic in named and props.INNER_MULTI_QUEUE_OFFSET in found

    def with_crc(self) -> Frame:
        """Return a copy of the frame whose BODYCRC is computed from the body."""
        return replace(self, body_crc=java.body_crc(zlib.crc32(self.body)))


@dataclass(frozen=True, slots=True)
class Blank:
    """The end of a file: ``size`` bytes without a message."""

    size: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that do not form a frame or a blank."""

    kind: DamageKind
    reason: str


Outcome = Frame | Blank | Damage

BytesLike = bytes | bytearray | memoryview | mmap.mmap


def host_sizes(flag: int) -> tuple[int, int]:
    """Bytes of BORNHOST and STOREHOSTADDRESS for a SYSFLAG."""
    return (
        HOST_SIZE_V6 if flag & sys_flag.BORN_HOST_V6 else HOST_SIZE_V4,
        HOST_SIZE_V6 if flag & sys_flag.STORE_HOST_V6 else HOST_SIZE_V4,
    )


def fixed_size(magic: int, flag: int) -> int:
    """Bytes of a frame without body, topic and properties."""
    born, store = host_sizes(flag)
    topic_length = TOPIC_LENGTH_V2 if magic == MAGIC_V2 else TOPIC_LENGTH_V1
    return (
        FIXED_SIZE_V1 - TOPIC_LENGTH_V1.size + topic_length.size + born + store - 2 * HOST_SIZE_V4
    )


@cache
def prefix(born_host_size: int, store_host_size: int) -> struct.Struct:
    """Return the struct of the bytes before the body: the fields of HEAD, born host, store time,
    store host and TAIL.
    """
    return struct.Struct(
        f"{HEAD.struct.format}{born_host_size}s{STORE_TIME.struct.format[1:]}"
        f"{store_host_size}s{TAIL.struct.format[1:]}"
    )


def encode(frame: Frame) -> bytes:
    """Encode a frame. The function does not compute the CRC: BODYCRC is the frame's attribute
    ``body_crc``.

    Raises ValueError if the size of a host contradicts SYSFLAG, or if a value does not fit its
    field.
    """
    sizes = len(frame.born_host), len(frame.store_host)
    if sizes != host_sizes(frame.sys_flag):
        raise ValueError("the size of a host contradicts its bit in SYSFLAG")
    topic_length = TOPIC_LENGTH_V2 if frame.magic == MAGIC_V2 else TOPIC_LENGTH_V1
    try:
        return b"".join(
            (
                prefix(*sizes).pack(
                    frame.size,
                    frame.magic,
                    frame.body_crc,
                    frame.queue_id,
                    frame.flag,
                    frame.queue_offset,
                    frame.physical_offset,
                    frame.sys_flag,
                    frame.born_timestamp,
                    frame.born_host,
                    frame.store_timestamp,
                    frame.store_host,
                    frame.reconsume_times,
                    frame.prepared_transaction_offset,
                    len(frame.body),
                ),
                frame.body,
                topic_length.struct.pack(len(frame.topic)),
                frame.topic,
                PROPERTIES_LENGTH.struct.pack(len(frame.properties)),
                frame.properties,
            )
        )
    except struct.error as error:
        raise ValueError(f"a field does not fit its width: {error}") from error


def encode_blank(left: int) -> bytes:
    """Encode the first eight bytes of a blank that fills the last ``left`` bytes of a file."""
    return BLANK.struct.pack(left, MAGIC_BLANK)


def decode_at(
    data: BytesLike, position: int, *, base: int, end: int | None = None, check_crc: bool = True
) -> Outcome:
    """Decode the frame or blank at a position of a log file, or report the damage there.

    The function raises no error for damaged bytes, and reads no byte at or after ``end``. If the
    function returns a frame, :func:`encode` turns this frame into the same bytes again.

    Args:
        base: the physical offset of ``data[0]``.
        end: index in ``data`` at which the file ends (default: the length of ``data``).
        check_crc: whether to compare the CRC of the body with BODYCRC. Unlike Java, the function
            also checks the BODYCRC of an empty body, which must be 0. Without this check, some
            damage would not be detected: a wrong flag in SYSFLAG changes the lengths of the hosts,
            so that a body can look empty.
    """
    view = memoryview(data)
    if end is None:
        end = len(view)
    left = end - position
    if left < BLANK.size:
        return Damage(DamageKind.TRUNCATED, f"the file ends {counted(left, 'byte')} further on")
    size, magic = BLANK.struct.unpack_from(view, position)
    if magic == MAGIC_BLANK:
        if size == left:
            return Blank(left)
        return Damage(
            DamageKind.BAD_BLANK, f"a blank of {counted(size, 'byte')}, but {left} are left"
        )
    if magic not in (MAGIC_V1, MAGIC_V2):
        if size == 0 and magic == 0:
            return Damage(DamageKind.ZEROED, "zeros: nothing was written here")
        return Damage(DamageKind.BAD_MAGIC, f"magic code {magic:08x}, size {size}")
    if size < fixed_size(magic, 0) or size > left:
        return Damage(DamageKind.BAD_SIZE, f"TOTALSIZE {size}, but {left} bytes are left")
    head = HEAD.struct.unpack_from(view, position)
    _, _, crc, queue_id, flag, queue_offset, physical_offset, flags, born_timestamp = head
    fixed = fixed_size(magic, flags)
    if size < fixed:
        return Damage(DamageKind.BAD_SIZE, f"TOTALSIZE {size}, but the fixed fields take {fixed}")
    if physical_offset != base + position:
        return Damage(DamageKind.BAD_PHYSICAL_OFFSET, f"PHYSICALOFFSET {physical_offset}")
    born_size, store_size = host_sizes(flags)
    at = position + HEAD.size
    born_host = bytes(view[at : at + born_size])
    at += born_size
    (store_timestamp,) = STORE_TIME.struct.unpack_from(view, at)
    at += STORE_TIME.size
    store_host = bytes(view[at : at + store_size])
    at += store_size
    reconsume_times, prepared_offset, body_length = TAIL.struct.unpack_from(view, at)
    at += TAIL.size
    room = size - fixed
    if not 0 <= body_length <= room:
        return Damage(DamageKind.BAD_BODY_LENGTH, f"BODYLEN {body_length} in a frame of {size}")
    body_at = at
    at += body_length
    topic_layout = TOPIC_LENGTH_V2 if magic == MAGIC_V2 else TOPIC_LENGTH_V1
    (topic_length,) = topic_layout.struct.unpack_from(view, at)
    if not 0 <= topic_length <= room - body_length:
        return Damage(DamageKind.BAD_TOPIC_LENGTH, f"TOPICLEN {topic_length} in a frame of {size}")
    topic_at = at + topic_layout.size
    at = topic_at + topic_length
    (properties_length,) = PROPERTIES_LENGTH.struct.unpack_from(view, at)
    if properties_length < 0:
        return Damage(
            DamageKind.BAD_PROPERTIES_LENGTH,
            f"PROPERTIESLEN {properties_length} in a frame of {size}",
        )
    if body_length + topic_length + properties_length != room:
        return Damage(
            DamageKind.BAD_LENGTH_SUM,
            f"TOTALSIZE is {size}, the parts add up to "
            f"{fixed + body_length + topic_length + properties_length}",
        )
    properties_at = at + PROPERTIES_LENGTH.size
    body = bytes(view[body_at : body_at + body_length])
    if check_crc:
        found = java.body_crc(zlib.crc32(body))
        if found != crc:
            return Damage(
                DamageKind.BAD_BODY_CRC, f"BODYCRC is {crc}, but the body has the CRC {found}"
            )
    return Frame(
        topic=bytes(view[topic_at : topic_at + topic_length]),
        body=body,
        properties=bytes(view[properties_at : properties_at + properties_length]),
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        physical_offset=physical_offset,
        sys_flag=flags,
        born_timestamp=born_timestamp,
        born_host=born_host,
        store_timestamp=store_timestamp,
        store_host=store_host,
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        body_crc=crc,
        magic=magic,
    )


def has_entry_head_reference(data: memoryview, position: int, *, base: int, left: int) -> bool:
    """Whether a DLedger entry's head is at a position; ``left`` is the number of bytes to the
    file's end.
    """
    head = ENTRY_HEAD.size
    if len(data) - position < head:
        return False
    magic, size, _, _, at, _, _, _, body_size = ENTRY_HEAD.struct.unpack_from(data, position)
    fits = head < size <= left
    return bool(
        magic == ENTRY_MAGIC and fits and at == base + position and body_size == size - head
    )


def starts_entry_blank(data: memoryview, position: int) -> bool:
    """Whether a position has the magic with which DLedger marks the unused rest of a file."""
    return int.from_bytes(data[position : position + 4], "big", signed=True) == ENTRY_BLANK_MAGIC


def is_entry_blank_reference(data: memoryview, position: int, *, left: int) -> bool:
    """Whether DLedger left the bytes from a position to the file's end unused (``left`` bytes)."""
    size = int.from_bytes(data[position + 4 : position + ENTRY_BLANK_SIZE], "big", signed=True)
    return starts_entry_blank(data, position) and size == left


# -------------------------------------------------------------------------- hosts and message ids
_HOST_PORT = struct.Struct(">i")
_LARGEST_PORT = 65_535
_ID_OFFSET = struct.Struct(">q")
_MAPPED_V4 = bytes(10) + b"\xff\xff"


def host_text(data: bytes) -> str:
    """Format a host: 8 bytes as ``ip:port``, 20 bytes as ``[ip]:port`` (``getHostAddress``).

    As in Java, the text of an IPv6 address has all eight groups, and an IPv4-mapped address is
    written as an IPv4 address.
    """
    address, port = data[:-4], _HOST_PORT.unpack(data[-4:])[0]
    if len(address) == 16:
        if not address.startswith(_MAPPED_V4):
            groups = struct.unpack(">8H", address)
            return f"[{':'.join(format(group, 'x') for group in groups)}]:{port}"
        address = address[12:]
    return f"{'.'.join(map(str, address))}:{port}"


def host_bytes(text: str) -> bytes:
    """Parse ``ip:port`` (IPv4) to 8 bytes, or ``[ip]:port`` (IPv6) to 20 bytes, as they are in a
    frame.
    """
    address, separator, port = text.rpartition(":")
    try:
        if not separator:
            raise ValueError("no port")
        if address.startswith("[") and address.endswith("]"):
            address = address[1:-1]
        packed = ipaddress.ip_address(address).packed
        return packed + _HOST_PORT.pack(int(port))
    except (ValueError, struct.error) as error:
        raise UsageError(f"not a host and port: {text!r} ({error})") from error


def valid_host_bytes(text: str) -> bytes:
    """Parse the host of a new message, like :func:`host_bytes`. Raise UsageError for a port above
    65535 or below 0: a frame has room for such a port, but Java's ``InetSocketAddress`` refuses it.
    """
    data = host_bytes(text)
    port = _HOST_PORT.unpack(data[-4:])[0]
    if not 0 <= port <= _LARGEST_PORT:
        raise UsageError(f"not a host and port: {text!r} (ports are 0 to {_LARGEST_PORT})")
    return data


def encode_id(store_host: bytes, physical_offset: int) -> str:
    """Make a message id (``MessageDecoder.createMessageId``) in upper-case hex: the store host's
    address (4 or 16 bytes), the store host's port (4 bytes), and the physical offset (8 bytes).
    """
    return (store_host + _ID_OFFSET.pack(physical_offset)).hex().upper()


def decode_id(message_id: str) -> tuple[str, int]:
    """Return the store host and the physical offset in a message id."""
    if len(message_id) not in (ID_LENGTH_V4, ID_LENGTH_V6):
        raise UsageError(
            f"not a message id: {message_id!r} has {counted(len(message_id), 'character')}, "
            f"not {ID_LENGTH_V4} or {ID_LENGTH_V6}"
        )
    try:
        data = bytes.fromhex(message_id)
    except ValueError as error:
        raise UsageError(f"not a message id: {message_id!r} is not hex") from error
    if len(data) * 2 != len(message_id):
        raise UsageError(f"not a message id: {message_id!r} is not hex")
    return host_text(data[:-8]), _ID_OFFSET.unpack(data[-8:])[0]
