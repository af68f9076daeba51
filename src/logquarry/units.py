"""Names for the integers that must not be mixed up, and who is told of two of them.

``position`` is a place within a file, ``offset`` a place within the log or a queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NewType

PhysicalOffset = NewType("PhysicalOffset", int)
"""Byte offset in the commit log, counted over all its files."""

QueueOffset = NewType("QueueOffset", int)
"""Index of a unit in a consume queue (RocketMQ: logic offset / 20)."""

TagsCode = NewType("TagsCode", int)
"""What a consume queue unit carries besides offset and size: Java's hash of the tags, or for a
delayed message its delivery time."""

MessageId = NewType("MessageId", str)
"""Upper-case hex of store host and physical offset: 32 characters, 56 with an IPv6 host."""

Progress = Callable[[int, int], None]
"""What long work calls now and then: (how much is done, of how much)."""


# --------------------------------------------------------------------------------------------------
# The time as stores tell it: milliseconds since 1970 (``System.currentTimeMillis()``).

Clock = Callable[[], int]
"""Gives the time in milliseconds."""

_NS_PER_MS: Final = 1_000_000
# Looked up once: each put asks.
_time_ns = time.time_ns


def now_ms() -> int:
    """The time, in milliseconds."""
    return _time_ns() // _NS_PER_MS
