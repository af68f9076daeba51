"""Writes the state table and the redo log of RocketMQ 3.x, as the log is dispatched.

If the table differs from the log, a recovery moves the table's files to quarantine and builds new
files. The recovery does the same for the redo log. In a new table, each entry keeps the number that
its PREPARED message contains, because producers use this number to end the transaction. The new
table also has entries for ended transactions, so that their numbers are not used again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
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
    differs_from_redo,
    filler,
    found_in,
    frames_between,
    open_in,
    read_redo,
    read_table,
    transaction_frames,
)
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.format import queue_entry
from logquarry.format.queue_entry import FILLER_SIZE, STATE_AT, STATE_SIZE, StateUnit
from logquarry.format.sys_flag import TRANSACTION_PREPARED
from logquarry.log.codec import Window
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import REDO_LOG, STATE_TABLE, quarantine
from logquarry.log.walk import LogReader

_FILLERS_AT_ONCE: Final = 1 << 14


class StateTableKeeper:
    """Writes the state table and the redo log of a store. Only the dispatcher adds entries.

    ``found`` has the contents that the table and the redo log have for the log before ``log_end``.
    So frames before ``log_end`` are skipped.
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
        self._table = _open(disk, root, STATE_TABLE, table_size, found.table_end * STATE_SIZE)
        end = found.redo_end * queue_entry.UNIT_SIZE
        self._redo = _open(disk, root, REDO_LOG, redo_size, end)
        next_number = found.table_end if self._table.bases else None
        self._book = TransactionBook(next_number, found.known_until)
        self._book.open.update(found.open)
        self._known_until = self._table_until = log_end
        # The dispatcher's thread writes the table, while users read it and other threads flush it.
        self._lock = threading.Lock()
        self._changed: set[MappedFile] = set()
        # A flush holds this lock while it syncs files with changed states, so that the retention
        # cannot delete them in the meantime.
        self._syncing = threading.Lock()

    @property
    def next_number(self) -> int:
        """The number that the table's next entry will get."""
        with self._lock:
            return self._book.next_number or 0

    def open_transactions(self) -> list[OpenTransaction]:
        """Return the open transactions of the dispatched part of the log, sorted by number."""
        with self._lock:
            return list(self._book)

    def find(self, physical_offset: int) -> OpenTransaction | None:
        """Return the open transaction whose PREPARED message is at a physical offset, or None."""
        with self._lock:
            return self._book.open.get(physical_offset)

    # -------------------------------------------------------------------------------- dispatch
    def follow(self, window: Window, run: Followed) -> None:
        """Process the next frames of the log. Frames that were processed before are skipped."""
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
            # After an error (for example a full disk), the caller passes the same frame again, and
            # the table may already have the frame's entry.
            if frame.physical_offset >= self._table_until:
                change = self._book.change_of(frame)
                if change is not None:
                    # Write the files before the change is applied to the book in memory: if the
                    # write fails, the frame then gets the same number at the next try.
                    self._write(change)
                    self._book.apply(frame, change)
                self._table_until = end
            self._redo.append(queue_entry.encode(frame.redo_unit()))
            self._known_until = end

    def _write(self, change: Change) -> None:
        if change.unit is None:
            self._set_state(change.number, change.state)
            return
        table = self._table
        if not table.bases:
            start = change.number * STATE_SIZE
            file = table.writable(start)
            table.append(_fillers(change.unit, (start - file.base) // STATE_SIZE))
        at = table.wrote_offset // STATE_SIZE
        while at < change.number:
            count = min(_FILLERS_AT_ONCE, change.number - at)
            table.append(_fillers(change.unit, count))
            at += count
        if at == change.number:
            table.append(queue_entry.encode_state(change.unit))

    def _set_state(self, number: int, state: int) -> None:
        at = number * STATE_SIZE + STATE_AT
        file = self._table.find(at)
        if file is None:
            return
        position = at - file.base
        file.buffer[position : position + 4] = state.to_bytes(4)
        file.keep(position, position + 4)
        self._changed.add(file)

    # ----------------------------------------------------------------------------------- files
    def flush(self, least_pages: int = 0) -> None:
        """Sync the entries that were appended.

        If ``least_pages`` is 0, also sync the entries whose state was changed.

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
        """Delete files of STATE_TABLE or REDO_LOG whose first byte is at or before ``last_base``.

        Call this method only if the log no longer has any message with an entry in these files.
        """
        if name == REDO_LOG:
            self._redo.remove_until(last_base)
            return
        with self._syncing, self._lock:
            self._changed = {file for file in self._changed if file.base > last_base}
            try:
                self._table.remove_until(last_base)
            finally:
                # A transaction without its entry cannot be ended, so remove it from the open
                # transactions.
                first = self._table.bases[0] // STATE_SIZE if self._table.bases else 0
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
    files = MappedFileQueue(disk, folder, size, aside=quarantine(root, *Path(name).parts))
    files.load()
    if files.bases:
        files.truncate_to(end)
    return files


def _fillers(unit: StateUnit, count: int) -> bytes:
    return queue_entry.encode_state(filler(unit)) * count


# --------------------------------------------------------------------------------------------------
# Opening a store of dialect 3.1 for writing


@dataclass(frozen=True, slots=True)
class UnitsPlan:
    """The plan of a recovery for the files of the state table or of the redo log.

    Attributes:
        folder: the folder of the files, relative to the store's folder.
        reason: why the files must be built again; None if they can stay.
        had: whether the folder has files now.
        start: offset in bytes at which the first entry belongs.
        before: the encoded fillers that precede the first entry in the first file.
    """

    folder: str
    reason: str | None
    had: bool
    start: int
    units: bytes
    file_size: int
    before: bytes = b""


def keeps_transactions(layout: StoreLayout, config: StoreConfig) -> bool:
    """Whether a store needs a state table and a redo log, or already has a state table."""
    return config.is_3_1 or layout.has_state_table


class TransactionCheck:
    """In memory, builds a state table and a redo log from the log. Compares both with the files of
    the store.

    ``before`` contains the transactions that are older than the part of the log to read.
    """

    def __init__(self, before: Mapping[int, OpenTransaction] | None = None) -> None:
        self.book = TransactionBook()
        self._before = dict(before or {})
        self.book.open.update(self._before)
        self.units = bytearray()
        self.redo = bytearray()
        self.first = 0
        self._ended: set[int] = set()

    def take(self, frames: Iterable[TransactionFrame]) -> None:
        """Process the next transaction frames, in the order of the log."""
        for frame in frames:
            self.redo += queue_entry.encode(frame.redo_unit())
            change = self.book.take(frame)
            if change is None:
                continue
            if change.unit is None and frame.prepared_offset in self._before:
                continue
            if change.unit is None:
                at = (change.number - self.first) * STATE_SIZE + STATE_AT
                self.units[at : at + 4] = change.state.to_bytes(4)
                self._ended.add(frame.prepared_offset)
                continue
            if not self.units:
                self.first = change.number
            lacking = change.number - self.first - len(self.units) // STATE_SIZE
            self.units += queue_entry.encode_state(filler(change.unit)) * lacking
            self.units += queue_entry.encode_state(change.unit)

    def table_faults(self, layout: StoreLayout) -> Iterator[tuple[str, bool]]:
        """Yield each difference between the table and the log, and whether RocketMQ itself causes
        it.

        RocketMQ leaves out ended transactions when it builds a new table, so a missing entry of an
        ended transaction is not reported as a difference.
        """
        table = read_table(layout)
        if table.fault is not None:
            yield table.fault, False
            return
        start = layout.commit_log.start
        yield from self.open_faults(table, start)
        yield from self.ended_faults(table, start)

    def open_faults(self, table: UnitFiles, start: int = 0) -> Iterator[tuple[str, bool]]:
        """Yield the differences between the transactions that are open in the table and in the log.
        A transaction that began before ``start`` is not reported if it is open only in the table.
        """
        there = open_in(table)
        for offset in sorted(self.book.open.keys() | there.keys()):
            ours, theirs = self.book.open.get(offset), there.get(offset)
            if offset < start and ours is None:
                continue
            if theirs is None:
                assert ours is not None
                # RocketMQ itself causes this difference if the message has no producer group: it
                # then makes no entry.
                reason = f"the transaction at {offset} is open in the log, but not in the table"
                yield reason, not ours.group_hash
            elif ours is None:
                # RocketMQ itself causes this difference if the COMMIT or ROLLBACK has another
                # number than the entry, because it then ignores the COMMIT or ROLLBACK.
                reason = f"the transaction at {offset} is open in the table, but not in the log"
                yield reason, offset in self._ended
            elif ours[1:] != theirs[1:]:
                reason = f"its entry {theirs.number} differs from the message at {offset}"
                yield reason, False
        if (self.book.next_number or 0) > table.end:
            # RocketMQ itself causes this difference, because the numbers start at 0 in a table that
            # it builds again.
            yield f"its entries end at {table.end}, but the log has higher numbers", True

    def ended_faults(self, table: UnitFiles, start: int) -> Iterator[tuple[str, bool]]:
        """Compare the entries of ended transactions with the log from ``start`` on, and yield the
        differences.
        """
        units = table.units
        real = units["size"] != FILLER_SIZE
        ended = np.flatnonzero(
            real & (units["state"] != TRANSACTION_PREPARED) & (units["physical_offset"] >= start)
        )
        wanted = np.frombuffer(bytes(self.units), TABLE_DTYPE)
        wanted = wanted[wanted["size"] != FILLER_SIZE]
        places = wanted["physical_offset"].astype(np.int64)
        # The entries have the order of the log, so their offsets are sorted.
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
        # A producer may have sent a wrong number. RocketMQ has then recorded the outcome of another
        # transaction in this entry.
        other = same & (there["state"] != wanted["state"])
        other &= wanted["state"] != TRANSACTION_PREPARED
        for number in ended[known][other].tolist():
            yield f"its entry {table.first + number} has another outcome than the log", True

    def redo_fault(self, layout: StoreLayout) -> str | None:
        """Return the first difference between the redo log and the log, or None.

        Entries of messages before the log's start are skipped.
        """
        redo = read_redo(layout)
        return redo.fault or self.redo_difference(redo, layout.commit_log.start)

    def redo_difference(self, redo: UnitFiles, start: int) -> str | None:
        """Return the first difference between the redo log and the log from ``start`` on, or
        None.
        """
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
        """Return the plan for the state table and the plan for the redo log.

        Call this method only after the whole log was read.
        """
        table_size, redo_size = _file_sizes(config)
        before = b""
        if self.units:
            unit = filler(queue_entry.decode_state_at(bytes(self.units[:STATE_SIZE]), 0))
            before = queue_entry.encode_state(unit) * (self.first % (table_size // STATE_SIZE))
        return (
            UnitsPlan(
                STATE_TABLE,
                next((reason for reason, _ in self.table_faults(layout)), None),
                bool(layout.state_table.files),
                self.first * STATE_SIZE,
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


def find_transactions(layout: StoreLayout, start: int, stop: int) -> TransactionsFound | str:
    """Read the state table and the redo log of a store that was shut down cleanly.

    The function compares the table with the redo log, and both with the frames of the log from
    ``start`` to ``stop``. If there is no difference, it returns their contents. If there is a
    difference, it returns the reason why a recovery must read the whole log.
    """
    table, redo = read_table(layout), read_redo(layout)
    if (fault := table.fault or redo.fault) is not None:
        return fault
    log_start = layout.commit_log.start
    if not layout.has_state_table and stop > log_start:
        return "there is no state table, but the log may have transactions"
    opened = open_in(table)
    if (fault := differs_from_redo(layout, opened, redo.units, log_start)) is not None:
        return fault
    if start < stop:
        check = TransactionCheck({at: one for at, one in opened.items() if at < start})
        check.take(frames_between(LogReader(layout, bound=stop, check_crc=False), start, stop))
        if (fault := check.redo_difference(redo, start)) is not None:
            return f"{REDO_LOG}: {fault}"
        faults = [reason for reason, _ in check.open_faults(table)]
        # A recovery is not needed if an entry has another outcome than the log: RocketMQ writes
        # such an entry if a producer sends a wrong number.
        faults += [reason for reason, is_stale in check.ended_faults(table, start) if not is_stale]
        if faults:
            return f"{STATE_TABLE}: {faults[0]}"
    return found_in(table, redo)


def make_units(disk: Disk, root: Path, plan: UnitsPlan) -> None:
    """Write and sync the files of a new state table or redo log.

    The caller must already have moved the old files to quarantine.
    """
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
