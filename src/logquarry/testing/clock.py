"""Clocks that a test controls."""

from __future__ import annotations

import threading

from logquarry.arguments import now_ms


class FakeClock:
    """A clock for ``StoreWriter.start(clock=...)``.

    The time changes only if you call the clock or :meth:`advance`. Thread-safe.

    Args:
        now: the first time, in milliseconds since 1970.
        step: milliseconds by which each call advances the clock. If ``step`` is above 0, no two
            calls return the same time.
    """

    def __init__(self, now: int = 1_700_000_000_000, *, step: int = 0) -> None:
        self.now = now
        self.step = step
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Return the time, and advance the clock by ``step``."""
        with self._lock:
            now = self.now
            self.now += self.step
            return now

    def advance(self, milliseconds: int) -> None:
        """Advance the clock; a negative number sets it back."""
        with self._lock:
            self.now += milliseconds


class ShiftedClock:
    """The system's time plus a shift that a test sets. Thread-safe.

    While the shift is 0, the clock agrees with clients, which compute times (TIMER_DELIVER_MS) from
    the system's time.
    """

    def __init__(self) -> None:
        self._shift = 0
        self._lock = threading.Lock()

    def __call__(self) -> int:
        """Return the time in milliseconds."""
        return now_ms() + self._shift

    def advance(self, milliseconds: int) -> None:
        """Advance the clock; a negative number sets it back."""
        with self._lock:
            self._shift += milliseconds
