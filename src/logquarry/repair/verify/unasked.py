"""Units of a queue that no message of the log asked for: expired, copies, lost, or misplaced.

Where messages ask for their units, these are compared at once. A queue file that stands under
another name holds units that nobody asks for: each points at a sound frame, and only the frame's
own queue offset tells that it stands in the wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.format import properties as props
from logquarry.format import rows as r
from logquarry.log import columns
from logquarry.log.layout import StoreLayout
from logquarry.log.places import runs_at
from logquarry.log.walk import DamagedSpan, ExpiredSpan, Run
from logquarry.read.consume_queue import ConsumeQueue, Units, has_message, is_written
from logquarry.read.log_queues import MULTI_SEPARATOR

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Excused = Sequence[DamagedSpan | ExpiredSpan]
"""Parts of the log of which queues and index cannot be told right or wrong."""

_CHUNK: Final = 1 << 16
_MOST_STRETCHES: Final = 16
"""Stretches of misplaced units that are told one by one for a queue; the others in one finding."""
_SEPARATOR: Final = MULTI_SEPARATOR.encode()
_COPIES: Final = re.compile(
    rf"(?:^|{props.PROPERTY_SEPARATOR}){props.INNER_MULTI_DISPATCH}"
    rf"{props.NAME_VALUE_SEPARATOR}([^{props.PROPERTY_SEPARATOR}]*)".encode()
)
_OWN, _COPY, _FOREIGN = range(3)
"""Whose a message is: the queue's own, put there by multi-dispatch as well, or another queue's."""
_FITS, _MOVED, _STRANGE = range(3)
"""How a unit stands to its message."""


@dataclass(slots=True)
class Mismatch:
    """Units of one kind that do not fit their messages.

    Attributes:
        kind: the finding's.
        offset: queue offset of the first.
        count: how many.
        reason: in words, of the first.
    """

    kind: str
    offset: int
    count: int
    reason: str


class UnaskedUnits:
    """Judges units of one queue.

    Args:
        layout: the store's files.
        queue: the queue.
        log_end: where the log ends.
        excused: what no queue is to blame for.

    Attributes:
        entries: how many were compared with frames.
    """

    def __init__(
        self, layout: StoreLayout, queue: ConsumeQueue, log_end: int, excused: Excused
    ) -> None:
        self.entries = 0
        self._layout = layout
        self._queue = queue
        self._topic = queue.topic.encode("utf-8", "surrogateescape")
        self._log_end = log_end
        self._excused = excused
        self._kinds: dict[str, Mismatch] = {}
        self._stretches: list[Mismatch] = []
        self._begin = 0
        self._last = (_FITS, 0)
        """How the unit before was misplaced: in what way, and by how many units."""

    def judge(self, ranges: Sequence[tuple[int, int]], begin: int = 0) -> list[Mismatch]:
        """What is wrong in some ranges of queue offsets, ascending.

        Before ``begin`` units for no message pad the queue's first file, as they should.
        """
        self._begin = begin
        for first, stop in ranges:
            self._last = _FITS, 0
            for start, units in _chunks(self._queue, first, stop):
                self._judge(start, units)
        return [*self._kinds.values(), *self._stretches]

    def _judge(self, start: int, units: Units) -> None:
        places = units["physical_offset"].astype(np.int64)
        written = has_message(units)
        padding = is_written(units) & ~written
        padding &= start + np.arange(len(units)) >= self._begin
        self._note("queue_filler", start, places, padding, None)
        damaged = written & within(places, self._excused)
        self._note("queue_in_damage", start, places, damaged, "in a damaged part of the log")
        written &= ~damaged
        ahead = written & (places >= self._log_end)
        self._note("queue_ahead", start, places, ahead, f"and the log ends at {self._log_end}")
        inside = np.flatnonzero(written & ~ahead & (places >= self._layout.commit_log.start))
        if len(inside):
            self.entries += len(inside)
            self._follow(start, places, units["size"].astype(np.int32), inside)

    def _follow(
        self, start: int, places: Int64, sizes: npt.NDArray[np.int32], inside: Int64
    ) -> None:
        """Look at the frames that some units point at."""
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
        self._note("queue_entry_dangling", start, places, dangling, "where no frame stands")
        judged = inside[~dangling[inside]]
        if not len(judged):
            return
        offsets, queue_offsets, owners = map(np.concatenate, zip(*frames, strict=True))
        at = np.searchsorted(offsets, places[judged])
        self._place(start + judged, places[judged], queue_offsets[at], owners[at])

    def _read(self, run: Run) -> tuple[Int64, Int64, Int64]:
        """Physical offset, queue offset and owner of each frame of a run."""
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

    def _place(self, index: Int64, places: Int64, queue_offsets: Int64, owners: Int64) -> None:
        """Compare the index of units, ascending, with their messages' queue offsets.

        A copy has the queue offset of its own topic, which says nothing about this queue.
        """
        shifts = np.where(owners == _OWN, queue_offsets - index, 0)
        ways = np.where(shifts != 0, _MOVED, np.where(owners == _FOREIGN, _STRANGE, _FITS))
        # A stretch ends where units are misplaced in another way, or by another number.
        changes = ways != np.append(self._last[0], ways[:-1])
        changes |= shifts != np.append(self._last[1], shifts[:-1])
        self._last = int(ways[-1]), int(shifts[-1])
        bounds = [0, *np.flatnonzero(changes).tolist(), len(ways)]
        for number, (at, stop) in enumerate(pairwise(bounds)):
            if at == stop or ways[at] == _FITS:
                continue
            # Number 0 goes on from the units before.
            if number and len(self._stretches) < _MOST_STRETCHES:
                what = f"whose queue offset is {queue_offsets[at]}"
                if ways[at] == _STRANGE:
                    what = "which is another queue's"
                text = f"is for the message at {places[at]}, {what}"
                self._stretches.append(Mismatch("queue_misplaced", int(index[at]), 0, text))
            self._stretches[-1].count += stop - at

    def _note(self, kind: str, start: int, places: Int64, which: Bools, reason: str | None) -> None:
        if not which.any():
            return
        at = int(which.argmax())
        text = f"is for a message at {places[at]}, {reason}"
        if reason is None:
            text = "stands for a message that is lost"
        known = self._kinds.setdefault(kind, Mismatch(kind, start + at, 0, text))
        known.count += int(which.sum())


def _chunks(queue: ConsumeQueue, first: int, stop: int) -> Iterator[tuple[int, Units]]:
    """The units in a range, some at a time; where there is no file there are none."""
    for start, units in queue.runs(first, stop):
        for at in range(0, len(units), _CHUNK):
            yield start + at, units[at : at + _CHUNK]


def within(offsets: Int64, spans: Excused) -> Bools:
    """Which physical offsets lie in some stretches of the log."""
    ordered = sorted((span.offset, span.offset + span.length) for span in spans)
    if not ordered:
        return np.zeros(len(offsets), np.bool_)
    starts = np.array([start for start, _ in ordered], np.int64)
    ends = np.array([end for _, end in ordered], np.int64)
    index = np.searchsorted(starts, offsets, "right") - 1
    return (index >= 0) & (offsets < ends[np.maximum(index, 0)])
