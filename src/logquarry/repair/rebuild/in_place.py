"""Moves the folders that a rebuild has built into place, and the old folders to quarantine."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk, free_path
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CONSUME_QUEUE,
    INDEX,
    REBUILD,
    SIDECAR,
    quarantine,
)
from logquarry.paths import exists, is_file, is_folder, is_link
from logquarry.read.rocksdb_queue import ROCKSDB_FOLDERS

_FIXED: Final = (errno.EXDEV, errno.EBUSY)
_MOUNTS: Final = Path("/proc/self/mountinfo")
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")
COMPLETE: Final = "complete"
"""If this file exists in the folder of a build, all files are built."""


class FixedFolder(StoreUnavailable):
    """The system does not rename a folder of a store, so the folder cannot be replaced.

    Attributes:
        replaced: names of the folders that were replaced before the error.
        aside: path of the quarantine folder for the old folders. It can be missing.
    """

    replaced: Sequence[str] = ()
    aside: Path


def require_movable(root: Path, names: Sequence[str]) -> None:
    """Raise UsageError if a rebuild cannot rename the folders ``names`` of a store."""
    other = "build new files in another folder, with --into"
    for path in (root / name for name in names):
        if is_link(path):
            raise UsageError(f"{path}: it is a link; {other}")
    own = (root / SIDECAR, root / REBUILD, quarantine(root))
    is_mount_point = _find_mount_points()
    for path in (*(root / name for name in names), *own):
        if is_mount_point(path):
            raise UsageError(
                f"{path}: it is a mount point, so a rebuild cannot rename folders there; {other}"
            )


def _find_mount_points() -> Callable[[Path], bool]:
    """Return a function that tells whether a path is a mount point."""
    # os.path.ismount does not detect a bind mount of the same file system, for example a volume of
    # a container. For a subvolume of btrfs, which can be renamed, it returns True.
    try:
        lines = _MOUNTS.read_bytes().split(b"\n")
    except OSError:
        return os.path.ismount
    points = {_ESCAPE.sub(_character, line.split(b" ")[4]) for line in lines if line}
    return lambda path: os.path.realpath(os.fsencode(path)) in points


def _character(escape: re.Match[bytes]) -> bytes:
    return bytes([int(escape[1], 8)])


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

    Raises:
        FixedFolder: if the system does not rename a folder. The build is removed, because a later
            opening must not move it into place.
    """
    stamp = datetime.fromtimestamp(now_ms / 1000, UTC)
    aside = free_path(quarantine(target, f"{command}-{stamp:%Y%m%dT%H%M%SZ}"))
    for number, name in enumerate(names):
        place, old = target / name, aside / name
        try:
            if exists(place):
                disk.make_folders(aside)
                _rename(disk, place, old)
            _rename(disk, build / name, place)
        except BaseException as error:
            # Undo the first rename, so that the store has its old folder again. This also happens
            # after Ctrl-C.
            if exists(old) and not exists(place):
                _rename(disk, old, place)
            if isinstance(error, FixedFolder):
                error.replaced, error.aside = names[:number], aside
                error.args = (f"{error}. {_result(names[:number], names[number:], aside)}",)
                (build / COMPLETE).unlink(missing_ok=True)
                shutil.rmtree(build, ignore_errors=True)
                remove_empty(build.parent, aside, aside.parent)
            raise
    return aside if exists(aside) else None, aside


def _result(replaced: Sequence[str], kept: Sequence[str], aside: Path) -> str:
    old = f" (the old files are in {aside})" if exists(aside) else ""
    done = f"Replaced: {', '.join(replaced)}{old}" if replaced else "No folder was replaced"
    return f"{done}. Not replaced: {', '.join(kept)}. Build new files in another folder"


def _rename(disk: Disk, folder: Path, to: Path) -> None:
    try:
        disk.rename(folder, to)
    except OSError as error:
        if error.errno not in _FIXED:
            raise disk.refused(to, error) from error
        raise FixedFolder(
            f"{folder}: it cannot be renamed ({error.strerror}), because it is a mount point, or "
            "in a lower layer of an overlay file system"
        ) from error
    disk.sync_names(to.parent)
    disk.sync_names(folder.parent)


def remove_empty(*folders: Path) -> None:
    """Remove the folders that are empty."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
