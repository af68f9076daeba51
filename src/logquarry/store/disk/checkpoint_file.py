"""The checkpoint of a store that is written (``StoreCheckpoint``).

Three times that say up to which message the log, the queues and the index are on the disk. They
are a promise to the next recovery, so that each is set only after the sync that makes it true,
and the file is written after that, in this order and never the reverse:

    log synced -> physic; queues synced -> logics; index file synced -> index; checkpoint synced

The 24 bytes lie in one sector and are written in place, as RocketMQ has it: what a power cut leaves
is the one or the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from logquarry.format import checkpoint
from logquarry.format.checkpoint import Checkpoint
from logquarry.store.disk.disk import Disk
from logquarry.store.disk.lifetime import abandon_in_children


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
        self.path = path
        self._disk = disk
        self._writing = threading.Lock()
        try:
            self._descriptor = disk.open(path)
        except FileNotFoundError:
            self._descriptor = disk.make_file(path, checkpoint.FILE_SIZE)
        except OSError as error:
            raise disk.refused(path, error) from error
        try:
            if disk.size(self._descriptor) < checkpoint.FILE_SIZE:
                disk.allocate(self._descriptor, checkpoint.FILE_SIZE)
            found = checkpoint.decode(disk.read(self._descriptor, checkpoint.FILE_SIZE, 0))
        except OSError as error:
            disk.let_go(self._descriptor)
            raise disk.refused(path, error) from error
        self.physic_timestamp, self.logics_timestamp, self.index_timestamp = found
        self._on_disk = found
        self.before_write: Callable[[Checkpoint, Checkpoint], None] = lambda *_: None
        abandon_in_children(self)

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
            data = checkpoint.LAYOUT.struct.pack(*times)
            try:
                self._disk.write_all(self._descriptor, data, 0)
            except OSError as error:
                reason = f"{self.path}: cannot be written: {error.strerror or error}"
                raise self._disk.health.poison(reason) from error
            self._disk.sync(self._descriptor, self.path)
            self._on_disk = times

    def close(self) -> None:
        """Let go of the file, without a flush."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.let_go(descriptor)

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.store.disk.lifetime`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
