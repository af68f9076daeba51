"""Compares entries of a queue with the frames to which they point, and finds spare entries.

An entry is spare if the log has no message with the entry's queue offset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format import arrays as r
from logquarry.format import properties as props
from logquarry.format.arrays import Bools, Int32, Int64
from logquarry.format.properties import MULTI_SEPARATOR
from logquarry.log import columns
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Run
from logquarry.read.queue import Queue, Units, has_message, is_written
from logquarry.repair.audit.differences import (
    MOST_STRETCHES,
    EntryGroup,
    SpanSet,
)
from logquarry.write.queue_writer import QueuePart


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
    """Return the entry at each of ``offsets`` (ascending); zeros if the queue has none there."""
    first, stop = int(offsets[0]), int(offsets[-1]) + 1
    result = np.zeros(len(offsets), dtype=queue.units(0, 0).dtype)
    for start, entries in queue.runs(max(0, first), min(stop, queue.max_offset)):
        inside = (offsets >= start) & (offsets < start + len(entries))
        result[inside] = entries[offsets[inside] - start]
    return result


_CHUNK: Final = 1 << 16
_SEPARATOR: Final = MULTI_SEPARATOR.encode()
_COPIES: Final = re.compile(
    rf"(?:^|{props.PROPERTY_SEPARATOR}){props.INNER_MULTI_DISPATCH}"
    rf"{props.NAME_VALUE_SEPARATOR}([^{props.PROPERTY_SEPARATOR}]*)".encode()
)
_OWN, _COPY, _FOREIGN = range(3)
"""Queue of a message: this queue, another queue with a copy in this queue, or any other queue."""


class SpareEntries:
    """Checks entries of one queue against the frames to which they point."""

    def __init__(self, layout: StoreLayout, queue: Queue, log_end: int, lost: SpanSet) -> None:
        self.entries = 0
        self._layout = layout
        self._queue = queue
        self._topic = queue.topic.encode("utf-8", "surrogateescape")
        self._log_end = log_end
        self._lost = lost
        self._groups: dict[str, EntryGroup] = {}
        self._stretches: list[EntryGroup] = []
        self._begin = 0
        # The difference between the previous entry's queue offset and the queue offset in its
        # message, and whether the message is of another queue.
        self._last = 0, False

    def check(self, ranges: Sequence[tuple[int, int]], begin: int = 0) -> list[EntryGroup]:
        """Return the wrong entries in ``ranges``. Fillers before ``begin`` count as right."""
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
        frames: list[tuple[Int64, Int64, Int64]] = []
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
        offsets, queue_offsets, owners = map(np.concatenate, zip(*frames, strict=True))
        at = np.searchsorted(offsets, places[framed])
        self._check_places(start + framed, places[framed], queue_offsets[at], owners[at])

    def _read(self, run: Run) -> tuple[Int64, Int64, Int64]:
        rows = run.rows
        fields = columns.fixed_fields(run.window, rows, ("queue_id", "queue_offset"))
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
        return places, fields["queue_offset"].astype(np.int64), owners

    def _check_places(
        self, index: Int64, places: Int64, queue_offsets: Int64, owners: Int64
    ) -> None:
        # Compare only the queue offsets of own messages. If multi-dispatch has added an entry, the
        # field QUEUEOFFSET of the frame is a queue offset of another queue.
        shifts = np.where(owners == _OWN, queue_offsets - index, 0)
        strange = owners == _FOREIGN
        # A new group begins if the shift changes, or if the messages' queue changes.
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
