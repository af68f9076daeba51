"""Checks index files: headers, the chains of every slot, and entries against messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from logquarry.files.layout import INDEX, StoreLayout
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexHeader, IndexShape
from logquarry.scan import codec
from logquarry.scan.follow import Followed
from logquarry.scan.walk import Run
from logquarry.store.disk.open_files import OpenFiles
from logquarry.store.read.index_file import Index, IndexFile
from logquarry.verify.findings import VerifyReport
from logquarry.verify.index_entries import Entries, EntryChecker, KeyCounter
from logquarry.verify.unasked import Excused

_CHUNK = 1 << 22
_ENTRY_DTYPE = ENTRY.dtype()


class IndexChecker:
    """Checks the index of a store.

    Attributes:
        entries: how many were looked at.
    """

    def __init__(self, layout: StoreLayout, report: VerifyReport) -> None:
        self.layout = layout
        self.report = report
        self._files = OpenFiles(layout)
        self._index = Index(layout, files=self._files)
        self.entries = 0
        # As they are before the log is walked: a live writer moves the end.
        headers = [file.header for file in self._index.files]
        self._ranges = [(header.begin_offset, header.end_offset) for header in headers]
        self._numbers = {file.path: number for number, file in enumerate(self._index.files)}
        self._keys = KeyCounter(self._ranges)
        self._stream: _Stream | None = None
        self._has_odd_header = False

    def add(self, followed: Followed) -> None:
        """Compare the keys of a run of the log with the entries that should be next.

        Args:
            followed: the run.
        """
        if self._stream is None:
            self._stream = _Stream(self._entries_of_all())
        hashes = followed.key_hashes
        if len(hashes) and not self._stream.is_broken:
            places = followed.requests.physical_offset[followed.key_numbers]
            self._stream.take(places, hashes)

    @property
    def is_exact(self) -> bool:
        """Whether the index has just the entries that it should have, in their order.

        Where it has not, the keys of the log are to be counted (:meth:`count`).
        """
        if self._stream is None:
            return True
        return self._stream.is_through and not self._has_odd_header

    def count(self, run: Run, has_key: npt.NDArray[np.bool_]) -> None:
        """Count the keys of a run of the log, of which some frames go into the index.

        Without it no key is missed.
        """
        self._keys.add(run, has_key)

    def _entries_of_all(self) -> Iterator[Entries]:
        """The entries of each file; none where a file is not what it should be."""
        start = self.layout.commit_log.start
        for file in self._index.files:
            header, shape = file.header, file.shape
            count = header.entry_count - 1
            if count <= 0 or shape is None:
                continue
            if shape.entry_position(0) + header.entry_count * ENTRY.size > self._size(file):
                continue
            data = self._files.read(file.path, shape.entry_position(1), count * ENTRY.size)
            entries = np.frombuffer(data, _ENTRY_DTYPE)
            ends = (int(entries["physical_offset"][at]) for at in (0, -1))
            self._has_odd_header |= tuple(ends) != (header.begin_offset, header.end_offset)
            # What was deleted from the log's start is still in the index.
            expired = entries["physical_offset"] < start
            yield entries[int(expired.argmin()) if not expired.all() else len(entries) :]

    def check(self, log_end: int, excused: Excused, last_keyed: int | None) -> None:
        """Check all files.

        Args:
            log_end: where the log ends.
            excused: parts of the log that no index is to blame for.
            last_keyed: physical offset of the log's last message with keys.
        """
        files = self._index.files
        if not files:
            if last_keyed is not None:
                self.report.add("index_missing", INDEX, 0, "keys cannot be looked up quickly")
            return
        indexed = -1
        for file in files:
            header = file.header
            if header.entry_count > 1:
                indexed = max(indexed, header.end_offset)
            self._check_file(file, header, log_end, excused)
        if last_keyed is not None and last_keyed > indexed:
            self.report.add(
                "index_behind",
                files[-1].path,
                0,
                f"keys are indexed up to {indexed}, and the log has some up to {last_keyed}",
            )

    def _check_file(
        self, file: IndexFile, header: IndexHeader, log_end: int, excused: Excused
    ) -> None:
        size = self._size(file)
        count = header.entry_count - 1
        if count == 0:
            if size < HEADER.size or self._holds_something(file, size):
                reason = "it is too short" if size < HEADER.size else "it says that nothing follows"
                self.report.add("index_header", file.path, 0, reason, HEADER.size)
            return
        shape = file.shape
        if shape is None:
            if count * ENTRY.size + HEADER.size > size or header.begin_offset > header.end_offset:
                self.report.add(
                    "index_header",
                    file.path,
                    0,
                    f"{count} entries from offset {header.begin_offset} to {header.end_offset} "
                    f"in {size} bytes",
                    HEADER.size,
                )
            else:
                self.report.add(
                    "index_shape", file.path, 0, "state maxHashSlotNum and maxIndexNum in a config"
                )
            return
        if shape.entry_position(0) + header.entry_count * ENTRY.size > size:
            reason = f"{header.entry_count} entries do not fit into {size} bytes"
            self.report.add("index_header", file.path, 0, reason, HEADER.size)
            return
        data = self._files.read(file.path, shape.entry_position(1), count * ENTRY.size)
        entries = np.frombuffer(data, _ENTRY_DTYPE)
        self.entries += count
        self._check_chains(file, shape, entries)
        if self._stream is None or not self.is_exact:
            self._check_targets(file, shape, entries, log_end, excused)

    def _holds_something(self, file: IndexFile, size: int) -> bool:
        """Whether a file without entries has other bytes than zeros behind its header."""
        for start in range(HEADER.size, size, _CHUNK):
            data = self._files.read(file.path, start, min(_CHUNK, size - start))
            if data.tobytes().strip(b"\0"):
                return True
        return False

    def _size(self, file: IndexFile) -> int:
        view = self._files.view(file.path)
        return 0 if view is None else view.size

    def _check_chains(self, file: IndexFile, shape: IndexShape, entries: Entries) -> None:
        """Each entry must lead to the one before it of the same slot, and each slot to its last."""
        data = self._files.read(file.path, HEADER.size, shape.slots * SLOT.size)
        slots = np.frombuffer(data, SLOT.dtype())["newest"]
        kernels = codec.kernels()
        if kernels is None:
            newest, found = _chains(entries, slots)
        else:
            newest = np.zeros(len(slots), np.int32)
            places = entries.ctypes.data, len(entries), slots.ctypes.data, len(slots)
            found = _Chains(*kernels.check_chains(*places, newest))
        if found.wrong:
            number = found.first + 1
            self.report.add(
                "index_chain",
                file.path,
                shape.entry_position(number),
                f"entry {number} leads to {entries['previous'][found.first]}, the one before it in "
                f"its slot is {found.expected}" + _more(found.wrong),
                found.wrong * ENTRY.size,
            )
        if found.wrong_slots:
            slot = found.first_slot
            self.report.add(
                "index_chain",
                file.path,
                HEADER.size + slot * SLOT.size,
                f"slot {slot} leads to entry {slots[slot]}, its newest is {newest[slot]}"
                + _more(found.wrong_slots),
                found.wrong_slots * SLOT.size,
            )

    def _check_targets(
        self,
        file: IndexFile,
        shape: IndexShape,
        entries: Entries,
        log_end: int,
        excused: Excused,
    ) -> None:
        number = self._numbers[file.path]
        begin, end = self._ranges[number]
        checker = EntryChecker(self.layout, log_end, excused, (begin, end))
        checker.check(entries)
        for kind, wrong in checker.wrong.items():
            self.report.add(
                kind,
                file.path,
                shape.entry_position(wrong.number),
                f"entry {wrong.number} {wrong.reason}" + _more(wrong.count),
                wrong.count * ENTRY.size,
            )
        # What a wrong entry does not say is told with the entry.
        told = sum(wrong.count for wrong in checker.wrong.values())
        missing = int(self._keys.keys[number]) - checker.keys - told
        if checker.is_ordered and missing > 0:
            self.report.add(
                "index_gap",
                file.path,
                0,
                f"{missing} keys of messages between {begin} and {end} have no entry",
            )


class _Chains(NamedTuple):
    """What is wrong with the chains of an index file.

    Attributes:
        wrong: entries that lead elsewhere than to the one before of their slot.
        first: the index of the first.
        expected: the number of the entry to which it should lead.
        wrong_slots: slots that lead elsewhere than to their newest entry.
        first_slot: the first.
    """

    wrong: int
    first: int
    expected: int
    wrong_slots: int
    first_slot: int


def _chains(
    entries: Entries, slots: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], _Chains]:
    """The same as the kernel: the number of each slot's newest entry, and what is wrong."""
    newest = np.zeros(len(slots), np.int32)
    wrong: list[tuple[int, int]] = []
    for number, entry in enumerate(entries):
        slot = abs(int(entry["key_hash"])) % len(slots)
        if entry["previous"] != newest[slot]:
            wrong.append((number, int(newest[slot])))
        newest[slot] = number + 1
    wrong_slots = np.flatnonzero(slots != newest).tolist()
    first, expected = wrong[0] if wrong else (-1, -1)
    first_slot = wrong_slots[0] if wrong_slots else -1
    return newest, _Chains(len(wrong), first, expected, len(wrong_slots), first_slot)


class _Stream:
    """The entries of all index files, one after the other, as keys of the log come by.

    Args:
        entries: of each file.
    """

    def __init__(self, entries: Iterator[Entries]) -> None:
        self.is_broken = False
        self._rest = entries
        self._some: Entries = np.empty(0, _ENTRY_DTYPE)
        self._at = 0

    def take(self, places: npt.NDArray[np.int64], hashes: npt.NDArray[np.int64]) -> None:
        """The next keys: where their messages stand, and their hashes."""
        done = 0
        while done < len(hashes) and self._has_more():
            count = min(len(hashes) - done, len(self._some) - self._at)
            there = self._some[self._at : self._at + count]
            same = (there["physical_offset"] == places[done : done + count]).all()
            if not same or (there["key_hash"] != hashes[done : done + count]).any():
                self.is_broken = True
                return
            done += count
            self._at += count

    def _has_more(self) -> bool:
        while self._at == len(self._some):
            found = next(self._rest, None)
            if found is None:
                return False
            self._some, self._at = found, 0
        return True

    @property
    def is_through(self) -> bool:
        """Whether all entries were asked for, and no other."""
        return not self.is_broken and not self._has_more()


def _more(count: int) -> str:
    return f", and {count - 1} more" if count > 1 else ""
