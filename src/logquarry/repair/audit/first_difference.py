"""Compares the consume queues with the log, for a recovery: finds the first difference of each
queue.

No CRC covers the queue offset in a frame. So damage can change the queue offset, and the frame
still seems valid. This audit calls such a queue offset harmed.

A queue offset that does not continue the previous one is harmed in two cases: the queue has the
message's entry at another queue offset, or the neighbouring messages in the log show another queue
offset. In all other cases, the audit believes the frame. A lower queue offset then means that the
topic was deleted and created again, and a gap means that messages were lost.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.state_table import TransactionCheck
from logquarry.format.arrays import Int64, consecutive
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.follow import Follower
from logquarry.log.walk import Run
from logquarry.read.batch_queue import BatchQueue
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units
from logquarry.repair.audit.batch_queues import BatchQueueAudit
from logquarry.repair.audit.differences import (
    GAP_SLACK,
    MOST_MOVED,
    AuditedQueue,
    FirstDifference,
    TagsRule,
    may_stay,
    same_entries,
)
from logquarry.repair.audit.runs import AuditedRun, EntryFacts, audited
from logquarry.write.dispatcher import queue_name_fault
from logquarry.write.queue_writer import MOST_GAP, MOST_OFFSET


class QueueAudit:
    """Compares one queue with the log; if ``mends``, also finds the right value of harmed offsets.

    ``disk`` is the queue on the disk, None if its files are missing or unusable. Memory does not
    grow with the log.
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
        self.key = key
        self._mends = mends
        self._tags = tags or TagsRule()
        self._disk = disk
        self._damage = damage
        self._had = 0 if disk is None else disk.max_offset
        self._first: int | None = None
        self._first_at = 0
        self._known_until = 0
        self._next: int | None = None
        self._found: FirstDifference | None = None
        # The last message, if its queue offset does not continue the previous one; else None. The
        # next message shows whether this queue offset is harmed.
        self._odd: tuple[int, Units] | None = None
        self._moved: dict[int, int] = {}
        self._largest_gap = 0

    def take(self, offsets: Int64, entries: Units) -> None:
        """Compare the next messages of the queue, in the order of the log."""
        for start, stop in consecutive(offsets):
            self._take_part(int(offsets[start]), entries[start:stop])

    def _take_part(self, offset: int, entries: Units) -> None:
        self._settle(offset)
        expected = self._next
        if self._mends and len(entries) == 1 and offset != expected:
            if expected is not None and self._has(expected, entries):
                self._move(entries, expected)
            else:
                self._odd = offset, entries.copy()
            return
        self._take_run(offset, entries)

    def _settle(self, following: int | None) -> None:
        """If the last message's queue offset is in doubt, decide it with the offset of the next
        message.

        ``following`` is the queue offset of the next message, None at the log's end.
        """
        odd, self._odd = self._odd, None
        if odd is None:
            return
        offset, entries = odd
        expected = self._next
        if expected is None:
            self._take_first(offset, entries, following)
            return
        is_far = offset - expected > self._room(entries)
        # A topic that was deleted and created again begins at offset 0. So 0 is no sign of harm.
        falls_back = offset < expected and (offset != 0 or (following or 0) > expected)
        agrees = offset >= 0 and (following == offset + 1 or self._has(offset, entries))
        if following == expected + 1 or (not agrees and (is_far or falls_back)):
            self._move(entries, expected)
        else:
            self._take_run(offset, entries)

    def _take_first(self, offset: int, entries: Units, following: int | None) -> None:
        if following == offset + 1 or (offset >= 0 and self._has(offset, entries)):
            self._take_run(offset, entries)
            return
        right = self._place_in_queue(entries)
        if right is not None:
            self._move(entries, right)
        elif following is not None and following > 0 and not 0 <= offset < following:
            self._move(entries, following - 1)
        elif 0 <= offset <= MOST_OFFSET:
            self._take_run(offset, entries)
        elif following is None:
            self._move(entries, self._had)

    def _place_in_queue(self, entries: Units) -> int | None:
        if self._disk is None:
            return None
        place = entries["physical_offset"][0]
        for start, there in self._disk.runs(0, self._had):
            for at in np.flatnonzero(there["physical_offset"] == place).tolist():
                if self._same(there[at : at + 1], entries):
                    return int(start + at)
        return None

    def _move(self, entries: Units, offset: int) -> None:
        if len(self._moved) < MOST_MOVED:
            self._moved[int(entries["physical_offset"][0])] = offset
            self._take_run(offset, entries)

    def _take_run(self, offset: int, entries: Units) -> None:
        expected = self._next
        if expected is not None and offset != expected and self._has(expected, entries):
            # The queue has these entries at the expected offsets. So the offsets in all these
            # frames are harmed.
            for at, place in enumerate(entries["physical_offset"][:MOST_MOVED].tolist()):
                self._moved[place] = expected + at
            offset = expected
        is_far = expected is not None and offset - expected > max(MOST_GAP, self._room(entries))
        if is_far or not 0 <= offset <= MOST_OFFSET:
            # No queue can have these queue offsets, so they are harmed. Instead, continue after the
            # last good offset.
            right = self._place_in_queue(entries[:1]) if expected is None else expected
            entries = entries[: MOST_MOVED - len(self._moved)]
            if not len(entries):
                return
            offset = 0 if right is None else right
            for at, place in enumerate(entries["physical_offset"].tolist()):
                self._moved[place] = offset + at
        first_at = int(entries["physical_offset"][0])
        if expected is None:
            self._first, self._first_at = offset, first_at
        elif offset < expected:
            self._begin_again(offset)
        elif offset > expected:
            self._largest_gap = max(self._largest_gap, offset - expected)
            if self._found is None:
                self._compare_gap(expected, offset, first_at)
        self._next = offset + len(entries)
        self._known_until = int(entries["physical_offset"][-1]) + int(entries["size"][-1])
        if self._found is None:
            self._compare(offset, entries)

    def _room(self, entries: Units) -> int:
        """Return how many messages can have been lost between the previous message and
        ``entries``.
        """
        lost = max(0, int(entries["physical_offset"][0]) - self._known_until)
        return lost // FIXED_SIZE_V1 + GAP_SLACK

    def _begin_again(self, offset: int) -> None:
        assert self._first is not None
        self._first = min(self._first, offset)
        if self._found is not None and self._found.offset >= offset:
            self._found = None

    def _has(self, offset: int, entries: Units) -> bool:
        """Whether the queue has these entries at an offset. False if a difference was already
        found.
        """
        if self._disk is None or self._found is not None:
            return False
        at, stop = offset, offset + len(entries)
        for start, there in self._disk.runs(offset, min(stop, self._had)):
            if start != at or self._same(there, entries[at - offset :][: len(there)]) < len(there):
                return False
            at += len(there)
        return at == stop

    def _same(self, there: Units, wanted: Units) -> int:
        if there.tobytes() == wanted.tobytes():
            return len(there)
        same = same_entries(there, wanted, self._tags)
        return len(there) if same.all() else int(np.argmin(same))

    def _compare(self, offset: int, entries: Units) -> None:
        stop = offset + len(entries)
        at = offset
        if self._disk is not None:
            for start, there in self._disk.runs(offset, stop):
                if start != at:
                    break
                same = self._same(there, entries[at - offset : at - offset + len(there)])
                at += same
                if same < len(there):
                    break
        if at < stop:
            wanted = QueueEntry(*entries[at - offset].item())
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
            f"entry {offset} points to {there.size} bytes at {there.physical_offset}, and the "
            f"message is {wanted.size} bytes at {wanted.physical_offset}"
        )

    def _compare_gap(self, start: int, stop: int, resume_at: int) -> None:
        if self._disk is None:
            return
        at = start
        for first, entries in self._disk.runs(start, min(stop, self._had)):
            if first != at:
                break
            for entry in entries:
                if not may_stay(QueueEntry(*entry.item()), self._damage):
                    break
                at += 1
            if at < first + len(entries):
                break
        if at < stop:
            self._found = _unknown(at, resume_at)

    def _known_from(self, start: int, stop: int, log_start: int) -> int:
        """Return the queue offset of the first entry between ``start`` and ``stop`` that a recovery
        must remove; ``stop`` if all of these entries may stay.

        Entries that point before ``log_start`` may stay, because retention deleted their messages.
        """
        if self._disk is None:
            return stop
        for offset, entries in self._disk.runs(start, stop):
            doubtful = (entries["physical_offset"] >= log_start) | (entries["size"] <= 0)
            for at in np.flatnonzero(doubtful).tolist():
                if not may_stay(QueueEntry(*entries[at].item()), self._damage):
                    return offset + at
        return stop

    @property
    def difference(self) -> FirstDifference | None:
        """The first difference in the part of the log read so far; None if there is none."""
        self._settle(None)
        return self._found

    def finish(self, log_start: int) -> AuditedQueue:
        """Return the result. Call this only after the whole log is compared."""
        found, end = self.difference, self._next
        if self._first is not None:
            stop = min(self._first, self._had)
            wrong = self._known_from(0, stop, log_start)
            if wrong < stop:
                found = _unknown(wrong, self._first_at)
        if end is None:
            kept_until = self._known_from(0, self._had, log_start)
        else:
            kept_until = max(end, self._known_from(end, self._had, 0))
        counts = [] if self._disk is None else list(self._disk.segments())
        return AuditedQueue(
            key=self.key,
            first_entry=counts[0].start if counts else None,
            had_until=self._had,
            ends_empty=len(counts) > 1 and counts[-1].count == 0,
            end=end,
            difference=found,
            kept_until=kept_until,
            moved=self._moved,
            largest_gap=self._largest_gap,
        )


def _unknown(offset: int, resume_at: int) -> FirstDifference:
    reason = f"entry {offset} is of a message that the log does not have"
    return FirstDifference(offset, resume_at, reason)


class QueueAudits:
    """Compares all queues of a store with its log.

    In ``queues``, a queue with unusable files has the value None. ``damage`` has the damaged bytes
    of the part of the log that was read so far.
    """

    def __init__(
        self,
        queues: Mapping[QueueKey, Queue | None],
        config: StoreConfig,
        damage: Container[int],
        transactions: TransactionCheck | None = None,
        *,
        mends: bool = True,
    ) -> None:
        self.has_keys = False
        self._mends = mends
        self.transactions = transactions
        self._config = config
        self._damage = damage
        self._follower = Follower(config.delay_levels_ms, keys=config.index_keys)
        self._audits: dict[QueueKey, QueueAudit | BatchQueueAudit] = {
            key: self._audit(key, disk) for key, disk in queues.items()
        }

    def __iter__(self) -> Iterator[QueueAudit | BatchQueueAudit]:
        return (audit for _, audit in sorted(self._audits.items()))

    def _audit(self, key: QueueKey, disk: Queue | None) -> QueueAudit | BatchQueueAudit:
        if key[0] in self._config.batch_topics:
            batch = disk if isinstance(disk, BatchQueue) else None
            return BatchQueueAudit(key, batch, self._damage)
        is_3_1 = self.transactions is not None or self._config.is_3_1
        tags = TagsRule.of_writers(key, is_3_1=is_3_1)
        return QueueAudit(key, disk, self._damage, tags, mends=self._mends)

    def take(self, run: Run | AuditedRun[EntryFacts]) -> None:
        """Compare the next frames of the log."""
        if isinstance(run, Run):
            facts = EntryFacts(self._config, with_transactions=self.transactions is not None)
            run = audited(self._follower, run, facts)
        self.has_keys = self.has_keys or run.facts.has_keys
        if self.transactions is not None:
            self.transactions.take(run.facts.transactions)
        for parts in run.facts.parts:
            for key, part in parts.items():
                audit = self._audits.get(key)
                if audit is None:
                    if queue_name_fault(key[0]) is not None:
                        continue
                    audit = self._audits[key] = self._audit(key, None)
                audit.take(part.offsets, part.units)
