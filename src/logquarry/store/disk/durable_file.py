"""The durable mark of a store that is written (:mod:`logquarry.format.durable_mark`).

It is moved after each sync of the log, and synced itself only before the checkpoint is written:
what a power cut leaves of it is too low at worst, never too high.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from logquarry.format import durable_mark
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.durable_mark import DurableMark
from logquarry.store.disk.disk import Disk
from logquarry.store.disk.page_file import PageFile

logger = logging.getLogger(__name__)


class DurableFile:
    """The file of the mark, made if it is not there.

    Args:
        disk: what it is on.
        path: where it is.
        offset: up to where the log is on the disk.
        checkpoint: what the checkpoint says.

    Raises:
        StoreUnavailable: if it cannot be made or written.
    """

    def __init__(self, disk: Disk, path: Path, offset: int, checkpoint: Checkpoint) -> None:
        self.path = path
        self._writing = threading.Lock()
        self._mark = DurableMark(offset, checkpoint, checkpoint)
        self._file = PageFile(disk, path, durable_mark.FILE_SIZE)
        with self._file.opening():
            self._file.write(durable_mark.encode(self._mark))
            self._file.sync()

    @property
    def offset(self) -> int:
        """Up to where the log is said to be on the disk."""
        return self._mark.offset

    def move(self, offset: int) -> None:
        """The log was synced up to an offset. Where that cannot be noted the old mark stays true.

        Not synced: a mark that is lost is only a lower one.
        """
        with self._writing:
            if offset <= self._mark.offset or not self._file.is_open:
                return
            before, self._mark = self._mark, self._mark._replace(offset=offset)
            try:
                self._file.write(durable_mark.encode(self._mark))
            except OSError as error:
                self._mark = before
                logger.warning("%s: the mark stays at %d: %s", self.path, before.offset, error)

    def sync(self) -> None:
        """Bring the mark to the disk as well, for whoever cannot do with a lower one.

        Raises:
            StoreUnavailable: if the sync failed, now or before; the store is poisoned then.
        """
        with self._writing:
            if self._file.is_open:
                self._file.sync()

    def expect(self, before: Checkpoint, after: Checkpoint) -> None:
        """The checkpoint is about to be written: the mark is good before and after that.

        Raises:
            StoreUnavailable: if it cannot be written or synced; the store is poisoned then.
        """
        with self._writing:
            self._mark = self._mark._replace(before=before, after=after)
            self._file.write_durably(durable_mark.encode(self._mark))

    def close(self) -> None:
        """Let go of the file."""
        with self._writing:
            self._file.close()
