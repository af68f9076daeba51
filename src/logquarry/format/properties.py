r"""Functions for the properties of a message: property strings, keys, tags codes, delay levels and
their delivery times, property CRCs, and the parser of tag expressions.

::

    key \x01 value \x02 key \x01 value

Follows ``MessageDecoder.string2messageProperties`` and ``messageProperties2String`` of 4.9.3.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from logquarry.errors import UsageError
from logquarry.format import java

NAME_VALUE_SEPARATOR: Final = "\x01"
PROPERTY_SEPARATOR: Final = "\x02"

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
UNIQ_KEY: Final = "UNIQ_KEY"
PRODUCER_GROUP: Final = "PGROUP"
TRANSACTION_PREPARED: Final = "TRAN_MSG"
WAIT: Final = "WAIT"
DELAY: Final = "DELAY"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE_ID: Final = "REAL_QID"
RETRY_TOPIC: Final = "RETRY_TOPIC"
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
TRANSACTION_ID: Final = "__transactionId__"
TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
TRANSACTION_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
CHECK_IMMUNITY_TIME: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
MULTI_SEPARATOR: Final = ","
"""Separates the queues in INNER_MULTI_DISPATCH, and the offsets in INNER_MULTI_QUEUE_OFFSET."""
INNER_NUM: Final = "INNER_NUM"
INNER_BASE: Final = "INNER_BASE"
INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
DELAYS: Final = (DELAY, TIMER_DELIVER_MS, TIMER_DELAY_MS, TIMER_DELAY_SEC)
"""Properties that delay the delivery of a message."""
TIMER_DELETE_UNIQ_KEY: Final = "TIMER_DEL_UNIQKEY"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
TIMER_ENQUEUE_MS: Final = "TIMER_ENQUEUE_MS"
TIMER_DEQUEUE_MS: Final = "TIMER_DEQUEUE_MS"
TIMER_ROLL_TIMES: Final = "TIMER_ROLL_TIMES"

KEY_SEPARATOR: Final = " "
TAG_SEPARATOR: Final = "||"
ANY_TAG: Final = "*"
_TRIMMED: Final = "".join(map(chr, range(0x21)))
"""The characters that Java's ``trim`` removes."""


def decode(text: str) -> dict[str, str]:
    """Decode the properties, in the order in which their keys first appear.

    Each part of the string must be ``key \\x01 value``. A part in another form, or with an empty
    key or value, is skipped. If a key is repeated, its last value is used.
    """
    result: dict[str, str] = {}
    for segment in text.split(PROPERTY_SEPARATOR):
        key, separator, value = segment.partition(NAME_VALUE_SEPARATOR)
        if separator and key and value:
            result[key] = value
    return result


def decode_bytes(data: bytes) -> dict[str, str]:
    """Decode the properties in a frame; bytes that are not UTF-8 become U+FFFD, as in Java."""
    return decode(data.decode("utf-8", java.UTF8_ERRORS))


def encode(properties: Mapping[str, str], *, is_closed: bool = False) -> str:
    """Encode properties as RocketMQ does. With ``is_closed``, the string ends with a separator, as
    in RocketMQ 3.x.
    """
    text = PROPERTY_SEPARATOR.join(
        f"{key}{NAME_VALUE_SEPARATOR}{value}" for key, value in properties.items()
    )
    return f"{text}{PROPERTY_SEPARATOR}" if is_closed and text else text


def split_keys(keys: str) -> list[str]:
    """Split a ``KEYS`` property into its non-empty keys, as RocketMQ does before it adds the keys
    to the index.
    """
    return [key for key in keys.split(KEY_SEPARATOR) if key]


def parse_tags(expression: str | None) -> frozenset[str] | None:
    """Parse a tag expression; None means any tag (``FilterAPI.buildSubscriptionData``).

    If the whole expression is ``*``, it means any tag; between separators, ``*`` is an ordinary
    tag. RocketMQ rejects an expression without tags; here such an expression means any tag.
    """
    if expression is None or expression == ANY_TAG:
        return None
    words = (word.strip(_TRIMMED) for word in expression.split(TAG_SEPARATOR))
    return frozenset(word for word in words if word) or None


SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
DEFAULT_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
LEVELS_3: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m"
"""The levels of RocketMQ 3.1.3."""

_MOST_DIGITS = 10

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@lru_cache(maxsize=16)
def parse_levels(text: str) -> tuple[int, ...]:
    """Return the delay of each level in milliseconds, level 1 first (``parseDelayLevel``)."""
    levels: list[int] = []
    for word in text.split():
        number, unit = java.digits(word[:-1]), word[-1:]
        if unit not in _UNIT_MS or number == java.NO_NUMBER:
            raise UsageError(f"not a delay level: {word!r} in {text!r}")
        levels.append(number * _UNIT_MS[unit])
    return tuple(levels)


def tags_code(
    topic: str,
    properties: Mapping[str, str],
    store_timestamp: int,
    levels_ms: tuple[int, ...],
) -> int:
    """Return the tags code of a frame (``CommitLog.checkMessageAndReturnSize``).

    The code is the hash of TAGS. For a delayed message in the schedule topic, the code is the
    delivery time instead. If DELAY is not a number, this function returns the hash, but Java raises
    an exception.
    """
    tags = properties.get(TAGS)
    code = java.hash_code(tags) if tags else 0
    delay = properties.get(DELAY)
    if delay is not None and topic == SCHEDULE_TOPIC:
        level = parse_int(delay)
        # Like Java, first limit the level to the number of levels. If no levels are configured, the
        # level becomes 0, and the code is the hash.
        level = 0 if level is None else min(level, len(levels_ms))
        if level > 0:
            code = java.to_long(store_timestamp + levels_ms[level - 1])
    return code


def parse_int(text: str) -> int | None:
    """Parse text as Java's ``Integer.parseInt`` does. Returns None if Java would throw an
    exception.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Java checks single chars (16 bits), so it accepts no digits outside the BMP.
    if not digits.isdecimal() or max(digits) > "\uffff":
        return None
    # A longer number cannot fit into Java's int, and Python would refuse to parse a very long
    # number.
    digits = digits.lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        return None
    value = int(digits) * (-1 if text[0] == "-" else 1)
    return value if java.INT_MIN <= value <= java.INT_MAX else None


# --------------------------------------------------------------------------------------------------
# The property CRC, which RocketMQ 5 appends to a frame (``enabledAppendPropCRC``)
#
#     frame ... | __CRC32# 01 | 10 digits, the least significant first | 02
#
# These are the last 20 bytes of the frame. The digits are the CRC-32 of all bytes before these 20,
# with the highest bit of the CRC set to 0.

CRC_PREFIX: Final = b"__CRC32#\x01"
CRC_SIZE: Final = 20
CRC_DIGITS: Final = 10
CRC_END: Final = b"\x02"
assert len(CRC_PREFIX) + CRC_DIGITS + len(CRC_END) == CRC_SIZE

_CRCS: Final = re.compile(rb"(?:\A|(?<=\x02))" + re.escape(CRC_PREFIX) + rb"[^\x02]*(?:\x02|\Z)")


def encode_crc(frame: bytes | memoryview) -> bytes:
    """Encode the last 20 bytes of a frame from the bytes before them."""
    crc = zlib.crc32(frame) & java.INT_MAX
    return CRC_PREFIX + f"{crc:0{CRC_DIGITS}d}"[::-1].encode() + CRC_END


def with_crc_room(properties: bytes) -> bytes:
    """Remove each CRC property from a property string, and append zeros as room for a new one.

    As in ``MessageDecoder.deleteProperty``, the name of the CRC property is ignored if it occurs
    inside a value.
    """
    properties = _CRCS.sub(b"", properties)
    glue = b"" if not properties or properties.endswith(CRC_END) else CRC_END
    return properties + glue + bytes(CRC_SIZE)


def fill_in_crc(frame: bytearray, start: int, end: int) -> None:
    """Write the CRC of the frame ``frame[start:end]`` into the last 20 bytes of the frame."""
    frame[end - CRC_SIZE : end] = encode_crc(memoryview(frame)[start : end - CRC_SIZE])


def matches_crc(frame: bytes | memoryview) -> bool | None:
    """Return whether a frame's property CRC matches the frame's bytes; None if the frame has no
    property CRC.
    """
    view = memoryview(frame)
    tail = bytes(view[-CRC_SIZE:])
    if len(view) < CRC_SIZE or not tail.startswith(CRC_PREFIX):
        return None
    return tail == encode_crc(view[:-CRC_SIZE])
