"""Moves the folders that a rebuild has built into place, and the old folders to quarantine."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk, free_path
from logquarry.errors import StoreUnavailable
from logquarry.log.store_files import BATCH_QUEUE, CONSUME_QUEUE, INDEX, REBUILD, quarantine
from logquarry.paths import exists, is_file, is_folder
from logquarry.read.rocksdb_queue import ROCKSDB_FOLDERS

_FIXED: Final = (errno.EXDEV, errno.EBUSY)
COMPLETE: Final = "complete"
"""If this file exists in the folder of a build, all files are built."""


def built_folders(target: Path) -> dict[str, str]:
    """Return the folders that an interrupted rebuild has built, but not moved into place. The
    result maps the final path of each folder to its present path; both paths are relative to
    ``target``.
    """
    build = target / REBUILD
    if not is_file(build / COMPLETE):
        return {}
    return {
        name: f"{REBUILD}/{name}"
        for name in dict.fromkeys((CONSUME_QUEUE, *ROCKSDB_FOLDERS, BATCH_QUEUE, INDEX))
        if is_folder(build / name) and not exists(target / name)
    }


@contextlib.contextmanager
def brought_out(target: Path, disk: Disk) -> Iterator[bool]:
    """Context manager: finish the renames of an interrupted rebuild. Yield whether there was a
    complete build. If the block raises an error or is interrupted, undo the renames.
    """
    build, moved = target / REBUILD, built_folders(target)
    is_complete = is_file(build / COMPLETE)
    for name, place in moved.items():
        _rename(disk, target / place, target / name)
    try:
        yield is_complete
    except BaseException:
        for name, place in moved.items():
            _rename(disk, target / name, target / place)
        raise
    if is_complete:
        shutil.rmtree(build)
        remove_empty(build.parent)


def bring_out_cut_off(target: Path, disk: Disk) -> bool:
    """Finish the renames of an interrupted rebuild; return whether there was a complete build."""
    with brought_out(target, disk) as is_complete:
        return is_complete


def swap(
    build: Path, target: Path, names: Sequence[str], command: str, now_ms: int, disk: Disk
) -> tuple[Path | None, Path]:
    """Move the old folders to quarantine, and the new folders into place. Return two values:
    the quarantine folder, or None if there were no old folders; and the quarantine folder's path in
    any case.
    """
    stamp = datetime.fromtimestamp(now_ms / 1000, UTC)
    aside = free_path(quarantine(target, f"{command}-{stamp:%Y%m%dT%H%M%SZ}"))
    for name in names:
        place, old = target / name, aside / name
        try:
            if exists(place):
                disk.make_folders(aside)
                _rename(disk, place, old)
            _rename(disk, build / name, place)
        except BaseException:
            # Undo the first rename, so that the store has its old folder again. This also happens
            # after Ctrl-C.
            if exists(old) and not exists(place):
                _rename(disk, old, place)
            raise
    return aside if exists(aside) else None, aside


def _rename(disk: Disk, folder: Path, to: Path) -> None:
    try:
        disk.rename(folder, to)
    except OSError as error:
        if error.errno not in _FIXED:
            raise disk.refused(to, error) from error
        raise StoreUnavailable(
            f"{folder}: it cannot be renamed ({error.strerror}), because it is a mounted folder, "
            "or in a lower layer of an overlay file system. Build new files in another folder, "
            "with `logquarry rebuild STORE --into DIR`"
        ) from error
    disk.sync_names(to.parent)
    disk.sync_names(folder.parent)


def remove_empty(*folders: Path) -> None:
    """Remove the folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
