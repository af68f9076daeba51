"""Writes consume queues. The dispatcher reads a run of messages. This module makes an entry for
each message, groups the entries by queue, and appends them to the queues.

Follows ``ConsumeQueue.putMessagePositionInfo`` and ``fillPreBlank`` of 4.9.3. Only the dispatcher's
thread writes. The writer skips entries that the queue already has, so that a part of the log can
be dispatched again. If a queue does not have all entries before a new entry, the writer raises an
error. In this case, Java writes the new entry at a wrong queue offset, and logs a bug.

Batch queues of RocketMQ 5 follow ``BatchConsumeQueue.putBatchMessagePositionInfo``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import CorruptFile
from logquarry.format import properties as props
from logquarry.format import queue_entry
from logquarry.format.arrays import FIELD_COUNT, Bools, Int64, consecutive
from logquarry.format.batch import ENTRY_SIZE, MOST_MESSAGES, NOT_COMPACTED
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log import codec, columns
from logquarry.log.codec import Window
from logquarry.log.columns import Decoding
from logquarry.log.follow import DispatchRequests, Followed
from logquarry.log.frames import queue_counts
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, is_batch_written
from logquarry.read.log_queues import QueueKey, copies_of
from logquarry.read.queue import UNIT_DTYPE, Units


@dataclass(frozen=True, slots=True)
class QueuePart:
    """The entries that a run of frames has in one queue, in the order of the log.

    ``rows`` contains the frame of each entry, as an index into the run. ``offsets`` contains the
    queue offset of each entry; for an inner batch, it is the queue offset of the first message.
    ``units`` are the entries; in a batch queue, they have the type :data:`BATCH_DTYPE`.
    """

    rows: Int64
    offsets: Int64
    units: Units

    @property
    def counts(self) -> Int64 | None:
        """The number of messages in each entry of a batch queue; None for other queues."""
        return self.units["count"].astype(np.int64) if is_batch(self.units) else None

    def __getitem__(self, which: slice | Int64 | Bools) -> QueuePart:
        """Return some of the entries, selected by a slice, indexes or a mask as in numpy."""
        return QueuePart(self.rows[which], self.offsets[which], self.units[which])


def is_batch(units: Units) -> bool:
    """Whether the entries belong to a batch queue."""
    return units.dtype == BATCH_DTYPE


def load_kernel() -> None:
    """Load the kernel that groups entries. Call this only if kernels can be used."""
    none = np.zeros(0, np.int64)
    codec.require_kernels().group_units(
        *(np.zeros((FIELD_COUNT, 0), np.int64), 0, 0),
        *(np.zeros(1, np.int64), none, none, none.view(np.uint8)),
    )


def parts_of(followed: Followed) -> dict[QueueKey, QueuePart]:
    """Group the entries of a run by queue. Only the message's own queue gets an entry."""
    if followed.table is None:
        return _parts_reference(followed.requests)
    kernels = codec.require_kernels()
    count, queues = followed.table.shape[1], len(followed.queues)
    ends = np.empty(queues + 1, np.int64)
    rows, offsets = np.empty(count, np.int64), np.empty(count, np.int64)
    data = np.empty(count * UNIT_SIZE, np.uint8)
    kernels.group_units(followed.table, count, queues, ends, rows, offsets, data)
    units: Units = data.view(UNIT_DTYPE)
    bounds = ends.tolist()
    return {
        key: QueuePart(rows[start:stop], offsets[start:stop], units[start:stop])
        for key, start, stop in zip(followed.queues, bounds, bounds[1:], strict=False)
    }


def _parts_reference(requests: DispatchRequests) -> dict[QueueKey, QueuePart]:
    units = units_of(requests.physical_offset, requests.size, requests.tags_code)
    queued = np.flatnonzero(requests.is_dispatched)
    ids, queue_ids = requests.topic_ids[queued], requests.queue_id[queued]
    # A stable sort keeps the entries of a queue in the order of the log.
    order = np.lexsort((queue_ids, ids))
    ids, queue_ids, queued = ids[order], queue_ids[order], queued[order]
    cuts = np.flatnonzero((np.diff(ids) != 0) | (np.diff(queue_ids) != 0)) + 1
    parts: dict[QueueKey, QueuePart] = {}
    for part in np.split(np.arange(len(queued)), cuts):
        if len(part):
            key = requests.topics[ids[part[0]]], int(queue_ids[part[0]])
            rows = queued[part]
            parts[key] = QueuePart(rows, requests.queue_offset[rows], units[rows])
    return parts


def parts_with_copies(
    window: Window, followed: Followed, config: StoreConfig
) -> dict[QueueKey, QueuePart]:
    """Group the entries of a run by queue, also for queues that multi-dispatch adds."""
    parts = parts_of(followed)
    batch = [key for key in parts if key[0] in config.batch_topics]
    if batch:
        counts = queue_counts(window, followed.rows)
        for key in batch:
            parts[key] = _batch_part(followed.requests, parts[key], counts)
    if config.enable_multi_dispatch is not False:
        _add_copies(window, followed, parts, config)
    return parts


def _batch_part(requests: DispatchRequests, part: QueuePart, counts: Int64 | None) -> QueuePart:
    entries = np.zeros(len(part.rows), BATCH_DTYPE)
    for name in ("physical_offset", "size", "tags_code"):
        entries[name] = part.units[name]
    entries["store_timestamp"] = requests.store_timestamp[part.rows]
    entries["base"] = part.offsets
    entries["count"] = 1 if counts is None else counts[part.rows]
    entries["compacted_offset"] = NOT_COMPACTED
    return QueuePart(part.rows, part.offsets, entries)


def _add_copies(
    window: Window, run: Followed, parts: dict[QueueKey, QueuePart], config: StoreConfig
) -> None:
    """Add the entries for the queues that multi-dispatch adds (``multiDispatchLmqQueue``)."""
    requests = run.requests
    numbered = columns.rows_with_property(window, run.rows, props.INNER_MULTI_QUEUE_OFFSET)
    queued = numbered[requests.is_dispatched[numbered]]
    if not len(queued):
        return
    units = units_of(requests.physical_offset, requests.size, requests.tags_code)
    copies: dict[QueueKey, list[tuple[int, int]]] = {}
    found = columns.messages(window, run.rows[queued], Decoding())
    for row, message in zip(queued.tolist(), found, strict=True):
        for key, offset in copies_of(message, config):
            copies.setdefault(key, []).append((row, offset))
    for key, pairs in copies.items():
        rows, offsets = np.array(pairs, np.int64).T
        if key in parts:
            rows = np.concatenate((parts[key].rows, rows))
            offsets = np.concatenate((parts[key].offsets, offsets))
            # A message may name its own queue for multi-dispatch, and then has two entries there.
            # The sort is stable, so the first of the two is the message's own entry. Keep only this
            # entry.
            order = np.argsort(rows, kind="stable")
            rows, offsets = rows[order], offsets[order]
            once = np.append(True, np.diff(rows) != 0)
            rows, offsets = rows[once], offsets[once]
        parts[key] = QueuePart(rows, offsets, units[rows])


_FILLER: Final = queue_entry.encode(queue_entry.FILLER)
MOST_GAP: Final = 1 << 24
"""Maximum number of missing entries before a new entry. If more are missing, the writer assumes
that the queue offset of the new entry is damaged: no CRC covers it.
"""
MOST_OFFSET: Final = 1 << 48
"""Maximum queue offset that is accepted. With a million messages per second, a queue would reach
this offset after nine years.
"""
_GAP_AT_ONCE: Final = 1 << 14


class ConsumeQueueWriter:
    """Appends entries to one queue. If a message ends at or before ``physical_end``, its entry is
    skipped.
    """

    def __init__(self, files: MappedFileQueue, name: str = "a consume queue") -> None:
        self.files = files
        self.name = name
        self.physical_end = self._last_physical_end()

    @property
    def next_offset(self) -> int | None:
        """The next queue offset; None if the queue has no file, because then it may start at any
        offset.
        """
        return None if self.files.last is None else self.files.wrote_offset // UNIT_SIZE

    def append(self, offsets: Int64, units: Units) -> int:
        """Append entries in the log's order, and return the number of new entries.

        Raises:
            CorruptFile: if entries are missing between the end of the queue and a new entry.
            StoreUnavailable: if a file cannot be created.
        """
        if not len(units):
            return 0
        # The entries are in the log's order, so if the first entry is new, all entries are new.
        if int(units["physical_offset"][0]) + int(units["size"][0]) <= self.physical_end:
            new = units["physical_offset"] + units["size"] > self.physical_end
            offsets, units = offsets[new], units[new]
        # Split the entries where the queue offset does not rise by 1: there is a gap, or the topic
        # was recreated.
        return sum(
            self._append_run(int(offsets[start]), units[start:stop])
            for start, stop in consecutive(offsets)
        )

    def _append_run(self, offset: int, units: Units) -> int:
        if offset < 0:
            # A queue offset cannot be negative, so it is damaged. No CRC covers it.
            units, offset = units[-offset:], 0
            if not len(units):
                return 0
        expected = self.next_offset
        if expected is None:
            self._begin(offset)
            expected = offset
        units = self._following(expected, offset, units)
        if not len(units):
            return 0
        self.files.append(units.tobytes())
        last = units[-1]
        self.physical_end = int(last["physical_offset"]) + int(last["size"])
        return len(units)

    def _following(self, expected: int, offset: int, units: Units) -> Units:
        if offset > expected:
            raise CorruptFile(
                self.name,
                self.files.wrote_offset,
                f"the log continues with queue offset {offset}, and the entries from {expected} "
                "on are missing: run logquarry recover",
                kind="queue_gap",
            )
        # QUIRK: if queue offsets start at 0 again (a recreated topic), Java appends the entry of
        # offset 0 at the end of the queue, and skips the entries after it
        # (test_queue_writer.py::test_a_new_epoch_is_passed_over).
        return units[expected - offset :]

    def _begin(self, offset: int) -> None:
        """Create the queue's first file, and fill it with filler entries up to ``offset``."""
        start = offset * UNIT_SIZE
        file = self.files.writable(start)
        file.append(_FILLER * ((start - file.base) // UNIT_SIZE))

    def _last_physical_end(self) -> int:
        """Return the physical offset after the last entry's message; 0 if there is no entry."""
        end = self.files.wrote_offset
        while end > max(0, self.files.min_offset):
            data = self.files.select(end - UNIT_SIZE, UNIT_SIZE)
            if data is None:
                break
            unit = queue_entry.decode_at(data, 0)
            if unit.is_written and not unit.is_filler:
                return unit.end
            end -= UNIT_SIZE
        return 0


@dataclass(frozen=True, slots=True)
class Mending:
    """The facts with which a recovery rebuilds the end of a queue.

    Attributes:
        resume_at: physical offset of the first message that is not in the queue.
        kept: queue offset -> old entry, for messages that are no longer in the log. If the old
            entry is lost too, the queue gets a filler instead. All readers skip fillers, including
            RocketMQ's.
        moved: physical offset -> correct queue offset, for messages whose queue offset in the log
            is damaged; -1 if the message gets no entry.
        largest_gap: the maximum number of missing entries before a message. If more are missing,
            the message's queue offset is assumed to be wrong.
    """

    resume_at: int
    kept: Mapping[int, bytes]
    moved: Mapping[int, int] = field(default_factory=dict)
    largest_gap: int = MOST_GAP


class ConsumeQueueMender(ConsumeQueueWriter):
    """Rebuilds the end of a queue from a log in which messages were lost. The entries before this
    end are sound, and are not changed.
    """

    def __init__(self, files: MappedFileQueue, name: str, mending: Mending) -> None:
        super().__init__(files, name)
        # Skip messages before this offset: they have entries already, or their topic was deleted.
        self.physical_end = mending.resume_at
        self._mending = mending
        self._harmed = np.fromiter(mending.moved, np.int64)

    def append(self, offsets: Int64, units: Units) -> int:
        """See :meth:`ConsumeQueueWriter.append`."""
        if len(self._harmed):
            offsets = offsets.copy()
            places = units["physical_offset"]
            for at in np.flatnonzero(np.isin(places, self._harmed)).tolist():
                offsets[at] = self._mending.moved[int(places[at])]
        if len(offsets) and offsets.max() > MOST_OFFSET:
            units, offsets = units[offsets <= MOST_OFFSET], offsets[offsets <= MOST_OFFSET]
        return super().append(offsets, units)

    def _following(self, expected: int, offset: int, units: Units) -> Units:
        if offset < expected:
            # The topic was deleted and recreated, so remove the old entries.
            first = self.files.min_offset // UNIT_SIZE
            start = max(first, offset) * UNIT_SIZE
            self.files.truncate_to(start)
            return units[max(0, first - offset) :]
        if offset > expected + self._mending.largest_gap:
            return units[:0]
        kept = self._mending.kept
        for start in range(expected, offset, _GAP_AT_ONCE):
            numbers = range(start, min(start + _GAP_AT_ONCE, offset))
            self.files.append(b"".join(kept.get(number, _FILLER) for number in numbers))
        return units


def units_of(physical_offset: Int64, size: Int64, tags_code: Int64) -> Units:
    """Make entries of 20 bytes, as in queue files."""
    units = np.empty(len(physical_offset), UNIT_DTYPE)
    units["physical_offset"] = physical_offset
    units["size"] = size
    units["tags_code"] = tags_code
    return units


def without_gaps(entries: BatchEntries, expected: int) -> BatchEntries:
    """Extend the entries of a batch queue, so that the queue continues at ``expected`` without a
    gap in its queue offsets.

    If messages were lost before an entry, the entry is extended so that it begins where the
    previous entry ends. The reason: to find an offset, a broker searches for the last entry that
    begins at or before this offset. With the extension, a consumer that requests a lost message
    gets the frame after the gap. Without the extension, the consumer would get the frame before
    the gap, and might request the lost message forever.

    The reserved field of an entry gets the number of lost messages; brokers ignore this field. If
    an extended entry has more messages than its count field can hold, the frame gets several
    entries. The last of these entries has the frame's own messages.
    """
    starts = entries["base"].astype(np.int64)
    stops: Int64 = starts + entries["count"]
    begins: Int64 = np.append(expected, stops[:-1])[: len(stops)]
    if (begins == starts).all():
        return entries
    times = -(-(stops - begins) // MOST_MESSAGES)
    made = np.repeat(entries, times)
    after = np.repeat(np.cumsum(times), times) - np.arange(len(made)) - 1
    ends = np.repeat(stops, times) - after * MOST_MESSAGES
    made["base"] = np.maximum(np.repeat(begins, times), ends - MOST_MESSAGES)
    made["count"] = ends - made["base"]
    made["reserved"] = np.minimum(np.repeat(starts, times) - made["base"], made["count"])
    return made


def falls(starts: Int64, stops: Int64, expected: int) -> list[int]:
    """Return the indexes of entries that begin before the previous entry ends. At such an entry,
    the topic was recreated.
    """
    return np.flatnonzero(starts < np.append(expected, stops[:-1])[: len(starts)]).tolist()


def _new_part(entries: BatchEntries, expected: int) -> BatchEntries:
    """Return the part of ``entries`` that the queue does not have yet.

    An entry is removed if the queue already has all its messages. If the queue has only the first
    messages of an entry, the entry is shortened to the other messages. The writer of a queue with
    20-byte entries also skips entries that the queue has.

    QUIRK: Java appends all entries, because ``putBatchMessagePositionInfo`` compares only physical
    offsets (test_batch_queue_writer.py::test_a_recreated_topic_continues_after_the_known_entries).
    """
    entries = entries[entries["base"] > expected - entries["count"].astype(np.int64)]
    if len(entries) and (known := expected - int(entries["base"][0])) > 0:
        # The queue already has the first messages of this frame, but not the others.
        entries = entries.copy()
        entries["base"][0] += known
        entries["count"][0] -= known
    return entries


class BatchQueueWriter(ConsumeQueueWriter):
    """Appends entries to one batch queue.

    If a recovery passes a ``mending``, the writer fills gaps, and empties the queue if the topic of
    the queue was recreated.
    """

    def __init__(self, files: MappedFileQueue, name: str, mending: Mending | None = None) -> None:
        self._next: int | None = None
        super().__init__(files, name)
        self._mending = mending
        if mending is not None:
            self.physical_end = mending.resume_at

    @property
    def next_offset(self) -> int | None:
        """The next queue offset; None for an empty queue, which may start at any offset."""
        return self._next

    def append(self, offsets: Int64, units: BatchEntries) -> int:
        """See :meth:`ConsumeQueueWriter.append`."""
        if self._mending is not None and self._mending.moved:
            units = units.copy()
            for at, place in enumerate(units["physical_offset"].tolist()):
                units["base"][at] = self._mending.moved.get(place, units["base"][at])
        new = units[(units["physical_offset"] >= self.physical_end) & (units["base"] >= 0)]
        if not len(new):
            return 0
        starts = new["base"].astype(np.int64)
        expected = int(starts[0]) if self._next is None else self._next
        cuts = falls(starts, starts + new["count"], expected)
        return sum(
            self._append_run(int(starts[at]), new[at:stop])
            for at, stop in zip([0, *cuts], [*cuts, len(new)], strict=True)
            if at < stop
        )

    def _append_run(self, offset: int, units: BatchEntries) -> int:
        expected = offset if self._next is None else self._next
        if offset < expected:
            if self._mending is None:
                units = _new_part(units, expected)
                if not len(units):
                    return 0
            else:
                if self.files.bases:
                    # The topic was deleted and recreated, so remove the old entries.
                    self.files.truncate_to(self.files.min_offset)
                expected = offset
        made = without_gaps(units, expected)
        if made is not units and (
            self._mending is None or len(made) > len(units) + MOST_GAP // MOST_MESSAGES
        ):
            raise CorruptFile(
                self.name,
                self.files.wrote_offset,
                f"the log continues with other queue offsets after {expected}, and entries are "
                "missing: run logquarry recover",
                kind="queue_gap",
            )
        self.files.append(made.tobytes())
        self._note_last(made[-1])
        return len(units)

    def _note_last(self, last: np.void) -> None:
        self._next = int(last["base"]) + int(last["count"])
        self.physical_end = int(last["physical_offset"]) + int(last["size"])

    def _last_physical_end(self) -> int:
        end = self.files.wrote_offset
        if end > max(0, self.files.min_offset):
            data = self.files.select(end - ENTRY_SIZE, ENTRY_SIZE)
            if data is not None:
                entries = np.frombuffer(data, BATCH_DTYPE)
                if is_batch_written(entries)[0]:
                    self._note_last(entries[0])
                    return self.physical_end
        return 0


def unqueued_parts(followed: Followed) -> dict[QueueKey, QueuePart]:
    """Return the entries that the frames without a queue entry would have, grouped by the queue
    that each frame names.
    """
    requests = followed.requests
    if requests.is_dispatched.all():
        return {}
    return parts_of(_with_dispatched(followed, ~requests.is_dispatched))


def with_queued(followed: Followed, harmed: Mapping[int, object]) -> Followed:
    """Return the same frames, changed so that the frames at the physical offsets in ``harmed`` get
    queue entries too.
    """
    if not harmed or followed.requests.is_dispatched.all():
        return followed
    places = np.fromiter(harmed, np.int64, len(harmed))
    is_harmed = np.isin(followed.requests.physical_offset, places)
    if not is_harmed.any():
        return followed
    return _with_dispatched(followed, followed.requests.is_dispatched | is_harmed)


def _with_dispatched(followed: Followed, is_dispatched: Bools) -> Followed:
    # Without the kernel's table, the pure-Python reference groups the entries.
    requests = replace(followed.requests, is_dispatched=is_dispatched)
    return replace(followed, table=None, requests=requests)
