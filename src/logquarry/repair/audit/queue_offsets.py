"""Queue offsets in the frames of a log: gaps, recreated topics, harmed offsets.

No CRC covers a frame's queue offset. Salvage has no reliable queue to compare with, so it treats an
offset as harmed if it does not fit between those of the neighbouring messages. If salvage trusted
such an offset, the offset would look like a recreated topic, or leave a gap of billions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from logquarry.repair.audit.differences import Int64
from logquarry.write.queue_writer import MOST_GAP, MOST_OFFSET

Range = tuple[int, int]
"""Queue offsets from the first up to, not including, the second."""


@dataclass(slots=True)
class _Break:
    """A message whose queue offset is not one more than that of the previous message."""

    place: int
    offset: int
    before: int
    number: int


@dataclass(frozen=True, slots=True)
class QueueStory:
    """The queue offsets of one queue in a log.

    Attributes:
        first: queue offset of the first message since the topic was last recreated.
        next: one past the last queue offset.
        gaps: offsets between ``first`` and ``next`` that no message has.
        lives: number of times that the topic was created in this log.
        mended: physical offset -> right queue offset, of messages with a harmed queue offset.
    """

    first: int
    next: int
    gaps: tuple[Range, ...] = ()
    lives: int = 1
    mended: dict[int, int] = field(default_factory=dict)

    @property
    def is_padded(self) -> bool:
        """Whether the queue needs fillers."""
        return bool(self.first or self.gaps)


class QueueNotes:
    """Collects the queue offsets of one queue, in the log's order."""

    def __init__(self, first: int) -> None:
        first = first if 0 <= first <= MOST_OFFSET else 0
        self._first = first
        self._next = first
        self._count = 0
        self._breaks: list[_Break] = []
        self._impossible: dict[int, int] = {}

    @property
    def next(self) -> int:
        """One past the last queue offset."""
        return self._next

    def take(self, places: Int64, offsets: Int64, counts: Int64 | None = None) -> None:
        """Take some more frames; ``counts``: number of messages of each (None: one)."""
        impossible = np.flatnonzero((offsets < 0) | (offsets > MOST_OFFSET)).tolist()
        if impossible:
            offsets = offsets.copy()
            for at in impossible:
                offsets[at] = offsets[at - 1] + 1 if at else self._next
                self._impossible[int(places[at])] = int(offsets[at])
        last = offsets if counts is None else offsets + counts - 1
        before = np.append(self._next - 1, last[:-1])
        for at in np.flatnonzero(offsets - before != 1).tolist():
            self._breaks.append(
                _Break(int(places[at]), int(offsets[at]), int(before[at]), self._count + at)
            )
        self._count += len(offsets)
        self._next = int(last[-1]) + 1

    def story(self, *, mends: bool = True) -> QueueStory:
        """The queue offsets of all messages.

        Args:
            mends: whether to correct offsets that do not fit.

        Raises:
            ValueError: if more than MOST_GAP messages are missing at one place.
        """
        mended = (self._mend() if mends else {}) | self._impossible
        first, end, gaps, lives = self._first, self._next, list[Range](), 1
        for found in self._breaks:
            if found.offset <= found.before:
                first, gaps = found.offset, []
                lives += 1
            elif found.offset > found.before + 1:
                if found.offset - found.before > MOST_GAP:
                    raise ValueError(
                        f"the message at {found.place} has queue offset {found.offset}, and the "
                        f"message before it {found.before}: one of them is invalid"
                    )
                gaps.append((found.before + 1, found.offset))
        return QueueStory(first, end, tuple(gaps), lives, mended)

    def _mend(self) -> dict[int, int]:
        """Remove breaks that one harmed offset explains; the right offsets by physical offset."""
        mended: dict[int, int] = {}
        kept: list[_Break] = []
        breaks = self._breaks
        at = 0
        while at < len(breaks):
            here = breaks[at]
            behind = breaks[at + 1] if at + 1 < len(breaks) else None
            follows = behind is not None and behind.number == here.number + 1
            is_last = here.number == self._count - 1
            if follows and behind is not None and _is_harmed(here, behind.offset):
                mended[here.place] = here.before + 1
                if behind.offset > here.before + 2:
                    kept.append(_Break(behind.place, behind.offset, here.before + 1, behind.number))
                at += 2
            elif is_last and here.offset - here.before > MOST_GAP:
                mended[here.place] = here.before + 1
                self._next = here.before + 2
                at += 1
            else:
                kept.append(here)
                at += 1
        self._breaks = kept
        return mended


def _is_harmed(here: _Break, behind: int) -> bool:
    """Whether an offset does not fit between those of the neighbouring messages."""
    if here.offset > here.before:
        return here.before + 1 < behind < here.offset
    return behind == here.before + 2
