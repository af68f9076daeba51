"""Files of one size that form one offset space (``MappedFileQueue``).

::

    min_offset                                   flushed   committed   wrote      end of the file
    |---- file ----|---- file ----|---- file ------|----------|----------|--------------|

One thread at a time writes: the thread that holds the put lock (log), or the dispatcher (consume
queue). Any number of threads can read without a lock: each change of the list of files makes a new
list, and a removed file stays readable.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Protocol

from logquarry.disk.disk import Disk
from logquarry.disk.file_place import LastFile
from logquarry.disk.folders import QueueFolders
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.name_guard import NameGuard
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.paths import is_file

logger = logging.getLogger(__name__)

_UNLOCK_AFTER: Final = 6.0
"""Seconds until the pages of a full file are unlocked (``CommitLog.putMessage``)."""
_MOST_TRIES: Final = 100
_CHECK_EVERY: Final = 1.0
"""Minimum number of seconds between two flushes that unlock pages and check file names. Other
flushes skip both steps.
"""


class Allocator(Protocol):
    """Creates the files of a queue before they are needed; see :mod:`logquarry.disk.log_files`."""

    def take(self, path: Path, following: Path | None, size: int) -> MappedFile:
        """Return the file at ``path``, and request the creation of the next file, ``following``.

        The returned file may be in another folder, but with the same file name. Raises
        StoreUnavailable if the file was not created in time. If ``following`` is None, no next file
        is requested.
        """

    def discard(self) -> None:
        """Delete the files that were created ahead and that :meth:`take` has not returned."""


class MappedFileQueue(LastFile):
    """The files of a commit log or of a consume queue. Offsets count the bytes of all files.

    The constructor touches no file; :meth:`load` finds the existing files. Each file is opened at
    first use, because a broker has thousands of queues.

    Args:
        allocator: creates files ahead; None to create a file when it is needed.
        read_only: folders whose existing files are used, but in which no new file is created.
        full_folders: returns the folders that have no room for another file.
        guard_names: whether to restore a file that another program deletes, by a hard link
            (:mod:`logquarry.disk.name_guard`). True only for the log, because queues can be
            rebuilt from the log.
        gaps: whether to accept gaps between files, as RocketMQ does.
        aside: the quarantine folder of the queue's files.

    Attributes:
        reach: the allocator creates a file ahead only if it begins before this offset; None if
            there is no limit.
        flushed_offset: offset after the bytes on the disk (``flushedWhere``).
        committed_offset: offset after the bytes in the files (``committedWhere``).
        store_timestamp: store time of the last message that a thorough flush has synced (see
            :meth:`flush`).
        on_flushed: called with the flushed offset after each flush; must not raise an exception.
    """

    def __init__(
        self,
        disk: Disk,
        folders: Path | Sequence[Path],
        file_size: int,
        *,
        allocator: Allocator | None = None,
        read_only: Sequence[Path] = (),
        full_folders: Callable[[], Collection[Path]] = tuple,
        guard_names: bool = False,
        gaps: bool = False,
        aside: Path | None = None,
    ) -> None:
        self.file_size = file_size
        self.flushed_offset = 0
        self.committed_offset = 0
        self.store_timestamp = 0
        self.on_flushed: Callable[[int], None] = lambda _: None
        self._where = QueueFolders(disk, folders, read_only=read_only, full_folders=full_folders)
        self.folders = self._where.folders
        self._guard = NameGuard(disk) if guard_names else None
        self._next_check = 0.0
        self._gaps = gaps
        self._aside = aside
        self._disk = disk
        self._health = disk.health
        self._allocator = allocator
        self.bases = ()
        # Each file is a path until it is opened. A file that was not opened yet is full and
        # flushed.
        self._files: tuple[MappedFile | Path, ...] = ()
        self.last: MappedFile | None = None
        self.reach: int | None = None
        # Whether writes to any of the files go to a buffer first. If so, the readable bytes end at
        # committed_offset.
        self._is_transient = False
        self._change = threading.Lock()
        self._flushing = threading.Lock()
        self._to_unlock: list[tuple[float, MappedFile]] = []

    # ------------------------------------------------------------------------------------ files
    def load(self) -> None:
        """Find the files.

        Names that are not offsets are skipped. Until :meth:`truncate_to` sets the end, all files
        are assumed to be full. If the last file is too short, it is extended. With ``guard_names``,
        the method restores names that files have lost since the last clean shutdown.

        Raises CorruptFile if a file is missing or has a wrong length, except for a short last file.
        Unlike this method, RocketMQ refuses a short last file, even an empty file that a crash
        left.
        """
        if self._guard is not None:
            self._guard.restore(self.folders)
        found = self._where.find(self.file_size, gaps=self._gaps)
        with self._change:
            self._use(found)
        self.flushed_offset = self.committed_offset = self.max_room

    def _use(self, files: dict[int, MappedFile | Path] | dict[int, Path]) -> None:
        self.bases = tuple(files)
        self._files = tuple(files.values())
        self.last = self._opened(len(self._files) - 1) if self._files else None

    def _opened(self, index: int) -> MappedFile:
        # The caller must hold the lock `_change`, because this method changes the file list.
        file = self._files[index]
        if isinstance(file, Path):
            file = MappedFile(self._disk, file, self.bases[index], self.file_size)
            file.set_positions(self.file_size)
            self._files = (*self._files[:index], file, *self._files[index + 1 :])
        return file

    @property
    def open_files(self) -> list[MappedFile]:
        """The files that are open."""
        return [file for file in self._files if isinstance(file, MappedFile)]

    @property
    def paths(self) -> list[Path]:
        """The path of each file."""
        return [file.path if isinstance(file, MappedFile) else file for file in self._files]

    def writable(self, start_offset: int = 0) -> MappedFile:
        """Return the file to write to (``getLastMappedFile``). If the last file is full or missing,
        create the next file. The first file of an empty queue contains ``start_offset``.

        Raises StoreUnavailable if the file cannot be created (put status CREATE_MAPEDFILE_FAILED).
        A later call tries again.
        """
        last = self.last
        self._health.require_writable()
        if last is not None and last.wrote < last.size:
            return last
        base = self.max_room if last is not None else start_offset - start_offset % self.file_size
        made = self._made_now(base) if self._allocator is None else self._made_ahead(base)
        with self._change:
            if not self._files:
                self.flushed_offset = self.committed_offset = base
            elif self.last is not None and self.last.is_locked_in_memory:
                self._to_unlock.append((time.monotonic() + _UNLOCK_AFTER, self.last))
            # If Ctrl-C interrupts these lines, the next put runs them again with the same file.
            self._files = (*(file for file in self._files if file is not made), made)
            self.bases = (*(other for other in self.bases if other != base), base)
            self._is_transient = self._is_transient or made.is_transient
            self.last = made
        return made

    def _made_ahead(self, base: int) -> MappedFile:
        path, after = self._path_of(base), base + self.file_size
        following = self._path_of(after) if self.reach is None or after < self.reach else None
        assert self._allocator is not None
        made = self._allocator.take(path, following, self.file_size)
        if self._keeps_name(made):
            return made
        # A RocketMQ broker that starts on this store deletes empty files before it fails to take
        # the lock. So check that the new file still has its name.
        logger.warning(
            "%s: another program deleted it before its first use; created again", made.path
        )
        made.close()
        return self._made_now(base)

    def _made_now(self, base: int) -> MappedFile:
        path = self._path_of(base)
        if self._aside is not None and self._guard is None and is_file(path):
            # A RocketMQ broker that starts on this store dispatches messages before it fails to
            # take the lock. So the broker may have created the queue's next file.
            self._disk.set_aside(path, self._aside)
        for _ in range(_MOST_TRIES):
            made = MappedFile(self._disk, path, base, self.file_size, exclusive=True)
            if self._keeps_name(made):
                return made
            made.close()
        raise StoreUnavailable(f"{path}: another program deletes this file each time it is created")

    def _keeps_name(self, file: MappedFile) -> bool:
        """Whether a file still has its name. With ``guard_names``, protect the name from now on."""
        # If the disk fails during this check, the next put checks the same file again.
        with self._disk.refusing(file.path):
            if self._guard is not None:
                file.guards_name = True
                self._guard.guard(file.path)
                if not file.is_named():
                    # check() restores the name only if it was lost after the call of guard().
                    self._guard.check()
            return file.is_named()

    def _release_name(self, file: MappedFile) -> None:
        if self._guard is not None:
            self._guard.release(file.path)

    def _path_of(self, base: int) -> Path:
        return self._where.path_of(base, self.file_size)

    def find(self, offset: int) -> MappedFile | None:
        """Return the file that contains a given offset (``findMappedFileByOffset``)."""
        last = self.last
        if last is not None and last.base <= offset < last.base + self.file_size:
            return last
        index = self._index_of(offset)
        if index is None:
            return None
        files = self._files
        file = files[index] if index < len(files) else None
        if isinstance(file, MappedFile) and file.base <= offset < file.base + self.file_size:
            return file
        self._health.require_readable()
        with self._change:
            index = self._index_of(offset)
            return None if index is None else self._opened(index)

    def _index_of(self, offset: int) -> int | None:
        bases = self.bases
        index = bisect_right(bases, offset) - 1
        return index if index >= 0 and offset < bases[index] + self.file_size else None

    # ---------------------------------------------------------------------------------- offsets
    @property
    def min_offset(self) -> int:
        """Offset of the first file's first byte, -1 if there are no files (``getMinOffset``)."""
        bases = self.bases
        return bases[0] if bases else -1

    @property
    def max_offset(self) -> int:
        """End of the readable bytes, 0 if there are no files (``getMaxOffset``).

        QUIRK: Like Java, this property uses the last file's committed position, even if an earlier
        file is not completely committed yet.
        """
        if self._is_transient:
            return self.committed_offset
        last = self.last
        return 0 if last is None else last.base + last.wrote

    @property
    def wrote_offset(self) -> int:
        """End of the written bytes, committed or not; 0 if there are no files."""
        last = self.last
        return 0 if last is None else last.base + last.wrote

    # ------------------------------------------------------------------------- read and write
    def select(
        self, offset: int, size: int | None = None, most: int | None = None
    ) -> memoryview | None:
        """Return ``size`` bytes from an offset; without ``size``, the rest of the file, at most
        ``most`` bytes.

        Return None if the bytes are not readable. All bytes must be in one file, because a message
        never continues in the next file. Raises StoreUnavailable in a forked child, and if the
        store was closed.
        """
        file = self.find(offset)
        return None if file is None else file.select(offset - file.base, size, most)

    def append_data(self, offset: int, data: bytes | bytearray | memoryview) -> bool:
        """Append raw bytes, which may fill several files; ``offset`` must be the end of the queue.

        An empty queue accepts any multiple of the file size. Returns False, without a change, for
        any other offset. After a failure (StoreUnavailable), the bytes before
        :attr:`wrote_offset` remain in the queue.
        """
        begins = self.last is None and offset % self.file_size == 0
        if not begins and (self.last is None or offset != self.wrote_offset):
            return False
        self.append(data, offset)
        return True

    def append(self, data: bytes | bytearray | memoryview, start_offset: int = 0) -> None:
        """Append raw bytes, which may fill several files. The first file of an empty queue contains
        ``start_offset``.

        Raises StoreUnavailable if a file cannot be created.
        """
        # len() of a memoryview counts items, and an item may have several bytes.
        rest = memoryview(data).cast("B")
        while rest:
            file = self.writable(start_offset)
            count = min(len(rest), file.room)
            file.append(rest[:count])
            rest = rest[count:]

    # -------------------------------------------------------------------------- commit and flush
    def commit(self, least_pages: int = 0) -> int:
        """Write the buffers to the files, and return the committed offset.

        The method commits each full file, and the last file if at least ``least_pages`` of its
        pages are not committed. Java commits only one file per call.
        """
        self._health.require_writable()
        with self._flushing:
            for file in self._since(self.committed_offset):
                position = file.commit(least_pages)
                self.committed_offset = file.base + position
                if position < file.size:
                    break
            return self.committed_offset

    def flush(self, least_pages: int = 0) -> int:
        """Sync the committed bytes, and return the flushed offset.

        The method syncs each full file, and the last file if at least ``least_pages`` of its pages
        are not synced. A thorough flush (``least_pages`` is 0) sets :attr:`store_timestamp`. Raises
        StoreUnavailable if this sync or an earlier sync failed. After a failed sync, the flushed
        offset stays before the bytes that may not be on the disk.
        """
        self._health.require_writable()
        with self._flushing:
            for file in self._since(self.flushed_offset):
                position = file.flush(least_pages)
                self.flushed_offset = file.base + position
                if least_pages == 0 and file.flushed_timestamp:
                    self.store_timestamp = file.flushed_timestamp
                if position < file.size:
                    # The flushed offset must not pass a file that is not completely committed.
                    break
            self.on_flushed(self.flushed_offset)
            if (now := time.monotonic()) >= self._next_check:
                self._next_check = now + _CHECK_EVERY
                while self._to_unlock and self._to_unlock[0][0] <= now:
                    self._to_unlock.pop(0)[1].unlock()
                if self._guard is not None:
                    self._guard.check()
            return self.flushed_offset

    def _since(self, offset: int) -> list[MappedFile]:
        first = max(0, bisect_right(self.bases, offset) - 1)
        # Skip elements that are paths: these files were never opened, so they need no flush.
        return [file for file in self._files[first:] if isinstance(file, MappedFile)]

    # --------------------------------------------------------------------------------- the end
    def truncate_to(self, offset: int) -> list[Path]:
        """Truncate the queue at an offset, in memory and on the disk. Return the new paths of the
        files that were moved.

        In the file that contains the offset, the bytes after the offset are overwritten with zeros,
        and synced. Java keeps these bytes. If a Java broker later appends messages up to these
        bytes, the broker reads the old bytes as further messages. Later files that contain data are
        moved to quarantine. Later files that contain only zeros are deleted.

        Raises UsageError if the offset is not in the queue, or if a file must be moved and the
        queue has no quarantine folder. After a UsageError no file has changed.
        """
        self._health.require_writable()
        if self._allocator is not None:
            # The files that the allocator created ahead begin after the old end of the queue. After
            # a truncation these files would leave a gap, so delete them.
            self._allocator.discard()
        with self._flushing, self._change, self._disk.finally_synced():
            bases = self.bases
            if not (bases[0] <= offset <= self.max_room if bases else offset == 0):
                raise UsageError(f"the files start at {self.min_offset} and do not reach {offset}")
            # An offset at the end of a file belongs to that file. Always keep the first file,
            # because its name is the queue's first offset.
            count = sum(base < offset or base == bases[0] for base in bases)
            dropped = [self._opened(index) for index in range(count, len(self.bases))]
            holding = [file for file in dropped if file.holds_data()]
            if holding and self._aside is None:
                raise UsageError(
                    f"{holding[0].path}: contains data after the new end {offset}, but the queue "
                    "has no quarantine folder for this file"
                )
            moved = []
            for file in reversed(dropped):
                self._release_name(file)
                if file in holding and self._aside is not None:
                    file.close()
                    moved.append(self._disk.set_aside(file.path, self._aside))
                else:
                    file.delete()
            self._use(dict(zip(bases[:count], self._files[:count], strict=True)))
            last = self.last
            if last is not None:
                last.allocate()
                last.clear_from(offset - last.base)
                last.set_positions(offset - last.base)
                self._keeps_name(last)
            self.flushed_offset = self.committed_offset = offset
            return moved

    def end_at(self, offset: int) -> None:
        """Truncate the queue at an offset in its last file, but keep the bytes after the offset in
        the file, like RocketMQ.
        """
        with self._flushing, self._change:
            last = self.last
            if last is None:
                if offset:
                    raise UsageError(
                        f"the queue has no files, so it cannot be truncated at {offset}"
                    )
                return
            if not last.base <= offset <= last.base + self.file_size:
                raise UsageError(f"{last.path}: the file does not contain the offset {offset}")
            last.allocate()
            last.set_positions(offset - last.base)
            self._keeps_name(last)
            self.flushed_offset = self.committed_offset = offset

    @property
    def max_room(self) -> int:
        """Offset after the last byte of the last file, written or not; 0 if there are no files."""
        last = self.last
        return 0 if last is None else last.base + self.file_size

    def remove_first(self) -> None:
        """Remove the first file from the queue, and delete it. Raises UsageError if the queue has
        only one file, or if the first file is not flushed.
        """
        with self._flushing, self._change:
            if len(self._files) < 2:
                raise UsageError("the only file of a queue cannot be deleted")
            if self.bases[1] > self.flushed_offset:
                raise UsageError(f"the file at {self.bases[0]} is not flushed yet")
            first = self._opened(0)
            self.bases, self._files = self.bases[1:], self._files[1:]
            # Remove the file's hard link first. Otherwise NameGuard.check could restore the deleted
            # file from the hard link.
            self._release_name(first)
        first.delete()

    def remove_until(self, last_base: int) -> None:
        """Delete all files that begin at or before the offset ``last_base``, but never the queue's
        last file.
        """
        while len(self.bases) > 1 and self.bases[0] <= last_base:
            if self.bases[1] > self.flushed_offset:
                self.flush(0)
            self.remove_first()

    def close(self) -> None:
        """Close all files. Results of :meth:`select` stay readable.

        Raises StoreUnavailable if a file's hard link
        (:class:`~logquarry.disk.name_guard.NameGuard`) cannot be removed. In this case too, all
        files are closed.
        """
        if self._health.is_forked:
            return
        with self._flushing, self._change:
            try:
                if self._guard is not None:
                    self._guard.close()
            finally:
                for file in self.open_files:
                    file.close()
                self._to_unlock.clear()
