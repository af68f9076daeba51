"""The interface for all writes to a store. Tests subclass :class:`Disk` to inject faults.

A writer allocates all blocks of a file before it writes to the file's memory map. On a full disk, a
write to a hole of the map would raise SIGBUS. Syncs use ``fdatasync`` instead of ``mmap.flush``,
because ``fdatasync`` releases the GIL, and also reports the failure of an earlier write-back by the
operating system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from logquarry import standard_streams
from logquarry.disk.service import Health, SyncDelayed, abandon_in_children
from logquarry.errors import LIMITS, StoreUnavailable, write_reason
from logquarry.log.readable import WatchedMap, c_library
from logquarry.paths import exists, is_file, is_folder

logger = logging.getLogger(__name__)

_ZEROS: Final = bytes(1 << 20)
_COPY_BYTES: Final = 1 << 20
_PUNCH_HOLE_KEEP_SIZE: Final = 3
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FolderNotOpened(OSError):
    """A folder could not be opened for a sync, so no sync began."""


class Disk:
    """The disk of one store.

    The methods of the part "system calls" raise OSError. The methods of the part "combined calls"
    raise StoreUnavailable, except :meth:`write_all`. A failed sync poisons the store (see
    :class:`~logquarry.disk.service.Health`), and is never repeated.

    If a folder cannot even be opened for its sync, for example because the process has no free
    descriptor, the sync did not begin, and no page was marked as clean. So a later sync still
    writes the folder's names, and the sync is repeated. Until the repeated sync succeeds, every
    other sync of this disk raises SyncDelayed. So a file's name is on the disk before the durable
    offset or the checkpoint covers the file, and before a put reports a message in it as synced.
    """

    def __init__(self) -> None:
        standard_streams.reserve()
        self.health = Health()
        self._unsynced: set[Path] = set()
        self._delaying = threading.Lock()
        abandon_in_children(self.health)

    # ------------------------------------------------------------------------- system calls
    def open(self, path: Path, *, create: bool = False, exclusive: bool = False) -> int:
        """Open a file for reading and writing. With ``exclusive``, the file must be new."""
        return os.open(path, os.O_RDWR | os.O_CREAT * create | os.O_EXCL * exclusive, 0o644)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        """Return the file's size in bytes."""
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, size: int) -> None:
        """Allocate all blocks of the file's first ``size`` bytes, and extend the file if it is
        shorter.
        """
        if not size:  # posix_fallocate refuses a length of 0 (EINVAL).
            return
        if sys.platform != "darwin":
            os.posix_fallocate(descriptor, 0, size)
        else:
            # macOS has no such call.
            for position in range(os.fstat(descriptor).st_size, size, len(_ZEROS)):
                self.write_all(descriptor, memoryview(_ZEROS)[: size - position], position)

    def map(self, descriptor: int, size: int) -> WatchedMap:
        """Map the first ``size`` bytes, shared and writable; forked children do not get the map."""
        # In Python 3.13 and later, this option prevents mmap from duplicating the descriptor.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        mapped = WatchedMap(descriptor, size, **options)
        if hasattr(mmap, "MADV_DONTFORK"):
            mapped.madvise(mmap.MADV_DONTFORK)
        return mapped.watch(in_children=False)

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        """Read at most ``count`` bytes from a position."""
        return os.pread(descriptor, count, position)

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        """Write at a position. Return the number of written bytes."""
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
        """Sync the names in a folder. Raises FolderNotOpened if no sync began; try again later."""
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in LIMITS:
                raise
            raise FolderNotOpened(error.errno, error.strerror, str(folder)) from error
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, folder: Path) -> None:
        """Create one folder in an existing parent."""
        folder.mkdir()

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file, and replace an existing file at the new path."""
        path.rename(to)

    def link(self, path: Path, to: Path) -> None:
        """Create a hard link."""
        to.hardlink_to(path)

    def unlink(self, path: Path) -> None:
        """Remove one name of a file."""
        path.unlink()

    def list(self, folder: Path) -> list[str]:
        """Return the sorted names of the files in a folder; empty if there is no such folder."""
        try:
            # If symbolic links form a circle, DirEntry.is_file raises OSError, but Path.is_file
            # returns False.
            return sorted(path.name for path in folder.iterdir() if is_file(path))
        except FileNotFoundError:
            return []

    def is_linked(self, descriptor: int) -> bool:
        """Whether an open file still has at least one name."""
        return os.fstat(descriptor).st_nlink > 0

    def is_named(self, descriptor: int, path: Path) -> bool:
        """Whether ``path`` leads to the open file."""
        try:
            return os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            return False

    def next_data(self, descriptor: int, position: int) -> int | None:
        """Return the next position that can hold data; None if there is none."""
        try:
            return os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else position

    def next_hole(self, descriptor: int, position: int, size: int) -> tuple[int, int]:
        """Return the next unwritten range (start, stop); (``size``, ``size``) if there is none."""
        # SEEK_HOLE also finds ranges whose blocks are allocated, but were never written.
        if not hasattr(os, "SEEK_HOLE"):
            return size, size
        start = min(os.lseek(descriptor, position, os.SEEK_HOLE), size)
        stop = self.next_data(descriptor, start) if start < size else size
        return start, size if stop is None else min(stop, size)

    def punch(self, descriptor: int, position: int, length: int) -> None:
        """Free the blocks of a range that was never written. The file keeps its size, and readers
        still read zeros there. Also raises OSError if the system has no such call.
        """
        if sys.platform == "linux":
            call = getattr(c_library(), "fallocate", None)
            if call is None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            if call(descriptor, _PUNCH_HOLE_KEEP_SIZE, position, length):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))

    # ------------------------------------------------------------------------- combined calls
    def make_file(self, path: Path, size: int, *, final: Path | None = None) -> int:
        """Create a file of zeros durably, with all its blocks allocated. The file must be new. If
        the file cannot be completed, the method deletes the file again. If the new file is a
        temporary file, ``final`` is the file that it will replace. Error texts then name ``final``.
        """
        self._require_synced()
        self.make_folders(path.parent)
        named = final or path
        with self.refusing(named):
            descriptor = self.open(path, create=True, exclusive=True)
        try:
            self.allocate(descriptor, size)
        except OSError as error:
            # If the disk is full (ENOSPC), ext4 has already allocated some of the file's blocks.
            self.discard(descriptor, path)
            raise self.refused(named, error) from error
        try:
            self.fsync(descriptor)
            self.sync_folder(path.parent)
        except FolderNotOpened as error:
            self.discard(descriptor, path)
            raise self.refused(named, error) from error
        except OSError as error:
            failed = self.failed(named, "sync failed", error)
            self.let_go(descriptor)
            with contextlib.suppress(OSError):
                self.unlink(path)
            raise failed from error
        return descriptor

    def make_folders(self, folder: Path) -> None:
        """Create a folder and its missing parents, durably."""
        missing = []
        with self.refusing(folder):
            while not is_folder(folder):
                missing.append(folder)
                folder = folder.parent
        for made in reversed(missing):
            try:
                self.make_folder(made)
            except OSError as error:
                # Another thread may have created the folder.
                if not is_folder(made):
                    raise self._not_made(made, error) from error
            self.sync_names(made.parent)

    def _not_made(self, folder: Path, error: OSError) -> StoreUnavailable:
        if not isinstance(error, FileExistsError):
            return self.refused(folder, error)
        if folder.is_symlink():
            return StoreUnavailable(
                f"{folder}: it is a link to {folder.readlink()}, which does not exist: create "
                "that folder, or give another path"
            )
        return StoreUnavailable(f"{folder}: it is not a folder: move it away")

    def names_in(self, folder: Path) -> Sequence[str]:
        """Return the sorted names of the files in a folder; see :meth:`list`."""
        with self.refusing(folder):
            return self.list(folder)

    @contextlib.contextmanager
    def writing(
        self, path: Path, new_size: int | None = None, *, final: Path | None = None
    ) -> Iterator[int]:
        """Open a file, or create a file of ``new_size`` bytes. When the ``with`` block ends, sync
        and close the file. For ``final``, see :meth:`make_file`.
        """
        named = final or path
        with self.refusing(named):
            if new_size is None:
                descriptor = self.open(path)
            else:
                descriptor = self.make_file(path, new_size, final=final)
            try:
                yield descriptor
                self.sync(descriptor, named)
            finally:
                self.let_go(descriptor)

    def write_all(self, descriptor: int, data: memoryview | bytes, position: int) -> None:
        """Write all bytes, if necessary with several system calls. Raises OSError."""
        view = memoryview(data)
        while view:
            count = self.write(descriptor, view, position)
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            view, position = view[count:], position + count

    def let_go(self, descriptor: int) -> None:
        """Close a descriptor. An error is only logged, because the caller has already synced the
        file.
        """
        try:
            self.close(descriptor)
        except OSError as error:
            logger.warning("closing a file failed: %s", error)

    def sync(self, descriptor: int, path: Path) -> None:
        """Sync a file's bytes. Raises StoreUnavailable if this sync or an earlier sync failed.
        Raises SyncDelayed if an earlier sync of a folder must be repeated first.
        """
        self._require_synced()
        try:
            self.fdatasync(descriptor)
        except OSError as error:
            raise self.failed(path, "sync failed", error) from error

    def sync_names(self, *folders: Path) -> None:
        """Sync the names in folders; see :meth:`sync`."""
        self.health.require_writable()
        left = list(folders)
        try:
            self._require_synced()
            while left:
                self.sync_folder(left[0])
                del left[0]
        except (SyncDelayed, FolderNotOpened) as error:
            with self._delaying:
                self._unsynced.update(left)
            if isinstance(error, SyncDelayed):
                raise
            raise _delayed(left[0], error) from error
        except OSError as error:
            raise self.failed(left[0], "sync failed", error) from error

    @contextlib.contextmanager
    def finally_synced(self) -> Iterator[None]:
        """Poison the store if a sync in the ``with`` block is delayed, because the changes in the
        block cannot be repeated.
        """
        try:
            yield
        except SyncDelayed as error:
            raise self.health.poison(str(error)) from error

    def _require_synced(self) -> None:
        """Repeat the syncs of folders that could not begin; see :class:`Disk`."""
        self.health.require_writable()
        if not self._unsynced:
            return
        # The lock prevents a lost sync: without the lock, another thread could add a folder after
        # this thread has synced the folder. Then this thread would remove the folder from the set.
        with self._delaying:
            for folder in sorted(self._unsynced):
                try:
                    self.sync_folder(folder)
                except FolderNotOpened as error:
                    raise _delayed(folder, error) from error
                except FileNotFoundError:
                    logger.info("%s: it was deleted before its sync", folder)
                except OSError as error:
                    raise self.failed(folder, "sync failed", error) from error
                self._unsynced.discard(folder)

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file durably. After a failure the previous file still exists."""
        made = path.with_name(f"{path.name}.new")
        self.make_folders(path.parent)
        self.remove(made)
        with self.writing(made, len(data), final=path) as descriptor:
            self.write_all(descriptor, data, 0)
        with self.refusing(path):
            self.rename(made, path)
        self.sync_names(path.parent)

    def sync_parent(self, folder: Path) -> None:
        """Sync the name of a folder in its parent folder. The process that created the folder may
        have crashed before it synced the name.
        """
        if os.access(folder.parent, os.R_OK):
            self.sync_names(folder.parent)

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Move a file to a quarantine folder, durably. Return the new path."""
        self.make_folders(folder)
        with self.refusing(folder):
            target = free_path(folder / path.name)
        self.move(path, target)
        logger.warning("%s: moved to %s", path, target)
        return target

    def keep(self, path: Path, to: Path) -> None:
        """Give a file the second name ``to``, a hard link, before another file replaces the file.
        If the file system refuses hard links, copy the file. The method does not rename the file,
        because then the old path would have no file for a moment.
        """
        try:
            self.link(path, to)
        except OSError:
            try:
                data = path.read_bytes()
            except OSError:
                # The disk cannot read the file, so the file cannot be copied. Move it instead.
                self.move(path, to)
                return
            with self.refusing(to):
                descriptor = self.open(to, create=True)
                try:
                    self.write_all(descriptor, data, 0)
                    self.sync(descriptor, to)
                finally:
                    self.let_go(descriptor)

    def move(self, path: Path, to: Path) -> None:
        """Rename a file durably. If the new path is on another disk (a folder of a store may be a
        symbolic link), copy the file.
        """
        try:
            self.rename(path, to)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise self.refused(to, error) from error
            self._copy_over(path, to)
        self.sync_names(to.parent, path.parent)

    def _copy_over(self, path: Path, to: Path) -> None:
        made = to.with_name(f"{to.name}.new")
        self.remove(made)
        with self.refusing(path):
            size = path.stat().st_size
        with self.refusing(to):
            self.copy(path, 0, size, made, final=to)
            self.rename(made, to)
            self.sync_names(to.parent)
            self.unlink(path)

    def copy(
        self, path: Path, position: int, length: int, target: Path, *, final: Path | None = None
    ) -> None:
        """Copy bytes of a file to a new file, durably. For ``final``, see :meth:`make_file`."""
        with self.refusing(path):
            source = self.open(path)
        try:
            with self.writing(target, length, final=final) as copy:
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
        """Delete a file durably, if it exists."""
        with self.refusing(path):
            try:
                self.unlink(path)
            except FileNotFoundError:
                return
        self.sync_names(path.parent)

    @contextlib.contextmanager
    def refusing(self, path: Path) -> Iterator[None]:
        """Convert an OSError that the ``with`` block raises to StoreUnavailable."""
        try:
            yield
        except OSError as error:
            raise self.refused(path, error) from error

    def refused(self, path: Path, error: OSError) -> StoreUnavailable:
        """Make the exception for a system call that failed without changing a file."""
        if error.errno in _NO_ROOM:
            return StoreUnavailable(f"{path}: no room on the disk: {write_reason(error)}")
        if error.errno == errno.ENOTDIR:
            file = next((place for place in reversed(path.parents) if place.is_file()), path)
            return StoreUnavailable(f"{file}: it is not a folder: move it away")
        return StoreUnavailable(f"{path}: {write_reason(error)}")

    def failed(self, path: Path, what: str, error: OSError) -> StoreUnavailable:
        """Poison the store after a failure that may have changed files. Return the exception."""
        return self.health.poison(f"{path}: {what}: {write_reason(error)}")

    def discard(self, descriptor: int, path: Path, *, is_new: bool = True) -> None:
        """Close a file that cannot be used, and delete it if it is new. An incomplete new file
        would prevent the next opening of the store, and a writer could not create the file again.

        If the deletion fails too, the method poisons the store, so that the next opening recovers
        the store.
        """
        self.let_go(descriptor)
        if not is_new:
            return
        try:
            self.unlink(path)
        except OSError as error:
            raise self.failed(path, "cannot be allocated or deleted", error) from error
        self.sync_names(path.parent)


def free_path(path: Path) -> Path:
    """Return ``path`` if no file has it, else the first free path of PATH.1, PATH.2 and so on."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(one for one in chain([path], numbered) if not exists(one))


def _delayed(folder: Path, error: OSError) -> SyncDelayed:
    step = LIMITS.get(error.errno or 0, "close files")
    return SyncDelayed(
        f"{folder}: cannot be opened for a sync: {error.strerror}. Nothing is lost, and the next "
        f"flush tries again: {step}"
    )
