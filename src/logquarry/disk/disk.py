"""The interface for all writes to a store; each method of its first part is one system call.

Tests subclass :class:`Disk` to inject faults, or to model the state after a power cut.

Writes through a map go only to files with all blocks allocated (:meth:`Disk.make_file`): writing to
a hole on a full disk raises SIGBUS, while ``posix_fallocate`` returns ENOSPC.

To sync a file, the writer calls ``fdatasync`` on the one descriptor that it keeps open. This call
covers writes through the map, releases the GIL (``mmap.flush`` does not), and reports a failed
write-back even if the write-back failed before the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from logquarry.disk.service import Health, abandon_in_children
from logquarry.errors import StoreUnavailable
from logquarry.log.readable import WatchedMap

logger = logging.getLogger(__name__)

_ZEROS: Final = bytes(1 << 20)
_COPY_BYTES: Final = 1 << 20
_PUNCH_HOLE_KEEP_SIZE: Final = 3
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Disk:
    """The disk of one store: folders that this machine mounts.

    The methods of the first part raise OSError. Those of the second part combine them, raise
    StoreUnavailable, and poison :attr:`health` if a sync fails.

    Attributes:
        health: whether the store may still be written.
    """

    def __init__(self) -> None:
        self.health = Health()
        abandon_in_children(self.health)

    # ------------------------------------------------------------------------- system calls
    def open(self, path: Path, *, create: bool = False, exclusive: bool = False) -> int:
        """Open a file for reading and writing; ``exclusive`` requires that it is new."""
        return os.open(path, os.O_RDWR | os.O_CREAT * create | os.O_EXCL * exclusive, 0o644)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        """Bytes of the file."""
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, size: int) -> None:
        """Allocate blocks for the file's first ``size`` bytes, and extend it to that size.

        Existing bytes stay.
        """
        if sys.platform != "darwin":
            os.posix_fallocate(descriptor, 0, size)
        else:
            # macOS has no such call; writing zeros has the same effect.
            for position in range(os.fstat(descriptor).st_size, size, len(_ZEROS)):
                self.write_all(descriptor, memoryview(_ZEROS)[: size - position], position)

    def map(self, descriptor: int, size: int) -> WatchedMap:
        """Map the first ``size`` bytes, shared and writable, but not in forked children."""
        # From Python 3.13 on a map keeps no second descriptor.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        mapped = WatchedMap(descriptor, size, **options)
        if hasattr(mmap, "MADV_DONTFORK"):
            mapped.madvise(mmap.MADV_DONTFORK)
        return mapped.watch(in_children=False)

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        """Read at most ``count`` bytes from a position."""
        return os.pread(descriptor, count, position)

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        """Write at a position; returns the number of bytes written."""
        return os.pwrite(descriptor, data, position)

    def fdatasync(self, descriptor: int) -> None:
        """Sync the file's bytes."""
        if sys.platform != "darwin":
            os.fdatasync(descriptor)
        else:
            os.fsync(descriptor)

    def fsync(self, descriptor: int) -> None:
        """Sync the file's bytes and metadata."""
        os.fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Sync the names in a folder."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, folder: Path) -> None:
        """Create one folder; its parent must exist."""
        folder.mkdir()

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file; a file that already has the new name is replaced."""
        path.rename(to)

    def link(self, path: Path, to: Path) -> None:
        """Give a file a second name, which must be free."""
        to.hardlink_to(path)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def list(self, folder: Path) -> list[str]:
        """Sorted names of the files (not folders) in a folder; empty if it does not exist."""
        try:
            # A DirEntry raises OSError for a circle of links; for Path it is no file.
            return sorted(path.name for path in folder.iterdir() if path.is_file())
        except FileNotFoundError:
            return []

    def is_linked(self, descriptor: int) -> bool:
        """Whether an open file still has a name."""
        return os.fstat(descriptor).st_nlink > 0

    def is_named(self, descriptor: int, path: Path) -> bool:
        """Whether ``path`` leads to an open file."""
        try:
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            return False

    def next_data(self, descriptor: int, position: int) -> int | None:
        """The first position at or after ``position`` that can hold data; None if there is none."""
        try:
            return os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else position

    def next_hole(self, descriptor: int, position: int, size: int) -> tuple[int, int]:
        """The first unwritten range after a position; (``size``, ``size``) if there is none."""
        # An allocated range without data counts as a hole.
        if not hasattr(os, "SEEK_HOLE"):
            return size, size
        start = min(os.lseek(descriptor, position, os.SEEK_HOLE), size)
        stop = self.next_data(descriptor, start) if start < size else size
        return start, size if stop is None else min(stop, size)

    def punch(self, descriptor: int, position: int, length: int) -> None:
        """Free the blocks of a range that was never written; the file's size and bytes stay."""
        if sys.platform == "linux":
            call = ctypes.CDLL(None, use_errno=True).fallocate
            call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            if call(descriptor, _PUNCH_HOLE_KEEP_SIZE, position, length):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

    # ------------------------------------------------------------------------- combined calls
    def make_file(self, path: Path, size: int) -> int:
        """Create a file of zeros with all its blocks, durably; returns its descriptor.

        Raises:
            StoreUnavailable: if it cannot be created (disk full, name in use); nothing is left of
                it.
        """
        self.health.require_writable()
        self.make_folders(path.parent)
        with self.refusing(path):
            descriptor = self.open(path, create=True, exclusive=True)
        try:
            self.allocate(descriptor, size)
        except OSError as error:
            # After ENOSPC ext4 leaves a file with the blocks that it could allocate.
            self._discard(descriptor, path)
            raise self.refused(path, error) from error
        try:
            self.fsync(descriptor)
            self.sync_folder(path.parent)
        except OSError as error:
            failed = self.failed(path, "sync failed", error)
            self.let_go(descriptor)
            with contextlib.suppress(OSError):
                self.unlink(path)
            raise failed from error
        return descriptor

    def make_folders(self, folder: Path) -> None:
        """Create a folder and its missing parents, durably.

        Raises:
            StoreUnavailable: if a folder cannot be created, or a file has its name.
        """
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for made in reversed(missing):
            try:
                self.make_folder(made)
            except OSError as error:
                # Another thread may have created it.
                if not made.is_dir():
                    raise self.refused(made, error) from error
            self.sync_names(made.parent)

    def names_in(self, folder: Path) -> Sequence[str]:
        """Sorted names of the files in a folder; see :meth:`list`.

        Raises:
            StoreUnavailable: if the folder cannot be read, or is not a folder.
        """
        with self.refusing(folder):
            return self.list(folder)

    @contextlib.contextmanager
    def writing(self, path: Path, new_size: int | None = None) -> Iterator[int]:
        """Open a file, or create one of ``new_size`` bytes; sync and close it after the block.

        Raises:
            StoreUnavailable: if that failed, or the block raised OSError.
        """
        with self.refusing(path):
            descriptor = self.open(path) if new_size is None else self.make_file(path, new_size)
            try:
                yield descriptor
                self.sync(descriptor, path)
            finally:
                self.let_go(descriptor)

    def write_all(self, descriptor: int, data: memoryview | bytes, position: int) -> None:
        """Write all bytes, in as many calls as needed. Raises OSError."""
        view = memoryview(data)
        while view:
            count = self.write(descriptor, view, position)
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            view, position = view[count:], position + count

    def let_go(self, descriptor: int) -> None:
        """Close a descriptor. Only log an error: the caller has synced everything before."""
        try:
            self.close(descriptor)
        except OSError as error:
            logger.warning("closing a file failed: %s", error)

    def sync(self, descriptor: int, path: Path) -> None:
        """Sync a file's bytes.

        Raises:
            StoreUnavailable: if this or an earlier sync failed; a failed sync is never retried.
        """
        self.health.require_writable()
        try:
            self.fdatasync(descriptor)
        except OSError as error:
            raise self.failed(path, "sync failed", error) from error

    def sync_names(self, folder: Path) -> None:
        """Sync a folder's names; see :meth:`sync`."""
        self.health.require_writable()
        try:
            self.sync_folder(folder)
        except OSError as error:
            raise self.failed(folder, "sync failed", error) from error

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file as a whole, durably, replacing the previous one.

        Raises:
            StoreUnavailable: if the write failed; the previous file is still there.
        """
        made = path.with_name(f"{path.name}.new")
        self.make_folders(path.parent)
        self.remove(made)
        descriptor = self.make_file(made, len(data))
        try:
            self.write_all(descriptor, data, 0)
            self.sync(descriptor, made)
            self.rename(made, path)
        except OSError as error:
            raise self.refused(path, error) from error
        finally:
            self.let_go(descriptor)
        self.sync_names(path.parent)

    def sync_parent(self, folder: Path) -> None:
        """Sync a folder's name in its readable parent: the folder's creator may have crashed."""
        if os.access(folder.parent, os.R_OK):
            self.sync_names(folder.parent)

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Move a file to a quarantine folder, durably; returns its new path.

        If the folder has a file of that name, the new name gets a number.

        Raises:
            StoreUnavailable: if the move failed.
        """
        self.make_folders(folder)
        target, number = folder / path.name, 0
        while target.exists():
            number += 1
            target = folder / f"{path.name}.{number}"
        self.move(path, target)
        logger.warning("%s: moved to %s", path, target)
        return target

    def move(self, path: Path, to: Path) -> None:
        """Rename a file durably, or copy it if the new path is on another disk.

        Parts of a store may be links to other disks.

        Raises:
            StoreUnavailable: if the move failed.
        """
        try:
            self.rename(path, to)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise self.refused(to, error) from error
            self._copy_over(path, to)
        self.sync_names(to.parent)
        self.sync_names(path.parent)

    def _copy_over(self, path: Path, to: Path) -> None:
        """Copy a file to another disk under a temporary name, rename it, and delete the source."""
        made = to.with_name(f"{to.name}.new")
        self.remove(made)
        with self.refusing(path):
            size = path.stat().st_size
        with self.refusing(to):
            self.copy(path, 0, size, made)
            self.rename(made, to)
            self.sync_names(to.parent)
            self.unlink(path)

    def copy(self, path: Path, position: int, length: int, target: Path) -> None:
        """Copy bytes of a file to a new file, durably.

        Raises:
            StoreUnavailable: if the copy failed.
        """
        with self.refusing(path):
            source = self.open(path)
        try:
            with self.writing(target, length) as copy:
                done = 0
                while done < length:
                    count = min(_COPY_BYTES, length - done)
                    data = self.read(source, count, position + done)
                    if not data:
                        break
                    self.write_all(copy, data, done)
                    done += len(data)
        finally:
            self.let_go(source)

    def remove(self, path: Path) -> None:
        """Delete a file durably; does nothing if it does not exist.

        Raises:
            StoreUnavailable: if the deletion failed.
        """
        with self.refusing(path):
            try:
                self.unlink(path)
            except FileNotFoundError:
                return
        self.sync_names(path.parent)

    @contextlib.contextmanager
    def refusing(self, path: Path) -> Iterator[None]:
        """Raise StoreUnavailable if the block raises OSError (:meth:`refused`)."""
        try:
            yield
        except OSError as error:
            raise self.refused(path, error) from error

    def refused(self, path: Path, error: OSError) -> StoreUnavailable:
        """The exception for a failed call that changed nothing."""
        if error.errno in _NO_ROOM:
            return StoreUnavailable(f"{path}: no room on the disk: {error.strerror}")
        return StoreUnavailable(f"{path}: {error.strerror or error}")

    def failed(self, path: Path, what: str, error: OSError) -> StoreUnavailable:
        """Poison the store because a call left its files in an unknown state; returns the error."""
        return self.health.poison(f"{path}: {what}: {error.strerror or error}")

    def _discard(self, descriptor: int, path: Path) -> None:
        """Durably delete a file that lacks some blocks, because the store could not be opened with
        it.

        If it stays, or may reappear, the store is poisoned, so that the next opening recovers it.
        """
        self.let_go(descriptor)
        try:
            self.unlink(path)
        except OSError as error:
            raise self.failed(path, "cannot be allocated or deleted", error) from error
        self.sync_names(path.parent)
