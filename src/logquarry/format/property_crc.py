"""The CRC over a whole frame that RocketMQ 5 appends (``enabledAppendPropCRC``).

::

    frame ... | __CRC32# 01 | 10 digits, the least significant first | 02

The last 20 bytes of a frame hold the CRC-32 of all bytes before them, without its highest bit.
"""

from __future__ import annotations

import zlib
from typing import Final

PREFIX: Final = b"__CRC32#\x01"
SIZE: Final = 20
_DIGITS: Final = 10
_MASK: Final = 0x7FFFFFFF
assert len(PREFIX) + _DIGITS + 1 == SIZE


def encode(frame: bytes | memoryview) -> bytes:
    """The last 20 bytes of a frame, from the bytes before them."""
    crc = zlib.crc32(frame) & _MASK
    return PREFIX + f"{crc:0{_DIGITS}d}"[::-1].encode() + b"\x02"


def is_sound(frame: bytes | memoryview) -> bool | None:
    """Whether a frame's property CRC matches its bytes; None if the frame has none."""
    view = memoryview(frame)
    tail = bytes(view[-SIZE:])
    if len(view) < SIZE or not tail.startswith(PREFIX):
        return None
    return tail == encode(view[:-SIZE])
