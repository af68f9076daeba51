"""The time as stores tell it: milliseconds since 1970 (``System.currentTimeMillis()``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

Clock = Callable[[], int]
"""Gives the time in milliseconds."""

_NS_PER_MS: Final = 1_000_000
# Looked up once: each put asks.
_time_ns = time.time_ns


def now_ms() -> int:
    """The time, in milliseconds."""
    return _time_ns() // _NS_PER_MS
