"""Audit of spare entries: entries at a queue offset for which the log has no message.

The message of a spare entry is expired or lost, or the entry is misplaced or a copy by
multi-dispatch. All entries of a queue file with a wrong name are misplaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format import properties as props
from logquarry.format import rows as r
from logquarry.format.arrays import Bools, Int32, Int64
from logquarry.format.properties import MULTI_SEPARATOR
from logquarry.log import columns
from logquarry.log.layout import StoreLayout
from logquarry.log.places import runs_at
from logquarry.log.walk import Run
from logquarry.read.queue import Queue, Units, has_message, is_written
from logquarry.repair.audit.differences import (
    MOST_STRETCHES,
    EntryGroup,
    LostSpans,
    within,
)

_CHUNK: Final = 1 << 16
_SEPARATOR: Final = MULTI_SEPARATOR.encode()
_COPIES: Final = re.compile(
    rf"(?:^|{props.PROPERTY_SEPARATOR}){props.INNER_MULTI_DISPATCH}"
    rf"{props.NAME_VALUE_SEPARATOR}([^{props.PROPERTY_SEPARATOR}]*)".encode()
)
_OWN, _COPY, _FOREIGN = range(3)
"""Owner of a message: this queue, this queue by multi-dispatch, or another queue."""
_FITS, _MOVED, _STRANGE = range(3)
"""Result for an entry: right, at another queue offset, or of another queue."""


class SpareEntries:
    """Checks entries of one queue against the frames to which they point."""

    def __init__(self, layout: StoreLayout, queue: Queue, log_end: int, lost: LostSpans) -> None:
        self.entries = 0
        self._layout = layout
        self._queue = queue
        self._topic = queue.topic.encode("utf-8", "surrogateescape")
        self._log_end = log_end
        self._lost = lost
        self._groups: dict[str, EntryGroup] = {}
        self._stretches: list[EntryGroup] = []
        self._begin = 0
        # How the previous entry was misplaced, and by how many entries.
        self._last = (_FITS, 0)

    def check(self, ranges: Sequence[tuple[int, int]], begin: int = 0) -> list[EntryGroup]:
        """Return the wrong entries in ascending ranges of queue offsets.

        Fillers before ``begin`` are right: they pad the queue's first file.
        """
        self._begin = begin
        for first, stop in ranges:
            self._last = _FITS, 0
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
        damaged = named & within(places, self._lost)
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
        # The frame of a copy has the queue offset of the message's own topic, not of this queue.
        shifts = np.where(owners == _OWN, queue_offsets - index, 0)
        ways = np.where(shifts != 0, _MOVED, np.where(owners == _FOREIGN, _STRANGE, _FITS))
        # A stretch ends if the kind or the distance of the misplacement changes.
        changes = ways != np.append(self._last[0], ways[:-1])
        changes |= shifts != np.append(self._last[1], shifts[:-1])
        self._last = int(ways[-1]), int(shifts[-1])
        bounds = [0, *np.flatnonzero(changes).tolist(), len(ways)]
        for number, (at, stop) in enumerate(pairwise(bounds)):
            if at == stop or ways[at] == _FITS:
                continue
            if number and len(self._stretches) < MOST_STRETCHES:
                what = f"whose queue offset is {queue_offsets[at]}"
                if ways[at] == _STRANGE:
                    what = "which belongs to another queue"
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
