"""Which transactions are open, as the frames of the log tell it, one after the other.

A PREPARED message has the unit of its QUEUEOFFSET, as far as that can be: producers name it when
they end the transaction. A COMMIT or ROLLBACK ends the transaction whose PREPARED message it names
by its place in the log, if it is of the same producer group; the first one counts. (RocketMQ looks
only at the unit whose number the end brings along, and passes over all ends of transactions whose
units it has numbered anew.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from logquarry.dialect31.unit_files import (
    PREPARED_TAG,
    TransactionFrame,
    UnitFiles,
    Units,
    frame_of,
    frames_between,
    read_redo,
    read_table,
)
from logquarry.format import sys_flag
from logquarry.format.frame import FIXED_SIZE_V1, Frame
from logquarry.format.state_table import FILLER_SIZE, StateUnit
from logquarry.format.sys_flag import TRANSACTION_PREPARED
from logquarry.log.layout import REDO_LOG, STATE_TABLE, StoreLayout
from logquarry.log.walk import LogReader
from logquarry.read.commit_log import CommitLog

MOST_LOST: Final = 1 << 20
"""PREPARED messages that may be missing in front of one. No CRC covers a number, and each one that
is missing takes a unit."""


class OpenTransaction(NamedTuple):
    """A transaction that has not ended.

    Attributes:
        number: its unit's in the state table.
        physical_offset: where its PREPARED message stands in the log.
        size: bytes of that.
        store_seconds: when it was stored.
        group_hash: of its producer group.
    """

    number: int
    physical_offset: int
    size: int
    store_seconds: int
    group_hash: int


class Change(NamedTuple):
    """What a frame does to the table.

    Attributes:
        number: of the unit that it writes; those missing before it are to stand for nothing.
        unit: the unit, None where only the state changes.
        state: its state.
    """

    number: int
    unit: StateUnit | None
    state: int


class TransactionBook:
    """Keeps which transactions are open.

    Args:
        next_number: the number that comes next; None where any may.
        known_until: where the last message that it knows of ends in the log.

    Attributes:
        open: by the places of their PREPARED messages.
        next_number: as above.
    """

    def __init__(self, next_number: int | None = None, known_until: int = 0) -> None:
        self.open: dict[int, OpenTransaction] = {}
        self.next_number = next_number
        self._known_until = known_until

    def __iter__(self) -> Iterator[OpenTransaction]:
        return iter(sorted(self.open.values()))

    def take(self, frame: TransactionFrame) -> Change | None:
        """The next frame of the log; what it changes, None if nothing."""
        if not frame.is_prepared:
            return self._end(frame)
        number = self._number_of(frame)
        self.next_number = number + 1
        self._known_until = frame.physical_offset + frame.size
        unit = frame.unit()
        self.open[frame.physical_offset] = OpenTransaction(
            number, unit.physical_offset, unit.size, unit.store_seconds, unit.group_hash
        )
        return Change(number, unit, unit.state)

    def _number_of(self, frame: TransactionFrame) -> int:
        """The number of a PREPARED message: its own, if one may come there."""
        expected = self.next_number
        # Each number took a message, at its least.
        room = (frame.physical_offset - self._known_until) // FIXED_SIZE_V1
        if expected is None:
            return frame.number if 0 <= frame.number <= room else 0
        lost = frame.number - expected
        return frame.number if 0 <= lost <= min(room, MOST_LOST) else expected

    def _end(self, frame: TransactionFrame) -> Change | None:
        found = self.open.get(frame.prepared_offset)
        if found is None or found.group_hash != frame.group_hash:
            return None
        del self.open[frame.prepared_offset]
        return Change(found.number, None, frame.kind)


def filler(before: StateUnit) -> StateUnit:
    """A unit for a message that the log has lost, to stand in front of another one's.

    Nobody asks for it, and RocketMQ takes it for one that has ended.
    """
    return StateUnit(
        before.physical_offset,
        FILLER_SIZE,
        before.store_seconds,
        0,
        sys_flag.TRANSACTION_ROLLBACK,
    )


# --------------------------------------------------------------------------------------------------
# What state table and redo log hold when a store is opened that was closed in order.
#
# Whether they agree with the log is looked at where a difference may come from: in the last files
# of the log, and between the two. Any difference is for a recovery, which reads all of the log.


@dataclass(frozen=True, slots=True)
class TransactionsFound:
    """State table and redo log.

    Attributes:
        table_end: the number in the table that comes next.
        redo_end: units of the redo log, those of files that are gone included.
        open: the transactions that have not ended, by the places of their PREPARED messages.
        known_until: where the last message of the table ends in the log.
    """

    table_end: int = 0
    redo_end: int = 0
    open: Mapping[int, OpenTransaction] = field(default_factory=dict)
    known_until: int = 0


def open_in(table: UnitFiles) -> dict[int, OpenTransaction]:
    """The transactions that are open in a table, by the places of their PREPARED messages."""
    found = {}
    for at in np.flatnonzero(table.units["state"] == TRANSACTION_PREPARED).tolist():
        offset, size, seconds, group, _ = table.units[at].item()
        found[offset] = OpenTransaction(table.first + at, offset, size, seconds, group)
    return found


def found_in(table: UnitFiles, redo: UnitFiles) -> TransactionsFound:
    """What a sound table and redo log come to."""
    known = 0
    if len(table.units):
        real = table.units[table.units["size"] != FILLER_SIZE]
        if len(real):
            known = int(real["physical_offset"][-1]) + int(real["size"][-1])
    return TransactionsFound(table.end, redo.end, open_in(table), known)


def find_transactions(layout: StoreLayout, start: int, stop: int) -> TransactionsFound | str:
    """What state table and redo log hold; or, in words, why they have to be recovered.

    Args:
        layout: the store's files.
        start: physical offset from which on the log is compared with them,
        stop: and where it ends.
    """
    table, redo = read_table(layout), read_redo(layout)
    fault = table.fault or redo.fault
    log_start = layout.commit_log.start
    if fault is None and not layout.has_state_table and stop > log_start:
        fault = "it has no state table, and its log may have transactions"
    if fault is None:
        opened = open_in(table)
        fault = _differs_from_redo(layout, opened, redo.units, log_start)
        if fault is None and start < stop:
            frames = list(
                frames_between(LogReader(layout, bound=stop, check_crc=False), start, stop)
            )
            fault = _differs_from_log(opened, redo.units, frames, start)
            fault = fault or _foreign_unit(table, frames, start)
    return found_in(table, redo) if fault is None else fault


def _differs_from_redo(
    layout: StoreLayout, opened: Mapping[int, OpenTransaction], redo: Units, log_start: int
) -> str | None:
    """Where the table says something else than the redo log, None if it does not."""
    is_prepared = redo["tags_code"] == PREPARED_TAG
    begun = redo["physical_offset"][is_prepared].astype(np.int64)
    ended = redo["tags_code"][~is_prepared].astype(np.int64)
    still = np.setdiff1d(begun[begun >= log_start], ended)
    there = np.fromiter(opened, np.int64, len(opened))
    lacking = np.setdiff1d(still, there)
    if len(lacking):
        return f"{STATE_TABLE}: the transaction at {lacking[0]} is open, and not so in the table"
    there = there[there >= log_start]
    unknown = np.setdiff1d(there, begun)
    if len(unknown):
        return f"{REDO_LOG}: the transaction at {unknown[0]} is in the table, and not in it"
    # What names a transaction may be of another group, and so not its end.
    log = CommitLog(layout)
    for offset in np.intersect1d(there, ended).tolist():
        for place in redo["physical_offset"][~is_prepared][ended == offset].tolist():
            outcome = log.outcome_at(place, check_crc=False)
            if not isinstance(outcome, Frame):
                continue
            frame = frame_of(outcome)
            if frame is not None and frame.group_hash == opened[offset].group_hash:
                return f"{STATE_TABLE}: the transaction at {offset} has ended, and is open there"
    return None


def _foreign_unit(table: UnitFiles, frames: list[TransactionFrame], start: int) -> str | None:
    """Units of the table that are of no PREPARED message, or lacking; None where all are right."""
    units = table.units
    mine = {frame.unit()[:4] for frame in frames if frame.is_prepared}
    for at in np.flatnonzero(units["physical_offset"] >= start).tolist():
        unit = StateUnit(*units[at].item())
        if unit.size != FILLER_SIZE and unit[:4] not in mine:
            return f"{STATE_TABLE}: unit {table.first + at} is not what any message says"
    book = TransactionBook()
    for frame in frames:
        book.take(frame)
    if (book.next_number or 0) > table.end:
        return f"{STATE_TABLE}: it ends at unit {table.end}, and the log has later numbers"
    return None


def _differs_from_log(
    opened: Mapping[int, OpenTransaction],
    redo: Units,
    frames: list[TransactionFrame],
    start: int,
) -> str | None:
    """Where table and redo log say something else than a part of the log up to its end."""
    units = redo[redo["physical_offset"] >= start]
    wanted = [frame.redo_unit() for frame in frames]
    if [tuple(unit) for unit in units.tolist()] != [tuple(unit) for unit in wanted]:
        return f"{REDO_LOG}: it does not have what the log has from {start} on"
    book = TransactionBook(0)
    # What was open before the part, by the table: an end of it in the part is missing there.
    before = {offset: one for offset, one in opened.items() if offset < start}
    book.open.update(before)
    for frame in frames:
        book.take(frame)
    for offset in book.open.keys() | opened.keys():
        ours, theirs = book.open.get(offset), opened.get(offset)
        if ours is None or theirs is None or ours[1:] != theirs[1:]:
            return (
                f"{STATE_TABLE}: it does not say of the transaction at {offset} what the log says"
            )
    return None
