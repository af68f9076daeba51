"""What stands in a store's folders where its files belong, and is none, or one twice.

A recovery that finds it out half way through leaves a store half done, and what it makes zeros by
one name is gone by the other. So this is looked at first, and nothing is changed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from logquarry.errors import StoreUnavailable
from logquarry.files.layout import (
    ABORT,
    CHECKPOINT,
    COMMIT_LOG,
    CONSUME_QUEUE,
    DURABLE,
    INDEX,
    LOCK,
    NAME_DIGITS,
    REDO_LOG,
    SIDECAR,
    STATE_TABLE,
    TRANSACTION,
    quarantine,
)
from logquarry.store.recovery.saved_units import NAME as KEPT_UNITS

REPORT: Final = "recovery.json"
_FILES: Final = (ABORT, LOCK, CHECKPOINT, DURABLE)
_FOLDERS: Final = (COMMIT_LOG, CONSUME_QUEUE, INDEX, SIDECAR, TRANSACTION, STATE_TABLE, REDO_LOG)


def check_entries(root: Path) -> None:
    """See that what has the name of a file of a store is one, and each is there once.

    Raises:
        StoreUnavailable: if not.
    """
    aside = quarantine(root)
    for folder in (*(root / name for name in _FOLDERS), aside):
        _check(folder, is_folder=True)
    for path in (*(root / name for name in _FILES), aside / REPORT, aside / KEPT_UNITS):
        _check(path)
    places: dict[tuple[int, int], Path] = {}
    for path in _entries(root / COMMIT_LOG):
        _check_numbered(path, places)
    for name in (STATE_TABLE, REDO_LOG):
        for path in _entries(root / name):
            _check_numbered(path, places)
    for topic in _entries(root / CONSUME_QUEUE):
        _found(topic)
        for queue in _entries(topic):
            found = _found(queue)
            # A plain file is passed over, unless a message is to go there.
            if found is not None and stat.S_ISDIR(found.st_mode):
                _check_once(queue, found, places)
            for path in _entries(queue):
                _check_numbered(path, places)
    for path in _entries(root / INDEX):
        # A folder there is passed over, and in nobody's way.
        if path.name.isascii() and path.name.isdigit() and not _is_folder(path):
            _check_once(path, _check(path), places)


def _check_numbered(path: Path, places: dict[tuple[int, int], Path]) -> None:
    if len(path.name) == NAME_DIGITS and path.name.isascii() and path.name.isdigit():
        _check_once(path, _check(path), places)


def _check(path: Path, *, is_folder: bool = False) -> os.stat_result | None:
    """What is there, if anything is: a file, or a folder if that belongs there."""
    found = _found(path)
    if found is None:
        return None
    if is_folder:
        if not stat.S_ISDIR(found.st_mode):
            raise _refused(path, "is no folder")
    elif not stat.S_ISREG(found.st_mode):
        raise _refused(path, "is a folder" if stat.S_ISDIR(found.st_mode) else "is no plain file")
    return found


def _found(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError as error:
        if not path.is_symlink():
            return None
        raise _refused(path, "is a link, and nothing is where it leads") from error


def _refused(path: Path, what: str) -> StoreUnavailable:
    return StoreUnavailable(f"{path}: it {what}: take it out of the way. Nothing was changed")


def _check_once(
    path: Path, found: os.stat_result | None, places: dict[tuple[int, int], Path]
) -> None:
    if found is None:
        return
    other = places.setdefault((found.st_dev, found.st_ino), path)
    if other != path:
        raise StoreUnavailable(
            f"{path}: it is {other} by another name: take one of the two away, or make it a copy. "
            "Nothing was changed"
        )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _entries(folder: Path) -> Iterator[Path]:
    """What is in a folder, by name; nothing if it is none: who reads it next says what is wrong."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(folder))
    for name in names:
        yield folder / name
