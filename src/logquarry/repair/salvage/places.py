"""Finds displaced frames, and maps the places of saved frames in the old log to the new log.

Displaced frames are sound frames that do not lie at their PHYSICALOFFSET.
A disk or a driver that writes a block to a wrong place, or that swaps two blocks, displaces the
frames in the block. Salvage saves a displaced frame if all these conditions are true:

- The frame begins in a lost part of the log, in the properties of the frame before this part, or
  after the log's end. The frame's place is the range of bytes that begins at PHYSICALOFFSET and has
  the frame's size. All bytes of this place lie in lost parts of the log.
- The queue that the frame names has the frame's entry: an entry at the frame's queue offset, with
  the frame's PHYSICALOFFSET, size and tags code. This excludes frames of an earlier log or of
  another store, unless they have the same values as the entry.
- The bytes after the frame continue the log after the frame's place. These bytes are the head of a
  frame with the following PHYSICALOFFSET, the blank of that file, or zeros at the log's end.
  BODYCRC does not cover the properties. So without this condition, the last bytes of the properties
  could come from another block.
- The frame's place does not overlap the place of another such frame. If two places overlap, only
  the frame whose place begins first is saved.

:func:`in_place` makes a layout that returns the bytes of these frames at their places. So all code
that reads the log through this layout reads the frames in the right order.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from logquarry.config import StoreConfig
from logquarry.errors import StoreNotFound
from logquarry.format import frame
from logquarry.format.arrays import Int64
from logquarry.log import codec
from logquarry.log.filesystem import FileView
from logquarry.log.follow import Follower
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import Unreadable
from logquarry.log.store_files import FileSequence, StoreFile
from logquarry.log.walk import Span
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.repair.audit.differences import TagsRule, same_entries
from logquarry.repair.audit.queue_evidence import entries_at
from logquarry.repair.salvage.losses import Range, merged
from logquarry.write.queue_writer import parts_of

_CHUNK: Final = 4 << 20
_SECTOR: Final = 512
_MOST_PROPERTIES: Final = (1 << 15) - 1
"""Maximum length of a frame's properties: PROPERTIESLEN is a short."""


class Displaced(NamedTuple):
    """A displaced frame: its place, its size, and the physical offset at which it lies."""

    offset: int
    length: int
    found_at: int

    @property
    def end(self) -> int:
        """Physical offset after the frame's place."""
        return self.offset + self.length


def find_displaced(
    layout: StoreLayout,
    config: StoreConfig,
    queues: Mapping[QueueKey, Queue],
    lost: Sequence[Span],
    log_end: int,
) -> list[Displaced]:
    """Return the displaced frames, in the order of their places.

    Args:
        config: the settings, with the delay levels of the store.
        queues: the queues, except batch queues.
        lost: the lost parts of the log.
        log_end: physical offset of the log's end.
    """
    log = layout.commit_log
    places = merged([(span.offset, span.end) for span in lost if span.length])
    if not places or log.has_heads:
        return []
    frames = _Bytes(layout)
    follower = Follower(config.delay_levels_ms, keys=config.index_keys)
    found: dict[int, Displaced] = {}
    # No CRC covers the properties of the frame before a lost part. So the end of these properties
    # can already belong to a displaced block.
    parts = [(start - _MOST_PROPERTIES, stop) for start, stop in places]
    for file, part in _by_file(log, merged([*parts, (log_end, max(log_end, log.end))])):
        view = frames.view(file)
        for one in _frames(view, file, part, places) if view is not None else ():
            if (
                one.offset not in found
                and _is_continued(frames, one, max(log_end, places[-1][1]))
                and _has_entry(frames.of(one), follower, queues, config, one)
            ):
                found[one.offset] = one
    chosen: list[Displaced] = []
    for _, one in sorted(found.items()):
        place = log.at(one.offset)
        if place is None or frames.view(place) is None:
            continue
        fits = one.end <= place.base + min(place.size, log.file_size)
        if fits and (not chosen or chosen[-1].end <= one.offset):
            chosen.append(one)
    return chosen


def _by_file(log: FileSequence, ranges: Sequence[Range]) -> Iterator[tuple[StoreFile, Range]]:
    """Yield the part of each file in each range of the log."""
    for start, stop in ranges:
        position = max(start, log.start)
        while position < stop:
            file, end = log.at(position), min(stop, log.next_boundary(position))
            if file is not None:
                yield file, (position, end)
            position = end


def _frames(
    view: FileView, file: StoreFile, part: Range, places: list[Range]
) -> Iterator[Displaced]:
    """Yield the frames in a part of a file whose places lie in ``places``. Checks no CRC."""
    head = frame.HEAD.size
    position, stop = part[0] - file.base, min(part[1] - file.base, view.size)
    while (position := view.next_data(position)) < stop:
        length = min(_CHUNK, stop - position)
        data = view.window(position, length + head)[: length + head]
        for match in codec.MAGIC.finditer(data):
            at = match.start() - frame.HEAD.offsets["magic"]
            if not 0 <= at < length or at + head > len(data):
                continue
            size, _, _, _, _, _, offset, *_ = frame.HEAD.struct.unpack_from(data, at)
            one = Displaced(offset, size, file.base + position + at)
            number = bisect_right(places, (offset, one.end)) - 1
            near = places[max(0, number) : number + 2]
            fits = any(start <= offset and one.end <= end for start, end in near)
            if fits and offset != one.found_at and size >= frame.FIXED_SIZE_V1:
                yield one
        position += length


class _Bytes:
    """Reads the bytes of displaced frames. The files stay open."""

    def __init__(self, layout: StoreLayout) -> None:
        self.log = layout.commit_log
        self._files = OpenFiles(layout)

    def view(self, file: StoreFile) -> FileView | None:
        """Open a whole file; None if it cannot be opened. The salvage reports such a file."""
        try:
            return self._files.view(file.path)
        except StoreNotFound:
            return None

    def of(self, one: Displaced) -> memoryview:
        """Return the bytes of a frame; fewer if the file's end cuts the frame off."""
        return self.read(one.found_at, one.length, one.found_at)

    def read(self, offset: int, length: int, found_at: int) -> memoryview:
        """Return bytes from ``offset`` on, from the file that contains the physical offset
        ``found_at``.
        """
        file = self.log.at(found_at)
        assert file is not None
        return self._files.read(file.path, offset - file.base, length)


def _is_continued(frames: _Bytes, one: Displaced, log_end: int) -> bool:
    """Whether the bytes after the frame continue the log after the frame's place."""
    log = frames.log
    file, place = log.at(one.found_at), log.at(one.offset)
    assert file is not None
    if place is None:
        return False
    at = one.found_at - file.base + one.length
    data = frames.read(file.base + at, frame.HEAD.size, one.found_at)
    if len(data) < frame.HEAD.size:
        return False
    size, magic, _, _, _, _, offset, *_ = frame.HEAD.struct.unpack_from(data, 0)
    if magic == frame.MAGIC_BLANK:
        return bool(size == place.base + log.file_size - one.end)
    if magic in frame.MAGICS:
        # If the displaced block ends inside the head of the next frame, do not compare that head's
        # PHYSICALOFFSET.
        return bool(offset == one.end) or -at % _SECTOR < frame.HEAD.size
    return one.end == log_end and not any(data)


def _has_entry(
    data: memoryview,
    follower: Follower,
    queues: Mapping[QueueKey, Queue],
    config: StoreConfig,
    one: Displaced,
) -> bool:
    """Whether the frame is sound, and its queue has its entry."""
    if not isinstance(frame.decode_at(data, 0, base=one.offset), frame.Frame):
        return False
    found, _, _ = follower.follow(codec.Window.of(bytes(data), one.offset), one.length)
    parts = {} if found is None else parts_of(found)
    for key, part in parts.items():
        rule = TagsRule.of_writers(key, is_3_1=config.is_3_1)
        if key not in queues or int(part.offsets[0]) < 0:
            return False
        if not same_entries(entries_at(queues[key], part.offsets), part.units, rule).all():
            return False
    return bool(parts)


def in_place(layout: StoreLayout, frames: Sequence[Displaced]) -> StoreLayout:
    """Make a layout in which each displaced frame lies at its place."""
    if not frames:
        return layout
    by_file: dict[str, tuple[int, list[Displaced]]] = {}
    for one in frames:
        file = layout.commit_log.at(one.offset)
        assert file is not None
        _, parts = by_file.setdefault(file.path, (file.base, []))
        last = parts[-1] if parts else None
        if last is not None and (last.end, last.found_at + last.length) == (
            one.offset,
            one.found_at,
        ):
            # The frames follow each other at their places, and also where they lie: join them, so
            # that they are copied together.
            parts[-1] = last._replace(length=last.length + one.length)
        else:
            parts.append(one)
    found = _Bytes(layout)

    def open_view(path: str) -> FileView:
        view = layout.filesystem.open(path)
        return _Patched(view, found, *by_file[path]) if path in by_file else view

    other = copy.copy(layout)
    other.open_view = open_view
    return other


class _Patched(FileView):
    """A log file with displaced frames at their places. Each window is a copy."""

    def __init__(self, view: FileView, found: _Bytes, base: int, frames: list[Displaced]) -> None:
        self.path, self.size = view.path, view.size
        self._view = view
        self._found = found
        self._base = base
        self._frames = frames

    @property
    def unreadable(self) -> Sequence[Unreadable]:
        return self._view.unreadable

    def _first(self, position: int) -> int:
        """Return the number of the first frame that ends after a position."""
        return bisect_right(self._frames, self._base + position, key=attrgetter("end"))

    def window(self, start: int, length: int) -> memoryview:
        data = bytearray(self._view.window(start, length)[:length])
        end = self._base + start + len(data)
        for number in range(self._first(start), len(self._frames)):
            one = self._frames[number]
            if one.offset >= end:
                break
            at = one.offset - self._base - start
            first, stop = max(0, at), min(at + one.length, len(data))
            piece = self._found.read(one.found_at + first - at, stop - first, one.found_at)
            data[first : first + len(piece)] = piece
        return memoryview(data).toreadonly()

    def next_data(self, position: int) -> int:
        found = self._view.next_data(position)
        number = self._first(position)
        if number < len(self._frames):
            found = min(found, max(position, self._frames[number].offset - self._base))
        return found


@dataclass(frozen=True, slots=True)
class Piece:
    """Frames between two physical offsets of the old log; ``to`` is their new physical offset."""

    start: int
    stop: int
    to: int


class NewPlaces:
    """Maps the physical offsets of frames in the old log to those in the new log."""

    def __init__(self, pieces: list[Piece]) -> None:
        ordered = sorted(pieces, key=lambda piece: piece.start)
        self._starts = np.array([piece.start for piece in ordered], np.int64)
        self._stops = np.array([piece.stop for piece in ordered], np.int64)
        self._moves = np.array([piece.to - piece.start for piece in ordered], np.int64)

    def of(self, places: Int64) -> Int64:
        """Return the new physical offset of each frame; -1 if the frame is not saved."""
        if not len(self._starts):
            return np.full(len(places), -1, np.int64)
        at = np.maximum(np.searchsorted(self._starts, places, "right") - 1, 0)
        inside = (places >= self._starts[at]) & (places < self._stops[at])
        return np.where(inside, places + self._moves[at], -1)
