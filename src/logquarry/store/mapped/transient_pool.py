"""Buffers in memory that the log is written to before it is committed (``TransientStorePool``).

Writing to memory of its own, a put never waits for the page cache; what is not committed yet is
lost with the process. Only for asynchronous flushing, and not on a slave.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque


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
