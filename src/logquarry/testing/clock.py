"""A clock that a test sets."""

from __future__ import annotations

import threading


class FakeClock:
    """Milliseconds, which go on only when they are told to. Any thread may ask.

    Args:
        now: the first time that it tells.
        step: how far it goes on each time that it is asked, so that no two answers are the same.

    Attributes:
        now: what it tells next.
    """

    def __init__(self, now: int = 1_700_000_000_000, *, step: int = 0) -> None:
        self.now = now
        self.step = step
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """The time."""
        with self._lock:
            now = self.now
            self.now += self.step
            return now

    def advance(self, milliseconds: int) -> None:
        """Go on; back, if it is below 0."""
        with self._lock:
            self.now += milliseconds
