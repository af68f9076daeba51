"""Writes the batch queues of RocketMQ 5 in bulk, into a folder that no other process uses.

The entries of a queue follow each other from the first file on, whatever their queue offsets: the
broker searches an offset among them. If the log has lost messages of a queue, it is not built: a
consumer that asks for an offset in such a gap gets the batch before the gap again
(``BatchConsumeQueue.getBatchMsgIndexBuffer``), and does not get past it if that batch fills a pull.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import UnsupportedStore
from logquarry.format.batch_entry import DEFAULT_ENTRIES_PER_FILE, ENTRY_SIZE
from logquarry.log.layout import (
    BATCH_QUEUE,
    NAME_DIGITS,
    StoreLayout,
    batch_queue_file_size,
)
from logquarry.read.batch_queue import BatchEntries, BatchQueue, batch_queues
from logquarry.read.features import BATCH_QUEUES
from logquarry.read.log_queues import QueueKey
from logquarry.repair.audit.differences import queue_name
from logquarry.repair.rebuild.queue_files import LeftOut, sync_file
from logquarry.write.dispatcher import queue_name_fault

_MOST_HELD: Final = 64 << 20


@dataclass(slots=True)
class BuiltBatchQueue:
    """One batch queue during the build. Offsets are queue offsets.

    Attributes:
        first: offset of the first message.
        stop: one past the offset of the last message.
        written: bytes of the entries in the files.
        restarts: number of times that the topic was recreated.
        parts: entries that are not written yet.
    """

    first: int
    stop: int
    written: int = 0
    restarts: int = 0
    parts: list[bytes] = field(default_factory=list)


def batch_file_size(layout: StoreLayout, config: StoreConfig) -> int:
    """Bytes of a batch queue file: from the settings, else the files, else RocketMQ's default."""
    sizes = [
        layout.batch_queue(topic, queue_id).file_size
        for topic, queue_id in layout.batch_queue_names
        if layout.batch_queue(topic, queue_id).files
    ]
    inferred = max(sizes, key=sizes.count, default=DEFAULT_ENTRIES_PER_FILE * ENTRY_SIZE)
    return batch_queue_file_size(config) or inferred


class BatchFiles:
    """Builds the batch queues of one store.

    Args:
        disk: disk of the folder.
        folder: gets TOPIC/QUEUE/FILE.
        file_size: bytes of each file.
        topics: the topics with batch queues.

    Attributes:
        topics: as given.
        queues: the queues so far.
        left_out: messages that have no place in a queue.
    """

    def __init__(self, disk: Disk, folder: Path, file_size: int, topics: frozenset[str]) -> None:
        self.topics = topics
        self.queues: dict[QueueKey, BuiltBatchQueue] = {}
        self.left_out: list[LeftOut] = []
        self._disk = disk
        self._folder = folder
        self._file_size = file_size
        self._held = 0

    def add(self, key: QueueKey, entries: BatchEntries) -> None:
        """Add the entries of some more frames of one queue, in the log's order.

        Raises:
            UnsupportedStore: if the log lacks messages of the queue between two others.
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
            raise UnsupportedStore(
                f"{queue_name(key)}: it is a batch queue, and the log continues with queue offset "
                f"{first} after {queue.stop} (at {int(entries['physical_offset'][0])}): between "
                "them it has lost messages. A consumer that asks a broker for one of their offsets "
                "would get the batch before them again, and might not get past it. Nothing was "
                "changed; copy the messages with `logquarry export`",
                feature=BATCH_QUEUES,
                evidence=(f"{BATCH_QUEUE}/{key[0]}/{key[1]}/",),
            )
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
            for queue in batch_queues(layout)
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
