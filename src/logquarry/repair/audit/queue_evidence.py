"""The evidence about queues: the messages of the log that were read so far, spare entries, and
frames that contradict their entries.

An entry is spare if the log has no message with the entry's queue offset. Spare entries are
compared with the frames to which they point.

BODYCRC does not cover the properties of a frame, which contain the frame's tags and keys. If damage
changes the properties, only the entries that a broker made before the damage show the change. A
queue entry has a tags code, and an index entry has the hash of a key. Damage of the entry itself
looks the same, so the audit does not decide which of the two is right. The audit ignores entries
with another physical offset or size: they are no evidence about the frame's properties.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format import arrays as r
from logquarry.format import properties as props
from logquarry.format import sys_flag
from logquarry.format.arrays import Bools, Int32, Int64, consecutive
from logquarry.format.properties import MULTI_SEPARATOR
from logquarry.log import columns
from logquarry.log.follow import Followed
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Run, Span
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units, has_message, is_written
from logquarry.repair.audit.differences import (
    MOST_STRETCHES,
    EntryGroup,
    SpanSet,
    TagsRule,
    count_same,
    queue_name,
    same_entries,
)
from logquarry.repair.audit.index import IndexAudit
from logquarry.write.queue_writer import QueuePart, is_batch


def has_entries(queue: Queue, part: QueuePart) -> bool:
    """Whether a queue has exactly these entries, byte for byte and without a gap."""
    offsets = part.offsets
    first, stop = int(offsets[0]), int(offsets[-1]) + 1
    if stop - first != len(offsets) or first < queue.min_offset or stop > queue.max_offset:
        return False
    if len(offsets) > 1 and int(np.diff(offsets).min()) != 1:
        return False
    at = 0
    for start, there in queue.runs(first, stop):
        wanted = part.units[at : at + len(there)]
        if start != first + at or there.tobytes() != wanted.tobytes():
            return False
        at += len(there)
    return at == len(offsets)


def entries_at(queue: Queue, offsets: Int64) -> Units:
    """Return the entry at each of ``offsets`` (ascending); a missing entry is all zeros."""
    first, stop = int(offsets[0]), int(offsets[-1]) + 1
    result = np.zeros(len(offsets), dtype=queue.units(0, 0).dtype)
    for start, entries in queue.runs(max(0, first), min(stop, queue.max_offset)):
        inside = (offsets >= start) & (offsets < start + len(entries))
        result[inside] = entries[offsets[inside] - start]
    return result


MOST_GAPS: Final = 1 << 12
"""Maximum number of gaps to record for one queue; the last record covers all further gaps."""


@dataclass(slots=True)
class SeenMessages:
    """The messages of one queue that were read so far. If the topic was created again, only the
    messages since then.

    Attributes:
        epoch_start: physical offset of the first message of a recreated topic; else None.
        missing_from: physical offset of the first message after the queue's end.
        missing_since: store time of that message, in milliseconds.
        gaps: (start, stop) of missing queue offsets between the first and the last message.
        log_start: start of the log, read after the queue's files were listed; None if not yet read.
        harmed: physical offset and size of the first frame with a harmed queue offset, and a text.
        harmed_count: number of frames with a harmed queue offset.
        strays: (physical offset, queue offset) of the frames that have no place in the queue.
        held: the last frame and its store time, if the next message decides whether this frame has
            a place in the queue.
    """

    queue: Queue | None
    first_offset: int
    next_offset: int
    messages: int = 0
    epoch_start: int | None = None
    missing_from: int | None = None
    missing_since: int = 0
    groups: dict[str, EntryGroup] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    log_start: int | None = None
    harmed: tuple[int, int, str] = (0, 0, "")
    harmed_count: int = 0
    strays: list[tuple[int, int]] = field(default_factory=list)
    held: tuple[QueuePart, Int64] | None = None
    # Queue offset and entry of the queue's first message, until its second message is read.
    _first: tuple[int, Units] | None = None

    def note(self, kind: str, offsets: Int64, which: Bools, reason: str) -> None:
        """Record entries that differ in the same way; ``reason`` describes the first of these
        entries.
        """
        if which.any():
            first = int(offsets[int(which.argmax())])
            group = self.groups.setdefault(kind, EntryGroup(kind, first, reason))
            group.count += int(which.sum())

    def add_gaps(self, ends: Int64, starts: Int64) -> None:
        """Record the gap before each message; ``ends`` are the ends of the previous messages."""
        for at in np.flatnonzero(starts > ends).tolist():
            start, stop = int(ends[at]), int(starts[at])
            if len(self.gaps) < MOST_GAPS:
                self.gaps.append((start, stop))
            else:
                # The last record now also covers the entries between its gaps. These entries are
                # right, and are checked again.
                self.gaps[-1] = self.gaps[-1][0], stop

    def restart(self, first: int, place: int) -> None:
        """Forget the earlier messages: the topic was created again at physical offset ``place``."""
        self.groups.clear()
        self.gaps.clear()
        self.messages = 0
        self.first_offset, self.epoch_start, self.missing_from = first, place, None

    def advance(self, count: int) -> None:
        """Count messages whose entries are right, and whose queue offsets follow those of the
        earlier messages.
        """
        if self.held is not None:
            self.add_stray(self.held[0])
            self.held = None
        self.next_offset += count
        self.messages += count

    def corrected(self, part: QueuePart) -> QueuePart:
        """Return ``part`` with the right queue offsets; count frames with a harmed queue offset.

        BODYCRC does not cover the queue offset in a frame. The expected queue offset of a message
        is one more than that of the queue's previous message. If a frame has another queue offset,
        and the queue has the message's entry only at the expected offset, the frame's queue offset
        is harmed. Consumers find messages through the queue, so the queue needs no repair.
        """
        self._correct_first(part)
        right, following = part.offsets.copy(), self.next_offset
        for start, stop in consecutive(part.offsets):
            own, units = int(part.offsets[start]), part.units[start:stop]
            if own != following:
                count = self._count_same(following, units)
                if count and not self._count_same(own, units[:1]):
                    right[start : start + count] = np.arange(following, following + count)
                    self._note_harmed(units[:count], own, following)
            following = int(right[stop - 1]) + 1
        return replace(part, offsets=right)

    def without_strays(self, part: QueuePart) -> QueuePart:
        """Leave out the frames that have no place in the queue, and record them.

        A frame has no place if all of these conditions are true:

        - The frame's queue offset is lower than expected.
        - The next message has the queue offset that is expected for the frame.
        - The queue lacks the frame's entry.

        Rebuild and recover write no entry for such a frame (:mod:`.right_offsets`).
        """
        offsets = part.offsets
        expected = np.append(self.next_offset, offsets[:-1] + 1)
        is_lower = (offsets[1:] == expected[:-1]) & (offsets[:-1] < expected[:-1])
        stays = np.ones(len(offsets), np.bool_)
        for at in np.flatnonzero(is_lower).tolist() if self.messages else ():
            if not self._count_same(int(offsets[at]), part.units[at : at + 1]):
                stays[at] = False
                self.add_stray(part[at : at + 1])
        return part if stays.all() else part[stays]

    def add_stray(self, part: QueuePart) -> None:
        """Record a frame that has no place in the queue."""
        self.strays.append((int(part.units["physical_offset"][0]), int(part.offsets[0])))

    def ends_in_doubt(self, part: QueuePart) -> bool:
        """Whether only the next message can decide if the last frame of ``part`` has a place in the
        queue. The frame has no place if the next message has the queue offset that is expected for
        the frame.
        """
        offset = int(part.offsets[-1])
        expected = self.next_offset if len(part.offsets) == 1 else int(part.offsets[-2]) + 1
        is_lower = self.messages > 0 and offset < expected
        return is_lower and not self._count_same(offset, part.units[-1:])

    def _correct_first(self, part: QueuePart) -> None:
        """Correct the queue offset of the queue's first message if the second message shows the
        right one. The second message is the first message of ``part``.
        """
        first, self._first = self._first, None
        offset = int(part.offsets[0])
        if not self.messages:
            self._first = offset, part.units[:1].copy()
        if first is None or self.messages != 1 or first[0] == offset - 1:
            return
        is_right = self._count_same(*first) or not self._count_same(offset - 1, first[1])
        if is_right or not self._count_same(offset, part.units[:1]):
            return
        self._note_harmed(first[1], first[0], offset - 1)
        self.groups.clear()
        self.first_offset, self.next_offset, self.missing_from = offset - 1, offset, None

    def _count_same(self, offset: int, entries: Units) -> int:
        assert self.queue is not None
        return count_same(self.queue, offset, entries, TagsRule.of_readers(self.queue.topic))

    def _note_harmed(self, entries: Units, own: int, right: int) -> None:
        assert self.queue is not None
        if not self.harmed_count:
            text = f"the frame has queue offset {own}, and {queue_name(self.queue.key)} has the "
            text += f"message at {right}"
            self.harmed = int(entries["physical_offset"][0]), int(entries["size"][0]), text
        self.harmed_count += len(entries)


_CHUNK: Final = 1 << 16
_SEPARATOR: Final = MULTI_SEPARATOR.encode()
_COPIES: Final = re.compile(
    rf"(?:^|{props.PROPERTY_SEPARATOR}){props.INNER_MULTI_DISPATCH}"
    rf"{props.NAME_VALUE_SEPARATOR}([^{props.PROPERTY_SEPARATOR}]*)".encode()
)
_OWN, _COPY, _FOREIGN = range(3)
"""Queue of an entry's message: this queue; another queue, if multi-dispatch has added the entry to
this queue; or, in all other cases, another queue.
"""


class SpareEntries:
    """Checks entries of one queue against the frames to which they point.

    ``unqueued`` contains the queue offset of each entry that points to a frame of this queue with
    the transaction type PREPARED or ROLLBACK.
    """

    def __init__(self, layout: StoreLayout, queue: Queue, log_end: int, lost: SpanSet) -> None:
        self.entries = 0
        self.unqueued: list[int] = []
        self._layout = layout
        self._queue = queue
        self._topic = queue.topic.encode("utf-8", "surrogateescape")
        self._log_end = log_end
        self._lost = lost
        self._groups: dict[str, EntryGroup] = {}
        self._stretches: list[EntryGroup] = []
        self._begin = 0
        # Two facts about the previous entry: the queue offset in its message minus the queue offset
        # of the entry, and whether the message belongs to another queue.
        self._last = 0, False

    def check(self, ranges: Sequence[tuple[int, int]], begin: int = 0) -> list[EntryGroup]:
        """Return the wrong entries in ``ranges``. Fillers before ``begin`` are not wrong."""
        self._begin = begin
        for first, stop in ranges:
            self._last = 0, False
            for start, entries in self._queue.runs(first, stop):
                for at in range(0, len(entries), _CHUNK):
                    self._check(start + at, entries[at : at + _CHUNK])
        return [*self._groups.values(), *self._stretches]

    def _check(self, start: int, entries: Units) -> None:
        places = entries["physical_offset"].astype(np.int64)
        named = has_message(entries)
        fillers = is_written(entries) & ~named
        fillers &= start + np.arange(len(entries)) >= self._begin
        self._note("queue_filler", start, fillers, "is a filler: its message is lost")
        damaged = named & self._lost.mask(places)
        self._note_places("queue_in_damage", start, places, damaged, "in a damaged part of the log")
        named &= ~damaged
        ahead = named & (places >= self._log_end)
        end = f"and the log ends at {self._log_end}"
        self._note_places("queue_ahead", start, places, ahead, end)
        inside = np.flatnonzero(named & ~ahead & (places >= self._layout.commit_log.start))
        if len(inside):
            self.entries += len(inside)
            self._check_frames(start, places, entries["size"].astype(np.int32), inside)

    def _check_frames(self, start: int, places: Int64, sizes: Int32, inside: Int64) -> None:
        order = inside[np.argsort(places[inside], kind="stable")]
        bad: list[int] = []
        frames: list[tuple[Int64, Int64, Int64, Bools]] = []
        for event in runs_at(self._layout, places[order], sizes[order], check_crc=False):
            if isinstance(event, Run):
                frames.append(self._read(event))
            else:
                bad.append(event.offset)
        dangling = np.zeros(len(places), np.bool_)
        dangling[inside] = np.isin(places[inside], np.array(bad, np.int64))
        self._note_places("queue_entry_dangling", start, places, dangling, "where no frame starts")
        framed = inside[~dangling[inside]]
        if not len(framed):
            return
        offsets, queue_offsets, owners, queued = map(np.concatenate, zip(*frames, strict=True))
        at = np.searchsorted(offsets, places[framed])
        self._check_places(start + framed, places[framed], queue_offsets[at], owners[at])
        strange = ~queued[at] & (owners[at] == _OWN) & (queue_offsets[at] == start + framed)
        self.unqueued += (start + framed[strange]).tolist()

    def _read(self, run: Run) -> tuple[Int64, Int64, Int64, Bools]:
        rows = run.rows
        fields = columns.fixed_fields(run.window, rows, ("queue_id", "queue_offset", "sys_flag"))
        ids, topics = columns.topic_ids(run.window, rows)
        own = np.array([topic == self._queue.topic for topic in topics], np.bool_)[ids]
        own &= fields["queue_id"] == self._queue.queue_id
        owners = np.where(own, _OWN, _FOREIGN)
        foreign = np.flatnonzero(~own)
        for number, row in zip(foreign.tolist(), rows[foreign].tolist(), strict=True):
            at = row[r.POSITION] + row[r.PROPS_AT]
            text = run.window.data[at : at + row[r.PROPS_LENGTH]].tobytes()
            names = (match[1].split(_SEPARATOR) for match in _COPIES.finditer(text))
            if any(self._topic in some for some in names):
                owners[number] = _COPY
        places = rows[:, r.POSITION].astype(np.int64) + run.window.base
        kinds = fields["sys_flag"] & sys_flag.TRANSACTION_MASK
        queued = np.isin(kinds, (sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_COMMIT))
        return places, fields["queue_offset"].astype(np.int64), owners, queued

    def _check_places(
        self, index: Int64, places: Int64, queue_offsets: Int64, owners: Int64
    ) -> None:
        # Compare only the queue offsets of own messages. If multi-dispatch has added an entry, the
        # field QUEUEOFFSET of the frame is a queue offset of another queue.
        shifts = np.where(owners == _OWN, queue_offsets - index, 0)
        strange = owners == _FOREIGN
        # A new group begins at an entry if its shift differs from that of the previous entry, or if
        # only one of the two entries points to a message of another queue.
        changes = shifts != np.append(self._last[0], shifts[:-1])
        changes |= strange != np.append(self._last[1], strange[:-1])
        self._last = int(shifts[-1]), bool(strange[-1])
        bounds = [0, *np.flatnonzero(changes).tolist(), len(shifts)]
        for number, (at, stop) in enumerate(pairwise(bounds)):
            if at == stop or not (shifts[at] or strange[at]):
                continue
            if number and len(self._stretches) < MOST_STRETCHES:
                what = f"whose queue offset is {queue_offsets[at]}"
                if strange[at]:
                    what = "whose frame names another queue"
                text = f"points to the message at {places[at]}, {what}"
                self._stretches.append(EntryGroup("queue_misplaced", int(index[at]), text))
            self._stretches[-1].count += stop - at

    def _note_places(self, kind: str, start: int, places: Int64, which: Bools, why: str) -> None:
        if which.any():
            first = places[int(which.argmax())]
            self._note(kind, start, which, f"points to a message at {first}, {why}")

    def _note(self, kind: str, start: int, which: Bools, reason: str) -> None:
        if which.any():
            group = EntryGroup(kind, start + int(which.argmax()), reason)
            self._groups.setdefault(kind, group).count += int(which.sum())


class HarmedProperties:
    """Compares the tags and keys of frames with their entries. The frames come in the order of the
    log.

    Args:
        layout: the layout of the store, with the settings that :func:`with_entry_rules` has
            completed.
        queue_of: returns a queue; None if it has no usable files.
    """

    def __init__(self, layout: StoreLayout, queue_of: Callable[[QueueKey], Queue | None]) -> None:
        self._queue_of = queue_of
        self._index = IndexAudit(layout)
        self._places: list[Int64] = []

    def take(self, followed: Followed, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Compare the frames in ``followed`` with queues and index. ``parts`` contains the queue
        entries of these frames, each in its right queue.
        """
        self._index.add(followed)
        for key, part in parts.items():
            queue = self._queue_of(key)
            if queue is None or is_batch(part.units) or has_entries(queue, part):
                continue
            rule = TagsRule.of_readers(key[0])
            for start, stop in consecutive(part.offsets):
                wanted = part.units[start:stop]
                there = entries_at(queue, part.offsets[start:stop])
                is_own = there["physical_offset"] == wanted["physical_offset"]
                is_own &= (there["size"] == wanted["size"]) & ~same_entries(there, wanted, rule)
                self._places.append(wanted["physical_offset"][is_own].astype(np.int64))

    def finish(self, log_end: int, lost: Iterable[Span]) -> Int64:
        """Return the physical offsets of the frames that contradict an entry.

        Args:
            log_end: physical offset of the log's end.
            lost: the parts of the log whose index entries are ignored.
        """
        self._places.append(self._index.contradicted(log_end, SpanSet(lost)))
        return np.unique(np.concatenate(self._places))
