"""Opens the files of a store's log for writing, in one folder or several."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.log.log_place import LogFolders

_FULL: Final = 0.85
"""Share of a disk above which its folder gets no new file (``getDiskSpaceCleanForciblyRatio``)."""


def log_paths(root: Path, folders: LogFolders) -> tuple[Path, ...]:
    """The folders of a store's log."""
    return tuple(Path(root, name) for name in folders.paths)


def open_log(
    disk: Disk, root: Path, folders: LogFolders, size: int, **options: Any
) -> MappedFileQueue:
    """The files of a store's log; see :class:`MappedFileQueue` for the options.

    Args:
        disk: the store's disk.
        root: the store's folder.
        folders: the folders of the log.
        size: bytes of each file.
    """
    every = log_paths(root, folders)
    return MappedFileQueue(
        disk,
        every,
        size,
        read_only=[Path(root, name) for name in folders.read_only],
        full_folders=lambda: full_folders(every),
        guard_names=True,
        **options,
    )


def full_folders(folders: Sequence[Path]) -> list[Path]:
    """The folders whose disks are nearly full (``CleanCommitLogService.isSpaceToDelete``)."""
    found = []
    for folder in folders:
        try:
            use = shutil.disk_usage(folder)
        except OSError:
            continue
        if use.used > _FULL * use.total:
            found.append(folder)
    return found
