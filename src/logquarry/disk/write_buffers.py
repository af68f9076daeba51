"""Memory of the writer: pages of maps, a pool of buffers, and copies of files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import deque
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, Final

from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable, reason_of
from logquarry.log.readable import memory_call

_POPULATE_WRITE: Final = 23
_STEP: Final = 8 << 20
"""Number of bytes that one call reads, loads or releases."""


def address_of(mapped: mmap.mmap) -> int:
    """Return the memory address of a writable map. The function keeps no reference to the map."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def populate(address: int, size: int) -> bool:
    """Load pages into memory, so that a write to them causes no page fault
    (``MADV_POPULATE_WRITE``, Linux 5.14).
    """
    # Load in steps. During a call, the operating system locks the memory maps of this process. A
    # single call for 1 GiB would make other threads wait too long.
    return all(
        memory_call("madvise", address + at, min(_STEP, size - at), _POPULATE_WRITE) == 0
        for at in range(0, size, _STEP)
    )


def lock(address: int, size: int) -> bool:
    """Lock pages in memory. Return False if the limit of locked memory is reached."""
    return memory_call("mlock", address, size) == 0


def unlock(address: int, size: int) -> bool:
    """Unlock pages in memory."""
    return memory_call("munlock", address, size) == 0


def leave_mapped(mapped: mmap.mmap) -> None:
    """Make sure that a map is never unmapped. A forked child does not have the map, so other code
    may use the map's addresses there. If the child unmapped these addresses, the other code would
    lose its memory.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


class TransientStorePool:
    """Buffers for the newest bytes of the log, before a commit writes the bytes to the files.

    A file borrows a buffer until the file is full. With a buffer, a put never waits for the page
    cache, but uncommitted bytes are lost if the process ends. The pool is used only with
    asynchronous flush, and not on a slave. A borrowed buffer still contains bytes of the file that
    used it before. So old bytes may follow the blank at the end of a file, as in RocketMQ.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._lock = threading.Lock()
        self._free: deque[memoryview] = deque()
        try:
            self._free = deque(memoryview(mmap.mmap(-1, size)) for _ in range(count))
        except OSError as error:
            raise StoreUnavailable(
                f"the transient store pool needs {count:,} buffers of {size:,} bytes: "
                f"{reason_of(error)}, or lower transient_store_pool_size"
            ) from error

    @property
    def available(self) -> int:
        """Number of free buffers (``availableBufferNums``)."""
        return len(self._free)

    def borrow(self, size: int) -> memoryview | None:
        """Borrow a buffer for a file of ``size`` bytes; None if no buffer is free."""
        with self._lock:
            return self._free.popleft() if self._free and size == self.size else None

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            self._free.append(buffer)

    def close(self) -> None:
        """Release the free buffers."""
        with self._lock:
            self._free.clear()


class FileCopy:
    """A copy of a file in memory. It replaces the map if the process has no handler of SIGBUS.

    If the disk fails or is full, ``pwrite`` raises an error, but a write to a map would end the
    process. :meth:`keep` writes appended pages to the file. A later call of :meth:`keep` releases
    the memory of these pages; the view then has zeros there. Pages that :meth:`load` has read stay
    in memory.
    """

    def __init__(self, disk: Disk, descriptor: int, path: Path, size: int) -> None:
        self._disk = disk
        self._descriptor = descriptor
        self._path = path
        # With MAP_NORESERVE, unused memory does not count against the memory limit. Without this
        # flag, the copies of thousands of queue files could exceed the limit.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        options: dict[str, Any] = {"flags": flags}
        self._memory = mmap.mmap(-1, size, **options)
        self.view = memoryview(self._memory)
        # Release only pages after this position. Earlier pages are already released, or must stay
        # in memory because :meth:`load` has read them.
        self._done = 0

    def load(self, length: int) -> None:
        """Read the file's first ``length`` bytes into the memory, and never release their pages."""
        done = 0
        with self._disk.refusing(self._path):
            while done < length:
                at = self._disk.next_data(self._descriptor, done)
                if at is None or at >= length:
                    break
                data = self._disk.read(self._descriptor, min(_STEP, length - at), at)
                if not data:
                    break
                self.view[at : at + len(data)] = data
                done = at + len(data)
        self._done = max(self._done, -(-length // PAGESIZE) * PAGESIZE)

    def clear(self, start: int, length: int) -> None:
        """Set a range of the file to zero."""
        with self._disk.refusing(self._path):
            self._disk.write_all(self._descriptor, bytes(length), start)

    def keep(self, start: int, stop: int) -> None:
        """Write a range of the memory to the file. A failure poisons the store."""
        try:
            self._disk.write_all(self._descriptor, self.view[start:stop], start)
        except OSError as error:
            raise self._disk.failed(self._path, "write failed", error) from error
        if start - self._done >= _STEP:
            end = start - start % PAGESIZE
            if hasattr(mmap, "MADV_DONTNEED"):
                self._memory.madvise(mmap.MADV_DONTNEED, self._done, end - self._done)
            self._done = end

    def close(self) -> None:
        """Release the memory. If views of the memory exist, the memory is released together with
        the last view.
        """
        with contextlib.suppress(BufferError):
            self.view.release()
            self._memory.close()
