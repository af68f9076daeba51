"""What the frames of a log say of each queue: which offsets messages have, and which are missing.

A frame's queue offset is under no CRC. One that does not fit between those of the messages before
and behind it has rotted, and can be told from them; taken at its word it would begin a new life of
the topic, or leave a gap of billions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from logquarry.log.layout import StoreLayout
from logquarry.log.walk import MISSING_FILE, DamagedSpan
from logquarry.read.consume_queue import has_message
from logquarry.read.log_end import consume_queues
from logquarry.read.log_queues import QueueKey

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


# --------------------------------------------------------------------------------------------------
# What a damaged log has lost: the spans, and the messages in them as far as anything tells.
#
# A message that is lost is known from the unit that a consume queue has for it, or from its own
# frame, where only the body is not what its CRC says.

LostOffsets = dict[QueueKey, list[Range]]


@dataclass(slots=True)
class LostSpan:
    """A part of the log of which nothing can be saved.

    Attributes:
        kind: as verify spells it.
        file: path below the store's folder.
        offset: physical offset of its first byte.
        length: its bytes.
        reason: in words.
        messages: queue offsets of the messages that stood in it, as far as anything tells.
    """

    kind: str
    file: str
    offset: int
    length: int
    reason: str
    messages: LostOffsets = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Physical offset behind it."""
        return self.offset + self.length

    def to_json(self) -> dict[str, Any]:
        """As an object of docs/json.md."""
        return {
            "kind": self.kind,
            "file": self.file,
            "offset": self.offset,
            "length": self.length,
            "reason": self.reason,
            "messages": [
                {
                    "topic": topic,
                    "queue_id": queue_id,
                    "queue_offset": start,
                    "count": stop - start,
                }
                for (topic, queue_id), ranges in sorted(self.messages.items())
                for start, stop in ranges
            ],
        }


def lost_spans(
    layout: StoreLayout, damage: Sequence[DamagedSpan], end: int, known_end: int
) -> list[LostSpan]:
    """The spans that a walk has found, and what the log is known to have had behind its end.

    Args:
        layout: the store's files.
        damage: from the walk, in order.
        end: where the log ends.
        known_end: where it is known to have ended.
    """
    found: list[LostSpan] = []
    for span in damage:
        path = layout.log_file(span.offset)
        last = found[-1] if found else None
        joins = last is not None and last.end == span.offset and last.kind == span.kind
        # A gap of several files is one loss.
        if last is not None and joins and span.kind == MISSING_FILE:
            last.length += span.length
            continue
        found.append(LostSpan(span.kind, path, span.offset, span.length, span.reason))
    if known_end > end:
        reason = f"the log is known to have reached up to {known_end}, and ends at {end}"
        path = layout.log_file(end)
        found.append(LostSpan(MISSING_FILE, path, end, known_end - end, reason))
    return found


def tell_messages(
    layout: StoreLayout, spans: Sequence[LostSpan], framed: Mapping[QueueKey, Pairs]
) -> None:
    """Fill in the messages of lost spans.

    Args:
        layout: the store's files.
        spans: in order.
        framed: physical offset and queue offset of each message that its frame tells.
    """
    if not spans:
        return
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.end for span in spans], np.int64)
    told: dict[QueueKey, list[tuple[Int64, Int64]]] = {
        key: [(np.array(places, np.int64), np.array(offsets, np.int64))]
        for key, (places, offsets) in framed.items()
    }
    for queue in consume_queues(layout):
        for start, units in queue.runs(0, queue.max_offset):
            places = units["physical_offset"].astype(np.int64)
            at = np.searchsorted(starts, places, "right") - 1
            inside = (at >= 0) & (places < ends[np.maximum(at, 0)])
            inside &= has_message(units)
            which = np.flatnonzero(inside)
            if len(which):
                key = queue.topic, queue.queue_id
                told.setdefault(key, []).append((places[which], start + which))
    for key, pairs in told.items():
        places, offsets = (np.concatenate(part) for part in zip(*pairs, strict=True))
        at = np.searchsorted(starts, places, "right") - 1
        for number in np.unique(at).tolist():
            spans[number].messages[key] = ranges_of(offsets[at == number])


Pairs = tuple[list[int], list[int]]


def lost_by_queue(
    spans: Iterable[LostSpan], gaps: Mapping[QueueKey, Sequence[Range]]
) -> LostOffsets:
    """The queue offsets of all messages that are known to be lost, queue by queue.

    Args:
        spans: what was lost.
        gaps: offsets that no message has between others that messages have.
    """
    found: dict[QueueKey, list[Range]] = {key: list(ranges) for key, ranges in gaps.items()}
    for span in spans:
        for key, ranges in span.messages.items():
            found.setdefault(key, []).extend(ranges)
    return {key: merged(ranges) for key, ranges in found.items() if ranges}
