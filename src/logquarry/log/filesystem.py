"""Reads the folder of a store: local files with mmap, other file systems with pyarrow.fs."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logquarry.errors import StoreNotFound, UnreadableFile, reason_of
from logquarry.log.readable import (
    UNREADABLE,
    ReadableMap,
    Unreadable,
    WatchedMap,
    first_unreadable,
    joined,
)
from logquarry.paths import ABSENT, exists, is_link
from logquarry.systems import READ_ONLY, next_data

if TYPE_CHECKING:
    from pyarrow import fs as pafs


logger = logging.getLogger(__name__)

REMOTE_RANGE = 16 << 20
"""Maximum number of bytes that a reader fetches ahead from a remote file. A read that does not
follow the last window fetches at least REMOTE_LEAST bytes. A read that follows the last window
fetches four times the bytes of that window.
"""
REMOTE_LEAST = 256 << 10
_MOST_READ_WHOLE = 1 << 30


class Entry(NamedTuple):
    """One name in a folder."""

    name: str
    is_dir: bool
    size: int


class FileView(ABC):
    """One file, open for reading.

    Attributes:
        is_mapped: whether a window is a view of the memory-mapped file, and not a copy.
    """

    path: str
    size: int
    is_mapped: bool = False

    @property
    def unreadable(self) -> Sequence[Unreadable]:
        """The unreadable ranges that were found so far, in order. For bytes in these ranges,
        :meth:`window` returns FILL bytes.
        """
        return ()

    @abstractmethod
    def window(self, start: int, length: int) -> memoryview:
        """Return at least ``length`` bytes from ``start``, or all bytes up to the file's end."""

    def head(self, length: int) -> memoryview:
        """Return the first ``length`` bytes, or all bytes of a shorter file."""
        return self.window(0, length)[:length]

    def fault(self, start: int, length: int) -> Unreadable | None:
        """Read a range of the file. Return the first unreadable range that overlaps the given
        range; None if all bytes of the given range are readable.
        """
        self.window(start, length)
        return first_unreadable(self.unreadable, start, length)

    def reaches(self, end: int) -> bool:
        """Whether the file still has all bytes before a position."""
        return True

    def good_start(self, position: int) -> int:
        """Return the start of the longest range that ends at ``position`` and is known to be
        readable.
        """
        return position

    def next_data(self, position: int) -> int:
        """Return the first position >= ``position`` that can hold data; ``size`` if none can."""
        return min(position, self.size)


def unreadable_file(view: FileView, fault: Unreadable | None = None) -> UnreadableFile:
    """Make the error for an unreadable range of a file (default: the first known range)."""
    found = fault or view.unreadable[0]
    return UnreadableFile(view.path, found.offset, found.brief, kind=UNREADABLE)


class EmptyFile(FileView):
    """The view of a file without bytes."""

    is_mapped = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0

    def window(self, start: int, length: int) -> memoryview:
        return memoryview(b"")


class GoneFile(EmptyFile):
    """The view of a file that was deleted."""


class FileSystem(ABC):
    """Read access to a store's folder.

    Attributes:
        unreadable: maps the path of a file below the root to the unreadable ranges that were found
            in this file.
        dead_links: paths of links without a target, in the folders that were listed.
        lost_names: maps the paths whose folder entries the disk cannot read to the reasons. If
            this is None, :meth:`list` raises an error for such an entry. Otherwise, :meth:`list`
            adds the path to this dict, and does not return its name.
    """

    root: str
    unreadable: dict[str, Sequence[Unreadable]]
    dead_links: Set[str] = frozenset()
    lost_names: dict[str, str] | None = None

    @abstractmethod
    def list(self, path: str) -> list[Entry]:
        """List a folder below the root, sorted by name; empty if the folder is missing.

        Raises StoreNotFound if the folder or one of its entries cannot be read.
        """

    @abstractmethod
    def open(self, path: str) -> FileView:
        """Open a file below the root.

        Raises FileNotFoundError if the path does not exist or is not a file (for example, a folder
        or a pipe). Raises StoreNotFound if the file cannot be read.
        """

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether a name exists below the root. Raises StoreNotFound if the disk fails."""

    def broken_link(self, path: str) -> str | None:
        """If the path is a link whose target does not exist, return the target; else None."""
        return None

    def broken_links(self, path: str) -> Sequence[str]:
        """Return the names of a folder's links whose targets do not exist."""
        return ()

    def why_no_file(self, path: str) -> str | None:
        """Describe a path that is a pipe, a broken link or the like; None for any other path."""
        return None

    def real_path(self, path: str) -> str:
        """Resolve all links. Two paths of the same folder give the same result."""
        return path

    def read(self, path: str) -> bytes:
        """Read a small file. Raises UnreadableFile for unreadable bytes, or if the file exceeds 1
        GiB.
        """
        view = self.open(path)
        if view.size > _MOST_READ_WHOLE:
            # The size is limited, because a sparse file can be larger than the memory.
            fault = Unreadable(0, view.size, "are too many for a file of this name")
            self.unreadable[path] = (fault,)
            raise unreadable_file(view, fault)
        data = bytes(view.window(0, view.size))
        if view.unreadable:
            raise unreadable_file(view)
        return data

    def full_path(self, path: str) -> str:
        """Return the full path of a path below the root, to show it to users."""
        return f"{self.root.rstrip('/')}/{path}"


class _LocalFile(ReadableMap, FileView):
    def __init__(
        self, path: str, descriptor: int, size: int, note: Callable[[Sequence[Unreadable]], None]
    ) -> None:
        # The caller can close the descriptor, because the map holds its own reference to the file.
        mapped = WatchedMap(descriptor, size, access=mmap.ACCESS_READ).watch()
        self.is_mapped = mapped.is_watched or not hasattr(os, "pread")
        self.size = size
        copied = None if self.is_mapped else os.dup(descriptor)
        super().__init__(path, mapped, size, descriptor=copied, note=note)

    def next_data(self, position: int) -> int:
        if position >= self.size:
            return self.size
        try:
            descriptor = os.open(self.path, READ_ONLY)
        except OSError:
            # The file was deleted, but its map remains valid.
            return position
        try:
            # The result is limited to the size at the time of mapping, because the file may have
            # grown since then.
            return min(next_data(descriptor, position), self.size)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else position
        finally:
            os.close(descriptor)


class LocalFileSystem(FileSystem):
    """A folder on a mounted disk."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        # Make a relative path absolute now, because the process may change its working folder
        # later.
        self._base = Path(root).absolute().as_posix().rstrip("/")
        self.root = str(root)
        self.unreadable = {}
        self.dead_links: set[str] = set()

    def local_path(self, path: str) -> Path:
        """Return the absolute path of a path below the root.

        Unlike ``full_path``, it stays valid if the process changes its working folder.
        """
        return Path(self._path(path))

    def _path(self, path: str) -> str:
        # Joining the path with pathlib would take longer than opening the file.
        return f"{self._base}/{path}"

    def list(self, path: str) -> list[Entry]:
        try:
            with os.scandir(self._path(path)) as names:
                entries = [self._entry(path, name) for name in names]
        except OSError as error:
            if error.errno in ABSENT:
                return []
            where = self._path(path).rstrip("/")
            raise StoreNotFound(f"{where}: cannot be read: {reason_of(error)}") from error
        return sorted(entry for entry in entries if entry is not None)

    def _entry(self, folder: str, name: os.DirEntry[str]) -> Entry | None:
        try:
            return Entry(name.name, name.is_dir(), name.stat().st_size)
        except OSError as error:
            path = f"{folder}/{name.name}".lstrip("/")
            if error.errno == errno.EACCES and not folder and name.is_symlink():
                # Treat the link like a folder without permission: listing the store succeeds, and
                # only code that reads the link's target fails. An error here would make the whole
                # store unreadable because of one foreign link.
                return Entry(name.name, True, 0)
            if error.errno not in ABSENT:
                # Do not drop the name silently: a part of the store would seem to be missing.
                if self.lost_names is None:
                    raise self._unreadable(path, error) from error
                self.lost_names[path] = f"{error.strerror} (errno {error.errno})"
            elif name.is_symlink():
                self.dead_links.add(path)
            # The name does not exist any more: a live broker deleted the file after the listing.
            return None

    def open(self, path: str) -> FileView:
        full = self._path(path)
        try:
            descriptor = os.open(full, READ_ONLY)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise FileNotFoundError(errno.ENOENT, "not a file", full)
                if not status.st_size:
                    return EmptyFile(full)
                return _LocalFile(full, descriptor, status.st_size, partial(self._note, path))
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in ABSENT or path in (self.lost_names or ()):
                raise FileNotFoundError(*error.args, self.full_path(path)) from error
            raise self._unreadable(path, error) from error

    def _note(self, path: str, ranges: Sequence[Unreadable]) -> None:
        if ranges and path not in self.unreadable:
            first = ranges[0]
            logger.warning("%s: at offset %d: %s", self._path(path), first.offset, first.brief)
        known = {one.offset: one for one in (*self.unreadable.get(path, ()), *ranges)}
        self.unreadable[path] = joined(list(known.values()))

    def exists(self, path: str) -> bool:
        try:
            return exists(self._path(path))
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return False
            raise self._unreadable(path, error) from error

    def broken_link(self, path: str) -> str | None:
        link = Path(self._path(path))
        try:
            return None if exists(link) or not is_link(link) else str(link.readlink())
        except OSError:
            return None

    def broken_links(self, path: str) -> Sequence[str]:
        try:
            with os.scandir(self._path(path)) as names:
                links = [name.name for name in names if name.is_symlink()]
        except OSError:
            return ()
        return [name for name in links if self.broken_link(f"{path}/{name}") is not None]

    def why_no_file(self, path: str) -> str | None:
        try:
            mode = os.stat(self._path(path)).st_mode  # noqa: PTH116
        except OSError:
            target = self.broken_link(path)
            return None if target is None else f"is a link to {target}, which does not exist"
        return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is not a plain file"

    def real_path(self, path: str) -> str:
        return os.path.realpath(self._path(path))

    def _unreadable(self, path: str, error: OSError) -> StoreNotFound:
        return StoreNotFound(f"{self.full_path(path)}: cannot be read: {reason_of(error)}")


class RestoredFileSystem(LocalFileSystem):
    """Shows a folder as if its missing files and folders had their old names again.

    Args:
        restored: maps the path of each missing file, or of each missing folder in the root, to its
            present path. Both paths are below the root.
    """

    def __init__(self, root: str | os.PathLike[str], restored: Mapping[str, str]) -> None:
        super().__init__(root)
        self._restored = restored

    def _path(self, path: str) -> str:
        top, _, rest = path.partition("/")
        if top in self._restored:
            return super()._path(f"{self._restored[top]}/{rest}")
        return super()._path(self._restored.get(path, path))

    def full_path(self, path: str) -> str:
        is_in_folder = path.partition("/")[0] in self._restored
        return self._path(path) if is_in_folder else super().full_path(path)

    def list(self, path: str) -> list[Entry]:
        found = {entry.name: entry for entry in super().list(path)}
        for name in self._restored:
            folder, _, base = name.rpartition("/")
            if folder == path:
                status = os.stat(self._path(name))  # noqa: PTH116
                found[base] = Entry(base, stat.S_ISDIR(status.st_mode), status.st_size)
            elif not path:
                found.setdefault(folder, Entry(folder, True, 0))
        return sorted(found.values())


class _ArrowFile(FileView):
    def __init__(self, path: str, file: Any, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._last: tuple[int, memoryview] = 0, memoryview(b"")

    def head(self, length: int) -> memoryview:
        return self._range(0, length)

    def window(self, start: int, length: int) -> memoryview:
        begin, data = self._last
        stop = min(start + length, self.size)
        if not begin <= start <= stop <= begin + len(data):
            is_next = begin < start <= begin + len(data)
            ahead = min(4 * len(data) if is_next else REMOTE_LEAST, REMOTE_RANGE)
            begin, data = start, self._range(start, max(stop - start, ahead))
            self._last = begin, data
        return data[start - begin :]

    def _range(self, start: int, length: int) -> memoryview:
        length = min(length, self.size - start)
        if length <= 0:
            return memoryview(b"")
        try:
            return memoryview(self._file.read_at(length, start))
        except OSError as error:
            raise StoreNotFound(f"{self.path}: cannot be read: {error}") from error


class ArrowFileSystem(FileSystem):
    """A folder that ``pyarrow.fs`` reads: S3, GCS, HDFS, or any file system of fsspec."""

    def __init__(self, filesystem: pafs.FileSystem, base: str, root: str) -> None:
        self._fs = filesystem
        self._base = base.rstrip("/")
        self.root = root
        self.unreadable = {}

    def list(self, path: str) -> list[Entry]:
        from pyarrow import fs as pafs

        selector = pafs.FileSelector(f"{self._base}/{path}".rstrip("/"), allow_not_found=True)
        try:
            found = self._fs.get_file_info(selector)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self._unreadable(path, error) from error
        return sorted(
            Entry(info.base_name, info.type == pafs.FileType.Directory, info.size or 0)
            for info in found
        )

    def open(self, path: str) -> FileView:
        from pyarrow import fs as pafs

        full = f"{self._base}/{path}"
        try:
            info = self._fs.get_file_info(full)
            if info.type != pafs.FileType.File:
                raise FileNotFoundError(errno.ENOENT, "no such file", self.full_path(path))
            return _ArrowFile(self.full_path(path), self._fs.open_input_file(full), info.size)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unreadable(path, error) from error

    def exists(self, path: str) -> bool:
        from pyarrow import fs as pafs

        try:
            found = self._fs.get_file_info(f"{self._base}/{path}").type
        except OSError as error:
            raise self._unreadable(path, error) from error
        return bool(found != pafs.FileType.NotFound)

    def _unreadable(self, path: str, error: OSError) -> StoreNotFound:
        return StoreNotFound(f"{self.full_path(path)}: cannot be read: {error}")


def whole_file(path: Path) -> FileView:
    """Open one local file for reading. Raises the same errors as :meth:`FileSystem.open`."""
    return LocalFileSystem(path.parent).open(path.name)


# --------------------------------------------------------------------------------------------------
# Folder trees

_MOST_FOLDERS: Final = 64
"""Maximum number of nested folders. No version of RocketMQ nests more than five."""


class Below(NamedTuple):
    """One name in a folder or its subfolders. ``wrong`` describes a name that is neither a file nor
    a folder; otherwise it is None.
    """

    path: str
    is_dir: bool
    wrong: str | None


def below(filesystem: FileSystem, folder: str) -> Iterator[Below]:
    """Yield all names below a folder. Links are followed, except links to parent folders."""
    waiting: list[tuple[str, tuple[str, ...]]] = [(folder, (filesystem.real_path(folder),))]
    while waiting:
        path, parents = waiting.pop()
        for entry in filesystem.list(path):
            name = f"{path}/{entry.name}"
            if not entry.is_dir:
                yield Below(name, False, filesystem.why_no_file(name))
                continue
            real = filesystem.real_path(name)
            wrong = None
            if any(f"{parent}/".startswith(f"{real.rstrip('/')}/") for parent in parents):
                wrong = "is a link to a folder that contains it"
            elif len(parents) >= _MOST_FOLDERS:
                wrong = f"is in more than {_MOST_FOLDERS} folders"
            else:
                waiting.append((name, (*parents, real)))
            yield Below(name, True, wrong)
        for link in filesystem.broken_links(path):
            name = f"{path}/{link}"
            yield Below(name, False, filesystem.why_no_file(name))
