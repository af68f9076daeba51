"""What the frames of a log say of each queue: which offsets messages have, and which are missing.

A frame's queue offset is under no CRC. One that does not fit between those of the messages before
and behind it has rotted, and can be told from them; taken at its word it would begin a new life of
the topic, or leave a gap of billions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Range = tuple[int, int]
"""Queue offsets from the first up to, not including, the second."""

MOST_MISSING: Final = 1 << 24
"""Most messages that may be missing between two of a queue: units stand for all of them."""
LARGEST_OFFSET: Final = 1 << 48
"""A broker that puts a million messages a second into one queue gets there in nine years."""


@dataclass(slots=True)
class _Break:
    """A message whose queue offset does not follow on that of the one before it."""

    place: int
    offset: int
    before: int
    number: int


@dataclass(frozen=True, slots=True)
class QueueStory:
    """What a log has of one queue.

    Attributes:
        first: queue offset of the first message of the newest life of the topic.
        next: one past the last.
        gaps: offsets between those two that no message has.
        lives: how often the topic was made anew in this log.
        mended: by physical offset, the queue offset of a message whose own has rotted.
    """

    first: int
    next: int
    gaps: tuple[Range, ...] = ()
    lives: int = 1
    mended: dict[int, int] = field(default_factory=dict)

    @property
    def is_padded(self) -> bool:
        """Whether the queue needs units that stand for no message."""
        return bool(self.first or self.gaps)


class QueueNotes:
    """Notes of one queue, made as its messages go by in the log's order."""

    def __init__(self, first: int) -> None:
        first = first if 0 <= first <= LARGEST_OFFSET else 0
        self._first = first
        self._next = first
        self._count = 0
        self._breaks: list[_Break] = []
        self._impossible: dict[int, int] = {}

    @property
    def next(self) -> int:
        """One past the last offset."""
        return self._next

    def take(self, places: Int64, offsets: Int64) -> None:
        """Some more messages: their physical offsets and queue offsets."""
        impossible = np.flatnonzero((offsets < 0) | (offsets > LARGEST_OFFSET)).tolist()
        if impossible:
            offsets = offsets.copy()
            for at in impossible:
                offsets[at] = offsets[at - 1] + 1 if at else self._next
                self._impossible[int(places[at])] = int(offsets[at])
        before = np.append(self._next - 1, offsets[:-1])
        for at in np.flatnonzero(offsets - before != 1).tolist():
            self._breaks.append(
                _Break(int(places[at]), int(offsets[at]), int(before[at]), self._count + at)
            )
        self._count += len(offsets)
        self._next = int(offsets[-1]) + 1

    def story(self, *, mends: bool = True) -> QueueStory:
        """What they come to.

        Args:
            mends: whether an offset that does not fit is taken for a rotten one.

        Raises:
            ValueError: if more messages are missing between two than MOST_MISSING.
        """
        mended = (self._mend() if mends else {}) | self._impossible
        first, end, gaps, lives = self._first, self._next, list[Range](), 1
        for found in self._breaks:
            if found.offset <= found.before:
                first, gaps = found.offset, []
                lives += 1
            elif found.offset > found.before + 1:
                if found.offset - found.before > MOST_MISSING:
                    raise ValueError(
                        f"the message at {found.place} says queue offset {found.offset}, and the "
                        f"one before it {found.before}: one of them cannot be"
                    )
                gaps.append((found.before + 1, found.offset))
        return QueueStory(first, end, tuple(gaps), lives, mended)

    def _mend(self) -> dict[int, int]:
        """Take out the breaks that are of one rotten offset; what it must have been, by place."""
        mended: dict[int, int] = {}
        kept: list[_Break] = []
        breaks = self._breaks
        at = 0
        while at < len(breaks):
            here = breaks[at]
            behind = breaks[at + 1] if at + 1 < len(breaks) else None
            follows = behind is not None and behind.number == here.number + 1
            is_last = here.number == self._count - 1
            if follows and behind is not None and _is_rotten(here, behind.offset):
                mended[here.place] = here.before + 1
                if behind.offset > here.before + 2:
                    kept.append(_Break(behind.place, behind.offset, here.before + 1, behind.number))
                at += 2
            elif is_last and here.offset - here.before > MOST_MISSING:
                mended[here.place] = here.before + 1
                self._next = here.before + 2
                at += 1
            else:
                kept.append(here)
                at += 1
        self._breaks = kept
        return mended


def _is_rotten(here: _Break, behind: int) -> bool:
    """Whether an offset does not fit between those of the messages before and behind it."""
    if here.offset > here.before:
        return here.before + 1 < behind < here.offset
    return behind == here.before + 2


def merged(ranges: list[Range]) -> list[Range]:
    """Ranges in order, those that touch made one."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def ranges_of(offsets: Int64) -> list[Range]:
    """Offsets, in any order, as ranges."""
    if not len(offsets):
        return []
    ordered = np.unique(offsets)
    cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
    bounds = [0, *cuts.tolist(), len(ordered)]
    return [(int(ordered[a]), int(ordered[b - 1]) + 1) for a, b in pairwise(bounds)]
