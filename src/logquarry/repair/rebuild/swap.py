"""Moves rebuilt folders into place, and finishes these renames after an interruption.

A build is complete if its file ``complete`` exists (:mod:`logquarry.repair.rebuild.rebuild`).
:func:`replace_queues` builds queues in RocksDB for a recovery that has repaired the log.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.locks import alone_in
from logquarry.errors import CorruptFile, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_store
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CONSUME_QUEUE,
    INDEX,
    REBUILD,
    SALVAGE,
    quarantine,
)
from logquarry.read.rocksdb_queue import ROCKSDB_FOLDERS, QueueDb, require_package, rocksdb_folders
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.audit.differences import AuditedQueue, queue_name
from logquarry.repair.audit.log import KnownBounds, LogAudit
from logquarry.repair.rebuild.build import BuildJob, build_here, check_made_of, made_of
from logquarry.repair.rebuild.other_queues import RocksFiles
from logquarry.repair.recover.kept_files import free_path
from logquarry.units import Clock, Progress

COMPLETE: Final = "complete"


def check_into(root: Path, target: Path, names: Iterable[str]) -> Path:
    """Return the folder ``target``. Raises UsageError if ``names`` cannot be built there."""
    if target.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{target}: lies in the store; use --in-place to rebuild there")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: not a folder")
    if (target / SALVAGE).exists():
        raise UsageError(f"{target}: a salvage into it was interrupted")
    if (target / REBUILD / COMPLETE).is_file():
        # An interrupted rebuild may have moved only some folders into place.
        return target
    for name in names:
        if (target / name).exists():
            raise UsageError(f"{target / name}: already exists, and a rebuild overwrites nothing")
    return target


def finish_into(
    path: str | os.PathLike[str],
    target: Path,
    names: Sequence[str],
    *,
    note: Path,
    config: StoreConfig | None = None,
) -> bool:
    """Finish the renames of an interrupted rebuild; return whether ``target`` has all ``names``.

    Raises:
        StoreUnavailable: if another process uses the folder.
        UsageError: if the files belong to another store, or were built with other settings.
    """
    if not target.is_dir():
        return False
    root, disk = local_store(path), Disk()
    with alone_in(disk, target):
        bring_out_cut_off(target, disk)
        there = [name for name in names if (target / name).exists()]
        layout = StoreLayout.open(root, config or StoreConfig())
        settings = with_sizes(config or StoreConfig(), layout)
        check_made_of(target, note, made_of(str(root), there, settings))
    return len(there) == len(names)


def finish_cut_off(target: Path, names: Iterable[str], disk: Disk) -> None:
    """Finish the renames of an interrupted rebuild; raise UsageError if nothing is left to do."""
    is_begun = any((target / name).exists() for name in (CONSUME_QUEUE, BATCH_QUEUE, INDEX))
    if is_begun and bring_out_cut_off(target, disk):
        for name in names:
            if (target / name).exists():
                raise UsageError(
                    f"{target / name}: an interrupted rebuild was complete and is in place now; a "
                    "rebuild overwrites nothing"
                )


def bring_out_cut_off(target: Path, disk: Disk) -> bool:
    """Finish the renames of an interrupted rebuild; return whether there was a complete build."""
    build = target / REBUILD
    if not (build / COMPLETE).is_file():
        return False
    for name in dict.fromkeys((CONSUME_QUEUE, *ROCKSDB_FOLDERS, BATCH_QUEUE, INDEX)):
        if (build / name).is_dir() and not (target / name).exists():
            _rename(disk, build / name, target / name)
    shutil.rmtree(build)
    remove_empty(build.parent)
    return True


def swap(
    build: Path, target: Path, names: Sequence[str], command: str, now_ms: int, disk: Disk
) -> tuple[Path | None, Path]:
    """Move the old folders to quarantine, and the new folders into place.

    Returns:
        The quarantine folder (None if no folder was moved there), and the path of this folder.
    """
    stamp = datetime.fromtimestamp(now_ms / 1000, UTC)
    aside = free_path(quarantine(target, f"{command}-{stamp:%Y%m%dT%H%M%SZ}"))
    for name in names:
        place, old = target / name, aside / name
        try:
            if place.exists():
                disk.make_folders(aside)
                _rename(disk, place, old)
            _rename(disk, build / name, place)
        except BaseException:
            # Even after Ctrl-C, the store has each folder, old or new.
            if old.exists() and not place.exists():
                _rename(disk, old, place)
            raise
    return aside if aside.exists() else None, aside


def _rename(disk: Disk, folder: Path, to: Path) -> None:
    with disk.refusing(to):
        disk.rename(folder, to)
    disk.sync_names(to.parent)
    disk.sync_names(folder.parent)


def remove_empty(*folders: Path) -> None:
    """Remove empty folders."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def folder_to_recover(layout: StoreLayout) -> str | None:
    """Return the folder of queues in RocksDB, or None; raise UsageError if rocksdict is missing."""
    require_package(layout)
    return next(iter(rocksdb_folders(layout)), None)


def why_replaced(
    layout: StoreLayout, folder: str, queues: Iterable[AuditedQueue], log_end: int
) -> str | None:
    """Return why queues in RocksDB must be rebuilt; None if the queues agree with the log."""
    # Open RocksDB first: damage in RocksDB explains why its queues differ from the log.
    try:
        database = QueueDb(layout, folder)
    except CorruptFile as error:
        return error.reason
    for queue in queues:
        if queue.difference is not None:
            return f"{queue_name(queue.key)}: {queue.difference.reason}"
        if queue.kept_until < queue.had_until:
            return (
                f"{queue_name(queue.key)}: entries from {queue.kept_until} on belong to no message "
                "of the log"
            )
    if database.dispatched_end > log_end:
        return f"it has the messages up to {database.dispatched_end}, but the log ends at {log_end}"
    last = max((place for _, (_, place) in database.bounds.values()), default=-1)
    if last >= database.dispatched_end and database.bounds:
        return f"it notes {database.dispatched_end} as its end, and has the message at {last}"
    return None


def why_not_built(queues: Iterable[AuditedQueue]) -> str | None:
    """Return why a broker could not serve new queues in RocksDB; None if there is no reason."""
    for queue in queues:
        if queue.largest_gap or queue.moved:
            return (
                f"{queue_name(queue.key)}: the log has lost messages between others. A consumer "
                "that asks a broker with RocksDB for one of them begins again at offset 0. "
                "`logquarry salvage --into` makes a plain store"
            )
    return None


def replace_queues(
    layout: StoreLayout,
    config: StoreConfig,
    folder: str,
    log_end: int,
    disk: Disk,
    clock: Clock,
    progress: Progress | None,
) -> None:
    """Rebuild the queues in RocksDB from a repaired log; move the old folder to quarantine.

    Raises:
        UnsupportedStore: if the log has lost messages in the middle of a queue.
    """
    root = Path(layout.root)
    build = root / REBUILD
    if build.exists():
        shutil.rmtree(build)
    job = BuildJob(
        layout=layout,
        config=config,
        disk=disk,
        clock=clock,
        folder=build,
        names=(CONSUME_QUEUE,),
        log=LogAudit(layout, KnownBounds(durable=log_end), stop=log_end),
        likely_end=log_end,
        is_live=False,
        rocksdb=folder,
    )
    built = build_here(job, progress).queues
    assert isinstance(built, RocksFiles)
    built.take_over(layout)
    disk.replace(build / COMPLETE, b"complete\n")
    swap(build, root, (folder,), "recover", clock(), disk)
    shutil.rmtree(build)
