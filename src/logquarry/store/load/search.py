"""Finds how many frames of a load are already in the log.

A load appends its frames in order. Other messages can be between these frames, because the open
store also delivers delayed messages, and other threads may put messages. A part of the log can also
be damaged later. After damage, the search compares the following frames of the log with the rest of
the load. If one of these frames is in the load, the log once had all earlier frames of the load
too.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from logquarry.format import put_frames
from logquarry.format.arrays import POSITION, SIZE, Int64
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import BlankSpan, DamagedSpan, ExpiredSpan, LogEnd, LogReader, Run
from logquarry.store.load.segment import Segment, SegmentReader, StagedFrames, same_frames

UNKNOWN: Final = -1


class StagedLoad:
    """The staged frames of a load, in the order of its segments. One segment at a time is open.

    The place of a frame is the total size of the frames before it, in all segments together.

    Attributes:
        end: the place after the last frame.
    """

    def __init__(self, folder: Path, segments: Sequence[Segment]) -> None:
        self._folder = folder
        self._segments = segments
        self._ends = list(accumulate(segment.bytes for segment in segments))
        self.end = self._ends[-1] if segments else 0
        self._open: tuple[int, SegmentReader] | None = None

    def close(self) -> None:
        """Close the open segment."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def frames(self, place: int) -> tuple[StagedFrames, int]:
        """Return the frames of the segment that contains a place, and the position of the place in
        it. The frames are valid until the next call.
        """
        number = bisect_right(self._ends, place)
        segment = self._segments[number]
        if self._open is None or self._open[0] != number:
            self.close()
            # The caller has verified the CRCs before.
            self._open = number, SegmentReader(self._folder, segment, check=False)
        return self._open[1].frames, place - self._ends[number] + segment.bytes

    def frame(self, place: int) -> memoryview:
        """Return the frame at a place."""
        frames, start = self.frames(place)
        size = put_frames.size_at(frames.data, start)
        return frames.data[start : start + (size or 0)]

    def after(self, place: int, size: int) -> int | None:
        """Skip whole frames of ``size`` bytes in total; return the place after them. Return None if
        no whole frames have this total size, or if no frame follows them.
        """
        end = place + size
        while place < min(end, self.end) and (frame := self.frame(place)):
            place += len(frame)
        return place if place == end < self.end else None

    def find(self, other: memoryview, place: int) -> int | None:
        """Search from a place on; return the place of the first frame that equals ``other``."""
        places, keys, order = self._index
        key = _key(other)
        low, high = (int(np.searchsorted(keys, key, side)) for side in ("left", "right"))
        for found in places[np.sort(order[low:high])].tolist():
            if found >= place and put_frames.same(self.frame(found), other):
                return int(found)
        return None

    @cached_property
    def _index(self) -> tuple[Int64, Int64, Int64]:
        # Three arrays: the place of each frame, in the order of the load; the sorted keys of the
        # frames; and, for each of these keys, the number that its frame has in the load. Only a
        # search after damage needs these arrays.
        places, keys, place = [], [], 0
        while place < self.end and (frame := self.frame(place)):
            places.append(place)
            keys.append(_key(frame))
            place += len(frame)
        each = np.array(keys, np.int64)
        order = np.argsort(each, kind="stable")
        return np.array(places, np.int64), each[order], order


def _key(data: memoryview) -> int:
    return len(data) << 32 | zlib.crc32(put_frames.text_of(data))


class Found(NamedTuple):
    """Which frames of a load are in the log.

    Attributes:
        place: place of the first frame that the log lacks (:class:`StagedLoad`).
        torn: physical offset of this frame if the log has only a part of it: a power cut has left
            zeros in its topic or properties, which no CRC covers. None if the log has no part.
        is_unsure: whether messages of the log were lost after the last frame that was found. The
            log may then once have had further frames of the load.
    """

    place: int
    torn: int | None
    is_unsure: bool


class _Search:
    def __init__(self, load: StagedLoad, durable: int) -> None:
        self.load = load
        self.durable = durable
        self.place = 0
        self.torn: int | None = None
        self.lost: int | None = None
        """Bytes that the log lost since the last frame that was found; None without a loss."""
        self._behind_damage: int | None = None

    def lose(self, size: int) -> None:
        """Record that the log lost bytes here. ``size`` is their number, or UNKNOWN.

        If no frame was found since the previous loss, the total becomes UNKNOWN.
        """
        self.lost = size if self.lost is None else UNKNOWN
        is_known = self.lost != UNKNOWN
        self._behind_damage = self.load.after(self.place, self.lost) if is_known else None

    def take(self, run: Run) -> bool:
        """Compare frames of the log; return whether to continue."""
        first = run.window.base
        there = run.window.data.data[: run.end - first]
        starts, sizes = run.rows[:, POSITION].astype(np.int64), run.rows[:, SIZE]
        row = 0
        while row < len(starts) and self.place < self.load.end:
            at = int(starts[row])
            other = there[at : at + int(sizes[row])]
            if self.lost is not None:
                row += 1
                self._resume(other)
                continue
            frames, start = self.load.frames(self.place)
            done, behind = same_frames(frames, start, there, at)
            if done > start:
                self.place += done - start
                row = int(np.searchsorted(starts, behind))
                continue
            frame = self.load.frame(self.place)
            row += 1
            if other[: put_frames.BODY_CRC_END] != frame[: put_frames.BODY_CRC_END]:
                row += _others(run, row, frame)
            elif not put_frames.is_torn(frame, other):
                # This is either another message with an equal body, or the wanted frame with damage
                # that no CRC covers. The next frame of the load shows which of the two it is.
                self.lose(len(other) if put_frames.same_head(frame, other) else UNKNOWN)
            elif first + at >= self.durable:
                self.torn = first + at
                return False
            else:
                self.place += len(other)
        return self.place < self.load.end

    def _resume(self, other: memoryview) -> None:
        """Search the rest of the load for ``other``, a frame that follows damage in the log."""
        # If the load has several frames that equal this one, only the size of the damage shows
        # which of them it is.
        place = self._behind_damage
        if place is None or not put_frames.same(self.load.frame(place), other):
            place = self.load.find(other, self.place)
        if place is not None:
            self.place = place + len(other)
            self.lost = self._behind_damage = None


def _others(run: Run, row: int, wanted: memoryview) -> int:
    """Count the frames from a row on, before the first one that can be the wanted frame.

    Such a frame has the wanted frame's size and body CRC.
    """
    starts, sizes = run.rows[row:, POSITION].astype(np.int64), run.rows[row:, SIZE]
    numbers = np.flatnonzero(sizes == len(wanted))
    fields = np.frombuffer(wanted[: put_frames.BODY_CRC_END], np.uint8)
    heads = run.window.data[starts[numbers][:, None] + np.arange(len(fields))]
    likely = numbers[(heads == fields).all(axis=1)]
    return int(likely[0]) if len(likely) else len(sizes)


def find_frames(
    layout: StoreLayout, load: StagedLoad, start: int, *, stop: int | None = None, durable: int
) -> Found:
    """Find the first frame of a load that the log lacks.

    Args:
        start: physical offset at or before the load's first frame.
        stop: physical offset at which the log ends; by default, it ends after its last message.
        durable: the durable offset. A frame before this offset that looks torn counts as present:
            the whole frame was once on the disk, so its zeros are later damage.
    """
    search, log = _Search(load, durable), layout.commit_log
    if log.start > start:
        search.lose(UNKNOWN)
    for event in LogReader(layout).events(start, stop):
        if isinstance(event, LogEnd) or search.place >= load.end:
            break
        if isinstance(event, ExpiredSpan):
            search.lose(UNKNOWN)
        elif isinstance(event, DamagedSpan):
            search.lose(event.length)
        elif isinstance(event, BlankSpan):
            file = log.at(event.offset)
            # A recovery puts a blank in place of a lost file.
            if search.lost is not None or (file is not None and file.base == event.offset):
                search.lose(UNKNOWN)
        elif not search.take(event):
            break
    return Found(search.place, search.torn, search.lost is not None)
