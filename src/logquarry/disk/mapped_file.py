"""Buffers in memory that the log is written to before it is committed (``TransientStorePool``).

Writing to memory of its own, a put never waits for the page cache; what is not committed yet is
lost with the process. Only for asynchronous flushing, and not on a slave.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.disk import open_files
from logquarry.disk.disk import Disk
from logquarry.disk.lifetime import abandon_in_children, stays
from logquarry.errors import StoreUnavailable


class TransientStorePool:
    """``count`` buffers of ``size`` bytes; a file borrows one until it is full.

    A file that finds none left is written through its map. What a file wrote into a buffer before
    is still in it when the next one takes it: each file covers all of its own bytes, or leaves
    stale ones behind an end-of-file blank, as RocketMQ does.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._lock = threading.Lock()
        self._free = deque(memoryview(mmap.mmap(-1, size)) for _ in range(count))

    @property
    def available(self) -> int:
        """Buffers that are free (``availableBufferNums``)."""
        return len(self._free)

    def borrow(self, size: int) -> memoryview | None:
        """A buffer for a file of ``size`` bytes, None if none is left."""
        with self._lock:
            return self._free.popleft() if self._free and size == self.size else None

    def give_back(self, buffer: memoryview) -> None:
        """Take a buffer back that no file writes to any more."""
        with self._lock:
            self._free.append(buffer)

    def close(self) -> None:
        """Let go of the free buffers."""
        with self._lock:
            self._free.clear()


# --------------------------------------------------------------------------------------------------
# One file of fixed size, written through its map, and its three positions (``MappedFile``).
#
# ::
#
#     0        flushed      committed      wrote          size
#     |--on disk--|--in the file--|--in the buffer--|--zeros--|
#
# Without a pool, what is written is in the file at once: committed is wrote. With a buffer of the
# transient store pool, writes go to that buffer and a commit moves them to the file; readers see
# what is committed.
#
# One thread writes at a time (the log's put lock), one syncs, any number reads: a position moves
# only after the bytes before it are there.

PAGE_SIZE: Final = 4096
"""RocketMQ's ``OS_PAGE_SIZE``, which the least pages of a flush count."""

_STEP: Final = 8 << 20
_NO_BYTES: Final = memoryview(b"")


class MappedFile:
    """A file of a :class:`MappedFileQueue`. Positions are within the file.

    Opens the file if it is there, and makes it if not. Positions are 0 either way: what was
    written before, only a walk over the bytes can tell.

    Args:
        disk: what it is on.
        path: where it is.
        base: offset of its first byte in the joined space of the queue's files.
        size: its bytes.
        pool: gives the buffer that writes go to, if it has one left.
        exclusive: refuse a file that is there already.

    Attributes:
        wrote: bytes that are written. Set by :meth:`append` and :meth:`advance`.
        flushed: bytes that are on the disk.
        buffer: where the next bytes go, at their position: the map, or the pool's buffer. Ends
            with the file: look at it anew for each write.
        address: of the map's first byte, for kernels; 0 while a pool's buffer is in front of it.
        store_timestamp: store time of the last message, set by the writer after its append.
        flushed_timestamp: the same of what is on the disk.
        guards_name: whether a flush is to fail if no name leads to the file any more.
        is_locked_in_memory: whether :meth:`warm` keeps the pages in memory.

    Raises:
        StoreUnavailable: if it cannot be opened or made.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        base: int,
        size: int,
        *,
        pool: TransientStorePool | None = None,
        exclusive: bool = False,
    ) -> None:
        self.path = path
        self.base = base
        self.size = size
        self.wrote = 0
        self.flushed = 0
        self.store_timestamp = 0
        self.flushed_timestamp = 0
        self.guards_name = False
        self._disk = disk
        self._health = disk.health
        self._descriptor = -1
        # What is committed, and the store time of it, where a buffer is in front of the map.
        self._committed = 0
        self._committed_timestamp = 0
        self._sync_lock = threading.Lock()
        self.is_locked_in_memory = False
        self._descriptor = self._open(exclusive)
        try:
            self._map = disk.map(self._descriptor, size)
        except OSError as error:
            disk.let_go(self._descriptor)
            raise disk.refused(path, error) from error
        self._view = memoryview(self._map)
        self._readable = self._view.toreadonly()
        self._map_address = open_files.address_of(self._map)
        self._pool = pool
        borrowed = None if pool is None else pool.borrow(size)
        self._pooled = borrowed
        self.buffer = self._view if borrowed is None else borrowed
        self.address = self._map_address if borrowed is None else 0
        abandon_in_children(self)

    def _open(self, exclusive: bool) -> int:
        if exclusive:
            return self._disk.make_file(self.path, self.size)
        try:
            descriptor = self._disk.open(self.path)
        except FileNotFoundError:
            return self._disk.make_file(self.path, self.size)
        except OSError as error:
            raise self._disk.refused(self.path, error) from error
        try:
            if self._disk.size(descriptor) < self.size:
                self._disk.allocate(descriptor, self.size)
        except OSError as error:
            self._disk.let_go(descriptor)
            raise self._disk.refused(self.path, error) from error
        return descriptor

    # ------------------------------------------------------------------------------- positions
    @property
    def committed(self) -> int:
        """Bytes that are in the file, and so can be read."""
        return self.wrote if self._pooled is None else self._committed

    @property
    def room(self) -> int:
        """Bytes that can still be written."""
        return self.size - self.wrote

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be written."""
        return self.wrote >= self.size

    @property
    def is_transient(self) -> bool:
        """Whether writes go to a pool's buffer first."""
        return self._pooled is not None

    def set_positions(self, position: int) -> None:
        """State that the bytes before a position are written and on the disk, and no more."""
        assert self._pooled is None, "only a loaded file is told its positions"
        assert 0 <= position <= self.size
        self.flushed = min(self.flushed, position)
        self.wrote = position
        self.flushed = position

    # ----------------------------------------------------------------------------------- write
    def append(self, data: bytes | bytearray | memoryview) -> int | None:
        """Write bytes at the end: the position where they are, None when they do not fit."""
        at = self.wrote
        end = at + len(data)
        if end > self.size:
            return None
        self.buffer[at:end] = data
        self.wrote = end
        return at

    def advance(self, count: int) -> None:
        """Take what a kernel wrote into :attr:`buffer` at :attr:`wrote` as written."""
        end = self.wrote + count
        assert count >= 0 and end <= self.size
        self.wrote = end

    def allocate(self) -> None:
        """Give all of the file its blocks, so that it may be written through the map.

        Java makes sparse files, on which a full disk is a crash.

        Raises:
            StoreUnavailable: if there is no room.
        """
        try:
            self._disk.allocate(self._descriptor, self.size)
        except OSError as error:
            raise self._disk.refused(self.path, error) from error

    def clear_from(self, position: int) -> bool:
        """Make zeros of what stands behind a position, on the disk too; whether anything stood.

        Bytes that are zeros are only read, and holes not even that: a tail of a gigabyte costs
        nothing where it was never written.
        """
        self._health.require_writable()
        changed = False
        for stale in self._written_from(position):
            stale[:] = 0
            changed = True
        if changed:
            self._disk.sync(self._descriptor, self.path)
        return changed

    def holds_data(self) -> bool:
        """Whether any byte of the file is not 0, wherever its positions are."""
        return next(self._written_from(0), None) is not None

    def _written_from(self, position: int) -> Iterator[npt.NDArray[np.uint8]]:
        """The parts of the file behind a position that are not zeros, in steps."""
        at = self._next_data(position)
        while at is not None and at < self.size:
            stop = min(at + _STEP, self.size)
            part = np.frombuffer(self._view[at:stop], np.uint8)
            if part.any():
                yield part
            at = self._next_data(stop)

    def _next_data(self, position: int) -> int | None:
        try:
            return self._disk.next_data(self._descriptor, position)
        except OSError as error:
            raise self._disk.refused(self.path, error) from error

    # -------------------------------------------------------------------------- commit and flush
    def commit(self, least_pages: int = 0) -> int:
        """Move what is in the pool's buffer to the file: the committed position after it.

        Only if ``least_pages`` pages are due, or the file is full. The buffer of a full file goes
        back to the pool.

        Raises:
            StoreUnavailable: if the file cannot be written; the store is poisoned then.
        """
        self._health.require_writable()
        with self._sync_lock:
            pooled = self._pooled
            if pooled is None:
                return self.wrote
            timestamp = self.store_timestamp
            start, stop = self._committed, self.wrote
            if stop > start and self._is_due(start, stop, least_pages):
                try:
                    self._disk.write_all(self._descriptor, pooled[start:stop], start)
                except OSError as error:
                    reason = f"{self.path}: commit failed: {error.strerror or error}"
                    raise self._health.poison(reason) from error
                self._committed_timestamp = timestamp
                self._committed = stop
            if self._committed >= self.size:
                self._return_buffer()
            return self.committed

    def flush(self, least_pages: int = 0) -> int:
        """Wait until what is committed is on the disk: the flushed position after it.

        Only if ``least_pages`` pages are due, or the file is full. Many bytes or few, it is one
        fdatasync, and none where all is flushed.

        Raises:
            StoreUnavailable: if the sync failed, now or before; the position stays.
        """
        # Before the lock: in a forked child nobody would ever let go of it.
        self._health.require_writable()
        with self._sync_lock:
            # The time before the position: it is that of bytes that this sync covers.
            timestamp = self.store_timestamp
            if self._pooled is not None:
                timestamp = self._committed_timestamp
            target = self.committed
            if target > self.flushed and self._is_due(self.flushed, target, least_pages):
                self._disk.sync(self._descriptor, self.path)
                if self.guards_name:
                    self._require_name()
                self.flushed = target
                self.flushed_timestamp = timestamp
            assert self.flushed <= self.committed <= self.wrote
            return self.flushed

    def _is_due(self, done: int, target: int, least_pages: int) -> bool:
        # As isAbleToFlush and isAbleToCommit count: pages begun, not pages' worth of bytes.
        return self.is_full or target // PAGE_SIZE - done // PAGE_SIZE >= least_pages

    def _require_name(self) -> None:
        """Refuse to call durable what no name leads to.

        Only where :mod:`logquarry.disk.queue_folders` could give it no second one.
        """
        try:
            is_linked = self._disk.is_linked(self._descriptor)
        except OSError as error:
            raise self._health.poison(f"{self.path}: {error.strerror or error}") from error
        if not is_linked:
            raise self._health.poison(f"{self.path}: somebody deleted it while it was written")

    def _return_buffer(self) -> None:
        pooled = self._pooled
        # The map first: whoever looks at the buffer in between finds the one or the other.
        self.buffer, self.address = self._view, self._map_address
        self._pooled = None
        if pooled is not None and self._pool is not None:
            self._pool.give_back(pooled)

    # ------------------------------------------------------------------------------------ read
    def select(self, position: int, size: int | None = None) -> memoryview | None:
        """``size`` readable bytes from a position, or all there are; None if they are not there.

        They stay good as long as somebody holds them, also after the file was closed or deleted.
        """
        if self._health.is_gone:
            self._health.require_readable()
        # As `committed` has it: this is asked for each message that is read.
        end = self.wrote if self._pooled is None else self._committed
        if size is not None:
            stop = position + size
            if stop > end:
                return None
            end = stop
        if not 0 <= position < end:
            return None
        found = self._readable[position:end]
        if not found:
            # The file was closed in between: with the store, or because it was deleted.
            self._health.require_readable()
            return None
        return found

    # -------------------------------------------------------------------------------- life
    def is_named(self) -> bool:
        """Whether the file is still the one at its path."""
        try:
            return self._disk.is_named(self._descriptor, self.path)
        except OSError:
            return False

    def warm(self) -> None:
        """Bring all pages into memory, writable, and keep them there, as far as the system lets.

        So that no put waits for a page fault (``warmMappedFile``).
        """
        open_files.populate(self._map_address, self.size)
        self.is_locked_in_memory = open_files.lock(self._map_address, self.size)

    def unlock(self) -> None:
        """Let the system have the pages again; when the file is full nobody writes to them."""
        if self.is_locked_in_memory:
            self.is_locked_in_memory = False
            open_files.unlock(self._map_address, self.size)

    def close(self) -> None:
        """Let go of the file. What was selected stays good; nothing more can be asked.

        Bytes that are not flushed are with the kernel, which writes them when it likes. Not while
        a kernel writes at :attr:`address`: the map is gone then.
        """
        if self._descriptor < 0:
            return
        self.unlock()
        with contextlib.suppress(StoreUnavailable):
            # The store is poisoned then, and whoever cares has heard of it.
            self.commit()
        if self._pooled is not None:
            self._return_buffer()
        descriptor, self._descriptor = self._descriptor, -1
        stays(self)
        self._let_go()
        with contextlib.suppress(BufferError):
            # Somebody reads from it still: then the map goes when the last view does.
            self._map.close()
        self._disk.let_go(descriptor)

    def _let_go(self) -> None:
        views = (self._view, self._readable)
        self.buffer = self._view = self._readable = _NO_BYTES
        self.address = self._map_address = 0
        for view in views:
            with contextlib.suppress(BufferError):
                view.release()

    def delete(self) -> None:
        """Close the file and take its name away, durably.

        Raises:
            StoreUnavailable: if that cannot be done.
        """
        self.close()
        self._disk.remove(self.path)

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.disk.lifetime`. The map is not there, and is not unmapped."""
        open_files.leave_mapped(self._map)
        self.buffer = self._view = self._readable = _NO_BYTES
        self.address = self._map_address = 0
        self.is_locked_in_memory = False
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)
