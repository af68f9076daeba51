"""Writes the batch queues of RocketMQ 5 in bulk, into a folder that no other process uses.

The entries of a queue are written one after the other from the first file on, even if queue offsets
are missing: the broker searches the entries for an offset. If the log has lost messages of a queue,
the next entry takes their queue offsets (:func:`logquarry.write.queue_writer.without_gaps`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.disk.disk import Disk
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import NAME_DIGITS
from logquarry.read.batch_queue import BatchEntries, BatchQueue
from logquarry.read.log_queues import QueueKey
from logquarry.repair.rebuild.queue_files import LeftOut, sync_file
from logquarry.write.dispatcher import queue_name_fault
from logquarry.write.queue_writer import without_gaps

_MOST_HELD: Final = 64 << 20


@dataclass(slots=True)
class BuiltBatchQueue:
    """One batch queue during the build. Offsets are queue offsets.

    Attributes:
        first: offset of the first message.
        stop: one past the offset of the last message.
        written: bytes of the entries in the files.
        restarts: number of times that the topic was recreated.
        gaps: number of messages that the log has lost between others.
        parts: entries that are not written yet.
    """

    first: int
    stop: int
    written: int = 0
    restarts: int = 0
    gaps: int = 0
    parts: list[bytes] = field(default_factory=list)


class BatchFiles:
    """Builds the batch queues of one store.

    Args:
        disk: disk of the folder.
        folder: gets TOPIC/QUEUE/FILE.
        file_size: bytes of each file.

    Attributes:
        queues: the queues so far.
        left_out: messages that have no place in a queue.
    """

    def __init__(self, disk: Disk, folder: Path, file_size: int) -> None:
        self.queues: dict[QueueKey, BuiltBatchQueue] = {}
        self.left_out: list[LeftOut] = []
        self._disk = disk
        self._folder = folder
        self._file_size = file_size
        self._held = 0

    def add(self, key: QueueKey, entries: BatchEntries) -> None:
        """Add the entries of some more frames of one queue, in the log's order.

        Raises:
            StoreUnavailable: if the disk fails, or is full.
        """
        fault = queue_name_fault(key[0])
        starts = entries["base"].astype(np.int64)
        if fault is not None or (len(starts) and int(starts.min()) < 0):
            reason = f"the topic cannot name a folder: {fault}" if fault else "negative offset"
            for base, place in zip(starts.tolist(), entries["physical_offset"], strict=True):
                self.left_out.append(LeftOut(*key, base, int(place), reason))
            return
        at = 0
        stops = starts + entries["count"]
        breaks = np.flatnonzero(starts[1:] != stops[:-1]) + 1
        for end in [*breaks.tolist(), len(entries)]:
            self._add_run(key, int(starts[at]), int(stops[end - 1]), entries[at:end])
            at = end
        if self._held > _MOST_HELD:
            for name, queue in self.queues.items():
                self._write(name, queue)
            self._held = 0

    def _add_run(self, key: QueueKey, first: int, stop: int, entries: BatchEntries) -> None:
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = BuiltBatchQueue(first, stop)
        elif first <= queue.first and first < queue.stop:
            # The topic was deleted and created again.
            self._remove(key, queue)
            self.queues[key] = queue = BuiltBatchQueue(first, stop, restarts=queue.restarts + 1)
        elif first != queue.stop:
            queue.gaps += first - queue.stop
            entries = without_gaps(entries, queue.stop)
        queue.parts.append(entries.tobytes())
        queue.stop = stop
        self._held += len(queue.parts[-1])

    def finish(self) -> None:
        """Write all entries, and sync the files.

        Raises:
            StoreUnavailable: if the disk fails.
        """
        self._disk.make_folders(self._folder)
        for key, queue in self.queues.items():
            self._write(key, queue)
            for path in self._paths(key, queue):
                sync_file(self._disk, path)
            self._disk.sync_names(self._folder.joinpath(key[0], str(key[1])))
        self._held = 0

    def expired(self, layout: StoreLayout) -> list[BatchQueue]:
        """The old queues of which retention has deleted all messages: a broker continues where
        they end."""
        return [
            queue
            for queue in BatchQueue.all_of(layout)
            if (queue.topic, queue.queue_id) not in self.queues
            and (end := queue.last_physical_end) is not None
            and end <= layout.commit_log.start
        ]

    def _write(self, key: QueueKey, queue: BuiltBatchQueue) -> None:
        rest = memoryview(b"".join(queue.parts))
        queue.parts.clear()
        while rest:
            position = queue.written % self._file_size
            path = self._path(key, queue.written - position)
            count = min(len(rest), self._file_size - position)
            self._disk.make_folders(path.parent)
            try:
                descriptor = self._disk.open(path, create=True)
                try:
                    self._disk.allocate(descriptor, self._file_size)
                    self._disk.write_all(descriptor, rest[:count], position)
                finally:
                    self._disk.close(descriptor)
            except OSError as error:
                raise self._disk.refused(path, error) from error
            queue.written += count
            rest = rest[count:]

    def _remove(self, key: QueueKey, queue: BuiltBatchQueue) -> None:
        for path in self._paths(key, queue):
            self._disk.remove(path)

    def _paths(self, key: QueueKey, queue: BuiltBatchQueue) -> list[Path]:
        return [self._path(key, base) for base in range(0, queue.written, self._file_size)]

    def _path(self, key: QueueKey, base: int) -> Path:
        return self._folder.joinpath(key[0], str(key[1]), f"{base:0{NAME_DIGITS}d}")
