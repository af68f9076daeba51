"""Compares the state table and the redo log of 3.x with the log, and plans their recovery.

A table or redo log that differs from the log is set aside and rebuilt. The new table has the
numbers of the PREPARED messages, so that their producers can end them, and all ended transactions,
so that no number is used twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import (
    REDO_DTYPE,
    TABLE_DTYPE,
    TransactionBook,
    TransactionFrame,
    UnitFiles,
    filler,
    open_in,
    read_redo,
    read_table,
)
from logquarry.disk.disk import Disk
from logquarry.format import queue_entry, state_table
from logquarry.format.state_table import FILLER_SIZE, STATE_AT, UNIT_SIZE
from logquarry.format.sys_flag import TRANSACTION_PREPARED
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import REDO_LOG, STATE_TABLE


@dataclass(frozen=True, slots=True)
class UnitsPlan:
    """The plan for the state table or for the redo log.

    Attributes:
        folder: folder of its files, below the store's folder.
        reason: why it is rebuilt, None if it stays.
        had: whether there are files.
        start: byte offset of its first entry.
        units: its entries as bytes.
        file_size: bytes of each file.
        before: fillers in front of the first entry in its file.
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
        """Take some more frames of transactions, in the log's order."""
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
        """Differences of the table from the log, each with whether RocketMQ itself causes it.

        Entries of ended transactions may be missing: RocketMQ omits them from a new table.
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
                # RocketMQ ignores a COMMIT or ROLLBACK whose number is not that of the entry.
                reason = f"the transaction at {offset} is open in the table, but not in the log"
                yield reason, offset in self._ended
            elif ours[1:] != theirs[1:]:
                reason = f"its entry {theirs.number} differs from the message at {offset}"
                yield reason, False
        yield from self._ended_faults(table, start)
        if (self.book.next_number or 0) > table.end:
            # In a new table RocketMQ numbers the entries from 0 again.
            yield f"its entries end at {table.end}, but the log has higher numbers", True

    def _ended_faults(self, table: UnitFiles, log_start: int) -> Iterator[tuple[str, bool]]:
        """Differences of the entries of ended transactions, like :meth:`table_faults`."""
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
        # The offsets are sorted: they follow the log.
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
        # If the numbers are wrong, RocketMQ may record the outcome of another transaction here.
        other = same & (there["state"] != wanted["state"])
        other &= wanted["state"] != TRANSACTION_PREPARED
        for number in ended[known][other].tolist():
            yield f"its entry {table.first + number} has another outcome than the log", True

    def redo_fault(self, layout: StoreLayout) -> str | None:
        """A difference of the redo log from the log, None without one.

        The redo log may have messages from before the log's start.
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
        """The plans for table and redo log, after the whole log is read."""
        table_size, redo_size = config.state_table_file_size, config.redo_log_file_size
        assert table_size is not None and redo_size is not None
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
    """Rebuild the table or the redo log, durably. The old files were set aside before.

    Raises:
        StoreUnavailable: if the disk fails, or is full.
    """
    disk.make_folders(root / plan.folder)
    if plan.reason is None:
        return
    data = memoryview(plan.before + plan.units)
    base = plan.start - len(plan.before)
    while data:
        path = root / plan.folder / f"{base:020d}"
        descriptor = disk.make_file(path, plan.file_size)
        try:
            disk.write_all(descriptor, data[: plan.file_size], 0)
            disk.sync(descriptor, path)
        except OSError as error:
            raise disk.refused(path, error) from error
        finally:
            disk.let_go(descriptor)
        data, base = data[plan.file_size :], base + plan.file_size
