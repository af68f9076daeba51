"""The index of a store that is written: its files to the disk, and back when they are lost.

A file that is full is synced and closed by the thread that flushes, and only then the checkpoint
says so (``IndexService.flush``). The one that is written to is synced with the thorough flushes.

A Java store that is opened on this one deletes index files that are newer than the checkpoint,
before the lock refuses it: each that the checkpoint does not cover has a second name, and comes
back (:mod:`logquarry.store.disk.name_guard`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from logquarry.files.layout import INDEX
from logquarry.format.index import IndexShape
from logquarry.store.disk.checkpoint_file import CheckpointFile
from logquarry.store.disk.disk import Disk
from logquarry.store.disk.name_guard import NameGuard
from logquarry.store.dispatch.index_writer import IndexFileWriter, IndexWriter


class IndexKeeper:
    """Keeps the index files of a store. Written by one thread, flushed by any.

    Args:
        disk: what they are on.
        root: the store.
        shape: slots and entries of each.
        checkpoint: gets the time up to which the index is on the disk.
        clock: names new files, in milliseconds.
        sync_log: brings the log to the disk. The checkpoint is not to say that the index has what
            the log may lose.
        counts_keys: see :class:`~logquarry.store.dispatch.index_writer.IndexFileWriter`.

    Attributes:
        writer: what the dispatcher writes to.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        shape: IndexShape,
        checkpoint: CheckpointFile,
        clock: Callable[[], int],
        sync_log: Callable[[], object] = lambda: None,
        *,
        counts_keys: bool = False,
    ) -> None:
        folder = root / INDEX
        self._checkpoint = checkpoint
        self._sync_log = sync_log
        self._guard = NameGuard(disk)
        self._guard.restore([folder])
        self._guarded: IndexFileWriter | None = None
        self._filled: deque[IndexFileWriter] = deque()
        # Users flush beside the thread that does it now and then.
        self.writer = IndexWriter(
            *(disk, folder, shape),
            clock=clock,
            filled=self._filled.append,
            counts_keys=counts_keys,
        )
        self.guard()

    def guard(self) -> None:
        """Give the file that is written to its second name; after each run of the dispatcher."""
        last = self.writer.last
        if last is not None and last is not self._guarded:
            self._guarded = last
            self._guard.guard(last.file.path)

    @property
    def held(self) -> frozenset[str]:
        """Names of the files that are written to, or not known to be on the disk yet.

        One that is not among them never is again.
        """
        last = self.writer.last
        held = list(self._filled)
        if last is not None:
            held.append(last)
        return frozenset(one.file.path.name for one in held)

    def check(self) -> None:
        """Give files that somebody deleted their names back."""
        self._guard.check()

    def flush(self, least_pages: int = 0) -> None:
        """Sync and close what is full; with 0 also sync the file that is written to.

        Raises:
            StoreUnavailable: if a sync failed, now or before.
        """
        while self._filled:
            full = self._filled[0]
            self._sync_log()
            full.flush()
            self._guard.check()
            if full.header.end_timestamp > 0:
                self._checkpoint.index_timestamp = full.header.end_timestamp
                # Before the second name goes: then Java lets the file be.
                self._checkpoint.flush()
            self._guard.release(full.file.path)
            # Ctrl-C may come between: what is in the list is open.
            self._filled.popleft()
            full.file.close()
        last = self.writer.last
        if least_pages == 0 and last is not None:
            last.flush()

    def close(self) -> None:
        """Close the files; what is not flushed is with the kernel."""
        self._guard.close()
        for full in self._filled:
            full.file.close()
        self.writer.close()
