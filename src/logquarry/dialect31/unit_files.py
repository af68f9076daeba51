"""Reads the entries of state table and redo log, and the log's transaction frames."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from logquarry.format import java, queue_entry, state_table, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.format.rows import POSITION, SIZE
from logquarry.format.state_table import StateUnit
from logquarry.log.codec import Rows, Window
from logquarry.log.file_sequence import FileSequence
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run

Units = npt.NDArray[np.void]

TABLE_DTYPE: Final = state_table.LAYOUT.dtype()
REDO_DTYPE: Final = queue_entry.LAYOUT.dtype()


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """A sequence of entries.

    Attributes:
        units: the entries before the first invalid one.
        first: number of the first entry.
        fault: the first fault of the files, None if they have none.
    """

    units: Units
    first: int
    fault: str | None

    @property
    def end(self) -> int:
        """The number of the next entry."""
        return self.first + len(self.units)


def read_table(layout: StoreLayout) -> UnitFiles:
    """Read the state table of a store."""
    return _read(layout, layout.state_table, TABLE_DTYPE)


def read_redo(layout: StoreLayout) -> UnitFiles:
    """Read the redo log of a store."""
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
                fault = f"{file.path}: no valid entry at {at}, but entries follow it"
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
            return f"{file.path} has {file.size} bytes instead of {size}"
        if file.base % size:
            return f"{file.path}: no file of {size} bytes can begin at that offset"
    for before, after in pairwise(files):
        if after.base - before.base != size:
            return f"a file is missing between {before.path} and {after.path}"
    return None


# --------------------------------------------------------------------------------------------------
# Transaction frames of the log

PREPARED_TAG: Final = -1
"""The value that redo log entries of PREPARED messages have in the field of the tags code."""
_GROUP: Final = props.PRODUCER_GROUP.encode()
_MS: Final = 1_000


class TransactionFrame(NamedTuple):
    """A PREPARED, COMMIT or ROLLBACK message.

    Attributes:
        kind: its transaction type, as in SYSFLAG.
        physical_offset: its physical offset.
        size: bytes of the frame.
        number: its QUEUEOFFSET.
        prepared_offset: physical offset of the PREPARED message that it ends.
        store_timestamp: in milliseconds.
        group_hash: hash of its producer group, 0 without one.
    """

    kind: int
    physical_offset: int
    size: int
    number: int
    prepared_offset: int
    store_timestamp: int
    group_hash: int

    @property
    def is_prepared(self) -> bool:
        """Whether it begins a transaction."""
        return self.kind == sys_flag.TRANSACTION_PREPARED

    def unit(self, state: int = sys_flag.TRANSACTION_PREPARED) -> StateUnit:
        """Its entry in the state table."""
        # Java, too, truncates times after 2038; no CRC covers the time.
        seconds = java.to_int(self.store_timestamp // _MS)
        return StateUnit(self.physical_offset, self.size, seconds, self.group_hash, state)

    def redo_unit(self) -> QueueEntry:
        """Its entry in the redo log."""
        tag = PREPARED_TAG if self.is_prepared else self.prepared_offset
        return QueueEntry(self.physical_offset, self.size, tag)


def transaction_frames(window: Window, rows: Rows) -> list[TransactionFrame]:
    """The transaction frames among some frames, in their order."""
    if not len(rows):
        return []
    # Imported here: it loads pyarrow, which a store of 4.x does not need.
    from logquarry.log import columns

    flags = columns.fixed_fields(window, rows, ["sys_flag"])["sys_flag"]
    chosen = np.flatnonzero(flags & sys_flag.TRANSACTION_MASK)
    found = []
    for position, size in rows[chosen][:, [POSITION, SIZE]].tolist():
        decoded = window.decode(position, check_crc=False)
        assert isinstance(decoded, Frame), "the walk found a sound frame here"
        frame = frame_of(decoded)
        assert frame is not None and frame[1:3] == (window.base + position, size)
        found.append(frame)
    return found


def frame_of(frame: Frame) -> TransactionFrame | None:
    """The transaction data of a frame, None if it has no transaction type."""
    kind = sys_flag.transaction_type(frame.sys_flag)
    if kind == sys_flag.TRANSACTION_NOT:
        return None
    group = None
    if _GROUP in frame.properties:
        group = props.decode_bytes(frame.properties).get(props.PRODUCER_GROUP)
    return TransactionFrame(
        kind,
        frame.physical_offset,
        frame.size,
        frame.queue_offset,
        frame.prepared_transaction_offset,
        frame.store_timestamp,
        state_table.group_hash(group),
    )


def frames_between(reader: LogReader, start: int, stop: int) -> Iterator[TransactionFrame]:
    """The transaction frames in a range of the log."""
    for event in reader.events(start, stop):
        if isinstance(event, Run):
            yield from transaction_frames(event.window, event.rows)
