"""Types for integers that must not be mixed up, the progress callback, and the clock.

A ``position`` is a place within a file; an ``offset`` is a place within the log or a queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, NewType

PhysicalOffset = NewType("PhysicalOffset", int)
"""Byte offset in the commit log, counted over all its files."""

QueueOffset = NewType("QueueOffset", int)
"""Index of an entry in a consume queue (RocketMQ: logic offset / 20)."""

TagsCode = NewType("TagsCode", int)
"""Third field of a queue entry: Java's hash of the tags, or a delayed message's delivery time."""

MessageId = NewType("MessageId", str)
"""Upper-case hex of store host and physical offset: 32 characters, 56 with an IPv6 host."""

Progress = Callable[[int, int], None]
"""Callback of long operations: (amount done, total amount)."""
Bars = Callable[[str], AbstractContextManager[Progress | None]]
"""Makes a progress callback, as a context, from the name of a part of the work."""


# --------------------------------------------------------------------------------------------------
# Time: milliseconds since 1970 (``System.currentTimeMillis()``)

Clock = Callable[[], int]
"""Returns the time in milliseconds."""

_NS_PER_MS: Final = 1_000_000
# Looked up once: each put calls it.
_time_ns = time.time_ns


def now_ms() -> int:
    """The current time in milliseconds."""
    return _time_ns() // _NS_PER_MS
