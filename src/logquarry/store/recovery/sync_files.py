"""Brings to the disk what a recovery only read, and so may be nowhere but in the page cache.

The process that wrote it may have died before its sync, or of a sync that failed. Of the latter the
system takes the pages for written, so that those of the log that are in doubt are written again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from logquarry.files.layout import COMMIT_LOG, CONSUME_QUEUE, INDEX, TRANSACTION
from logquarry.store.disk.disk import Disk

_PARTS: Final = (COMMIT_LOG, CONSUME_QUEUE, INDEX, TRANSACTION)
_COPY_BYTES: Final = 1 << 20


def sync_files(
    disk: Disk, root: Path, *, write_from: int, log_end: int, parts: tuple[str, ...] = _PARTS
) -> None:
    """Wait until the files of a store are on the disk, and their names.

    Args:
        disk: what it is on.
        root: its folder.
        write_from: physical offset from which on the bytes of the log are written again, up to
        log_end: where the log ends.
        parts: which folders of it.

    Raises:
        StoreUnavailable: if the disk fails.
    """
    for part in parts:
        start = write_from if part == COMMIT_LOG else None
        for folder, _, names in os.walk(root / part):
            for name in names:
                if name.isascii() and name.isdigit():
                    _sync_file(disk, Path(folder, name), start, log_end)
            disk.sync_names(Path(folder))
    disk.sync_names(root)
    disk.sync_parent(root)


def _sync_file(disk: Disk, path: Path, write_from: int | None, log_end: int) -> None:
    try:
        descriptor = disk.open(path)
    except OSError as error:
        raise disk.refused(path, error) from error
    try:
        if write_from is not None:
            base = int(path.name)
            _write_again(disk, descriptor, write_from - base, log_end - base)
        disk.sync(descriptor, path)
    except OSError as error:
        raise disk.refused(path, error) from error
    finally:
        disk.let_go(descriptor)


def _write_again(disk: Disk, descriptor: int, start: int, stop: int) -> None:
    """Write the bytes of a file that stand there from one position to another."""
    position, stop = max(0, start), min(disk.size(descriptor), stop)
    while position < stop:
        data = disk.read(descriptor, min(_COPY_BYTES, stop - position), position)
        if not data:
            break
        disk.write_all(descriptor, data, position)
        position += len(data)
