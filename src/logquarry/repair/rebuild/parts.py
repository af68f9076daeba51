"""Builds consume queues and index with Spark: each task reads a part of the log.

1. Tasks read the runs of the log, and report the queue offsets and the number of keys of each run
   (:class:`FoundRun`). A run is a part of the log with only valid frames.
2. The driver reads the rest of the log. The driver also finds the harmed frames
   (:func:`find_harmed`) and the odd queues (:func:`odd_queues`). Tasks cannot write an odd queue,
   for example because its queue offsets decrease.
3. Tasks write index files and the entries of the other queues. The driver writes the odd queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.errors import CorruptFrame
from logquarry.format.arrays import Int64, consecutive
from logquarry.format.index import IndexHeader, IndexShape
from logquarry.log.codec import Window
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import STRETCH_BYTES, Stretch, StretchReader
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import has_message
from logquarry.repair.audit.harmed_frames import HarmedIds, HarmedType, HarmedTypes, Moved
from logquarry.repair.rebuild.queue_files import OldQueues, QueueFiles
from logquarry.write.index_writer import IndexFileWriter
from logquarry.write.queue_writer import MOST_OFFSET, QueuePart, parts_with_copies

T = TypeVar("T")
Segments = list[tuple[int, int]]

_MOST_SEGMENTS: Final = 1 << 10
"""Maximum number of ranges of consecutive queue offsets that a task reports for a queue. The driver
writes the queues that have more ranges.
"""
_MOST_READ: Final = 1 << 18
"""Maximum number of frames to read in the search for harmed queue ids."""


@dataclass
class FoundRun(Stretch):
    """A part of the log with only valid frames. Call the object with frames to add their facts.

    Attributes:
        queues: queue -> the queue offsets of its messages, in the log's order, as ranges (start,
            stop). The value is None if there are too many ranges.
    """

    config: StoreConfig = field(kw_only=True)
    queues: dict[QueueKey, Segments | None] = field(default_factory=dict)
    keys: int = 0
    ends_with_key: bool = False

    def __call__(self, window: Window, followed: Followed) -> None:
        """Add the next frames."""
        super().__call__(window, followed)
        self.keys += len(followed.key_hashes)
        numbers = followed.key_numbers
        self.ends_with_key = len(numbers) > 0 and int(numbers[-1]) == len(followed.rows) - 1
        for key, part in parts_with_copies(window, followed, self.config).items():
            offsets = part.offsets
            self.queues[key] = _joined(
                self.queues.get(key, []),
                [(int(offsets[a]), int(offsets[b - 1]) + 1) for a, b in consecutive(offsets)],
            )

    def join(self, after: FoundRun) -> bool:
        """Add the run ``after`` to this run, and return True. If ``after`` does not follow this
        run, or if a queue would have too many ranges, return False.
        """
        joined = {
            key: _joined(self.queues.get(key, []), found) for key, found in after.queues.items()
        }
        if self.end != after.start or None in joined.values():
            return False
        self.queues |= joined
        self.end, self.last_time = after.end, after.last_time
        self.count, self.keys = self.count + after.count, self.keys + after.keys
        self.ends_with_key = after.ends_with_key
        return True


def _joined(known: Segments | None, segments: Segments | None) -> Segments | None:
    if known is None or segments is None:
        return None
    if known and segments and known[-1][1] == segments[0][0]:
        known, segments = [*known[:-1], (known[-1][0], segments[0][1])], segments[1:]
    return [*known, *segments] if len(known) + len(segments) <= _MOST_SEGMENTS else None


def find_runs(layout: StoreLayout, config: StoreConfig, start: int, stop: int) -> list[FoundRun]:
    """Return the runs between two physical offsets of one file."""
    reader = StretchReader(layout, keys=layout.config.index_keys)
    found: list[FoundRun] = []
    make = partial(FoundRun, config=config)
    for run in reader.read_all(start, stop, STRETCH_BYTES, make):
        if not (found and found[-1].join(run)):
            found.append(run)
    return found


class _Taken(Stretch, Generic[T]):
    """Collects what ``take`` returns for the frames of a run."""

    def __init__(self, take: Callable[[Window, Followed], T]) -> None:
        super().__init__()
        self.items: list[T] = []
        self._take = take

    def __call__(self, window: Window, followed: Followed) -> None:
        super().__call__(window, followed)
        self.items.append(self._take(window, followed))


def _again(
    layout: StoreLayout,
    spans: Iterable[tuple[int, int]],
    take: Callable[[Window, Followed], T],
) -> Iterator[T]:
    """Read the given runs a second time, without CRC checks. Yield what ``take`` returns for their
    frames."""
    reader = StretchReader(layout, check_crc=False, keys=layout.config.index_keys)
    for start, end in spans:
        at = start
        while at < end:
            upto = min(at + STRETCH_BYTES, end)
            found = _Taken(take)
            if not reader.read(at, upto, found, resync=False):
                raise CorruptFrame(layout.root, at, "the log was changed while it was read")
            yield from found.items
            at = found.end


# -------------------------------------------------------------------------------------- queues
def write_entries(
    layout: StoreLayout,
    config: StoreConfig,
    spans: Sequence[tuple[int, int]],
    disk: Disk,
    folder: Path,
    odd: frozenset[QueueKey],
) -> None:
    """Write the entries of the runs ``spans`` into queue files, except for the queues ``odd``."""
    assert config.queue_file_size is not None
    files = QueueFiles(disk, folder, config.queue_file_size)

    for found in read_entries(layout, config, spans):
        for key, part in found.items():
            if key not in odd:
                files.put(key, part)
    files.finish_put()


def read_entries(
    layout: StoreLayout,
    config: StoreConfig,
    spans: Iterable[tuple[int, int]],
    queued: Callable[[Followed], Followed] = lambda followed: followed,
) -> Iterator[dict[QueueKey, QueuePart]]:
    """Yield the entries of some runs, in dictionaries: queue -> entries. ``queued`` adds entries
    for the frames with a harmed transaction type. Raises CorruptFrame if the log has changed.
    """
    return _again(
        layout, spans, lambda window, found: parts_with_copies(window, queued(found), config)
    )


# --------------------------------------------------------------------------------------- index
@dataclass(frozen=True, slots=True)
class KeySource:
    """Some keys for the index. The keys are those of the run from ``start`` to ``end``, or, if
    ``keys`` is set, those in ``keys`` (physical offsets, store times, hashes). The first ``skip``
    of these keys are left out, and the next ``take`` keys are used.
    """

    start: int
    end: int
    skip: int
    take: int
    keys: tuple[Int64, Int64, Int64] | None = None


def write_index_file(
    layout: StoreLayout,
    sources: Sequence[KeySource],
    disk: Disk,
    path: Path,
    shape: IndexShape,
    *,
    is_first: bool,
) -> None:
    """Write and sync one index file.

    Unless ``is_first``, the first key in ``sources`` is the last key of the previous file. The
    function writes no entry for this key, but the header's begin offset and begin time are those of
    the key's message.
    """
    file = MappedFile(disk, path, 0, shape.file_size, exclusive=True)
    try:
        is_3_1 = layout.config.is_3_1
        writer = IndexFileWriter(file, shape, counts_keys=is_3_1) if is_first else None
        for offsets, times, hashes in _keys(layout, sources):
            at = 0
            if writer is None:
                end = int(times[0]), int(offsets[0])
                before = IndexHeader(0, end[0], 0, end[1], 0, shape.entries)
                writer = IndexFileWriter(file, shape, before, counts_keys=is_3_1)
                at = 1
            writer.put(hashes[at:], offsets[at:], times[at:])
        assert writer is not None
        writer.flush()
    finally:
        file.close()


def _keys(
    layout: StoreLayout, sources: Sequence[KeySource]
) -> Iterator[tuple[Int64, Int64, Int64]]:
    for source in sources:
        if source.keys is not None:
            stop = source.skip + source.take
            offsets, times, hashes = (values[source.skip : stop] for values in source.keys)
            yield offsets, times, hashes
            continue
        span = source.start, source.end
        skip, take = source.skip, source.take
        for found in _again(layout, [span], lambda _, followed: keys_of(followed)):
            offsets, times, hashes = (values[skip : skip + take] for values in found)
            skip = max(0, skip - len(found[0]))
            take -= len(hashes)
            if len(hashes):
                yield offsets, times, hashes
            if not take:
                break
        else:
            reason = "the log was changed while it was read"
            raise CorruptFrame(layout.root, source.start, reason)


def keys_of(followed: Followed) -> tuple[Int64, Int64, Int64]:
    """Return the physical offsets, store times and hashes of the keys of some frames."""
    requests, numbers = followed.requests, followed.key_numbers
    return (
        requests.physical_offset[numbers],
        requests.store_timestamp[numbers],
        followed.key_hashes.copy(),
    )


class KeyCount:
    """Decides which keys of the log go into which index file."""

    def __init__(self, shape: IndexShape) -> None:
        self._room = shape.entries - 1
        self._sources: list[KeySource] = []
        # Whether the last message has a key; None before the first message.
        self._is_last_keyed: bool | None = None
        self.keys = 0

    def add(self, source: KeySource, *, ends_with_key: bool) -> None:
        """Add the keys of the next messages, in the log's order."""
        if source.take:
            self._sources.append(source)
            self.keys += source.take
        self._is_last_keyed = ends_with_key

    def files(self) -> list[list[KeySource]]:
        """Return, for each index file, the argument ``sources`` of :func:`write_index_file`."""
        if self._is_last_keyed is None:
            return []
        count = max(1, -(-self.keys // self._room))
        # If messages without keys follow a full file, RocketMQ still creates another file.
        if self.keys and self.keys % self._room == 0 and not self._is_last_keyed:
            count += 1
        return [
            list(self._between(max(0, number * self._room - 1), (number + 1) * self._room))
            for number in range(count)
        ]

    def _between(self, first: int, stop: int) -> Iterator[KeySource]:
        at = 0
        for source in self._sources:
            low, high = max(first, at), min(stop, at + source.take)
            if low < high:
                yield KeySource(source.start, source.end, low - at, high - low, source.keys)
            at += source.take


class Harmed(NamedTuple):
    """The harmed frames of a log, by physical offset: those with a harmed topic or queue id, and
    those with a harmed transaction type. ``queues`` contains the queues that the frames name, and
    their right queues.
    """

    ids: dict[int, Moved]
    types: dict[int, HarmedType]
    queues: frozenset[QueueKey]


def find_harmed(
    layout: StoreLayout,
    config: StoreConfig,
    old: OldQueues,
    runs: Sequence[FoundRun],
) -> Harmed:
    """Find the frames with a harmed topic, queue id or transaction type
    (:mod:`logquarry.repair.audit.harmed_frames`).

    The right queue has an entry for such a frame. The queue offset of this entry belongs to no
    message of the queue in ``runs``. So the function reads only the frames of entries at such queue
    offsets, at most ``_MOST_READ`` frames.

    Args:
        old: the queues on the disk.
        runs: all runs of the log, in the log's order.
    """
    seen: dict[QueueKey, Segments] = {key: [] for key in old}
    for run in runs:
        for key, segments in run.queues.items():
            # The offsets of a queue with too many ranges are unknown. Do not search for them.
            for first, stop in [(1, MOST_OFFSET)] if segments is None else segments:
                known = seen.setdefault(key, [])
                if first == 0:
                    # A new topic of the same name begins here. Only the entries of the new topic
                    # are in the queue.
                    known.clear()
                known.append((first, stop))
    starts = np.array([run.start for run in runs], np.int64)
    ends = np.array([run.end for run in runs], np.int64)
    log = CommitLog(layout)
    spans: dict[int, int] = {}
    left = _MOST_READ
    gaps = [(*gap, key) for key in old for gap in _gaps(seen[key], old[key].max_offset)]
    for first, stop, key in sorted(gaps, key=lambda gap: gap[1] - gap[0]):
        for offset, units in old[key].runs(first, stop):
            places = units["physical_offset"].astype(np.int64)
            number = np.searchsorted(starts, places, "right") - 1
            inside = has_message(units) & (number >= 0)
            inside[inside] = places[inside] < ends[number[inside]]
            rows = np.flatnonzero(inside)[:left].tolist()
            left -= len(rows)
            for at in rows:
                found = log.sound_frame_at(int(places[at]), check_crc=False)
                if found is not None and found.queue_offset == offset + at:
                    spans[found.physical_offset] = found.physical_offset + found.size
    ids = HarmedIds(layout, old, old.get, is_3_1=config.is_3_1)
    types = HarmedTypes(layout, old.get)
    touched: set[QueueKey] = set()
    count = 0
    for entries in read_entries(layout, config, sorted(spans.items()), types.queued):
        ids.place(entries)
        # ``entries`` also contains the entries in the further queues of multi-dispatch.
        if len(ids.found) + len(types.found) > count:
            touched.update(entries)
            count = len(ids.found) + len(types.found)
    touched.update(found.right for found in ids.found.values())
    return Harmed(ids.found, types.found, frozenset(touched))


def _gaps(segments: Segments, end: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges below ``end`` that no segment covers."""
    at = 0
    for first, stop in sorted(segments):
        if at < min(first, end):
            yield at, min(first, end)
        at = max(at, stop)
    if at < end:
        yield at, end


def odd_queues(
    runs: Iterable[Mapping[QueueKey, Segments | None]], most_gap: int
) -> frozenset[QueueKey]:
    """Return the queues that only the driver can write.

    These are the queues for which one of these conditions is true:

    - Their queue offsets decrease, or are invalid.
    - A task did not report their queue offsets.
    - Their queue offsets have a gap of more than ``most_gap``.
    - They have a gap before a single message: the queue offset of this message may be harmed.
    """
    ends: dict[QueueKey, int] = {}
    odd: set[QueueKey] = set()
    for queues in runs:
        for key, segments in queues.items():
            if key in odd:
                continue
            if segments is None:
                odd.add(key)
                continue
            for first, stop in segments:
                end = ends.get(key)
                if not 0 <= first <= stop <= MOST_OFFSET or (
                    end is not None
                    and (not end <= first <= end + most_gap or end < first == stop - 1)
                ):
                    odd.add(key)
                    break
                ends[key] = stop
    return frozenset(odd)
