"""The port through which stores are read: local files by mmap, others through pyarrow.fs.

Both give :class:`FileView` s: windows of bytes that kernels run over. A local window is the map
itself, without a copy; a remote one is a range fetched into memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logquarry.errors import StoreNotFound, UsageError

if TYPE_CHECKING:
    from pyarrow import fs as pafs


REMOTE_RANGE = 16 << 20
"""Bytes fetched at once from a remote file, unless one frame needs more."""


class Entry(NamedTuple):
    """One name in a folder."""

    name: str
    is_dir: bool
    size: int


class FileView(ABC):
    """One file, open for reading.

    Attributes:
        path: where it is, for messages.
        size: its bytes.
        is_mapped: whether windows cost nothing until they are looked at.
    """

    path: str
    size: int
    is_mapped: bool = False

    @abstractmethod
    def window(self, start: int, length: int) -> memoryview:
        """Bytes from ``start``: at least ``length`` of them, or to the end of the file."""

    def next_data(self, position: int) -> int:
        """The first place from ``position`` on that may hold data, ``size`` if there is none.

        Skips the holes of sparse and preallocated files, which read as zeros.
        """
        return min(position, self.size)


class GoneFile(FileView):
    """What stands in the place of a file that is not there any more: no bytes."""

    is_mapped = True

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0

    def window(self, start: int, length: int) -> memoryview:
        return memoryview(b"")


class FileSystem(ABC):
    """The folder of one store.

    Attributes:
        root: path or URL of the folder, for messages.
    """

    root: str

    @abstractmethod
    def list(self, path: str) -> list[Entry]:
        """What a folder below the root holds, by name; nothing if it is not there.

        Raises:
            StoreNotFound: if it is there and cannot be read.
        """

    @abstractmethod
    def open(self, path: str) -> FileView:
        """A file below the root.

        Raises:
            FileNotFoundError: if it is not there (any more), or no file.
            StoreNotFound: if it is there and cannot be read.
        """

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file of that name below the root."""

    def read(self, path: str) -> bytes:
        """The whole of a small file."""
        view = self.open(path)
        return bytes(view.window(0, view.size))

    def full_path(self, path: str) -> str:
        """``path`` below the root as messages show it."""
        return f"{self.root.rstrip('/')}/{path}"


class _LocalFile(FileView):
    is_mapped = True

    def __init__(self, path: str) -> None:
        self.path = path
        # A pipe without a writer would keep an ordinary open for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a file", path)
            self.size = status.st_size
            # The map keeps its own reference to the file; it goes when the last window goes.
            self._view = memoryview(
                mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ) if self.size else b""
            )
        finally:
            os.close(descriptor)

    def window(self, start: int, length: int) -> memoryview:
        return self._view[start:]

    def next_data(self, position: int) -> int:
        if position >= self.size:
            return self.size
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError:
            # Deleted since; what is mapped is still there.
            return position
        try:
            # A file may have grown since it was mapped, and what was mapped is what is read.
            return min(os.lseek(descriptor, position, os.SEEK_DATA), self.size)
        except OSError as error:
            return self.size if error.errno == errno.ENXIO else position
        finally:
            os.close(descriptor)


class LocalFileSystem(FileSystem):
    """A folder on a disk that this machine mounts."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        # A program may change its folder while the store is open.
        self._base = str(Path(root).absolute()).rstrip("/")
        self.root = str(root)

    def _path(self, path: str) -> str:
        # pathlib takes longer to join names than the system takes to open a file.
        return f"{self._base}/{path}"

    def list(self, path: str) -> list[Entry]:
        try:
            with os.scandir(self._path(path)) as names:
                entries = [self._entry(name) for name in names]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            where = self._path(path).rstrip("/")
            raise StoreNotFound(f"{where}: cannot be read: {error.strerror}") from error
        return sorted(entry for entry in entries if entry is not None)

    @staticmethod
    def _entry(name: os.DirEntry[str]) -> Entry | None:
        try:
            return Entry(name.name, name.is_dir(), name.stat().st_size)
        except OSError:
            # Deleted between listing and looking: retention of a live broker does that. A link
            # that leads in a circle is not there either.
            return None

    def open(self, path: str) -> FileView:
        try:
            return _LocalFile(self._path(path))
        except FileNotFoundError:
            raise
        except NotADirectoryError as error:
            raise FileNotFoundError(*error.args, self.full_path(path)) from error
        except OSError as error:
            raise self._unreadable(path, error) from error

    def exists(self, path: str) -> bool:
        try:
            return Path(self._path(path)).exists()
        except OSError:
            return False

    def _unreadable(self, path: str, error: OSError) -> StoreNotFound:
        return StoreNotFound(f"{self.full_path(path)}: cannot be read: {error.strerror}")


class _ArrowFile(FileView):
    def __init__(self, path: str, file: Any, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file

    def window(self, start: int, length: int) -> memoryview:
        length = min(max(length, REMOTE_RANGE), self.size - start)
        if length <= 0:
            return memoryview(b"")
        try:
            return memoryview(self._file.read_at(length, start))
        except OSError as error:
            raise StoreNotFound(f"{self.path}: cannot be read: {error}") from error


class ArrowFileSystem(FileSystem):
    """A folder behind ``pyarrow.fs``: S3, GCS, HDFS, or anything fsspec knows."""

    def __init__(self, filesystem: pafs.FileSystem, base: str, root: str) -> None:
        self._fs = filesystem
        self._base = base.rstrip("/")
        self.root = root

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


def open_filesystem(
    location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> FileSystem:
    """The folder at a path or URL.

    Args:
        location: a local path, ``file:`` URL, or a URL that pyarrow.fs or fsspec knows.
        storage_options: what the file system takes to be made. For ``s3:`` these may be those of
            ``pyarrow.fs.S3FileSystem`` (``endpoint_override``, ``access_key``, ...), which reads
            the URL then; with others fsspec does; without any pyarrow.fs, if it knows the URL.

    Raises:
        StoreNotFound: if a local path is no folder.
        UsageError: if no file system knows the URL.
    """
    text = without_file_scheme(os.fsdecode(location))
    if "://" not in text:
        if not Path(text).is_dir():
            what = "not a folder" if Path(text).exists() else "there is no such folder"
            raise StoreNotFound(f"{text}: {what}")
        return LocalFileSystem(text)
    folder, base = arrow_folder(text, storage_options)
    return ArrowFileSystem(folder, base, text)


_S3_OPTIONS: Final = frozenset(
    {
        "access_key",
        "secret_key",
        "session_token",
        "anonymous",
        "region",
        "request_timeout",
        "connect_timeout",
        "scheme",
        "endpoint_override",
        "proxy_options",
        "role_arn",
        "session_name",
        "external_id",
        "force_virtual_addressing",
    }
)
_ARROW_OPTIONS: Final = {"s3": _S3_OPTIONS, "s3a": _S3_OPTIONS}
"""Options with which pyarrow.fs makes the file system of a scheme by itself."""


def without_file_scheme(location: str) -> str:
    """The path of a ``file:`` URL (``file:/x``, ``file:///x``); anything else as it is."""
    return re.sub(r"^file:(//)?", "", location)


def local_store(path: str | os.PathLike[str]) -> Path:
    """The folder of a store that is to be changed.

    Raises:
        UsageError: if it is elsewhere.
    """
    return local_folder(path, "only a local store can be changed")


def local_folder(
    path: str | os.PathLike[str], refusal: str = "only a local folder can be written"
) -> Path:
    """A folder that is to be written, where nothing but a disk will do.

    Raises:
        UsageError: if it is a URL: as a path it would be a folder called ``s3:``.
    """
    name = without_file_scheme(os.fsdecode(path))
    if "://" in name:
        raise UsageError(f"{name}: {refusal}")
    return Path(name).absolute()


def arrow_folder(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[pafs.FileSystem, str]:
    """The file system of a URL, and what the URL's folder is called there.

    Raises:
        UsageError: if no file system knows the URL.
    """
    from pyarrow import fs as pafs

    trouble = f"{url}: "
    takes = _ARROW_OPTIONS.get(url.partition("://")[0], frozenset())
    if not storage_options or takes.issuperset(storage_options):
        try:
            if storage_options:
                return pafs.S3FileSystem(**storage_options), url.partition("://")[2]
            arrow, base = pafs.FileSystem.from_uri(url)
        except (ValueError, TypeError, NotImplementedError) as error:
            trouble += f"{error}; "
        except OSError as error:
            raise UsageError(f"{url}: {error}") from error
        else:
            return arrow, base
    if url.startswith("://"):
        # To fsspec it is a path.
        raise UsageError(f"{url}: names no file system")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        hint = "fsspec may know it: pip install 'logquarry[remote]'"
        raise UsageError(trouble + hint) from error
    try:
        made, base = url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        raise UsageError(f"{trouble}needs a package that is not installed: {error}") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"{trouble}{error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(made)), base
