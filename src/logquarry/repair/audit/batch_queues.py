"""Compares the batch queues of RocketMQ 5 with the log: finds all differences, or only the first.

:class:`BatchQueuesAudit` finds all differences: it looks up the entry of each frame by the frame's
first queue offset. :class:`BatchQueueAudit` finds the first difference: it compares the entry at
each position of the queue with the frame at the same position, because the entries and the frames
have the same order.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format.arrays import Bools, Int64
from logquarry.format.batch import ENTRY_SIZE
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import BATCH_QUEUE, FileSequence
from logquarry.read.batch_queue import (
    BATCH_DTYPE,
    BatchEntries,
    BatchQueue,
    is_batch_written,
    own_messages,
)
from logquarry.read.commit_log import CommitLog
from logquarry.read.fence import OtherQueues
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.repair.audit.differences import (
    AuditedQueue,
    Difference,
    EntryGroup,
    FirstDifference,
    LostSpans,
    and_more,
    names_damage,
    queue_name,
    within,
)
from logquarry.repair.audit.expired_queues import bridges
from logquarry.repair.audit.queues import QueuesAudit, SeenMessages
from logquarry.repair.audit.right_offsets import NO_PLACE, RightBases
from logquarry.write.queue_writer import QueuePart, falls, is_batch

_FIELDS: Final = ("physical_offset", "size", "tags_code", "store_timestamp", "count", "base")
_NAMES: Final = {"tags_code": "tags code", "store_timestamp": "store time", "count": "messages"}


class BatchQueuesAudit(QueuesAudit):
    """Compares the batch queues of a store with its log; see :class:`QueuesAudit`."""

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__(layout)
        self._right: dict[QueueKey, RightBases] = {}

    def add(self, followed: Followed, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Compare the frames of a run with the entries that the batch queues should have
        for them.
        """
        for key, part in parts.items():
            if is_batch(part.units):
                seen, right = self._seen.get(key), self._right.setdefault(key, RightBases())
                if seen is not None:
                    right.following = seen.next_offset
                self._add_batches(key, right.take(part.units))

    def differences(
        self, log_end: int, lost: LostSpans, *, is_explained: bool
    ) -> Iterator[Difference]:
        """See :meth:`QueuesAudit.differences`."""
        for key, right in self._right.items():
            self._add_batches(key, right.settle())
            harmed = [one for one in right.moved.items() if one[1] != NO_PLACE]
            for place, base in harmed[:1]:
                file = self.layout.log_file(place)
                text = f"in {queue_name(key)}, the frames around this frame show that its queue "
                text += f"offset was {base}{and_more(len(harmed))}"
                yield Difference("harmed_queue_offset", file, place, text)
        yield from super().differences(log_end, lost, is_explained=is_explained)

    def _add_batches(self, key: QueueKey, entries: BatchEntries) -> None:
        starts = entries["base"].astype(np.int64)
        if not len(starts):
            return
        stops = starts + entries["count"]
        seen = self._of(key, int(starts[0]))
        # If a queue offset does not increase, the topic was deleted and created again at this
        # message.
        cuts = [0, *falls(starts, stops, seen.next_offset), len(starts)]
        for number, (at, stop) in enumerate(pairwise(cuts)):
            if number:
                seen.restart(int(starts[at]), int(entries["physical_offset"][at]))
                seen.next_offset = seen.first_offset
            if at < stop:
                self._compare_batches(seen, entries[at:stop], starts[at:stop], stops[at:stop])

    @cached_property
    def _others(self) -> OtherQueues:
        # All queues of this audit are batch queues, and their topics have only batch queues.
        return OtherQueues(frozenset(), has_rocksdb=False)

    def _find_names(self) -> set[QueueKey]:
        return set(self.layout.batch_queue_names)

    def _queue(self, key: QueueKey) -> BatchQueue:
        return BatchQueue(self.layout, *key, files=self._files)

    def _sequence(self, key: QueueKey) -> FileSequence:
        return self.layout.batch_queue(*key)

    def _folder(self, key: QueueKey) -> str:
        return f"{BATCH_QUEUE}/{key[0]}/{key[1]}"

    def _place(self, queue: Queue, offset: int) -> tuple[str, int]:
        assert isinstance(queue, BatchQueue)
        return place_of(queue, offset)

    def _difference(self, queue: Queue, group: EntryGroup) -> Difference:
        return group.at(*self._place(queue, group.number), ENTRY_SIZE)

    def _spare(
        self, queue: Queue, seen: SeenMessages, log_end: int, lost: LostSpans
    ) -> Iterator[Difference]:
        assert isinstance(queue, BatchQueue)
        return _Spare(self.layout, self._files, queue, seen, log_end, lost).differences()

    def _compare_batches(
        self, seen: SeenMessages, wanted: BatchEntries, starts: Int64, stops: Int64
    ) -> None:
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
        differs = found & ~_same(there, wanted)
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
        lost: LostSpans,
    ) -> None:
        self._log = CommitLog(layout, files=files)
        self._start = layout.commit_log.start
        self._queue = queue
        self._end = log_end
        self._lost = lost
        first, stop = (seen.first_offset, seen.next_offset) if seen.messages else (0, 0)
        self._gaps = [(0, first), *seen.gaps, (stop, 1 << 62)]
        self._groups: dict[str, tuple[Difference, int]] = {}

    def differences(self) -> Iterator[Difference]:
        last = 0
        for file, stored in self._queue.batches():
            written, entries = is_batch_written(stored), own_messages(stored)
            self._note("queue_hole", file.path, ~written, entries, "was never written")
            starts = entries["base"].astype(np.int64)
            stops = starts + entries["count"]
            before = np.append(last, np.maximum.accumulate(np.where(written, stops, 0))[:-1])
            overlaps = written & (starts < np.maximum(before, last))
            text = "has queue offsets that an earlier entry has"
            self._note("queue_misplaced", file.path, overlaps, entries, text)
            last = max(last, int(stops[written].max(initial=0)))
            spare = np.zeros(len(entries), np.bool_)
            for begin, stop in self._gaps:
                spare |= (starts >= begin) & (starts < stop)
            self._check(file.path, entries, written & spare & ~overlaps & (entries["count"] > 0))
        for found, count in self._groups.values():
            reason = found.reason + and_more(count)
            yield replace(found, reason=reason, length=count * ENTRY_SIZE)

    def _check(self, path: str, entries: BatchEntries, spare: Bools) -> None:
        places = entries["physical_offset"].astype(np.int64)
        damaged = spare & within(places, self._lost)
        text = "points to a damaged part of the log"
        self._note("queue_in_damage", path, damaged, entries, text)
        ahead = spare & ~damaged & (places >= self._end)
        text = f"points to a message after the log's end at {self._end}"
        self._note("queue_ahead", path, ahead, entries, text)
        inside = spare & ~damaged & ~ahead & (places >= self._start)
        for at in np.flatnonzero(inside).tolist():
            which = np.zeros(len(entries), np.bool_)
            which[at] = True
            outcome = self._log.outcome_at(int(places[at]), check_crc=False)
            if not isinstance(outcome, Frame):
                text = f"points to {places[at]}, where no frame starts"
                self._note("queue_entry_dangling", path, which, entries, text)
                continue
            text = (
                f"points to the message at {places[at]}, whose queue offset is "
                f"{outcome.queue_offset}"
            )
            self._note("queue_misplaced", path, which, entries, text)

    def _note(self, kind: str, path: str, which: Bools, entries: BatchEntries, reason: str) -> None:
        if not which.any():
            return
        at = int(which.argmax())
        text = f"the entry of queue offset {int(entries['base'][at])} {reason}"
        found, count = self._groups.get(kind, (Difference(kind, path, at * ENTRY_SIZE, text), 0))
        self._groups[kind] = found, count + int(which.sum())


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
    """Return the path of the file, and the byte position in it, where the entry of a queue offset
    is. If the entry is missing, return the place to which a writer would write it.
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
        for name in _FIELDS
        if there[name] != wanted[name]
    ]
    return f"has {', '.join(parts)}"


_CHUNK: Final = 1 << 12


class BatchQueueAudit:
    """Compares one batch queue with the log. ``disk`` is the queue on the disk, None if its files
    are missing or unusable.

    The methods are those of :class:`~logquarry.repair.audit.first_difference.QueueAudit`, but their
    arguments and results are numbers of entries instead of queue offsets.
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
        # Number of the next entry to compare; None until the log's first message of this queue.
        self._at: int | None = None
        self._next = 0
        self._found: FirstDifference | None = None
        self._right = RightBases()
        self._mends = mends

    def take(self, _: Int64, entries: BatchEntries) -> None:
        """Compare the queue with ``entries``, which the next frames of the log should
        have in it.
        """
        self._take(self._right.take(entries) if self._mends else entries[entries["base"] >= 0])

    def _take(self, entries: BatchEntries) -> None:
        if not len(entries):
            return
        starts = entries["base"].astype(np.int64)
        stops = starts + entries["count"]
        expected = int(starts[0]) if self._at is None else self._next
        cuts = falls(starts, stops, expected)
        for at, stop in zip([0, *cuts], [*cuts, len(entries)], strict=True):
            if at in cuts:
                # The topic was deleted and created again: the queue has only the messages since
                # then.
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
            if not self._agrees(entries[at:stop], is_behind_gap=at in breaks):
                self._at += len(entries) - stop
                return

    def _agrees(self, wanted: BatchEntries, *, is_behind_gap: bool) -> bool:
        assert self._at is not None
        if is_behind_gap:
            # The queue can still have entries of messages that the log lost in this gap: skip them.
            self._pass_lost(int(wanted["physical_offset"][0]))
        there = own_messages(self._read(self._at, self._at + len(wanted)))
        same = np.zeros(len(wanted), np.bool_)
        same[: len(there)] = _same(there, wanted[: len(there)])
        if is_behind_gap and not self._continues():
            same[0] = False
        if same.all():
            self._at += len(wanted)
            return True
        first = int(same.argmin())
        at = self._at + first
        offset = int(wanted["base"][first])
        reason = f"entry {at} is not that of queue offset {offset}"
        if at >= self._had:
            reason = f"it ends at entry {self._had}, and the log has its messages from {offset} on"
        self._found = FirstDifference(at, int(wanted["physical_offset"][first]), reason)
        self._at += len(wanted)
        return False

    def _continues(self) -> bool:
        """Whether the entry at ``self._at`` begins where the previous entry ends."""
        assert self._at is not None
        pair = self._read(max(0, self._at - 1), self._at + 1)
        return (
            not self._at
            or len(pair) < 2
            or int(pair[0]["base"]) + int(pair[0]["count"]) == int(pair[1]["base"])
        )

    def _first_position(self, place: int) -> int:
        """Return the number of the first entry that was never written, or that points to ``place``
        or a later offset.

        ``place`` is the physical offset of the queue's first message in the log. Retention must
        have deleted the messages of earlier entries.
        """
        at = 0 if self._disk is None or not self._disk.files else self._disk.files[0].base
        at //= ENTRY_SIZE
        while at < self._had:
            entries = self._read(at, at + _CHUNK)
            passed = (entries["physical_offset"] < place) & is_batch_written(entries)
            if not passed.all():
                return at + int(passed.argmin())
            at += len(entries)
        return self._had

    def _pass_lost(self, place: int) -> None:
        """Skip entries of lost messages, up to the first that points to ``place`` or a later
        offset.
        """
        assert self._at is not None
        while self._at < self._had:
            entry = self._read(self._at, self._at + 1)[0]
            is_lost = self._is_lost(entry) and int(entry["physical_offset"]) < place
            # If a frame has several entries, all but the last have no message: they only bridge a
            # gap in the queue offsets that is too large for one entry.
            if not is_lost and not 0 < entry["reserved"] == entry["count"]:
                return
            self._at += 1

    def _is_lost(self, entry: np.void) -> bool:
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

    def finish(self, log_start: int) -> AuditedQueue:
        """Return the result. Call this only after the whole log is compared."""
        first = None
        if self._disk is not None and self._disk.files:
            first = self._disk.files[0].base // ENTRY_SIZE
        found, end, kept_until = self.difference, self._at, self._had
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
        had, made = self._had, dict[int, bytes]()
        if end is None and self._disk is not None:
            made, stop = bridges(self._disk, log_start)
            if kept_until == had:
                had = kept_until = stop
        return AuditedQueue(
            key=self.key,
            first_entry=first,
            had_until=had,
            ends_empty=bool(files) and len(files) > 1 and files[-1].base // ENTRY_SIZE >= had,
            end=end,
            difference=found,
            kept_until=kept_until,
            moved=self._right.moved,
            bridges=made,
        )


def _same(there: BatchEntries, wanted: BatchEntries) -> Bools:
    same = np.ones(len(wanted), np.bool_)
    for name in _FIELDS:
        same &= there[name] == wanted[name]
    return same
