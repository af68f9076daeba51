"""Determines whether an interrupted salvage has completed its store, and finishes or undoes it.

A salvage makes the new store in the folder ``.salvage``. When the store is complete, the salvage
moves the files out of this folder: first the folder with the report, last the log.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Final

from logquarry.disk.folders import lock_folder
from logquarry.errors import StoreNotFound, UsageError
from logquarry.format import timer
from logquarry.log.location import absolute
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CHECKPOINT,
    COMMIT_LOG,
    COMPACTED,
    CONFIG,
    CONSUME_QUEUE,
    INDEX,
    SALVAGE,
    SIDECAR,
)
from logquarry.read.pops import KV_STORE
from logquarry.systems import read_file

REPORT: Final = "salvage.json"
_MADE: Final = (COMMIT_LOG, CONSUME_QUEUE, BATCH_QUEUE, INDEX, CONFIG, SIDECAR, CHECKPOINT)


def why_not_empty(into: Path) -> str | None:
    """Explain why a folder cannot take a new store, and what to do; None if it is empty or missing.

    Raises:
        StoreNotFound: if the folder cannot be read.
        StoreUnavailable: if a salvage into the folder is running.
    """
    work = into / SALVAGE
    try:
        names = sorted(path.name for path in into.iterdir()) if into.exists() else []
        waiting = {path.name for path in work.iterdir()} if SALVAGE in names else set()
    except OSError as error:
        raise StoreNotFound(f"{into}: cannot be read: {error.strerror}") from error
    if not names:
        return None
    store = _saved_store(into)
    made = sorted({SALVAGE, *_MADE, *_carried_names(into)}.intersection(names) - waiting)
    removed = ", ".join(str(into / name) for name in made)
    if SALVAGE in names:
        _unlock(lock_folder(into))
        if store is not None and not waiting:
            return (
                f"{into}: it holds the complete store that a salvage of {store} made; the salvage "
                f"was interrupted after its last step. Remove the empty folder {work}, and check "
                f"the store: `logquarry verify {into}`"
            )
        if store is None and _saved_store(work) is None:
            removed = str(work)
        return (
            f"{into}: a salvage into it was interrupted, and the new store is incomplete: remove "
            f"{removed} to start again"
        )
    if store is not None and COMMIT_LOG in names:
        return (
            f"{into}: it holds the complete store that an earlier salvage of {store} made. Check "
            f"that store: `logquarry verify {into}`. To salvage again, give another folder"
        )
    if store is not None:
        return (
            f"{into}: it holds only a part of the store that an interrupted salvage of {store} "
            f"made: remove {removed} to start again"
        )
    return f"{into}: it holds {names[0]}: the new store needs an empty folder"


def _saved_store(into: Path) -> str | None:
    """Return which store a salvage copied into a folder; None if the folder has no report of it."""
    try:
        return str(json.loads(read_file(into / SIDECAR / REPORT))["store"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def settle(location: str, into: Path) -> bool:
    """Finish or undo an interrupted salvage; return whether the new store is complete.

    Raises:
        StoreUnavailable: if the salvage is still running.
        UsageError: if a salvage of another store wrote the folder, or if it has other files.
    """
    try:
        held_by_us = lock_folder(into)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return _settle(location, into)
    finally:
        _unlock(held_by_us)


def _settle(location: str, into: Path) -> bool:
    report = into / SIDECAR / REPORT
    if not undo_or_finish(into) or not report.is_file():
        return False
    try:
        saved = str(json.loads(read_file(report))["store"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{report}: not the report of a salvage: {error!r}") from error
    if absolute(saved) != location:
        raise UsageError(f"{into}: {saved} was saved there, not {location}: give another folder")
    return True


def undo_or_finish(into: Path) -> bool:
    """Finish an interrupted salvage and return True, or remove the incomplete files."""
    work = into / SALVAGE
    if work.is_dir():
        if any(work.iterdir()) or not (into / SIDECAR / REPORT).is_file():
            _remove_unfinished(into)
            return False
        # The log is moved last. So the new store is complete, and a broker may already use it: keep
        # it.
        work.rmdir()
    return True


def _carried_names(folder: Path) -> list[str]:
    """Return the names in a folder that a salvage may have copied from the old store's
    main folder.
    """
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name in (KV_STORE, COMPACTED, timer.LOG) or path.name.startswith(timer.WHEEL)
    )


def _remove_unfinished(into: Path) -> None:
    work = into / SALVAGE
    report = Path(SIDECAR, REPORT)
    # Without a report, no folder was moved to the target yet: the report is written first.
    comes_out = (into / report).is_file() or (work / report).is_file()
    there = [name for name in (*_MADE, *_carried_names(into)) if os.path.lexists(into / name)]
    for name in there:
        if not comes_out or (work / name).exists():
            raise UsageError(
                f"{into / name}: the interrupted salvage did not make it: nothing was removed; "
                f"remove {work} to start again"
            )
    for name in there:
        if (into / name).is_dir():
            shutil.rmtree(into / name, ignore_errors=True)
        else:
            (into / name).unlink()
    # Remove .salvage last: only this folder shows that a salvage has made the other files.
    shutil.rmtree(work)


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
