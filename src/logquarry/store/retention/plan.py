"""A file that goes, and those of 3.x's state table and redo log that do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from logquarry import text
from logquarry.dialect31.unit_files import UnitFiles, read_redo, read_table
from logquarry.disk.disk import Disk
from logquarry.disk.open_files import OpenFiles
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.layout import COMMIT_LOG, INDEX, FileSequence, StoreFile, StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import ConsumeQueue, has_message, is_written
from logquarry.read.index import Index
from logquarry.read.log_end import consume_queues, last_entries
from logquarry.read.log_queues import QueueKey
from logquarry.store.retention.rules import (
    DiskUse,
    RetentionRules,
    disk_use,
    first_time_from,
    freed_bytes,
    last_time_in,
)
from logquarry.store.retention.unread import Unread, unread
from logquarry.units import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpiredFile:
    """A file that goes.

    Attributes:
        path: below the store's root.
        base: offset of its first byte (its name); 0 for an index file.
        size: its bytes.
        reason: why it goes.
        last_timestamp: store time of its last message, or of the one that follows where it has
            none; None for queues and index.
    """

    path: str
    base: int
    size: int
    reason: str
    last_timestamp: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON document."""
        return {
            "path": self.path,
            "size": self.size,
            "last_timestamp": self.last_timestamp,
            "reason": self.reason,
        }


def expired_units(layout: StoreLayout, cut: int) -> tuple[ExpiredFile, ...]:
    """The first files of state table and redo log of which no unit is of a message that stays.

    RocketMQ 3.1.3 deletes the same (``deleteExpiredStateFile``). The messages of transactions that
    are open in them have gone: nobody can end those any more.

    Args:
        layout: the store's files.
        cut: where the log will begin.
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
        logger.warning("%s: none of its files goes: verify tells more", found.fault)
        return files
    size = found.units.dtype.itemsize
    for file in sequence.files[:-1]:
        start = file.base // size - found.first
        stop = start + sequence.file_size // size
        # The last file is the one that the last unit stands in.
        if stop >= len(found.units) or int(found.units["physical_offset"][start:stop].max()) >= cut:
            break
        reason = f"all its units are of messages before the log's begin at {cut}"
        files.append(ExpiredFile(file.path, file.base, file.size, reason))
    return files


# --------------------------------------------------------------------------------------------------
# The plan of a retention: what would go, and why, in words. Making one changes nothing.
#
# The log is what the rules speak of. The queues and the index follow it, as RocketMQ's do
# (``ConsumeQueue.deleteExpiredFile``, ``IndexService.deleteExpiredFile``): of each, files go that
# only name messages from before the log's new begin, and never the last one.

_FIRST_CHUNK: Final = 512
_GROWTH: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionPlan:
    """What goes, and what stays.

    Attributes:
        store: the store's folder.
        rules: what may go.
        now: the time that ages are reckoned from, in milliseconds.
        min_offset: where the log begins.
        new_min_offset: where it will begin.
        max_offset: where it ends.
        log: files of the log, oldest first.
        queues: files of consume queues, by queue, oldest first.
        index: index files, oldest first.
        transactions: files of 3.x's state table, and then of its redo log, oldest first.
        stays_because: why the first file of the log that stays does.
        disk: how full the log's disk is, None if nobody can tell.
        messages: what goes of each topic: messages in its queues.
        unread: messages among them that somebody has not read.
        refused: why this cannot be applied now, None if it can.
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

    @property
    def files(self) -> tuple[ExpiredFile, ...]:
        """All files that go, in the order in which they do."""
        queues = (file for _, files in self.queues for file in files)
        return (*self.log, *queues, *self.index, *self.transactions)

    @property
    def bytes(self) -> int:
        """What they take."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON document."""
        return {
            "store": self.store,
            "rules": self.rules.to_json(),
            "now": self.now,
            "min_offset": self.min_offset,
            "new_min_offset": self.new_min_offset,
            "max_offset": self.max_offset,
            "log": [file.to_json() for file in self.log],
            "queues": [file.to_json() for _, files in self.queues for file in files],
            "index": [file.to_json() for file in self.index],
            "transactions": [file.to_json() for file in self.transactions],
            "bytes": self.bytes,
            "stays_because": self.stays_because,
            "disk_ratio": None if self.disk is None else self.disk.ratio,
            "messages": dict(self.messages),
            "unread": [one.to_json() for one in self.unread],
            "refused": self.refused,
        }


def plan_retention(
    layout: StoreLayout,
    rules: RetentionRules,
    *,
    now_ms: int,
    safe_end: int | None = None,
    log_end: int | None = None,
    held: frozenset[str] = frozenset(),
    always_derived: bool = True,
) -> RetentionPlan:
    """What of a local store would go by some rules.

    Args:
        layout: the store's files as they are now.
        rules: what may go.
        now_ms: the time.
        safe_end: of a store that is written: what is before it is on the disk, and in the queues.
        log_end: where its log ends, where its writer says so.
        held: paths of index files that a writer still works on.
        always_derived: whether queues and index are looked at also if nothing of the log goes: a
            retention that was interrupted may have left something of them.

    Raises:
        StoreNotFound: if a file cannot be read.
    """
    planner = _Planner(layout, rules, now_ms, safe_end, log_end, held)
    return planner.plan(always_derived=always_derived)


class _Planner:
    """Makes one plan."""

    def __init__(
        self,
        layout: StoreLayout,
        rules: RetentionRules,
        now_ms: int,
        safe_end: int | None,
        log_end: int | None,
        held: frozenset[str],
    ) -> None:
        self._layout = layout
        self._root = Path(layout.root)
        self._rules = rules
        self._now = now_ms
        self._held = held
        self._files = OpenFiles(layout)
        self._log = layout.commit_log
        if log_end is None:
            entries = last_entries(layout, self._all_queues)
            log_end = CommitLog(layout, files=self._files, last_entries=lambda: entries).max_offset
        self._end = log_end
        self._safe_end = log_end if safe_end is None else min(safe_end, log_end)

    @cached_property
    def _all_queues(self) -> list[ConsumeQueue]:
        return consume_queues(self._layout, self._files)

    def plan(self, *, always_derived: bool) -> RetentionPlan:
        disk = disk_use(self._root / COMMIT_LOG)
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
            store=self._layout.root,
            rules=self._rules,
            now=self._now,
            min_offset=start,
            new_min_offset=cut,
            max_offset=self._end,
            log=log,
            queues=tuple(queues),
            index=self._expired_index(cut) if is_due else (),
            transactions=expired_units(self._layout, cut) if is_due else (),
            stays_because=stays_because,
            disk=disk,
            messages=messages,
            unread=self._unread(firsts, start, cut),
        )

    # -------------------------------------------------------------------------------------- log
    def _expired(self, disk: DiskUse | None) -> tuple[tuple[ExpiredFile, ...], str]:
        """The files of the log that go, and why the next one stays."""
        log = self._log
        if not log.files:
            return (), "there is no log"
        # The last file is the one that the last message stands in: one that was only made in
        # advance is none.
        last = log.index_of(max(self._end - 1, log.start))
        found: list[ExpiredFile] = []
        for number, file in enumerate(log.files):
            if last is None or number >= last:
                return tuple(found), "it is the log's last file"
            stays = self._must_stay(file, len(found))
            if stays is not None:
                return tuple(found), stays
            reasons: list[str] = []
            time, stays = self._by_age(file, reasons)
            stays = stays or self._by_bytes(file, reasons)
            if stays is None:
                disk, stays = self._by_disk(file, disk, reasons)
            if stays is not None:
                return tuple(found), stays
            if time is None:
                time = self._time_of(file)
            found.append(ExpiredFile(file.path, file.base, file.size, "; ".join(reasons), time))
        return tuple(found), "it is the log's last file"

    def _must_stay(self, file: StoreFile, gone: int) -> str | None:
        size, end = self._log.file_size, file.base + self._log.file_size
        if self._rules.most_files is not None and gone >= self._rules.most_files:
            return f"{text.plural(gone, 'file')} at a time are enough"
        if file.size != size:
            return f"it has {file.size} bytes, and {size} belong there: verify tells more"
        if end > self._safe_end:
            return "not all of it is on the disk and in the queues yet"
        return None

    def _by_age(self, file: StoreFile, reasons: list[str]) -> tuple[int | None, str | None]:
        limit = self._rules.older_than_ms
        if limit is None:
            return None, None
        time = self._time_of(file)
        if time is None:
            return None, "no message says when it was written"
        age = self._now - time
        stored = f"its last message was stored {text.time_text(time)}"
        if age < limit:
            if age < 0:
                return time, f"{stored}, which is yet to come"
            kept = text.duration_text(limit)
            return time, f"{stored}, {text.duration_text(age)} ago, and {kept} are kept"
        reasons.append(f"{stored}, {text.duration_text(age)} ago")
        return time, None

    def _time_of(self, file: StoreFile) -> int | None:
        """When a file was written, as its last message says, or else the one that follows it."""
        time = last_time_in(self._layout, file)
        if time is None:
            time = first_time_from(self._layout, file.base + self._log.file_size, self._end)
        return time

    def _by_bytes(self, file: StoreFile, reasons: list[str]) -> str | None:
        keep = self._rules.keep_bytes
        if keep is None:
            return None
        if self._end - (file.base + self._log.file_size) < keep:
            return f"some of the newest {text.size_text(keep)} are in it"
        reasons.append(f"the newest {text.size_text(keep)} begin behind it")
        return None

    def _by_disk(
        self, file: StoreFile, disk: DiskUse | None, reasons: list[str]
    ) -> tuple[DiskUse | None, str | None]:
        """How full the disk is once a file has gone, or why it stays."""
        most = self._rules.max_disk_ratio
        if most is None:
            return disk, None
        if disk is None:
            return None, "nobody can tell how full the disk is"
        if disk.ratio <= most:
            return disk, f"the disk is {disk.ratio:.1%} full, and may be {most:.1%}"
        freed = freed_bytes(self._root / file.path)
        if not freed:
            return disk, "it has a second name elsewhere: deleting it frees nothing"
        reasons.append(f"the disk is {disk.ratio:.1%} full, more than {most:.1%}")
        return disk.without(freed), None

    # -------------------------------------------------------------------------- queues and index
    def _expired_queue(self, queue: ConsumeQueue, cut: int) -> tuple[ExpiredFile, ...]:
        """The first files of a queue that hold no unit of a message that stays."""
        sequence: FileSequence = queue.sequence
        if len(sequence.files) < 2:
            return ()
        found = []
        end = queue.max_offset
        for file in sequence.files[:-1]:
            first = file.base // UNIT_SIZE
            stop = first + queue.units_per_file
            # The last file is the one that the last unit stands in.
            if stop >= end or file.size != sequence.file_size:
                break
            units = queue.units(stop - 1, stop)
            # The last unit alone tells it of a sound queue, and in RocketMQ of any.
            if not len(units) or int(units["physical_offset"][0]) >= cut:
                break
            units = queue.units(first, stop)
            named = units["physical_offset"][has_message(units)]
            if not bool(is_written(units).all()) or (len(named) and int(named.max()) >= cut):
                logger.warning("%s: it is not in order, and stays: verify tells more", file.path)
                break
            reason = f"all its messages are before the log's begin at {cut}"
            found.append(ExpiredFile(file.path, file.base, file.size, reason))
        return tuple(found)

    def _expired_index(self, cut: int) -> tuple[ExpiredFile, ...]:
        files = Index(self._layout, files=self._files).files
        sizes = {f"{INDEX}/{entry.name}": entry.size for entry in self._layout.index_files}
        found = []
        for file in files[:-1]:
            end = file.header.end_offset
            if end >= cut or file.path in self._held:
                break
            reason = f"its last key is of a message at {end}, before the log's begin at {cut}"
            found.append(ExpiredFile(file.path, 0, sizes.get(file.path, 0), reason))
        return tuple(found)

    def _first_kept(self, queue: ConsumeQueue, start: int) -> int:
        """The first queue offset whose message is not before a place of the log, else the max."""
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
        log = CommitLog(self._layout, files=self._files)
        return unread(self._layout, log, self._all_queues if firsts else (), firsts, start, cut)


# --------------------------------------------------------------------------------------------------
# Carries out the plan of a retention over a store that nobody has open.
#
# The log goes first, file by file from its begin on, and each is off the disk before the next
# goes: a crash leaves a log that begins later, and never one with a hole. Queues and index come
# after it. What they name before the log's begin is passed over, by us and by RocketMQ, so that a
# crash before their turn leaves nothing to mend; the next retention finishes it. The other way
# round a crash would leave messages in the log that no queue names.
#
# Nothing else is touched: the log's end does not move, and with it neither does the durable mark
# nor the checkpoint.


def apply_retention(
    plan: RetentionPlan, disk: Disk, root: Path, progress: Progress | None = None
) -> None:
    """Delete what a plan says, durably; with the store's lock held.

    Args:
        plan: the plan, made since the lock was taken.
        disk: what the store is on.
        root: its folder.
        progress: told of the files that are gone.

    Raises:
        StoreUnavailable: if the disk fails. What is gone is gone, the rest stays, and all of it is
            a store.
    """
    for done, file in enumerate(plan.files, 1):
        disk.remove(root / file.path)
        if progress is not None:
            progress(done, len(plan.files))
