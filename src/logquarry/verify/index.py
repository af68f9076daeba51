"""Checks index files: headers, the chains of every slot, and entries against messages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from logquarry.files.layout import INDEX, StoreLayout
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexHeader, IndexShape
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

    def add(self, run: Run, has_key: npt.NDArray[np.bool_]) -> None:
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
        data = self._files.read(file.path, shape.entry_position(1), count * ENTRY.size)
        entries = np.frombuffer(data, _ENTRY_DTYPE)
        self.entries += count
        slots = np.abs(entries["key_hash"].astype(np.int64)) % shape.slots
        self._check_chains(file, shape, entries, slots)
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

    def _check_chains(
        self,
        file: IndexFile,
        shape: IndexShape,
        entries: Entries,
        slots: npt.NDArray[np.int64],
    ) -> None:
        """Each entry must lead to the one before it of the same slot, and each slot to its last."""
        count = len(entries)
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        first = np.ones(count, np.bool_)
        first[1:] = ordered[1:] != ordered[:-1]
        expected = np.zeros(count, np.int64)
        expected[order[1:]] = np.where(first[1:], 0, order[:-1] + 1)
        wrong = np.flatnonzero(entries["previous"] != expected)
        if len(wrong):
            number = int(wrong[0]) + 1
            self.report.add(
                "index_chain",
                file.path,
                shape.entry_position(number),
                f"entry {number} leads to {entries['previous'][wrong[0]]}, the one before it in "
                f"its slot is {expected[wrong[0]]}" + _more(len(wrong)),
                len(wrong) * ENTRY.size,
            )
        data = self._files.read(file.path, HEADER.size, shape.slots * SLOT.size)
        heads = np.frombuffer(data, SLOT.dtype())["newest"].astype(np.int64)
        last = np.ones(count, np.bool_)
        last[:-1] = first[1:]
        newest = np.zeros(shape.slots, np.int64)
        newest[ordered[last]] = order[last] + 1
        wrong = np.flatnonzero(heads != newest)
        if len(wrong):
            slot = int(wrong[0])
            self.report.add(
                "index_chain",
                file.path,
                HEADER.size + slot * SLOT.size,
                f"slot {slot} leads to entry {heads[slot]}, its newest is {newest[slot]}"
                + _more(len(wrong)),
                len(wrong) * SLOT.size,
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


def _more(count: int) -> str:
    return f", and {count - 1} more" if count > 1 else ""
