"""Audit of a batch queue for a recovery: its first difference from the log.

The entries of a batch queue follow each other in the log's order, so this audit compares them by
their position in the files. It has the same methods as
:class:`~logquarry.repair.audit.first_difference.QueueAudit`, with positions instead of
queue offsets.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format.batch import ENTRY_SIZE
from logquarry.format.queue_entry import QueueEntry
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, BatchQueue, own_messages
from logquarry.read.log_queues import QueueKey
from logquarry.repair.audit.differences import (
    AuditedQueue,
    Bools,
    FirstDifference,
    Int64,
    names_damage,
)
from logquarry.write.queue_writer import falls

_FIELDS: Final = ("physical_offset", "size", "tags_code", "store_timestamp", "base", "count")
_CHUNK: Final = 1 << 12


class BatchQueueAudit:
    """Compares one batch queue with the log.

    Args:
        key: topic and queue id.
        disk: the queue's files, None if there are none or they cannot be used.
        damage: the damage of the part of the log that was read.
    """

    def __init__(self, key: QueueKey, disk: BatchQueue | None, damage: Container[int]) -> None:
        self.key = key
        self._disk = disk
        self._damage = damage
        self._had = 0 if disk is None else disk.entry_end
        # The position of the next entry; None before the first message.
        self._at: int | None = None
        self._next = 0
        self._found: FirstDifference | None = None

    def take(self, _: Int64, entries: BatchEntries) -> None:
        """Compare the queue with the entries that some more frames need, in the log's order."""
        entries = entries[entries["base"] >= 0]
        if not len(entries):
            return
        starts = entries["base"].astype(np.int64)
        stops = starts + entries["count"]
        expected = int(starts[0]) if self._at is None else self._next
        cuts = falls(starts, stops, expected)
        for at, stop in zip([0, *cuts], [*cuts, len(entries)], strict=True):
            if at in cuts:
                # The topic was recreated: the queue holds only the newest messages.
                self._at, self._found = None, None
            if at < stop:
                self._take_run(entries[at:stop])
                self._next = int(stops[stop - 1])

    def _take_run(self, entries: BatchEntries) -> None:
        if self._at is None:
            self._at = self._first_position(int(entries["physical_offset"][0]))
            self._next = int(entries["base"][0])
        if self._found is not None:
            self._at += len(entries)
            return
        stops = entries["base"].astype(np.int64) + entries["count"]
        begins = np.append(self._next, stops[:-1])
        breaks = np.flatnonzero(entries["base"] != begins).tolist()
        bounds = [*sorted({0, *breaks}), len(entries)]
        for at, stop in pairwise(bounds):
            self._compare(entries[at:stop], is_behind_gap=at in breaks)
            if self.difference is not None:
                self._at += len(entries) - stop
                return

    def _compare(self, wanted: BatchEntries, *, is_behind_gap: bool) -> None:
        assert self._at is not None
        if is_behind_gap:
            # Entries of lost messages may stand between the entries of messages that the log has.
            self._pass_lost(int(wanted["physical_offset"][0]))
        there = own_messages(self._read(self._at, self._at + len(wanted)))
        same = np.zeros(len(wanted), np.bool_)
        same[: len(there)] = _same(there, wanted[: len(there)])
        if is_behind_gap and not self._continues():
            same[0] = False
        if same.all():
            self._at += len(wanted)
            return
        first = int(same.argmin())
        at = self._at + first
        offset = int(wanted["base"][first])
        reason = f"entry {at} is not that of queue offset {offset}"
        if at >= self._had:
            reason = f"it ends at entry {self._had}, and the log has its messages from {offset} on"
        self._found = FirstDifference(at, int(wanted["physical_offset"][first]), reason)
        self._at += len(wanted)

    def _continues(self) -> bool:
        """Whether the entry at this position begins where the entry before it ends."""
        assert self._at is not None
        pair = self._read(max(0, self._at - 1), self._at + 1)
        return (
            not self._at
            or len(pair) < 2
            or int(pair[0]["base"]) + int(pair[0]["count"]) == int(pair[1]["base"])
        )

    def _first_position(self, place: int) -> int:
        """The position of the entry for the first message; entries before it must be expired."""
        at = 0 if self._disk is None or not self._disk.files else self._disk.files[0].base
        at //= ENTRY_SIZE
        while at < self._had:
            places = self._read(at, at + _CHUNK)["physical_offset"]
            reached = np.flatnonzero(places >= place)
            if len(reached):
                return at + int(reached[0])
            at += len(places)
        return self._had

    def _pass_lost(self, place: int) -> None:
        """Skip entries before a physical offset whose messages are lost."""
        assert self._at is not None
        while self._at < self._had:
            entry = self._read(self._at, self._at + 1)[0]
            is_lost = self._is_lost(entry) and int(entry["physical_offset"]) < place
            # If a frame has several entries, the first ones cover only the lost messages of a large
            # gap.
            if not is_lost and entry["reserved"] != entry["count"]:
                return
            self._at += 1

    def _is_lost(self, entry: np.void) -> bool:
        found = QueueEntry(int(entry["physical_offset"]), int(entry["size"]), 0)
        return names_damage(found, self._damage)

    def _read(self, start: int, stop: int) -> BatchEntries:
        if self._disk is None:
            return np.empty(0, BATCH_DTYPE)
        return self._disk.positions(start, min(stop, self._had))

    # -------------------------------------------------------------------------------- result
    @property
    def difference(self) -> FirstDifference | None:
        """The first difference from the part of the log that was read, None without one."""
        return self._found

    def finish(self, log_start: int) -> AuditedQueue:
        """The result, after the whole log is read.

        Args:
            log_start: physical offset of the log's first byte.
        """
        first = None
        if self._disk is not None and self._disk.files:
            first = self._disk.files[0].base // ENTRY_SIZE
        end, found, kept_until = self._at, self._found, self._had
        if end is not None and found is None:
            self._pass_lost(1 << 62)
            kept_until = self._at or 0
        elif end is None:
            kept_until = first or 0
            while kept_until < self._had:
                entry = self._read(kept_until, kept_until + 1)[0]
                if int(entry["physical_offset"]) >= log_start and not self._is_lost(entry):
                    break
                kept_until += 1
        files = [] if self._disk is None else self._disk.files
        return AuditedQueue(
            key=self.key,
            first_entry=first,
            had_until=self._had,
            ends_empty=bool(files) and len(files) > 1 and files[-1].base // ENTRY_SIZE >= self._had,
            end=end,
            difference=found,
            kept_until=kept_until,
        )


def _same(there: BatchEntries, wanted: BatchEntries) -> Bools:
    same = np.ones(len(wanted), np.bool_)
    for name in _FIELDS:
        same &= there[name] == wanted[name]
    return same
