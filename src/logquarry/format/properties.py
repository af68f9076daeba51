r"""The property string of a message: ``key \x01 value \x02 key \x01 value``.

Follows ``MessageDecoder.string2messageProperties`` and ``messageProperties2String`` of 4.9.3.
The parser is lenient: a segment that is no ``key \x01 value`` with both sides non-empty is
skipped, and of duplicate keys the last value wins. Only the length of the string is a matter of
soundness, never what stands in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"

KEY_SEPARATOR: Final = " "


def decode(text: str) -> dict[str, str]:
    """The properties in the order in which their keys first appear."""
    result: dict[str, str] = {}
    for segment in text.split(PROPERTY_SEPARATOR):
        key, separator, value = segment.partition(NAME_VALUE_SEPARATOR)
        if separator and key and value:
            result[key] = value
    return result


def decode_bytes(data: bytes) -> dict[str, str]:
    """The same from the bytes of a frame; bytes that are not UTF-8 become U+FFFD, as in Java."""
    return decode(data.decode("utf-8", java.UTF8_ERRORS))


def encode(properties: Mapping[str, str], *, is_closed: bool = False) -> str:
    """The string RocketMQ writes.

    Args:
        properties: what it says, in its order.
        is_closed: whether a separator ends it too, as in 3.x. 4.9.3 writes none there.
    """
    text = PROPERTY_SEPARATOR.join(
        f"{key}{NAME_VALUE_SEPARATOR}{value}" for key, value in properties.items()
    )
    return f"{text}{PROPERTY_SEPARATOR}" if is_closed and text else text


def split_keys(keys: str) -> list[str]:
    """The single keys of a ``KEYS`` property, as the index takes them (empty ones are skipped)."""
    return [key for key in keys.split(KEY_SEPARATOR) if key]
