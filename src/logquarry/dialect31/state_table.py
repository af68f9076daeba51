"""State table and redo log, written: what the dispatcher tells of the log's transactions."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import (
    Change,
    OpenTransaction,
    TransactionBook,
    TransactionsFound,
    filler,
)
from logquarry.dialect31.unit_files import TransactionFrame, transaction_frames
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import StoreUnavailable
from logquarry.format import queue_entry, state_table
from logquarry.format.state_table import STATE_AT, UNIT_SIZE, StateUnit
from logquarry.log.codec import Window
from logquarry.log.follow import Followed
from logquarry.log.layout import REDO_LOG, STATE_TABLE, StoreLayout, quarantine
from logquarry.log.walk import LogReader, Run
from logquarry.write.append31 import ScratchBuffer

_FILLERS_AT_ONCE: Final = 1 << 14


class StateTableKeeper:
    """Keeps the state table and the redo log of a store. Written by the dispatcher alone.

    Args:
        disk: what they are on.
        root: the store.
        table_size: bytes of a file of the table,
        redo_size: and of the redo log.
        found: what they hold, up to the log's end.
        log_end: where the log ends: what stands before it they have.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        table_size: int,
        redo_size: int,
        found: TransactionsFound,
        log_end: int,
    ) -> None:
        self._table = _open(disk, root, STATE_TABLE, table_size, found.table_end * UNIT_SIZE)
        end = found.redo_end * queue_entry.UNIT_SIZE
        self._redo = _open(disk, root, REDO_LOG, redo_size, end)
        next_number = found.table_end if self._table.bases else None
        self._book = TransactionBook(next_number, found.known_until)
        self._book.open.update(found.open)
        self._known_until = self._table_until = log_end
        # Users ask beside the dispatcher's thread, and others flush.
        self._lock = threading.Lock()
        self._changed: set[MappedFile] = set()
        # Held while files whose states were changed are synced, so that none of them goes away.
        self._syncing = threading.Lock()

    @property
    def next_number(self) -> int:
        """The number in the table that comes next."""
        with self._lock:
            return self._book.next_number or 0

    def open_transactions(self) -> list[OpenTransaction]:
        """What is open, by number; of what was dispatched."""
        with self._lock:
            return list(self._book)

    def find(self, physical_offset: int) -> OpenTransaction | None:
        """The open transaction whose PREPARED message stands at a place, None without one."""
        with self._lock:
            return self._book.open.get(physical_offset)

    # -------------------------------------------------------------------------------- dispatch
    def follow(self, window: Window, run: Followed) -> None:
        """Some more frames of the log. What is known of them is passed over.

        Raises:
            StoreUnavailable: if a file cannot be made.
        """
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
            # A frame that finds no room comes again, and then perhaps only the redo log lacks it.
            if frame.physical_offset >= self._table_until:
                self._tell_table(frame)
                self._table_until = end
            _append(self._redo, queue_entry.encode(frame.redo_unit()))
            self._known_until = end

    def _tell_table(self, frame: TransactionFrame) -> None:
        before = self._book.next_number
        change = self._book.take(frame)
        if change is None:
            return
        try:
            self._write(change)
        except StoreUnavailable:
            if change.unit is not None:
                del self._book.open[frame.physical_offset]
                self._book.next_number = before
            raise

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
        self._changed.add(file)

    # ----------------------------------------------------------------------------------- files
    def flush(self, least_pages: int = 0) -> None:
        """Bring to the disk what was appended; with 0 also the states that were changed.

        Raises:
            StoreUnavailable: if a sync failed, now or before.
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
        """Delete the first files of one of the two, up to the one that begins at a place.

        Args:
            name: STATE_TABLE or REDO_LOG. No message of the units in these files is in the log.
            last_base: where the last file that goes begins.

        Raises:
            StoreUnavailable: if the disk fails.
        """
        if name == REDO_LOG:
            self._redo.remove_until(last_base)
            return
        with self._syncing, self._lock:
            self._changed = {file for file in self._changed if file.base > last_base}
            try:
                self._table.remove_until(last_base)
            finally:
                # Whoever ends one of the others finds no unit to say so in.
                first = self._table.bases[0] // UNIT_SIZE if self._table.bases else 0
                still = self._book.open.items()
                self._book.open = {at: one for at, one in still if one.number >= first}

    def close(self) -> None:
        """Close all files."""
        self._table.close()
        self._redo.close()


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
        raise StoreUnavailable(f"{files.folders[0]}: the next file was not made in time")
    return file


# --------------------------------------------------------------------------------------------------
# What dialect 3.1 has besides when a store is opened to be written.

_READ_FILES: Final = 3
"""The last files of the log, which RocketMQ reads through the buffer when it opens a store."""


def open_state_table(
    disk: Disk, root: Path, config: StoreConfig, found: TransactionsFound, log_end: int
) -> StateTableKeeper:
    """State table and redo log of a store, to be written.

    Args:
        disk: what they are on.
        root: the store.
        config: its settings, with all sizes.
        found: what they hold.
        log_end: where the log ends.

    Raises:
        StoreUnavailable: if a file cannot be opened.
    """
    table_size, redo_size = config.state_table_file_size, config.redo_log_file_size
    assert table_size is not None and redo_size is not None
    return StateTableKeeper(disk, root, table_size, redo_size, found, log_end)


def scratch_of(root: Path, config: StoreConfig, log_end: int) -> ScratchBuffer:
    """The buffer of frames, as RocketMQ's recovery leaves it."""
    scratch = ScratchBuffer(config.max_message_size)
    layout = StoreLayout.open(root, config)
    files = [file for file in layout.commit_log.files if file.base < log_end]
    if files:
        start = files[-_READ_FILES:][0].base
        for event in LogReader(layout, bound=log_end, check_crc=False).events(start, log_end):
            if isinstance(event, Run):
                scratch.take_run(event)
    return scratch
