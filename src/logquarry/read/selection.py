"""Plans a read with a filter: which ranges of the log and which slices of consume queues it needs.
Spark's reads use this plan too.

A read of some topics reads the frames that the entries of their queues point to. Such a read also
walks the parts of the log that no entry of any queue points to, such as blanks and frames without
an entry. The result is the same as that of a walk over the whole log. A read by key uses the index
in the same way. If the queues may be wrong, the read walks the log. Signs of wrong queues are a
crash (an ``abort`` file), entries that are not in the order of the log, and entries that point to
frames of other queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from logquarry.format import frame
from logquarry.format.arrays import Int32, Int64
from logquarry.log.batches import MessageFilter
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.splits import (
    DEFAULT_SPLIT_SIZE,
    LogExtent,
    LogSplit,
    frame_start,
    log_extent,
    plan_splits,
    split_events,
)
from logquarry.log.walk import DEFAULT_BATCH_BYTES, Event, LogReader
from logquarry.read.commit_log import CommitLog, do_queues_fit
from logquarry.read.index import Index
from logquarry.read.log_end import last_entries, log_bound, sound_bound, warn_of_lost_tail
from logquarry.read.queue import ConsumeQueue, Units, has_message

MOST_UNITS = 1 << 26
"""Maximum number of queue entries that the planner reads. If the store has more, the plan is a
walk.
"""
MOST_PLACES = 1 << 11

WORTHWHILE = 0.5
"""If a read needs a larger share (0 to 1) of the range's bytes, the plan does not use queues or the
index, because a walk over the log is as fast.
"""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The messages that a read returns: those that pass ``wanted`` and start between two physical
    offsets (``stop_offset`` is exclusive).
    """

    wanted: MessageFilter = field(default_factory=MessageFilter)
    start_offset: int | None = None
    stop_offset: int | None = None


@dataclass(frozen=True, slots=True)
class QueueSlice:
    """The entries ``[start, stop)`` of one queue; their messages take ``length`` bytes."""

    topic: str
    queue_id: int
    start: int
    stop: int
    length: int


@dataclass(frozen=True, slots=True)
class PlaceList:
    """Frames found through the index, which has their physical offsets, but not their sizes."""

    offsets: tuple[int, ...]

    @property
    def length(self) -> int:
        """Estimated bytes of the frames, computed with the smallest possible size of a frame."""
        return len(self.offsets) * frame.FIXED_SIZE_V1


Part = LogSplit | QueueSlice | PlaceList


@dataclass(frozen=True)
class ReadPlan:
    """A plan for reading a selection. Picklable, so that workers can read the parts.

    The caller must still apply the filter of the selection to each message. ``live`` is true if a
    writer had the store open when the plan was made.
    """

    selection: Selection
    extent: LogExtent
    parts: Sequence[Part]
    live: bool

    @property
    def uses_queues(self) -> bool:
        """Whether queues or index files are read."""
        return any(not isinstance(part, LogSplit) for part in self.parts)


def plan_read(
    layout: StoreLayout,
    selection: Selection,
    *,
    split_size: int = DEFAULT_SPLIT_SIZE,
    min_parts: int = 1,
    skip_damage: bool = False,
) -> ReadPlan:
    """Divide the read of a selection into parts that can be read independently.

    Args:
        split_size: maximum bytes of messages in a part.
        min_parts: minimum number of parts, if there are enough messages.
        skip_damage: whether reading continues after damage. If true, the planner reads the last
            file to find the log's end (:func:`~logquarry.read.log_end.sound_bound`).
    """
    queues = ConsumeQueue.all_of(layout)
    entries = last_entries(layout)
    known_end = entries[0].end if entries else None
    clean = not layout.has_abort
    live = layout.is_live()
    if not live:
        warn_of_lost_tail(layout, entries, CommitLog(layout).store_time_at)
    bound = log_bound(layout, lambda: entries)
    if layout.writer_end is not None:
        bound = known_end = layout.writer_end
    extent = log_extent(layout, bound, known_end)
    if skip_damage and bound is not None:
        end = sound_bound(layout, bound)
        if end is not None and end < bound:
            # Include the first byte after the log's end, because the part with this byte reports
            # the damage that begins there.
            extent = LogExtent(extent.start, end + 1, bound)
    start, stop = time_range(layout, selection.wanted, extent)
    wished = selection.start_offset
    if selection.stop_offset is not None:
        stop = min(stop, selection.stop_offset)
    if wished is not None and start < wished < stop:
        wished = frame_start(layout, wished)
    if wished is not None:
        start = max(start, wished)
    if clean and not live and entries and stop > start:
        planner = _QueuePlanner(layout, queues, selection, extent, (start, stop), split_size)
        if (parts := planner.parts(min_parts)) is not None:
            return ReadPlan(selection, extent, _from_frame(parts, wished), live)
    splits = plan_splits(
        layout, extent, start=start, stop=stop, split_size=split_size, min_splits=min_parts
    )
    return ReadPlan(selection, extent, _from_frame(splits, wished), live)


def _from_frame(parts: Sequence[Part], start: int | None) -> Sequence[Part]:
    """Change the part that begins at ``start``: it must report damage if no frame begins there. All
    other parts skip the bytes before their first frame, because the previous part reads them.
    """
    return [
        replace(part, resync=False) if isinstance(part, LogSplit) and part.start == start else part
        for part in parts
    ]


def read_part(
    layout: StoreLayout,
    plan: ReadPlan,
    part: Part,
    *,
    check_crc: bool = True,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
) -> Iterator[Event]:
    """Yield the events of one part of a plan."""
    if isinstance(part, LogSplit):
        reader = _reader(layout, plan, check_crc, batch_bytes)
        yield from split_events(reader, part)
    else:
        offsets, sizes = _places(layout, plan, part)
        yield from _named(layout, offsets, sizes, check_crc, batch_bytes)


def filter_of(plan: ReadPlan, part: Part) -> MessageFilter:
    """Return the filter for the messages of a part that is read alone, without the plan's other
    parts.

    With multi-dispatch, several queues can point to one frame. The message must be returned only
    once. So the filter of a part only accepts frames that contain the topic and the queue id of the
    part's queue.
    """
    if not isinstance(part, QueueSlice):
        return plan.selection.wanted
    return replace(
        plan.selection.wanted,
        topics=frozenset({part.topic}),
        queue_ids=frozenset({part.queue_id}),
    )


def read_in_order(
    layout: StoreLayout, plan: ReadPlan, *, check_crc: bool = True
) -> Iterator[Event]:
    """Yield the events of all parts of a plan, in physical order."""
    if not plan.uses_queues:
        # Walk once over the range of all parts, because each part alone would have to search for
        # its first frame.
        splits = [part for part in plan.parts if isinstance(part, LogSplit)]
        if not splits:
            return
        first = min(splits, key=lambda split: split.start)
        start = first.start
        stop = max(split.stop for split in splits)
        whole = start <= plan.extent.start and stop >= plan.extent.stop
        reader = _reader(layout, plan, check_crc, DEFAULT_BATCH_BYTES)
        resync = first.resync and start > plan.extent.start
        yield from reader.events(start, None if whole else stop, resync=resync)
        return
    named = [part for part in plan.parts if not isinstance(part, LogSplit)]
    found = [_places(layout, plan, part) for part in named]
    offsets = np.concatenate([offsets for offsets, _ in found])
    sizes = np.concatenate([sizes for _, sizes in found])
    order = np.argsort(offsets, kind="stable")
    offsets, sizes = offsets[order], sizes[order]
    # Yield each frame only once, although with multi-dispatch, entries of several queues may point
    # to it.
    once = np.flatnonzero(np.diff(offsets, prepend=-1))
    offsets, sizes = offsets[once], sizes[once]
    at = 0
    splits = sorted(
        (part for part in plan.parts if isinstance(part, LogSplit)), key=lambda split: split.start
    )
    for split in [*splits, None]:
        upto = len(offsets) if split is None else int(np.searchsorted(offsets, split.start))
        yield from _named(layout, offsets[at:upto], sizes[at:upto], check_crc, DEFAULT_BATCH_BYTES)
        at = upto
        if split is not None:
            yield from read_part(layout, plan, split, check_crc=check_crc)


def _named(
    layout: StoreLayout, offsets: Int64, sizes: Int32, check_crc: bool, batch_bytes: int
) -> Iterator[Event]:
    # Ignore the sizes in the entries: if one is wrong, the queue is damaged, but the message can be
    # read.
    return runs_at(
        layout, offsets, sizes, check_crc=check_crc, batch_bytes=batch_bytes, any_size=True
    )


def _reader(layout: StoreLayout, plan: ReadPlan, check_crc: bool, batch_bytes: int) -> LogReader:
    return LogReader(
        layout,
        bound=plan.extent.bound,
        check_crc=check_crc,
        batch_bytes=batch_bytes,
        live=plan.live,
    )


def _places(
    layout: StoreLayout, plan: ReadPlan, part: QueueSlice | PlaceList
) -> tuple[Int64, Int32]:
    """Return the physical offsets of a part's frames, in ascending order, and their sizes (0:
    unknown).
    """
    if isinstance(part, PlaceList):
        offsets = np.array(part.offsets, np.int64)
        sizes = np.zeros(len(offsets), np.int32)
    else:
        queue = ConsumeQueue(layout, part.topic, part.queue_id)
        units = queue.units(part.start, part.stop)
        units = units[has_message(units)]
        offsets = units["physical_offset"].astype(np.int64)
        sizes = units["size"].astype(np.int32)
    selection = plan.selection
    keep = (offsets >= plan.extent.start) & (offsets < plan.extent.stop)
    if selection.start_offset is not None:
        keep &= offsets >= selection.start_offset
    if selection.stop_offset is not None:
        keep &= offsets < selection.stop_offset
    offsets, sizes = offsets[keep], sizes[keep]
    order = np.argsort(offsets, kind="stable")
    return offsets[order], sizes[order]


# ------------------------------------------------------------------------------------- by time
def time_range(layout: StoreLayout, wanted: MessageFilter, extent: LogExtent) -> tuple[int, int]:
    """Return the part of the log, in whole files, that can have messages between two store times.

    The function compares the store times of the files' first messages. If these are not in
    ascending order, the clock was set back, and the result is the whole log.
    """
    start, stop = extent.start, extent.stop
    if wanted.since_ms is None and wanted.until_ms is None:
        return start, stop
    log = CommitLog(layout)
    firsts = [
        (file.base, found.store_timestamp)
        for file in layout.commit_log.files
        if file.size and (found := log.sound_frame_at(file.base, check_crc=False)) is not None
    ]
    times = [time for _, time in firsts]
    if times != sorted(times):
        return start, stop
    for base, time in firsts:
        if wanted.since_ms is not None and time < wanted.since_ms:
            start = max(start, base)
        if wanted.until_ms is not None and time >= wanted.until_ms:
            stop = min(stop, base)
            break
    return start, max(start, stop)


# ---------------------------------------------------------------------- through queues and index
@dataclass
class _QueuePlanner:
    layout: StoreLayout
    queues: list[ConsumeQueue]
    selection: Selection
    extent: LogExtent
    range: tuple[int, int]
    split_size: int

    def parts(self, min_parts: int) -> list[Part] | None:
        """Return the parts of a plan that uses queues or the index; None if a walk is better."""
        wanted = self.selection.wanted
        if not (wanted.names_queues or wanted.keys):
            return None
        if sum(queue.max_offset - queue.min_offset for queue in self.queues) > MOST_UNITS:
            return None
        if not all(_is_whole(queue) for queue in self.queues):
            return None
        units = {queue: self._units(queue) for queue in self.queues}
        if any(not _is_ordered(found) for found in units.values()):
            return None
        if (gaps := self._gaps([u for u in units.values() if len(u)])) is None:
            return None
        parts = self._cheaper_parts(units, gaps, min_parts)
        # Check the frames last, because in a remote store the read of each frame takes a request.
        fits = parts is not None and do_queues_fit(self.layout, units, wanted, self.range)
        return parts if fits else None

    def _cheaper_parts(
        self, units: Mapping[ConsumeQueue, Units], gaps: list[LogSplit], min_parts: int
    ) -> list[Part] | None:
        """Return the parts of a plan that uses queues or the index; None if a walk costs less."""
        wanted = self.selection.wanted
        cost = int((self.range[1] - self.range[0]) * WORTHWHILE)
        if wanted.keys is not None:
            found = self._by_index()
            if found is not None:
                places, unindexed = found
                walked = _merged([*gaps, *unindexed])
                if sum(split.length for split in walked) < cost:
                    places = _outside(places, walked)
                    starts = range(0, len(places), MOST_PLACES)
                    return [*walked, *(PlaceList(places[s : s + MOST_PLACES]) for s in starts)]
        if wanted.names_queues:
            slices = [s for q, u in units.items() for s in self._slices(q, u, min_parts)]
            parts: list[Part] = [*gaps, *slices]
            if sum(part.length for part in parts) <= cost:
                return parts
        return None

    def _units(self, queue: ConsumeQueue) -> Units:
        units = queue.units(queue.min_offset, queue.max_offset)
        units = units[has_message(units)]
        offsets = units["physical_offset"]
        return units[(offsets >= self.extent.start) & (offsets < self.extent.stop)]

    def _gaps(self, units: list[Units]) -> list[LogSplit] | None:
        """Return the parts of the wanted range that no entry of any queue points to.

        Return None if the messages of two entries overlap. Then one of the entries is wrong, and
        the bytes to which it points may contain a message that has no entry.
        """
        if not units:
            return None
        first, stop = self.range
        starts = np.concatenate([u["physical_offset"].astype(np.int64) for u in units])
        ends = starts + np.concatenate([u["size"].astype(np.int64) for u in units])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        # Two entries of different queues may point to the same frame and have the same size. Any
        # other overlap of two entries is an error.
        agree = np.where(starts[1:] == starts[:-1], ends[1:] == ends[:-1], starts[1:] >= ends[:-1])
        if not agree.all():
            return None
        gap_starts = np.concatenate([[self.extent.start], ends])
        gap_stops = np.concatenate([starts, [self.extent.stop]])
        tail = self.extent.tail
        gaps: list[LogSplit] = []
        for i in np.flatnonzero(gap_stops > gap_starts).tolist():
            start, end = max(int(gap_starts[i]), first), min(int(gap_stops[i]), stop)
            if start < end:
                # A gap begins at the end of a message, where a frame starts. But if the selection
                # starts in the middle of a gap, its start may be inside a frame. The walk must then
                # search for the next frame (resync).
                inside = start != gap_starts[i]
                gaps.append(LogSplit(start, end, inside, tail is not None and start >= tail))
        return gaps

    def _slices(self, queue: ConsumeQueue, units: Units, min_parts: int) -> Iterator[QueueSlice]:
        """Yield the wanted entries of a queue in slices. The messages of a slice have at most
        ``split_size`` bytes, or fewer if this is needed to get ``min_parts`` slices.
        """
        if not self.selection.wanted.takes_queue(queue.topic, queue.queue_id):
            return
        least, beyond = self.selection.wanted.offsets_of(queue.topic, queue.queue_id)
        first, stop = max(queue.min_offset, least), min(queue.max_offset, beyond)
        if first >= stop:
            return
        sizes = queue.units(first, stop)["size"].astype(np.int64)
        filled = np.cumsum(np.clip(sizes, 0, self.layout.commit_log.file_size))
        limit = max(1, min(self.split_size, -(-int(filled[-1]) // min_parts)))
        at = 0
        while at < len(filled):
            before = int(filled[at - 1]) if at else 0
            end = max(at + 1, int(np.searchsorted(filled, before + limit, "right")))
            length = int(filled[end - 1]) - before
            yield QueueSlice(queue.topic, queue.queue_id, first + at, first + end, length)
            at = end

    def _by_index(self) -> tuple[tuple[int, ...], list[LogSplit]] | None:
        """Return the physical offsets that the index has for the wanted keys, and the ranges of the
        log for which the index has no file. Return None if the index cannot be used.
        """
        index = Index(self.layout, files=OpenFiles(self.layout))
        files = [file for file in index.files if not file.is_empty]
        if not files or not index.is_usable:
            return None
        wanted = self.selection.wanted
        topics = [topic for topic in {q.topic for q in self.queues} if wanted.takes_topic(topic)]
        places: set[int] = set()
        for file, topic, key in product(files, topics, wanted.keys or ()):
            found = file.all_offsets(topic, key)
            if found is None:
                return None
            places.update(o for o in found if self.range[0] <= o < self.range[1])
        # Between the last message of an index file and the first message of the next index file,
        # only messages without keys are expected. But an index file in between may be missing, so
        # the plan walks these ranges, which are usually short.
        edges = [self.extent.start]
        for file in files:
            edges += [file.header.begin_offset, file.header.end_offset]
        edges.append(self.extent.stop)
        if edges != sorted(edges):
            return None
        first, stop = self.range
        unindexed = [
            LogSplit(max(start, first), min(end, stop), resync=True)
            for start, end in zip(edges[::2], edges[1::2], strict=True)
            if max(start, first) < min(end, stop)
        ]
        return tuple(sorted(places)), unindexed


def _is_whole(queue: ConsumeQueue) -> bool:
    runs = queue.runs(queue.min_offset, queue.max_offset)
    return sum(len(units) for _, units in runs) == queue.max_offset - queue.min_offset


def _is_ordered(units: Units) -> bool:
    """Whether the entries of a queue are in the order of the log, and no size is smaller than a
    frame can be.
    """
    offsets = units["physical_offset"].astype(np.int64)
    sizes = units["size"]
    return bool((sizes >= frame.FIXED_SIZE_V1).all()) and bool((np.diff(offsets) > 0).all())


def _outside(places: tuple[int, ...], walked: list[LogSplit]) -> tuple[int, ...]:
    if not walked:
        return places
    starts = np.array([split.start for split in walked], np.int64)
    # The last range (the tail) may start before the previous range stops. So take, for each range,
    # the largest stop of this range and all earlier ranges.
    stops = np.maximum.accumulate(np.array([split.stop for split in walked], np.int64))
    offsets = np.array(places, np.int64)
    before = np.searchsorted(starts, offsets, "right") - 1
    inside = (before >= 0) & (offsets < stops[before])
    return tuple(offsets[~inside].tolist())


def _merged(splits: list[LogSplit]) -> list[LogSplit]:
    merged: list[LogSplit] = []
    for split in sorted(splits, key=lambda s: (s.start, s.resync)):
        last = merged[-1] if merged else None
        if last is not None and split.start <= last.stop and split.tail == last.tail:
            merged[-1] = LogSplit(last.start, max(last.stop, split.stop), last.resync, last.tail)
        else:
            merged.append(split)
    return merged
