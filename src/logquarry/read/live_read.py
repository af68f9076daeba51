"""The log and the queues of a store that this process writes, read from the writer's files.

The writer's positions show how far the files are written, so a read does not list folders. Any
number of threads may read; a reader never waits for the writer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.open_files import OpenFiles
from logquarry.format import queue_entry
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.log.file_sequence import FileSequence, StoreFile
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import Unreadable, first_unreadable
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import UNIT_DTYPE, Queue, QueueSegment, Units

if TYPE_CHECKING:
    from logquarry.log.walk import LogReader


_NO_BYTES: Final = memoryview(b"")


class LiveLog(CommitLog):
    """The commit log, read from the writer's files.

    Args:
        files: the log's files.
        layout: lists the store's files.
    """

    is_watched = False

    def __init__(self, files: MappedFileQueue, layout: Callable[[], StoreLayout]) -> None:
        super().__init__(layout(), files=_LogBytes(files, layout()))
        self._queue = files
        self._layout_now = layout
        self._sequence: tuple[tuple[int, ...], FileSequence] = ((), FileSequence((), 1))

    def refresh(self) -> None:
        """Does nothing: the files and the end are read from the writer each time."""

    @property
    def files(self) -> FileSequence:
        """The files of the log."""
        bases, size = self._queue.bases, self._queue.file_size
        known, sequence = self._sequence
        if known is not bases:
            root = self._layout_now().root
            paths = self._queue.paths
            files = (StoreFile(int(p.name), size, os.path.relpath(p, root)) for p in paths)
            sequence = FileSequence(tuple(files), size)
            self._sequence = bases, sequence
        return sequence

    def reaches(self, end: int) -> bool:
        """See :meth:`CommitLog.reaches`: only the writer, this process, changes the files."""
        return True

    @property
    def max_offset(self) -> int:
        """Physical offset at which the readable bytes end."""
        return self._queue.max_offset

    def close(self) -> None:
        """Release the view of a file."""
        self._hot = (0, 0, _NO_BYTES)

    def _log_reader(self, bound: int | None) -> LogReader:
        from logquarry.log.walk import LogReader

        return LogReader(self._layout_now(), bound=bound, live=True)


class _LogBytes(OpenFiles):
    """The written bytes of the log's files, by path."""

    def __init__(self, files: MappedFileQueue, layout: StoreLayout) -> None:
        super().__init__(layout)
        self._queue = files

    def read(self, path: str, position: int, length: int) -> memoryview:
        """See :meth:`OpenFiles.read`."""
        start, data = self.window(path, position, length)
        return data[position - start : position - start + length]

    def window(self, path: str, position: int, length: int) -> tuple[int, memoryview]:
        """See :meth:`OpenFiles.window`."""
        base = int(path.rpartition("/")[2])
        file = self._queue.find(base)
        if file is None:
            return 0, _NO_BYTES
        return file.select_around(position, length)

    def fault(self, path: str, position: int, length: int) -> Unreadable | None:
        """See :meth:`OpenFiles.fault`."""
        file = self._queue.find(int(path.rpartition("/")[2]))
        return None if file is None else first_unreadable(file.unreadable, position, length)

    def reaches(self, path: str, end: int) -> bool:
        """See :meth:`OpenFiles.reaches`. Only the writer, this process, changes the files."""
        return True


class LiveQueue(Queue):
    """A consume queue, read from the writer's files.

    Args:
        topic: its topic.
        queue_id: its number.
        files: its files.
        log: the log's files.
    """

    def __init__(
        self, topic: str, queue_id: int, files: MappedFileQueue, log: MappedFileQueue
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.units_per_file = files.file_size // UNIT_SIZE
        self._files = files
        self._log = log
        # The min offset, with the first file and the start of the log for which it holds.
        self._min: tuple[tuple[int, int], int] | None = None
        # The min offset with the lists of files, which are replaced when a file is deleted.
        self._low: tuple[object, object, int] = None, None, 0

    def bounds(self) -> tuple[int, int]:
        """See :meth:`Queue.bounds`. Each get calls this."""
        files = self._files
        of_files, of_log, low = self._low
        if of_files is not files.bases or of_log is not self._log.bases:
            low = self._find_low()
        last = files.last
        # All written entries can be read: queues have no pool.
        return low, 0 if last is None else (last.base + last.wrote) // UNIT_SIZE

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
        """See :attr:`logquarry.read.consume_queue.ConsumeQueue.min_offset`."""
        base, start = self._starts()
        if base < 0:
            return 0
        known = self._min
        if known is not None and known[0] == (base, start):
            return known[1]
        kept = np.flatnonzero(self._units_of(base)["physical_offset"] >= start)
        if not len(kept):
            return 0
        found = base // UNIT_SIZE + int(kept[0])
        self._min = (base, start), found
        return found

    @property
    def max_offset(self) -> int:
        """One past the last entry."""
        return self._files.max_offset // UNIT_SIZE

    @property
    def last_entry(self) -> QueueEntry | None:
        """The last entry, unless it only pads the file."""
        end = self._files.max_offset
        data = self._files.select(end - UNIT_SIZE, UNIT_SIZE) if end else None
        if data is None:
            return None
        entry = queue_entry.decode_at(data, 0)
        return None if entry.is_filler or not entry.is_written else entry

    def segments(self) -> Iterator[QueueSegment]:
        """The queue's files."""
        for base in self._files.bases:
            yield QueueSegment(base // UNIT_SIZE, len(self._units_of(base)))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """The entries in a range, file by file, without a copy."""
        for base in self._files.bases:
            first = base // UNIT_SIZE
            if first >= stop:
                return
            if first + self.units_per_file <= start:
                continue
            begin = max(start, first)
            units = self._units_of(base)[begin - first : stop - first]
            if len(units):
                yield begin, units

    def _units_of(self, base: int) -> Units:
        data = self._files.select(base)
        if data is None:
            return np.empty(0, UNIT_DTYPE)
        return np.frombuffer(data, UNIT_DTYPE, len(data) // UNIT_SIZE)
