"""The consume queues of a store that is open for writing (``consumeQueueTable``).

A broker has thousands of queues. Their ends are found when the store is opened; the files of a
queue are mapped with its first read or write.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import StoreUnavailable
from logquarry.log.store_files import quarantine, queue_form
from logquarry.read.live_read import LiveBatchQueue, LiveQueue
from logquarry.read.log_queues import QueueKey
from logquarry.write.dispatcher import QueueWriters
from logquarry.write.queue_writer import Mending

logger = logging.getLogger(__name__)


class QueueTable:
    """The queues of one store.

    Args:
        disk: the store's disk.
        root: the store's folder.
        config: the store's settings, with all sizes.
        ends: of each existing queue the position after its last entry, counted in entries; in a
            queue of 20-byte entries that is one past its last queue offset.
        log: the log's files.
        mendings: for a recovery, what it knows of each queue that it writes.
        keeps_tails: whether the bytes after the ends stay, and files may be missing between others,
            as in RocketMQ.

    Attributes:
        writers: the writers for the dispatcher.
        live: the queues that :meth:`get` has returned.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        config: StoreConfig,
        ends: Mapping[QueueKey, int],
        log: MappedFileQueue,
        mendings: Mapping[QueueKey, Mending] | None = None,
        *,
        keeps_tails: bool = False,
    ) -> None:
        self._keeps_tails = keeps_tails
        self.writers = QueueWriters(self._open_files, mendings, config.batch_topics)
        self._disk = disk
        self._root = root
        self._config = config
        self._ends = dict(ends)
        self._log = log
        self._opening = threading.Lock()
        self.live: dict[QueueKey, LiveQueue | LiveBatchQueue] = {}

    def _open_files(self, topic: str, queue_id: int) -> MappedFileQueue:
        form = queue_form(self._config, topic)
        parts = form.root, topic, str(queue_id)
        aside = quarantine(self._root, *parts)
        files = MappedFileQueue(
            self._disk,
            self._root.joinpath(*parts),
            form.file_size,
            allocator=_SoleOwner(self._disk, aside),
            gaps=self._keeps_tails,
        )
        files.load()
        if files.bases:
            # A queue that is not in `ends` loses all its entries.
            end = self._ends.get((topic, queue_id), 0) * form.entry_size
            if self._keeps_tails:
                files.end_at(end)
            else:
                files.truncate_to(max(end, files.min_offset), aside=aside)
        return files

    def keys(self) -> list[QueueKey]:
        """Topic and number of each queue, sorted."""
        written = {key for key in self.writers.known if self._has_files(key)}
        return sorted(written.union(self._ends))

    def _has_files(self, key: QueueKey) -> bool:
        writer = self.writers.get(key)
        return writer is not None and bool(writer.files.bases)

    def get(self, topic: str, queue_id: int) -> LiveQueue | LiveBatchQueue | None:
        """One queue for reading, None if there is none of that name."""
        key = topic, queue_id
        found = self.live.get(key)
        if found is not None:
            return found
        # Only names of existing queues may become paths.
        if key not in self._ends and key not in self.writers:
            return None
        writer = self.writers.get(key)
        if writer is None or not writer.files.bases:
            return None
        with self._opening:
            kind = LiveBatchQueue if topic in self._config.batch_topics else LiveQueue
            return self.live.setdefault(key, kind(topic, queue_id, writer.files, self._log))

    def next_offsets(self) -> dict[QueueKey, int]:
        """The next offset of each queue (``recoverTopicQueueTable``)."""
        batch = [key for key in self._ends if key[0] in self._config.batch_topics]
        found = {key: end for key, end in self._ends.items() if key not in batch}
        for key in {*self.writers.known, *batch}:
            writer = self.writers.get(key)
            if writer is not None and writer.next_offset is not None:
                found[key] = writer.next_offset
        return found

    def __iter__(self) -> Iterator[MappedFileQueue]:
        return (writer.files for writer in self.writers)

    def restore_lost(self) -> bool:
        """Restore files that another program deleted. Returns whether all files exist now.

        A RocketMQ broker that is started on this store deletes queue files after the end of its
        log.
        """
        found = [self._restored(file) for files in self for file in files.open_files]
        return all(found)

    def _restored(self, file: MappedFile) -> bool:
        if file.is_named():
            return True
        logger.warning("%s: another program deleted it while it was in use; made again", file.path)
        disk = self._disk
        data = file.select(0) or b""
        try:
            aside = quarantine(self._root, *file.path.relative_to(self._root).parent.parts)
            _set_aside(disk, file.path, aside)
            descriptor = disk.make_file(file.path, file.size)
            try:
                disk.write_all(descriptor, data, 0)
                disk.sync(descriptor, file.path)
            finally:
                disk.let_go(descriptor)
        except (OSError, StoreUnavailable) as error:
            logger.error("%s: cannot be made again: %s", file.path, error)
            return False
        return True

    def close(self) -> None:
        """Close all files."""
        for files in self:
            files.close()


class _SoleOwner:
    """Makes the files of a queue; an existing file of the same name goes to quarantine.

    A RocketMQ broker that is started on this store dispatches before the lock stops it, and may
    have made the queue's next file.
    """

    def __init__(self, disk: Disk, aside: Path) -> None:
        self._disk = disk
        self._aside = aside

    def take(self, path: Path, following: Path | None, size: int) -> MappedFile | None:
        """Make the file at a path."""
        _set_aside(self._disk, path, self._aside)
        return MappedFile(self._disk, path, int(path.name), size, exclusive=True)

    def discard(self) -> None:
        """Do nothing: no file is made ahead."""


def _set_aside(disk: Disk, path: Path, aside: Path) -> None:
    if path.is_file():
        disk.set_aside(path, aside)
