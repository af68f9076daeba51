"""Finds the frames whose transaction type damage has changed to PREPARED or ROLLBACK.

No CRC covers SYSFLAG, which has the transaction type. RocketMQ makes a queue entry for each message
of type NOT or COMMIT, and never for a message of type PREPARED or ROLLBACK. So the type of a
PREPARED or ROLLBACK frame is *harmed* if all these conditions are true:

- The queue that the frame names has an entry for the frame: an entry at the frame's queue offset,
  with the frame's physical offset, size and tags code.
- This entry has a neighbour: another entry, at most ``_MOST_NEIGHBOURS`` entries away, whose frame
  names this queue and the neighbour's queue offset. If the queue has only one entry, the entry
  needs no neighbour. Without this condition, the old entry of a message that a recovery has removed
  from the log could be mistaken for evidence of a harmed type.

PREPAREDTRANSACTIONOFFSET shows the right type. A broker sets the field only for the types COMMIT
and ROLLBACK, so the right type is COMMIT if the field is not 0. If the field is 0, the right type
is NOT, or it is COMMIT, because the delivered copy of a delayed COMMIT message has 0 too. Salvage
then writes NOT. Consumers treat both types in the same way.

Nothing in the store shows these changes, so the audit cannot find them:

- from NOT to COMMIT or back. Queues and index have the same entries for both types.
- from PREPARED to ROLLBACK or back. No queue has the message, with either type.
- to PREPARED or ROLLBACK, if the queue has no entry for the message, for example because the
  message was the last one before a crash.

If damage changes PREPARED or ROLLBACK to NOT or COMMIT, the message has no place in the queue that
its frame names. Such a message is a stray (``SeenMessages.without_strays``). In a store of
3.x, state table and redo log show most changes, too (:mod:`logquarry.dialect31.state_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from logquarry.dialect31.open_transactions import TransactionFrame
from logquarry.format import properties as props
from logquarry.format import sys_flag
from logquarry.format.arrays import Bools, Int32, Int64
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Span
from logquarry.read.batch_queue import queue_entry_of
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_end import DamageMap
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.repair.audit.differences import TagsRule, and_more, queue_name, same_entries
from logquarry.repair.audit.harmed_ids import NotedEntries
from logquarry.repair.audit.queue_evidence import entries_at
from logquarry.repair.findings import Finding, finding
from logquarry.write.queue_writer import QueuePart, parts_of, units_of

KIND: Final = "harmed_transaction_type"
NAMES: Final[Mapping[int, str]] = {
    sys_flag.TRANSACTION_NOT: "NOT",
    sys_flag.TRANSACTION_PREPARED: "PREPARED",
    sys_flag.TRANSACTION_COMMIT: "COMMIT",
    sys_flag.TRANSACTION_ROLLBACK: "ROLLBACK",
}
_MOST_NEIGHBOURS: Final = 16
"""Maximum number of entries to read on each side of an entry."""
_MOST_SKIPPED: Final = 1 << 10
"""Maximum number of entries to read without need between two entries."""


class HarmedType(NamedTuple):
    """A frame with a harmed transaction type: its queue, its offsets, and both types."""

    key: QueueKey
    queue_offset: int
    physical_offset: int
    size: int
    stored: int
    right: int

    @property
    def text(self) -> str:
        """The text of a finding: both types, and the evidence."""
        is_end = self.right == sys_flag.TRANSACTION_COMMIT
        right = "COMMIT" if is_end else "NOT or COMMIT"
        return (
            f"the frame has the transaction type {NAMES[self.stored]}, but {queue_name(self.key)} "
            f"has the message at {self.queue_offset}: the right type is {right}"
        )


class HarmedTypes:
    """Finds the frames of a store with a harmed transaction type.

    Args:
        queue_of: returns a queue; None if it has no usable files.
        noted: the entries that an interrupted recovery saved before it cut the queues.

    Attributes:
        found: physical offset -> the harmed frame, for each harmed frame so far.
    """

    def __init__(
        self,
        layout: StoreLayout,
        queue_of: Callable[[QueueKey], Queue | None],
        noted: NotedEntries | None = None,
    ) -> None:
        self.found: dict[int, HarmedType] = {}
        self._log = CommitLog(layout)
        self._levels = layout.delay_levels_ms
        self._queue_of = queue_of
        self._noted = noted or {}
        self._spans: list[Span] = []
        self._bytes = DamageMap(self._spans)

    def __contains__(self, offset: object) -> bool:
        """Whether a physical offset lies in one of the frames that :meth:`take` has found."""
        return offset in self._bytes

    def queued(self, followed: Followed) -> Followed:
        """Search some frames, and return them with the entries of the harmed frames."""
        self.take(unqueued_parts(followed))
        return with_queued(followed, self.found)

    def take(self, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Search the frames of :func:`unqueued_parts`. The calls follow the order of the log."""
        new = sorted(place for key, part in parts.items() for place in self._search(key, part))
        self._spans += [Span(place, self.found[place].size) for place in new]

    def _search(self, key: QueueKey, part: QueuePart) -> Iterator[int]:
        queue, noted = self._queue_of(key), self._noted.get(key, {})
        if queue is not None:
            order = np.argsort(part.offsets, kind="stable")
            order = order[part.offsets[order] < queue.max_offset]
            # Many half messages have the queue offset 0, and half messages of 3.1 leave gaps, so
            # read many entries at once.
            cuts = np.flatnonzero(np.diff(part.offsets[order]) > _MOST_SKIPPED) + 1
            for some in np.split(order, cuts) if len(order) else ():
                wanted, there = part.units[some], entries_at(queue, part.offsets[some])
                same = there["physical_offset"] == wanted["physical_offset"]
                for at in np.flatnonzero(same & (there["size"] == wanted["size"])).tolist():
                    offset = int(part.offsets[some[at]])
                    if self.check(queue, offset, QueueEntry(*there[at].item())):
                        yield int(wanted["physical_offset"][at])
        for offset, unit in zip(part.offsets.tolist(), part.units, strict=True) if noted else ():
            entry = noted.get(offset)
            if entry is not None and entry[:2] == unit.item()[:2]:
                frame = self._harmed(key, offset, entry)
                # The interrupted recovery has checked the entry's neighbours, and may have cut the
                # neighbours off.
                if frame is not None and entry.physical_offset not in self.found:
                    self._note(key, frame)
                    yield entry.physical_offset

    def check(self, queue: Queue, offset: int, entry: QueueEntry) -> bool:
        """Return whether an entry of a queue shows that its frame has a harmed type, and record
        such a frame.
        """
        frame = self._harmed(queue.key, offset, entry)
        if frame is None or not self._has_neighbour(queue, offset):
            return False
        self._note(queue.key, frame)
        return True

    def _note(self, key: QueueKey, frame: Frame) -> None:
        is_end = frame.prepared_transaction_offset != 0
        right = sys_flag.TRANSACTION_COMMIT if is_end else sys_flag.TRANSACTION_NOT
        stored = sys_flag.transaction_type(frame.sys_flag)
        place = frame.physical_offset
        self.found[place] = HarmedType(key, frame.queue_offset, place, frame.size, stored, right)

    def _harmed(self, key: QueueKey, offset: int, entry: QueueEntry) -> Frame | None:
        """Return the frame of an entry if only the frame's transaction type contradicts the entry;
        else None.
        """
        frame = self._log.frame_of(entry)
        if frame is None or sys_flag.advances_queue(frame.sys_flag):
            return None
        if frame.queue_key != key or frame.queue_offset != offset:
            return None
        values = props.decode_bytes(frame.properties)
        code = props.tags_code(key[0], values, frame.store_timestamp, self._levels)
        there, wanted = (
            units_of(*(np.array([number], np.int64) for number in (*entry[:2], one)))
            for one in (entry.tags_code, code)
        )
        rule = TagsRule.of_readers(key[0])
        return frame if same_entries(there, wanted, rule)[0] else None

    def _has_neighbour(self, queue: Queue, offset: int) -> bool:
        """Whether the entry at an offset has a neighbour, or is the only entry of the queue. See
        the conditions in the module's docstring. The neighbour's own type may be harmed, too.
        """
        count = 1
        for _, rows in queue.rows(offset, offset + 1) if queue.is_batch else ():
            count = int(rows["count"][0])
        if queue.max_offset - queue.min_offset == count:
            return True
        first = max(queue.min_offset, offset - _MOST_NEIGHBOURS)
        stop = min(queue.max_offset, offset + count + _MOST_NEIGHBOURS)
        for at, entry in _entries(queue, first, stop):
            if at != offset and not entry.is_filler:
                frame = self._log.frame_of(entry)
                if frame is not None and (frame.queue_key, frame.queue_offset) == (queue.key, at):
                    return True
        return False

    def differences(self, key: QueueKey, layout: StoreLayout) -> Iterator[Finding]:
        """Yield a finding for the harmed frames of one queue, if there are any."""
        some = sorted(place for place, one in self.found.items() if one.key == key)
        if some:
            first = self.found[some[0]]
            text = first.text + and_more(len(some))
            yield finding(KIND, layout.log_file(some[0]), some[0], text, first.size)


def _entries(queue: Queue, start: int, stop: int) -> Iterator[tuple[int, QueueEntry]]:
    """Yield the entries in a range. An entry of a batch queue has the offset of its first message,
    which can be before the range.
    """
    if not queue.is_batch:
        yield from queue.entries(start, stop)
        return
    for _, rows in queue.rows(start, stop):
        for row in rows[np.diff(rows["base"], prepend=-1) != 0]:
            yield int(row["base"]), queue_entry_of(row)


def corrected(
    frames: Iterable[TransactionFrame], found: Mapping[int, HarmedType]
) -> Iterator[TransactionFrame]:
    """Yield the transaction frames of 3.x with their right types. ``found`` contains the harmed
    frames by physical offset.
    """
    for frame in frames:
        harmed = found.get(frame.physical_offset)
        if harmed is None:
            yield frame
        elif harmed.right != sys_flag.TRANSACTION_NOT:
            yield frame._replace(kind=harmed.right)


class EitherMap(Container[int]):
    """A container of the physical offsets that are in at least one of several containers."""

    def __init__(self, *parts: Container[int]) -> None:
        self._parts = parts

    def __contains__(self, offset: object) -> bool:
        return any(offset in part for part in self._parts)


def unqueued_parts(followed: Followed) -> dict[QueueKey, QueuePart]:
    """Make the entries that the frames without a queue entry would have, grouped by the queue that
    each frame names.
    """
    requests = followed.requests
    if requests.is_dispatched.all():
        return {}
    return parts_of(_with_dispatched(followed, ~requests.is_dispatched))


def with_queued(followed: Followed, harmed: Mapping[int, HarmedType]) -> Followed:
    """Return some frames, with queue entries also for the frames at the physical offsets in
    ``harmed``.
    """
    if not harmed or followed.requests.is_dispatched.all():
        return followed
    places = np.fromiter(harmed, np.int64, len(harmed))
    is_harmed = np.isin(followed.requests.physical_offset, places)
    if not is_harmed.any():
        return followed
    return _with_dispatched(followed, followed.requests.is_dispatched | is_harmed)


def _with_dispatched(followed: Followed, is_dispatched: Bools) -> Followed:
    # Remove the table that the kernel made: the pure-Python reference then groups the entries.
    requests = replace(followed.requests, is_dispatched=is_dispatched)
    return replace(followed, table=None, requests=requests)


def right_flags(flags: Int32, places: Int64, rights: Mapping[int, int]) -> Int64:
    """Return the SYSFLAG of some frames, with the right transaction types. ``places`` contains the
    physical offsets of the frames; ``rights`` contains the right types, by physical offset.
    """
    right = flags.astype(np.int64)
    for row in np.flatnonzero(np.isin(places, list(rights))).tolist() if rights else ():
        kind = rights[int(places[row])]
        right[row] = right[row] & ~sys_flag.TRANSACTION_MASK | kind
    return right
