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
