"""Reads batch queues of RocketMQ 5 (``BatchConsumeQueue``).

A stored entry covers the queue offsets of all messages in one frame. Callers of a
:class:`~logquarry.read.queue.Queue` expect one entry per queue offset. So :class:`BatchQueue`
divides each stored entry into *units*: entries for one message each. Reads skip a stored entry if
it was never written, or if one of its queue offsets is also in an earlier entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from logquarry.errors import UnreadableFile
from logquarry.format import batch, java
from logquarry.format.arrays import Bools, Int64, Records
from logquarry.format.queue_entry import QueueEntry, StoreTime
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import FileSequence, StoreFile
from logquarry.read.queue import (
    NO_CODE,
    UNIT_DTYPE,
    ConsumeQueue,
    FileQueue,
    Queue,
    QueueSegment,
    Units,
    warn_of_missing,
)
from logquarry.read.rocksdb_queue import RocksQueue, rocksdb_queues

BATCH_DTYPE: Final = batch.ENTRY.dtype()
BatchEntries = Records

_MOST_UNITS: Final = 1 << 16
_LARGEST_CHUNK: Final = 1 << 16
_MOST_KEPT: Final = 4


def is_batch_written(entries: BatchEntries) -> Bools:
    """Return for each entry whether it points to a message, by the rule of
    ``BatchConsumeQueue.recover``.
    """
    found: Bools = (entries["physical_offset"] >= 0) & (entries["size"] > 0)
    return found & (entries["base"] >= 0) & (entries["count"] > 0)


def queue_entry_of(entry: np.void) -> QueueEntry:
    """Return the fields that an entry shares with the entries of consume queues."""
    return QueueEntry(*(int(entry[name]) for name in QueueEntry._fields))


def own_messages(entries: BatchEntries) -> BatchEntries:
    """Remove the queue offsets of lost messages from each entry.

    ``write.queue_writer.without_gaps`` has added these queue offsets at the entry's start. The
    field ``reserved`` contains the number of added queue offsets.
    """
    lost = entries["reserved"].astype(np.int64)
    lost = np.where((lost > 0) & (lost <= entries["count"]), lost, 0)
    if not lost.any():
        return entries
    found = entries.copy()
    found["base"] += lost
    found["count"] -= lost.astype(np.int16)
    found["reserved"] = 0
    return found


def frames_in(places: Int64, *, is_batch: bool) -> tuple[Int64, Int64]:
    """Group units by the frame that they point to. Return the index of each frame's first unit, and
    the number of units of each frame.
    """
    if not is_batch:
        return np.arange(len(places)), np.ones(len(places), np.int64)
    firsts = np.flatnonzero(np.append(True, np.diff(places) != 0)[: len(places)])
    return firsts, np.diff(np.append(firsts, len(places)))


@dataclass(frozen=True, slots=True)
class Spans:
    """Entries of one file, with their queue offsets.

    ``starts`` contains the first queue offset of each entry, ``stops`` the queue offset after the
    entry's last one.
    """

    entries: BatchEntries
    starts: Int64
    stops: Int64

    @classmethod
    def of(cls, entries: BatchEntries) -> Spans:
        """Compute the queue offsets of entries. Entries that were never written, or that overlap an
        earlier entry, are omitted.
        """
        entries = own_messages(entries[is_batch_written(entries)])
        entries = entries[entries["count"] > 0]
        starts = entries["base"].astype(np.int64)
        # Damage can make the first queue offset of an entry so large that adding the count would
        # overflow. Omit such entries.
        sane = starts <= java.LONG_MAX - np.iinfo(np.int16).max
        if not sane.all():
            entries, starts = entries[sane], starts[sane]
        stops = starts + entries["count"]
        if len(starts) > 1:
            before = np.maximum.accumulate(stops)[:-1]
            rises = np.append(True, starts[1:] >= before)
            if not rises.all():
                entries, starts, stops = entries[rises], starts[rises], stops[rises]
        return cls(entries, starts, stops)

    def units(self, first: int, last: int) -> Iterator[tuple[int, Units]]:
        """Yield pairs: a queue offset, and an array of the units from this queue offset on. A new
        array begins after a gap between queue offsets, or if an array becomes too long.
        """
        for offset, part, counts in self._parts(first, last):
            units = np.empty(len(part), UNIT_DTYPE)
            units["physical_offset"], units["size"] = part["physical_offset"], part["size"]
            codes = part["tags_code"].astype(np.int64)
            units["tags_code"] = np.where((counts > 1) | (codes == 0), NO_CODE, codes)
            yield offset, np.repeat(units, counts)

    def rows(self, first: int, last: int) -> Iterator[tuple[int, BatchEntries]]:
        """Yield the same arrays as :meth:`units`, but with all fields of the entries."""
        for offset, part, counts in self._parts(first, last):
            yield offset, np.repeat(part, counts)

    def _parts(self, first: int, last: int) -> Iterator[tuple[int, BatchEntries, Int64]]:
        """Yield groups of entries: the first queue offset, the entries, and the number of messages
        in each entry.
        """
        starts, stops = self.starts[first:last], self.stops[first:last]
        filled = np.cumsum(stops - starts) // _MOST_UNITS
        cuts = np.flatnonzero((starts[1:] != stops[:-1]) | (np.diff(filled) != 0)) + 1
        at = 0
        for cut in [*cuts.tolist(), last - first]:
            part = self.entries[first + at : first + cut]
            yield int(starts[at]), part, stops[at:cut] - starts[at:cut]
            at = cut


_Read = Callable[[Spans, int, int], Iterator[tuple[int, Records]]]


class BatchQueue(FileQueue):
    """A batch queue, read from its files."""

    entry_size = batch.ENTRY_SIZE
    # Files have no fixed number of queue offsets, so a ``get`` is not limited to one file.
    # ``units_per_file`` is therefore larger than any queue offset.
    units_per_file = 1 << 62
    is_batch = True

    @staticmethod
    def names(layout: StoreLayout) -> KeysView[tuple[str, int]]:
        """See :attr:`StoreLayout.batch_queue_names`."""
        return layout.batch_queue_names

    def _listed(self) -> FileSequence:
        return self._layout.batch_queue(self.topic, self.queue_id)

    def _use(self, sequence: FileSequence) -> None:
        super()._use(sequence)
        self._spans: dict[int, Spans] = {}
        self._firsts: dict[int, int | None] = {}

    @property
    def min_offset(self) -> int:
        """The first queue offset whose frame is still in the log (``correctMinOffset``).

        QUIRK: only the first file is read. If the log no longer has any frame of this file's
        entries, the min offset is the queue offset after the file's last entry.
        """
        spans = self._of_file(0) if self.files else None
        if spans is None or not len(spans.starts):
            return 0
        kept = spans.entries["physical_offset"] >= self.log_min_offset
        first = int(kept.argmax())
        return int(spans.starts[first] if kept[first] else spans.stops[-1])

    @property
    def max_offset(self) -> int:
        """The queue offset after the last message; 0 if the queue has no message."""
        spans = self._last_spans()
        return int(spans.stops[-1]) if spans is not None else 0

    @property
    def last_entry(self) -> QueueEntry | None:
        """The physical offset and size of the last entry's frame, and its tags code."""
        spans = self._last_spans()
        return None if spans is None else queue_entry_of(spans.entries[-1])

    def segments(self) -> Iterator[QueueSegment]:
        """Yield the range of queue offsets of each file that has queue offsets."""
        for index in range(len(self.files)):
            spans = self._of_file(index)
            if len(spans.starts):
                start = int(spans.starts[0])
                yield QueueSegment(start, int(spans.stops[-1]) - start)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """Yield one unit per queue offset in a range; missing queue offsets are skipped."""
        return self._repeated(start, stop, Spans.units)

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, BatchEntries]]:
        """See :meth:`Queue.rows`."""
        return self._repeated(start, stop, Spans.rows)

    def _repeated(self, start: int, stop: int, read: _Read) -> Iterator[tuple[int, Records]]:
        for spans in self.spans(start, stop):
            first = int(np.searchsorted(spans.stops, start, "right"))
            last = int(np.searchsorted(spans.starts, stop, "left"))
            for begin, rows in read(spans, first, last) if first < last else ():
                at, end = max(begin, start), min(begin + len(rows), stop)
                yield at, rows[at - begin : end - begin]

    def spans(self, start: int, stop: int) -> Iterator[Spans]:
        """Yield the entries of each file that can have queue offsets in a range."""
        if start >= stop:
            return
        for index in range(self._file_of(start), len(self.files)):
            spans = self._of_file(index)
            yield spans
            if len(spans.starts) and int(spans.stops[-1]) >= stop:
                return

    def positions(self, start: int, stop: int) -> BatchEntries:
        """The written entries between two positions. A position is a number of entries from the
        start of the files.
        """
        found = [np.empty(0, BATCH_DTYPE)]
        for file, entries in self.batches():
            base = file.base // batch.ENTRY_SIZE
            if base < stop and base + len(entries) > start:
                found.append(entries[max(0, start - base) : stop - base])
        return np.concatenate(found)

    def batches(self) -> Iterator[tuple[StoreFile, BatchEntries]]:
        """Yield the stored entries of each file, up to the last written entry."""
        for index, file in enumerate(self.files):
            yield file, self._written(index)

    def offset_by_time(
        self, timestamp: int, store_time: StoreTime, *, log_min_offset: int = 0
    ) -> int:
        """The first queue offset of the first frame that was stored at ``timestamp`` or later. If
        all frames are older, the first queue offset of the last frame (``getOffsetInQueueByTime``).
        """
        found = 0
        for index in range(len(self.files)):
            spans = self._of_file(index)
            late = spans.entries["store_timestamp"] >= timestamp
            late &= spans.entries["physical_offset"] >= log_min_offset
            if late.any():
                return int(spans.starts[int(late.argmax())])
            if len(spans.starts):
                found = int(spans.starts[-1])
        return found

    def warn_of_gap(self, offset: int) -> None:
        """See :meth:`Queue.warn_of_gap`."""
        index = self._file_of(offset)
        if any(self._reader.view(file.path) is None for file in self.files[index : index + 2]):
            return  # A live broker's retention has deleted a file since the files were listed.
        entries = self._written(index)
        entries = entries[is_batch_written(entries)]
        first = entries["base"].astype(np.int64)
        # If an entry covers the queue offset, log no warning: a recovery has added the queue offset
        # of the lost message to this entry, and has reported the loss.
        is_known = (first <= offset) & (offset - first < entries["count"])
        if not is_known.any():
            path = self._layout.filesystem.full_path(self.files[index].path)
            warn_of_missing(path, offset)

    # ------------------------------------------------------------------------------------ files
    def _last_spans(self) -> Spans | None:
        if not self.files:
            return None
        spans = self._of_file(self._tail_position()[0])
        return spans if len(spans.starts) else None

    def _file_of(self, offset: int) -> int:
        """The last file whose first queue offset is at most ``offset``; else the first file."""
        low, high = 0, self._tail_position()[0] if self.files else -1
        while low < high:
            middle = (low + high + 1) // 2
            first = self._first(middle)
            if first is not None and first <= offset:
                low = middle
            else:
                high = middle - 1
        return low

    def _first(self, index: int) -> int | None:
        if index not in self._firsts:
            head = self._all(index, 1)
            is_there = len(head) and bool(is_batch_written(head)[0])
            self._firsts[index] = int(head[0]["base"]) if is_there else None
        return self._firsts[index]

    def _of_file(self, index: int) -> Spans:
        found = self._spans.get(index)
        if found is None:
            if len(self._spans) >= _MOST_KEPT:
                # Make a new cache instead of emptying the old one, because another thread may be
                # reading it.
                self._spans = {}
            found = self._spans[index] = Spans.of(self._written(index))
        return found

    def _written_prefix(self, index: int, start: int) -> int:
        entries = self._all(index)
        at = min(start, len(entries))
        while at < len(entries):
            there = is_batch_written(entries[at : at + _LARGEST_CHUNK])
            if not there.all():
                return at + int(there.argmin())
            at += len(there)
        return at

    def _written(self, index: int) -> BatchEntries:
        tail, count = self._tail_position()
        if index > tail:
            return self._all(index, 0)
        return self._all(index, count if index == tail else None)

    def _all(self, index: int, most: int | None = None) -> BatchEntries:
        """The first ``most`` entries of one file (default: all). Bytes after the file's regular
        size are no entries.
        """
        file = self.files[index]
        room = self._room_of(index)
        if most is not None:
            room = min(room, most * batch.ENTRY_SIZE)
        data = self._reader.read(file.path, 0, room)
        return np.frombuffer(data, BATCH_DTYPE, len(data) // batch.ENTRY_SIZE)


def all_queues(
    layout: StoreLayout, files: OpenFiles | None = None, *, with_stale: bool = False
) -> list[FileQueue | RocksQueue]:
    """Return all consume queues and batch queues that have files, and all queues in RocksDB."""
    files = files or OpenFiles(layout)
    found: list[FileQueue | RocksQueue] = [
        queue
        for kind in (ConsumeQueue, BatchQueue)
        for queue in kind.all_of(layout, files, with_stale=with_stale)
    ]
    return [*found, *rocksdb_queues(layout)]


def open_queue(
    layout: StoreLayout,
    topic: str,
    queue_id: int,
    *,
    log_min_offset: int | None = None,
    files: OpenFiles | None = None,
) -> FileQueue | None:
    """Return a consume queue or batch queue; None if the store has no folder for the queue."""
    for kind in (BatchQueue, ConsumeQueue):
        if (topic, queue_id) in kind.names(layout):
            return kind(layout, topic, queue_id, log_min_offset=log_min_offset, files=files)
    return None


def unreadable_queues(layout: StoreLayout) -> Mapping[tuple[str, int], str]:
    """Return the queues with unreadable bytes in a file, each with the reason. All entries are
    read.
    """
    found = {}
    files = OpenFiles(layout, is_strict=True)
    for queue in (*ConsumeQueue.all_of(layout, files), *BatchQueue.all_of(layout, files)):
        try:
            deque(queue.runs(*queue.bounds()), maxlen=0)
        except UnreadableFile as error:
            found[queue.topic, queue.queue_id] = str(error)
    return found


def message_entries(queue: Queue, start: int, stop: int) -> Iterator[tuple[int, QueueEntry]]:
    """Yield the entries in a range. An entry of a batch queue has the offset of its first message,
    which can be before the range.
    """
    if not queue.is_batch:
        yield from queue.entries(start, stop)
        return
    for _, rows in queue.rows(start, stop):
        for row in rows[np.diff(rows["base"], prepend=-1) != 0]:
            yield int(row["base"]), queue_entry_of(row)
