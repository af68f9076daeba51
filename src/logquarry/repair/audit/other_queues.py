"""Compares all queues of a store with the log: consume queues, batch queues, and queues in RocksDB.
Only RocketMQ 5 has batch queues and queues in RocksDB.

With ``rocksdbCQDoubleWriteEnable``, a store has each queue twice, in files and in RocksDB. The
audit then compares both copies with the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np

from logquarry.errors import CorruptFile
from logquarry.format.arrays import Bools, Int64
from logquarry.format.batch import ENTRY_SIZE
from logquarry.format.queue_entry import ENTRY
from logquarry.log.follow import DispatchRequests, Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.rocksdb import is_installed
from logquarry.log.store_files import BATCH_QUEUE
from logquarry.read.batch_queue import (
    BATCH_DTYPE,
    BatchEntries,
    BatchQueue,
    is_batch_written,
    own_messages,
    queue_entry_of,
)
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import OtherQueues
from logquarry.read.log_queues import QueueKey, epoch_start
from logquarry.read.queue import Queue
from logquarry.read.rocksdb_queue import QueueDb, RocksQueue, rocksdb_folders
from logquarry.repair.audit.differences import (
    EntryGroup,
    SpanSet,
    and_more,
    queue_name,
)
from logquarry.repair.audit.first_difference import BATCH_FIELDS, same_batches
from logquarry.repair.audit.harmed_frames import KIND as HARMED_TYPE
from logquarry.repair.audit.harmed_frames import HarmedType, HarmedTypes
from logquarry.repair.audit.queue_evidence import SeenMessages
from logquarry.repair.audit.queues import QueuesAudit
from logquarry.repair.audit.right_offsets import NO_PLACE, RightBases, epochs
from logquarry.repair.findings import Finding, finding
from logquarry.write.queue_writer import MOST_OFFSET, QueuePart, is_batch

_UNREADABLE: Final = "bad_rocksdb"
_IN_LOG: Final = ("new_epoch", "harmed_queue_offset", "harmed_queue_id", HARMED_TYPE)
"""Kinds of findings about the log itself."""
Parts = Mapping[QueueKey, QueuePart]
_NAMES: Final = {"tags_code": "tags code", "store_timestamp": "store time", "count": "messages"}


def wrong_end(database: QueueDb, key: QueueKey, log_start: int) -> str | None:
    """Return why the end of a queue in RocksDB is wrong; None if it can be right.

    If all messages of the queue have expired, every end up to ``MOST_OFFSET`` can be right.
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
        self._broken: list[Finding] = []
        self._folders = rocksdb_folders(layout)
        for folder in self._folders if is_installed() else ():
            try:
                self._databases.append(RocksQueuesAudit(layout, QueueDb(layout, folder)))
            except CorruptFile as error:
                self._broken.append(finding(_UNREADABLE, folder, 0, error.reason))

    @property
    def entries(self) -> int:
        """Number of entries compared."""
        return sum(one.entries for one in (self._files, self._batch, *self._databases))

    @property
    def queues(self) -> int:
        """Number of queues on the disk; a queue in files and in RocksDB is counted once."""
        names = {*self._layout.queue_names}.union(*(one.names for one in self._databases))
        return len(names) + len(self._layout.batch_queue_names)

    @property
    def harmed_topics(self) -> list[int]:
        """The physical offsets of the frames whose topic is harmed."""
        return [place for one in (self._files, *self._databases) for place in one.harmed_topics]

    @property
    def harmed_types(self) -> dict[int, HarmedType]:
        """The frames with a harmed transaction type, by physical offset; complete after
        :meth:`finish`.
        """
        audits = (self._files, self._batch, *self._databases)
        return {place: one for audit in audits for place, one in audit.types.found.items()}

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
        """Whether a Spark task's result can be used for these queues. The result cannot be used if
        the store has queues in RocksDB, because tasks do not read RocksDB. See also
        :meth:`QueuesAudit.is_next`.
        """
        return not self._databases and self._files.is_next(queues)

    def add_sound(self, queues: Mapping[QueueKey, tuple[int, int]]) -> None:
        """See :meth:`QueuesAudit.add_sound`."""
        self._files.add_sound(queues)

    def finish(self, log_end: int, lost: SpanSet) -> Iterator[Finding]:
        """Yield all differences, queue by queue; call this after the whole log is read."""
        # All audits find the same differences in the log: report each difference once.
        in_log: set[Finding] = set()
        for found in self._differences(log_end, lost):
            if found.kind in _IN_LOG:
                if found in in_log:
                    continue
                in_log.add(found)
            yield found

    def _differences(self, log_end: int, lost: SpanSet) -> Iterator[Finding]:
        self._files.settle()
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
                yield finding(_UNREADABLE, folder, 0, reason, is_explained=True)

    def _drop(self, audit: RocksQueuesAudit, error: CorruptFile) -> None:
        self._databases.remove(audit)
        self._broken.append(finding(_UNREADABLE, audit.folder, 0, error.reason))


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
        """Compare the frames of a run with their entries, which also have a store time."""
        super().add(followed, {k: v for k, v in parts.items() if k[0] not in self._others.batch})

    def _check_times(self, key: QueueKey, part: QueuePart, requests: DispatchRequests) -> None:
        seen = self._seen[key]
        if not isinstance(seen.queue, RocksQueue) or "queue_entry_wrong" in seen.groups:
            return
        # If the topic was recreated between two messages of this run, the queue has only the
        # messages after the recreation.
        start = epoch_start(part.offsets)
        offsets = part.offsets[start:]
        times = requests.store_timestamp[part.rows][start:]
        places = requests.physical_offset[part.rows][start:]
        first, stop = int(offsets.min()), min(int(offsets.max()) + 1, seen.queue.max_offset)
        for there, entries in self._db.entries(*key, first, stop):
            _, ours, theirs = np.intersect1d(offsets, there, return_indices=True)
            differs = np.zeros(len(offsets), np.bool_)
            differs[ours] = times[ours] != entries["store_timestamp"][theirs]
            # Damage in a frame's queue id can make its message look like a message of this queue.
            differs[ours] &= places[ours] == entries["physical_offset"][theirs]
            seen.note("queue_entry_wrong", offsets, differs, "has another store time")

    def finish(self, log_end: int, lost: SpanSet) -> Iterator[Finding]:
        """Yield all differences, queue by queue; call this after the whole log is read."""
        self.settle()
        dispatched, crashed = self._db.dispatched_end, self.layout.has_abort
        # A broker has its newest entries only in memory, and makes them again after a crash.
        is_explained = crashed and self._is_dispatched(dispatched, -1)
        if dispatched > log_end:
            reason = f"it has the messages up to {dispatched}, but the log ends at {log_end}"
            yield finding("queue_ahead", self.folder, 0, reason, is_explained=crashed)
        yield from self.differences(log_end, lost, is_explained=is_explained)

    def _has_no_queue(self, key: QueueKey, seen: SeenMessages) -> bool:
        # The queues in `_elsewhere` are not in RocksDB.
        return key in self._elsewhere or super()._has_no_queue(key, seen)

    def _missing(self, key: QueueKey, reason: str, *, is_explained: bool) -> Iterator[Finding]:
        if key not in self._elsewhere:
            reason = f"RocksDB lacks it, and {reason}"
            place = self._place_of(key)
            yield finding("queue_missing", place, 0, reason, is_explained=is_explained)

    def _spare(
        self, queue: Queue, seen: SeenMessages, log_end: int, lost: SpanSet
    ) -> Iterator[Finding]:
        yield from super()._spare(queue, seen, log_end, lost)
        key = queue.key
        if seen.messages and queue.max_offset <= seen.next_offset:
            return
        reason = wrong_end(self._db, key, self.layout.commit_log.start)
        if reason is not None:
            yield finding("queue_end_wrong", self.folder, 0, reason)

    def _place(self, queue: Queue, offset: int) -> tuple[str, int]:
        return self._place_of(queue.key), 0

    def _place_of(self, key: QueueKey) -> str:
        return f"{self.folder}/{key[0]}/{key[1]}"

    def _difference(self, queue: Queue, group: EntryGroup) -> Finding:
        found = group.at(self.folder, 0, ENTRY.size)
        name = queue_name(queue.key)
        return finding(found.kind, found.file, 0, f"{name}: {found.reason}", found.length)


class BatchQueuesAudit(QueuesAudit):
    """Compares the batch queues of a store with its log; see :class:`QueuesAudit`."""

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__(layout)
        self._right: dict[QueueKey, RightBases] = {}

    def add(self, followed: Followed, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Compare the frames of a run with their entries."""
        for key, part in parts.items():
            if is_batch(part.units):
                seen, right = self._seen.get(key), self._right.setdefault(key, RightBases())
                if seen is not None:
                    right.following = seen.next_offset
                self._add_batches(key, right.take(part.units))

    def differences(self, log_end: int, lost: SpanSet, *, is_explained: bool) -> Iterator[Finding]:
        """See :meth:`QueuesAudit.differences`."""
        for key, right in self._right.items():
            self._add_batches(key, right.settle())
            harmed = [one for one in right.moved.items() if one[1] != NO_PLACE]
            for place, base in harmed[:1]:
                file = self.layout.log_file(place)
                text = f"in {queue_name(key)}, the frames around this frame show that its queue "
                text += f"offset was {base}{and_more(len(harmed))}"
                yield finding("harmed_queue_offset", file, place, text)
        yield from super().differences(log_end, lost, is_explained=is_explained)

    def _add_batches(self, key: QueueKey, entries: BatchEntries) -> None:
        if not len(entries):
            return
        seen = self._of(key, int(entries["base"][0]))
        for is_new, part in epochs(entries, seen.next_offset):
            if is_new:
                seen.restart(int(part["base"][0]), int(part["physical_offset"][0]))
                seen.next_offset = seen.first_offset
            self._compare_batches(seen, part)

    @cached_property
    def _others(self) -> OtherQueues:
        # All queues of this audit are batch queues, and their topics have only batch queues.
        return OtherQueues(frozenset(), has_rocksdb=False)

    def _find_names(self) -> set[QueueKey]:
        return set(self.layout.batch_queue_names)

    def _queue(self, key: QueueKey) -> BatchQueue:
        return BatchQueue(self.layout, *key, files=self._files)

    def _folder(self, key: QueueKey) -> str:
        return f"{BATCH_QUEUE}/{key[0]}/{key[1]}"

    def _place(self, queue: Queue, offset: int) -> tuple[str, int]:
        assert isinstance(queue, BatchQueue)
        return place_of(queue, offset)

    def _difference(self, queue: Queue, group: EntryGroup) -> Finding:
        return group.at(*self._place(queue, group.number), ENTRY_SIZE)

    def _spare(
        self, queue: Queue, seen: SeenMessages, log_end: int, lost: SpanSet
    ) -> Iterator[Finding]:
        assert isinstance(queue, BatchQueue)
        spare = _Spare(self.layout, self._files, queue, seen, log_end, lost)
        return spare.differences(self.types)

    def _compare_batches(self, seen: SeenMessages, wanted: BatchEntries) -> None:
        starts = wanted["base"].astype(np.int64)
        stops = starts + wanted["count"]
        seen.add_gaps(np.append(seen.next_offset, stops[:-1]), starts)
        seen.next_offset = int(stops[-1])
        seen.messages += int((stops - starts).sum())
        queue = seen.queue
        if queue is None:
            return
        assert isinstance(queue, BatchQueue)
        there, found = entries_at(queue, starts)
        self.entries += int(found.sum())
        begin, end = queue.min_offset, queue.max_offset
        places = wanted["physical_offset"].astype(np.int64)
        self._note_head(seen, starts, ~found & (starts < begin), places)
        missing = ~found & (starts >= begin) & (starts < end)
        seen.note("queue_hole", starts, missing, "is missing: no entry begins at it")
        differs = found & ~same_batches(there, wanted)
        if differs.any():
            at = int(differs.argmax())
            seen.note("queue_entry_wrong", starts, differs, _difference_of(there[at], wanted[at]))


class _Spare:
    def __init__(
        self,
        layout: StoreLayout,
        files: OpenFiles,
        queue: BatchQueue,
        seen: SeenMessages,
        log_end: int,
        lost: SpanSet,
    ) -> None:
        self._log = CommitLog(layout, files=files)
        self._start = layout.commit_log.start
        self._queue = queue
        self._end = log_end
        self._lost = lost
        first, stop = (seen.first_offset, seen.next_offset) if seen.messages else (0, 0)
        self._gaps = [(0, first), *seen.gaps, (stop, 1 << 62)]
        self._groups: dict[str, tuple[Finding, int]] = {}

    def differences(self, types: HarmedTypes) -> Iterator[Finding]:
        last = 0
        for file, stored in self._queue.batches():
            written, entries = is_batch_written(stored), own_messages(stored)
            self._note(
                "queue_hole", file.path, np.flatnonzero(~written), entries, "was never written"
            )
            starts = entries["base"].astype(np.int64)
            stops = starts + entries["count"]
            before = np.append(last, np.maximum.accumulate(np.where(written, stops, 0))[:-1])
            overlaps = written & (starts < np.maximum(before, last))
            text = "has queue offsets that an earlier entry has"
            self._note("queue_misplaced", file.path, np.flatnonzero(overlaps), entries, text)
            last = max(last, int(stops[written].max(initial=0)))
            spare = np.zeros(len(entries), np.bool_)
            for begin, stop in self._gaps:
                spare |= (starts >= begin) & (starts < stop)
            spare &= written & ~overlaps & (entries["count"] > 0)
            self._check(file.path, entries, spare, types)
        for found, count in self._groups.values():
            reason = found.reason + and_more(count)
            yield replace(found, reason=reason, length=count * ENTRY_SIZE)

    def _check(self, path: str, entries: BatchEntries, spare: Bools, types: HarmedTypes) -> None:
        places = entries["physical_offset"].astype(np.int64)
        damaged = spare & self._lost.mask(places)
        text = "points to a damaged part of the log"
        self._note("queue_in_damage", path, np.flatnonzero(damaged), entries, text)
        ahead = spare & ~damaged & (places >= self._end)
        text = f"points to a message after the log's end at {self._end}"
        self._note("queue_ahead", path, np.flatnonzero(ahead), entries, text)
        inside = spare & ~damaged & ~ahead & (places >= self._start)
        for at in np.flatnonzero(inside):
            entry = queue_entry_of(entries[at])
            if types.check(self._queue, int(entries[at]["base"]), entry):
                continue
            found = self._log.sound_frame_at(int(places[at]), check_crc=False)
            kind, text = "queue_entry_dangling", f"points to {places[at]}, where no frame starts"
            if found is not None:
                kind = "queue_misplaced"
                text = f"points to the message at {places[at]}, whose queue offset is "
                text += str(found.queue_offset)
            self._note(kind, path, np.array([at]), entries, text)

    def _note(self, kind: str, path: str, which: Int64, entries: BatchEntries, reason: str) -> None:
        if not len(which):
            return
        at = int(which[0])
        text = f"the entry of queue offset {int(entries['base'][at])} {reason}"
        found, count = self._groups.get(kind, (finding(kind, path, at * ENTRY_SIZE, text), 0))
        self._groups[kind] = found, count + len(which)


def entries_at(queue: BatchQueue, starts: Int64) -> tuple[BatchEntries, Bools]:
    """Return two arrays: the entry that begins at each of ``starts``, and whether it exists.

    ``starts`` holds queue offsets in ascending order. A missing entry is all zeros.
    """
    there = np.zeros(len(starts), BATCH_DTYPE)
    found = np.zeros(len(starts), np.bool_)
    for spans in queue.spans(int(starts[0]), int(starts[-1]) + 1):
        at = np.searchsorted(spans.starts, starts)
        inside = at < len(spans.starts)
        inside[inside] = spans.starts[at[inside]] == starts[inside]
        there[inside] = spans.entries[at[inside]]
        found |= inside
    return there, found


def place_of(queue: BatchQueue, offset: int) -> tuple[str, int]:
    """Return the file and byte position of a queue offset's entry. If there is no such entry,
    return the place at which it would be written.
    """
    path, position = f"{BATCH_QUEUE}/{queue.topic}/{queue.queue_id}/{0:020d}", 0
    has_room = False
    for file, entries in queue.batches():
        written = is_batch_written(entries)
        stops = entries["base"].astype(np.int64) + entries["count"]
        behind = np.flatnonzero(written & (stops > offset))
        if len(behind):
            is_first = not written[: behind[0]].any()
            if not (has_room and is_first):
                path, position = file.path, int(behind[0]) * ENTRY_SIZE
            return path, position
        used = int(np.flatnonzero(written)[-1]) + 1 if written.any() else 0
        if written.any() or not has_room:
            path, position = file.path, used * ENTRY_SIZE
        has_room = position < queue.sequence.file_size
    return path, position


def _difference_of(there: np.void, wanted: np.void) -> str:
    parts = [
        f"{_NAMES.get(name, name.replace('_', ' '))} {int(there[name])} instead of "
        f"{int(wanted[name])}"
        for name in BATCH_FIELDS
        if there[name] != wanted[name]
    ]
    return f"has {', '.join(parts)}"
