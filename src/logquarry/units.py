"""The types of progress callbacks and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

Progress = Callable[[int, int], None]
"""Callback of long operations: (amount done, total amount)."""
Bars = Callable[[str], AbstractContextManager[Progress | None]]
"""Takes the name of a part of the work; returns a context manager that yields its callback."""


Clock = Callable[[], int]
"""Returns the time in milliseconds since 1970 (``System.currentTimeMillis()``)."""

_NS_PER_MS: Final = 1_000_000
# Each put calls this function. A lookup of ``time.time`` would slow down each put.
_time_ns = time.time_ns


def now_ms() -> int:
    """The current time in milliseconds."""
    return _time_ns() // _NS_PER_MS
