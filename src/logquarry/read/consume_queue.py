"""One consume queue: queue offset -> physical offset, as ``ConsumeQueue`` reads it.

:class:`Queue` is what a queue can be asked, whatever it is read from; :class:`ConsumeQueue` reads
the files, :class:`logquarry.read.log_queues.LogQueue` is built from the log where there
are none.

Guarantees: nothing raises on any bytes; a range is never larger in memory than what the files
hold, unless the caller asks for it by its length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.disk.open_files import OpenFiles
from logquarry.errors import UsageError
from logquarry.format import java, queue_entry
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE, QueueEntry
from logquarry.log.layout import FileSequence, StoreFile, StoreLayout

UNIT_DTYPE: Final = queue_entry.LAYOUT.dtype()
Units = npt.NDArray[np.void]
"""Units as they stand on disk: fields physical_offset, size and tags_code, big-endian."""

StoreTime = Callable[[int, int], int]
"""(physical offset, size) -> store timestamp of the message there, -1 if there is none."""

MOST_HOLES: Final = 1 << 24
"""Units without a file that one range may span."""

_FIRST_CHUNK: Final = 512
_LARGEST_CHUNK: Final = 1 << 16
_NO_MESSAGE_TIME: Final = 1_000


@dataclass(frozen=True, slots=True)
class QueueSegment:
    """One file of a queue.

    Attributes:
        start: queue offset of its first unit.
        count: units that are written in it.
    """

    start: int
    count: int


class Queue(ABC):
    """What a consume queue can be asked. Offsets are queue offsets: they count units.

    Attributes:
        topic: its topic.
        queue_id: its number in the topic.
        units_per_file: room of a queue file; no ``get`` reads past the end of one.
    """

    topic: str
    queue_id: int
    units_per_file: int

    @property
    @abstractmethod
    def min_offset(self) -> int:
        """The first offset whose message is still in the log (``getMinOffsetInQueue``)."""

    @property
    @abstractmethod
    def max_offset(self) -> int:
        """One past the last offset (``getMaxOffsetInQueue``)."""

    def bounds(self) -> tuple[int, int]:
        """Min and max offset."""
        return self.min_offset, self.max_offset

    @property
    @abstractmethod
    def last_physical_end(self) -> int | None:
        """Where the last message ends in the log, as its unit says; None without a message."""

    @property
    @abstractmethod
    def last_entry(self) -> QueueEntry | None:
        """The last unit that stands for a message."""

    @abstractmethod
    def segments(self) -> Iterator[QueueSegment]:
        """The queue's files, first to last, empty ones too."""

    @abstractmethod
    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """The units in ``[start, stop)``: (offset of the first, units), file by file.

        Offsets for which there is no file are passed over. Units that were never written
        (:func:`is_written`) may be among the others.
        """

    def units(self, start: int, stop: int) -> Units:
        """The units in ``[start, stop)``, cut at the queue's end; index 0 is ``start``.

        Where there is no file the units are zeros, and so not written. No copy within one file.

        Raises:
            UsageError: if ``start`` is negative, or the range spans more than MOST_HOLES units
                for which there is no file (:meth:`runs` passes over them).
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
            raise UsageError(f"{holes} of the units from {start} to {stop} have no file")
        joined = np.zeros(stop - start, UNIT_DTYPE)
        for offset, units in runs:
            joined[offset - start : offset - start + len(units)] = units
        return joined

    def entries(
        self, start: int | None = None, stop: int | None = None
    ) -> Iterator[tuple[int, QueueEntry]]:
        """(offset, unit) of the written units in ``[start, stop)``; by default all from the min."""
        first = self.min_offset if start is None else max(0, start)
        end = self.max_offset if stop is None else min(stop, self.max_offset)
        for offset, units in self.runs(first, end):
            for at in np.flatnonzero(is_written(units)).tolist():
                yield offset + at, QueueEntry(*units[at].item())

    def offset_by_time(
        self, timestamp: int, store_time: StoreTime, *, log_min_offset: int = 0
    ) -> int:
        """The offset whose message was stored about ``timestamp`` (``getOffsetInQueueByTime``).

        Java's own search, step for step: a message stored at the very time; else the nearer
        neighbour in the file, the earlier one on a tie; 0 where there is no message at all.

        QUIRK: the file is chosen by its modification time in Java. A file is last written with
        its last message, so that this message's store time stands for it here; copied files, whose
        times have moved, answer the same.
        """
        chosen = self._segment_by_time(timestamp, store_time, log_min_offset)
        if chosen is None or chosen.count == 0:
            return 0
        units = self.units(chosen.start, chosen.start + chosen.count)
        low = max(0, self.min_offset - chosen.start)
        found = _bisect(units, low, timestamp, store_time, log_min_offset)
        if found is None:
            # Where units are missing (Java knows no such queue) the others are searched.
            there = np.flatnonzero(is_written(units))
            low = int(np.searchsorted(there, low))
            found = _bisect(units[there], low, timestamp, store_time, log_min_offset)
            found = int(there[found]) if found is not None and found >= 0 else found
        if found is None:
            return 0
        # QUIRK: without any message -1 byte is added, and the quotient cut towards zero.
        return max(0, chosen.start + found)

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
        # Mostly the very last one is it.
        for stop in range(len(units), 0, -_LARGEST_CHUNK):
            some = units[max(0, stop - _LARGEST_CHUNK) : stop]
            if stop == len(units) and (last := _time_of(some[-1], store_time, log_min_offset)) >= 0:
                return last
            there = is_written(some) & (some["physical_offset"] >= log_min_offset)
            for at in np.flatnonzero(there)[::-1].tolist():
                found = _time_of(some[at], store_time, log_min_offset)
                if found >= 0:
                    return found
        return _NO_MESSAGE_TIME


class ConsumeQueue(Queue):
    """A queue as its files hold it.

    Opening reads nothing. The last file is read once its end is asked for, others when their
    units are.

    Args:
        layout: the store's files.
        topic: the topic, as its folder is named.
        queue_id: the queue, as its folder is named.
        log_min_offset: physical offset of the log's first byte.
        files: what reads them (default: an own one).
    """

    def __init__(
        self,
        layout: StoreLayout,
        topic: str,
        queue_id: int,
        *,
        log_min_offset: int,
        files: OpenFiles | None = None,
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.log_min_offset = log_min_offset
        self._layout = layout
        self._reader = files or OpenFiles(layout)
        self._tail: tuple[int, int] | None = None
        self._min_offset: int | None = None
        self._use(layout.queue(topic, queue_id))

    def _use(self, sequence: FileSequence) -> None:
        # A name that is no multiple of a unit's size says nothing about queue offsets.
        files = tuple(file for file in sequence.files if file.base % UNIT_SIZE == 0)
        self.sequence = FileSequence(files, sequence.file_size)
        self.units_per_file = sequence.file_size // UNIT_SIZE

    def refresh(self) -> None:
        """Look again at the files, and from the last known unit on."""
        known = self.files[self._tail[0]] if self._tail is not None and self.files else None
        count = self._tail[1] if self._tail is not None else 0
        before = set(self.files)
        self._use(self._layout.queue(self.topic, self.queue_id))
        for file in set(self.files) ^ before:
            self._reader.forget(file.path)
        self._min_offset = None
        self._tail = None
        if known is not None:
            self._tail = self._find_tail(known, count)

    @property
    def files(self) -> tuple[StoreFile, ...]:
        """The files, by the byte offset in the queue at which they start."""
        return self.sequence.files

    @property
    def min_offset(self) -> int:
        """The first offset in the first file whose message is still in the log; else 0.

        QUIRK: ``correctMinOffset`` looks at the first file alone. Where it holds no such unit, or
        none at all, the min stays 0.
        """
        if self._min_offset is None:
            self._min_offset = self._find_min()
        return self._min_offset

    def _find_min(self) -> int:
        if not self.files:
            return 0
        units = self._written_units(0)
        at, chunk = 0, _FIRST_CHUNK
        while at < len(units):
            kept = units["physical_offset"][at : at + chunk] >= self.log_min_offset
            first = int(kept.argmax())
            if kept[first]:
                return self.files[0].base // UNIT_SIZE + at + first
            at, chunk = at + chunk, min(4 * chunk, _LARGEST_CHUNK)
        return 0

    @property
    def max_offset(self) -> int:
        """The index behind the last written unit."""
        if not self.files:
            return 0
        index, count = self._tail_position()
        return self.files[index].base // UNIT_SIZE + count

    @property
    def last_entry(self) -> QueueEntry | None:
        """The last written unit, unless it only pads the file."""
        if not self.files:
            return None
        index, count = self._tail_position()
        if count == 0:
            return None
        entry = QueueEntry(*self._file_units(index)[count - 1].item())
        return None if entry.is_filler else entry

    @property
    def last_physical_end(self) -> int | None:
        """``maxPhysicOffset``, as the last written unit says it."""
        entry = self.last_entry
        return None if entry is None else entry.physical_offset + entry.size

    def segments(self) -> Iterator[QueueSegment]:
        """The queue's files."""
        for index, file in enumerate(self.files):
            yield QueueSegment(file.base // UNIT_SIZE, self._written(index))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """The units in a range, file by file, without a copy."""
        if start >= stop or not self.files:
            return
        index = self.sequence.index_of(start * UNIT_SIZE)
        if index is None:
            index = next((i for i, f in enumerate(self.files) if f.base >= start * UNIT_SIZE), 0)
        for number in range(index, len(self.files)):
            base = self.files[number].base // UNIT_SIZE
            if base >= stop:
                return
            first = max(start, base)
            units = self._written_units(number)[first - base : stop - base]
            if len(units):
                yield first, units

    # ------------------------------------------------------------------------------------ files
    def _tail_position(self) -> tuple[int, int]:
        if self._tail is None:
            self._tail = self._find_tail(None, 0)
        return self._tail

    def _find_tail(self, known: StoreFile | None, count: int) -> tuple[int, int]:
        """(file, units in it) of the last file that has a written unit.

        ``count`` units of the file ``known`` are known to be written.
        """
        for index in range(len(self.files) - 1, -1, -1):
            is_known = known is not None and self.files[index].base == known.base
            units = self._file_units(index)
            written = _written_prefix(units, min(count, len(units)) if is_known else 0)
            if written:
                return index, written
        # ConsumeQueue.recover() begins at the third-last file, and finds nothing there.
        return max(0, len(self.files) - 3), 0

    def _written(self, index: int) -> int:
        """Written units of a file: all of them in the files before the last that has any."""
        tail, count = self._tail_position()
        if index == tail:
            return count
        return len(self._file_units(index)) if index < tail else 0

    def _written_units(self, index: int) -> Units:
        return self._file_units(index)[: self._written(index)]

    def _file_units(self, index: int) -> Units:
        """All the whole units of one file that lie in its own room."""
        file = self.files[index]
        room = self.sequence.file_size
        if index + 1 < len(self.files):
            room = min(room, self.files[index + 1].base - file.base)
        data = self._reader.read(file.path, 0, room)
        return np.frombuffer(data, UNIT_DTYPE, len(data) // UNIT_SIZE)


def _time_of(unit: np.void, store_time: StoreTime, log_min_offset: int) -> int:
    """When the message of a unit was stored; -1 if it is not in the log."""
    physical_offset, size, _ = unit.item()
    if physical_offset < log_min_offset or size <= 0:
        return -1
    return store_time(physical_offset, size)


def _bisect(
    units: Units, low: int, timestamp: int, store_time: StoreTime, log_min_offset: int
) -> int | None:
    """Index of the unit stored about ``timestamp``, as Java looks for it from ``low`` on.

    -1 where it finds no message in the log, None where it comes to a unit that was never written.
    Where a message is missing that should be there, Java gives up at offset 0: so does this, by
    pointing before the queue.
    """
    high = len(units) - 1
    left = right = left_time = right_time = -1
    while high >= low:
        middle = (low + high) // 2
        physical_offset, size, _ = units[middle].item()
        if size <= 0 or physical_offset < 0:
            return None
        if physical_offset < log_min_offset:
            # QUIRK: left moves without its time: it is only taken if a later step sets that.
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
    """Which units RocketMQ counts as present."""
    written: npt.NDArray[np.bool_] = (units["physical_offset"] >= 0) & (units["size"] > 0)
    return written


def has_message(units: Units) -> npt.NDArray[np.bool_]:
    """Which units stand for a message: written, and not there to pad a file."""
    message: npt.NDArray[np.bool_] = is_written(units) & (units["size"] != FILLER_SIZE)
    return message


def _written_prefix(units: Units, start: int) -> int:
    """How many units stand before the first that was not written; ``start`` of them are known."""
    at, chunk = start, _FIRST_CHUNK
    while at < len(units):
        gaps = ~is_written(units[at : at + chunk])
        first = int(gaps.argmax())
        if gaps[first]:
            return at + first
        at, chunk = at + chunk, min(4 * chunk, _LARGEST_CHUNK)
    return len(units)
