"""Compares all queues of a store with the log: those in files, and those in RocksDB (RocketMQ 5).

With ``rocksdbCQDoubleWriteEnable``, a store has each queue twice, in files and in RocksDB. The
audit then compares both with the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from logquarry.errors import CorruptFile
from logquarry.format.queue_entry import ENTRY
from logquarry.log.follow import DispatchRequests, Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import is_installed
from logquarry.read.log_queues import QueueKey, epoch_start
from logquarry.read.queue import Queue
from logquarry.read.rocksdb_queue import QueueDb, RocksQueue, rocksdb_folders
from logquarry.repair.audit.batch_queues import BatchQueuesAudit
from logquarry.repair.audit.differences import Difference, EntryGroup, LostSpans, queue_name
from logquarry.repair.audit.queues import QueuesAudit, SeenMessages
from logquarry.write.queue_writer import MOST_OFFSET, QueuePart

_UNREADABLE: Final = "bad_rocksdb"
Parts = Mapping[QueueKey, QueuePart]


def wrong_end(database: QueueDb, key: QueueKey, log_start: int) -> str | None:
    """Return why the end of a queue in RocksDB is wrong; None if it can be right.

    If all messages of the queue have expired, only an impossible end is wrong.
    """
    last = database.bounds[key][1][0]
    if last <= MOST_OFFSET and not database.lacks_last(key, log_start):
        return None
    return f"{queue_name(key)}: its end is {last + 1}, and it has no entry {last}"


class StoreQueuesAudit:
    """Compares all queues of a store with its log; has the methods of :class:`QueuesAudit`."""

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        self._files = QueuesAudit(layout)
        self._batch = BatchQueuesAudit(layout)
        self._databases: list[RocksQueuesAudit] = []
        self._broken: list[Difference] = []
        self._folders = rocksdb_folders(layout)
        for folder in self._folders if is_installed() else ():
            try:
                self._databases.append(RocksQueuesAudit(layout, QueueDb(layout, folder)))
            except CorruptFile as error:
                self._broken.append(Difference(_UNREADABLE, folder, 0, error.reason))

    @property
    def entries(self) -> int:
        """Number of entries compared."""
        return sum(one.entries for one in (self._files, self._batch, *self._databases))

    @property
    def queues(self) -> int:
        """Number of queues on the disk; a queue in files and in RocksDB counts once."""
        names = {*self._layout.queue_names}.union(*(one.names for one in self._databases))
        return len(names) + len(self._layout.batch_queue_names)

    def add(self, followed: Followed, parts: Parts) -> None:
        """Compare the frames of a run with their entries."""
        self._files.add(followed, parts)
        self._batch.add(followed, parts)
        for audit in list(self._databases):
            try:
                audit.add(followed, parts)
            except CorruptFile as error:
                self._drop(audit, error)

    def is_next(self, queues: Mapping[QueueKey, tuple[int, int]]) -> bool:
        """Whether a Spark task's result suffices for these queues. False if the store has queues in
        RocksDB, because a task compares only queues in files.
        """
        return not self._databases and self._files.is_next(queues)

    def add_sound(self, queues: Mapping[QueueKey, tuple[int, int]]) -> None:
        """See :meth:`QueuesAudit.add_sound`."""
        self._files.add_sound(queues)

    def finish(self, log_end: int, lost: LostSpans) -> Iterator[Difference]:
        """Yield all differences, queue by queue; call this after the whole log is read."""
        # Each audit (of files, and of each RocksDB) finds the same differences in the log: report
        # each once.
        in_log: set[Difference] = set()
        for found in self._differences(log_end, lost):
            if found.kind in ("new_epoch", "harmed_queue_offset", "harmed_queue_id"):
                if found in in_log:
                    continue
                in_log.add(found)
            yield found

    def _differences(self, log_end: int, lost: LostSpans) -> Iterator[Difference]:
        is_crash = self._files.is_crash(log_end)
        yield from self._files.differences(log_end, lost, is_explained=is_crash)
        yield from self._batch.differences(log_end, lost, is_explained=is_crash)
        for audit in list(self._databases):
            try:
                yield from audit.finish(log_end, lost)
            except CorruptFile as error:
                self._drop(audit, error)
        yield from self._broken
        if not is_installed():
            for folder in self._folders:
                reason = "its queues were not compared: pip install 'logquarry[rocksdb]'"
                yield Difference(_UNREADABLE, folder, 0, reason, is_explained=True)

    def _drop(self, audit: RocksQueuesAudit, error: CorruptFile) -> None:
        self._databases.remove(audit)
        self._broken.append(Difference(_UNREADABLE, audit.folder, 0, error.reason))


class RocksQueuesAudit(QueuesAudit):
    """Compares the queues in one RocksDB with the log."""

    def __init__(self, layout: StoreLayout, database: QueueDb) -> None:
        self.folder = database.folder
        self.names = set(database.bounds)
        self._db = database
        super().__init__(layout)
        self._elsewhere = {*layout.queue_names, *layout.batch_queue_names}

    def _find_names(self) -> set[QueueKey]:
        return self.names

    def _queue(self, key: QueueKey) -> Queue:
        return RocksQueue(self._db, key, self.layout.commit_log.start, None)

    def add(self, followed: Followed, parts: Parts) -> None:
        """Compare the frames of a run with their entries. In RocksDB, entries also have a store
        time.
        """
        super().add(followed, {k: v for k, v in parts.items() if k[0] not in self._others.batch})

    def _add(self, key: QueueKey, part: QueuePart, requests: DispatchRequests) -> QueuePart:
        part = super()._add(key, part, requests)
        seen = self._seen[key]
        if not isinstance(seen.queue, RocksQueue) or "queue_entry_wrong" in seen.groups:
            return part
        # If the topic was recreated within the run, the queue has only the later messages.
        start = epoch_start(part.offsets)
        offsets = part.offsets[start:]
        times = requests.store_timestamp[part.rows][start:]
        places = requests.physical_offset[part.rows][start:]
        first, stop = int(offsets.min()), min(int(offsets.max()) + 1, seen.queue.max_offset)
        for there, entries in self._db.entries(*key, first, stop):
            _, ours, theirs = np.intersect1d(offsets, there, return_indices=True)
            differs = np.zeros(len(offsets), np.bool_)
            differs[ours] = times[ours] != entries["store_timestamp"][theirs]
            # Damage in a frame's queue id can make its message look like one of this queue.
            differs[ours] &= places[ours] == entries["physical_offset"][theirs]
            seen.note("queue_entry_wrong", offsets, differs, "has another store time")
        return part

    def finish(self, log_end: int, lost: LostSpans) -> Iterator[Difference]:
        """Yield all differences, queue by queue; call this after the whole log is read."""
        dispatched, crashed = self._db.dispatched_end, self.layout.has_abort
        # The newest entries of a broker are only in memory. So a crash loses them, and after its
        # next start the broker makes them again from the log.
        is_explained = crashed and self._is_dispatched(dispatched, -1)
        if dispatched > log_end:
            reason = f"it has the messages up to {dispatched}, but the log ends at {log_end}"
            yield Difference("queue_ahead", self.folder, 0, reason, is_explained=crashed)
        yield from self.differences(log_end, lost, is_explained=is_explained)

    def _missing(self, key: QueueKey, reason: str, *, is_explained: bool) -> Iterator[Difference]:
        if key not in self._elsewhere:
            reason = f"RocksDB lacks it, and {reason}"
            place = self._place_of(key)
            yield Difference("queue_missing", place, 0, reason, is_explained=is_explained)

    def _spare(
        self, queue: Queue, seen: SeenMessages, log_end: int, lost: LostSpans
    ) -> Iterator[Difference]:
        yield from super()._spare(queue, seen, log_end, lost)
        key = queue.key
        if seen.messages and queue.max_offset <= seen.next_offset:
            return
        reason = wrong_end(self._db, key, self.layout.commit_log.start)
        if reason is not None:
            yield Difference("queue_end_wrong", self.folder, 0, reason)

    def _place(self, queue: Queue, offset: int) -> tuple[str, int]:
        return self._place_of(queue.key), 0

    def _place_of(self, key: QueueKey) -> str:
        return f"{self.folder}/{key[0]}/{key[1]}"

    def _difference(self, queue: Queue, group: EntryGroup) -> Difference:
        found = group.at(self.folder, 0, ENTRY.size)
        name = queue_name(queue.key)
        return Difference(found.kind, found.file, 0, f"{name}: {found.reason}", found.length)
