"""The units of the state table and of the redo log as their files hold them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.files.layout import FileSequence, StoreLayout
from logquarry.format import queue_entry, state_table

Units = npt.NDArray[np.void]

TABLE_DTYPE: Final = state_table.LAYOUT.dtype()
REDO_DTYPE: Final = queue_entry.LAYOUT.dtype()


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """A sequence of units.

    Attributes:
        units: those that stand before the first one that is none.
        first: number of the first one.
        fault: why the files are not what they should be, None if they are.
    """

    units: Units
    first: int
    fault: str | None

    @property
    def end(self) -> int:
        """The number that comes next."""
        return self.first + len(self.units)


def read_table(layout: StoreLayout) -> UnitFiles:
    """The state table of a store."""
    return _read(layout, layout.state_table, TABLE_DTYPE)


def read_redo(layout: StoreLayout) -> UnitFiles:
    """The redo log of a store."""
    return _read(layout, layout.redo_log, REDO_DTYPE)


def _read(layout: StoreLayout, sequence: FileSequence, dtype: np.dtype[np.void]) -> UnitFiles:
    files, size = sequence.files, sequence.file_size
    parts: list[Units] = []
    fault = _files_fault(sequence)
    first = files[0].base // dtype.itemsize if files else 0
    for before, file in pairwise([None, *files]):
        assert file is not None
        if before is not None and file.base != before.base + size:
            break
        length = min(file.size, size) // dtype.itemsize * dtype.itemsize
        try:
            data = bytes(layout.open_file(file.path).window(0, length)[:length]) if length else b""
        except OSError as error:
            fault = fault or f"{file.path}: cannot be read: {error}"
            break
        units = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype)
        sound = _sound(units)
        count = len(units) if sound.all() else int(np.argmin(sound))
        parts.append(units[:count])
        if count < size // dtype.itemsize:
            is_last = file is files[-1]
            rest = units[count:]
            if fault is None and (not is_last or rest.tobytes().strip(b"\0")):
                at = file.base + count * dtype.itemsize
                fault = f"{file.path}: there is no unit at {at}, and others stand behind it"
            break
    joined = np.concatenate(parts) if parts else np.empty(0, dtype)
    return UnitFiles(joined, first, fault)


def _sound(units: Units) -> npt.NDArray[np.bool_]:
    sound = (units["physical_offset"] >= 0) & (units["size"] > 0)
    if "state" in (units.dtype.names or ()):
        sound &= np.isin(units["state"], state_table.STATES)
    return np.asarray(sound, np.bool_)


def _files_fault(sequence: FileSequence) -> str | None:
    files, size = sequence.files, sequence.file_size
    for file in files:
        if file.size != size and (file.size or file is not files[-1]):
            return f"{file.path} has {file.size} bytes, and {size} belong there"
        if file.base % size:
            return f"{file.path} is no place where a file of {size} bytes begins"
    for before, after in pairwise(files):
        if after.base - before.base != size:
            return f"a file is missing between {before.path} and {after.path}"
    return None
