"""Keeps the most recently read files of a store open, and locks pages of maps in memory (mlock).

The functions on pages call the C library, which releases the GIL; methods of ``mmap`` objects do
not. Loading 1 GiB takes a fifth of a second.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import OrderedDict
from functools import cache
from typing import Any, Final

from logquarry.errors import StoreNotFound
from logquarry.log.filesystem import FileView, unreadable_file
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import CHUNK, Unreadable, first_unreadable

_POPULATE_WRITE: Final = 23
_STEP: Final = 8 << 20
_MOST_AHEAD: Final = 4 << 20


def address_of(mapped: mmap.mmap) -> int:
    """Return the memory address of a writable map. Keeps no reference to the map."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def populate(address: int, size: int) -> bool:
    """Load pages into memory, writable (``MADV_POPULATE_WRITE``, Linux 5.14)."""
    # Load in steps, because a call for 1 GiB would hold the process's memory map lock too long.
    return all(
        _call("madvise", address + at, min(_STEP, size - at), _POPULATE_WRITE)
        for at in range(0, size, _STEP)
    )


def lock(address: int, size: int) -> bool:
    """Lock pages in memory. Return False if the limit of locked memory is reached."""
    return _call("mlock", address, size)


def unlock(address: int, size: int) -> bool:
    """Unlock pages in memory."""
    return _call("munlock", address, size)


def leave_mapped(mapped: mmap.mmap) -> None:
    """Never unmap a map: in a forked child, other code may use the map's address range."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


def _call(name: str, address: int, size: int, *more: int) -> bool:
    function = getattr(_libc(), name, None)
    if function is None:
        return False
    return bool(function(ctypes.c_void_p(address), ctypes.c_size_t(size), *more) == 0)


@cache
def _libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


# --------------------------------------------------------------------------------------------------
# Open files of a store

MOST_OPEN: Final = 128
"""Maximum number of open files. Each map holds a descriptor, and a broker has many queue files."""


class OpenFiles:
    """Reads parts of files, and keeps the most recently used files open.

    Returned bytes stay valid, even after the file is closed or deleted. Bytes that the disk does
    not deliver are :data:`~logquarry.log.readable.FILL`.
    """

    def __init__(self, layout: StoreLayout, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._layout = layout
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()

    def read(self, path: str, position: int, length: int) -> memoryview:
        """Read ``length`` bytes, fewer at the file's end, none if the file was deleted.

        Raises StoreNotFound if the file exists but cannot be read. With ``is_strict``, raises
        UnreadableFile if the disk does not deliver the bytes.
        """
        file = self._opened(path)
        if file is None:
            return memoryview(b"")
        data = file.read(position, length)
        if self.is_strict and file.view.unreadable:
            found = first_unreadable(file.view.unreadable, position, len(data))
            if found is not None:
                raise unreadable_file(file.view, found)
        return data

    def _opened(self, path: str) -> _OpenFile | None:
        file = self._open.get(path)
        if file is None:
            try:
                file = self._open[path] = _OpenFile(self._layout.open_file(path))
            except FileNotFoundError:
                return None
            except OSError as error:
                full = self._layout.filesystem.full_path(path)
                raise StoreNotFound(f"{full}: cannot be read: {error.strerror}") from error
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(path)
        return file

    def window(self, path: str, position: int, length: int) -> tuple[int, memoryview]:
        """Return position and bytes of a window that contains a range."""
        file = self._opened(path)
        if file is None:
            return position, memoryview(b"")
        file.read(position, length)
        return file.window

    def fault(self, path: str, position: int, length: int) -> Unreadable | None:
        """Return the first unreadable range among bytes that were read, None if there is none."""
        file = self._open.get(path)
        if file is None or not file.view.unreadable:
            return None
        return first_unreadable(file.view.unreadable, position, length)

    def reaches(self, path: str, end: int) -> bool:
        """Whether an open file still has all bytes before a position."""
        file = self._open.get(path)
        return file is None or file.view.reaches(end)

    def view(self, path: str) -> FileView | None:
        """Open the whole file; None if it was deleted. Raises StoreNotFound if it is unreadable."""
        file = self._opened(path)
        return None if file is None else file.view

    def forget(self, path: str) -> None:
        """Reopen a file at its next read, because the file has grown or was replaced."""
        self._open.pop(path, None)

    def close(self) -> None:
        """Close all files. The next read opens a file again."""
        self._open.clear()


class _OpenFile:
    def __init__(self, view: FileView) -> None:
        self.view = view
        self._start = 0
        self._data = memoryview(b"")
        # Number of bytes to probe after a range, so that sequential reads need fewer probes.
        self._ahead = 0

    @property
    def window(self) -> tuple[int, memoryview]:
        return self._start, self._data

    def read(self, position: int, length: int) -> memoryview:
        length = min(length, self.view.size - position)
        if position < 0 or length <= 0:
            return memoryview(b"")
        at = position - self._start
        view = self.view
        is_held = at >= 0 and at + length <= len(self._data) and not view.is_growing
        if not is_held or not view.reaches(position + length):
            is_next = 0 <= at <= len(self._data) > 0
            self._ahead = min(_MOST_AHEAD, max(CHUNK, 2 * self._ahead)) if is_next else 0
            self._start, self._data = self._around(position, length)
            at = position - self._start
        return self._data[at : at + length]

    def _around(self, position: int, length: int) -> tuple[int, memoryview]:
        view = self.view
        data = view.window(position, length)
        if not view.is_mapped or first_unreadable(view.unreadable, position, length):
            return position, data
        more = min(length + self._ahead, view.size - position)
        view.window(position, more)
        if first_unreadable(view.unreadable, position, more):
            # A window with an unreadable range is a copy. Kernels cannot use copies.
            more = length
        start = view.good_start(position)
        return start, view.window(start, position - start + more)
