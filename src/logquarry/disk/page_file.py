"""A file of one page that is written in place: the checkpoint, and the durable mark."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from logquarry.disk.disk import Disk
from logquarry.disk.lifetime import abandon_in_children
from logquarry.errors import StoreUnavailable
from logquarry.format import checkpoint, durable_mark
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.durable_mark import DurableMark


class PageFile:
    """A small file of a fixed size, opened to be written; made of zeros if it is not there.

    Args:
        disk: what it is on.
        path: where it is.
        size: its bytes; a shorter one is made as long.

    Raises:
        StoreUnavailable: if it cannot be opened or made.
    """

    def __init__(self, disk: Disk, path: Path, size: int) -> None:
        self.path = path
        self._disk = disk
        try:
            self._descriptor = disk.open(path)
        except FileNotFoundError:
            self._descriptor = disk.make_file(path, size)
        except OSError as error:
            raise disk.refused(path, error) from error
        with self.opening():
            if disk.size(self._descriptor) < size:
                disk.allocate(self._descriptor, size)
        abandon_in_children(self)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """What belongs to opening it: where that fails the file is closed.

        Raises:
            StoreUnavailable: in place of an OSError.
        """
        try:
            yield
        except OSError as error:
            self.close()
            raise self._disk.refused(self.path, error) from error
        except StoreUnavailable:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it is open still, in this process."""
        return self._descriptor >= 0

    def read(self, count: int) -> bytes:
        """At most so many bytes from its start. Raises OSError."""
        return self._disk.read(self._descriptor, count, 0)

    def write(self, data: bytes) -> None:
        """Write its first bytes, which are on the disk some time later. Raises OSError."""
        self._disk.write_all(self._descriptor, data, 0)

    def sync(self) -> None:
        """Wait until what was written is on the disk.

        Raises:
            StoreUnavailable: if that failed, now or before; the store is poisoned then.
        """
        self._disk.sync(self._descriptor, self.path)

    def write_durably(self, data: bytes) -> None:
        """Write its first bytes and wait until they are on the disk.

        Raises:
            StoreUnavailable: if that failed; the store is poisoned then.
        """
        try:
            self.write(data)
        except OSError as error:
            reason = f"{self.path}: cannot be written: {error.strerror or error}"
            raise self._disk.health.poison(reason) from error
        self.sync()

    def close(self) -> None:
        """Let go of it, without a sync; once more does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.let_go(descriptor)

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.disk.lifetime`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# The checkpoint of a store that is written (``StoreCheckpoint``).
#
# Three times that say up to which message the log, the queues and the index are on the disk. They
# are a promise to the next recovery, so that each is set only after the sync that makes it true,
# and the file is written after that, in this order and never the reverse:
#
#     log synced -> physic; queues synced -> logics; index file synced -> index; checkpoint synced
#
# The 24 bytes lie in one sector and are written in place, as RocketMQ has it: what a power cut
# leaves is the one or the other.


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


# --------------------------------------------------------------------------------------------------
# The durable mark of a store that is written (:mod:`logquarry.format.durable_mark`).
#
# It is moved after each sync of the log, and synced itself only before the checkpoint is written:
# what a power cut leaves of it is too low at worst, never too high.

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
