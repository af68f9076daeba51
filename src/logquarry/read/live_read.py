"""Reads the log and the queues of a store while this process writes the store.

The writer's objects for the files are in the same process, and know how far each file is written.
So a read lists no folders. Any number of threads may read at the same time, and no read waits for
the writer.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

import numpy as np

from logquarry.disk.file_place import LiveBounds
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.format import queue_entry
from logquarry.format.batch import ENTRY_SIZE
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry, StoreTime
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import Unreadable, first_unreadable
from logquarry.log.store_files import BATCH_QUEUE, NAME_DIGITS, FileSequence, StoreFile
from logquarry.log.walk import LogReader, Run
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, BatchQueue
from logquarry.read.commit_log import CommitLog
from logquarry.read.queue import UNIT_DTYPE, Queue, QueueSegment, Units

_NO_BYTES: Final = memoryview(b"")
_Files = tuple[tuple[int, ...], int, int]
"""The start of each file of the queue, the end of the queue, and the start of the log."""


class ServedLog(Protocol):
    """The log and the queues of an open store, as far as other code reads them.

    The readers are the delivery of delayed messages and the transaction checks.
    """

    def queue_ids(self, topic: str) -> Iterable[int]:
        """Return the queue ids of a topic."""

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return one queue; None if there is no such queue."""

    def frame_at(self, offset: int) -> Frame | None:
        """Return the frame at a physical offset; None if it is damaged or if there is none."""

    def message(self, offset: int, size: int) -> Frame | None:
        """Return the message of this size at a physical offset; None if it is damaged or
        missing."""

    def store_time_at(self, offset: int, size: int) -> int:
        """Return the store time of the message at a physical offset; below 0 if there is none."""

    def runs(self, start: int) -> Iterator[Run]:
        """Read the undamaged frames from a physical offset on. The offset may be inside a frame."""

    @property
    def start(self) -> int:
        """Physical offset at which the log starts."""

    @property
    def end(self) -> int:
        """Physical offset at which the log ends."""


class LiveLog(CommitLog):
    """The commit log, read from the writer's files. ``layout`` returns the store's current
    layout.
    """

    may_shrink = False

    def __init__(self, files: MappedFileQueue, layout: Callable[[], StoreLayout]) -> None:
        super().__init__(layout(), files=_LogBytes(files, layout()))
        self._queue = self.live_files = files
        self._layout_now = layout
        self._sequence: tuple[tuple[int, ...], FileSequence] = ((), FileSequence((), 1))

    def refresh(self) -> None:
        """Does nothing, because each read gets the files and the end from the writer."""

    @property
    def files(self) -> FileSequence:
        """The files of the log."""
        bases, known = self._queue.bases, self._sequence
        if known[0] is bases:
            return known[1]
        root, size = self._layout_now().root, self._queue.file_size
        paths = self._queue.paths
        files = (StoreFile(int(p.name), size, os.path.relpath(p, root)) for p in paths)
        sequence = FileSequence(tuple(files), size)
        self._sequence = bases, sequence
        return sequence

    def reaches(self, end: int) -> bool:
        """Always true, because only this process, the store's writer, changes the files."""
        return True

    @property
    def max_offset(self) -> int:
        return self._queue.max_offset

    def _log_reader(self, bound: int | None) -> LogReader:
        return LogReader(self._layout_now(), bound=bound, live=True)


class _LogBytes(OpenFiles):
    def __init__(self, files: MappedFileQueue, layout: StoreLayout) -> None:
        super().__init__(layout)
        self._queue = files

    def read_from(self, path: str, position: int, length: int) -> memoryview:
        start, data = self.window(path, position, length)
        return data[position - start :]

    def window(self, path: str, position: int, length: int) -> tuple[int, memoryview]:
        base = int(path.rpartition("/")[2])
        file = self._queue.find(base)
        if file is None:
            return 0, _NO_BYTES
        return file.select_around(position, length)

    def fault(self, path: str, position: int, length: int) -> Unreadable | None:
        file = self._queue.find(int(path.rpartition("/")[2]))
        return None if file is None else first_unreadable(file.unreadable, position, length)

    def reaches(self, path: str, end: int) -> bool:
        return True


class _LiveFiles(Queue):
    def __init__(
        self, topic: str, queue_id: int, files: MappedFileQueue, log: MappedFileQueue
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self._files = files
        self._log = log


class LiveQueue(LiveBounds, _LiveFiles):
    """A consume queue, read from the writer's files."""

    _files: MappedFileQueue
    _log: MappedFileQueue

    def __init__(
        self,
        topic: str,
        queue_id: int,
        files: MappedFileQueue,
        log: MappedFileQueue,
        *,
        is_5: bool = False,
    ) -> None:
        super().__init__(topic, queue_id, files, log)
        self.units_per_file = files.file_size // UNIT_SIZE
        # True if RocketMQ 5 wrote the store. If all messages of a queue have expired, the min
        # offset is the max offset in such a store, and 0 in any other store.
        self._is_5 = is_5
        # The cached min offset, as a pair. The first item is the pair (start of the queue's first
        # file, start of the log) for which the min offset was computed, the second the min offset.
        self._min: tuple[tuple[int, int], int] | None = None
        self._low = None, None, 0

    def _find_low(self) -> int:
        bases = self._files.bases, self._log.bases
        low = self.min_offset
        if self._min is not None and self._min[0] == self._starts():
            self._low = *bases, low
        return low

    def _starts(self) -> tuple[int, int]:
        return self._files.min_offset, max(0, self._log.min_offset)

    @property
    def min_offset(self) -> int:
        base, start = self._starts()
        if base < 0:
            return 0
        known = self._min
        if known is not None and known[0] == (base, start):
            return known[1]
        kept = np.flatnonzero(self._units_of(base)["physical_offset"] >= start)
        if not len(kept):
            last = self._units_of(self._files.bases[-1])["physical_offset"]
            is_end = self._is_5 and len(last) and not (last >= start).any()
            return self.max_offset if is_end else 0
        found = base // UNIT_SIZE + int(kept[0])
        self._min = (base, start), found
        return found

    @property
    def max_offset(self) -> int:
        return self._files.max_offset // UNIT_SIZE

    @property
    def last_entry(self) -> QueueEntry | None:
        end = self._files.max_offset
        data = self._files.select(end - UNIT_SIZE, UNIT_SIZE) if end else None
        if data is None:
            return None
        entry = queue_entry.decode_at(data, 0)
        return None if entry.is_filler or not entry.is_written else entry

    def segments(self) -> Iterator[QueueSegment]:
        for base in self._files.bases:
            yield QueueSegment(base // UNIT_SIZE, len(self._units_of(base)))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        for base in self._files.bases:
            first = base // UNIT_SIZE
            if first >= stop:
                return
            if first + self.units_per_file <= start:
                continue
            begin = max(start, first)
            units = self._units_of(base, begin - first, stop - begin)
            if len(units):
                yield begin, units

    def _units_of(self, base: int, first: int = 0, count: int | None = None) -> Units:
        most = None if count is None else count * UNIT_SIZE
        data = self._files.select(base + first * UNIT_SIZE, most=most)
        if data is None:
            return np.empty(0, UNIT_DTYPE)
        return np.frombuffer(data, UNIT_DTYPE, len(data) // UNIT_SIZE)


class LiveBatchQueue(_LiveFiles):
    """A batch queue, read from the writer's files."""

    units_per_file = BatchQueue.units_per_file
    is_batch = True

    def __init__(
        self, topic: str, queue_id: int, files: MappedFileQueue, log: MappedFileQueue
    ) -> None:
        super().__init__(topic, queue_id, files, log)
        self._change = threading.Lock()
        self._seen: tuple[_Files, BatchQueue] | None = None

    def _now(self) -> BatchQueue:
        """Return an object for the present content of the queue. After each append, the method
        returns a new object.
        """
        state = self._files.bases, self._files.max_offset, max(0, self._log.min_offset)
        with self._change:
            if self._seen is None or self._seen[0] != state:
                self._seen = state, _Written(self.topic, self.queue_id, self._files, state)
            return self._seen[1]

    def bounds(self) -> tuple[int, int]:
        return self._now().bounds()

    @property
    def min_offset(self) -> int:
        return self._now().min_offset

    @property
    def max_offset(self) -> int:
        return self._now().max_offset

    @property
    def last_entry(self) -> QueueEntry | None:
        return self._now().last_entry

    def segments(self) -> Iterator[QueueSegment]:
        return self._now().segments()

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        return self._now().runs(start, stop)

    def offset_by_time(
        self, timestamp: int, store_time: StoreTime, *, log_min_offset: int = 0
    ) -> int:
        return self._now().offset_by_time(timestamp, store_time, log_min_offset=log_min_offset)


class _Written(BatchQueue):
    def __init__(self, topic: str, queue_id: int, files: MappedFileQueue, state: _Files) -> None:
        bases, self._end, self.log_min_offset = state
        size, folder = files.file_size, f"{BATCH_QUEUE}/{topic}/{queue_id}"
        self._mapped = files
        named = (StoreFile(base, size, f"{folder}/{base:0{NAME_DIGITS}d}") for base in bases)
        self.topic, self.queue_id = topic, queue_id
        self._use(FileSequence(tuple(named), size))

    def _all(self, index: int, most: int | None = None) -> BatchEntries:
        base = self.files[index].base
        count = max(0, min(self._end - base, self.sequence.file_size)) // ENTRY_SIZE
        count = count if most is None else min(count, most)
        data = self._mapped.select(base, count * ENTRY_SIZE) if count else None
        return np.empty(0, BATCH_DTYPE) if data is None else np.frombuffer(data, BATCH_DTYPE)
