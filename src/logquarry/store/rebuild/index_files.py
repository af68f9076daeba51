"""The index, built in bulk by a thread of its own: its work is waiting for memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from logquarry.format.index import IndexShape
from logquarry.scan.follow import Followed
from logquarry.store.disk.disk import Disk
from logquarry.store.dispatch.index_writer import IndexFileWriter, IndexWriter

_MOST_WAITING: Final = 8


class IndexFiles:
    """The index of a store, built. Not for two threads at once.

    Args:
        disk: what it is on.
        folder: where it goes.
        shape: slots and entries of each file.
        clock: names files, in milliseconds.
        counts_keys: see :class:`~logquarry.store.dispatch.index_writer.IndexFileWriter`.

    Attributes:
        files: how many there are,
        keys: and keys in all of them.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        shape: IndexShape,
        clock: Callable[[], int],
        *,
        counts_keys: bool = False,
    ) -> None:
        disk.make_folders(folder)
        self.files = 0
        self.keys = 0
        self._writer = IndexWriter(
            *(disk, folder, shape), clock=clock, filled=self._filled, counts_keys=counts_keys
        )
        self._thread = ThreadPoolExecutor(1, "rebuild-index")
        self._waiting: deque[Future[None]] = deque()

    def add(self, run: Followed) -> None:
        """The keys of some more frames.

        Raises:
            StoreUnavailable: if the disk fails, or is full: with these or with earlier ones.
        """
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft().result()
        requests = run.requests
        self._waiting.append(
            self._thread.submit(
                self._writer.put,
                requests.physical_offset,
                requests.store_timestamp,
                # What follows the log uses them again for its next run.
                run.key_hashes.copy(),
                run.key_numbers.copy(),
            )
        )

    def _filled(self, file: IndexFileWriter) -> None:
        file.flush()
        self._count(file)
        file.file.close()

    def _count(self, file: IndexFileWriter) -> None:
        self.files += 1
        self.keys += file.header.entry_count - 1

    def finish(self) -> None:
        """Wait until all of it is on the disk.

        Raises:
            StoreUnavailable: if the disk fails.
        """
        while self._waiting:
            self._waiting.popleft().result()
        if self._writer.last is not None:
            self._writer.last.flush()
            self._count(self._writer.last)

    def close(self) -> None:
        """End the thread; what it has not begun is left."""
        self._thread.shutdown(cancel_futures=True)
        self._writer.close()
