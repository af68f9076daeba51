"""So many bytes a second, with the time as an argument."""

from __future__ import annotations


class Bucket:
    """Lets bytes through: one portion at once, and then as time goes by.

    Args:
        rate: bytes a second, on average; None for as many as there are.
        portion: bytes that may go together. Less is not let through, so that none gets tiny.
        now_ms: the time.
    """

    def __init__(self, rate: int | None, portion: int, now_ms: int) -> None:
        self._rate = rate
        self._portion = portion
        # In thousandths of bytes, so that nothing is lost to rounding.
        self._held = 1_000 * portion
        self._filled_ms = now_ms

    def allowed(self, now_ms: int) -> int:
        """Bytes that may go now: a portion, or nothing."""
        if self._rate is None:
            return self._portion
        # A second's worth at most: a pause is not made up for.
        most = 1_000 * max(self._portion, self._rate)
        passed = max(0, now_ms - self._filled_ms)
        self._held = min(most, self._held + passed * self._rate)
        self._filled_ms = max(self._filled_ms, now_ms)
        return self._portion if self._held >= 1_000 * self._portion else 0

    def take(self, size: int) -> None:
        """Count bytes that went."""
        if self._rate is not None:
            self._held -= 1_000 * size

    def next_ms(self) -> int:
        """When the next portion may go, if none goes before."""
        if self._rate is None:
            return self._filled_ms
        lacking = max(0, 1_000 * self._portion - self._held)
        return self._filled_ms - (-lacking // self._rate)
