"""The checkpoint of a store that is written (``StoreCheckpoint``).

Three times that say up to which message the log, the queues and the index are on the disk. They
are a promise to the next recovery, so that each is set only after the sync that makes it true,
and the file is written after that, in this order and never the reverse:

    log synced -> physic; queues synced -> logics; index file synced -> index; checkpoint synced

The 24 bytes lie in one sector and are written in place, as RocketMQ has it: what a power cut leaves
is the one or the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from logquarry.format import checkpoint
from logquarry.format.checkpoint import Checkpoint
from logquarry.store.disk.disk import Disk
from logquarry.store.disk.page_file import PageFile


class CheckpointFile:
    """The checkpoint file, opened to be written; made if it is not there.

    Args:
        disk: what it is on.
        path: where it is.

    Attributes:
        physic_timestamp: store time up to which the log is on the disk.
        logics_timestamp: the same of all queues.
        index_timestamp: the same of the index. RocketMQ sets it only when an index file is full.
        before_write: told, before the times are written, which ones they replace.

    Raises:
        StoreUnavailable: if it cannot be opened or made.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._writing = threading.Lock()
        self._file = PageFile(disk, path, checkpoint.FILE_SIZE)
        with self._file.opening():
            found = checkpoint.decode(self._file.read(checkpoint.FILE_SIZE))
        self.physic_timestamp, self.logics_timestamp, self.index_timestamp = found
        self._on_disk = found
        self.before_write: Callable[[Checkpoint, Checkpoint], None] = lambda *_: None

    @property
    def times(self) -> Checkpoint:
        """The three times, as the next flush writes them."""
        return Checkpoint(self.physic_timestamp, self.logics_timestamp, self.index_timestamp)

    def flush(self) -> None:
        """Write the times and wait until they are on the disk.

        Raises:
            StoreUnavailable: if that failed, now or before; the store is poisoned then.
        """
        self._disk.health.require_writable()
        with self._writing:
            times = self.times
            self.before_write(self._on_disk, times)
            self._file.write_durably(checkpoint.LAYOUT.struct.pack(*times))
            self._on_disk = times

    def close(self) -> None:
        """Let go of the file, without a flush."""
        self._file.close()
