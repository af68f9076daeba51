"""Compares two stores: logs byte by byte, then queues, then the files of config/."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format.arrays import Bytes
from logquarry.format.frame import BLANK, Damage, Frame, encode_id
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import rereads
from logquarry.log.store_files import CONFIG
from logquarry.log.walk import BlankSpan, DamagedSpan, LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_end import last_entries, lost_messages, missing_end
from logquarry.read.store_sizes import require_log
from logquarry.repair.diff.queue_diff import Common, StoreQueues, compare_queues
from logquarry.repair.diff.store_diff import (
    Divergence,
    LogBounds,
    LogPart,
    Place,
    QueueDiff,
    Side,
    StoreDiff,
)
from logquarry.units import Progress

_STEP: Final = 8 << 20
_WORD: Final = 8


class LogDiff:
    """Compares two logs between two physical offsets.

    Attributes:
        divergence: the first difference that a reader of the logs could notice, None if there is
            none.
        notes: differences in the padding of blanks, as text. They are no divergence.
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
        """Compare the logs, and return this object with the result."""
        for start, stop in pairwise(self._bounds()):
            missing = self._missing(start)
            if missing is None:
                self._compare(start, stop, progress)
            else:
                self._add_missing(start, stop, missing)
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

    def _missing(self, offset: int) -> Side | None:
        has_a, has_b = (self._file_name(layout, offset) for layout in (self._a, self._b))
        if has_a is None and has_b is not None:
            return "a"
        # A file that both logs lack is no difference.
        return "b" if has_a is not None and has_b is None else None

    @staticmethod
    def _file_name(layout: StoreLayout, offset: int) -> str | None:
        file = layout.commit_log.at(offset)
        return None if file is None or offset >= file.base + file.size else file.path

    def _add_missing(self, start: int, stop: int, missing: Side) -> None:
        layout = self._b if missing == "a" else self._a
        name = self._file_name(layout, start) or ""
        self.parts.append(LogPart(name, start, stop - start, stop - start, start, missing))
        if self.divergence is None:
            self.divergence = self._divergence(start)

    def _compare(self, start: int, stop: int, progress: Progress | None) -> None:
        name = self._file_name(self._a, start)
        if name is None:
            return
        different, first = 0, None
        skip_from = stop
        for at, left, right in self._chunks(start, stop):
            if at >= skip_from:
                break
            count = _different(left, right)
            if count:
                place = at + int(np.flatnonzero(left != right)[0])
                if self.divergence is None and first is None:
                    rest = self._blank_at(place)
                    if rest is not None:
                        self.notes.append(
                            f"the blank at {rest.offset} has other padding, which no reader reads"
                        )
                        skip_from = rest.offset + rest.size
                        break
                    self.divergence = self._divergence(place)
                if first is None:
                    first = place
                different += count
            if progress is not None:
                progress(at + len(left) - self._start, self._end - self._start)
        done = min(skip_from, stop)
        self.parts.append(LogPart(name, start, done - start, different, first, None))
        if skip_from < stop:
            self._compare(skip_from, stop, progress)

    def _chunks(self, start: int, stop: int) -> Iterator[tuple[int, Bytes, Bytes]]:
        at = start
        while at < stop:
            # End each chunk at a multiple of _STEP. Then the words of 8 bytes that are compared are
            # aligned if both files start at the same offset.
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
        """If ``offset`` lies in the padding of a blank that both logs have, return this blank, else
        None.
        """
        left, right = place_at(self._a, offset), place_at(self._b, offset)
        same = (left.what, left.offset, left.size) == (right.what, right.offset, right.size)
        if left.what != "blank" or not same or offset < left.offset + BLANK.size:
            return None
        return left

    def _divergence(self, offset: int) -> Divergence:
        return Divergence(offset, place_at(self._a, offset), place_at(self._b, offset))


def _different(a: Bytes, b: Bytes) -> int:
    words = len(a) - len(a) % _WORD
    same = np.array_equal(a[:words].view(np.uint64), b[:words].view(np.uint64))
    if same and np.array_equal(a[words:], b[words:]):
        return 0
    return int(np.count_nonzero(a != b))


def place_at(layout: StoreLayout, offset: int) -> Place:
    """Return the message, blank or damage that contains a physical offset of a log."""
    path = layout.log_path(offset)
    file = layout.commit_log.at(offset)
    if file is None or offset >= file.base + file.size:
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
        if isinstance(event, DamagedSpan) and offset < event.offset + event.length:
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
    """One of the two stores. Records the ends of log and queues at its opening, because a writer
    may append during the comparison.
    """

    def __init__(self, layout: StoreLayout) -> None:
        require_log(layout)
        self.layout = layout
        self.is_live = layout.is_live()
        files = OpenFiles(layout)
        self.queues = StoreQueues.of(layout, files)
        log = CommitLog(layout, files=files, last_entries=lambda: last_entries(layout))
        self.log = LogBounds(log.min_offset, log.max_offset)
        # While a writer has the store open, queues may already point to a log file that is newer
        # than the list of files. So only a closed store can show that its last files are missing.
        ends = [] if self.is_live else last_entries(layout)
        self.missing = None if self.is_live else missing_end(layout, ends)
        self.reach = self.log.max_offset if self.is_live else self._reach()

    def _reach(self) -> int:
        """Return the physical offset after the last frame, including frames after the log's end.
        The comparison ends there.

        Frames after the log's end are left by an earlier truncation, or follow damage in the last
        file.
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


@rereads
def compare_stores(
    a: StoreLayout, b: StoreLayout, *, progress: Progress | None = None
) -> StoreDiff:
    """Compare two stores: logs byte by byte, then queues, then files of ``config/``.

    Only the part of the log that both stores have is compared. It is no divergence if one log
    begins later or ends earlier than the other. If a writer has a store open, the comparison stops
    at the end that the store's log had at the start of the call.

    Raises:
        UnsupportedStore: if the log of a store is not found.
    """
    left, right = _Store(a), _Store(b)
    start = max(left.log.min_offset, right.log.min_offset)
    end = min(left.reach, right.reach)
    log = LogDiff(a, b, start, end).run(progress)
    # Compare the queues only up to the logs' first difference: after it, the queues must differ
    # too.
    diverged_at = end if log.divergence is None else log.divergence.offset
    is_live, kept_from = left.is_live or right.is_live, start
    if is_live:
        # Since the log was listed, retention may have deleted log files and the queue files with
        # their entries: do not compare these entries.
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
            found.append(
                f"{name} is open in another program: compared up to {store.log.max_offset}"
            )
        if store.log.min_offset > other.log.min_offset:
            missing = store.log.min_offset - other.log.min_offset
            found.append(
                f"{name} begins at {store.log.min_offset}, {missing} bytes after {other_name}"
            )
        if store.reach > store.log.max_offset:
            found.append(
                f"{name} has messages after its end at {store.log.max_offset}: its last file is "
                "damaged there, or a recovery left them"
            )
        for folder, reason in store.queues.unread.items():
            found.append(f"{name}: the queues in {folder} (RocksDB) were not compared: {reason}")
        if store.missing is not None:
            found.append(
                f"{name} lacks its last log files: it ends at {store.log.max_offset}, and its log "
                f"reached {store.missing}: {lost_messages(store.layout, (), store.log.max_offset)}"
            )
        if store.log.max_offset < other.log.max_offset:
            missing = other.log.max_offset - store.log.max_offset
            found.append(
                f"{name} ends at {store.log.max_offset}, {missing} bytes behind {other_name}"
            )
    behind = sum(queue.state == "behind" for queue in queues)
    if behind:
        words = "1 queue has" if behind == 1 else f"{behind} queues have"
        found.append(f"{words} different ends{', like the logs' if left.log != right.log else ''}")
    return found


def _compare_config(a: dict[str, bytes], b: dict[str, bytes]) -> dict[str, str]:
    found = {name: "equal" if data == b.get(name) else "different" for name, data in a.items()}
    found |= dict.fromkeys(a.keys() - b.keys(), "only_a")
    found |= dict.fromkeys(b.keys() - a.keys(), "only_b")
    return dict(sorted(found.items()))
