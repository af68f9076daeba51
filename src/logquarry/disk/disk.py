"""The port through which a store is written: each method of the first part is one system call.

Faults are injected here, and a model of what a power cut leaves is kept here: a test double
subclasses :class:`LocalDisk`, and fails, counts or records any call.

What is written through a map goes only into files whose every block is allocated
(:meth:`Disk.make_file`): a store to a hole on a full disk is SIGBUS and the end of the process,
while ``posix_fallocate`` says ENOSPC in words. Syncs are ``fdatasync`` on the one descriptor that
a file keeps: it covers the stores through the map, releases the GIL (``mmap.flush`` does not),
and hears of a failed write-back even when that happened before the call.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from logquarry.disk.lifetime import abandon_in_children
from logquarry.disk.service import Health
from logquarry.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_ZEROS: Final = bytes(1 << 20)
_COPY_BYTES: Final = 1 << 20
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Disk(ABC):
    """The disk of one store.

    Methods of the first part raise OSError. Those of the second, made of them, raise
    StoreUnavailable; and where a sync fails they poison :attr:`health`.

    Attributes:
        health: whether the store may still be written.
    """

    def __init__(self) -> None:
        self.health = Health()
        abandon_in_children(self.health)

    # ------------------------------------------------------------------------- one call each
    @abstractmethod
    def open(self, path: Path, *, create: bool = False, exclusive: bool = False) -> int:
        """A descriptor to read and write; made if ``create``, and only made if ``exclusive``."""

    @abstractmethod
    def close(self, descriptor: int) -> None:
        """Let go of a descriptor."""

    @abstractmethod
    def size(self, descriptor: int) -> int:
        """Bytes of the file."""

    @abstractmethod
    def allocate(self, descriptor: int, size: int) -> None:
        """Give the file blocks for its first ``size`` bytes, and that size if it has less.

        Bytes that are there stay.
        """

    @abstractmethod
    def map(self, descriptor: int, size: int) -> mmap.mmap:
        """The file's first ``size`` bytes, shared and writable, but not with forked children."""

    @abstractmethod
    def read(self, descriptor: int, count: int, position: int) -> bytes:
        """At most ``count`` bytes from a position."""

    @abstractmethod
    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        """Write at a position; how many bytes were written."""

    @abstractmethod
    def fdatasync(self, descriptor: int) -> None:
        """Wait until the file's bytes are on the disk."""

    @abstractmethod
    def fsync(self, descriptor: int) -> None:
        """Wait until the file's bytes and all of its facts are on the disk."""

    @abstractmethod
    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder are on the disk."""

    @abstractmethod
    def make_folder(self, folder: Path) -> None:
        """Make one folder; its parent must be there."""

    @abstractmethod
    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name, in place of a file that had it."""

    @abstractmethod
    def link(self, path: Path, to: Path) -> None:
        """Give a file a second name, which nobody has."""

    @abstractmethod
    def unlink(self, path: Path) -> None:
        """Take a name away."""

    @abstractmethod
    def list(self, folder: Path) -> list[str]:
        """The names of the files (not the folders) in a folder, sorted; none if it is not there."""

    @abstractmethod
    def is_linked(self, descriptor: int) -> bool:
        """Whether an open file still has any name."""

    @abstractmethod
    def is_named(self, descriptor: int, path: Path) -> bool:
        """Whether an open file is the one that a path leads to."""

    @abstractmethod
    def next_data(self, descriptor: int, position: int) -> int | None:
        """The first place from ``position`` on that may hold data, None if there is none."""

    # ------------------------------------------------------------------------- made of them
    def make_file(self, path: Path, size: int) -> int:
        """A new file of zeros with all its blocks, durable, and its descriptor.

        Raises:
            StoreUnavailable: if it cannot be made (a full disk, a name that is taken); then
                nothing is left of it.
        """
        self.health.require_writable()
        self.make_folders(path.parent)
        try:
            descriptor = self.open(path, create=True, exclusive=True)
        except OSError as error:
            raise self.refused(path, error) from error
        try:
            self.allocate(descriptor, size)
        except OSError as error:
            # ext4 leaves a file of the size that did fit.
            self._discard(descriptor, path)
            raise self.refused(path, error) from error
        try:
            self.fsync(descriptor)
            self.sync_folder(path.parent)
        except OSError as error:
            failed = self._sync_failed(path, error)
            self.let_go(descriptor)
            with contextlib.suppress(OSError):
                self.unlink(path)
            raise failed from error
        return descriptor

    def make_folders(self, folder: Path) -> None:
        """A folder and what it is in, as far as they are not there; durable.

        Raises:
            StoreUnavailable: if one cannot be made, or a file has its name.
        """
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for made in reversed(missing):
            try:
                self.make_folder(made)
            except OSError as error:
                # Another thread may have made it just now.
                if not made.is_dir():
                    raise self.refused(made, error) from error
            self.sync_names(made.parent)

    def names_in(self, folder: Path) -> Sequence[str]:
        """What :meth:`list` says.

        Raises:
            StoreUnavailable: if the folder cannot be read, or is none.
        """
        try:
            return self.list(folder)
        except OSError as error:
            raise self.refused(folder, error) from error

    def write_all(self, descriptor: int, data: memoryview | bytes, position: int) -> None:
        """Write all of it, however many calls that takes. Raises OSError."""
        view = memoryview(data)
        while view:
            count = self.write(descriptor, view, position)
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            view, position = view[count:], position + count

    def let_go(self, descriptor: int) -> None:
        """Close a descriptor, whatever the system says to that: what counts was synced before."""
        try:
            self.close(descriptor)
        except OSError as error:
            logger.warning("a file was not closed in order: %s", error)

    def sync(self, descriptor: int, path: Path) -> None:
        """Wait until a file's bytes are on the disk.

        Raises:
            StoreUnavailable: if that failed, now or before: a failed sync is never tried again.
        """
        self.health.require_writable()
        try:
            self.fdatasync(descriptor)
        except OSError as error:
            raise self._sync_failed(path, error) from error

    def sync_names(self, folder: Path) -> None:
        """Wait until a folder's names are on the disk; see :meth:`sync`."""
        self.health.require_writable()
        try:
            self.sync_folder(folder)
        except OSError as error:
            raise self._sync_failed(folder, error) from error

    def replace(self, path: Path, data: bytes) -> None:
        """Write a small file whole, durably, in place of the one before.

        Raises:
            StoreUnavailable: if that cannot be done; then the one before is still there.
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
        """Wait until the name of a folder itself is on the disk, where one may look at its parent.

        Of a folder that was there already nobody knows that: who made it may have died before its
        sync.
        """
        if os.access(folder.parent, os.R_OK):
            self.sync_names(folder.parent)

    def set_aside(self, path: Path, folder: Path) -> Path:
        """Move a file to a folder, durably: its new path.

        The name stays, with a number behind it where there is one of that name.

        Raises:
            StoreUnavailable: if that cannot be done.
        """
        self.make_folders(folder)
        target, number = folder / path.name, 0
        while target.exists():
            number += 1
            target = folder / f"{path.name}.{number}"
        self.move(path, target)
        logger.warning("%s: set aside as %s", path, target)
        return target

    def move(self, path: Path, to: Path) -> None:
        """Give a file another name, durably; on another disk a copy of it, in place of none.

        Parts of a store may be links to other disks.

        Raises:
            StoreUnavailable: if that cannot be done.
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
        """Copy a file to another disk under a name that nobody reads, and take it away here."""
        made = to.with_name(f"{to.name}.new")
        self.remove(made)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise self.refused(path, error) from error
        try:
            self.copy(path, 0, size, made)
            self.rename(made, to)
            self.sync_names(to.parent)
            self.unlink(path)
        except OSError as error:
            raise self.refused(to, error) from error

    def copy(self, path: Path, position: int, length: int, target: Path) -> None:
        """Copy bytes of a file to a new one, durably.

        Raises:
            StoreUnavailable: if that cannot be done.
        """
        try:
            source = self.open(path)
        except OSError as error:
            raise self.refused(path, error) from error
        try:
            copy = self.make_file(target, length)
            try:
                done = 0
                while done < length:
                    count = min(_COPY_BYTES, length - done)
                    data = self.read(source, count, position + done)
                    if not data:
                        break
                    self.write_all(copy, data, done)
                    done += len(data)
                self.sync(copy, target)
            finally:
                self.let_go(copy)
        except OSError as error:
            raise self.refused(target, error) from error
        finally:
            self.let_go(source)

    def remove(self, path: Path) -> None:
        """Take a file away, durably; nothing happens if it is not there.

        Raises:
            StoreUnavailable: if that cannot be done.
        """
        try:
            self.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self.refused(path, error) from error
        self.sync_names(path.parent)

    def refused(self, path: Path, error: OSError) -> StoreUnavailable:
        """The error for a call that failed and left all as it was."""
        if error.errno in _NO_ROOM:
            return StoreUnavailable(f"{path}: there is no room for it: {error.strerror}")
        return StoreUnavailable(f"{path}: {error.strerror or error}")

    def _sync_failed(self, path: Path, error: OSError) -> StoreUnavailable:
        return self.health.poison(f"{path}: sync failed: {error.strerror or error}")

    def _discard(self, descriptor: int, path: Path) -> None:
        """Take away a file that could not be made, durably: nobody could open the store with it.

        Raises:
            StoreUnavailable: if it stays, or may come back. The store is poisoned then, so that it
                is recovered when it is opened next.
        """
        self.let_go(descriptor)
        try:
            self.unlink(path)
        except OSError as error:
            reason = f"{path}: could not be made, and not be taken away: {error.strerror or error}"
            raise self.health.poison(reason) from error
        self.sync_names(path.parent)


class LocalDisk(Disk):
    """Folders that this machine mounts."""

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False) -> int:
        """See :meth:`Disk.open`."""
        flags = os.O_RDWR | os.O_CREAT * create | os.O_EXCL * exclusive
        return os.open(path, flags, 0o644)

    def close(self, descriptor: int) -> None:
        """See :meth:`Disk.close`."""
        os.close(descriptor)

    def size(self, descriptor: int) -> int:
        """See :meth:`Disk.size`."""
        return os.fstat(descriptor).st_size

    def allocate(self, descriptor: int, size: int) -> None:
        """See :meth:`Disk.allocate`."""
        if sys.platform != "darwin":
            os.posix_fallocate(descriptor, 0, size)
        else:
            # macOS has no such call; writing the zeros does the same.
            for position in range(os.fstat(descriptor).st_size, size, len(_ZEROS)):
                self.write_all(descriptor, memoryview(_ZEROS)[: size - position], position)

    def map(self, descriptor: int, size: int) -> mmap.mmap:
        """See :meth:`Disk.map`."""
        # From 3.13 on a map can do without a descriptor of its own.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        mapped = mmap.mmap(descriptor, size, **options)
        if hasattr(mmap, "MADV_DONTFORK"):
            mapped.madvise(mmap.MADV_DONTFORK)
        return mapped

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        """See :meth:`Disk.read`."""
        return os.pread(descriptor, count, position)

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        """See :meth:`Disk.write`."""
        return os.pwrite(descriptor, data, position)

    def fdatasync(self, descriptor: int) -> None:
        """See :meth:`Disk.fdatasync`."""
        if sys.platform != "darwin":
            os.fdatasync(descriptor)
        else:
            os.fsync(descriptor)

    def fsync(self, descriptor: int) -> None:
        """See :meth:`Disk.fsync`."""
        os.fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """See :meth:`Disk.sync_folder`."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, folder: Path) -> None:
        """See :meth:`Disk.make_folder`."""
        folder.mkdir()

    def rename(self, path: Path, to: Path) -> None:
        """See :meth:`Disk.rename`."""
        path.rename(to)

    def link(self, path: Path, to: Path) -> None:
        """See :meth:`Disk.link`."""
        to.hardlink_to(path)

    def unlink(self, path: Path) -> None:
        """See :meth:`Disk.unlink`."""
        path.unlink()

    def list(self, folder: Path) -> list[str]:
        """See :meth:`Disk.list`."""
        try:
            with os.scandir(folder) as entries:
                return sorted(entry.name for entry in entries if entry.is_file())
        except FileNotFoundError:
            return []

    def is_linked(self, descriptor: int) -> bool:
        """See :meth:`Disk.is_linked`."""
        return os.fstat(descriptor).st_nlink > 0

    def is_named(self, descriptor: int, path: Path) -> bool:
        """See :meth:`Disk.is_named`."""
        ours = os.fstat(descriptor)
        try:
            named = path.stat()
        except FileNotFoundError:
            return False
        return (ours.st_dev, ours.st_ino) == (named.st_dev, named.st_ino)

    def next_data(self, descriptor: int, position: int) -> int | None:
        """See :meth:`Disk.next_data`."""
        try:
            return os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else position
