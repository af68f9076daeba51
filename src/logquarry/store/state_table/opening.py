"""What dialect 3.1 has besides when a store is opened to be written."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.files.layout import StoreLayout
from logquarry.scan.walk import LogReader, Run
from logquarry.store.disk.disk import Disk
from logquarry.store.put.append31 import ScratchBuffer
from logquarry.store.state_table.found import TransactionsFound
from logquarry.store.state_table.keeper import StateTableKeeper

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
