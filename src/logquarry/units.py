"""The types of progress callbacks and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

Progress = Callable[[int, int], None]
"""Callback of long operations: (amount done, total amount)."""
Bars = Callable[[str], AbstractContextManager[Progress | None]]
"""Function that takes the name of a part of the work, and returns a context manager that yields the
part's progress callback.
"""


Clock = Callable[[], int]
"""Function that returns the time in milliseconds since 1970 (``System.currentTimeMillis()``)."""

_NS_PER_MS: Final = 1_000_000
# Each put calls this function. A put would be slower if the function looked up ``time.time``.
_time_ns = time.time_ns


def now_ms() -> int:
    """The current time in milliseconds."""
    return _time_ns() // _NS_PER_MS
