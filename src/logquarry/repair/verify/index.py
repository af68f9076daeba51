"""Checks index files: headers, the chains of every slot, and entries against messages."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from logquarry.disk.open_files import OpenFiles
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexHeader, IndexShape
from logquarry.log import codec
from logquarry.log.follow import Followed
from logquarry.log.layout import INDEX, StoreLayout
from logquarry.log.walk import Run
from logquarry.read.index import Index, IndexFile
from logquarry.repair.verify.findings import VerifyReport
from logquarry.repair.verify.index_entries import (
    Entries,
    EntryChecker,
    EntryStream,
    IndexEntries,
    KeyCounter,
    Place,
)
from logquarry.repair.verify.unasked import Excused

_CHUNK = 1 << 22
_ENTRY_DTYPE = ENTRY.dtype()

Slots = npt.NDArray[np.int32]


class IndexChecker:
    """Checks the index of a store.

    Args:
        layout: the store's files.
        report: gets what is found.
        known_chains: paths of files whose chains are known to be sound.

    Attributes:
        entries: how many were looked at.
    """

    def __init__(
        self,
        layout: StoreLayout,
        report: VerifyReport,
        known_chains: frozenset[str] = frozenset(),
    ) -> None:
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
        self._known_chains = known_chains
        self._is_asked = False
        self._log_start = layout.commit_log.start

    @cached_property
    def _stream(self) -> EntryStream:
        return EntryStream(self._all)

    @cached_property
    def _all(self) -> IndexEntries:
        return IndexEntries(self._index.files, self._files, self._log_start)

    def add(self, followed: Followed) -> None:
        """Compare the keys of a run of the log with the entries that should be next.

        Args:
            followed: the run.
        """
        self._is_asked = True
        hashes = followed.key_hashes
        if len(hashes) and not self._stream.is_broken:
            places = followed.requests.physical_offset[followed.key_numbers]
            self._stream.take(places, hashes)

    def is_next(self, start: Place) -> bool:
        """Whether the entries from one on are the next ones, or none are looked for any more."""
        return self._stream.is_broken or self._stream.place == start

    def add_sound(self, stop: Place) -> None:
        """The next entries, up to one, are what they should be: somebody else has seen to it."""
        self._is_asked = True
        self._stream.skip_to(stop)

    @property
    def is_exact(self) -> bool:
        """Whether the index has just the entries that it should have, in their order.

        Where it has not, the keys of the log are to be counted (:meth:`count`).
        """
        if not self._is_asked:
            return True
        return self._stream.is_through and not self._all.has_odd_header

    def count(self, run: Run, has_key: npt.NDArray[np.bool_]) -> None:
        """Count the keys of a run of the log, of which some frames go into the index.

        Without it no key is missed.
        """
        self._keys.add(run, has_key)

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
        self.entries += count
        is_asked_for = self._is_asked and self.is_exact
        if is_asked_for and file.path in self._known_chains:
            return
        entries = self._entries(file, shape, count)
        if file.path not in self._known_chains:
            self._check_chains(file, shape, entries)
        if not is_asked_for:
            self._check_targets(file, shape, entries, log_end, excused)

    def chains_stand(self, path: str) -> bool:
        """Whether a file is whole, and all its chains lead where they should. Tells nothing."""
        file = next((file for file in self._index.files if file.path == path), None)
        if file is None or file.header.entry_count <= 1 or file.shape is None:
            return False
        count = file.header.entry_count - 1
        entries = self._entries(file, file.shape, count)
        if len(entries) < count:
            return False
        found, _, _ = self._find_chains(file, file.shape, entries)
        return not found.wrong and not found.wrong_slots

    def _entries(self, file: IndexFile, shape: IndexShape, count: int) -> Entries:
        data = self._files.read(file.path, shape.entry_position(1), count * ENTRY.size)
        return np.frombuffer(data, _ENTRY_DTYPE, len(data) // ENTRY.size)

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
        found, slots, newest = self._find_chains(file, shape, entries)
        self._tell_chains(file, shape, entries, found, slots, newest)

    def _find_chains(
        self, file: IndexFile, shape: IndexShape, entries: Entries
    ) -> tuple[_Chains, Slots, Slots]:
        data = self._files.read(file.path, HEADER.size, shape.slots * SLOT.size)
        slots = np.frombuffer(data, SLOT.dtype())["newest"]
        kernels = codec.kernels()
        if kernels is None:
            newest, found = _chains(entries, slots)
        else:
            newest = np.zeros(len(slots), np.int32)
            places = entries.ctypes.data, len(entries), slots.ctypes.data, len(slots)
            found = _Chains(*kernels.check_chains(*places, newest))
        return found, slots, newest

    def _tell_chains(
        self,
        file: IndexFile,
        shape: IndexShape,
        entries: Entries,
        found: _Chains,
        slots: Slots,
        newest: Slots,
    ) -> None:
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


def _more(count: int) -> str:
    return f", and {count - 1} more" if count > 1 else ""
