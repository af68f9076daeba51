"""Maps files so that an unreadable page does not end the process.

A read of a mapped page raises SIGBUS if the disk does not deliver the page, or if another program
truncated the file. So :class:`ReadableMap` probes each page before a reader gets a window (the
bytes of a part of the file). ``MADV_POPULATE_READ`` (Linux 5.14) loads the page, and returns an
error instead of a signal. On other systems, ``pread`` reads the page.

An unreadable page has ``FILL`` bytes in the window, and no frame or entry begins with these bytes.
If a page becomes unreadable after its probe, the handler of SIGBUS
(:mod:`logquarry.log.lost_pages`) puts ``FILL`` bytes in its place too; the page is then *lost*. A
decoder may decode ``FILL`` bytes as if they were data. So a caller that decodes bytes without a CRC
must call :func:`first_unreadable` afterwards.

Without a handler of SIGBUS, a lost page ends the process. So if no handler watches a map, ``pread``
copies the bytes into the windows, and no window shows the map itself.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import numpy as np

from logquarry.errors import LIMITS, StoreNotFound, UnreadableFile, reason_of
from logquarry.format.frame import DamageKind
from logquarry.log import lost_pages
from logquarry.log.lost_pages import lost
from logquarry.systems import READ_ONLY, read_at
from logquarry.text import counted

P = ParamSpec("P")
T = TypeVar("T")

UNREADABLE: Final = DamageKind.UNREADABLE.label
"""Kind of damage: bytes that the disk does not deliver."""
FILL: Final = b"\xff"
"""The byte in a window for each unreadable byte of the file."""
BLOCK: Final = 4096
"""Bytes of a block. If one byte of a block cannot be read, the whole block is reported as
unreadable.
"""
CHUNK: Final = 128 << 10
"""Number of bytes that are probed together. At a page fault, the system reads the same number of
bytes ahead.
"""
_STEP: Final = 8 << 20
"""Maximum bytes of one system call that probes several chunks. A longer call would hold the lock of
the process's memory map too long.
"""
_POPULATE_READ: Final = 22
_UNKNOWN, _GOOD, _BAD = b"\0", b"\1", b"\2"
_NO_BYTES: Final = memoryview(b"")
_LOST: Final = "could be read before, and the disk does not deliver them any more (SIGBUS)"


class Unreadable(NamedTuple):
    """A range of a file that cannot be read: position, bytes, and the reason with the errno."""

    offset: int
    length: int
    reason: str

    @property
    def words(self) -> str:
        """The range and the reason, as text for a report of the damage."""
        return f"{counted(self.length, 'byte')} at position {self.offset} of the file {self.reason}"

    @property
    def brief(self) -> str:
        """The length and the reason, as text for an error that has the position already."""
        return f"{counted(self.length, 'byte')} {self.reason}"


def first_unreadable(ranges: Sequence[Unreadable], start: int, length: int) -> Unreadable | None:
    """Return the first of the sorted ``ranges`` that overlaps the ``length`` bytes from ``start``
    on; None if no range overlaps these bytes.
    """
    if not ranges:
        return None
    at = bisect_left(ranges, start, key=lambda one: one.offset + one.length - 1)
    return ranges[at] if at < len(ranges) and ranges[at].offset < start + length else None


def joined(ranges: Iterable[Unreadable]) -> tuple[Unreadable, ...]:
    """Sort the ranges, and join adjacent ranges with the same reason."""
    found: list[Unreadable] = []
    for one in sorted(ranges):
        last = found[-1] if found else None
        if (
            last is None
            or one.offset > last.offset + last.length
            or (one.offset == last.offset + last.length and one.reason != last.reason)
        ):
            found.append(one)
        elif one.offset + one.length > last.offset + last.length:
            found[-1] = last._replace(length=one.offset + one.length - last.offset)
    return tuple(found)


class Probe:
    """Makes the system calls that find out whether pages can be read. Tests replace this object."""

    def populate(self, path: str, position: int, address: int, length: int) -> bool | None:
        """Load mapped pages. Return whether all pages were loaded; None if the system does not have
        ``MADV_POPULATE_READ``.
        """
        if sys.platform != "linux":
            # Only Linux has this call. On other systems, the number of this call is unused, or
            # belongs to another call.
            return None
        for _ in range(3):
            result = memory_call("madvise", address, length, _POPULATE_READ)
            if not result:
                return None if result is None else True
            failed = ctypes.get_errno()
            if failed == errno.EINVAL:
                return None
            if failed not in (errno.EAGAIN, errno.EINTR):
                return False
        return False

    def read(self, path: str, descriptor: int, position: int, length: int) -> bytes:
        """Read bytes of a file. Raises OSError."""
        return read_at(descriptor, length, position)


def memory_call(name: str, address: int, size: int, *more: int) -> int | None:
    """Call a function of the C library for a range of memory; None if the system lacks it."""
    function = getattr(c_library(), name, None)
    if function is None:
        return None
    return int(function(ctypes.c_void_p(address), ctypes.c_size_t(size), *more))


@cache
def c_library() -> Any:
    """Load the C library; None on Windows."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None


_probe = Probe()


@contextmanager
def probed_by(probe: Probe) -> Iterator[None]:
    """Replace the probe for all maps of this process, in a test."""
    global _probe  # noqa: PLW0603 - the one probe of the process
    before, _probe = _probe, probe
    try:
        yield
    finally:
        _probe = before


def _reason_of(error: OSError) -> str:
    """Return the reason of a failed read, with the errno."""
    return f"cannot be read: {error.strerror or error} (errno {error.errno})"


def rereads(read: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that only reads. If pages are lost during a call, the decorator calls the
    function again, and the second call finds the lost pages as unreadable ranges.
    """

    @wraps(read)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            before = lost()
            try:
                found = read(*args, **kwargs)
            except Exception:
                if lost() == before:
                    raise
            else:
                if lost() == before:
                    return found

    return again


@contextmanager
def none_lost(place: str) -> Iterator[None]:
    """Raise UnreadableFile for ``place`` if pages of a map were lost during the ``with`` block. The
    error is raised at the end of the block.
    """
    before = lost()
    yield
    if lost() != before:
        raise UnreadableFile(
            place, 0, f"{counted(lost() - before, 'page')} {_LOST}: run the command again"
        )


class WatchedMap(mmap.mmap):
    """A map that a handler of SIGBUS may watch. ``number`` is -1 if no handler watches the map."""

    number = -1
    # ``_end`` is a class attribute, because close() may run at the interpreter's exit, when the
    # module's names no longer exist.
    _end = staticmethod(lost_pages.forget)

    @property
    def is_watched(self) -> bool:
        """Whether a handler watches the map."""
        return self.number >= 0

    def watch(self, *, in_children: bool = True) -> WatchedMap:
        """Watch the map until its close, and return the map."""
        self.number = lost_pages.watch(self, in_children)
        return self

    def close(self) -> None:
        """Close the map; see :meth:`mmap.mmap.close`."""
        super().close()
        self._forget()

    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            self._end(number)

    def lost_blocks(self) -> list[Unreadable]:
        """Return the blocks that were lost so far."""
        found = []
        at = -1
        while self.number >= 0 and (at := lost_pages.next_lost(self.number, at + 1)) >= 0:
            found.append(Unreadable(at * BLOCK, BLOCK, _LOST))
        return found


class ReadableMap:
    """A mapped file with a record of its unreadable pages. Any thread may use this object.

    Args:
        mapped: the map. The map stays open while this object or a window is in use.
        may_shrink: whether another program may truncate the file, so that each window checks the
            size of the file.
        descriptor: the file descriptor from which windows are copied, if they must be copies; else
            None. This object closes the descriptor.
        note: called each time a new unreadable range is found, with all ranges found so far.
    """

    def __init__(
        self,
        path: str,
        mapped: WatchedMap,
        size: int,
        *,
        may_shrink: bool = True,
        descriptor: int | None = None,
        note: Callable[[Sequence[Unreadable]], None] = lambda _: None,
    ) -> None:
        self.path = path
        self._may_shrink = may_shrink
        self._descriptor = descriptor
        if descriptor is not None:
            # At the exit, Python calls finalizers before this package closes the open stores. The
            # close of a store still reads the store's files.
            weakref.finalize(self, os.close, descriptor).atexit = False
        self._tell = note
        self._unreadable: tuple[Unreadable, ...] = ()
        self._lost = lost()
        self._map = mapped
        self._size = size
        self._view = memoryview(mapped).toreadonly()
        self._address = int(np.frombuffer(self._view, np.uint8).ctypes.data)
        self._state = bytearray(-(-size // CHUNK))
        self._good = (0, 0)
        self._copies: dict[int, bytes] = {}
        self._left = size
        self._change = threading.Lock()

    @property
    def unreadable(self) -> tuple[Unreadable, ...]:
        """The unreadable ranges found so far, in order."""
        if self._lost != lost():
            self._note_lost()
        return self._unreadable

    def reaches(self, end: int) -> bool:
        """Whether the file still has all bytes before a position."""
        return self._size_now() >= end

    def _size_now(self) -> int:
        try:
            return self._map.size()
        except OSError as error:
            raise UnreadableFile(self.path, 0, f"its size {_reason_of(error)}") from error

    def window(self, start: int, length: int) -> memoryview:
        """Return at least ``length`` bytes from a position, or all bytes up to the map's end.

        The window is a copy if this object has a ``descriptor``, or if one of the window's chunks
        has unreadable bytes. In all other cases, the window is a part of the map.
        """
        stop = min(self._size, start + length)
        if start >= stop:
            return _NO_BYTES
        if self._descriptor is not None:
            return self._copy(start, stop)
        if self._may_shrink and self._size_now() < self._left:
            self._truncated()
        if self._lost != lost():
            self._note_lost()
        good = self._good
        if not good[0] <= start < stop <= good[1]:
            first, last = start // CHUNK, -(-stop // CHUNK)
            if self._state.find(_UNKNOWN, first, last) >= 0:
                self._examine(first, last)
            good = self._good_range(first)
            if good[1] < stop:
                return self._copied(start, stop)
        # No function is called between the read of _view and the slice, so no other thread can
        # release the view meanwhile.
        return self._view[start : good[1]]

    def _copy(self, start: int, stop: int) -> memoryview:
        first = start - start % BLOCK
        data, faults = self._read(first, stop - first)
        if faults:
            with self._change:
                self._note(faults)
        return memoryview(data)[start - first :]

    def _good_range(self, chunk: int) -> tuple[int, int]:
        """Return the largest range around a chunk in which all bytes are known to be readable. The
        next windows use this range too. The range is empty if the chunk is not readable.
        """
        with self._change:
            start = chunk * CHUNK
            ends = [at for s in (_UNKNOWN, _BAD) if (at := self._state.find(s, chunk)) >= 0]
            end = min([at * CHUNK for at in ends] + [self._size])
            self._good = self.good_start(start), end
            return self._good

    def good_start(self, position: int) -> int:
        """Return the start of the longest range that ends at ``position`` and is known to be
        readable.
        """
        chunk = position // CHUNK
        begins = max(self._state.rfind(s, 0, chunk + 1) for s in (_UNKNOWN, _BAD))
        return min(position, (begins + 1) * CHUNK)

    def let_go(self) -> None:
        """Release the view of the map. Windows that are requested later are empty."""
        view, self._view, self._size = self._view, _NO_BYTES, 0
        with suppress(BufferError):
            view.release()

    # ------------------------------------------------------------------------------ the probe
    def _examine(self, first: int, last: int) -> None:
        with self._change:
            at = first
            while (at := self._state.find(_UNKNOWN, at, last)) >= 0:
                known = [self._state.find(s, at, last) for s in (_GOOD, _BAD)]
                end = min([last, at + _STEP // CHUNK, *(k for k in known if k >= 0)])
                if self._populate(at, end):
                    self._state[at:end] = _GOOD * (end - at)
                else:
                    for chunk in range(at, end):
                        self._judge(chunk)
                at = end

    def _populate(self, first: int, last: int) -> bool | None:
        start, stop = first * CHUNK, min(last * CHUNK, self._size)
        return _probe.populate(self.path, start, self._address + start, stop - start)

    def _judge(self, chunk: int) -> None:
        # If a chunk has an unreadable byte, later windows contain a copy of the chunk, because a
        # read of the map would raise SIGBUS.
        populated = self._populate(chunk, chunk + 1)
        if populated:
            self._state[chunk : chunk + 1] = _GOOD
            return
        start = chunk * CHUNK
        data, faults = self._read(start, min(CHUNK, self._size - start))
        if populated is None and not faults:
            self._state[chunk : chunk + 1] = _GOOD
            return
        self._copies[chunk] = data
        self._note(faults)
        self._state[chunk : chunk + 1] = _BAD

    def _read(self, start: int, length: int) -> tuple[bytes, list[Unreadable]]:
        """Return the bytes, with FILL for unreadable bytes, and the unreadable ranges."""
        if self._descriptor is not None:
            return self._read_from(self._descriptor, start, length)
        try:
            descriptor = os.open(self.path, READ_ONLY)
        except OSError as error:
            self._require_fault(error)
            return FILL * length, [Unreadable(start, length, _reason_of(error))]
        try:
            return self._read_from(descriptor, start, length)
        finally:
            os.close(descriptor)

    def _read_from(
        self, descriptor: int, start: int, length: int
    ) -> tuple[bytes, list[Unreadable]]:
        with suppress(OSError):
            data = _probe.read(self.path, descriptor, start, length)
            if len(data) == length:
                return data, []
        parts: list[bytes] = []
        faults: list[Unreadable] = []
        for at in range(start, start + length, BLOCK):
            count = min(BLOCK, start + length - at)
            reason = "cannot be read: the file was truncated while it was open"
            try:
                part = _probe.read(self.path, descriptor, at, count)
            except OSError as error:
                self._require_fault(error)
                part, reason = b"", _reason_of(error)
            parts.append(part.ljust(count, FILL))
            if len(part) < count:
                faults.append(Unreadable(at + len(part), count - len(part), reason))
        return b"".join(parts), faults

    def _require_fault(self, error: OSError) -> None:
        if error.errno in LIMITS:  # The disk may be able to read these bytes.
            raise StoreNotFound(f"{self.path}: cannot be read: {reason_of(error)}") from error

    def _note(self, faults: list[Unreadable]) -> None:
        if faults:
            self._unreadable = joined([*self._unreadable, *faults])
            self._tell(self._unreadable)

    def _note_lost(self) -> None:
        with self._change:
            # Read the count first, so that the next call finds the pages that are lost after this
            # line.
            seen = lost()
            known = self._unreadable
            new = [
                one
                for one in self._map.lost_blocks()
                if first_unreadable(known, one.offset, BLOCK) is None and one.offset < self._size
            ]
            for chunk in {one.offset // CHUNK for one in new}:
                start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, self._size)
                data, faults = self._read(start, stop - start)
                self._copies[chunk] = data
                self._state[chunk : chunk + 1] = _BAD
                self._note(faults)
            self._good = (0, 0)
            self._note(new)
            self._lost = seen

    def _truncated(self) -> None:
        # A read of a mapped page after the file's end raises SIGBUS, so windows must use copies
        # there.
        with self._change:
            left = self._size_now()
            if left >= self._left:
                return
            self._left = left
            self._good = (0, 0)
            lost_pages.note_truncated()
            length = counted(left, "byte")
            reason = f"cannot be read: the file was truncated to {length} while it was open"
            for chunk in range(left // CHUNK, len(self._state)):
                start = chunk * CHUNK
                stop = min(start + CHUNK, self._size)
                there = max(0, min(stop, left) - start)
                data, faults = self._read(start, there) if there else (b"", [])
                self._copies[chunk] = data.ljust(stop - start, FILL)
                self._state[chunk : chunk + 1] = _BAD
                rest = Unreadable(start + there, stop - start - there, reason)
                self._note([*faults, rest] if rest.length else faults)

    def _copied(self, start: int, stop: int) -> memoryview:
        parts = bytearray()
        for chunk in range(start // CHUNK, -(-stop // CHUNK)):
            begin = chunk * CHUNK
            end = min(begin + CHUNK, self._size)
            copy = self._copies.get(chunk)
            parts += self._view[begin:end] if copy is None else copy
        first = start - start % CHUNK
        return memoryview(bytes(parts))[start - first : stop - first]
