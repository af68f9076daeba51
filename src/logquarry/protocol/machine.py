"""State machines as tables: one table runs a machine and draws it for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final, Generic, TypeVar

State = TypeVar("State", bound=Enum)
Input = TypeVar("Input", bound=Enum)


class Transitions(Generic[State, Input]):
    """What becomes of each state on each input that it may meet.

    Args:
        start: where the machine begins.
        table: (state, input) to the next state. What is not in it cannot happen.

    Attributes:
        start: where the machine begins.
        table: the table.
    """

    def __init__(self, start: State, table: Mapping[tuple[State, Input], State]) -> None:
        self.start: Final = start
        self.table: Final = MappingProxyType(dict(table))

    def after(self, state: State, happened: Input) -> State:
        """The next state.

        Raises:
            AssertionError: if that input has no place in the state: a bug of the machine's.
        """
        following = self.table.get((state, happened))
        assert following is not None, f"{happened} in {state}"
        return following

    def diagram(self) -> str:
        """The table as a Mermaid state diagram; inputs are named by their values."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.start.name}"]
        lines += [
            f"    {state.name} --> {following.name}: {happened.value}"
            for (state, happened), following in self.table.items()
        ]
        return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# So many bytes a second, with the time as an argument.


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
