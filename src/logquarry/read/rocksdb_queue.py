"""Reads the consume queues that RocketMQ 5 keeps in RocksDB (``RocksDBConsumeQueueStore``).

A broker keeps its newest entries in memory, and writes them to the files of RocksDB at a clean
shutdown, or when there are enough entries. RocksDB also records a physical offset, the *dispatched
end*. RocksDB has the entries of all messages before the dispatched end. For later messages, readers
make the entries from the log.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Final

import numpy as np

from logquarry.errors import CorruptFile
from logquarry.format import java
from logquarry.format import queue_entry as table
from logquarry.format.arrays import Int64, Records, consecutive
from logquarry.format.queue_entry import QueueEntry, StoreTime
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb, is_installed, is_there, needs_package
from logquarry.log.store_files import CONSUME_QUEUE, StoreFile, warn_once
from logquarry.log.walk import DamagedSpan, Event, LogReader
from logquarry.read.log_queues import LogQueue, QueueBuilder, QueueKey
from logquarry.read.queue import UNIT_DTYPE, Queue, QueueSegment, Units, warn_of_missing
from logquarry.text import counted

logger = logging.getLogger(__name__)

ROCKSDB_FOLDERS: Final = (CONSUME_QUEUE, "consumequeue_rocksdb")
ENTRY_DTYPE: Final = table.ENTRY.dtype()
RocksEntries = Records

_SEGMENT: Final = 1 << 16
_CHUNK: Final = 1 << 13
"""Maximum number of entries in one array."""


def rocksdb_folders(layout: StoreLayout, parent: str = "") -> tuple[str, ...]:
    """Return the RocksDB folders for queues that exist below ``parent``. Only names are read."""
    found = (f"{parent}{folder}" for folder in ROCKSDB_FOLDERS)
    return tuple(one for one in found if is_there(layout.filesystem, one))


def require_package(layout: StoreLayout) -> None:
    """Raise UsageError if a store has queues in RocksDB, and the package to read them is
    missing.
    """
    if rocksdb_folders(layout) and not is_installed():
        raise needs_package(f"{layout.root}: its queues are")


class QueueDb:
    """A snapshot of the queues in one RocksDB folder of a store.

    RocksDB has the entries of all messages before the physical offset ``dispatched_end``.
    ``bounds`` maps (topic, queue id) to two pairs. The first pair is the first queue offset and the
    physical offset of its message; it is None if the broker has not recorded it. The second pair is
    the last queue offset and the physical offset of its message.

    Raises:
        UsageError: if the package ``rocksdict`` is not installed.
        CorruptFile: if RocksDB cannot read the folder.
    """

    def __init__(self, layout: StoreLayout, folder: str) -> None:
        self.folder = folder
        self._db = RocksDb(layout.filesystem, folder)
        self.path = self._db.path
        self.dispatched_end = 0
        self.bounds: dict[QueueKey, tuple[tuple[int, int] | None, tuple[int, int]]] = {}
        firsts: dict[QueueKey, tuple[int, int]] = {}
        lasts: dict[QueueKey, tuple[int, int]] = {}
        for key, value in self._db.items(table.OFFSETS):
            if key == table.DISPATCHED and len(value) == table.DISPATCHED_END.size:
                (self.dispatched_end,) = table.DISPATCHED_END.struct.unpack(value)
                continue
            name = table.decode_bound_key(key)
            if name is None or len(value) != table.BOUND.size:
                raise self._broken(key, value)
            place, offset = table.BOUND.struct.unpack(value)
            if offset == java.LONG_MAX:
                reason = f"queue {name.queue_id} of {name.topic!r} has the queue offset {offset}"
                raise CorruptFile(self._db.path, 0, reason)
            side = firsts if name.which == table.MIN else lasts
            side[name.topic, name.queue_id] = offset, place
        # The first queue offset may be missing, because the broker records it only after a client
        # has requested it.
        self.bounds = {key: (firsts.get(key), last) for key, last in sorted(lasts.items())}

    def entries(
        self, topic: str, queue_id: int, start: int, stop: int
    ) -> Iterator[tuple[Int64, RocksEntries]]:
        """Yield the queue offsets in ``[start, stop)`` and their entries, in order, as pairs of
        arrays.
        """
        first, end = (table.entry_key(topic, queue_id, max(0, one)) for one in (start, stop))
        keys: list[bytes] = []
        values: list[bytes] = []
        for key, value in self._db.items(table.ENTRIES, first, end):
            if len(key) != len(first) or len(value) != table.ENTRY.size:
                raise self._broken(key, value)
            keys.append(key[-table.OFFSET_SIZE :])
            values.append(value)
            if len(keys) == _CHUNK:
                yield _arrays(keys, values)
                keys, values = [], []
        if keys:
            yield _arrays(keys, values)

    def next_offset(self, topic: str, queue_id: int, start: int, stop: int) -> int:
        """Return the first queue offset in ``[start, stop)`` that has an entry; ``stop`` if none
        has.
        """
        first, end = (table.entry_key(topic, queue_id, max(0, one)) for one in (start, stop))
        for key, _ in self._db.items(table.ENTRIES, first, end):
            return int.from_bytes(key[len(first) - table.OFFSET_SIZE : len(first)])
        return stop

    def lacks_last(self, key: QueueKey, log_min_offset: int) -> bool:
        """Whether a queue has no entry at its last queue offset, although some of its messages have
        not expired. In this case, the entry was lost.

        The broker writes the last entry and the queue's end in one step. The broker deletes an
        entry only if the message is before the log's start.
        """
        last, place = self.bounds[key][1]
        if self.next_offset(*key, last, last + 1) == last:
            return False
        return place >= log_min_offset or any(
            bool((entries["physical_offset"] >= log_min_offset).any())
            for _, entries in self.entries(*key, 0, last)
        )

    def keys(self) -> Iterator[bytes]:
        """Yield the keys of all entries."""
        return (key for key, _ in self._db.items(table.ENTRIES))

    def queues(
        self, tails: Mapping[QueueKey, LogQueue], log_min_offset: int
    ) -> dict[QueueKey, Queue]:
        """Return all queues. ``tails`` are queues made from the messages that are in the log
        after the dispatched end. A queue in RocksDB continues with its tail.
        """
        found: dict[QueueKey, Queue] = dict(tails)
        for key in self.bounds:
            found[key] = RocksQueue(self, key, log_min_offset, tails.get(key))
        return found

    def _broken(self, key: bytes, value: bytes) -> CorruptFile:
        reason = (
            f"the key {key!r} with a value of {counted(len(value), 'byte')} has no known layout"
        )
        return CorruptFile(self._db.path, 0, reason)


def _arrays(keys: list[bytes], values: list[bytes]) -> tuple[Int64, RocksEntries]:
    offsets = np.frombuffer(b"".join(keys), ">i8").astype(np.int64)
    return offsets, np.frombuffer(b"".join(values), ENTRY_DTYPE)


def open_queues(layout: StoreLayout) -> QueueDb | None:
    """Open the queues in RocksDB; None if readers must make the queues from the log.

    Readers must make them from the log if the store has no queues in RocksDB, if the package
    ``rocksdict`` is missing, or if RocksDB cannot read its files.
    """
    folders = rocksdb_folders(layout)
    if not folders or not is_installed():
        return None
    try:
        found = [QueueDb(layout, folder) for folder in folders]
    except CorruptFile as error:
        # Only warn, because verify reports the damage. Warn once, because several parts of a
        # command open RocksDB.
        warn_once(
            f"{error}: the queues are made from the log. A queue whose messages have all expired "
            "is missing then, and its offsets would begin at 0 again"
        )
        return None
    return max(found, key=lambda one: one.dispatched_end)


def rocksdb_queues(layout: StoreLayout) -> list[RocksQueue]:
    """Return the queues that RocksDB has. If RocksDB has damaged blocks, the entries in them
    are missing, and each read logs a warning.
    """
    database = open_queues(layout)
    if database is None:
        return []
    start = layout.commit_log.start
    return [RocksQueue(database, key, start, None, is_strict=False) for key in database.bounds]


def derived_queues(
    layout: StoreLayout, reader: LogReader
) -> tuple[Mapping[QueueKey, Queue], int | None]:
    """Return two results: the queues in RocksDB, continued with entries for the log's later
    messages, and the log's end.

    If RocksDB cannot be used, the queues are made from the whole log. The log's end is None if the
    log is empty.
    """
    database, start = open_queues(layout), None
    if database is not None and layout.commit_log.at(database.dispatched_end) is not None:
        start = database.dispatched_end
    builder = QueueBuilder(layout.config, layout.delay_levels_ms)
    made = builder.add(_with_warnings(reader.events(start))).queues()
    if database is None:
        return made, builder.log_end
    return database.queues(made, layout.commit_log.start), builder.log_end


def _with_warnings(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of a walk. Warn of damage: the queues lack the damaged messages."""
    for event in events:
        if isinstance(event, DamagedSpan) and not event.is_tail:
            end = "the queues end there" if event.ends_log else "the queues lack the messages there"
            warn_once(
                f"{event.path}: at {event.offset}: {event.reason}: "
                f"{counted(event.length, 'byte')} of the log are damaged, and {end}"
            )
        yield event


class RocksQueue(Queue):
    """A queue in RocksDB. After the entries in RocksDB, the queue continues with ``tail``:
    entries for the messages that are in the log after the dispatched end (None if there are none).

    With ``is_strict``, damage in RocksDB raises ``CorruptFile``; otherwise entries are missing.
    ``last_place`` is the physical offset of the last message in RocksDB.
    """

    # RocksDB has no queue files, so a get is not limited to one file. ``units_per_file`` is
    # therefore larger than any queue offset.
    units_per_file = 1 << 62
    files: tuple[StoreFile, ...] = ()

    def __init__(
        self,
        database: QueueDb,
        key: QueueKey,
        log_min_offset: int,
        tail: LogQueue | None,
        *,
        is_strict: bool = True,
    ) -> None:
        self.topic, self.queue_id = key
        self._db = database
        self._key = key
        self._log_min_offset = log_min_offset
        self._tail = tail
        self._is_strict = is_strict
        self._first, (last, self.last_place) = database.bounds[key]
        # After a truncation of the log, RocksDB keeps the entries of truncated messages until new
        # entries replace them. So read RocksDB only up to the start of the tail.
        self._stop = last + 1 if tail is None else min(last + 1, tail.min_offset)

    @cached_property
    def _low(self) -> int:
        """The min offset, found as ``getMinCqOffset`` does."""
        low = 0
        if self._first is not None:
            low, place = self._first
            if place >= self._log_min_offset:
                return low

        def is_kept(offset: int) -> bool:
            entry = self._entry(offset)
            return entry is not None and entry.physical_offset >= self._log_min_offset

        found = bisect_left(range(low, self._stop), True, key=is_kept)
        return low + found

    @property
    def min_offset(self) -> int:
        """See :attr:`Queue.min_offset`."""
        if self._low >= self._stop and self._tail is not None:
            return self._tail.min_offset
        return self._low

    @property
    def max_offset(self) -> int:
        """See :attr:`Queue.max_offset`."""
        return self._stop if self._tail is None else self._tail.max_offset

    @property
    def last_entry(self) -> QueueEntry | None:
        """See :attr:`Queue.last_entry`."""
        if self._tail is not None:
            return self._tail.last_entry
        return self._entry(self._stop - 1)

    def warn_of_gap(self, offset: int) -> None:
        """See :meth:`Queue.warn_of_gap`."""
        warn_of_missing(f"{self._db.path}/{self.topic}/{self.queue_id}", offset)

    def segments(self) -> Iterator[QueueSegment]:
        """Yield segments of at most 65,536 queue offsets, because RocksDB has no files for single
        queues.

        Large gaps are skipped. Otherwise, a damaged bound could cause a huge number of segments.
        """
        at, stop = self.bounds()
        while at < stop:
            yield QueueSegment(at, min(_SEGMENT, stop - at))
            at += _SEGMENT
            if at < self._stop:
                at = self._next_offset(at)

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """Yield the entries in a range, as runs of entries with consecutive queue offsets."""
        for offset, entries in self.rows(start, stop):
            units = np.empty(len(entries), UNIT_DTYPE)
            for name in UNIT_DTYPE.names or ():
                units[name] = entries[name]
            yield offset, units
        if self._tail is not None:
            yield from self._tail.runs(start, stop)

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, RocksEntries]]:
        """See :meth:`Queue.rows`. The result ends before the tail, because the tail's entries are
        not stored.
        """
        for offsets, entries in self._entries(start, min(stop, self._stop)):
            for begin, end in consecutive(offsets):
                yield int(offsets[begin]), entries[begin:end]

    def _entries(self, start: int, stop: int) -> Iterator[tuple[Int64, RocksEntries]]:
        try:
            yield from self._db.entries(*self._key, start, stop)
        except CorruptFile as error:
            if self._is_strict:
                raise
            logger.warning("%s", error)

    def _next_offset(self, start: int) -> int:
        try:
            return self._db.next_offset(*self._key, start, self._stop)
        except CorruptFile:
            # The caller reads the entries next, and that read reports the damage.
            return start

    def _entry(self, offset: int) -> QueueEntry | None:
        for _, found in self._entries(offset, offset + 1):
            return QueueEntry(*found[0].item()[:3])
        return None

    def offset_by_time(
        self, timestamp: int, store_time: StoreTime, *, log_min_offset: int = 0
    ) -> int:
        """The first queue offset of a message stored at ``timestamp`` or later; if there is none,
        the last queue offset.

        If all messages are older, the result differs from that of the broker's search
        (``BoundaryType.LOWER``), which returns the queue's end.
        """
        offsets = range(*self.bounds())

        def time_of(offset: int) -> int:
            place, size, _ = self.units(offset, offset + 1)[0].item()
            return store_time(place, size)

        at = bisect_left(offsets, timestamp, key=time_of)
        return offsets[min(at, len(offsets) - 1)] if offsets else 0
