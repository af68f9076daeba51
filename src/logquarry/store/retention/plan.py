"""The plan of a retention: compares the age of each file with ``fileReservedTime``, and the use of
the disk with its limits, and decides which files are deleted.

:mod:`logquarry.store.retention.rules` determines age, use and limits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from logquarry import text
from logquarry.dialect31.open_transactions import UnitFiles, read_redo, read_table
from logquarry.disk.log_files import log_paths
from logquarry.format.batch import ENTRY_SIZE
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import INDEX, FileSequence, StoreFile
from logquarry.read.batch_queue import BatchQueue, all_queues
from logquarry.read.commit_log import CommitLog
from logquarry.read.index import Index
from logquarry.read.log_end import last_entries
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import FileQueue, Queue, has_message, is_written
from logquarry.read.rocksdb_queue import RocksQueue, require_package
from logquarry.store.retention.rules import (
    DiskUse,
    RetentionRules,
    Unread,
    first_time_from,
    freed_bytes,
    last_time_in,
    least_used,
    unread,
)
from logquarry.text import counted, document

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpiredFile:
    """A file to delete.

    Attributes:
        path: path relative to the store's root.
        base: offset of the file's first byte, which is also the file's name; 0 for an index file.
        last_timestamp: for a log file, the store time (ms) of its last message. If no message
            starts in the file, the store time of the next message in the log. None for other files.
    """

    path: str
    base: int
    size: int
    reason: str
    last_timestamp: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the file as a JSON document."""
        return document(self, ("path", "size", "last_timestamp", "reason"))


def expired_units(layout: StoreLayout, cut: int) -> tuple[ExpiredFile, ...]:
    """Return the files of the state table and the redo log whose messages are all before ``cut``.

    RocketMQ 3.1.3 deletes the same files (``deleteExpiredStateFile``). If a transaction in such a
    file is still open, it can no longer be ended, because its PREPARED message is deleted too.
    """
    if not layout.has_state_table:
        return ()
    table, redo = layout.state_table, layout.redo_log
    return (
        *_expired(table, read_table(layout), cut),
        *_expired(redo, read_redo(layout), cut),
    )


def _expired(sequence: FileSequence, found: UnitFiles, cut: int) -> list[ExpiredFile]:
    files: list[ExpiredFile] = []
    if len(sequence.files) > 1 and found.fault is not None:
        logger.warning("%s: its files are kept: run verify", found.fault)
        return files
    size = found.units.dtype.itemsize
    for file in sequence.files[:-1]:
        start = file.base // size - found.first
        stop = start + sequence.file_size // size
        # Keep the file with the last entry, even if files without entries follow it.
        if stop >= len(found.units) or int(found.units["physical_offset"][start:stop].max()) >= cut:
            break
        reason = f"all its entries are of messages before the log's start at {cut}"
        files.append(ExpiredFile(file.path, file.base, file.size, reason))
    return files


# --------------------------------------------------------------------------------------------------
# Planning
#
# The rules determine which log files are deleted; the log then starts at the first kept file. The
# retention also deletes each queue file and each index file whose messages are all before this
# start. It keeps the last file of each queue and of the index. RocketMQ deletes the same files
# (``ConsumeQueue.deleteExpiredFile``, ``IndexService.deleteExpiredFile``).

_FIRST_CHUNK: Final = 512
_GROWTH: Final = 4
_PLAN_MEMBERS: Final = (
    *("store", "rules", "now", "min_offset", "new_min_offset", "max_offset"),
    *("log", "queues", "index", "transactions", "bytes", "stays_because"),
    *("disk_ratio", "messages", "unread", "refused"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPlan:
    """The files that a retention deletes. In each list, the oldest file comes first.

    Attributes:
        now: the current time in milliseconds, from which the ages of files are computed.
        min_offset: the log's start.
        new_min_offset: the log's start after the retention.
        max_offset: the log's end.
        transactions: files of the state table, followed by files of the redo log (RocketMQ 3.x).
        stays_because: why the oldest of the remaining log files is not deleted.
        messages: for each topic, the number of messages that the retention deletes, counted in the
            queues.
        unread: the messages to delete that a group has not read. It is empty if an open store
            deleted the files and could not read the groups' offsets.
        refused: the reason why the plan cannot be applied now; None if it can be applied.
    """

    store: str
    rules: RetentionRules
    now: int
    min_offset: int
    new_min_offset: int
    max_offset: int
    log: tuple[ExpiredFile, ...] = ()
    queues: tuple[tuple[QueueKey, tuple[ExpiredFile, ...]], ...] = ()
    index: tuple[ExpiredFile, ...] = ()
    transactions: tuple[ExpiredFile, ...] = ()
    stays_because: str = ""
    disk: DiskUse | None = None
    messages: Mapping[str, int]
    unread: tuple[Unread, ...] = ()
    refused: str | None = None
    applied: bool = field(default=False, compare=False)

    @property
    def files(self) -> tuple[ExpiredFile, ...]:
        """All files to delete, in the order of deletion."""
        queues = (file for _, files in self.queues for file in files)
        return (*self.log, *queues, *self.index, *self.transactions)

    @property
    def bytes(self) -> int:
        """Size of all files to delete."""
        return sum(file.size for file in self.files)

    @property
    def disk_ratio(self) -> float | None:
        """The used part of the disk that holds the log, from 0 to 1; None if unknown."""
        return None if self.disk is None else self.disk.ratio

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON document."""
        queues = [file.to_json() for _, files in self.queues for file in files]
        return document(self, _PLAN_MEMBERS) | {"queues": queues, "applied": self.applied}


def plan_retention(
    layout: StoreLayout,
    rules: RetentionRules,
    *,
    now_ms: int,
    safe_end: int | None = None,
    log_end: int | None = None,
    held: frozenset[str] = frozenset(),
    always_derived: bool = True,
    lists_unread: bool = True,
) -> RetentionPlan:
    """Plan the retention of a local store.

    Args:
        safe_end: physical offset up to which the log is synced and dispatched, so that files before
            it may be deleted; None if no writer has the store open.
        held: paths of the index files that a writer still uses, so that they must not be deleted.
        always_derived: whether to look for expired files of queues and index even if no log file is
            deleted. An interrupted retention may have left such files.
        lists_unread: whether the plan lists the unread messages. Without this list, the planner
            does not read the offsets of consumer groups and delayed messages.

    Raises:
        StoreNotFound: if a file cannot be read.
    """
    planner = _Planner(layout, rules, now_ms, safe_end, log_end, held)
    return planner.plan(always_derived=always_derived, lists_unread=lists_unread)


class _Stays(Exception):
    """Raised if a log file must not be deleted; the text gives the reason."""


@dataclass(eq=False)
class _Planner:
    layout: StoreLayout
    rules: RetentionRules
    now: int
    safe_end: int | None
    log_end: int | None
    held: frozenset[str]

    def __post_init__(self) -> None:
        self._root = Path(self.layout.root)
        self._files = OpenFiles(self.layout)
        self._log = self.layout.commit_log
        self._end = self._find_end() if self.log_end is None else self.log_end
        self._safe_end = min(self._end, self._end if self.safe_end is None else self.safe_end)

    def _find_end(self) -> int:
        # Do not store the CommitLog in an attribute. The CommitLog refers to this object, and
        # Python frees two objects that refer to each other only at the next garbage collection.
        # Until then, deleted files would stay open, and take space on the disk.
        log = CommitLog(
            self.layout,
            files=self._files,
            last_entries=lambda: last_entries(self.layout, self._all_queues),
        )
        return log.max_offset

    @cached_property
    def _all_queues(self) -> list[FileQueue | RocksQueue]:
        require_package(self.layout)
        return all_queues(self.layout, self._files)

    def plan(self, *, always_derived: bool, lists_unread: bool) -> RetentionPlan:
        disk = least_used(log_paths(self._root, self.layout.log_folders))
        log, stays_because = self._expired(disk)
        start = self._log.start
        cut = log[-1].base + self._log.file_size if log else start
        queues, messages = [], dict[str, int]()
        firsts: dict[QueueKey, tuple[int, int]] = {}
        is_due = always_derived or bool(log)
        for queue in self._all_queues if is_due else ():
            key = queue.topic, queue.queue_id
            if gone := self._expired_queue(queue, cut):
                queues.append((key, gone))
            if not log:
                continue
            before, after = self._first_kept(queue, start), self._first_kept(queue, cut)
            if after > before:
                messages[queue.topic] = messages.get(queue.topic, 0) + after - before
                firsts[key] = before, after
        return RetentionPlan(
            store=self.layout.root,
            rules=self.rules,
            now=self.now,
            min_offset=start,
            new_min_offset=cut,
            max_offset=self._end,
            log=log,
            queues=tuple(queues),
            index=self._expired_index(cut) if is_due else (),
            transactions=expired_units(self.layout, cut) if is_due else (),
            stays_because=stays_because,
            disk=disk,
            messages=messages,
            unread=self._unread(firsts, start, cut) if lists_unread else (),
        )

    # -------------------------------------------------------------------------------------- log
    def _expired(self, disk: DiskUse | None) -> tuple[tuple[ExpiredFile, ...], str]:
        """Return the log files to delete, and the reason why the next file is kept."""
        log = self._log
        if not log.files:
            return (), "there is no log"
        # Keep the file with the last message, and the files after it, which were created in
        # advance.
        last = log.index_of(max(self._end - 1, log.start))
        found: list[ExpiredFile] = []
        try:
            for number, file in enumerate(log.files):
                if last is None or number >= last:
                    break
                self._check(file, len(found))
                by_age, time = self._by_age(file)
                by_bytes = self._by_bytes(file)
                by_disk, disk = self._by_disk(file, disk, is_first=not found)
                reason = "; ".join(filter(None, (by_age, by_bytes, by_disk)))
                if time is None:
                    time = self._time_of(file)
                found.append(ExpiredFile(file.path, file.base, file.size, reason, time))
        except _Stays as stays:
            return tuple(found), str(stays)
        return tuple(found), "it is the log's last file"

    def _check(self, file: StoreFile, gone: int) -> None:
        size, end = self._log.file_size, file.base + self._log.file_size
        if self.rules.most_files is not None and gone >= self.rules.most_files:
            raise _Stays(f"one run deletes at most {text.plural(gone, 'log file')}")
        if file.size != size:
            raise _Stays(f"it has {counted(file.size, 'byte')} instead of {size}: run verify")
        if end > self._safe_end:
            raise _Stays("it is not yet synced and dispatched as a whole")

    def _by_age(self, file: StoreFile) -> tuple[str | None, int | None]:
        """Check whether a file is old enough to delete; raise _Stays if it is not.

        Return a text that describes the age, and the store time of the file's last message; both
        are None if the rules have no minimum age.
        """
        limit = self.rules.older_than_ms
        if limit is None:
            return None, None
        time = self._time_of(file)
        if time is None:
            raise _Stays("its age is unknown: it and the log after it have no message")
        age = self.now - time
        stored = f"its last message was stored {text.time_text(time)}"
        if age < limit:
            if age < 0:
                raise _Stays(f"{stored}, which is in the future")
            kept = text.duration_text(limit)
            raise _Stays(f"{stored}, {text.duration_text(age)} ago; {kept} are kept")
        return f"{stored}, {text.duration_text(age)} ago", time

    def _time_of(self, file: StoreFile) -> int | None:
        """Return the store time of a file's last message.

        If no message starts in the file, return the store time of the next message in the log.
        """
        time = last_time_in(self.layout, file)
        if time is None:
            time = first_time_from(self.layout, file.base + self._log.file_size, self._end)
        return time

    def _by_bytes(self, file: StoreFile) -> str | None:
        keep = self.rules.keep_bytes
        if keep is None:
            return None
        if self._end - (file.base + self._log.file_size) < keep:
            raise _Stays(f"it holds some of the newest {text.size_text(keep)}")
        return f"the newest {text.size_text(keep)} start after it"

    def _by_disk(
        self, file: StoreFile, disk: DiskUse | None, *, is_first: bool
    ) -> tuple[str | None, DiskUse | None]:
        """Check whether the disk is too full; raise _Stays if it is not, or if the deletion of the
        file frees no space.

        Return a text that describes how full the disk is (None if the rules have no limit for the
        disk), and the use of the disk after the file's deletion. ``disk`` is the use of the disk
        after the deletion of all earlier files.
        """
        most = self.rules.max_disk_ratio
        if most is None:
            return None, disk
        if disk is None:
            raise _Stays("the use of the disk is unknown")
        full = f"the disk is {disk.ratio:.1%} full"
        if not is_first:
            full = f"after the deletion of the files before it, {full}"
        if disk.ratio <= most:
            raise _Stays(f"{full}; {most:.1%} are allowed")
        freed = freed_bytes(self._root / file.path)
        if not freed:
            raise _Stays("another path is a hard link to it: deleting it frees no space")
        return f"{full}, more than {most:.1%}", disk.without(freed)

    # -------------------------------------------------------------------------- queues and index
    def _expired_queue(self, queue: FileQueue | RocksQueue, cut: int) -> tuple[ExpiredFile, ...]:
        """Return the files to delete from a queue. Each of them has only messages before ``cut``.

        For a queue in RocksDB, return no files: only a broker deletes entries from RocksDB.
        """
        if isinstance(queue, RocksQueue):
            return ()
        sequence: FileSequence = queue.sequence
        if len(sequence.files) < 2:
            return ()
        if isinstance(queue, BatchQueue):
            return tuple(_expired_batches(queue, cut))
        found = []
        end = queue.max_offset
        for file in sequence.files[:-1]:
            first = file.base // UNIT_SIZE
            stop = first + queue.units_per_file
            if stop >= end or file.size != sequence.file_size:
                break
            units = queue.units(stop - 1, stop)
            # Usually the last entry alone shows that the file must stay, so check it first.
            # RocketMQ checks only the last entry: an undamaged queue is in the order of the log.
            if not len(units) or int(units["physical_offset"][0]) >= cut:
                break
            units = queue.units(first, stop)
            named = units["physical_offset"][has_message(units)]
            if not bool(is_written(units).all()) or (len(named) and int(named.max()) >= cut):
                logger.warning("%s: damaged, so it is kept: run verify", file.path)
                break
            reason = f"all its messages are before the log's start at {cut}"
            found.append(ExpiredFile(file.path, file.base, file.size, reason))
        return tuple(found)

    def _expired_index(self, cut: int) -> tuple[ExpiredFile, ...]:
        files = Index(self.layout, files=self._files).files
        sizes = {f"{INDEX}/{entry.name}": entry.size for entry in self.layout.index_files}
        found = []
        for file in files[:-1]:
            end = file.header.end_offset
            if end >= cut or file.path in self.held:
                break
            reason = f"its last key is of a message at {end}, before the log's start at {cut}"
            found.append(ExpiredFile(file.path, 0, sizes.get(file.path, 0), reason))
        return tuple(found)

    def _first_kept(self, queue: Queue, start: int) -> int:
        """Return the queue offset of the first message whose physical offset is at or after
        ``start``; the queue's end if there is none.
        """
        for first, units in queue.runs(0, queue.max_offset):
            at, chunk = 0, _FIRST_CHUNK
            while at < len(units):
                part = units[at : at + chunk]
                kept = has_message(part) & (part["physical_offset"] >= start)
                found = int(np.argmax(kept))
                if kept[found]:
                    return first + at + found
                at, chunk = at + chunk, _GROWTH * chunk
        return queue.max_offset

    def _unread(
        self, firsts: Mapping[QueueKey, tuple[int, int]], start: int, cut: int
    ) -> tuple[Unread, ...]:
        log = CommitLog(self.layout, files=self._files)
        return unread(self.layout, log, self._all_queues if firsts else (), firsts, start, cut)


def _expired_batches(queue: BatchQueue, cut: int) -> Iterator[ExpiredFile]:
    room = queue.sequence.file_size // ENTRY_SIZE
    end = queue.entry_end
    for file, entries in queue.batches():
        is_last = file.base // ENTRY_SIZE + room >= end
        if is_last or len(entries) < room or int(entries["physical_offset"].max()) >= cut:
            return
        reason = f"all its messages are before the log's start at {cut}"
        yield ExpiredFile(file.path, file.base, file.size, reason)
