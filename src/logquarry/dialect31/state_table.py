"""Writes the state table and redo log of RocketMQ 3.x for dispatched transactions.

If the table or the redo log differs from the log, recovery moves its files to quarantine and builds
new files. In the new table, each entry keeps the number from its PREPARED message, because
producers end the transaction by this number. The new table includes ended transactions, so that no
number is used twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import (
    REDO_DTYPE,
    TABLE_DTYPE,
    Change,
    OpenTransaction,
    TransactionBook,
    TransactionFrame,
    TransactionsFound,
    UnitFiles,
    filler,
    open_in,
    read_redo,
    read_table,
    transaction_frames,
)
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import StoreUnavailable
from logquarry.format import queue_entry, state_table
from logquarry.format.state_table import FILLER_SIZE, STATE_AT, UNIT_SIZE, StateUnit
from logquarry.format.sys_flag import TRANSACTION_PREPARED
from logquarry.log.codec import Window
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import REDO_LOG, STATE_TABLE, quarantine

_FILLERS_AT_ONCE: Final = 1 << 14


class StateTableKeeper:
    """Writes the state table and the redo log of a store. Only the dispatcher writes.

    ``found`` is the content of table and redo log at ``log_end``. Frames before ``log_end`` are
    skipped.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        config: StoreConfig,
        found: TransactionsFound,
        log_end: int,
    ) -> None:
        table_size, redo_size = _file_sizes(config)
        self._table = _open(disk, root, STATE_TABLE, table_size, found.table_end * UNIT_SIZE)
        end = found.redo_end * queue_entry.UNIT_SIZE
        self._redo = _open(disk, root, REDO_LOG, redo_size, end)
        next_number = found.table_end if self._table.bases else None
        self._book = TransactionBook(next_number, found.known_until)
        self._book.open.update(found.open)
        self._known_until = self._table_until = log_end
        # Users read and other threads flush while the dispatcher's thread writes.
        self._lock = threading.Lock()
        self._changed: set[MappedFile] = set()
        # A flush holds this lock while it syncs changed files, so that retention does not delete
        # them.
        self._syncing = threading.Lock()

    @property
    def next_number(self) -> int:
        """Number of the table's next entry."""
        with self._lock:
            return self._book.next_number or 0

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the open transactions of the dispatched log, sorted by number."""
        with self._lock:
            return list(self._book)

    def find(self, physical_offset: int) -> OpenTransaction | None:
        """Return the open transaction with a PREPARED message at an offset, or None."""
        with self._lock:
            return self._book.open.get(physical_offset)

    # -------------------------------------------------------------------------------- dispatch
    def follow(self, window: Window, run: Followed) -> None:
        """Process the next frames of the log, and skip known frames."""
        requests = run.requests
        if int(requests.physical_offset[-1]) < self._known_until:
            return
        for frame in transaction_frames(window, run.rows):
            if frame.physical_offset >= self._known_until:
                self._take(frame)
        self._known_until = int(requests.physical_offset[-1]) + int(requests.size[-1])

    def _take(self, frame: TransactionFrame) -> None:
        end = frame.physical_offset + frame.size
        with self._lock:
            # After an error (for example a full disk) the caller passes the same frame again. The
            # table may already have the frame's entry.
            if frame.physical_offset >= self._table_until:
                change = self._book.change_of(frame)
                if change is not None:
                    # If the write raises an exception, the book does not change, so the frame gets
                    # the same number again.
                    self._write(change)
                    self._book.apply(frame, change)
                self._table_until = end
            _append(self._redo, queue_entry.encode(frame.redo_unit()))
            self._known_until = end

    def _write(self, change: Change) -> None:
        if change.unit is None:
            self._set_state(change.number, change.state)
            return
        table = self._table
        if not table.bases:
            start = change.number * UNIT_SIZE
            file = _last_file(table, start)
            _append(table, _fillers(change.unit, (start - file.base) // UNIT_SIZE))
        at = table.wrote_offset // UNIT_SIZE
        while at < change.number:
            count = min(_FILLERS_AT_ONCE, change.number - at)
            _append(table, _fillers(change.unit, count))
            at += count
        if at == change.number:
            _append(table, state_table.encode(change.unit))

    def _set_state(self, number: int, state: int) -> None:
        at = number * UNIT_SIZE + STATE_AT
        file = self._table.find(at)
        if file is None:
            return
        position = at - file.base
        file.buffer[position : position + 4] = state.to_bytes(4)
        file.keep(position, position + 4)
        self._changed.add(file)

    # ----------------------------------------------------------------------------------- files
    def flush(self, least_pages: int = 0) -> None:
        """Sync the appended entries. If ``least_pages`` is 0, sync changed states too.

        Raises:
            StoreUnavailable: if this or an earlier sync failed.
        """
        if least_pages == 0:
            with self._syncing:
                self._flush_changed()
        self._table.flush(least_pages)
        self._redo.flush(least_pages)

    def _flush_changed(self) -> None:
        with self._lock:
            changed, self._changed = self._changed, set()
        try:
            for file in changed:
                file.flushed = 0
                file.flush()
        except BaseException:
            with self._lock:
                self._changed |= changed
            raise

    def remove_until(self, name: str, last_base: int) -> None:
        """Delete the files of STATE_TABLE or REDO_LOG whose base is at most ``last_base``.

        The messages of the entries must already be deleted from the log.
        """
        if name == REDO_LOG:
            self._redo.remove_until(last_base)
            return
        with self._syncing, self._lock:
            self._changed = {file for file in self._changed if file.base > last_base}
            try:
                self._table.remove_until(last_base)
            finally:
                # A transaction whose entry is deleted cannot be ended.
                first = self._table.bases[0] // UNIT_SIZE if self._table.bases else 0
                still = self._book.open.items()
                self._book.open = {at: one for at, one in still if one.number >= first}

    def close(self) -> None:
        """Close all files."""
        self._table.close()
        self._redo.close()


def _file_sizes(config: StoreConfig) -> tuple[int, int]:
    table_size, redo_size = config.state_table_file_size, config.redo_log_file_size
    assert table_size is not None and redo_size is not None
    return table_size, redo_size


def _open(disk: Disk, root: Path, name: str, size: int, end: int) -> MappedFileQueue:
    folder = root / name
    disk.make_folders(folder)
    files = MappedFileQueue(disk, folder, size)
    files.load()
    if files.bases:
        files.truncate_to(end, aside=quarantine(root, *Path(name).parts))
    return files


def _fillers(unit: StateUnit, count: int) -> bytes:
    return state_table.encode(filler(unit)) * count


def _append(files: MappedFileQueue, units: bytes) -> None:
    data = memoryview(units)
    while data:
        file = _last_file(files, 0)
        count = min(len(data), file.room)
        file.append(data[:count])
        data = data[count:]


def _last_file(files: MappedFileQueue, start: int) -> MappedFile:
    file = files.last_file(create=True, start_offset=start)
    if file is None:
        raise StoreUnavailable(f"{files.folders[0]}: the next file was not created in time")
    return file


# --------------------------------------------------------------------------------------------------
# Opening a store of dialect 3.1 for writing


@dataclass(frozen=True, slots=True)
class UnitsPlan:
    """The plan for the state table or for the redo log.

    Attributes:
        folder: folder of the files, relative to the store's folder.
        reason: why a rebuild is necessary; None without a rebuild.
        had: whether the folder already has files.
        start: byte offset of the first entry.
        before: the encoded fillers before the first entry in the first file.
    """

    folder: str
    reason: str | None
    had: bool
    start: int
    units: bytes
    file_size: int
    before: bytes = b""


def keeps_transactions(layout: StoreLayout, config: StoreConfig) -> bool:
    """Whether a store has a state table and a redo log."""
    return config.is_3_1 or layout.has_state_table


class TransactionCheck:
    """Builds the state table and the redo log from the log, and compares them with the files."""

    def __init__(self) -> None:
        self.book = TransactionBook()
        self.units = bytearray()
        self.redo = bytearray()
        self.first = 0
        self._ended: set[int] = set()

    def take(self, frames: Iterable[TransactionFrame]) -> None:
        """Process the next transaction frames, in the log's order."""
        for frame in frames:
            self.redo += queue_entry.encode(frame.redo_unit())
            change = self.book.take(frame)
            if change is None:
                continue
            if change.unit is None:
                at = (change.number - self.first) * UNIT_SIZE + STATE_AT
                self.units[at : at + 4] = change.state.to_bytes(4)
                self._ended.add(frame.prepared_offset)
                continue
            if not self.units:
                self.first = change.number
            lacking = change.number - self.first - len(self.units) // UNIT_SIZE
            self.units += state_table.encode(filler(change.unit)) * lacking
            self.units += state_table.encode(change.unit)

    def table_faults(self, layout: StoreLayout) -> Iterator[tuple[str, bool]]:
        """Yield each difference between table and log, and whether RocketMQ itself causes it.

        RocketMQ omits ended transactions from a new table, so the absence of ended transactions is
        not reported.
        """
        table = read_table(layout)
        if table.fault is not None:
            yield table.fault, False
            return
        start = layout.commit_log.start
        there = open_in(table)
        for offset in sorted(self.book.open.keys() | there.keys()):
            ours, theirs = self.book.open.get(offset), there.get(offset)
            if offset < start and ours is None:
                continue
            if theirs is None:
                assert ours is not None
                # RocketMQ makes no entry for a message without a producer group.
                reason = f"the transaction at {offset} is open, but not in the table"
                yield reason, not ours.group_hash
            elif ours is None:
                # RocketMQ ignores a COMMIT or ROLLBACK if its number is not the entry's number.
                reason = f"the transaction at {offset} is open in the table, but not in the log"
                yield reason, offset in self._ended
            elif ours[1:] != theirs[1:]:
                reason = f"its entry {theirs.number} differs from the message at {offset}"
                yield reason, False
        yield from self._ended_faults(table, start)
        if (self.book.next_number or 0) > table.end:
            # RocketMQ numbers the entries of a new table from 0.
            yield f"its entries end at {table.end}, but the log has higher numbers", True

    def _ended_faults(self, table: UnitFiles, log_start: int) -> Iterator[tuple[str, bool]]:
        units = table.units
        real = units["size"] != FILLER_SIZE
        ended = np.flatnonzero(
            real
            & (units["state"] != TRANSACTION_PREPARED)
            & (units["physical_offset"] >= log_start)
        )
        wanted = np.frombuffer(bytes(self.units), TABLE_DTYPE)
        wanted = wanted[wanted["size"] != FILLER_SIZE]
        places = wanted["physical_offset"].astype(np.int64)
        # The offsets are sorted, because the entries follow the log.
        at = np.searchsorted(places, units["physical_offset"][ended].astype(np.int64))
        known = at < len(places)
        known[known] = places[at[known]] == units["physical_offset"][ended][known]
        for number in ended[~known].tolist():
            yield f"its entry {table.first + number} belongs to no message of the log", False
        there, wanted = units[ended[known]], wanted[at[known]]
        same = np.ones(len(there), np.bool_)
        for name in ("size", "store_seconds", "group_hash"):
            same &= there[name] == wanted[name]
        for number in ended[known][~same].tolist():
            yield f"its entry {table.first + number} differs from its message", False
        # If a producer sent a wrong number, RocketMQ may have recorded the outcome of another
        # transaction in this entry.
        other = same & (there["state"] != wanted["state"])
        other &= wanted["state"] != TRANSACTION_PREPARED
        for number in ended[known][other].tolist():
            yield f"its entry {table.first + number} has another outcome than the log", True

    def redo_fault(self, layout: StoreLayout) -> str | None:
        """Return the first difference between redo log and log, or None; skip messages before the
        log.
        """
        redo = read_redo(layout)
        if redo.fault is not None:
            return redo.fault
        start = layout.commit_log.start
        units = redo.units[redo.units["physical_offset"] >= start]
        wanted = np.frombuffer(bytes(self.redo), REDO_DTYPE)
        if len(units) == len(wanted) and (units == wanted).all():
            return None
        same = min(len(units), len(wanted))
        differs = np.flatnonzero(units[:same] != wanted[:same])
        if len(differs):
            at = int(wanted["physical_offset"][differs[0]])
            return f"the message at {at} is not at its position"
        if len(units) > len(wanted):
            at = int(units["physical_offset"][same])
            return f"it has a message at {at} that the log does not have"
        return f"it lacks the message at {int(wanted['physical_offset'][same])}"

    def plan(self, layout: StoreLayout, config: StoreConfig) -> tuple[UnitsPlan, UnitsPlan]:
        """Return the plans for table and redo log. Call this method after the whole log is read."""
        table_size, redo_size = _file_sizes(config)
        before = b""
        if self.units:
            unit = filler(state_table.decode_at(bytes(self.units[:UNIT_SIZE]), 0))
            before = state_table.encode(unit) * (self.first % (table_size // UNIT_SIZE))
        return (
            UnitsPlan(
                STATE_TABLE,
                next((reason for reason, _ in self.table_faults(layout)), None),
                bool(layout.state_table.files),
                self.first * UNIT_SIZE,
                bytes(self.units),
                table_size,
                before,
            ),
            UnitsPlan(
                REDO_LOG,
                self.redo_fault(layout),
                bool(layout.redo_log.files),
                0,
                bytes(self.redo),
                redo_size,
            ),
        )


def make_units(disk: Disk, root: Path, plan: UnitsPlan) -> None:
    """Write a new table or redo log durably. The caller has moved the old files to quarantine."""
    disk.make_folders(root / plan.folder)
    if plan.reason is None:
        return
    data = memoryview(plan.before + plan.units)
    base = plan.start - len(plan.before)
    while data:
        path = root / plan.folder / f"{base:020d}"
        with disk.writing(path, plan.file_size) as descriptor:
            disk.write_all(descriptor, data[: plan.file_size], 0)
        data, base = data[plan.file_size :], base + plan.file_size
