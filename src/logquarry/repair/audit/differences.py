"""The differences between log, queues and index: their types, and the rules and limits by which
they are found.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from logquarry.format import java
from logquarry.format.arrays import Bools, Int64
from logquarry.format.index import IndexHeader
from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import NAME_DIGITS, FileSequence, StoreFile
from logquarry.log.walk import Span
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units
from logquarry.repair.findings import Finding, finding
from logquarry.text import counted

# The limits MOST_GAP and MOST_OFFSET are defined in logquarry.write.queue_writer.
GAP_SLACK: Final = 16
"""Tolerance for a gap in the queue offsets. The largest accepted gap is the number of messages for
which the lost bytes have room, plus ``GAP_SLACK``.
"""
SMALL_GAP: Final = 1 << 12
"""Largest gap that is accepted without lost bytes. An earlier salvage can leave such gaps."""
MOST_MOVED: Final = 1 << 20
"""Maximum number of harmed queue offsets that a recovery corrects in one queue."""
MOST_STRETCHES: Final = 16
"""Maximum number of findings of verify for misplaced entries of one queue. If the queue
offsets of consecutive entries are wrong by the same number, verify reports them as one finding.
"""
_CLOCK_MS: Final = 1_000


@dataclass(slots=True)
class EntryGroup:
    """Entries of a queue or an index file that differ from the log in the same way. ``number`` is
    the number of the first entry (in a queue, its queue offset). ``reason`` describes how the first
    entry differs.
    """

    kind: str
    number: int
    reason: str
    count: int = 0

    def at(self, file: str, position: int, entry_size: int) -> Finding:
        """Return one finding for the whole group. The group's first entry is at byte ``position``
        of ``file``.
        """
        text = f"entry {self.number} {self.reason}{and_more(self.count)}"
        return finding(self.kind, file, position, text, self.count * entry_size)


def and_more(count: int) -> str:
    """Return ", and N more" for a text that names only one of ``count`` items; "" for one item."""
    return f", and {count - 1} more" if count > 1 else ""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first place where a queue differs from the log.

    ``offset`` is the queue offset of the first wrong entry. In a batch queue, it is the number of
    this entry. ``resume_at`` is the physical offset of the message to which the entry should point.
    If the log has no such message, ``resume_at`` is the physical offset of the next message of this
    queue in the log.
    """

    offset: int
    resume_at: int
    reason: str


@dataclass(frozen=True, slots=True)
class AuditedQueue:
    """The result of the comparison of one queue with the whole log.

    For a batch queue, the attributes are entry numbers instead of queue offsets.

    Attributes:
        had_until: queue offset at which the queue ends on the disk.
        ends_empty: whether the last of several files has no entry.
        end: queue offset after the last message; None if the log has no message of the queue.
        kept_until: queue offset of the first entry that a recovery cuts off. A recovery cuts off an
            entry if the log lacks its message, and if neither damage nor expiry explains this. If
            all entries stay, ``kept_until`` equals ``had_until``. Valid only if ``difference`` is
            None.
        moved: physical offset -> right queue offset, for each frame with a harmed queue offset.
        bridges: number of an unwritten entry -> bytes of the entries that a recovery must write,
            beginning at this number (:mod:`.expired_queues`). Empty if the log has a message of the
            queue.
    """

    key: QueueKey
    first_entry: int | None
    had_until: int
    ends_empty: bool
    end: int | None
    difference: FirstDifference | None
    kept_until: int
    moved: Mapping[int, int] = field(default_factory=dict)
    largest_gap: int = 0
    bridges: Mapping[int, bytes] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------- files
class FileFault(Enum):
    """The ways in which a file of the log or of a queue does not fit the files around it."""

    SIZE = "size"
    EMPTY_LAST = "empty last"
    """The last file has 0 bytes: the writer crashed before it set the size."""
    PLACE = "place"
    """The offset in the file's name is no multiple of the file size."""
    GAP = "gap"
    """Files between the previous file and this file are missing."""


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file whose name or size does not fit the files around it. ``before`` is the previous file,
    ``size`` the right size of each file in bytes.
    """

    fault: FileFault
    file: StoreFile
    before: StoreFile | None
    size: int

    @property
    def missing(self) -> range:
        """The names of the missing files, as offsets. Only for ``FileFault.GAP``."""
        assert self.before is not None
        return range(self.before.base + self.size, self.file.base, max(1, self.size))

    def reason(self, path: str | None = None) -> str:
        """Return the fault as text. The text contains ``path`` (default: the file's path below the
        store).
        """
        path = path or self.file.path
        if self.fault is FileFault.PLACE:
            return f"{path}: no file of {self.size} bytes begins at this offset"
        if self.fault is FileFault.GAP:
            assert self.before is not None
            return f"{path}: a file is missing between {self.before.path} and this one"
        return f"{path}: {counted(self.file.size, 'byte')} instead of {self.size}"

    def size_difference(self, offset: int) -> Finding:
        """Return what verify reports for a wrong size. ``offset`` is the physical offset at which
        the fault begins; 0 for a file of a queue.
        """
        # QUIRK: RocketMQ 4.9 refuses to start on an empty last file, although no message is lost.
        is_empty = self.fault is FileFault.EMPTY_LAST and self.before is not None
        kind = "empty_file" if is_empty else "wrong_file_size"
        reason = f"{counted(self.file.size, 'byte')} instead of {self.size}"
        return finding(kind, self.file.path, offset, reason)


def file_differences(
    files: Sequence[StoreFile], size: int, *, lacks_first: bool = False
) -> Iterator[FileDifference]:
    """Yield the files that have a wrong size or place. If ``lacks_first``, the first item of
    ``files`` represents the lost first files (``StoreLayout.lost_head``), and has size 0.
    """
    lost = files[0] if lacks_first else None
    before: StoreFile | None = None
    for file in files:
        # The item that represents the lost first files may have size 0.
        if file.size != size and (file.size or file is not lost):
            is_empty_last = not file.size and file is files[-1]
            fault = FileFault.EMPTY_LAST if is_empty_last else FileFault.SIZE
            yield FileDifference(fault, file, before, size)
        if size and file.base % size:
            yield FileDifference(FileFault.PLACE, file, before, size)
        if before is not None and file.base != before.base + size:
            yield FileDifference(FileFault.GAP, file, before, size)
        before = file


def queue_file_differences(folder: str, files: FileSequence) -> Iterator[Finding]:
    """Yield a difference for each gap between the files of a queue, and each wrong file size."""
    for found in file_differences(files.files, files.file_size):
        if found.fault is FileFault.GAP:
            missing = f"{folder}/{found.missing.start:0{NAME_DIGITS}d}"
            yield finding("queue_file_missing", missing, 0, f"the next file is {found.file.path}")
        elif found.fault is not FileFault.PLACE:
            yield found.size_difference(0)


def queue_fault(files: Sequence[StoreFile], size: int) -> str | None:
    """Return the reason why the files of a queue are unusable, or None."""
    for found in file_differences(files, size):
        # An empty last file does no harm: the writer has not yet written an entry to this file.
        if found.fault is not FileFault.EMPTY_LAST or found.before is None:
            return found.reason()
    return None


def unreadable_file(files: Sequence[StoreFile], reader: OpenFiles) -> str | None:
    """Return the path of the first file that the disk cannot read completely, with the reason;
    None if the disk can read all files.
    """
    for file in files:
        reader.read(file.path, 0, file.size)
        fault = reader.fault(file.path, 0, file.size)
        if fault is not None:
            return f"{file.path}: {fault.words}"
    return None


# ----------------------------------------------------------------------------------------- entries
@dataclass(frozen=True, slots=True)
class TagsRule:
    """The tags codes that an entry may have besides the tags code of its message. A tags code below
    ``INT_MIN`` is always accepted, because it is an address in ConsumeQueueExt.

    Attributes:
        any_time: whether to accept every positive number. In the schedule topic, the tags code is a
            delivery time, which cannot be checked if the delay levels are unknown.
        slack_ms: maximum distance of a delivery time from the expected one.
    """

    any_time: bool = False
    slack_ms: int = 0

    @classmethod
    def of_readers(cls, topic: str) -> TagsRule:
        """Return the rule for verify, which does not know the broker's delay levels."""
        return cls(any_time=topic == SCHEDULE_TOPIC)

    @classmethod
    def of_writers(cls, key: QueueKey, *, is_3_1: bool) -> TagsRule:
        """Return the rule for a recovery, which knows the delay levels.

        RocketMQ 3.x took the delivery time from its clock, some milliseconds after the store time.
        Queue -1 has messages that a broker stored before it loaded its delay levels.
        """
        topic, queue_id = key
        if topic != SCHEDULE_TOPIC:
            return cls()
        return cls(any_time=queue_id < 0, slack_ms=_CLOCK_MS if is_3_1 else 0)


def same_entries(there: Units, wanted: Units, tags: TagsRule) -> Bools:
    """Return a mask: whether each entry of ``there`` has the physical offset and size of the entry
    in ``wanted``, and a tags code that ``tags`` accepts.
    """
    same: Bools = (there["physical_offset"] == wanted["physical_offset"]) & (
        there["size"] == wanted["size"]
    )
    codes, right = there["tags_code"].astype(np.int64), wanted["tags_code"].astype(np.int64)
    tags_right = (codes == right) | (codes < java.INT_MIN) | (right < java.INT_MIN)
    if tags.any_time:
        tags_right |= codes > 0
    if tags.slack_ms:
        tags_right |= (codes >= 0) & (np.abs(codes - right) <= tags.slack_ms)
    same &= tags_right
    return same


def count_same(queue: Queue | None, offset: int, entries: Units, tags: TagsRule) -> int:
    """Compare ``entries`` with the entries of a queue from the queue offset ``offset`` on. Return
    the number of matching entries before the first entry that differs or is missing.
    """
    if queue is None:
        return 0
    at = 0
    stop = min(offset + len(entries), queue.max_offset)
    for start, there in queue.runs(max(0, offset), stop):
        if start != offset + at:
            break
        wanted = entries[at : at + len(there)]
        if there.tobytes() != wanted.tobytes():
            same = same_entries(there, wanted, tags)
            if not same.all():
                return at + int(same.argmin())
        at += len(there)
    return at


# ------------------------------------------------------------------------- messages that are lost
def span_numbers(places: Int64, spans: Sequence[Span]) -> Int64:
    """Return, for each physical offset, the index in ``spans`` of the span (part of the log) that
    contains it, or -1. The spans must be in ascending order, and must not overlap.
    """
    if not spans:
        return np.full(len(places), -1, np.int64)
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.end for span in spans], np.int64)
    numbers = np.searchsorted(starts, places, "right") - 1
    inside = (numbers >= 0) & (places < ends[np.maximum(numbers, 0)])
    return np.where(inside, numbers, -1)


class SpanSet:
    """The set of the physical offsets inside some spans (parts of the log), which may overlap."""

    def __init__(self, spans: Iterable[Span]) -> None:
        bounds = np.array([(span.offset, span.end) for span in spans], np.int64).reshape(-1, 2)
        bounds = bounds[np.argsort(bounds[:, 0])]
        self._starts = bounds[:, 0]
        # No span contains the offsets before the first span. So the first item, which is the end
        # for these offsets, is the lowest number.
        self._ends = np.maximum.accumulate(np.append(np.int64(java.LONG_MIN), bounds[:, 1]))

    def mask(self, places: Int64) -> Bools:
        """Return a mask: whether the set contains each physical offset."""
        inside: Bools = places < self._ends[np.searchsorted(self._starts, places, "right")]
        return inside


def names_damage(entry: QueueEntry, damage: Container[int]) -> bool:
    """Whether both the first and the last byte of an entry's message are in ``damage``."""
    first, size = entry.physical_offset, entry.size
    return size > 0 and first in damage and first + size - 1 in damage


def may_stay(entry: QueueEntry, damage: Container[int]) -> bool:
    """Whether an entry without a message may stay in a queue. It may stay if it is a filler or the
    entry of a lost message. If such an entry were removed, the later entries would get other queue
    offsets.
    """
    return entry.is_filler or names_damage(entry, damage)


def names_ends(header: IndexHeader, first: int, last: int) -> bool:
    """Whether an index header has the begin offset ``first`` and the end offset ``last``.

    ``first`` and ``last`` are the physical offsets in the file's first and last entry.
    """
    return (header.begin_offset, header.end_offset) == (first, last)


EITHER: Final = (
    "; damage has changed the entry or the properties of the message: read the message with "
    "`messages --offset {}` before a rebuild, which makes the entry from these properties"
)
"""Text for an entry that points to its message, but has another tags code or hash."""


def queue_name(key: QueueKey) -> str:
    """Return the name of a queue, as text for a finding."""
    return f"queue {key[1]} of {key[0]}"


def entry_text(entry: np.void) -> str:
    """Return the description of an entry, as text for a finding."""
    size, place = counted(int(entry["size"]), "byte"), entry["physical_offset"]
    return f"{size} at {place} with tags code {entry['tags_code']}"


class EitherMap(Container[int]):
    """The union of several containers of physical offsets."""

    def __init__(self, *parts: Container[int]) -> None:
        self._parts = parts

    def __contains__(self, offset: object) -> bool:
        return any(offset in part for part in self._parts)
