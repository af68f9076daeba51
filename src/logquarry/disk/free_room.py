"""Frees the disk blocks that a store's last files hold for later messages.

A writer allocates all blocks of a file before it writes the file's map, so that a full disk raises
an error instead of SIGBUS. After a load or an import a store gets no more messages soon. So loads
and imports call :func:`free_room` when they close the store: the files keep their sizes and bytes,
and their unwritten parts become holes, as in RocketMQ's own files. The next writer allocates the
blocks again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk

logger = logging.getLogger(__name__)

_LEAST: Final = 64 << 10
"""Bytes of the shortest range to free. Freeing a shorter range is not worth a system call."""


def free_room(disk: Disk, folders: Iterable[Path]) -> None:
    """Make holes of the unwritten parts of the last file in each folder.

    The caller holds the store's lock, and has synced and closed the files.
    """
    for folder in folders:
        path = folder
        try:
            names = [name for name in disk.list(folder) if name.isascii() and name.isdigit()]
            if names:
                path = folder / names[-1]
                _free(disk, path)
        except OSError as error:
            # If this fails, the file only keeps its blocks.
            logger.debug("%s: its room is not freed: %s", path, error)


def _free(disk: Disk, path: Path) -> None:
    descriptor = disk.open(path)
    try:
        size = disk.size(descriptor)
        if hasattr(os, "posix_fadvise"):
            # A page in the cache that was only read counts as data.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        at = 0
        while at < size:
            start, stop = disk.next_hole(descriptor, at, size)
            if stop - start >= _LEAST:
                disk.punch(descriptor, start, stop - start)
            at = max(stop, at + 1)
    finally:
        disk.close(descriptor)
