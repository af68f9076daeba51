"""The CRC over a whole frame, which RocketMQ 5 appends to the frame (``enabledAppendPropCRC``).

::

    frame ... | __CRC32# 01 | 10 digits, the least significant first | 02

The last 20 bytes of the frame hold the CRC-32 of all bytes before them, without its highest bit.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

import numpy as np

from logquarry.format.arrays import Bytes, Int64

PREFIX: Final = b"__CRC32#\x01"
SIZE: Final = 20
_DIGITS: Final = 10
_MASK: Final = 0x7FFFFFFF
_END: Final = b"\x02"
assert len(PREFIX) + _DIGITS + len(_END) == SIZE

_CRCS: Final = re.compile(rb"(?:\A|(?<=\x02))" + re.escape(PREFIX) + rb"[^\x02]*(?:\x02|\Z)")
_FIRST: Final = PREFIX[0]
_TAIL: Final = np.arange(SIZE)
_PREFIX_BYTES: Final = np.frombuffer(PREFIX, np.uint8)
_DIGITS_AT: Final = slice(len(PREFIX), len(PREFIX) + _DIGITS)
_ZERO: Final = ord("0")
_HIGHEST: Final = 9
_POWERS: Final = 10 ** np.arange(_DIGITS)


def encode(frame: bytes | memoryview) -> bytes:
    """Encode the last 20 bytes of a frame from the bytes before them."""
    crc = zlib.crc32(frame) & _MASK
    return PREFIX + f"{crc:0{_DIGITS}d}"[::-1].encode() + _END


def with_room(properties: bytes) -> bytes:
    """Remove each CRC property from a property string, and append zeros as room for a new one.

    As in ``MessageDecoder.deleteProperty``, the name of the CRC property is ignored if it occurs
    inside a value.
    """
    properties = _CRCS.sub(b"", properties)
    glue = b"" if not properties or properties.endswith(_END) else _END
    return properties + glue + bytes(SIZE)


def fill_in(frame: bytearray, start: int, end: int) -> None:
    """Write the CRC of the frame ``frame[start:end]`` into the last 20 bytes of the frame."""
    frame[end - SIZE : end] = encode(memoryview(frame)[start : end - SIZE])


def is_sound(frame: bytes | memoryview) -> bool | None:
    """Return whether a frame's property CRC matches the frame's bytes; None if the frame has no
    property CRC.
    """
    view = memoryview(frame)
    tail = bytes(view[-SIZE:])
    if len(view) < SIZE or not tail.startswith(PREFIX):
        return None
    return tail == encode(view[:-SIZE])


def carriers(data: Bytes, starts: Int64, sizes: Int64) -> Int64:
    """Return the indexes of the frames that have a property CRC."""
    tails = starts + sizes - SIZE
    # Check one byte first. In a store without property CRCs, this byte already excludes almost
    # every frame.
    maybe = np.flatnonzero(data[tails] == _FIRST)
    if not len(maybe):
        return maybe
    heads = data[tails[maybe, None] + _TAIL[: len(PREFIX)]]
    found: Int64 = maybe[(heads == _PREFIX_BYTES).all(axis=1)]
    return found


def stated(data: Bytes, starts: Int64, sizes: Int64) -> Int64:
    """Return the property CRCs of frames. Each frame must have a property CRC. For a CRC that is
    not ten digits, the result is -1.
    """
    found = data[(starts + sizes - SIZE)[:, None] + _TAIL]
    digits = found[:, _DIGITS_AT] - np.uint8(_ZERO)
    is_form = (digits <= _HIGHEST).all(axis=1) & (found[:, -1] == _END[0])
    crcs: Int64 = np.where(is_form, digits.astype(np.int64) @ _POWERS, -1)
    return crcs
