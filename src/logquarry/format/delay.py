"""Delay levels, and the tags code that the dispatcher computes from a frame."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.format import properties as props

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
DEFAULT_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
LEVELS_3: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m"
"""The levels of RocketMQ 3.1.3."""

_MOST_DIGITS = 10

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@lru_cache(maxsize=16)
def parse_levels(text: str) -> tuple[int, ...]:
    """Delay of each level in milliseconds, level 1 first (``parseDelayLevel``)."""
    levels: list[int] = []
    for word in text.split():
        number, unit = word[:-1], word[-1:]
        if unit not in _UNIT_MS or not number.isascii() or not number.isdigit():
            raise UsageError(f"not a delay level: {word!r} in {text!r}")
        levels.append(int(number) * _UNIT_MS[unit])
    return tuple(levels)


def tags_code(
    topic: str,
    properties: Mapping[str, str],
    store_timestamp: int,
    levels_ms: tuple[int, ...],
) -> int:
    """The tags code of a frame (``CommitLog.checkMessageAndReturnSize``).

    It is the hash of TAGS; for a message with a DELAY in the schedule topic it is the delivery
    time. If DELAY is not a number (Java would fail), it is the hash.
    """
    tags = properties.get(props.TAGS)
    code = java.hash_code(tags) if tags else 0
    delay = properties.get(props.DELAY)
    if delay is not None and topic == SCHEDULE_TOPIC:
        level = parse_int(delay)
        # Java caps the level first: without levels it becomes 0, and the hash stays.
        level = 0 if level is None else min(level, len(levels_ms))
        if level > 0:
            code = java.to_long(store_timestamp + levels_ms[level - 1])
    return code


def parse_int(text: str) -> int | None:
    """``Integer.parseInt``, or None if that throws."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Java checks single chars, and so accepts no digits beyond the BMP.
    if not digits.isdecimal() or max(digits) > "\uffff":
        return None
    # Longer numbers do not fit into an int, and Python refuses to parse very long ones.
    digits = digits.lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        return None
    value = int(digits) * (-1 if text[0] == "-" else 1)
    return value if java.INT_MIN <= value <= java.INT_MAX else None
