"""Audit of index entries against the keys of the messages to which they point.

:class:`EntryStream` compares entries and keys in order while the log is read. If an entry differs,
:class:`EntryAudit` checks each entry of a file. A check of the chains would not find every wrong
hash. A chain links all entries of one slot, and a wrong hash can belong to the same slot as the
right hash.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import numpy as np

from logquarry.format import arrays as r
from logquarry.format import java, sys_flag
from logquarry.format.arrays import Bools, Int64, Records
from logquarry.format.index import ENTRY, IndexHeader
from logquarry.log import columns
from logquarry.log.follow import index_keys
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.walk import Run
from logquarry.read.index_file import IndexFile
from logquarry.repair.audit.differences import EITHER, EntryGroup, SpanSet, names_ends

ENTRY_DTYPE: Final = ENTRY.dtype()
Entries = Records

_CHUNK: Final = 1 << 18
"""Approximate number of entries to check in one step; keeps memory small for a large file."""
_LOW: Final = 0xFFFFFFFF


class EntryAudit:
    """Compares the entries of one index file with their messages.

    Attributes:
        keys: number of distinct keys that have an entry. Keys of COMMIT messages are not counted,
            nor keys of messages that are not between the two physical offsets in ``between``.
        is_ordered: whether the entries are in the order of the log, as RocketMQ writes them.
        contradicted: physical offsets of messages to which an entry points, although no key of the
            message has the entry's hash.
    """

    def __init__(
        self, layout: StoreLayout, log_end: int, lost: SpanSet, between: tuple[int, int]
    ) -> None:
        self.wrong: dict[str, EntryGroup] = {}
        self.keys = 0
        self.is_ordered = True
        self.contradicted: list[Int64] = []
        self._layout = layout
        self._log_end = log_end
        self._lost = lost
        self._between = between

    def check(self, entries: Entries) -> None:
        """Check all entries of the file. ``entries`` begins with entry number 1."""
        start = last = 0
        while start < len(entries):
            some = entries[start : start + 2 * _CHUNK]
            offsets = some["physical_offset"].astype(np.int64)
            # A chunk must not end between two entries of one message. Otherwise, the keys of this
            # message would be counted twice.
            count = min(_CHUNK, len(offsets))
            count += int(np.argmax(np.append(offsets[count:] != offsets[count - 1], True)))
            offsets = offsets[:count]
            ascends = offsets[0] >= last and bool((offsets[1:] >= offsets[:-1]).all())
            self.is_ordered = self.is_ordered and bool(ascends)
            last = int(offsets[-1])
            self._check(start, offsets, some["key_hash"][:count].astype(np.int64))
            start += count

    def _check(self, start: int, offsets: Int64, hashes: Int64) -> None:
        known = ~self._lost.mask(offsets)
        ahead = known & (offsets >= self._log_end)
        inside = np.flatnonzero(known & ~ahead & (offsets >= self._layout.commit_log.start))
        inside = inside[np.argsort(offsets[inside], kind="stable")]
        ordered = offsets[inside]
        places = _distinct(ordered)
        dangling, strange = np.zeros(len(offsets), np.bool_), np.zeros(len(offsets), np.bool_)
        bad: list[int] = []
        any_size = np.zeros(len(places), np.int32)
        for event in runs_at(self._layout, places, any_size, check_crc=False):
            if isinstance(event, Run):
                found = event.rows[:, r.POSITION].astype(np.int64) + event.window.base
                first, stop = np.searchsorted(ordered, [found[0], found[-1] + 1])
                here = first + np.flatnonzero(_among(ordered[first:stop], found))
                numbers, which = np.searchsorted(found, ordered[here]), inside[here]
                strange[which] = ~self._has_keys(event, found, numbers, hashes[which])
            else:
                bad.append(event.offset)
        dangling[inside] = np.isin(ordered, np.array(bad, np.int64))
        self.contradicted.append(offsets[strange])
        end = f"and the log ends at {self._log_end}"
        for kind, entries, what in (
            ("index_ahead", ahead, end),
            ("index_entry", dangling, "where no frame starts"),
            ("index_entry_wrong", strange, "whose message has no key of the hash {}" + EITHER),
        ):
            if entries.any():
                at = int(entries.argmax())
                text = f"points to {offsets[at]}, {what.format(hashes[at], offsets[at])}"
                wrong = self.wrong.setdefault(kind, EntryGroup(kind, start + at + 1, text))
                wrong.count += int(entries.sum())

    def _has_keys(self, run: Run, places: Int64, numbers: Int64, hashes: Int64) -> Bools:
        """Return a mask: whether each hash belongs to a key of its frame. ``numbers`` contains the
        row of each hash's frame.
        """
        raw, owners = index_keys(run.window, run.rows, raw=True)
        known = _pairs(owners, positive(raw))
        if (hashes < 0).any():
            # 3.x stored the hash with its sign; 4.9.3 stores no negative hash.
            known = np.append(known, _pairs(owners, raw))
        right = _among(_pairs(numbers, hashes), np.sort(known))
        counted = right & ~_is_commit(run)[numbers]
        counted &= (places[numbers] > self._between[0]) & (places[numbers] < self._between[1])
        self.keys += len(_distinct(_pairs(numbers[counted], positive(hashes[counted]))))
        if right.all():
            return right
        # An entry for the tag of a message is optional: brokers before 5.4 make no such entry, even
        # if they continue the store of a newer broker.
        raw, owners = index_keys(run.window, run.rows, raw=True, tags=True)
        return right | _among(_pairs(numbers, hashes), np.sort(_pairs(owners, positive(raw))))


class KeyCounter:
    """Counts the keys that index files should have, one run of the log at a time.

    Keys of a file's first and last message are not counted: their entries can be in a neighbouring
    file. Keys of COMMIT messages are not counted either: RocketMQ 3.x did not index them.
    """

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        table = np.array(ranges, np.int64).reshape(-1, 2)
        self._begins, self._ends = table[:, 0], table[:, 1]
        self.keys = np.zeros(len(ranges), np.int64)

    def add(self, run: Run, has_key: Bools) -> None:
        """Count the keys of a run. ``has_key`` is a mask of the frames with keys."""
        if not ((self._begins < run.end) & (self._ends > run.start)).any():
            return
        rows = run.rows[has_key & ~_is_commit(run)]
        hashes, numbers = index_keys(run.window, rows)
        places = rows[:, r.POSITION].astype(np.int64) + run.window.base
        keyed = places[_distinct(_pairs(numbers, hashes)) >> 32]
        counts = np.searchsorted(keyed, self._ends) - np.searchsorted(keyed, self._begins, "right")
        self.keys += np.maximum(counts, 0)


def positive(hashes: Int64) -> Int64:
    """Return hashes as 4.9.3 stores them (:func:`logquarry.format.java.positive_hash_code`)."""
    values = np.abs(hashes)
    return np.where(values > java.INT_MAX, 0, values)


def _pairs(numbers: Int64, hashes: Int64) -> Int64:
    pairs: Int64 = numbers << 32 | hashes & _LOW
    return pairs


def _distinct(values: Int64) -> Int64:
    # numpy.unique is ten times slower if the numbers differ in their high bits.
    ordered = np.sort(values)
    distinct: Int64 = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return distinct


def _among(values: Int64, known: Int64) -> Bools:
    if not len(known):
        return np.zeros(len(values), np.bool_)
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    among: Bools = known[at] == values
    return among


def _is_commit(run: Run) -> Bools:
    flags = columns.fixed_fields(run.window, run.rows, ("sys_flag",))["sys_flag"]
    commit: Bools = flags & sys_flag.TRANSACTION_MASK == sys_flag.TRANSACTION_COMMIT
    return commit


# ------------------------------------------------------- the entries of all files, in their order
@dataclass(frozen=True, slots=True)
class _Part:
    path: str
    position: int
    count: int
    header: IndexHeader


class IndexEntries:
    """The entries of all index files with a valid header, oldest file first. The first entry of the
    first file has number 0; the numbers continue in the next file.
    """

    def __init__(self, index_files: Sequence[IndexFile], files: OpenFiles, log_start: int) -> None:
        self._files = files
        self._log_start = log_start
        self._parts: list[_Part] = []
        for file in index_files:
            header, shape = file.header, file.shape
            count = header.entry_count - 1
            if count <= 0 or shape is None:
                continue
            view = files.view(file.path)
            size = 0 if view is None else view.size
            if shape.entry_position(0) + header.entry_count * ENTRY.size > size:
                continue
            self._parts.append(_Part(file.path, shape.entry_position(1), count, header))
        self._ends = list(accumulate(part.count for part in self._parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @cached_property
    def odd_headers(self) -> frozenset[str]:
        """Paths of the index files whose header has a wrong begin or end offset. The right offsets
        are the physical offsets in the file's first and last entry.
        """
        return frozenset(
            part.path
            for part, end in zip(self._parts, self._ends, strict=True)
            if not names_ends(part.header, self._offset(end - part.count), self._offset(end - 1))
        )

    @cached_property
    def start(self) -> int:
        """The number of the first entry whose message has not expired. The result is 0 if the
        entries before that entry are not in the order of the log.
        """
        start = self.first_from(self._log_start) if self._offset(0) < self._log_start else 0
        at = 0
        while at < start:
            some = self.some(at, start)
            if not len(some) or (some["physical_offset"] >= self._log_start).any():
                return 0
            at += len(some)
        return start

    def some(self, first: int, stop: int) -> Entries:
        """Return the entries from ``first`` to ``stop`` - 1. The result ends earlier if the file
        that contains entry ``first`` ends earlier.
        """
        number = bisect_right(self._ends, first)
        if number == len(self._parts):
            return np.empty(0, ENTRY_DTYPE)
        part, end = self._parts[number], self._ends[number]
        place = part.position + (first - end + part.count) * ENTRY.size
        length = (min(stop, end) - first) * ENTRY.size
        return np.frombuffer(self._files.read(part.path, place, length), ENTRY_DTYPE)

    @cached_property
    def last_offset(self) -> int:
        """Physical offset of the last entry; -1 if there are no entries."""
        return self._offset(len(self) - 1)

    def _offset(self, entry: int) -> int:
        found = self.some(entry, entry + 1)
        return int(found["physical_offset"][0]) if len(found) else -1

    def first_from(self, offset: int) -> int:
        """Return the number of the first entry whose physical offset is ``offset`` or higher.

        The entries must be in the order of the log; else the result is wrong.
        """
        return bisect_left(range(len(self)), offset, key=self._offset)


class EntryStream:
    """Compares the entries in order with the keys of the log, up to the first difference.

    ``place`` is the number of the next entry to compare. ``missing`` counts the keys without an
    entry, but only those of the message to which the last entry points.
    """

    def __init__(self, entries: IndexEntries, place: int) -> None:
        self.is_broken = False
        self.missing = 0
        self.place = place
        self.entries = entries

    def take(self, places: Int64, hashes: Int64) -> None:
        """Compare the next keys of the log with the next entries. ``places`` contains the physical
        offset of each key's message, and ``hashes`` the hash of each key.
        """
        done = 0
        while done < len(hashes) and self.place < len(self.entries):
            there = self.entries.some(self.place, self.place + len(hashes) - done)
            stop = done + len(there)
            same = len(there) > 0 and (there["physical_offset"] == places[done:stop]).all()
            if not same or (there["key_hash"] != hashes[done:stop]).any():
                self.is_broken = True
                return
            self.place, done = self.place + len(there), stop
        if done < len(hashes) and len(self.entries):
            self.missing += int((places[done:] == self.entries.last_offset).sum())

    @property
    def is_through(self) -> bool:
        """Whether no entry differed, and no entry is left to compare. The last keys of the log may
        have no entry.
        """
        return not self.is_broken and self.place == len(self.entries)
