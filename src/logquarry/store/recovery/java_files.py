"""What RocketMQ's recovery does to the files of queues: really, or only noted.

Both ways run the same code over the same bytes, so that a plan says what applying it will do.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from logquarry.errors import StoreUnavailable
from logquarry.files.layout import SIDECAR
from logquarry.store.disk.disk import Disk
from logquarry.store.disk.open_files import MOST_OPEN
from logquarry.store.mapped.mapped_file import MappedFile


class Target(Protocol):
    """The files of a store's queues. Paths are below the store's folder, with ``/``."""

    def view(self, path: str) -> memoryview:
        """The bytes of a file, to be read."""

    def write(self, path: str, position: int, data: memoryview | bytes) -> None:
        """Write into a file."""

    def make(self, path: str, size: int) -> None:
        """Make a file of zeros, which is not there."""

    def extend(self, path: str, size: int) -> None:
        """Give a file the zeros that it lacks."""

    def set_aside(self, path: str) -> None:
        """Take a file away."""


class Noted:
    """Changes nothing: what would be written is kept in memory.

    Args:
        root: the store.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._changed: dict[str, mmap.mmap] = {}

    def view(self, path: str) -> memoryview:
        """See :meth:`Target.view`."""
        changed = self._changed.get(path)
        return memoryview(_mapped(self._root / path) if changed is None else changed).toreadonly()

    def write(self, path: str, position: int, data: memoryview | bytes) -> None:
        """See :meth:`Target.write`."""
        if path not in self._changed:
            with (self._root / path).open("rb") as file:
                # Pages that are written to become copies of our own.
                self._changed[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._changed[path][position : position + len(data)] = bytes(data)

    def make(self, path: str, size: int) -> None:
        """See :meth:`Target.make`."""
        self._changed[path] = mmap.mmap(-1, size)

    def extend(self, path: str, size: int) -> None:
        """See :meth:`Target.extend`."""

    def set_aside(self, path: str) -> None:
        """See :meth:`Target.set_aside`."""
        self._changed.pop(path, None)


class Applied:
    """Changes the files; what Java would destroy is moved to quarantine.

    Args:
        root: the store.
        disk: what it is on.

    Attributes:
        written: the files that are not on the disk yet.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._open: dict[str, MappedFile] = {}
        self.written: set[str] = set()

    def view(self, path: str) -> memoryview:
        """See :meth:`Target.view`."""
        file = self._open.get(path)
        if file is not None:
            return file.buffer.toreadonly()
        return memoryview(_mapped(self._root / path))

    def write(self, path: str, position: int, data: memoryview | bytes) -> None:
        """See :meth:`Target.write`."""
        file = self._open.get(path)
        if file is None:
            file = self._keep(path, (self._root / path).stat().st_size)
            # Java leaves holes, on which a full disk is a crash.
            file.allocate()
        self.written.add(path)
        file.buffer[position : position + len(data)] = data

    def make(self, path: str, size: int) -> None:
        """See :meth:`Target.make`."""
        self._keep(path, size, exclusive=True)
        self.written.add(path)

    def _keep(self, path: str, size: int, *, exclusive: bool = False) -> MappedFile:
        file = MappedFile(self._disk, self._root / path, 0, size, exclusive=exclusive)
        while len(self._open) >= MOST_OPEN:
            self._release(next(iter(self._open)))
        self._open[path] = file
        return file

    def extend(self, path: str, size: int) -> None:
        """See :meth:`Target.extend`."""
        # Opening it does so.
        MappedFile(self._disk, self._root / path, 0, size).close()
        self.written.add(path)

    def set_aside(self, path: str) -> None:
        """See :meth:`Target.set_aside`. A file that holds nothing but zeros is deleted."""
        self._release(path)
        self.written.discard(path)
        size = (self._root / path).stat().st_size
        if size:
            file = MappedFile(self._disk, self._root / path, 0, size)
            if not file.holds_data():
                file.delete()
                return
            file.close()
        folder = self._root / SIDECAR / "quarantine" / Path(path).parent
        self._disk.set_aside(self._root / path, folder)

    def _release(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close the files. What was written is with the kernel, and not on the disk."""
        for path in list(self._open):
            self._release(path)


class WrittenFiles:
    """Files that were written and are not on the disk yet."""

    def __init__(self, root: Path, disk: Disk, paths: set[str]) -> None:
        self._root = root
        self._disk = disk
        self._paths = set(paths)
        # Users flush beside the thread that does it now and then.
        self._flushing = threading.Lock()

    def flush(self, least_pages: int = 0) -> None:
        """With 0, wait until all of them are on the disk.

        Raises:
            StoreUnavailable: if a sync failed, now or before.
        """
        if least_pages:
            return
        with self._flushing:
            while self._paths:
                path = next(iter(self._paths))
                with self._opened(self._root / path) as descriptor:
                    if descriptor is not None:
                        self._disk.sync(descriptor, self._root / path)
                self._paths.discard(path)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[int | None]:
        try:
            descriptor = self._disk.open(path)
        except FileNotFoundError:
            # Retention took it, and there is nothing to keep.
            yield None
            return
        except OSError as error:
            raise self._disk.refused(path, error) from error
        try:
            yield descriptor
        finally:
            self._disk.close(descriptor)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise StoreUnavailable(f"{path}: cannot be read: {error.strerror}") from error
