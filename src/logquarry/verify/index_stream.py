"""The entries of all index files of a store, in the order in which keys came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.format.index import ENTRY, IndexHeader
from logquarry.store.disk.open_files import OpenFiles
from logquarry.store.read.index_file import IndexFile
from logquarry.verify.index_entries import Entries

_ENTRY_DTYPE: Final = ENTRY.dtype()

Int64 = npt.NDArray[np.int64]
Place = tuple[int, int]
"""Of an entry: the number of its file among those that hold any, and its own number there, from 0.
Behind the last entry: the number of files, and 0."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The entries of one file: where they stand, and how many."""

    path: str
    position: int
    count: int
    header: IndexHeader


class IndexEntries:
    """The entries of index files, of those that are what they should be.

    Args:
        index_files: the files, oldest first.
        files: what reads them.
        log_start: entries of what the log has no longer are passed over at the start of a file.
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
        self._starts: list[int | None] = [None] * len(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def has_odd_header(self) -> bool:
        """Whether a header says another begin or end than the entries have."""
        for number, part in enumerate(self._parts):
            ends = self._offset(number, 0), self._offset(number, part.count - 1)
            if ends != (part.header.begin_offset, part.header.end_offset):
                return True
        return False

    def count(self, number: int) -> int:
        """How many entries a file has."""
        return self._parts[number].count

    def start(self, number: int) -> int:
        """The first entry of a file that the log may still have a message for."""
        known = self._starts[number]
        if known is None:
            known = 0
            if self._offset(number, 0) < self._log_start:
                expired = self.some(number, 0)["physical_offset"] < self._log_start
                known = int(expired.argmin()) if not expired.all() else len(expired)
            self._starts[number] = known
        return known

    def some(self, number: int, first: int, stop: int | None = None) -> Entries:
        """Entries of a file, from one to another or to the last."""
        part = self._parts[number]
        stop = part.count if stop is None else min(stop, part.count)
        place, length = part.position + first * ENTRY.size, (stop - first) * ENTRY.size
        return np.frombuffer(self._files.read(part.path, place, length), _ENTRY_DTYPE)

    def _offset(self, number: int, entry: int) -> int:
        found = self.some(number, entry, entry + 1)
        return int(found["physical_offset"][0]) if len(found) else -1

    def first_from(self, offset: int) -> Place:
        """The first entry of a message from a place of the log on, if all stand in the log's order.

        Where they do not, any place.
        """
        for number, part in enumerate(self._parts):
            if self._offset(number, part.count - 1) < offset:
                continue
            low, high = self.start(number), part.count
            while low < high:
                middle = (low + high) // 2
                if self._offset(number, middle) < offset:
                    low = middle + 1
                else:
                    high = middle
            return self.normal((number, low))
        return len(self._parts), 0

    def normal(self, place: Place) -> Place:
        """The same place, where an entry stands or behind the last one."""
        number, at = place
        while number < len(self._parts):
            at = max(at, self.start(number))
            if at < self._parts[number].count:
                return number, at
            number, at = number + 1, 0
        return number, 0


class EntryStream:
    """Compares entries with the keys of the log, as these come by.

    Args:
        entries: all of them.
        place: where to begin.
    """

    def __init__(self, entries: IndexEntries, place: Place = (0, 0)) -> None:
        self.is_broken = False
        self._entries = entries
        self._place = entries.normal(place)

    @property
    def place(self) -> Place:
        """The next entry."""
        return self._place

    def skip_to(self, place: Place) -> None:
        """Entries up to here were compared by somebody else."""
        self._place = self._entries.normal(place)

    def take(self, places: Int64, hashes: Int64) -> None:
        """The next keys: where their messages stand, and their hashes."""
        done = 0
        while done < len(hashes) and not self.is_at_end:
            number, at = self._place
            there = self._entries.some(number, at, at + len(hashes) - done)
            stop = done + len(there)
            same = len(there) > 0 and (there["physical_offset"] == places[done:stop]).all()
            if not same or (there["key_hash"] != hashes[done:stop]).any():
                self.is_broken = True
                return
            done = stop
            self._place = self._entries.normal((number, at + len(there)))

    @property
    def is_at_end(self) -> bool:
        """Whether no entry follows."""
        return self._place[0] == len(self._entries)

    @property
    def is_through(self) -> bool:
        """Whether all entries were asked for, and no other."""
        return not self.is_broken and self.is_at_end
