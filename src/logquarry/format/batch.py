"""The wire form of a batch: the body of a client's batch request.

Per message, big-endian, consecutive (``MessageDecoder.encodeMessage``)::

    | TOTALSIZE 4 | MAGICCODE 4 | BODYCRC 4 | FLAG 4 | BODYLEN 4 | BODY |
    | PROPERTIESLEN 2 | PROPERTIES |

Clients write 0 for magic and CRC; the store ignores both.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from logquarry.format.fields import Field, Layout

HEAD = Layout(
    "batch item head",
    Field("size", "i", "TOTALSIZE: size of the whole item"),
    Field("magic", "I", "MAGICCODE; clients send 0"),
    Field("body_crc", "i", "BODYCRC; clients send 0"),
    Field("flag", "i", "FLAG"),
    Field("body_length", "i", "BODYLEN: size of the body"),
)
PROPERTIES_LENGTH = Layout("properties length", Field("properties_length", "h", "PROPERTIESLEN"))
FIXED_SIZE = HEAD.size + PROPERTIES_LENGTH.size
assert FIXED_SIZE == 22


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One message of a batch. The batch has the topic and the queue."""

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
    """Encode messages to the wire form.

    Raises:
        ValueError: if a field does not fit its width.
    """
    parts: list[bytes] = []
    for item in items:
        try:
            head = HEAD.struct.pack(item.size, item.magic, item.body_crc, item.flag, len(item.body))
            length = PROPERTIES_LENGTH.struct.pack(len(item.properties))
        except struct.error as error:
            raise ValueError(f"a field does not fit its width: {error}") from error
        parts += (head, item.body, length, item.properties)
    return b"".join(parts)


def decode(data: bytes) -> Iterator[BatchItem]:
    """Decode the messages of a wire form.

    Raises:
        ValueError: if the bytes end inside an item, or lengths contradict each other.
    """
    position = 0
    while position < len(data):
        left = len(data) - position
        if left < FIXED_SIZE:
            raise ValueError(f"at {position}: {left} bytes are too few for an item")
        size, magic, crc, flag, body_length = HEAD.struct.unpack_from(data, position)
        if not 0 <= body_length <= left - FIXED_SIZE:
            raise ValueError(f"at {position}: BODYLEN {body_length}, but {left} bytes are left")
        body_at = position + HEAD.size
        length_at = body_at + body_length
        (properties_length,) = PROPERTIES_LENGTH.struct.unpack_from(data, length_at)
        end = length_at + PROPERTIES_LENGTH.size + properties_length
        if properties_length < 0 or end > len(data):
            raise ValueError(
                f"at {position}: PROPERTIESLEN {properties_length}, but "
                f"{len(data) - length_at - PROPERTIES_LENGTH.size} bytes are left"
            )
        if size != end - position:
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
