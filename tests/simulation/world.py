"""Simulated time: events run in order, each at its moment, without waiting."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Final

MS: Final = 1_000
SECOND: Final = 1_000_000
"""Simulated time is in microseconds."""


class Wrong(BaseException):
    """Something that must never happen has happened. No simulated code catches it."""


class Violation(AssertionError):
    """A :class:`Wrong` with the seed and the events before it."""


class World:
    """The future events, and the only source of chance.

    Args:
        seed: determines all events.

    Attributes:
        rng: the source of chance.
        now: microseconds since the beginning.
        story: what happened, for people.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0
        self.story: list[str] = []
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, moment: int, happens: Callable[[], None]) -> None:
        """Schedule an event at a moment; events of one moment happen in the order of the calls."""
        self._count += 1
        heapq.heappush(self._agenda, (max(moment, self.now), self._count, happens))

    def after(self, pause: int, happens: Callable[[], None]) -> None:
        """Schedule an event this many microseconds from now."""
        self.at(self.now + pause, happens)

    def run_until(self, moment: int) -> None:
        """Run the events before a moment."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= moment:
            self.now, _, happens = heapq.heappop(agenda)
            happens()
        self.now = moment

    def tell(self, what: str) -> None:
        """Note an event."""
        self.story.append(f"{self.now / SECOND:10.6f} {what}")


class NodeClock:
    """The clock of one machine: it is never set back, and it runs while the machine sleeps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ahead = world.rng.randrange(10**9) * MS
        # The wall clock can be set.
        self._wall = 1_700_000_000_000 * MS

    def now_ms(self) -> int:
        """Milliseconds of a clock that is never set."""
        return (self._world.now + self._ahead) // MS

    def wall_ms(self) -> int:
        """Milliseconds since 1970 by the machine's clock, which may be wrong."""
        return (self._world.now + self._wall) // MS

    def jump(self, forward: int) -> None:
        """Advance the clock, as if the machine had slept this many microseconds."""
        self._ahead += forward

    def set_wall(self, by: int) -> None:
        """Set the wall clock, forward or back."""
        self._wall += by
