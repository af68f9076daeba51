"""Finds what a damaged log has lost: the damaged parts, their messages, and harmed queue offsets.

BODYCRC does not cover the queue offset in a frame. So damage can change the queue offset, and the
frame still seems valid. A queue offset is called *harmed* if damage changed it. A harmed queue
offset does not fit between the queue offsets of the neighbouring messages. If salvage used a harmed
queue offset, the topic would seem to be deleted and created again, or billions of messages would
seem to be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from logquarry.format import sys_flag
from logquarry.format.arrays import Bools, Int64, consecutive
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import MISSING_FILE, DamagedSpan, Span
from logquarry.read.batch_queue import BatchQueue, all_queues
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import has_message
from logquarry.repair.audit.differences import SMALL_GAP, span_numbers
from logquarry.text import document
from logquarry.write.queue_writer import MOST_GAP, MOST_OFFSET

Range = tuple[int, int]
"""A range of queue offsets: (first, one past the last)."""

IsQueued = Callable[[int, int], bool]


@dataclass(slots=True)
class _Break:
    """A message whose queue offset does not follow that of the queue's previous message."""

    place: int
    offset: int
    before: int
    number: int
    distance: int
    """Number of bytes in the log from the start of the queue's previous message to this one."""
    is_own: bool
    """Whether the frame has this queue offset; False for a multi-dispatch copy."""
    count: int
    """Number of messages in the frame."""

    @property
    def is_far(self) -> bool:
        return self.offset - self.before > max(SMALL_GAP, self.distance // FIXED_SIZE_V1)


@dataclass(frozen=True, slots=True)
class QueueStory:
    """The queue offsets of the messages of one queue in a log.

    Attributes:
        first: queue offset of the first message since the topic was last created.
        next: one past the last queue offset.
        gaps: ranges of queue offsets between ``first`` and ``next`` that no message has.
        mended: physical offset -> corrected queue offset, for each harmed queue offset.
        strays: physical offset -> queue offset, for each frame that has no place in the queue.
    """

    first: int
    next: int
    gaps: tuple[Range, ...] = ()
    mended: dict[int, int] = field(default_factory=dict)
    strays: dict[int, int] = field(default_factory=dict)

    def has(self, offsets: Int64) -> Bools:
        """Return a mask: whether the queue has a message at each queue offset."""
        inside: Bools = (offsets >= self.first) & (offsets < self.next)
        if self.gaps:
            starts, stops = np.array(self.gaps, np.int64).T
            gap = np.searchsorted(starts, offsets, "right") - 1
            inside &= (gap < 0) | (offsets >= stops[gap])
        return inside

    @property
    def is_padded(self) -> bool:
        """Whether the new queue needs fillers, because it does not begin at 0 or has gaps."""
        return bool(self.first or self.gaps)


class QueueNotes:
    """Collects the queue offsets of the messages of one queue, in the order of the log."""

    def __init__(self, first: int) -> None:
        first = first if 0 <= first <= MOST_OFFSET else 0
        self._first = first
        self._next = first
        self._first_at = -1
        self._first_is_own, self._first_count = True, 1
        self._last_place = 0
        self._count = 0
        self._breaks: list[_Break] = []
        self._impossible: dict[int, int] = {}
        self._strays: dict[int, int] = {}

    @property
    def next(self) -> int:
        """One past the last queue offset."""
        return self._next

    def take(
        self,
        places: Int64,
        offsets: Int64,
        counts: Int64 | None = None,
        copies: Bools | None = None,
    ) -> None:
        """Add frames. ``counts`` contains the number of messages in each frame (default: one).
        ``copies`` is a mask of the multi-dispatch copies: their frames have the queue offset of
        another queue.
        """
        own = np.ones(len(places), np.bool_) if copies is None else ~copies
        counts = np.ones(len(places), np.int64) if counts is None else counts
        impossible = np.flatnonzero((offsets < 0) | (offsets > MOST_OFFSET)).tolist()
        if impossible:
            offsets = offsets.copy()
            for at in impossible:
                offsets[at] = offsets[at - 1] + counts[at - 1] if at else self._next
                if own[at]:
                    self._impossible[int(places[at])] = int(offsets[at])
        if not self._count:
            self._first_at, self._first_is_own = int(places[0]), bool(own[0])
            self._first_count = int(counts[0])
        last = offsets + counts - 1
        before = np.append(self._next - 1, last[:-1])
        distances = np.diff(places, prepend=self._last_place)
        for at in np.flatnonzero(offsets - before != 1).tolist():
            found = int(places[at]), int(offsets[at]), int(before[at]), self._count + at
            facts = int(distances[at]), bool(own[at]), int(counts[at])
            self._breaks.append(_Break(*found, *facts))
        self._last_place = int(places[-1])
        self._count += len(offsets)
        self._next = int(last[-1]) + 1

    def story(self, *, is_queued: IsQueued = lambda *_: False) -> QueueStory:
        """Return the queue offsets of all added frames, with harmed queue offsets corrected. Raises
        ValueError if a gap is larger than MOST_GAP. ``is_queued(place, offset)`` returns whether
        the old queue's entry at the queue offset ``offset`` points to the message at the physical
        offset ``place``.
        """
        mended = self._mend(is_queued) | self._impossible
        first, end, gaps = self._first, self._next, list[Range]()
        for found in self._breaks:
            if found.offset <= found.before:
                first, gaps = found.offset, []
            elif found.offset > found.before + 1:
                if found.offset - found.before > MOST_GAP:
                    raise ValueError(
                        f"the message at {found.place} has queue offset {found.offset}, and the "
                        f"message before it {found.before}: one of them is invalid"
                    )
                gaps.append((found.before + 1, found.offset))
        return QueueStory(first, end, tuple(gaps), mended, self._strays)

    def _mend(self, is_queued: IsQueued) -> dict[int, int]:
        """Correct the harmed queue offsets, remove them from the list of breaks, and return the
        corrected offsets.
        """
        mended: dict[int, int] = {}
        kept: list[_Break] = []
        breaks = self._breaks
        begins_lower = bool(breaks) and self._first_count <= breaks[0].offset <= breaks[0].before
        if begins_lower and breaks[0].number == 1 and self._first_is_own:
            # In the log, the queue's second message has the same or a lower queue offset than the
            # first. If the topic had been recreated, the second message would have queue offset 0,
            # but it has a higher one. So the queue offset of the first message is harmed.
            self._first = breaks[0].offset - self._first_count
            mended[self._first_at] = self._first
            breaks = breaks[1:]
        at = 0
        while at < len(breaks):
            here = breaks[at]
            behind = breaks[at + 1] if at + 1 < len(breaks) else None
            follows = behind is not None and behind.number == here.number + 1
            is_last = here.number == self._count - 1
            end = here.before + here.count
            at += 1
            if not here.is_own:
                kept.append(here)
            elif follows and behind is not None and _is_stray(here, behind.offset, is_queued):
                self._strays[here.place] = here.offset
                at += 1
            elif follows and behind is not None and _is_harmed(here, behind.offset, is_queued):
                mended[here.place] = here.before + 1
                if behind.offset > end + 1:
                    kept.append(replace(behind, before=end))
                at += 1
            elif is_last and _is_last_harmed(here, is_queued):
                mended[here.place] = here.before + 1
                self._next = end + 1
            else:
                kept.append(here)
        self._breaks = kept
        return mended


def _is_last_harmed(here: _Break, is_queued: IsQueued) -> bool:
    """Whether the queue offset of the queue's last message is harmed.

    A queue offset that is higher than expected is harmed if the gap is too large (``is_far``). For
    a queue offset that is lower than expected, the old queue decides. The queue offset is harmed if
    the old queue has the message at the expected queue offset. It is right if the old queue has the
    message at the lower queue offset. If neither is the case, only queue offset 0 is right, because
    a topic that was created again begins at 0.
    """
    if here.offset > here.before:
        return here.is_far
    if is_queued(here.place, here.before + 1):
        return True
    return here.offset > 0 and not is_queued(here.place, here.offset)


def _is_stray(here: _Break, behind: int, is_queued: IsQueued) -> bool:
    """Whether a message has no place in the queue: the previous and the next message have
    consecutive queue offsets, this message's queue offset is lower, and the old queue lacks the
    entry. ``behind`` is the next message's queue offset. Damage has changed the frame's queue id,
    topic or queue offset.
    """
    is_between = here.offset <= here.before and behind == here.before + 1
    return is_between and not is_queued(here.place, here.offset)


def _is_harmed(here: _Break, behind: int, is_queued: IsQueued) -> bool:
    """Whether a queue offset is harmed: it does not fit between the neighbouring queue offsets.
    ``behind`` is the queue offset of the next message.
    A lower offset is right if the old queue has the message there: the topic was created again.
    """
    if not here.before + here.count < behind or here.before < here.offset <= behind:
        return False
    return here.offset > here.before or not is_queued(here.place, here.offset)


HARMED_QUEUE_ID: Final = "harmed_queue_id"

LostOffsets = dict[QueueKey, list[Range]]


@dataclass(frozen=True, slots=True)
class LostSpan(Span):
    """A part of the log that the salvage cannot save.

    Attributes:
        kind: kind of the damage, one of verify's kinds.
        file: path below the store's folder.
        messages: queue -> ranges of queue offsets of its messages, as far as known.
    """

    kind: str
    file: str
    reason: str
    messages: LostOffsets = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return this part as a JSON object (docs/json.md)."""
        found = document(self, ("kind", "file", "offset", "length", "reason"))
        return found | {"messages": ranges_json(self.messages)}


def ranges_json(found: Mapping[QueueKey, Sequence[Range]]) -> list[dict[str, Any]]:
    """Return one JSON object for each range of queue offsets (docs/json.md)."""
    return [
        {"topic": topic, "queue_id": queue_id, "queue_offset": start, "count": stop - start}
        for (topic, queue_id), ranges in sorted(found.items())
        for start, stop in ranges
    ]


def lost_spans(
    layout: StoreLayout, damage: Sequence[DamagedSpan], end: int, known_end: int
) -> list[LostSpan]:
    """Return the damaged parts of the log, and the part from its end to ``known_end``."""
    found: list[LostSpan] = []
    for span in damage:
        path = layout.log_file(span.offset)
        last = found[-1] if found else None
        joins = last is not None and last.end == span.offset and last.kind == span.kind
        # Report consecutive missing files as one loss.
        if last is not None and joins and span.kind == MISSING_FILE:
            found[-1] = replace(last, length=last.length + span.length)
            continue
        found.append(LostSpan(span.offset, span.length, span.kind, path, span.reason))
    if known_end > end:
        reason = f"the log reached {known_end} once and ends at {end} now"
        path = layout.log_file(end)
        found.append(LostSpan(end, known_end - end, MISSING_FILE, path, reason))
    return found


def fill_messages(
    layout: StoreLayout, spans: Sequence[LostSpan], framed: Mapping[QueueKey, Pairs]
) -> None:
    """Set ``messages`` of the lost parts, from queue entries and from frames with a bad body."""
    if not spans:
        return
    known: dict[QueueKey, list[tuple[Int64, Int64]]] = {
        key: [(np.array(places, np.int64), np.array(offsets, np.int64))]
        for key, (places, offsets) in framed.items()
    }
    for key, at, offset in _entries_to(layout, lambda places: span_numbers(places, spans) >= 0):
        known.setdefault(key, []).append((at, offset))
    for key, pairs in known.items():
        places, offsets = (np.concatenate(part) for part in zip(*pairs, strict=True))
        at = span_numbers(places, spans)
        for number in np.unique(at[at >= 0]).tolist():
            spans[number].messages[key] = ranges_of(offsets[at == number])


def queued_at(layout: StoreLayout, places: Int64) -> LostOffsets:
    """Return, for each queue, the queue offsets of the entries that point to one of ``places``."""
    found: LostOffsets = {}
    for key, _, offsets in _entries_to(layout, lambda known: np.isin(known, places)):
        found.setdefault(key, []).extend(ranges_of(offsets))
    return found


def _entries_to(
    layout: StoreLayout, is_wanted: Callable[[Int64], Bools]
) -> Iterator[tuple[QueueKey, Int64, Int64]]:
    """Yield (queue, physical offsets, queue offsets) of entries that point to wanted messages."""
    for queue in all_queues(layout):
        for start, units in queue.runs(0, queue.max_offset):
            places = units["physical_offset"].astype(np.int64)
            which = np.flatnonzero(is_wanted(places) & has_message(units))
            if len(which):
                yield queue.key, places[which], start + which


Pairs = tuple[list[int], list[int]]


def misnamed_messages(
    layout: StoreLayout,
    queues: Mapping[QueueKey, QueueStory],
    is_saved: Callable[[Int64], Bools],
) -> list[LostSpan]:
    """Find messages whose frames name the wrong queue or no queue, because damage has changed the
    topic, the queue id or the transaction type. Salvage saves such a message in the wrong queue, or
    in no queue.

    The function reports a frame if all of these conditions are true. The conditions exclude
    truncated messages, and frames whose queue files were swapped:

    - A queue has an entry with the frame's physical offset, size and queue offset. But the frame
      names another queue, or its transaction type is PREPARED or ROLLBACK, for which there is no
      entry.
    - In the queue with this entry, the previous or the next entry is right.
    - The queue that the frame names has no right entry at the frame's queue offset.
    """
    found: list[LostSpan] = []
    log = CommitLog(layout)
    there = {queue.key: queue for queue in all_queues(layout)}

    def is_right(key: QueueKey, offset: int) -> bool:
        return any(
            frame is not None and frame.queue_key == key and frame.queue_offset == offset
            for _, entry in there[key].entries(max(0, offset), offset + 1)
            for frame in [log.frame_of(entry)]
        )

    for key, queue in sorted(there.items()):
        story = queues.get(key)
        if isinstance(queue, BatchQueue):
            continue
        for start, units in queue.runs(0, queue.max_offset):
            places = units["physical_offset"].astype(np.int64)
            lacks = has_message(units) & is_saved(places)
            if story is not None:
                lacks &= ~story.has(np.arange(start, start + len(units)))
            for at in np.flatnonzero(lacks).tolist():
                offset, entry = start + at, QueueEntry(*units[at].item())
                frame = log.frame_of(entry)
                if frame is None or frame.queue_offset != offset:
                    continue
                named = frame.queue_key
                if named != key and named in there and is_right(named, offset):
                    continue
                if named == key and sys_flag.advances_queue(frame.sys_flag):
                    continue
                if not (is_right(key, offset - 1) or is_right(key, offset + 1)):
                    continue
                place = entry.physical_offset
                words = f"entry {offset} of {key[0]}/{key[1]} points to it, but its frame"
                if named == key:
                    reason = f"{words} is a half message or a rollback: it is saved, in no queue"
                else:
                    reason = f"{words} names the queue {named[0]}/{named[1]}: it is saved there"
                lost: LostOffsets = {key: [(offset, offset + 1)]}
                found.append(
                    LostSpan(place, 0, "queue_misplaced", layout.log_file(place), reason, lost)
                )
    return found


def stray_messages(
    layout: StoreLayout, queues: Mapping[QueueKey, QueueStory]
) -> Iterator[LostSpan]:
    """Yield the messages without a place in the queue that their frames name. The new log has these
    messages, but no queue has an entry for them.
    """
    for key, story in sorted(queues.items()):
        for place, offset in sorted(story.strays.items()):
            reason = (
                f"another message has offset {offset} of {key[0]}/{key[1]}: damage has changed the "
                "frame's queue id, queue offset or transaction type. The message is saved, but in "
                "no queue"
            )
            yield LostSpan(place, 0, HARMED_QUEUE_ID, layout.log_file(place), reason)


def lost_by_queue(
    spans: Iterable[LostSpan], gaps: Mapping[QueueKey, Sequence[Range]]
) -> LostOffsets:
    """Return the queue offsets of all known lost messages: in ``spans`` and in ``gaps``."""
    found: dict[QueueKey, list[Range]] = {key: list(ranges) for key, ranges in gaps.items()}
    for span in spans:
        for key, ranges in span.messages.items():
            found.setdefault(key, []).extend(ranges)
    return {key: merged(ranges) for key, ranges in found.items() if ranges}


def merged(ranges: list[Range]) -> list[Range]:
    """Return the ranges in ascending order. Ranges that touch or overlap are joined."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def ranges_of(offsets: Int64) -> list[Range]:
    """Return the ranges that contain exactly the given offsets. The offsets can be in any order."""
    if not len(offsets):
        return []
    ordered = np.unique(offsets)
    return [(int(ordered[a]), int(ordered[b - 1]) + 1) for a, b in consecutive(ordered)]


# ------------------------------------------------------------------------------------- store times
# RocketMQ searches a queue by time as if store times never decreased. But BODYCRC does not cover
# store times, and a clock can be set back.
class StoreTimes:
    """Finds wrong store times, and their new values. Messages are added in the order of the new
    log.

    A single message is too late if its time is after the next message's time, but the previous
    message's time is not. This message gets the time of the next message. In all other cases, a
    message that is earlier than the previous message gets the time of the previous message.

    Attributes:
        lowered: physical offset -> new store time, for each single message that was too late.
        raised: number of messages that get the later time of the previous message.
    """

    def __init__(self) -> None:
        self.lowered: dict[int, int] = {}
        self.raised = 0
        self._last = self._before = 0
        # The last added message. The time of this message is checked when the next message is
        # added.
        self._open = np.empty((2, 0), np.int64)

    def take(self, places: Int64, times: Int64) -> None:
        """Add messages: their physical offsets, and their store times in milliseconds."""
        places, times = np.append(self._open, np.stack([places, times]), axis=1)
        before = np.append(self._before, times[:-1])
        late = np.flatnonzero((times[:-1] > times[1:]) & (before[:-1] <= times[1:]))
        self.lowered.update(zip(places[late].tolist(), times[late + 1].tolist(), strict=True))
        self._open = np.stack([places[-1:], times[-1:]])
        self._before = int(before[-1])
        times[late] = times[late + 1]
        self._settle(times[:-1])

    def finish(self) -> None:
        """Check the last added message; all other messages are already checked."""
        self._settle(self._open[1])

    def _settle(self, times: Int64) -> None:
        raised = raised_from(self._last, times)
        self.raised += int(np.count_nonzero(raised != times))
        self._last = int(raised[-1]) if len(raised) else self._last


def raised_from(last: int, times: Int64) -> Int64:
    """Return the times as a series that never decreases: a lower time is replaced by the time
    before it. ``last`` is the time before the first of ``times``, and is not returned.
    """
    found: Int64 = np.maximum.accumulate(np.append(last, times))[1:]
    return found
