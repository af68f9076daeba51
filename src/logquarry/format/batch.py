"""The formats of batches: the request of a client, the inner batches of RocketMQ 5, and the entries
of batch queues.

The body of a client's batch request (the wire form) contains one message after the other. Each
message has these big-endian fields (``MessageDecoder.encodeMessage``)::

    | TOTALSIZE 4 | MAGICCODE 4 | BODYCRC 4 | FLAG 4 | BODYLEN 4 | BODY |
    | PROPERTIESLEN 2 | PROPERTIES |

Clients write 0 for magic and CRC; the store ignores both fields.

An inner batch is one frame with the SYSFLAG bits INNER_BATCH and NEED_UNWRAP. The body of an inner
batch is the wire form of several messages. Message i, counted from 0, has the queue offset
QUEUEOFFSET + i. The property INNER_NUM is the number of messages; INNER_BASE repeats QUEUEOFFSET.

An entry of a batch queue (``BatchConsumeQueue``, 46 bytes) points to one frame, and has the queue
offsets of its messages: ``[base, base + count)``. An entry's place in the file does not determine
its queue offsets. So to find a queue offset, a reader searches the entries of the batch queue.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from logquarry.errors import DecompressionError
from logquarry.format import java, sys_flag
from logquarry.format import properties as props
from logquarry.format.fields import Field, Layout
from logquarry.format.frame import Frame
from logquarry.text import counted

HEAD = Layout(
    "batch item head",
    Field("size", "i", "TOTALSIZE: size of the whole item"),
    Field("magic", "I", "MAGICCODE; clients send 0"),
    Field("body_crc", "i", "BODYCRC; clients send 0"),
    Field("flag", "i", "FLAG"),
    Field("body_length", "i", "BODYLEN: size of the body in bytes"),
)
PROPERTIES_LENGTH = Layout("properties length", Field("properties_length", "h", "PROPERTIESLEN"))
FIXED_SIZE = HEAD.size + PROPERTIES_LENGTH.size
assert FIXED_SIZE == 22


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One message of a batch. All messages of a batch have the same topic and queue."""

    body: bytes
    properties: bytes = b""
    flag: int = 0
    magic: int = 0
    body_crc: int = 0

    @property
    def size(self) -> int:
        """TOTALSIZE."""
        return FIXED_SIZE + len(self.body) + len(self.properties)


def encode(items: Iterable[BatchItem]) -> bytes:
    """Encode messages to the wire form. Raises ValueError if a value does not fit its field."""
    parts: list[bytes] = []
    for item in items:
        try:
            head = HEAD.struct.pack(item.size, item.magic, item.body_crc, item.flag, len(item.body))
            length = PROPERTIES_LENGTH.struct.pack(len(item.properties))
        except struct.error as error:
            raise ValueError(f"a field does not fit its width: {error}") from error
        parts += (head, item.body, length, item.properties)
    return b"".join(parts)


def decode(data: bytes, *, check_size: bool = True) -> Iterator[BatchItem]:
    """Decode a wire form. Raises ValueError if a length is wrong. A wrong TOTALSIZE raises the
    error only if ``check_size`` is True.
    """
    position = 0
    while position < len(data):
        left = len(data) - position
        if left < FIXED_SIZE:
            raise ValueError(
                f"at {position}: {counted(left, 'byte is', 'bytes are')} too few for an item"
            )
        size, magic, crc, flag, body_length = HEAD.struct.unpack_from(data, position)
        if not 0 <= body_length <= left - FIXED_SIZE:
            raise ValueError(
                f"at {position}: BODYLEN {body_length}, but "
                f"{counted(left - FIXED_SIZE, 'byte is', 'bytes are')} left"
            )
        body_at = position + HEAD.size
        length_at = body_at + body_length
        (properties_length,) = PROPERTIES_LENGTH.struct.unpack_from(data, length_at)
        end = length_at + PROPERTIES_LENGTH.size + properties_length
        if properties_length < 0 or end > len(data):
            left = len(data) - length_at - PROPERTIES_LENGTH.size
            raise ValueError(
                f"at {position}: PROPERTIESLEN {properties_length}, but "
                f"{counted(left, 'byte is', 'bytes are')} left"
            )
        if check_size and size != end - position:
            raise ValueError(
                f"at {position}: TOTALSIZE is {size}, the parts add up to {end - position}"
            )
        yield BatchItem(
            body=data[body_at:length_at],
            properties=data[end - properties_length : end],
            flag=flag,
            magic=magic,
            body_crc=crc,
        )
        position = end


INNER_BATCH: Final = sys_flag.INNER_BATCH | sys_flag.NEED_UNWRAP
"""Clients split a frame into its messages only if both bits are set."""
OF_BATCH: Final = INNER_BATCH | sys_flag.COMPRESSED | sys_flag.COMPRESSION_MASK
"""Bits of a batch's SYSFLAG that describe the body of the whole frame, so the batch's messages do
not inherit these bits.
"""
MOST_MESSAGES: Final = 0x7FFF
"""Maximum number of messages in a batch: ``DispatchRequest.batchSize`` has 16 bits."""


def is_inner_batch(flag: int) -> bool:
    """Whether a frame with this SYSFLAG holds the messages of a batch."""
    return flag & INNER_BATCH == INNER_BATCH


def unwrap(frame: Frame, *, limit: int = sys_flag.DEFAULT_LIMIT) -> tuple[Frame, ...]:
    """Return the messages of an inner batch as frames; for any other frame, return only the frame
    itself.

    Each message gets its own body, properties, FLAG and BODYCRC (``MessageDecoder.decodeMessage``),
    and the batch's PHYSICALOFFSET. Like clients (``PullAPIWrapper``), the function returns the
    frame itself in two cases: the body is not a valid wire form; the body or the messages would
    take more than ``limit`` bytes.
    """
    if not is_inner_batch(frame.sys_flag):
        return (frame,)
    try:
        items = tuple(decode(sys_flag.decompress(frame.body, frame.sys_flag, limit=limit)))
    except (ValueError, DecompressionError):
        return (frame,)
    fixed = frame.size - len(frame.body) - len(frame.properties)
    room = sum(fixed + len(item.body) + len(item.properties) for item in items)
    if not items or room > limit or frame.queue_offset > java.LONG_MAX - len(items):
        return (frame,)
    flag = frame.sys_flag & ~OF_BATCH
    return tuple(
        replace(
            frame,
            body=item.body,
            properties=item.properties,
            flag=item.flag,
            sys_flag=flag,
            queue_offset=frame.queue_offset + number,
        ).with_crc()
        for number, item in enumerate(items)
    )


def queue_count(frame: Frame) -> int:
    """Return how many queue offsets a frame takes when the broker dispatches the frame.

    For an inner batch, the number is INNER_NUM (``CommitLog.checkMessageAndReturnSize``), even if
    the body holds another number of messages.
    """
    if not frame.sys_flag & sys_flag.INNER_BATCH:
        return 1
    number = props.decode_bytes(frame.properties).get(props.INNER_NUM, "")
    if not (number.isascii() and number.isdigit() and len(number) <= len(str(MOST_MESSAGES))):
        return 1
    return min(max(1, int(number)), MOST_MESSAGES)


ENTRY = Layout(
    "batch queue entry",
    Field("physical_offset", "q", "start of the frame in the log"),
    Field("size", "i", "TOTALSIZE of the frame; 0: empty entry"),
    Field(
        "tags_code", "q", "hash of the frame's tags; 0 if only the messages in the frame have tags"
    ),
    Field("store_timestamp", "q", "STORETIMESTAMP of the frame"),
    Field("base", "q", "msgBaseOffset: queue offset of the frame's first message"),
    Field("count", "h", "batchSize: number of messages in the frame"),
    Field("compacted_offset", "i", "offset in a compacted log; -1: none"),
    Field(
        "reserved",
        "i",
        "0; in a filler that logquarry wrote: number of lost messages that the filler replaces",
    ),
)
ENTRY_SIZE: Final = ENTRY.size
assert ENTRY_SIZE == 46
DEFAULT_ENTRIES_PER_FILE: Final = 300_000
NOT_COMPACTED: Final = -1
