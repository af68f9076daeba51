"""Java's arithmetic, hashes, CRC and map orders, as far as the bytes in RocketMQ's files depend on
them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from functools import cache
from typing import Final

try:
    from zlib_ng.zlib_ng import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

INT_MAX = 0x7FFFFFFF
INT_MIN = -0x80000000
LONG_MAX = 0x7FFFFFFFFFFFFFFF
LONG_MIN = -0x8000000000000000

_TREEIFY_THRESHOLD = 8
_MIN_TREEIFY_CAPACITY = 64


NO_NUMBER = -1
_MOST_DIGITS = 18


def digits(text: str) -> int:
    """Parse up to 18 ASCII digits; return NO_NUMBER for other text. The function does not call
    ``int`` for longer text, because Python refuses to parse very long numbers.
    """
    plain = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if plain else NO_NUMBER


def to_int(value: int) -> int:
    """Wrap to a signed 32-bit integer, like Java's ``(int)``."""
    value &= 0xFFFFFFFF
    return value - 0x100000000 if value & 0x80000000 else value


def to_long(value: int) -> int:
    """Wrap to a signed 64-bit integer, like Java's arithmetic on ``long``."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - 0x10000000000000000 if value >> 63 else value


UTF8_ERRORS: Final = "logquarry-java"
"""Error handler for decoding UTF-8: invalid bytes become U+FFFD as in ``new String(bytes, UTF_8)``.

Python's own handler ``replace`` would be wrong for the three bytes of an encoded surrogate:
``replace`` makes three U+FFFD, and Java makes one.
"""


def _replace_as_java(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    data, at = error.object, error.start
    if data[at] == 0xED and data[at + 1 : at + 2] >= b"\xa0" and data[at + 1] <= 0xBF:
        whole = at + 2 < len(data) and data[at + 2] & 0xC0 == 0x80
        return "\ufffd", at + 3 if whole else at + 2
    return "\ufffd", error.end


codecs.register_error(UTF8_ERRORS, _replace_as_java)


def hash_code(text: str) -> int:
    """Return ``String.hashCode()``: the hash over the UTF-16 code units, as a signed 32-bit
    integer.
    """
    result = 0
    for character in text:
        point = ord(character)
        if point > 0xFFFF:
            point -= 0x10000
            result = (31 * result + (0xD800 + (point >> 10))) & 0xFFFFFFFF
            point = 0xDC00 + (point & 0x3FF)
        result = (31 * result + point) & 0xFFFFFFFF
    return to_int(result)


def positive_hash_code(text: str) -> int:
    """Return the absolute value of a text's hash, or 0 if the hash is ``Integer.MIN_VALUE``
    (``IndexFile.indexKeyHashMethod``).
    """
    value = abs(hash_code(text))
    # QUIRK: Math.abs(Integer.MIN_VALUE) is negative in Java, and RocketMQ uses 0 instead.
    return 0 if value > INT_MAX else value


crc32 = _crc32
"""The CRC-32 function of zlib-ng, which is faster, if zlib-ng is installed; else of zlib."""


@cache
def crc32_address() -> int:
    """Address of zlib-ng's ``crc32(uint32, const uint8_t *, size_t)``; 0 without zlib-ng."""
    import ctypes

    try:
        from zlib_ng import zlib_ng

        function = ctypes.CDLL(zlib_ng.__file__).zng_crc32_z
    except (ImportError, OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def body_crc(crc: int) -> int:
    """Return the CRC as it is stored in a frame, without the sign bit (``UtilAll.crc32``)."""
    return crc & INT_MAX


def table_size_for(count: int) -> int:
    """Return the number of buckets in a new Java map that copies a map of ``count`` entries (``new
    HashMap<>(map)``).
    """
    wanted = int(count / 0.75 + 1.0)
    size = 1
    while size < wanted:
        size *= 2
    return size


def hash_map_order(keys: Iterable[str], table_size: int = 16) -> list[str]:
    """Return ``keys`` in the order of a ``java.util.HashMap`` into which they were inserted one by
    one.

    When RocketMQ rewrites a property string, it writes the properties in this order. When a bucket
    gets a ninth entry, Java doubles the table if it has fewer than 64 buckets, and otherwise
    converts the bucket to a tree. This function makes no trees, because nine property names of one
    message practically never fall into the same bucket. For a copied map, ``table_size`` must be
    the result of :func:`table_size_for`.
    """
    buckets: list[list[tuple[int, str]]] = [[] for _ in range(table_size)]
    for count, key in enumerate(keys, 1):
        spread = hash_code(key) & 0xFFFFFFFF
        spread ^= spread >> 16
        bucket = buckets[spread & (len(buckets) - 1)]
        bucket.append((spread, key))
        if len(bucket) > _TREEIFY_THRESHOLD and len(buckets) < _MIN_TREEIFY_CAPACITY:
            buckets = _resized(buckets)
        if count > len(buckets) * 0.75:
            buckets = _resized(buckets)
    return [key for bucket in buckets for _, key in bucket]


def _resized(buckets: list[list[tuple[int, str]]]) -> list[list[tuple[int, str]]]:
    size = len(buckets) * 2
    larger: list[list[tuple[int, str]]] = [[] for _ in range(size)]
    for bucket in buckets:
        for spread, key in bucket:
            larger[spread & (size - 1)].append((spread, key))
    return larger
