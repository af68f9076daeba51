"""Typed differences between log, queues and index, with the rules and limits that decide them.

Every audit of a store uses these functions. So verify, recover, rebuild and salvage agree on which
files and entries are wrong.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format import java
from logquarry.format.arrays import Bools, Int64
from logquarry.format.index import IndexHeader
from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.store_files import NAME_DIGITS, FileSequence, StoreFile
from logquarry.log.walk import DamagedSpan, ExpiredSpan
from logquarry.read.index_file import Span
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Units

LostSpans = Sequence[DamagedSpan | ExpiredSpan]
"""Parts of the log that hold no readable message. Queues and index cannot be checked there."""

# MOST_GAP and MOST_OFFSET, which limit the writer too, are in logquarry.write.queue_writer.
GAP_SLACK: Final = 16
"""Damaged bytes of the log had room for a certain number of messages. A gap in the queue offsets
may be larger than this number by at most ``GAP_SLACK`` messages.
"""
MOST_MOVED: Final = 1 << 20
"""Maximum number of harmed queue offsets that a recovery corrects in one queue."""
MOST_STRETCHES: Final = 16
"""Maximum number of stretches of misplaced entries that are reported separately for one queue."""
_CLOCK_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two parts of a store disagree.

    Attributes:
        kind: a kind of :data:`logquarry.repair.verify.findings.KINDS`.
        file: path below the store's folder.
        offset: in the log a physical offset, elsewhere a position in the file.
        reason: the difference in words.
        length: number of bytes that are affected, 0 if unknown.
        is_explained: whether a crash explains the difference, so that it is not damage.
    """

    kind: str
    file: str
    offset: int
    reason: str
    length: int = 0
    is_explained: bool = False


@dataclass(slots=True)
class EntryGroup:
    """Entries of a queue or of an index file that differ from the log in the same way.

    Attributes:
        kind: kind of the finding.
        number: number of the first entry; in a queue, its queue offset.
        reason: how the first entry differs, in words.
        count: number of entries.
    """

    kind: str
    number: int
    reason: str
    count: int = 0

    def at(self, file: str, position: int, entry_size: int) -> Difference:
        """The difference that verify reports."""
        text = f"entry {self.number} {self.reason}{and_more(self.count)}"
        return Difference(self.kind, file, position, text, self.count * entry_size)


def and_more(count: int) -> str:
    """The words that end a text which mentions only the first of several items."""
    return f", and {count - 1} more" if count > 1 else ""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first place where a queue differs from the log.

    Attributes:
        offset: queue offset.
        resume_at: physical offset of the message that has this queue offset, or of the next one.
        reason: the difference in words.
    """

    offset: int
    resume_at: int
    reason: str


@dataclass(frozen=True, slots=True)
class AuditedQueue:
    """A queue, compared with the whole log.

    Attributes:
        key: topic and queue id.
        first_entry: queue offset at which the queue's first file begins, None if the queue has no
            file.
        had_until: queue offset at which the queue ends on the disk.
        ends_empty: whether its last file has no entry.
        end: one past the queue offset of the last message; None if the log has no message of it.
        difference: the queue's first difference, None if the queue has all messages.
        kept_until: if there is no difference, the queue offset before which each entry is right.
            The message of a right entry is in the log, or was lost or deleted.
        moved: the right queue offset of each message with a harmed one, by physical offset.
        largest_gap: maximum number of messages that are missing at one place.
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


# ------------------------------------------------------------------------------------------- files
class FileFault(Enum):
    """The ways in which a file's name or size can contradict its place in the sequence."""

    SIZE = "size"
    EMPTY_LAST = "empty last"
    """The last file is empty: the writer crashed after it created the file, and before it gave the
    file its size.
    """
    PLACE = "place"
    """The offset in the file's name is not a multiple of the file size."""
    GAP = "gap"
    """Files are missing between this file and the previous one."""


@dataclass(frozen=True, slots=True)
class FileDifference:
    """A file of the log or of a queue that does not fit its sequence.

    Attributes:
        fault: the kind of the fault.
        file: the file.
        before: the previous file; None for the first file.
        size: number of bytes that each file of the sequence should have.
    """

    fault: FileFault
    file: StoreFile
    before: StoreFile | None
    size: int

    @property
    def missing(self) -> range:
        """First offsets of the missing files, for a GAP."""
        assert self.before is not None
        return range(self.before.base + self.size, self.file.base, max(1, self.size))

    def reason(self, path: str | None = None) -> str:
        """The fault in words.

        Args:
            path: name of the file in the text (default: its path below the store's folder).
        """
        path = path or self.file.path
        if self.fault is FileFault.PLACE:
            return f"{path}: no file of {self.size} bytes begins at this offset"
        if self.fault is FileFault.GAP:
            assert self.before is not None
            return f"{path}: a file is missing between {self.before.path} and this one"
        return f"{path}: {self.file.size} bytes instead of {self.size}"

    def size_difference(self, offset: int) -> Difference:
        """A wrong size as verify reports it.

        Args:
            offset: in the log the file's physical offset, elsewhere 0.
        """
        # QUIRK: RocketMQ refuses to start on an empty last file, although no message is lost.
        is_empty = self.fault is FileFault.EMPTY_LAST and self.before is not None
        kind = "empty_file" if is_empty else "wrong_file_size"
        reason = f"{self.file.size} bytes instead of {self.size}"
        return Difference(kind, self.file.path, offset, reason)


def file_differences(
    files: Sequence[StoreFile], size: int, *, lacks_first: bool = False
) -> Iterator[FileDifference]:
    """The files that have a wrong size or place, in their order.

    Args:
        files: a sequence, ordered by offset.
        size: bytes that each file should have.
        lacks_first: whether the first file represents missing files (``StoreLayout.lost_head``).
    """
    lost = files[0] if lacks_first else None
    before: StoreFile | None = None
    for file in files:
        # The missing files at the log's start count as one empty file.
        if file.size != size and (file.size or file is not lost):
            is_empty_last = not file.size and file is files[-1]
            fault = FileFault.EMPTY_LAST if is_empty_last else FileFault.SIZE
            yield FileDifference(fault, file, before, size)
        if size and file.base % size:
            yield FileDifference(FileFault.PLACE, file, before, size)
        if before is not None and file.base != before.base + size:
            yield FileDifference(FileFault.GAP, file, before, size)
        before = file


def queue_file_differences(folder: str, files: FileSequence) -> Iterator[Difference]:
    """The differences of a queue's files: missing files, and files of a wrong size."""
    for found in file_differences(files.files, files.file_size):
        if found.fault is FileFault.GAP:
            missing = f"{folder}/{found.missing.start:0{NAME_DIGITS}d}"
            yield Difference(
                "queue_file_missing", missing, 0, f"the next file is {found.file.path}"
            )
        elif found.fault is not FileFault.PLACE:
            yield found.size_difference(0)


def queue_fault(files: Sequence[StoreFile], size: int) -> str | None:
    """The reason why the files of a queue cannot be used, None if they can be used."""
    for found in file_differences(files, size):
        # An empty file after other files has not been written yet.
        if found.fault is not FileFault.EMPTY_LAST or found.before is None:
            return found.reason()
    return None


# ----------------------------------------------------------------------------------------- entries
@dataclass(frozen=True, slots=True)
class TagsRule:
    """Tags codes of an entry that are accepted in addition to the code of the message.

    A broker can store an address into ConsumeQueueExt instead of a tags code. These addresses are
    below ``INT_MIN``, and are always accepted.

    Attributes:
        any_time: accept every positive number. Entries of the schedule topic hold a delivery time.
            The delay levels determine this time, and a reader may not know them.
        slack_ms: accept a delivery time that is wrong by at most this many milliseconds.
    """

    any_time: bool = False
    slack_ms: int = 0

    @classmethod
    def of_readers(cls, topic: str) -> TagsRule:
        """The rule for a check that does not know the broker's delay levels."""
        return cls(any_time=topic == SCHEDULE_TOPIC)

    @classmethod
    def of_writers(cls, key: QueueKey, *, is_3_1: bool) -> TagsRule:
        """The rule for a recovery, which knows the delay levels.

        RocketMQ 3.x took the delivery time from its clock, some milliseconds after the store time.
        Queue -1 has the messages that a broker stored before it had loaded its levels.
        """
        topic, queue_id = key
        if topic != SCHEDULE_TOPIC:
            return cls()
        return cls(any_time=queue_id < 0, slack_ms=_CLOCK_MS if is_3_1 else 0)


def same_entries(there: Units, wanted: Units, tags: TagsRule) -> Bools:
    """Mark the entries that have the physical offset, the size and an accepted tags code of their
    message.

    ``wanted`` may also be the entries of another store's queue.
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


def consecutive(offsets: Int64) -> Iterator[tuple[int, int]]:
    """Parts of an array, as (start, stop), in which each offset is the previous one plus 1.

    A part ends at a gap, or if the topic was recreated and its offsets fall back.
    """
    cuts = np.flatnonzero(np.diff(offsets) != 1) + 1
    for start, stop in pairwise([0, *cuts.tolist(), len(offsets)]):
        if start < stop:
            yield start, stop


# ------------------------------------------------------------------------- messages that are lost
def span_numbers(places: Int64, spans: Sequence[Span]) -> Int64:
    """Return, for each physical offset, the number of the span that contains it, or -1.

    Args:
        spans: spans of the log that do not overlap, ordered by offset.
    """
    if not spans:
        return np.full(len(places), -1, np.int64)
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.offset + span.length for span in spans], np.int64)
    numbers = np.searchsorted(starts, places, "right") - 1
    inside = (numbers >= 0) & (places < ends[np.maximum(numbers, 0)])
    return np.where(inside, numbers, -1)


def within(places: Int64, spans: Iterable[Span]) -> Bools:
    """Mark the physical offsets that lie in the given spans of the log."""
    ordered = sorted(spans, key=lambda span: (span.offset, span.length))
    inside: Bools = span_numbers(places, ordered) >= 0
    return inside


def names_damage(entry: QueueEntry, damage: Container[int]) -> bool:
    """Whether the message of an entry is lost: its first and last byte lie in damage."""
    first, size = entry.physical_offset, entry.size
    return size > 0 and first in damage and first + size - 1 in damage


def may_stay(entry: QueueEntry, damage: Container[int]) -> bool:
    """Whether an entry may stay in a queue although the log has no message for it.

    It may if it is a filler, or if its message is lost. If such an entry were removed, later
    entries would move to other queue offsets.
    """
    return entry.is_filler or names_damage(entry, damage)


def names_ends(header: IndexHeader, first: int, last: int) -> bool:
    """Whether an index header has the physical offsets of the file's first and last entry."""
    return (header.begin_offset, header.end_offset) == (first, last)


def queue_name(key: QueueKey) -> str:
    """The name of a queue, as it appears in reasons and findings."""
    return f"queue {key[1]} of {key[0]}"
