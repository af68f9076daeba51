"""Compares the consume queues with the log for a recovery, and finds the first difference of each
queue.

:mod:`.right_offsets` finds the right queue offset of each message, even if damage changed the queue
offset in the message's frame.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import TransactionFrame
from logquarry.dialect31.state_table import TransactionCheck
from logquarry.format import java
from logquarry.format.arrays import Bools, Int64
from logquarry.format.batch import ENTRY_SIZE
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.log.follow import Follower
from logquarry.log.walk import Run
from logquarry.read.batch_queue import (
    BATCH_DTYPE,
    BatchEntries,
    BatchQueue,
    is_batch_written,
    own_messages,
)
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, Queue, Units
from logquarry.repair.audit.differences import (
    AuditedQueue,
    EitherMap,
    FirstDifference,
    TagsRule,
    count_same,
    may_stay,
    names_damage,
)
from logquarry.repair.audit.expired_queues import bridges, cut_bridges
from logquarry.repair.audit.harmed_frames import HarmedIds, HarmedTypes, corrected
from logquarry.repair.audit.right_offsets import RightBases, RightOffsets, epochs
from logquarry.repair.audit.runs import EntryFacts, audited
from logquarry.text import counted
from logquarry.write.message_rules import queue_name_fault

BATCH_FIELDS: Final = ("physical_offset", "size", "tags_code", "store_timestamp", "count", "base")


class QueueAudit(RightOffsets):
    """Compares one queue with the log. ``disk`` is the queue on the disk, None if its files are
    unusable. The memory that the object needs does not depend on the size of the log.
    """

    def __init__(
        self,
        key: QueueKey,
        disk: Queue | None,
        damage: Container[int],
        tags: TagsRule | None = None,
        *,
        mends: bool = True,
    ) -> None:
        super().__init__(disk, tags, mends=mends)
        self.key = key
        self._damage = damage
        self._first: int | None = None
        self._first_at = 0
        self._found: FirstDifference | None = None
        self._largest_gap = 0

    def _put(self, offset: int, entries: Units) -> None:
        expected = self._next
        first_at = int(entries["physical_offset"][0])
        if expected is None:
            self._first, self._first_at = offset, first_at
        elif offset < expected:
            assert self._first is not None
            self._first = min(self._first, offset)
            if self._found is not None and self._found.offset >= offset:
                self._found = None
        elif offset > expected:
            self._largest_gap = max(self._largest_gap, offset - expected)
            if self._found is None:
                self._compare_gap(expected, offset, first_at)
        if self._found is None:
            self._compare(offset, entries)

    def _drop(self, offset: int, entries: Units) -> None:
        """Ignore messages that have no place in the queue, because a queue writer makes no entries
        for such messages.
        """

    def _has(self, offset: int, entries: Units) -> bool:
        return self._found is None and super()._has(offset, entries)

    def _compare(self, offset: int, entries: Units) -> None:
        same = count_same(self._disk, offset, entries, self._tags)
        if same < len(entries):
            at, wanted = offset + same, QueueEntry(*entries[same].item())
            reason = self._reason(at, wanted)
            self._found = FirstDifference(at, wanted.physical_offset, reason)

    def _reason(self, offset: int, wanted: QueueEntry) -> str:
        if offset >= self._had:
            return f"it ends at {self._had}, and the log has its messages from {offset} on"
        found = None if self._disk is None else next(self._disk.entries(offset, offset + 1), None)
        if found is None:
            return f"there is no entry {offset}"
        there = found[1]
        if there[:2] == wanted[:2]:
            return (
                f"entry {offset} has tags code {there.tags_code}, and its message "
                f"{wanted.tags_code}"
            )
        return (
            f"entry {offset} points to {counted(there.size, 'byte')} at {there.physical_offset}, "
            f"and the message is {wanted.size} bytes at {wanted.physical_offset}"
        )

    def _compare_gap(self, start: int, stop: int, resume_at: int) -> None:
        at = self._known_from(start, stop, java.LONG_MIN, needs_all=True)
        if at < stop:
            self._found = _unknown(at, resume_at)

    def _known_from(self, start: int, stop: int, log_start: int, *, needs_all: bool = False) -> int:
        """Return the queue offset of the first entry from ``start`` to ``stop`` that a recovery
        must remove; ``stop`` if there is none. With ``needs_all``, the result can also be a queue
        offset without an entry. Entries that point before ``log_start`` stay, because their
        messages have expired.
        """
        if self._disk is None:
            return stop
        at = start
        for offset, entries in self._disk.runs(start, min(stop, self._had)):
            if needs_all and offset != at:
                return at
            doubtful = (entries["physical_offset"] >= log_start) | (entries["size"] <= 0)
            for number in np.flatnonzero(doubtful).tolist():
                if not may_stay(QueueEntry(*entries[number].item()), self._damage):
                    return offset + number
            at = offset + len(entries)
        return at if needs_all else stop

    @property
    def difference(self) -> FirstDifference | None:
        """The first difference in the part of the log read so far; None if there is none."""
        self.settle()
        return self._found

    @property
    def surplus(self) -> FirstDifference | None:
        """The first of the entries after the last message's entry that a recovery must remove.

        None if there is no such entry, or if the part of the log that was read has no message of
        the queue.
        """
        self.settle()
        end = self._next
        at = self._had if end is None else self._known_from(end, self._had, 0)
        return _unknown(at, java.LONG_MAX) if at < self._had else None

    def finish(self, log_start: int) -> AuditedQueue:
        """Return the result. Call this only after the whole log is compared."""
        found, end = self.difference, self._next
        if self._first is not None:
            stop = min(self._first, self._had)
            wrong = self._known_from(0, stop, log_start)
            if wrong < stop:
                found = _unknown(wrong, self._first_at)
        had, made = self._had, dict[int, bytes]()
        if end is None and isinstance(self._disk, ConsumeQueue):
            made, stop = bridges(self._disk, log_start)
            kept_until = self._bridged_until(made, log_start)
            if kept_until == had:
                had = kept_until = stop
            else:
                made, kept_until = cut_bridges(self._disk, made, kept_until, log_start)
        elif end is None:
            kept_until = self._known_from(0, self._had, log_start)
        else:
            kept_until = max(end, self._known_from(end, self._had, 0))
        counts = [] if self._disk is None else list(self._disk.segments())
        return AuditedQueue(
            key=self.key,
            first_entry=counts[0].start if counts else None,
            had_until=had,
            ends_empty=len(counts) > 1 and counts[-1].start >= had,
            end=end,
            difference=found,
            kept_until=kept_until,
            moved=self._moved,
            largest_gap=self._largest_gap,
            bridges=made,
        )

    def _bridged_until(self, made: Mapping[int, bytes], log_start: int) -> int:
        at = self._known_from(0, self._had, log_start)
        for number, data in sorted(made.items()):
            end = min(number + len(data) // UNIT_SIZE, self._had)
            if number <= at < end:
                at = self._known_from(end, self._had, log_start)
        return at


def _unknown(offset: int, resume_at: int) -> FirstDifference:
    reason = f"entry {offset} is of a message that the log does not have"
    return FirstDifference(offset, resume_at, reason)


# ----------------------------------------------------------------------------------- batch queues
class BatchQueueAudit:
    """Compares one batch queue with the log. ``disk`` is the queue on the disk, None if its files
    are missing or unusable.

    The methods are those of :class:`QueueAudit`, but their arguments and results are entry numbers
    instead of queue offsets. Entries and frames have the same order, so the entry at each position
    of the queue is compared with the frame at the same position.
    """

    def __init__(
        self,
        key: QueueKey,
        disk: BatchQueue | None,
        damage: Container[int],
        *,
        mends: bool = True,
    ) -> None:
        self.key = key
        self._disk = disk
        self._damage = damage
        self._had = 0 if disk is None else disk.entry_end
        # Number of the next entry to compare; None until the walk of the log
        # reaches a message of this queue.
        self._at: int | None = None
        self._next = 0
        self._found: FirstDifference | None = None
        self._right = RightBases()
        self._mends = mends

    def take(self, _: Int64, entries: BatchEntries) -> None:
        """Compare the queue with the entries that the next frames of the log should have."""
        self._take(self._right.take(entries) if self._mends else entries[entries["base"] >= 0])

    def _take(self, entries: BatchEntries) -> None:
        if not len(entries):
            return
        expected = int(entries["base"][0]) if self._at is None else self._next
        for is_new, part in epochs(entries, expected):
            if is_new:
                # The topic was created again: the queue has only the later messages.
                self._at, self._found = None, None
            self._take_run(part)
            self._next = int(part["base"][-1]) + int(part["count"][-1])

    def _take_run(self, entries: BatchEntries) -> None:
        if self._at is None:
            self._at = self._first_position(int(entries["physical_offset"][0]))
            self._next = int(entries["base"][0])
        stops = entries["base"].astype(np.int64) + entries["count"]
        begins = np.append(self._next, stops[:-1])
        breaks = np.flatnonzero(entries["base"] != begins).tolist()
        for at, stop in pairwise([*sorted({0, *breaks}), len(entries)]):
            if self._found is None:
                self._compare(entries[at:stop], is_behind_gap=at in breaks)
            self._at += stop - at

    def _compare(self, wanted: BatchEntries, *, is_behind_gap: bool) -> None:
        if is_behind_gap:
            # The queue can still have entries of messages that the log lost in this gap: skip them.
            self._pass_lost(int(wanted["physical_offset"][0]))
        assert self._at is not None
        there = own_messages(self._read(self._at, self._at + len(wanted)))
        same = np.zeros(len(wanted), np.bool_)
        same[: len(there)] = same_batches(there, wanted[: len(there)])
        if is_behind_gap and not self._continues():
            same[0] = False
        if same.all():
            return
        first = int(same.argmin())
        at = self._at + first
        offset = int(wanted["base"][first])
        reason = f"entry {at} is not that of queue offset {offset}"
        if at >= self._had:
            reason = f"it ends at entry {self._had}, and the log has its messages from {offset} on"
        self._found = FirstDifference(at, int(wanted["physical_offset"][first]), reason)

    def _continues(self) -> bool:
        """Whether the entry ``self._at`` begins exactly where the previous entry ends."""
        assert self._at is not None
        pair = self._read(max(0, self._at - 1), self._at + 1)
        return (
            not self._at
            or len(pair) < 2
            or int(pair[0]["base"]) + int(pair[0]["count"]) == int(pair[1]["base"])
        )

    def _first_position(self, place: int) -> int:
        """Return the number of the first entry that is unwritten, or that points to ``place`` or
        later. This entry should belong to the queue's first message in the log. The messages of
        earlier entries have expired.
        """
        for base, entries in self._stored():
            passed = (entries["physical_offset"] < place) & is_batch_written(entries)
            if not passed.all():
                return base + int(passed.argmin())
        return self._had

    def _pass_lost(self, place: int) -> None:
        """Skip the next entries as long as their messages are lost and before ``place``."""
        assert self._at is not None
        for base, entries in self._stored():
            for entry in entries[max(0, self._at - base) :]:
                is_lost = self._is_lost(entry) and int(entry["physical_offset"]) < place
                # If several entries point to a frame, only the last entry is for the frame's
                # messages. The other entries fill a gap in the queue offsets: skip them too.
                if not is_lost and not 0 < entry["reserved"] == entry["count"]:
                    return
                self._at += 1

    def _kept_until(self, log_start: int) -> int:
        for base, entries in self._stored():
            for at in np.flatnonzero(entries["physical_offset"] >= log_start).tolist():
                if not self._is_lost(entries[at]):
                    return base + int(at)
        return self._had

    def _stored(self) -> Iterator[tuple[int, BatchEntries]]:
        """Yield the entries of each file, and the number of the file's first entry."""
        for file, entries in () if self._disk is None else self._disk.batches():
            yield file.base // ENTRY_SIZE, entries

    def _is_lost(self, entry: np.void) -> bool:
        if entry["count"] <= 0 or entry["base"] < 0:
            # A crash can leave an entry of which only the first fields are written.
            return False
        found = QueueEntry(int(entry["physical_offset"]), int(entry["size"]), 0)
        return names_damage(found, self._damage)

    def _read(self, start: int, stop: int) -> BatchEntries:
        if self._disk is None:
            return np.empty(0, BATCH_DTYPE)
        return self._disk.positions(start, min(stop, self._had))

    @property
    def difference(self) -> FirstDifference | None:
        """The first difference in the part of the log read so far; None if there is none."""
        self._take(self._right.settle())
        return self._found

    @property
    def surplus(self) -> FirstDifference | None:
        """See :attr:`QueueAudit.surplus`."""
        if self.difference is not None or self._at is None:
            return None
        end = self._at
        self._pass_lost(1 << 62)
        at, self._at = self._at, end
        return _unknown(at, java.LONG_MAX) if at < self._had else None

    def finish(self, log_start: int) -> AuditedQueue:
        """Return the result. Call this only after the whole log is compared."""
        found, end, kept_until = self.difference, self._at, self._had
        if end is None:
            kept_until = self._kept_until(log_start)
        elif found is None:
            self._pass_lost(1 << 62)
            kept_until = self._at or 0
        firsts = [base for base, _ in self._stored()]
        had, made = self._had, dict[int, bytes]()
        if end is None and self._disk is not None:
            made, stop = bridges(self._disk, log_start)
            if kept_until == had:
                had = kept_until = stop
            else:
                made, kept_until = cut_bridges(self._disk, made, kept_until, log_start)
        return AuditedQueue(
            key=self.key,
            first_entry=firsts[0] if firsts else None,
            had_until=had,
            ends_empty=len(firsts) > 1 and firsts[-1] >= had,
            end=end,
            difference=found,
            kept_until=kept_until,
            moved=self._right.moved,
            bridges=made,
        )


def same_batches(there: BatchEntries, wanted: BatchEntries) -> Bools:
    """Return a mask: whether each entry has the same fields in both arrays."""
    same = np.ones(len(wanted), np.bool_)
    for name in BATCH_FIELDS:
        same &= there[name] == wanted[name]
    return same


# -------------------------------------------------------------------------------------- all queues
class QueueAudits:
    """Compares all queues of a store with its log. In ``queues``, a queue with unusable files is
    None. ``damage`` contains the physical offsets of all damage found in the log so far. ``ids``
    moves frames with a harmed topic or queue id to their right queues. If ``ids`` is None, each
    frame stays in the queue that it names. ``types`` finds the frames with a harmed transaction
    type. The entries of these frames stay in the queue.
    """

    def __init__(
        self,
        queues: Mapping[QueueKey, Queue | None],
        config: StoreConfig,
        damage: Container[int],
        transactions: TransactionCheck | None = None,
        *,
        mends: bool = True,
        ids: HarmedIds | None = None,
        types: HarmedTypes | None = None,
    ) -> None:
        self.has_keys = False
        self._mends = mends
        self._ids = ids
        self._types = types
        self.transactions = transactions
        self._config = config
        self._damage = damage if types is None else EitherMap(damage, types)
        self._follower = Follower(config.delay_levels_ms, keys=config.index_keys)
        self._audits: dict[QueueKey, QueueAudit | BatchQueueAudit] = {
            key: self._audit(key, disk) for key, disk in queues.items()
        }

    def __iter__(self) -> Iterator[QueueAudit | BatchQueueAudit]:
        return (audit for _, audit in sorted(self._audits.items()))

    def _audit(self, key: QueueKey, disk: Queue | None) -> QueueAudit | BatchQueueAudit:
        if key[0] in self._config.batch_topics:
            batch = disk if isinstance(disk, BatchQueue) else None
            return BatchQueueAudit(key, batch, self._damage, mends=self._mends)
        is_3_1 = self.transactions is not None or self._config.is_3_1
        tags = TagsRule.of_writers(key, is_3_1=is_3_1)
        return QueueAudit(key, disk, self._damage, tags, mends=self._mends)

    def take(self, run: Run | EntryFacts) -> None:
        """Compare the queues with the entries of the next frames of the log."""
        if isinstance(run, Run):
            facts = EntryFacts(self._config, with_transactions=self.transactions is not None)
            run = audited(self._follower, run, facts)
        self.has_keys = self.has_keys or run.has_keys
        frames: Iterable[TransactionFrame] = run.transactions
        if self._types is not None:
            for unqueued in run.unqueued:
                self._types.take(unqueued)
            frames = corrected(frames, self._types.found)
        if self.transactions is not None:
            self.transactions.take(frames)
        for parts in run.parts:
            right = parts if self._ids is None else self._ids.place(parts)
            for key, part in right.items():
                audit = self._audits.get(key)
                if audit is None:
                    if queue_name_fault(key[0]) is not None:
                        continue
                    audit = self._audits[key] = self._audit(key, None)
                audit.take(part.offsets, part.units)
