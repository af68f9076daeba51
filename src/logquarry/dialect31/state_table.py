"""Writes the state table and redo log of 3.x, from the transactions that are dispatched."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import (
    Change,
    OpenTransaction,
    TransactionBook,
    TransactionFrame,
    TransactionsFound,
    filler,
    transaction_frames,
)
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import StoreUnavailable
from logquarry.format import queue_entry, state_table
from logquarry.format.state_table import STATE_AT, UNIT_SIZE, StateUnit
from logquarry.log.codec import Window
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import REDO_LOG, STATE_TABLE, quarantine
from logquarry.log.walk import LogReader, Run
from logquarry.write.append31 import ScratchBuffer

_FILLERS_AT_ONCE: Final = 1 << 14


class StateTableKeeper:
    """Writes the state table and the redo log of a store. Only the dispatcher writes.

    Args:
        disk: the store's disk.
        root: the store's folder.
        table_size: bytes of a state table file.
        redo_size: bytes of a redo log file.
        found: their content, up to the log's end.
        log_end: the log's end; frames before it are already in both.
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
        # Users read while the dispatcher's thread writes, and other threads flush.
        self._lock = threading.Lock()
        self._changed: set[MappedFile] = set()
        # Held while changed files are synced, so that retention does not delete them.
        self._syncing = threading.Lock()

    @property
    def next_number(self) -> int:
        """The number of the next entry of the table."""
        with self._lock:
            return self._book.next_number or 0

    def open_transactions(self) -> list[OpenTransaction]:
        """The open transactions of the dispatched log, by number."""
        with self._lock:
            return list(self._book)

    def find(self, physical_offset: int) -> OpenTransaction | None:
        """The open transaction whose PREPARED message is at an offset, None if there is none."""
        with self._lock:
            return self._book.open.get(physical_offset)

    # -------------------------------------------------------------------------------- dispatch
    def follow(self, window: Window, run: Followed) -> None:
        """Take further frames of the log. Known frames are skipped.

        Raises:
            StoreUnavailable: if a file cannot be created.
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
            # If there was no room, the caller passes the frame again; then the table may already
            # have it.
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
        file.keep(position, position + 4)
        self._changed.add(file)

    # ----------------------------------------------------------------------------------- files
    def flush(self, least_pages: int = 0) -> None:
        """Sync the appended entries. If ``least_pages`` is 0, also sync changed states.

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
        """Delete the leading files of the table or the redo log.

        Args:
            name: STATE_TABLE or REDO_LOG. The log has already deleted the messages of the entries
                in these files.
            last_base: base of the last file to delete.

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
                # Transactions whose entries are deleted cannot be ended any more.
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
        raise StoreUnavailable(f"{files.folders[0]}: the next file was not created in time")
    return file


# --------------------------------------------------------------------------------------------------
# Opening a store of dialect 3.1 for writing

_READ_FILES: Final = 3
"""RocketMQ reads this many last files of the log through the buffer when it opens a store."""


def open_state_table(
    disk: Disk, root: Path, config: StoreConfig, found: TransactionsFound, log_end: int
) -> StateTableKeeper:
    """Open state table and redo log for writing.

    Args:
        disk: the store's disk.
        root: the store's folder.
        config: its settings, with all sizes.
        found: their content.
        log_end: the log's end.

    Raises:
        StoreUnavailable: if a file cannot be opened.
    """
    table_size, redo_size = config.state_table_file_size, config.redo_log_file_size
    assert table_size is not None and redo_size is not None
    return StateTableKeeper(disk, root, table_size, redo_size, found, log_end)


def scratch_of(root: Path, config: StoreConfig, log_end: int) -> ScratchBuffer:
    """The buffer for encoding frames, with the content that RocketMQ's recovery leaves in it."""
    scratch = ScratchBuffer(config.max_message_size)
    layout = StoreLayout.open(root, config)
    files = [file for file in layout.commit_log.files if file.base < log_end]
    if files:
        start = files[-_READ_FILES:][0].base
        for event in LogReader(layout, bound=log_end, check_crc=False).events(start, log_end):
            if isinstance(event, Run):
                scratch.take_run(event)
    return scratch
