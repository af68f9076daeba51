"""A consume queue that can be read: queue offset -> physical offset.

:class:`Queue` is the interface. :class:`logquarry.read.consume_queue.ConsumeQueue` and
:class:`logquarry.read.batch_queue.BatchQueue` read a queue's files,
:class:`logquarry.read.rocksdb_queue.RocksQueue` reads RocksDB, and
:class:`logquarry.read.log_queues.LogQueue` is made from the log.

Guarantees: damaged bytes never make a read raise. A range takes no more memory than the files,
except in :meth:`Queue.units`, whose caller gives the length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.errors import UsageError
from logquarry.format import java, queue_entry
from logquarry.format.queue_entry import FILLER_SIZE, QueueEntry

NO_CODE: Final = java.LONG_MIN
"""Tags code of an entry whose frame holds several messages, each with other tags. Like an address
into ConsumeQueueExt, the code does not determine the tags."""
UNIT_DTYPE: Final = queue_entry.LAYOUT.dtype()
Units = npt.NDArray[np.void]
"""Entries as on the disk: fields physical_offset, size and tags_code, big-endian."""

StoreTime = Callable[[int, int], int]
"""(physical offset, size) -> store timestamp of the message there, -1 if there is none."""

MOST_HOLES: Final = 1 << 24
"""Maximum number of entries without a file in one range."""

_LARGEST_CHUNK: Final = 1 << 16
_NO_MESSAGE_TIME: Final = 1_000


@dataclass(frozen=True, slots=True)
class QueueSegment:
    """One file of a queue.

    Attributes:
        start: queue offset of its first entry.
        count: entries that are written in it.
    """

    start: int
    count: int


class Queue(ABC):
    """A consume queue that can be read. All offsets are queue offsets: they count entries.

    Attributes:
        topic: its topic.
        queue_id: its number in the topic.
        units_per_file: entries of a queue file; no ``get`` reads past the end of one.
        is_batch: whether several queue offsets may name one frame: an inner batch.
    """

    topic: str
    queue_id: int
    units_per_file: int
    is_batch: bool = False

    @property
    @abstractmethod
    def min_offset(self) -> int:
        """The first offset whose message is still in the log (``getMinOffsetInQueue``)."""

    @property
    @abstractmethod
    def max_offset(self) -> int:
        """One past the last offset (``getMaxOffsetInQueue``)."""

    @property
    def entry_end(self) -> int:
        """The position after the last entry, counted in entries from position 0 of the files."""
        return self.max_offset

    def bounds(self) -> tuple[int, int]:
        """Min and max offset."""
        return self.min_offset, self.max_offset

    def reaches(self, stop: int) -> bool:
        """Whether the files still have all entries before a queue offset: no file was truncated."""
        return True

    @property
    @abstractmethod
    def last_entry(self) -> QueueEntry | None:
        """The last entry that names a message."""

    @property
    def last_physical_end(self) -> int | None:
        """Physical offset at which the last message ends (``maxPhysicOffset``), by its entry;
        None without a message."""
        entry = self.last_entry
        return None if entry is None else entry.physical_offset + entry.size

    @abstractmethod
    def segments(self) -> Iterator[QueueSegment]:
        """The queue's files, first to last, including empty ones."""

    @abstractmethod
    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """The entries in ``[start, stop)``: (offset of the first, entries), file by file.

        Offsets without a file are skipped. Entries that were never written (:func:`is_written`) are
        included.
        """

    def units(self, start: int, stop: int) -> Units:
        """The entries in ``[start, stop)``, cut at the queue's end; index 0 is ``start``.

        Entries without a file are zeros, which count as not written. A range within one file is not
        copied.

        Raises:
            UsageError: if ``start`` is negative, or more than MOST_HOLES entries of the range have
                no file (:meth:`runs` skips them).
        """
        if start < 0:
            raise UsageError(f"there is no queue offset {start}")
        stop = min(stop, self.max_offset)
        if start >= stop:
            return np.empty(0, UNIT_DTYPE)
        runs = list(self.runs(start, stop))
        if len(runs) == 1 and len(runs[0][1]) == stop - start:
            return runs[0][1]
        holes = stop - start - sum(len(units) for _, units in runs)
        if holes > MOST_HOLES:
            raise UsageError(f"{holes} of the entries from {start} to {stop} have no file")
        joined = np.zeros(stop - start, UNIT_DTYPE)
        for offset, units in runs:
            joined[offset - start : offset - start + len(units)] = units
        return joined

    def entries(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[tuple[int, QueueEntry]]:
        """(offset, entry) of the written entries in ``[start, stop)``; by default all."""
        end = self.max_offset if stop is None else min(stop, self.max_offset)
        for offset, units in self.runs(self.min_offset if start is None else max(0, start), end):
            for at in np.flatnonzero(is_written(units)).tolist():
                yield offset + at, QueueEntry(*units[at].item())

    def offset_by_time(
        self, timestamp: int, store_time: StoreTime, *, log_min_offset: int = 0
    ) -> int:
        """The offset whose message was stored about ``timestamp`` (``getOffsetInQueueByTime``).

        Java's search, step for step: a message stored at that time; else the nearer neighbour in
        the file, the earlier one on a tie; 0 if there is no message.

        QUIRK: Java chooses the file by its modification time. A file is last written with its last
        message, so this method uses that message's store time; copied files, whose modification
        times differ, give the same answer.
        """
        chosen = self._segment_by_time(timestamp, store_time, log_min_offset)
        if chosen is None or chosen.count == 0:
            return 0
        units = self.units(chosen.start, chosen.start + chosen.count)
        low = max(0, self.min_offset - chosen.start)
        found = _bisect(units, low, timestamp, store_time, log_min_offset)
        if found is None:
            # If entries are missing (Java has no such queue), the others are searched.
            there = np.flatnonzero(is_written(units))
            low = int(np.searchsorted(there, low))
            found = _bisect(units[there], low, timestamp, store_time, log_min_offset)
            found = int(there[found]) if found is not None and found >= 0 else found
        # QUIRK: without any message -1 byte is added, and the quotient cut towards zero.
        return 0 if found is None else max(0, chosen.start + found)

    def _segment_by_time(
        self, timestamp: int, store_time: StoreTime, log_min_offset: int
    ) -> QueueSegment | None:
        last = None
        for segment in self.segments():
            last = segment
            if self._last_time(segment, store_time, log_min_offset) >= timestamp:
                break
        return last

    def _last_time(self, segment: QueueSegment, store_time: StoreTime, log_min_offset: int) -> int:
        units = self.units(segment.start, segment.start + segment.count)
        stop, chunk = len(units), 1  # Usually the last entry has a message.
        while stop > 0:
            some = units[max(0, stop - chunk) : stop]
            stop, chunk = stop - chunk, min(4 * chunk, _LARGEST_CHUNK)
            there = is_written(some) & (some["physical_offset"] >= log_min_offset)
            for at in np.flatnonzero(there)[::-1]:
                found = store_time(int(some["physical_offset"][at]), int(some["size"][at]))
                if found >= 0:
                    return found
        return _NO_MESSAGE_TIME


def _bisect(
    units: Units, low: int, timestamp: int, store_time: StoreTime, log_min_offset: int
) -> int | None:
    """Index of the entry stored about ``timestamp``, searched from ``low`` on as in Java.

    -1 if it finds no message in the log, None if it reaches an entry that was never written. If a
    message is missing, Java returns offset 0; this function returns an index before the queue.
    """
    high = len(units) - 1
    left = right = left_time = right_time = -1
    while high >= low:
        middle = (low + high) // 2
        physical_offset, size, _ = units[middle].item()
        if size <= 0 or physical_offset < 0:
            return None
        if physical_offset < log_min_offset:
            # QUIRK: left changes, but left_time does not: left counts only if a later step sets its
            # time.
            low, left = middle + 1, middle
            continue
        found = store_time(physical_offset, size)
        if found < 0:
            return java.LONG_MIN
        if found == timestamp:
            return middle
        if found > timestamp:
            high, right, right_time = middle - 1, middle, found
        else:
            low, left, left_time = middle + 1, middle, found
    if left_time == -1:
        return right
    if right_time == -1:
        return left
    return right if abs(timestamp - left_time) > abs(timestamp - right_time) else left


def is_written(units: Units) -> npt.NDArray[np.bool_]:
    """Which entries RocketMQ counts as present."""
    written: npt.NDArray[np.bool_] = (units["physical_offset"] >= 0) & (units["size"] > 0)
    return written


def has_message(units: Units) -> npt.NDArray[np.bool_]:
    """Which entries name a message: those that are written and do not only pad a file."""
    message: npt.NDArray[np.bool_] = is_written(units) & (units["size"] != FILLER_SIZE)
    return message
