"""Writes the checkpoint and the durable offset. Both files are one page long, and are overwritten
in place.

The store's lock uses the base class :class:`OpenFile` too.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from logquarry.disk.disk import Disk
from logquarry.disk.service import abandon_in_children
from logquarry.errors import StoreUnavailable
from logquarry.format import checkpoint
from logquarry.format.checkpoint import Checkpoint, DurableMark
from logquarry.format.fields import PAGE_SIZE
from logquarry.log.store_files import quarantine
from logquarry.paths import exists


class OpenFile:
    """An open file. Each forked child closes its copy of the file's descriptor."""

    _disk: Disk
    _descriptor: int

    @property
    def is_open(self) -> bool:
        """Whether the file is still open in this process."""
        return self._descriptor >= 0

    def close(self) -> None:
        """Close the file without a sync. Further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.let_go(descriptor)

    def abandon_in_child(self) -> None:
        """Close the descriptor in a forked child; see :mod:`logquarry.disk.service`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


class PageFile(OpenFile):
    """A small file of fixed size, open for writing. A missing file is created with zeros.

    If the disk cannot read the page, the old file is moved to quarantine, and a new file replaces
    it. The old file cannot be used any more, because the operating system must read the page before
    it can write a part of the page. A failed :meth:`sync` or :meth:`write_durably` poisons the
    store, and raises StoreUnavailable.
    """

    def __init__(self, disk: Disk, path: Path, size: int, root: Path) -> None:
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
        if not self._is_readable(size):
            self.close()
            disk.set_aside(path, quarantine(root))
            self._descriptor = disk.make_file(path, size)
        abandon_in_children(self)

    def _is_readable(self, size: int) -> bool:
        try:
            self.read(size)
        except OSError:
            return False
        return True

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Context manager for a block that opens the file. If the block raises OSError or
        StoreUnavailable, close the file and raise StoreUnavailable.
        """
        try:
            yield
        except OSError as error:
            self.close()
            raise self._disk.refused(self.path, error) from error
        except StoreUnavailable:
            self.close()
            raise

    def read(self, count: int) -> bytes:
        """Read the first bytes of the file, at most ``count``. Raises OSError."""
        return self._disk.read(self._descriptor, count, 0)

    def write(self, data: bytes) -> None:
        """Write the first bytes of the file, without a sync. Raises OSError."""
        self._disk.write_all(self._descriptor, data, 0)

    def sync(self) -> None:
        """Sync the file."""
        self._disk.sync(self._descriptor, self.path)

    def write_durably(self, data: bytes) -> None:
        """Write the first bytes of the file, and sync."""
        try:
            self.write(data)
        except OSError as error:
            raise self._disk.failed(self.path, "cannot be written", error) from error
        self.sync()


# --------------------------------------------------------------------------------------------------
# The checkpoint (``StoreCheckpoint``)
#
# The checkpoint has three store times. All messages up to the first time are on the disk. For all
# messages up to the second time, the queue entries are on the disk. For all messages up to the
# third time, the index entries are on the disk. So a writer sets each time only after it has synced
# these files, and writes the checkpoint last:
#
#     log synced -> physic; queues synced -> logics; index file synced -> index; checkpoint synced
#
# Like RocketMQ, a writer overwrites the 24 bytes (48 in a 5.x store) in place. These bytes are in
# one sector, so a power cut leaves either the old or the new times.


class CheckpointFile:
    """The checkpoint file, open for writing; see :class:`PageFile`.

    Attributes:
        physic_timestamp: store time in milliseconds up to which all messages are on the disk.
        logics_timestamp: store time in milliseconds up to which all queues are on the disk.
        index_timestamp: store time in milliseconds up to which the index is on the disk. RocketMQ
            sets this time only when an index file is full.
        offsets: the three offsets that RocketMQ 5 adds to the checkpoint. Only a recovery changes
            these offsets.
        before_write: called before each write of the checkpoint, with the times that are on the
            disk and the new times.
    """

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._writing = threading.Lock()
        self._file = PageFile(disk, path, PAGE_SIZE, path.parent)
        with self._file.opening():
            data = self._file.read(PAGE_SIZE)
            found = checkpoint.decode(data)
        self.offsets = checkpoint.decode_offsets(data)
        self._has_offsets = any(self.offsets)
        self.physic_timestamp, self.logics_timestamp, self.index_timestamp = found
        self._on_disk = found
        self.before_write: Callable[[Checkpoint, Checkpoint], None] = lambda *_: None

    @property
    def times(self) -> Checkpoint:
        """The three times that the next flush writes."""
        return Checkpoint(self.physic_timestamp, self.logics_timestamp, self.index_timestamp)

    def flush(self) -> None:
        """Write the times, and sync."""
        self._disk.health.require_writable()
        with self._writing:
            times = self.times
            self.before_write(self._on_disk, times)
            data = checkpoint.LAYOUT.struct.pack(*times)
            if self._has_offsets or any(self.offsets):
                data += checkpoint.OFFSETS.struct.pack(*self.offsets)
            self._file.write_durably(data)
            self._on_disk = times

    def close(self) -> None:
        """Close the file without a flush."""
        self._file.close()


# --------------------------------------------------------------------------------------------------
# The durable offset (:class:`logquarry.format.checkpoint.DurableMark`)
#
# Each sync of the log raises the durable offset, but the durable file is synced only before the
# checkpoint is written. So after a power cut the durable offset in the file may be too low, but
# never too high. The file also has the log's start, which is raised before the log's first files
# are deleted.

logger = logging.getLogger(__name__)


class DurableFile:
    """The file of the durable offset; see :class:`PageFile`.

    Args:
        checkpoint: the times of the checkpoint.
        log_start: physical offset at which the log starts; -1 if the log has no files; None to keep
            the start that the file already contains.

    Attributes:
        find_start: returns the log's current start, -1 if unknown. If this start is higher than the
            start in the file, each write of the checkpoint also writes this start.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        offset: int,
        checkpoint: Checkpoint,
        *,
        log_start: int | None = None,
    ) -> None:
        self.path = path
        self.find_start: Callable[[], int] = lambda: -1
        self._writing = threading.Lock()
        self._mark = DurableMark(offset, checkpoint, checkpoint)
        self._start = log_start
        self._file = PageFile(disk, path, PAGE_SIZE, path.parent.parent)
        with self._file.opening():
            self._file.write(self._content())
            self._file.sync()

    def _content(self) -> bytes:
        start = b"" if self._start is None else checkpoint.encode_start(self._start)
        return checkpoint.encode_mark(self._mark) + start

    @property
    def offset(self) -> int:
        """The durable offset in the file."""
        return self._mark.offset

    def move(self, offset: int) -> None:
        """Write a higher durable offset without a sync. If a power cut loses the write, the file
        keeps its lower offset, and nothing else is lost.
        """
        with self._writing:
            if offset <= self._mark.offset or not self._file.is_open:
                return
            before, self._mark = self._mark, self._mark._replace(offset=offset)
            try:
                self._file.write(checkpoint.encode_mark(self._mark))
            except OSError as error:
                self._mark = before
                logger.warning(
                    "%s: durable offset stays at %d: %s", self.path, before.offset, error
                )

    def sync(self) -> None:
        """Sync the file. Without a sync, a power cut may leave an older durable offset."""
        with self._writing:
            if self._file.is_open:
                self._file.sync()

    def expect(self, before: Checkpoint, after: Checkpoint) -> None:
        """Record the checkpoint's times before and after its next write. The durable offset is
        valid only if the checkpoint has one of these two sets of times.
        """
        with self._writing:
            self._mark = self._mark._replace(before=before, after=after)
            self._raise_start(self.find_start())
            self._file.write_durably(self._content())

    def begin_at(self, log_start: int) -> None:
        """Write the log's new start. The caller then deletes the log files before this start."""
        with self._writing:
            self._raise_start(log_start)
            self._file.write_durably(self._content())

    def _raise_start(self, log_start: int) -> None:
        # Another deletion, which is still running, may already have recorded a later start.
        if log_start > (-1 if self._start is None else self._start):
            self._start = log_start

    def close(self) -> None:
        """Close the file."""
        with self._writing:
            self._file.close()


def record_start(disk: Disk, path: Path, log_start: int) -> None:
    """Record the new start of a log that is not open, if the durable file at ``path`` is valid."""
    if not exists(path):
        return
    file = PageFile(disk, path, PAGE_SIZE, path.parent.parent)
    try:
        with file.opening():
            mark = checkpoint.decode_mark(file.read(checkpoint.MARK_SIZE))
        if mark is not None:
            file.write_durably(checkpoint.encode_mark(mark) + checkpoint.encode_start(log_start))
    finally:
        file.close()
