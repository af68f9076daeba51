"""The types of the progress callback and the clock.

A ``position`` is a place within a file; an ``offset`` is a place within the log or a queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

Progress = Callable[[int, int], None]
"""Callback of long operations: (amount done, total amount)."""
Bars = Callable[[str], AbstractContextManager[Progress | None]]
"""Makes a progress callback for one part of the work, whose name it takes. Returns a context
manager."""


# --------------------------------------------------------------------------------------------------
# Time: milliseconds since 1970 (``System.currentTimeMillis()``)

Clock = Callable[[], int]
"""Returns the time in milliseconds."""

_NS_PER_MS: Final = 1_000_000
# Look this function up once: each put calls it.
_time_ns = time.time_ns


def now_ms() -> int:
    """The current time in milliseconds."""
    return _time_ns() // _NS_PER_MS
