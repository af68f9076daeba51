"""Opens and creates the files of a log for writing, and loads their pages into memory before puts
need them.

The first write to a page causes a page fault. If messages are put in batches, page faults take
about half of the time that the puts take. So :class:`PagesAhead` loads many pages at once in its
own thread (``MADV_POPULATE_WRITE``, Linux 5.14; other systems load no pages ahead). But a flush
writes all loaded pages to the disk, even pages that no put has used yet. So :class:`PagesAhead`
loads few pages if puts are rare, and none if each put waits for a flush.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Final

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Done, Health, Service, monotonic_ms
from logquarry.disk.write_buffers import TransientStorePool, populate
from logquarry.errors import StoreUnavailable
from logquarry.log.log_place import LogFolders
from logquarry.log.store_files import COMMIT_LOG, quarantine

logger = logging.getLogger(__name__)

_FULL: Final = 0.85
"""A part (0 to 1) of a disk. If a larger part of a folder's disk is used, a new file is created in
another folder of the log that has room (``getDiskSpaceCleanForciblyRatio``).
"""

WAIT_TIMEOUT_MS: Final = 5_000
_SLOW_MS: Final = 500


def log_paths(root: Path, folders: LogFolders) -> tuple[Path, ...]:
    """Return the folders of a store's log."""
    return tuple(Path(root, name) for name in folders.paths)


def open_log(
    disk: Disk, root: Path, folders: LogFolders, size: int, **options: Any
) -> MappedFileQueue:
    """Open the files of a store's log, with ``size`` bytes each; see :class:`MappedFileQueue`."""
    every = log_paths(root, folders)
    return MappedFileQueue(
        disk,
        every,
        size,
        read_only=[Path(root, name) for name in folders.read_only],
        full_folders=lambda: full_folders(every),
        guard_names=True,
        aside=quarantine(root, COMMIT_LOG),
        **options,
    )


def full_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the folders on nearly full disks (``CleanCommitLogService.isSpaceToDelete``)."""
    found = []
    for folder in folders:
        try:
            use = shutil.disk_usage(folder)
        except OSError:
            continue
        if use.used > _FULL * use.total:
            found.append(folder)
    return found


class _Request:
    """Asks the service to create a file before a put needs the file. The service sets ``file`` or
    ``error``, and then ``done``.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.is_begun = False
        self.done = Done()
        self.file: MappedFile | None = None
        self.error: StoreUnavailable | None = None

    @property
    def made(self) -> MappedFile:
        """Return the file, after ``done`` is set. Raise the error if the creation failed."""
        if self.error is not None:
            raise self.error
        assert self.file is not None
        return self.file


class AllocateMappedFileService(Service):
    """Creates the next file of a commit log before a put needs the file.

    Args:
        pool: in transient mode, the buffers to which puts write first.
        warm: load the pages of each file into memory (``warmMapedFileEnable``).
        fast_fail: what to do if no buffer of the pool is free. If True, create no file
            (``fastFailIfNoBufferInStorePool``). If False, create a file without a buffer. A put
            then writes directly to the file's map.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        pool: TransientStorePool | None = None,
        warm: bool = False,
        fast_fail: bool = False,
        timeout_ms: int = WAIT_TIMEOUT_MS,
    ) -> None:
        super().__init__("allocate", disk.health, interval_ms=None)
        self._disk = disk
        self._pool = pool
        self._warm = warm
        self._fast_fail = fast_fail
        self._timeout_ms = timeout_ms
        self._change = threading.Lock()
        # Keys are file names instead of paths: if the folder becomes full, the caller asks for the
        # same file in another folder.
        self._requests: dict[str, _Request] = {}
        # The request for the file that the last call of `take` returned.
        self._handed: _Request | None = None
        self._logged: str | None = None

    def take(self, path: Path, following: Path | None, size: int) -> MappedFile:
        """Return the file at ``path``, and request the creation of the next file, ``following``.

        If a file of this name was already created in another folder, the call returns that file.
        Raises StoreUnavailable if the file cannot be created, was not created in time, or if no
        buffer is free (``fast_fail``). A later call for the same file may succeed.
        """
        self.health.require_writable()
        if self.is_stopping:
            raise StoreUnavailable(f"{path}: the store is being closed")
        handed = self._handed
        if handed is not None:
            if handed.path.name == path.name:
                # Ctrl-C interrupted the last call after that call had chosen this file.
                return handed.made
            self._requests.pop(handed.path.name, None)
        with self._change:
            request = self._requests.get(path.name)
            if request is not None and request.error is not None:
                # An earlier creation failed.
                request = None
            if request is not None and not request.is_begun:
                request.path = path
            if request is None:
                if self._fast_fail and self._pool is not None and not self._pool.available:
                    raise StoreUnavailable(f"{path}: no buffer of the transient store pool is free")
                request = self._ask_for(path, size)
            if following is not None and following.name not in self._requests:
                self._ask_ahead(following, size)
        self.wakeup()
        if not request.done.wait(self._timeout_ms / 1000):
            raise StoreUnavailable(f"{path}: not created within {self._timeout_ms} ms")
        if request.error is None:
            self._handed = request
        with self._change:
            self._requests.pop(path.name, None)
        return request.made

    def _ask_for(self, path: Path, size: int) -> _Request:
        # Create and store the request in one statement. Ctrl-C could arrive between two statements,
        # and leave an incomplete request.
        request = self._requests[path.name] = _Request(path, size)
        return request

    def _not_begun(self) -> list[_Request]:
        return [request for request in self._requests.values() if not request.is_begun]

    def _ask_ahead(self, path: Path, size: int) -> None:
        pool = self._pool if self._fast_fail else None
        if pool is None or pool.available > len(self._not_begun()):
            self._ask_for(path, size)

    def run_once(self) -> None:
        """Create the requested files."""
        while not self.is_stopping:
            with self._change:
                request = next(iter(self._not_begun()), None)
                if request is None:
                    return
                request.is_begun = True
            started = monotonic_ms()
            try:
                request.file = MappedFile(
                    self._disk,
                    request.path,
                    int(request.path.name),
                    request.size,
                    pool=self._pool,
                    exclusive=True,
                )
                if self._warm:
                    request.file.warm()
                self._logged = None
            except StoreUnavailable as error:
                # Each waiting put requests the file again. Log a full disk only once.
                text = f"a log file cannot be created: {error}"
                if text != self._logged:
                    logger.warning("%s", text)
                self._logged = text
                request.error = error
            except Exception as error:
                request.error = self.health.poison(f"{request.path}: cannot be created: {error!r}")
                raise
            finally:
                request.done.set()
            if (spent := monotonic_ms() - started) > _SLOW_MS:
                logger.warning("%s: creating it took %d ms", request.path, spent)

    def run_last(self) -> None:
        """Delete the unused files, as RocketMQ does."""
        self.discard()

    def discard(self) -> None:
        """Delete the unused files, and drop all requests."""
        with self._change:
            requests = [r for r in self._requests.values() if r is not self._handed]
            self._handed = None
            not_begun = self._not_begun()
            self._requests.clear()
        for request in requests:
            if request in not_begun:
                request.error = StoreUnavailable(f"{request.path}: it is not needed any more")
                request.done.set()
            # The service is creating this file now.
            elif not request.done.wait(self._timeout_ms / 1000):
                logger.warning("%s: not deleted, because its creation has not ended", request.path)
            if request.file is None:
                continue
            is_named = False
            with contextlib.suppress(OSError):
                is_named = request.file.is_named()
            if is_named:
                with contextlib.suppress(StoreUnavailable):
                    # If the store is poisoned, keep the empty file.
                    request.file.delete()
            else:
                request.file.close()


_LEAST: Final = 256 << 10
_MOST: Final = 64 << 20
_AHEAD_MS: Final = 100
"""The service loads as many pages ahead as puts fill in this number of milliseconds, because the
dispatcher may wake the service up to 20 ms late.
"""


class PagesAhead(Service):
    """Loads pages after the log's end, for puts that write to the maps of the log's files."""

    def __init__(self, log: MappedFileQueue, health: Health) -> None:
        super().__init__("pages ahead", health, interval_ms=None)
        self._log = log
        self._file: MappedFile | None = None
        # _seen is an offset of the log; _loaded is a position in _file.
        self._seen, self._seen_ms = log.wrote_offset, monotonic_ms()
        self._loaded = 0
        self._refill = 0
        self._is_possible = True

    def grown(self) -> None:
        """Wake the service if few loaded pages are left. Any thread may call this method."""
        file = self._log.last
        if file is None or not self._is_possible:
            return
        if self._log.reach is not None:
            # A bulk load (:mod:`logquarry.store.load`) writes by system calls, which need no loaded
            # pages.
            self._file, self._seen, self._loaded = file, file.base + file.wrote, 0
        elif file is not self._file or file.wrote + self._refill > self._loaded:
            self.wakeup()

    def run_once(self) -> None:
        """Load the pages to which the next puts will write."""
        file = self._log.last
        address = 0 if file is None else file.address
        if file is None or not address or not self._is_possible:
            # If the address is 0, a put writes to a buffer, and needs no pages of the map.
            return
        wrote = file.wrote
        if file is not self._file:
            self._file, self._loaded = file, 0
        end, now = file.base + wrote, monotonic_ms()
        used = (end - self._seen) * _AHEAD_MS // max(1, now - self._seen_ms)
        ahead = min(_MOST, max(_LEAST, used))
        self._seen, self._seen_ms, self._refill = end, now, ahead // 2
        start = max(self._loaded, wrote) // PAGESIZE * PAGESIZE
        stop = min(file.size, wrote + ahead)
        # While this view exists, the pages remain mapped, even if another thread closes the file.
        pages = file.buffer[start:stop]
        if pages:
            # If the disk is full or fails, pages cannot be loaded. Ignore this here: the next put
            # reports the reason.
            self._is_possible = populate(address + start, len(pages))
        self._loaded = stop
        if stop == file.size:
            self._refill = 0


_LEAST_HOLE: Final = 64 << 10
"""Minimum bytes of a range to free."""


def free_room(disk: Disk, folders: Mapping[Path, int]) -> None:
    """After a bulk load, free the blocks of the unwritten part of each folder's last file.

    ``folders`` maps each folder to a position in its last file, in bytes. The function frees the
    blocks after this position. This saves disk space, because a store rarely gets messages soon
    after a load. The next writer allocates the blocks again. The caller must hold the store's lock,
    and must have synced and closed the files.
    """
    for folder, start in folders.items():
        path = folder
        try:
            names = [name for name in disk.list(folder) if name.isascii() and name.isdigit()]
            if names:
                path = folder / names[-1]
                _free(disk, path, start)
        except OSError as error:
            # A failure does no harm. The file then keeps its blocks, and only takes more disk
            # space.
            logger.debug("%s: its unused blocks were not freed: %s", path, error)


def _free(disk: Disk, path: Path, at: int) -> None:
    descriptor = disk.open(path)
    try:
        size = disk.size(descriptor)
        if hasattr(os, "posix_fadvise"):
            # SEEK_HOLE treats pages in the page cache as data, even if no process wrote them.
            os.posix_fadvise(descriptor, at, 0, os.POSIX_FADV_DONTNEED)
        while at < size:
            start, stop = disk.next_hole(descriptor, at, size)
            if stop - start >= _LEAST_HOLE:
                disk.punch(descriptor, start, stop - start)
            at = max(stop, at + 1)
    finally:
        disk.close(descriptor)
