"""Waits for a condition that another thread or process brings about, with a generous limit."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 60.0


def eventually(is_so: Callable[[], object]) -> None:
    """Wait until a condition is true; fail after a minute."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)
