"""Compares two stores: logs byte by byte, then queues, then the files of ``config/``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from logquarry import arguments
from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.format.arrays import Bytes
from logquarry.format.frame import BLANK, Damage, Frame, encode_id
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import rereads
from logquarry.log.store_files import CONFIG, LOCK
from logquarry.log.walk import BlankSpan, DamagedSpan, LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_end import last_entries, lost_messages, missing_end
from logquarry.read.store_sizes import require_log
from logquarry.repair.queue_diff import Common, LogBounds, QueueDiff, StoreQueues, compare_queues
from logquarry.systems import lock_file
from logquarry.text import counted, document, json_value

_STEP: Final = 8 << 20
_WORD: Final = 8

Side = Literal["a", "b"]


@dataclass(frozen=True, slots=True)
class Place:
    """The contents of one log at a physical offset: a message, a blank, damage, or nothing.

    Attributes:
        what: ``message``, ``blank``, ``damage`` or ``nothing`` (no file, or only zeros).
        offset: physical offset of the first byte.
        topic: topic of the message. Only a message has a topic and the attributes below.
        store_timestamp: store time in milliseconds.
        message_id: upper-case hex.
    """

    what: str
    file: str
    offset: int
    size: int
    reason: str | None = None
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    store_timestamp: int | None = None
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The physical offset of the first different byte, and what each log has there."""

    offset: int
    a: Place
    b: Place


@dataclass(frozen=True, slots=True)
class LogPart:
    """The result for one part of the logs, which lies within one file of each store.

    Attributes:
        offset: physical offset of the first byte.
        different_bytes: number of bytes that differ. Padding before the divergence is not counted.
        first_difference: physical offset of the first difference, None if there is none.
        missing_in: the store that lacks the file, None if both stores have the file.
    """

    file: str
    offset: int
    length: int
    different_bytes: int
    first_difference: int | None
    missing_in: Side | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDiff:
    """The result of the comparison of two stores.

    Attributes:
        start: physical offset of the common part's start.
        end: physical offset of the common part's end. If there is no common part, ``end`` is at or
            before ``start``.
        config: name of a file in config/ -> ``equal``, ``different``, ``only_a`` or ``only_b``.
            Consumers change these files, so they do not affect the verdict.
        notes: texts about further facts; none of these facts is a divergence.
        lost: the stores whose last log files are missing.
        unread: the stores whose queues in RocksDB could not be read, and were not compared.
    """

    a: str
    b: str
    log_a: LogBounds
    log_b: LogBounds
    start: int
    end: int
    parts: tuple[LogPart, ...]
    divergence: Divergence | None
    queues: tuple[QueueDiff, ...]
    config: dict[str, str]
    notes: tuple[str, ...]
    lost: tuple[Side, ...] = ()
    unread: tuple[Side, ...] = ()

    @property
    def is_disjoint(self) -> bool:
        """Whether both logs have messages, but no physical offset is in both logs."""
        return all(log.max_offset > log.min_offset for log in (self.log_a, self.log_b)) and (
            self.start >= self.end
        )

    @property
    def verdict(self) -> str:
        """One of ``equal``, ``prefix`` (one log begins later or ends earlier), ``diverged``,
        ``disjoint`` (no common part) and ``incomplete`` (no difference was found, but not all
        queues were compared).
        """
        if self.divergence is not None or any(q.state == "differs" for q in self.queues):
            return "diverged"
        if self.is_disjoint:
            return "disjoint"
        if self.unread:
            return "incomplete"
        return "equal" if self.log_a == self.log_b else "prefix"

    @property
    def has_diverged(self) -> bool:
        """Whether neither store can replace the other."""
        return self.verdict in ("diverged", "disjoint")

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``diff --json`` (docs/json.md)."""
        log = {
            "a": self.log_a,
            "b": self.log_b,
            "compared": [self.start, self.end] if self.start < self.end else None,
            "parts": self.parts,
        }
        return {
            **document(self, ("a", "b", "verdict")),
            "log": json_value(log),
            **document(self, ("divergence", "queues", "config", "notes", "lost", "unread")),
        }


class LogDiff:
    """Compares two logs between two physical offsets. ``divergence`` is the first difference that a
    reader could notice, or None. ``notes`` are differences in padding, as text.
    """

    def __init__(self, a: StoreLayout, b: StoreLayout, start: int, end: int) -> None:
        self.parts: list[LogPart] = []
        self.divergence: Divergence | None = None
        self.notes: list[str] = []
        self._a = a
        self._b = b
        self._start = start
        self._end = end

    def run(self, progress: Progress | None = None) -> LogDiff:
        """Compare the logs; store the result in this object, and return the object."""
        for start, stop in pairwise(self._bounds()):
            self._compare(start, stop, progress)
        return self

    def _bounds(self) -> list[int]:
        if self._start >= self._end:
            return []
        found = {self._start, self._end}
        for layout in (self._a, self._b):
            log = layout.commit_log
            for file in log.files:
                ends = file.base, min(file.base + file.size, file.base + log.file_size)
                found |= {at for at in ends if self._start < at < self._end}
        return sorted(found)

    def _compare(self, start: int, stop: int, progress: Progress | None) -> None:
        file_a, file_b = _file_at(self._a, start), _file_at(self._b, start)
        if file_a is None or file_b is None:
            missing: Side = "a" if file_a is None else "b"
            # If both logs lack a file for this part, there is no difference.
            if name := file_a or file_b:
                self.parts.append(LogPart(name, start, stop - start, stop - start, start, missing))
                self.divergence = self.divergence or self._divergence(start)
            return
        different, first, done = 0, None, stop
        for at, left, right in self._chunks(start, stop):
            count = _different(left, right)
            if count and first is None:
                first = at + int(np.flatnonzero(left != right)[0])
                blank = self._blank_at(first) if self.divergence is None else None
                if blank is not None:
                    self.notes.append(
                        f"the blank at {blank.offset} has other padding, which no reader reads"
                    )
                    first, done = None, min(stop, blank.offset + blank.size)
                    break
                self.divergence = self.divergence or self._divergence(first)
            different += count
            if progress is not None:
                progress(at + len(left) - self._start, self._end - self._start)
        self.parts.append(LogPart(file_a, start, done - start, different, first, None))
        if done < stop:
            self._compare(done, stop, progress)

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, Bytes, Bytes]]:
        at = start
        while at < stop:
            # Each chunk ends at a multiple of _STEP. So if both files start at the same offset, the
            # words that are compared are aligned.
            size = min(stop, at + _STEP - at % _STEP) - at
            yield at, self._bytes(self._a, at, size), self._bytes(self._b, at, size)
            at += size

    @staticmethod
    def _bytes(layout: StoreLayout, offset: int, size: int) -> Bytes:
        file = layout.commit_log.at(offset)
        assert file is not None
        data = layout.open_file(file.path).window(offset - file.base, size)[:size]
        return np.frombuffer(data, np.uint8)

    # ------------------------------------------------------------------------- the first difference
    def _blank_at(self, offset: int) -> Place | None:
        """If both logs have the same blank, and ``offset`` is in its padding, return the blank."""
        left, right = place_at(self._a, offset), place_at(self._b, offset)
        same = (left.what, left.offset, left.size) == (right.what, right.offset, right.size)
        is_padding = left.what == "blank" and same and offset >= left.offset + BLANK.size
        return left if is_padding else None

    def _divergence(self, offset: int) -> Divergence:
        return Divergence(offset, place_at(self._a, offset), place_at(self._b, offset))


def _file_at(layout: StoreLayout, offset: int) -> str | None:
    file = layout.commit_log.at(offset)
    return None if file is None or offset >= file.base + file.size else file.path


def _different(a: Bytes, b: Bytes) -> int:
    words = len(a) - len(a) % _WORD
    same = np.array_equal(a[:words].view(np.uint64), b[:words].view(np.uint64))
    if same and np.array_equal(a[words:], b[words:]):
        return 0
    return int(np.count_nonzero(a != b))


def place_at(layout: StoreLayout, offset: int) -> Place:
    """Return the message, blank or damage that contains a physical offset of a log."""
    path, file = layout.log_path(offset), layout.commit_log.at(offset)
    if file is None or _file_at(layout, offset) is None:
        return Place("nothing", path, offset, 0, "this part of the log has no file")
    for event in LogReader(layout).events(file.base, offset + 1):
        if isinstance(event, Run) and event.start <= offset < event.end:
            starts = event.window.base + event.rows[:, 0].astype(np.int64)
            at = int(starts[np.searchsorted(starts, offset, "right") - 1])
            outcome = CommitLog(layout).outcome_at(at)
            assert isinstance(outcome, Frame)
            return _place_of(path, at, outcome, "message", None)
        if isinstance(event, BlankSpan) and event.offset <= offset < event.end:
            return Place("blank", path, event.offset, event.length)
        if isinstance(event, DamagedSpan) and offset < event.end:
            return _damaged(layout, path, event)
    return Place("nothing", path, offset, 0, "zeros after the last message")


def _damaged(layout: StoreLayout, path: str, span: DamagedSpan) -> Place:
    outcome = CommitLog(layout).outcome_at(span.offset, check_crc=False)
    if isinstance(outcome, Frame):
        return _place_of(path, span.offset, outcome, "damage", span.reason)
    reason = outcome.reason if isinstance(outcome, Damage) else span.reason
    return Place("damage", path, span.offset, span.length, reason)


def _place_of(path: str, offset: int, found: Frame, what: str, reason: str | None) -> Place:
    return Place(
        what,
        path,
        offset,
        found.size,
        reason,
        found.topic.decode("utf-8", "replace"),
        found.queue_id,
        found.queue_offset,
        found.store_timestamp,
        encode_id(found.store_host, found.physical_offset),
    )


# ------------------------------------------------------------------------------------- the stores
class _Store:
    """One of the two stores. The object keeps the ends that log and queues had when the store was
    opened, because a writer may append later.
    """

    def __init__(self, layout: StoreLayout) -> None:
        require_log(layout)
        self.layout = layout
        self.is_live = layout.is_live()
        with lock_file(Path(layout.root, LOCK)) as is_ours:
            self.is_open_here = is_ours
        files = OpenFiles(layout)
        self.queues = StoreQueues(layout, files)
        log = CommitLog(layout, files=files, last_entries=lambda: last_entries(layout))
        self.log = LogBounds(log.min_offset, log.max_offset)
        # After the layout listed the log files, a writer may have added files, and entries that
        # point to them. So only a closed store can show that files are missing.
        ends = [] if self.is_live else last_entries(layout)
        self.missing = None if self.is_live else missing_end(layout, ends)
        self.reach = self.log.max_offset if self.is_live else self._reach()

    def _reach(self) -> int:
        """Return the end of the data if frames follow the log's end; else the log's end. Frames
        after the log's end were left by an earlier truncation, or follow damage in the last file.
        """
        end = self.log.max_offset
        reader = LogReader(self.layout)
        last = reader.data_end(end)
        has_messages = last > end and any(isinstance(e, Run) for e in reader.events(end))
        return last if has_messages else end

    def config(self) -> dict[str, bytes]:
        files = self.layout.filesystem
        names = [entry.name for entry in files.list(CONFIG) if not entry.is_dir]
        return {name: files.read(f"{CONFIG}/{name}") for name in names if name.endswith(".json")}


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> StoreDiff:
    """Compare two stores: the common part of their logs byte by byte, then their queues.

    If one log only begins later or ends earlier than the other, the logs do not diverge. Nothing is
    changed. Other processes may write to the stores during the call. The comparison stops at the
    ends that the logs had at the start of the call. ``to_json()`` of the result is the document
    that ``logquarry diff --json`` prints (docs/json.md).

    Args:
        a: folder or URL of a store.
        b: folder or URL of the other store.
        config: settings of both stores; missing sizes are inferred from the files.
        storage_options: options of the file system, for URLs.
        progress: called with (bytes of the log compared so far, bytes to compare in total).

    Returns:
        The differences. ``verdict`` is their summary; ``has_diverged`` is true if neither store can
        replace the other.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: if the log of a store is not found.
        UsageError: if an argument is invalid.
    """
    arguments.optional(arguments.function, progress, "progress")
    # Check both paths first, so that no store is opened if one of them is invalid.
    arguments.path(a, "a"), arguments.path(b, "b")
    layouts = [StoreLayout.open(path, config, storage_options) for path in (a, b)]
    return compare_stores(*layouts, progress=progress)


@rereads
def compare_stores(
    a: StoreLayout, b: StoreLayout, *, progress: Progress | None = None
) -> StoreDiff:
    """See :func:`diff`."""
    left, right = _Store(a), _Store(b)
    start = max(left.log.min_offset, right.log.min_offset)
    end = min(left.reach, right.reach)
    log = LogDiff(a, b, start, end).run(progress)
    # After the logs' first difference, the queues are expected to differ too.
    diverged_at = end if log.divergence is None else log.divergence.offset
    is_live, kept_from = left.is_live or right.is_live, start
    if is_live:
        # Retention may have deleted files of log and queues after the layouts listed them.
        kept_from = max(start, a.present_start(), b.present_start())
    common = Common(kept_from, diverged_at, is_live)
    sides: tuple[tuple[Side, _Store], ...] = (("a", left), ("b", right))
    queues = tuple(compare_queues(left.queues, right.queues, common))
    return StoreDiff(
        a=a.root,
        b=b.root,
        log_a=left.log,
        log_b=right.log,
        start=start,
        end=end,
        parts=tuple(log.parts),
        divergence=log.divergence,
        queues=queues,
        config=_compare_config(left.config(), right.config()),
        notes=(*_notes(left, right, queues), *log.notes),
        lost=tuple(name for name, store in sides if store.missing is not None),
        unread=tuple(name for name, store in sides if store.queues.unread),
    )


def _notes(left: _Store, right: _Store, queues: tuple[QueueDiff, ...]) -> list[str]:
    found = []
    stores = (("a", left, "b", right), ("b", right, "a", left))
    for name, store, other_name, other in stores:
        if store.is_live:
            program = "this program" if store.is_open_here else "another program"
            found.append(f"{name} is open in {program}: compared up to {store.log.max_offset}")
        if store.log.min_offset > other.log.min_offset:
            missing = store.log.min_offset - other.log.min_offset
            found.append(
                f"{name} begins at {store.log.min_offset}, {counted(missing, 'byte')} after "
                f"{other_name}"
            )
        if store.reach > store.log.max_offset:
            found.append(
                f"{name} has messages after its end at {store.log.max_offset}: its last file is "
                "damaged there, or a recovery left them"
            )
        for folder, reason in store.queues.unread.items():
            found.append(f"{name}: the queues in {folder} (RocksDB) were not compared: {reason}")
        if store.missing is not None:
            lost = lost_messages(store.layout, (), store.log.max_offset)
            found.append(
                f"{name} lacks its last log files: it ends at {store.log.max_offset}, and its log "
                f"reached {store.missing}{f': {lost}' if lost.messages else ''}"
            )
        if store.log.max_offset < other.log.max_offset:
            missing = other.log.max_offset - store.log.max_offset
            found.append(
                f"{name} ends at {store.log.max_offset}, {counted(missing, 'byte')} behind "
                f"{other_name}"
            )
    behind = sum(queue.state == "behind" for queue in queues)
    if behind:
        words = counted(behind, "queue has", "queues have")
        found.append(f"{words} different ends{', like the logs' if left.log != right.log else ''}")
    return found


def _compare_config(a: dict[str, bytes], b: dict[str, bytes]) -> dict[str, str]:
    found = {name: "equal" if data == b.get(name) else "different" for name, data in a.items()}
    found |= dict.fromkeys(a.keys() - b.keys(), "only_a")
    found |= dict.fromkeys(b.keys() - a.keys(), "only_b")
    return dict(sorted(found.items()))
