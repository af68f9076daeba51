"""One mapped file of the log or of a queue (``MappedFile``).

::

    0        flushed      committed      wrote          size
    |--on disk--|--in the file--|--in the buffer--|--zeros--|

Without a pool, written bytes are in the file at once, so committed equals wrote. With a buffer of
the transient store pool, a commit copies written bytes from the buffer to the file. Readers see
only committed bytes.

The thread that holds the put lock writes, and one thread syncs. Any number of threads read without
a lock, because a position advances only after all bytes before the new position are written.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.disk import write_buffers
from logquarry.disk.disk import Disk
from logquarry.disk.file_place import FilePlace
from logquarry.disk.service import abandon_in_children, stays
from logquarry.disk.write_buffers import FileCopy, TransientStorePool
from logquarry.errors import StoreUnavailable, UnreadableFile
from logquarry.format.arrays import Bytes
from logquarry.format.fields import PAGE_SIZE
from logquarry.log.lost_pages import lost
from logquarry.log.readable import CHUNK, UNREADABLE, ReadableMap, Unreadable, first_unreadable
from logquarry.text import counted

_STEP: Final = 8 << 20
_NO_BYTES: Final = memoryview(b"")


def _keep_nothing(start: int, stop: int) -> None:
    """Do nothing. A MappedFile whose buffer is not a FileCopy has this function as ``keep``."""


class MappedFile(FilePlace):
    """A mapped file, often in a :class:`MappedFileQueue`. Positions begin at 0 in each file.

    The constructor opens or creates the file. Even for an existing file, :attr:`wrote` and
    :attr:`flushed` start at 0, because only the frames show where the file's data ends.

    An access to a map raises SIGBUS if the disk fails. If this process has no handler of SIGBUS, it
    never accesses the map. The writer changes a copy in memory
    (:class:`~logquarry.disk.write_buffers.FileCopy`), and readers use system calls.

    Args:
        pool: lends a buffer for writes, if a buffer is free.
        exclusive: refuse a file that exists already.

    Attributes:
        buffer: the memory to which puts write: the map, the pool's buffer, or a copy. Read this
            attribute again before each write, because :meth:`commit` and :meth:`close` set it to
            other memory.
        address: memory address of the map's first byte; 0 if :attr:`buffer` is not the map.
        keep: writes a changed range to the file if :attr:`buffer` is a :class:`FileCopy`.
        store_timestamp: store time of the last message. The writer sets this attribute after its
            append.
        flushed_timestamp: store time of the last message that a flush has synced.
        guards_name: whether a flush fails if another program has deleted all names of the file.
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
        self.wrote = self.flushed = 0
        self.store_timestamp = self.flushed_timestamp = 0
        self.guards_name = False
        self._disk, self._health = disk, disk.health
        # Number of committed bytes, and the store time of the last committed message. Used only
        # while writes go to a pool's buffer.
        self._committed = self._committed_timestamp = 0
        self._sync_lock = threading.Lock()
        self.is_locked_in_memory = self._is_made = False
        self._descriptor = self._open(exclusive)
        self._copy: FileCopy | None = None
        copied = -1
        try:
            self._map = disk.map(self._descriptor, size)
            if not self._map.is_watched:
                self._copy = FileCopy(disk, self._descriptor, path, size)
                copied = os.dup(self._descriptor)
        except OSError as error:
            disk.discard(self._descriptor, path, is_new=self._is_made)
            raise disk.refused(path, error) from error
        self._view = memoryview(self._map)
        self._readable = self._view.toreadonly()
        self._map_address = write_buffers.address_of(self._map)
        self._probed: ReadableMap | None = None
        if self._copy is not None:
            self._probed = ReadableMap(str(path), self._map, size, descriptor=copied)
        elif not self._is_made:
            # If this process created the file, it needs no test for disk errors.
            self._probed = ReadableMap(str(path), self._map, size, may_shrink=False)
        self._pool = pool
        borrowed = None if pool is None else pool.borrow(size)
        self._pooled = borrowed
        self._use_buffer(borrowed)
        abandon_in_children(self)

    def _use_buffer(self, pooled: memoryview | None) -> None:
        copy = self._copy if pooled is None else None
        self.buffer = pooled or (self._view if copy is None else copy.view)
        self.address = self._map_address if self.buffer is self._view else 0
        self.keep = _keep_nothing if copy is None else copy.keep

    def _open(self, exclusive: bool) -> int:
        with self._disk.refusing(self.path):
            try:
                descriptor = None if exclusive else self._disk.open(self.path)
            except FileNotFoundError:
                descriptor = None
            self._is_made = descriptor is None
            if descriptor is None:
                return self._disk.make_file(self.path, self.size)
            try:
                if self._disk.size(descriptor) < self.size:
                    self._disk.allocate(descriptor, self.size)
            except OSError:
                self._disk.let_go(descriptor)
                raise
            return descriptor

    # ------------------------------------------------------------------------------- positions
    @property
    def committed(self) -> int:
        """Number of bytes that are in the file, and not only in a buffer. Only these bytes can be
        read.
        """
        return self.wrote if self._pooled is None else self._committed

    @property
    def room(self) -> int:
        """Number of bytes that can still be written."""
        return self.size - self.wrote

    @property
    def is_full(self) -> bool:
        """Whether no more bytes can be written."""
        return self.wrote >= self.size

    @property
    def is_transient(self) -> bool:
        """Whether writes go to a pool's buffer first."""
        return self._pooled is not None

    def set_positions(self, position: int) -> None:
        """Set the written and the flushed position of an existing file."""
        assert self._pooled is None, "only a loaded file has its positions set"
        assert 0 <= position <= self.size
        self.flushed = min(self.flushed, position)
        self.wrote = position
        self.flushed = position

    # ----------------------------------------------------------------------------------- write
    def append(self, data: bytes | bytearray | memoryview) -> int | None:
        """Write bytes after the last written byte. Return their position; None if the bytes do not
        fit.
        """
        at = self.wrote
        end = at + len(data)
        if end > self.size:
            return None
        self.buffer[at:end] = data
        self.keep(at, end)
        self.wrote = end
        return at

    def write(self, data: memoryview) -> None:
        """Write many bytes at the end, by a system call (or to the pool's buffer, if there is one).

        A write to the map would cause a page fault for each new page, and the operating system
        would first fill the page with zeros. These steps take longer than copying the bytes. A
        failed write poisons the store, and raises StoreUnavailable.
        """
        at, end = self.wrote, self.wrote + len(data)
        assert end <= self.size
        if self._pooled is not None:
            self._pooled[at:end] = data
        else:
            # Check the size first: if another program truncated the file, a write would extend the
            # file again.
            self._require_size()
            try:
                self._disk.write_all(self._descriptor, data, at)
            except OSError as error:
                raise self._disk.failed(self.path, "write failed", error) from error
        self.wrote = end

    def advance(self, count: int) -> None:
        """Advance :attr:`wrote` by ``count`` bytes that compiled code has already written to
        :attr:`buffer`.
        """
        end = self.wrote + count
        assert count >= 0 and end <= self.size
        self.keep(self.wrote, end)
        self.wrote = end

    def load(self, length: int) -> None:
        """Read the file's first bytes into :attr:`buffer`; see :meth:`FileCopy.load`."""
        if self._copy is not None:
            self._copy.load(length)

    def allocate(self) -> None:
        """Allocate all blocks, because on a full disk, a write to a hole of the map would end the
        process.
        """
        with self._disk.refusing(self.path):
            self._disk.allocate(self._descriptor, self.size)

    def clear_from(self, position: int) -> bool:
        """Overwrite all bytes after a position with zeros, and sync. Return whether bytes changed.

        The method skips holes of the file, and does not write to parts that already contain only
        zeros. So even a hole of 1 GiB takes almost no time.
        """
        self._health.require_writable()
        changed = False
        for at, stale in self._written_from(position):
            changed = True
            if self._copy is None:
                stale[:] = 0
            else:
                self._copy.clear(at, len(stale))
        if changed:
            self._disk.sync(self._descriptor, self.path)
        return changed

    def holds_data(self) -> bool:
        """Whether the file has a byte that is not 0. Bytes that another process wrote count too."""
        return next(self._written_from(0), None) is not None

    def _written_from(self, position: int) -> Iterator[tuple[int, Bytes]]:
        at = self._next_data(position)
        while at is not None and at < self.size:
            stop = min(at + _STEP, self.size)
            part = np.frombuffer(self._bytes(at, stop), np.uint8)
            if part.any():
                yield at, part
            at = self._next_data(stop)

    def _bytes(self, start: int, stop: int) -> memoryview:
        if self._copy is None or self._probed is None:
            return self._view[start:stop]
        return self._probed.window(start, stop - start)[: stop - start]

    def _next_data(self, position: int) -> int | None:
        with self._disk.refusing(self.path):
            return self._disk.next_data(self._descriptor, position)

    # -------------------------------------------------------------------------- commit and flush
    def commit(self, least_pages: int = 0) -> int:
        """Write the pool's buffer to the file, and return the committed position.

        The method writes only if at least ``least_pages`` pages are not committed, or if the file
        is full. When a full file is committed, the file returns its buffer to the pool. A failed
        write poisons the store.
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
                    raise self._disk.failed(self.path, "commit failed", error) from error
                self._committed_timestamp = timestamp
                self._committed = stop
            if self._committed >= self.size:
                self._return_buffer()
            return self.committed

    def flush(self, least_pages: int = 0) -> int:
        """Sync the committed bytes, and return the flushed position.

        The method syncs only if at least ``least_pages`` pages are not synced, or if the file is
        full. Raises StoreUnavailable if this sync or an earlier sync failed.
        """
        # Check the health first, because in a forked child the lock may be held for ever.
        self._health.require_writable()
        with self._sync_lock:
            # Read the store time before the position. In the other order, the time could belong to
            # a message that this sync does not write.
            is_pooled = self._pooled is not None
            timestamp = self._committed_timestamp if is_pooled else self.store_timestamp
            target = self.committed
            if target > self.flushed and self._is_due(self.flushed, target, least_pages):
                self._disk.sync(self._descriptor, self.path)
                self.require_pages()
                if self.guards_name:
                    self._require_name()
                self.flushed = target
                self.flushed_timestamp = timestamp
            assert self.flushed <= self.committed <= self.wrote
            return self.flushed

    def _is_due(self, done: int, target: int, least_pages: int) -> bool:
        # Like Java's isAbleToFlush and isAbleToCommit, compare page numbers, not numbers of bytes.
        return self.is_full or target // PAGE_SIZE - done // PAGE_SIZE >= least_pages

    def require_pages(self) -> None:
        """Poison the store if the map lost a page, or if another program truncated the file."""
        if self._copy is not None:
            self._require_size()
        if lost() and (blocks := self._map.lost_blocks()):
            raise self._health.poison(
                f"{self.path}: lost {counted(len(blocks), 'block')} from position "
                f"{blocks[0].offset} on (SIGBUS): the disk is full or fails, or another program "
                "truncated the file"
            )

    def _require_size(self) -> None:
        try:
            size = self._disk.size(self._descriptor)
        except OSError as error:
            raise self._health.poison(f"{self.path}: {error.strerror or error}") from error
        if size < self.size:
            raise self._health.poison(
                f"{self.path}: another program truncated the file to {size} of {self.size} bytes"
            )

    def _require_name(self) -> None:
        try:
            is_linked = self._disk.is_linked(self._descriptor)
        except OSError as error:
            raise self._health.poison(f"{self.path}: {error.strerror or error}") from error
        if not is_linked:
            raise self._health.poison(
                f"{self.path}: another program deleted the file while it was open"
            )

    def _return_buffer(self) -> None:
        pooled = self._pooled
        # First make ``buffer`` the map, because another thread may read ``buffer`` at any time.
        self._use_buffer(None)
        self._pooled = None
        if pooled is not None and self._pool is not None:
            self._pool.give_back(pooled)

    # ------------------------------------------------------------------------------------ read
    def select(
        self, position: int, size: int | None = None, most: int | None = None
    ) -> memoryview | None:
        """Return the ``size`` bytes after a position; None if not all of these bytes are readable.

        Without ``size``, return the readable bytes after the position, at most ``most`` bytes; None
        if no byte is readable. The returned view stays valid after the file is closed or deleted.
        """
        if self._health.is_gone:
            self._health.require_readable()
        # Each read of a message runs this line. To save a call, the line repeats the code of
        # ``committed``.
        end = self.wrote if self._pooled is None else self._committed
        if size is not None:
            stop = position + size
            if stop > end:
                return None
            end = stop
        elif most is not None:
            end = min(end, position + most)
        if not 0 <= position < end:
            return None
        if (probed := self._probed) is not None:
            found = probed.window(position, end - position)[: end - position]
        else:
            found = self._readable[position:end]
        if not found:
            # The store or retention has closed the file.
            self._health.require_readable()
            return None
        return found

    def select_around(self, position: int, size: int) -> tuple[int, memoryview]:
        """Return a readable part of the file around a range: the part's position and its bytes.

        If this process created the file, the part has all readable bytes. Otherwise, the part has
        only bytes that were tested for disk errors. If the bytes must be copied, the copy has at
        least CHUNK bytes. The copy is shorter only if the file ends earlier.
        """
        probed, end = self._probed, self.committed
        if probed is None:
            found = self.select(0)
            return 0, _NO_BYTES if found is None else found
        if self._health.is_gone:
            self._health.require_readable()
        size = min(size if self._copy is None else max(size, CHUNK), end - position)
        if position < 0 or size <= 0:
            return position, _NO_BYTES
        found = probed.window(position, size)
        start = position
        if self._copy is None and not first_unreadable(probed.unreadable, position, size):
            start = probed.good_start(position)
            found = probed.window(start, position - start + size)
        return start, found[: end - start]

    @property
    def unreadable(self) -> Sequence[Unreadable]:
        """The unreadable ranges found so far."""
        return () if self._probed is None else self._probed.unreadable

    def require_readable(self, position: int, size: int) -> None:
        """Raise UnreadableFile if the disk cannot read a range. Call this method before a write: to
        change a page of the map, the operating system must first read the page from the disk.
        """
        if (probed := self._probed) is not None:
            probed.window(position, size)
            if (fault := first_unreadable(probed.unreadable, position, size)) is not None:
                raise UnreadableFile(str(self.path), fault.offset, fault.brief, kind=UNREADABLE)

    # -------------------------------------------------------------------------------- life
    def is_named(self) -> bool:
        """Whether the path still leads to this file. Raises OSError if the disk fails."""
        return self._descriptor >= 0 and self._disk.is_named(self._descriptor, self.path)

    def warm(self) -> None:
        """Load all pages and lock them in memory, if possible (``warmMappedFile``)."""
        write_buffers.populate(self._map_address, self.size)
        self.is_locked_in_memory = write_buffers.lock(self._map_address, self.size)

    def unlock(self) -> None:
        """Unlock the pages of a full file."""
        if self.is_locked_in_memory:
            self.is_locked_in_memory = False
            write_buffers.unlock(self._map_address, self.size)

    def close(self) -> None:
        """Close the file. Results of :meth:`select` stay readable; later calls of :meth:`select`
        return None.

        Bytes that are not flushed stay in the page cache, and the operating system writes them to
        the disk later. Do not call this method while compiled code writes at :attr:`address`.
        """
        if self._descriptor < 0:
            return
        self.unlock()
        with contextlib.suppress(StoreUnavailable):
            # After a failure the store is poisoned, and the error was logged.
            self.commit()
        if self._pooled is not None:
            self._return_buffer()
        descriptor, self._descriptor = self._descriptor, -1
        stays(self)
        self._let_go()
        with contextlib.suppress(BufferError):
            # A reader still has a view of the map. The map is released when the last view is
            # released.
            self._map.close()
        self._disk.let_go(descriptor)

    def _let_go(self) -> None:
        if self._probed is not None:
            self._probed.let_go()
        views = (self._view, self._readable)
        self.buffer = self._view = self._readable = _NO_BYTES
        self.address = self._map_address = 0
        for view in views:
            with contextlib.suppress(BufferError):
                view.release()
        if self._copy is not None:
            self._copy.close()
            self._probed = None

    def delete(self) -> None:
        """Close the file, and delete the file durably."""
        self.close()
        self._disk.remove(self.path)

    def abandon_in_child(self) -> None:
        """Release the file in a forked child, because the child has no map."""
        write_buffers.leave_mapped(self._map)
        self.buffer = self._view = self._readable = _NO_BYTES
        self.address = self._map_address = 0
        self.is_locked_in_memory = False
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)
