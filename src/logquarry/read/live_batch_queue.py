"""A batch queue of a store that this process writes, read from the writer's files."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.format.batch_entry import ENTRY_SIZE
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.file_sequence import FileSequence, StoreFile
from logquarry.log.store_files import BATCH_QUEUE, NAME_DIGITS
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, BatchQueue
from logquarry.read.consume_queue import Queue, QueueSegment, StoreTime, Units

_Files = tuple[tuple[int, ...], int, int]
"""Bases and end of the queue's files, and start of the log."""


class LiveBatchQueue(Queue):
    """A batch queue, read from the writer's files. Any number of threads may read it.

    Args:
        topic: its topic.
        queue_id: its number.
        files: its files.
        log: the log's files.
    """

    units_per_file = BatchQueue.units_per_file
    is_batch = True

    def __init__(
        self, topic: str, queue_id: int, files: MappedFileQueue, log: MappedFileQueue
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self._files = files
        self._log = log
        self._change = threading.Lock()
        self._seen: tuple[_Files, BatchQueue] | None = None

    def _now(self) -> BatchQueue:
        """The queue as it is now; a later append makes another object."""
        state = self._files.bases, self._files.max_offset, max(0, self._log.min_offset)
        with self._change:
            if self._seen is None or self._seen[0] != state:
                self._seen = state, _Written(self.topic, self.queue_id, self._files, state)
            return self._seen[1]

    def bounds(self) -> tuple[int, int]:
        """See :meth:`Queue.bounds`."""
        return self._now().bounds()

    @property
    def min_offset(self) -> int:
        """See :attr:`BatchQueue.min_offset`."""
        return self._now().min_offset

    @property
    def max_offset(self) -> int:
        """See :attr:`BatchQueue.max_offset`."""
        return self._now().max_offset

    @property
    def last_entry(self) -> QueueEntry | None:
        """See :attr:`BatchQueue.last_entry`."""
        return self._now().last_entry

    def segments(self) -> Iterator[QueueSegment]:
        """See :meth:`BatchQueue.segments`."""
        return self._now().segments()

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """See :meth:`BatchQueue.runs`."""
        return self._now().runs(start, stop)

    def offset_by_time(
        self, timestamp: int, store_time: StoreTime, *, log_min_offset: int = 0
    ) -> int:
        """See :meth:`BatchQueue.offset_by_time`."""
        return self._now().offset_by_time(timestamp, store_time, log_min_offset=log_min_offset)


class _Written(BatchQueue):
    """The entries of a queue up to one moment."""

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
