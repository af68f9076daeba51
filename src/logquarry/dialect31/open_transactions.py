"""Finds the open transactions of RocketMQ 3.x: in the log, or in the state table and the redo log.

- The QUEUEOFFSET of a PREPARED message is the number of the message's entry in the state table,
  unless the number is implausible. A producer sends this number when it ends the transaction.
- A COMMIT or ROLLBACK message contains the physical offset of a PREPARED message. The COMMIT or
  ROLLBACK message ends the transaction of that message if both messages have the same producer
  group.
- RocketMQ finds an entry in the state table only by its number. If RocketMQ builds a new table, the
  entries get new numbers. RocketMQ then ignores a COMMIT or ROLLBACK with an old number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from logquarry.format import java, queue_entry, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import POSITION, SIZE, Bools, Records
from logquarry.format.frame import FIXED_SIZE_V1, Frame
from logquarry.format.queue_entry import FILLER_SIZE, QueueEntry, StateUnit
from logquarry.format.sys_flag import TRANSACTION_PREPARED
from logquarry.log.codec import Rows, Window
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import REDO_LOG, STATE_TABLE, FileSequence
from logquarry.log.walk import LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.text import counted

Units = Records

TABLE_DTYPE: Final = queue_entry.STATE_LAYOUT.dtype()
REDO_DTYPE: Final = queue_entry.LAYOUT.dtype()


@dataclass(frozen=True, slots=True)
class UnitFiles:
    """The entries in the files of a state table or of a redo log, up to the first invalid one.

    Attributes:
        first: number of the first entry in the files.
        fault: description of the first fault in the files; None if there is none.
    """

    units: Units
    first: int
    fault: str | None

    @property
    def end(self) -> int:
        """The number that the next entry will get."""
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


def _sound(units: Units) -> Bools:
    sound = (units["physical_offset"] >= 0) & (units["size"] > 0)
    if "state" in (units.dtype.names or ()):
        sound &= np.isin(units["state"], queue_entry.STATES)
    return np.asarray(sound, np.bool_)


def _files_fault(sequence: FileSequence) -> str | None:
    files, size = sequence.files, sequence.file_size
    for file in files:
        if file.size != size and (file.size or file is not files[-1]):
            return f"{file.path} has {counted(file.size, 'byte')} instead of {size}"
        if file.base % size:
            return f"{file.path}: no file of {size} bytes can have this name"
    for before, after in pairwise(files):
        if after.base - before.base != size:
            return f"a file is missing between {before.path} and {after.path}"
    return None


# --------------------------------------------------------------------------------------------------
# Transaction frames of the log

PREPARED_TAG: Final = -1
"""In the redo log's entry for a PREPARED message, this value replaces the tags code."""
_GROUP: Final = props.PRODUCER_GROUP.encode()
_MS: Final = 1_000


class TransactionFrame(NamedTuple):
    """A PREPARED, COMMIT or ROLLBACK message.

    Attributes:
        kind: the transaction type in SYSFLAG.
        number: the QUEUEOFFSET of the message.
        prepared_offset: for a COMMIT or ROLLBACK, the physical offset of the PREPARED message that
            it ends.
        store_timestamp: store time in milliseconds.
        group_hash: hash code of the name of the producer group; 0 if the message has no group.
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
        """Whether this is a PREPARED message, which begins a transaction."""
        return self.kind == TRANSACTION_PREPARED

    def unit(self) -> StateUnit:
        """Return the state table's entry for this PREPARED message."""
        # As in Java, the seconds wrap like an int, which overflows in 2038. A damaged store time
        # can also be out of range, because no CRC covers it.
        seconds = java.to_int(self.store_timestamp // _MS)
        return StateUnit(self.physical_offset, self.size, seconds, self.group_hash, self.kind)

    def redo_unit(self) -> QueueEntry:
        """Return the redo log's entry for this message."""
        tag = PREPARED_TAG if self.is_prepared else self.prepared_offset
        return QueueEntry(self.physical_offset, self.size, tag)


def transaction_frames(window: Window, rows: Rows) -> list[TransactionFrame]:
    """Return the transaction frames among the frames in ``rows``, in the order of the log."""
    if not len(rows):
        return []
    # Import late: the module imports pyarrow, which a store of dialect 4.9 does not need.
    from logquarry.log import columns

    flags = columns.fixed_fields(window, rows, ["sys_flag"])["sys_flag"]
    chosen = np.flatnonzero(flags & sys_flag.TRANSACTION_MASK)
    found = []
    for position, size in rows[chosen][:, [POSITION, SIZE]].tolist():
        frame = frame_of(window.frame_at(position))
        assert frame is not None and frame[1:3] == (window.base + position, size)
        found.append(frame)
    return found


def frame_of(frame: Frame) -> TransactionFrame | None:
    """Return the frame's fields that transactions need; None if it has no transaction type."""
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
        queue_entry.group_hash(group),
    )


def frames_between(reader: LogReader, start: int, stop: int) -> Iterator[TransactionFrame]:
    """Yield the transaction frames between two physical offsets of the log."""
    for event in reader.events(start, stop):
        if isinstance(event, Run):
            yield from transaction_frames(event.window, event.rows)


MOST_LOST: Final = 1 << 20
"""Maximum number of PREPARED messages that can be missing directly before a PREPARED message.

If the QUEUEOFFSET of a message implies that more messages are missing, this QUEUEOFFSET is
implausible, and is not used.

Each missing message takes an entry in the table. No CRC covers the QUEUEOFFSET. So without a limit,
a damaged QUEUEOFFSET could make the table huge.
"""


class OpenTransaction(NamedTuple):
    """A transaction that has begun and not ended.

    ``number`` is the number of its entry in the state table.
    """

    number: int
    physical_offset: int
    size: int
    store_seconds: int
    group_hash: int


class Change(NamedTuple):
    """The change that a transaction frame makes to the state table.

    If entries before ``number`` are missing, the change also adds a filler for each missing entry.
    ``unit`` is the new entry; None if only the state of an existing entry changes.
    """

    number: int
    unit: StateUnit | None
    state: int


class TransactionBook:
    """Follows the transaction frames of the log, and knows which transactions are open.

    Args:
        next_number: the number that the next entry gets; None to take the number from the first
            PREPARED message.
        known_until: physical offset after the last PREPARED message that already has an entry in
            the table.

    Attributes:
        open: physical offset of the PREPARED message -> open transaction.
    """

    def __init__(self, next_number: int | None = None, known_until: int = 0) -> None:
        self.open: dict[int, OpenTransaction] = {}
        self.next_number = next_number
        self._known_until = known_until

    def __iter__(self) -> Iterator[OpenTransaction]:
        return iter(sorted(self.open.values()))

    def take(self, frame: TransactionFrame) -> Change | None:
        """Process the next transaction frame of the log.

        Return the change that the frame makes to the table, or None.
        """
        change = self.change_of(frame)
        if change is not None:
            self.apply(frame, change)
        return change

    def change_of(self, frame: TransactionFrame) -> Change | None:
        """Return the change that the next frame makes to the table, or None. Do not apply it."""
        if frame.is_prepared:
            unit = frame.unit()
            return Change(self._number_of(frame), unit, unit.state)
        found = self.open.get(frame.prepared_offset)
        if found is None or found.group_hash != frame.group_hash:
            return None
        return Change(found.number, None, frame.kind)

    def apply(self, frame: TransactionFrame, change: Change) -> None:
        """Apply the change that the next frame makes."""
        unit = change.unit
        if unit is None:
            del self.open[frame.prepared_offset]
            return
        self.next_number = change.number + 1
        self._known_until = frame.physical_offset + frame.size
        self.open[frame.physical_offset] = OpenTransaction(
            change.number, unit.physical_offset, unit.size, unit.store_seconds, unit.group_hash
        )

    def _number_of(self, frame: TransactionFrame) -> int:
        # If the number in the frame is plausible, return it; else return the next number of the
        # table.
        expected = self.next_number
        # Each skipped number belongs to a lost message, whose frame took at least FIXED_SIZE_V1
        # bytes of the log. So the distance to the last known message limits how many numbers are
        # skipped.
        room = (frame.physical_offset - self._known_until) // FIXED_SIZE_V1
        if expected is None:
            return frame.number if 0 <= frame.number <= room else 0
        lost = frame.number - expected
        return frame.number if 0 <= lost <= min(room, MOST_LOST) else expected


def filler(before: StateUnit) -> StateUnit:
    """Return the entry for a lost message. The state in the entry is ROLLBACK, so RocketMQ never
    checks the transaction.
    """
    return StateUnit(
        before.physical_offset,
        FILLER_SIZE,
        before.store_seconds,
        0,
        sys_flag.TRANSACTION_ROLLBACK,
    )


@dataclass(frozen=True, slots=True)
class TransactionsFound:
    """The contents of the state table and of the redo log.

    Attributes:
        table_end: the number that the table's next entry will get.
        redo_end: number of entries that the redo log has ever had, including those in deleted
            files.
        open: physical offset of the PREPARED message -> open transaction.
        known_until: physical offset after the last message that has an entry in the table.
    """

    table_end: int = 0
    redo_end: int = 0
    open: Mapping[int, OpenTransaction] = field(default_factory=dict)
    known_until: int = 0


def open_in(table: UnitFiles) -> dict[int, OpenTransaction]:
    """Return the open transactions of a table, by the physical offset of the PREPARED message."""
    found = {}
    for at in np.flatnonzero(table.units["state"] == TRANSACTION_PREPARED).tolist():
        offset, size, seconds, group, _ = table.units[at].item()
        found[offset] = OpenTransaction(table.first + at, offset, size, seconds, group)
    return found


def found_in(table: UnitFiles, redo: UnitFiles) -> TransactionsFound:
    """Return the contents of the state table and of the redo log; both must be undamaged."""
    known = 0
    if len(table.units):
        real = table.units[table.units["size"] != FILLER_SIZE]
        if len(real):
            known = int(real["physical_offset"][-1]) + int(real["size"][-1])
    return TransactionsFound(table.end, redo.end, open_in(table), known)


def differs_from_redo(
    layout: StoreLayout, opened: Mapping[int, OpenTransaction], redo: Units, log_start: int
) -> str | None:
    """Return a text about the first transaction that is open only in the state table or only in the
    redo log; None if both have the same open transactions.
    """
    is_prepared = redo["tags_code"] == PREPARED_TAG
    begun = redo["physical_offset"][is_prepared].astype(np.int64)
    ended = redo["tags_code"][~is_prepared].astype(np.int64)
    still = np.setdiff1d(begun[begun >= log_start], ended)
    there = np.fromiter(opened, np.int64, len(opened))
    lacking = np.setdiff1d(still, there)
    if len(lacking):
        return (
            f"{STATE_TABLE}: the transaction at {lacking[0]} is open in the redo log, but not in "
            "the table"
        )
    there = there[there >= log_start]
    unknown = np.setdiff1d(there, begun)
    if len(unknown):
        return (
            f"{REDO_LOG}: the transaction at {unknown[0]} is in the table, but not in the redo log"
        )
    # A COMMIT or ROLLBACK ends the transaction only if it has the producer group of the PREPARED
    # message. The redo log does not contain the group, so read the message.
    log = CommitLog(layout)
    for offset in np.intersect1d(there, ended).tolist():
        for place in redo["physical_offset"][~is_prepared][ended == offset].tolist():
            outcome = log.outcome_at(place, check_crc=False)
            if not isinstance(outcome, Frame):
                continue
            frame = frame_of(outcome)
            if frame is not None and frame.group_hash == opened[offset].group_hash:
                return (
                    f"{STATE_TABLE}: the transaction at {offset} ended in the redo log, but is "
                    "open in the table"
                )
    return None
