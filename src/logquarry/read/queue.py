"""Reads consume queues, whose entries map queue offsets to physical offsets of messages.

A read raises no error for damaged bytes. Even if a damaged queue has a huge gap, a read uses no
more memory than the size of the files. :meth:`Queue.units` is an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, KeysView
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from logquarry.errors import UsageError
from logquarry.format import java, queue_entry
from logquarry.format.arrays import Bools, Records
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE, QueueEntry, StoreTime, search_time
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import CONSUME_QUEUE, FileSequence, StoreFile, warn_once

NO_CODE: Final = java.LONG_MIN
"""Tags code of a batch whose messages may have different tags: read the tags from the log."""
UNIT_DTYPE: Final = queue_entry.LAYOUT.dtype()
Units = Records
"""Array of entries as stored, with the big-endian fields physical_offset, size and tags_code."""

MOST_HOLES: Final = 1 << 24
_FIRST_CHUNK: Final = 512
_LARGEST_CHUNK: Final = 1 << 16
_NO_MESSAGE_TIME: Final = 1_000


def warn_of_missing(path: str, offset: int) -> None:
    """Warn that a queue's file lacks an entry, but has later entries. Logged once per file.

    In RocksDB, ``path`` names the queue.
    """
    text = f"{path}: there is no entry at queue offset {offset}, but there are later entries. "
    text += "Messages without an entry are left out: check the store with `logquarry verify`"
    warn_once(text, about=path)


@dataclass(frozen=True, slots=True)
class QueueSegment:
    """One file of a queue: its first entry's queue offset, and its number of written entries."""

    start: int
    count: int


class Queue(ABC):
    """A consume queue that can be read. All offsets are queue offsets, that is, numbers of entries.

    As in RocketMQ, one ``get`` never reads past a multiple of ``units_per_file``, the number of
    entries in a file. If ``is_batch``, several entries may point to the same frame.
    """

    topic: str
    queue_id: int
    units_per_file: int
    is_batch: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Topic and queue id."""
        return self.topic, self.queue_id

    @property
    @abstractmethod
    def min_offset(self) -> int:
        """The first queue offset whose message is still in the log (``getMinOffsetInQueue``)."""

    @property
    @abstractmethod
    def max_offset(self) -> int:
        """Queue offset after the last message (``getMaxOffsetInQueue``)."""

    @property
    def entry_end(self) -> int:
        """The number of entries before the queue's end. Entries in deleted files count too."""
        return self.max_offset

    def bounds(self) -> tuple[int, int]:
        """Return the min offset and the max offset."""
        return self.min_offset, self.max_offset

    def reaches(self, stop: int) -> bool:
        """Whether the file with the entry before ``stop`` still reaches to this queue offset."""
        return True

    @property
    @abstractmethod
    def last_entry(self) -> QueueEntry | None:
        """The last entry that points to a message."""

    @property
    def last_physical_end(self) -> int | None:
        """Physical offset after the last message (``maxPhysicOffset``); None without a message."""
        entry = self.last_entry
        return None if entry is None else entry.end

    @abstractmethod
    def segments(self) -> Iterator[QueueSegment]:
        """Yield the queue's segments, in order. Usually each file is a segment."""

    @abstractmethod
    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """Yield the entries in ``[start, stop)``, as one pair per file. A pair is the queue offset
        of the first entry, and the array of entries.

        Missing files are skipped. Unwritten entries (:func:`is_written`) are included.
        """

    def warn_of_gap(self, offset: int) -> None:  # noqa: B027
        """Warn that a reader leaves out a message, because the queue has no entry at an offset.
        Only the queues in files and in RocksDB log this warning.
        """

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, Records]]:
        """Yield the same entries as :meth:`runs`, with all stored fields."""
        return self.runs(start, stop)

    def units(self, start: int, stop: int) -> Units:
        """Return one entry for each queue offset in ``[start, stop)``, up to the queue's end.

        Entries in missing files are zeros. If the whole range is in one file, the result is a view.
        Raises UsageError if ``start`` is negative, or if more than MOST_HOLES entries have no file.
        """
        if start < 0:
            raise UsageError(f"there is no queue offset {start}")
        stop = min(stop, self.max_offset)
        if start >= stop:
            return np.empty(0, UNIT_DTYPE)
        runs = list(self.runs(start, stop))
        if len(runs) == 1 and len(runs[0][1]) == stop - start:
            return runs[0][1]
        holes = stop - start - sum(len(units) for _, units in runs)
        if holes > MOST_HOLES:
            raise UsageError(f"{holes} of the entries from {start} to {stop} have no file")
        joined = np.zeros(stop - start, UNIT_DTYPE)
        for offset, units in runs:
            joined[offset - start : offset - start + len(units)] = units
        return joined

    def entries(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[tuple[int, QueueEntry]]:
        """Yield (queue offset, entry) of each written entry in a range (default: all)."""
        end = self.max_offset if stop is None else min(stop, self.max_offset)
        for offset, units in self.runs(self.min_offset if start is None else max(0, start), end):
            for at in np.flatnonzero(is_written(units)).tolist():
                yield offset + at, QueueEntry(*units[at].item())

    def entry_before(self, offset: int) -> QueueEntry | None:
        """Return the written entry directly before a queue offset, None if there is none.

        If a second call returns another entry, the topic was deleted and recreated in between.
        """
        found = next(self.entries(offset - 1, offset), None) if offset > 0 else None
        return None if found is None else found[1]

    def offset_by_time(
        self, timestamp: int, store_time: StoreTime, *, log_min_offset: int = 0
    ) -> int:
        """Return the queue offset of a message stored at or near ``timestamp``; 0 if none is found.

        If no message has exactly this time, the search compares two messages of one queue file: the
        last one before this time and the first one after it. It chooses the nearer one, or the
        earlier one if both are equally near (``getOffsetInQueueByTime``).

        QUIRK: Java chooses the file by its modification time, which is wrong for copied files. This
        method uses the store time of the file's last message.
        """
        chosen = self._segment_by_time(timestamp, store_time, log_min_offset)
        if chosen is None or chosen.count == 0:
            return 0
        units = self.units(chosen.start, chosen.start + chosen.count)
        low = max(0, self.min_offset - chosen.start)
        found = search_time(units, low, timestamp, store_time, log_min_offset)
        if found is None:
            # The search has met an unwritten entry. Search again in the written entries only.
            there = np.flatnonzero(is_written(units))
            low = int(np.searchsorted(there, low))
            found = search_time(units[there], low, timestamp, store_time, log_min_offset)
            found = int(there[found]) if found is not None and found >= 0 else found
        # QUIRK: if the search finds no message (-1), Java's result is the queue offset before the
        # file's first entry. In the queue's first file, Java rounds this result up to 0.
        return 0 if found is None else max(0, chosen.start + found)

    def _segment_by_time(
        self, timestamp: int, store_time: StoreTime, log_min_offset: int
    ) -> QueueSegment | None:
        last = None
        for segment in self.segments():
            last = segment
            if self._last_time(segment, store_time, log_min_offset) >= timestamp:
                break
        return last

    def _last_time(self, segment: QueueSegment, store_time: StoreTime, log_min_offset: int) -> int:
        units = self.units(segment.start, segment.start + segment.count)
        stop, chunk = len(units), 1  # Usually the last entry has a message.
        while stop > 0:
            some = units[max(0, stop - chunk) : stop]
            stop, chunk = stop - chunk, min(4 * chunk, _LARGEST_CHUNK)
            there = is_written(some) & (some["physical_offset"] >= log_min_offset)
            for at in np.flatnonzero(there)[::-1]:
                found = store_time(int(some["physical_offset"][at]), int(some["size"][at]))
                if found >= 0:
                    return found
        return _NO_MESSAGE_TIME


def is_written(units: Units) -> Bools:
    """Return for each entry whether it was written, by RocketMQ's rule."""
    written: Bools = (units["physical_offset"] >= 0) & (units["size"] > 0)
    return written


def has_message(units: Units) -> Bools:
    """Return for each entry whether it points to a message: it was written and is no filler."""
    message: Bools = is_written(units) & (units["size"] != FILLER_SIZE)
    return message


class FileQueue(Queue):
    """A consume queue or a batch queue in files. The constructor reads no entries.

    Args:
        log_min_offset: physical offset of the log's first byte (default: start of the log files
            that the layout lists).
        with_stale: whether a consume queue includes entries that point after the log's end. Such
            entries stay in the files if a recovery by RocketMQ's rules truncates the log
            (:attr:`StoreLayout.cut_end`).
    """

    entry_size: int

    def __init__(
        self,
        layout: StoreLayout,
        topic: str,
        queue_id: int,
        *,
        log_min_offset: int | None = None,
        files: OpenFiles | None = None,
        with_stale: bool = False,
    ) -> None:
        if log_min_offset is None:
            log_min_offset = layout.commit_log.start
        self._layout, self._with_stale = layout, with_stale
        self._reader = files or OpenFiles(layout)
        self.topic, self.queue_id, self.log_min_offset = topic, queue_id, log_min_offset
        self._use(self._listed())

    @staticmethod
    @abstractmethod
    def names(layout: StoreLayout) -> KeysView[tuple[str, int]]:
        """Return the (topic, queue id) pairs of all queues of this kind, sorted."""

    @classmethod
    def all_of(
        cls, layout: StoreLayout, files: OpenFiles | None = None, *, with_stale: bool = False
    ) -> list[Self]:
        """Return all queues of this kind that have files."""
        files, start = files or OpenFiles(layout), layout.commit_log.start
        return [
            cls(layout, *name, log_min_offset=start, files=files, with_stale=with_stale)
            for name in cls.names(layout)
        ]

    @abstractmethod
    def _listed(self) -> FileSequence:
        """List the queue's files."""

    def _use(self, sequence: FileSequence) -> None:
        # If a file's name is not a multiple of the entry size, its entries have no queue offsets.
        files = tuple(file for file in sequence.files if file.base % self.entry_size == 0)
        self.listed = sequence  # includes files whose names are no queue offsets
        self.sequence = FileSequence(files, sequence.file_size)
        self._tail: tuple[int, int] | None = None

    def refresh(self) -> None:
        """List the files again, and search for the queue's end from the last known end on."""
        known, before = self._tail, self.files
        base = before[known[0]].base if known is not None and before else None
        self._use(self._listed())
        for file in set(self.files) ^ set(before):
            self._reader.forget(file.path)
        if known is not None:
            self._tail = self._find_tail(base, known[1])

    @property
    def files(self) -> tuple[StoreFile, ...]:
        """The files, sorted by the position in the queue at which each file starts."""
        return self.sequence.files

    @property
    def entry_end(self) -> int:
        """The number of the entry after the last written entry."""
        if not self.files:
            return 0
        index, count = self._tail_position()
        return self.files[index].base // self.entry_size + count

    max_offset = entry_end

    def file_bytes(self) -> Iterator[tuple[StoreFile, memoryview]]:
        """Yield each file and its bytes, but no bytes after the position of the next file."""
        for index, file in enumerate(self.files):
            yield file, self._reader.read(file.path, 0, self._room_of(index))

    def _tail_position(self) -> tuple[int, int]:
        if self._tail is None:
            self._tail = self._find_tail(None, 0)
        return self._tail

    def _find_tail(self, known: int | None, count: int) -> tuple[int, int]:
        """Return the index of the last file that has written entries, and their number there."""
        for index in range(len(self.files) - 1, -1, -1):
            is_known = self.files[index].base == known
            written = self._written_prefix(index, count if is_known else 0)
            if written:
                return index, written
        return 0, 0

    @abstractmethod
    def _written_prefix(self, index: int, start: int) -> int:
        """Count the entries before a file's first unwritten entry at ``start`` or later."""

    def _room_of(self, index: int) -> int:
        room = self.sequence.file_size
        if index + 1 < len(self.files):
            room = min(room, self.files[index + 1].base - self.files[index].base)
        return room


class ConsumeQueue(FileQueue):
    """A consume queue in its files."""

    entry_size = UNIT_SIZE
    _checked: tuple[int, int] | None = None

    @staticmethod
    def names(layout: StoreLayout) -> KeysView[tuple[str, int]]:
        """See :attr:`StoreLayout.queue_names`."""
        return layout.queue_names

    def _listed(self) -> FileSequence:
        return self._layout.queue(self.topic, self.queue_id)

    def _use(self, sequence: FileSequence) -> None:
        super()._use(sequence)
        self.units_per_file = sequence.file_size // UNIT_SIZE
        self._min_offset: int | None = None

    @property
    def min_offset(self) -> int:
        """The first queue offset whose message is still in the log.

        QUIRK: ``correctMinOffset`` reads only the first file. If the messages of all entries in the
        first file have expired, the min offset is 0, although later files may have entries. If the
        messages of the last file have expired too, the min offset in a RocketMQ 5 store is the max
        offset.
        """
        if self._min_offset is None:
            self._min_offset = self._find_min()
        return self._min_offset

    def _find_min(self) -> int:
        if not self.files:
            return 0
        count = self._written(0)
        at, chunk = 0, _FIRST_CHUNK
        while at < count:
            units = self._read_units(0, at, min(at + chunk, count))
            kept = units["physical_offset"] >= self.log_min_offset
            first = int(kept.argmax())
            if kept[first]:
                return self.files[0].base // UNIT_SIZE + at + first
            at, chunk = at + chunk, min(4 * chunk, _LARGEST_CHUNK)
        tail, written = self._tail_position()
        last = self._read_units(tail, 0, written if tail else 0)["physical_offset"]
        has_expired = not (last >= self.log_min_offset).any() and self._layout.writer.is_5
        return self.entry_end if has_expired and written else 0

    @property
    def last_entry(self) -> QueueEntry | None:
        """The last written entry; None if it is a filler."""
        index, count = self._tail_position()
        if count == 0:
            return None
        entry = QueueEntry(*self._read_units(index, count - 1, count)[0].item())
        return None if entry.is_filler else entry

    def segments(self) -> Iterator[QueueSegment]:
        """See :meth:`Queue.segments`."""
        for index, file in enumerate(self.files):
            yield QueueSegment(file.base // UNIT_SIZE, self._written(index))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """Yield the entries in a range, file by file, without a copy."""
        if start >= stop or not self.files:
            return
        index = self.sequence.index_of(start * UNIT_SIZE)
        if index is None:
            index = next((i for i, f in enumerate(self.files) if f.base >= start * UNIT_SIZE), 0)
        for number in range(index, len(self.files)):
            base = self.files[number].base // UNIT_SIZE
            if base >= stop:
                return
            first = max(start, base)
            units = self._read_units(number, first - base, min(stop - base, self._written(number)))
            if len(units):
                yield first, units

    def _find_tail(self, known: int | None, count: int) -> tuple[int, int]:
        index, written = super()._find_tail(known, count)
        # If no file has a written entry, the queue ends where RocketMQ's ConsumeQueue.recover()
        # begins its search: at the start of the third-last file.
        return (index, written) if written else (max(0, len(self.files) - 3), 0)

    def _written(self, index: int) -> int:
        """Return how many entries a file has. If a later file has entries, the file is full."""
        tail, count = self._tail_position()
        if index == tail:
            return count
        return self._room(index) if index < tail else 0

    def _written_prefix(self, index: int, start: int) -> int:
        room = self._room(index)
        at, chunk = min(start, room), _FIRST_CHUNK
        while at < room:
            gaps = ~is_written(self._read_units(index, at, min(at + chunk, room)))
            first = int(gaps.argmax())
            if gaps[first]:
                at += first
                break
            at, chunk = at + len(gaps), min(4 * chunk, _LARGEST_CHUNK)
        cut = None if self._with_stale else self._layout.cut_end
        return at if cut is None else self._kept_prefix(index, at, cut)

    def warn_of_gap(self, offset: int) -> None:
        """See :meth:`Queue.warn_of_gap`."""
        if not self.files or offset * UNIT_SIZE < self.files[0].base:
            return  # Retention has deleted the earlier files.
        file = self.sequence.at(offset * UNIT_SIZE)
        if file is not None and self._reader.view(file.path) is None:
            return  # A live broker's retention has deleted the file since the files were listed.
        path = f"{CONSUME_QUEUE}/{self.topic}/{self.queue_id}" if file is None else file.path
        warn_of_missing(self._layout.filesystem.full_path(path), offset)

    def warn_of_lost_end(self) -> None:
        """Warn if there are entries shortly after the queue's end: an entry in between was lost."""
        index, count = self._tail_position()
        if not self.files or self._checked == (index, count) or self._layout.cut_end is not None:
            return
        self._checked = index, count
        if index + 1 < len(self.files) and count == self._room(index):
            index, count = index + 1, 0
        stop = min(count + _FIRST_CHUNK, self._room(index))
        has_later = is_written(self._read_units(index, count + 1, stop)).any()
        # A running broker writes entries in ascending order. So read the missing entry again, after
        # the later entries: if it is still missing, it was lost.
        if has_later and not is_written(self._read_units(index, count, count + 1)).any():
            self.warn_of_gap(self.files[index].base // UNIT_SIZE + count)

    def _kept_prefix(self, index: int, written: int, cut: int) -> int:
        """Count the entries up to the last entry that points before ``cut``; 0 if there is none."""
        stop = written
        while stop:
            start = max(0, stop - _LARGEST_CHUNK)
            places = self._read_units(index, start, stop)["physical_offset"]
            kept = np.flatnonzero(places < cut)
            if len(kept):
                return start + int(kept[-1]) + 1
            stop = start
        return 0

    def _room(self, index: int) -> int:
        view = self._reader.view(self.files[index].path)
        return 0 if view is None else max(0, min(self._room_of(index), view.size)) // UNIT_SIZE

    def _read_units(self, index: int, start: int, stop: int) -> Units:
        if start >= stop:
            return np.empty(0, UNIT_DTYPE)
        path = self.files[index].path
        data = self._reader.read(path, start * UNIT_SIZE, (stop - start) * UNIT_SIZE)
        return np.frombuffer(data, UNIT_DTYPE, len(data) // UNIT_SIZE)

    def reaches(self, stop: int) -> bool:
        """See :meth:`Queue.reaches`."""
        index = self.sequence.index_of(max(0, stop - 1) * UNIT_SIZE)
        if index is None:
            return True
        file = self.files[index]
        return self._reader.reaches(file.path, stop * UNIT_SIZE - file.base)
