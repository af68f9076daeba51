"""Locks a store's folders, and chooses the folders for new log files.

A lock of a folder needs no lock file, and ends with the process that holds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.disk.page_file import OpenFile
from logquarry.disk.service import abandon_in_children
from logquarry.errors import CorruptFile, StoreUnavailable, UsageError
from logquarry.log.store_files import (
    ABORT,
    LARGEST_BASE,
    LOCK,
    NAME_DIGITS,
    is_offset_name,
    unread_lock,
)
from logquarry.paths import exists, is_file, is_folder
from logquarry.systems import (
    FolderMark,
    end_lock,
    fcntl,
    folder_holders,
    is_marked,
    lock_file,
    lock_holders,
    read_file,
    require_writing,
    take_lock,
)

AT_WORK: Final = "a salvage or rebuild is at work there"


def lock_folder(folder: str | os.PathLike[str], at_work: str = AT_WORK) -> int | None:
    """Lock a folder, and return a descriptor that holds the lock; None if locks are not supported.

    Raises FileNotFoundError if the folder does not exist, and StoreUnavailable with the text
    ``at_work`` if another process holds the lock.
    """
    if fcntl is None:
        return None
    while True:
        with contextlib.ExitStack() as opened:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # After this process opened the folder, another process may have replaced the
                # folder.
                if os.path.samestat(os.fstat(descriptor), os.stat(folder)):  # noqa: PTH116
                    opened.pop_all()
                    return descriptor
            except BlockingIOError:
                raise StoreUnavailable(f"{os.fsdecode(folder)}: {at_work}") from None
            except FileNotFoundError:
                raise
            except OSError:
                # Some file systems do not support locks.
                return None


@contextmanager
def alone_in(disk: Disk, folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and lock the folder until the ``with`` block ends. Raises
    StoreUnavailable if another process has locked the folder.
    """
    require_writing(folder)
    while True:
        is_new = not exists(folder)
        try:
            disk.make_folders(folder)
        except BaseException:
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
            raise
        try:
            descriptor = lock_folder(folder)
            break
        except FileNotFoundError:
            # Between the creation and the lock, another process removed the empty folder.
            continue
        except OSError as error:
            raise disk.refused(folder, error) from error
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# The lock of a store, and ``abort``, which shows whether the store was shut down cleanly
#
# Like Java's ``tryLock(0, 1)``, the lock covers byte 0 of the file ``lock``. The functions of
# ``systems.py`` also prevent this process from opening the store twice.
#
# A writer of logquarry takes the lock before it reads the store. RocketMQ takes the lock only after
# its recovery.

_CONTENT: Final = b"lock"
_HELD: Final = frozenset({errno.EAGAIN, errno.EACCES})


def is_lockable(root: Path) -> bool:
    """Whether a program can take the store's lock without a change of the file ``lock``: the file
    has its content already, or this process has locked the file.
    """
    with lock_file(root / LOCK) as is_ours, suppress(OSError):
        return is_ours or read_file(root / LOCK) == _CONTENT
    return False


def held_by(root: Path) -> str:
    """Return a text that says which program holds a store's lock, and what the user can do."""
    with lock_file(root / LOCK) as is_ours:
        if not is_ours:
            is_open = "the store is open in another program: stop that program first"
            return unread_lock(root / LOCK) or is_open
    by = f"this program (process {os.getpid()})"
    return f"{by} has the store open for writing already: use the open store, or close it first"


class StoreLock(OpenFile):
    """The lock of a store. The constructor takes the lock, or raises StoreUnavailable."""

    def __init__(self, disk: Disk, root: Path) -> None:
        require_writing(root)
        self.path = root / LOCK
        self._disk = disk
        with disk.refusing(self.path):
            existed = exists(self.path)
            is_usual = not existed or is_file(self.path) or is_folder(self.path)
        if not is_usual:
            # The path may lead to a device, which can be opened and locked, but stores no bytes.
            raise StoreUnavailable(f"{self.path}: it is not a plain file: move it out of the store")
        with lock_file(self.path) as is_ours:
            if is_ours:
                raise StoreUnavailable(f"{root}: {held_by(root)}")
            self._mark = FolderMark()
            # A writer creates its lock file before it marks the folder. A writer may have opened
            # the store since the first check, so check again whether the file exists.
            with disk.refusing(self.path):
                if not existed and is_marked(root) and not exists(self.path):
                    raise self._held_by(folder_holders(root), "its lock file was deleted")
                self._descriptor = disk.open(self.path, create=True)
            self._take()
            try:
                self._mark.make(root)
            except BlockingIOError:
                end_lock(self._descriptor)
                self.close()
                raise self._held_by(folder_holders(root), "its lock file was replaced") from None
        try:
            if not existed:
                disk.sync_names(root)
            # Java's start() writes these bytes, but no program reads them.
            if disk.read(self._descriptor, len(_CONTENT), 0) != _CONTENT:
                disk.write_all(self._descriptor, _CONTENT, 0)
        except OSError as error:
            self.release()
            raise disk.refused(self.path, error) from error
        except StoreUnavailable:
            self.release()
            raise
        abandon_in_children(self)

    def _take(self) -> None:
        try:
            take_lock(self._descriptor)
        except OSError as error:
            holders = lock_holders(self._descriptor) if error.errno in _HELD else []
            self._disk.let_go(self._descriptor)
            if error.errno not in _HELD:
                raise self._disk.refused(self.path, error) from error
            raise self._held_by(holders) from error

    def _held_by(self, holders: list[int], fault: str = "") -> StoreUnavailable:
        by = f" (process {', '.join(map(str, holders))})" if holders else ""
        what = f"but {fault}" if fault else f"which holds {self.path.name}"
        return StoreUnavailable(
            f"{self.path.parent}: the store is open in another program{by}, {what}: stop that "
            "program"
        )

    def release(self) -> None:
        """Release the lock. In a forked child, this method does not release the lock, because the
        lock belongs to the parent.
        """
        with lock_file(self.path):
            # Remove the mark first. Otherwise another process could get the lock and find the mark.
            self._mark.close()
            if self.is_open:
                end_lock(self._descriptor)
            self.close()

    def abandon_in_child(self) -> None:
        """Close the descriptors in a forked child. The lock and the folder's mark
        (:class:`~logquarry.systems.FolderMark`) stay with the parent.
        """
        super().abandon_in_child()
        self._mark.close()


class AbortFile:
    """The file ``abort``, which exists while a store is open.

    If ``abort`` exists when a store is opened, the store was not shut down cleanly. So a writer
    creates ``abort`` durably before any change of the store, and deletes ``abort`` durably after
    the last flush.
    """

    def __init__(self, disk: Disk, root: Path) -> None:
        self.path = root / ABORT
        self._disk = disk

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return exists(self.path)

    def make(self) -> None:
        """Create the file, if it does not exist. If this method fails, the caller must not change
        the store.
        """
        with self._disk.refusing(self.path):
            self._disk.let_go(self._disk.open(self.path, create=True))
        self._disk.sync_names(self.path.parent)

    def remove(self) -> None:
        """Delete the file. Raises StoreUnavailable if the store is poisoned and needs recovery."""
        self._disk.health.require_writable()
        self._disk.remove(self.path)


# -------------------------------- the folders of a queue of files (``MultiPathMappedFileQueue``)


class QueueFolders:
    """The folders of one queue of files. ``full_folders`` returns the folders that have no room for
    another file. A new file goes to a full folder only if all writable folders are full.
    """

    def __init__(
        self,
        disk: Disk,
        folders: Path | Sequence[Path],
        *,
        read_only: Sequence[Path] = (),
        full_folders: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        # QUIRK: Java sorts the configured paths as text, and places file number n in the path with
        # the index n modulo the number of paths. So if you add a path to the configuration, new
        # files go to other folders than before. Existing files are found in any of the configured
        # folders.
        given = (folders,) if isinstance(folders, Path) else tuple(folders)
        self.folders = tuple(sorted(set(given), key=str))
        self._read_only = frozenset(read_only)
        self._full_folders = full_folders
        self._disk = disk

    def find(self, file_size: int, *, gaps: bool = False) -> dict[int, Path]:
        """Find the existing files, in the order of their bases (the offsets in their names). Files
        with other names are skipped.

        Raises CorruptFile in three cases: a file is longer than ``file_size``; a file other than
        the last file is shorter than ``file_size``; a file is missing, and ``gaps`` is False.
        """
        found: dict[int, Path] = {}
        for folder in {*self.folders, *self._read_only}:
            for name in self._disk.names_in(folder):
                if is_offset_name(name) and int(name) <= LARGEST_BASE:
                    found[int(name)] = folder / name
        bases = sorted(found)
        for base in bases:
            with self._disk.refusing(found[base]):
                size = found[base].stat().st_size
            if size > file_size or (size < file_size and base != bases[-1]):
                reason = f"its size is {size} instead of {file_size} bytes"
                raise CorruptFile(str(found[base]), 0, reason)
        for before, base in pairwise(bases):
            if base - before != file_size and not (gaps and base - before > file_size):
                reason = f"the previous file begins at {before} instead of {base - file_size}"
                raise CorruptFile(str(found[base]), 0, reason)
        return {base: found[base] for base in bases}

    def path_of(self, base: int, file_size: int) -> Path:
        """Return the path for a new file that begins at ``base``."""
        name = f"{base:0{NAME_DIGITS}d}"
        if len(self.folders) == 1:
            return self.folders[0] / name
        full = set(self._full_folders())
        writable = [folder for folder in self.folders if folder not in self._read_only]
        usable = [folder for folder in writable if folder not in full] or writable
        if not usable:
            raise UsageError("every folder of the log is read-only")
        return usable[base // file_size % len(usable)] / name


# --------------------------------------------------------------------------------------------------
# File systems that ignore upper and lower case, for example those of macOS


class TopicFolders:
    """Makes sure that no two topics share a folder.

    On a file system that ignores upper and lower case, two topics such as ``orders`` and ``Orders``
    have the same path. Each topic would overwrite the queue entries of the other topic, and
    consumers would get messages of the wrong topic.

    Args:
        folder: the folder with the folders of the topics.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder

    @cached_property
    def ignores_case(self) -> bool:
        """Whether two names in the folder can differ only in upper and lower case. Raises
        StoreUnavailable if the folder cannot be read.
        """
        with self._disk.refusing(self._folder):
            return ignores_case(self._folder)

    @cached_property
    def _spellings(self) -> dict[str, str]:
        with self._disk.refusing(self._folder):
            return {_folded(name): name for name in _names_in(self._folder)}

    def owner(self, topic: str) -> str:
        """Return the topic that uses the path ``<folder>/<topic>``: ``topic``, or another topic."""
        return self._spellings.setdefault(_folded(topic), topic) if self.ignores_case else topic

    def require_own(self, topic: str) -> None:
        """Raise StoreUnavailable if another topic already uses the path of the topic's folder."""
        other = self.owner(topic)
        if other != topic:
            raise StoreUnavailable(
                f"{self._folder / topic}: topic {other} already has this folder, because the file "
                "system ignores upper and lower case. No message is lost: close the store, and "
                "copy it to a file system that distinguishes them"
            )


def ignores_case(folder: Path) -> bool:
    """Whether two names in a folder can differ only in upper and lower case. If the folder is
    missing, check its parent folder, because a new folder gets this setting from its parent.
    """
    try:
        names = {*os.listdir(folder)}  # noqa: PTH208
    except FileNotFoundError:
        folder = folder.parent
        names = {*_names_in(folder)}
    # On Linux, this can be a setting of one folder (``chattr +F``).
    if _has_casefold(folder):
        return True
    found = next((name for name in names if name.swapcase() not in names), None)
    if found is not None:
        return os.path.lexists(folder / found.swapcase())
    return os.path.lexists(folder.with_name(folder.name.swapcase()))


# FS_IOC_GETFLAGS and FS_CASEFOLD_FL of linux/fs.h
_GET_FLAGS: Final = 0x80086601
_CASEFOLD: Final = 0x40000000


def _has_casefold(folder: Path) -> bool:
    if fcntl is None or sys.platform != "linux":
        return False
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        flags = fcntl.ioctl(descriptor, _GET_FLAGS, bytes(8))
    except OSError:
        # The file system has no such flags.
        return False
    finally:
        os.close(descriptor)
    return bool(int.from_bytes(flags[:4], sys.byteorder) & _CASEFOLD)


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none if the folder does not exist."""
    try:
        return os.listdir(folder)  # noqa: PTH208
    except FileNotFoundError:
        return []


def _folded(name: str) -> str:
    # Unicode can write "é" as one character, or as "e" and an accent. macOS treats both as equal.
    return unicodedata.normalize("NFD", name).casefold()
