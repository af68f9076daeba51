"""Replaces the queues in RocksDB during a recovery, after the log is mended."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import CorruptFile
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CONSUME_QUEUE, REBUILD
from logquarry.read.rocksdb_queue import QueueDb, require_package, rocksdb_folders
from logquarry.repair.audit.differences import AuditedQueue, queue_name
from logquarry.repair.audit.log import KnownBounds, LogAudit
from logquarry.repair.rebuild.build import BuildJob, build_here
from logquarry.repair.rebuild.other_queues import RocksFiles
from logquarry.repair.rebuild.swap import COMPLETE, swap
from logquarry.units import Clock, Progress


def folder_to_recover(layout: StoreLayout) -> str | None:
    """The folder of a store's queues in RocksDB; None without one.

    Raises:
        UsageError: if there is one, and the package ``rocksdict`` is not installed.
    """
    require_package(layout)
    return next(iter(rocksdb_folders(layout)), None)


def why_replaced(
    layout: StoreLayout, folder: str, queues: Iterable[AuditedQueue], log_end: int
) -> str | None:
    """Why the queues in RocksDB need to be built again; None if they agree with the log.

    Args:
        layout: the store's files.
        folder: the folder of RocksDB.
        queues: the queues, compared with the log.
        log_end: physical offset of the log's end.
    """
    # Check this first: it explains why unreadable queues differ from the log.
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
    """Why a broker would not serve new queues in RocksDB; None if it would."""
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
    """Build the queues from the log, and put them in place of the old ones.

    Args:
        layout: the store's files; the log ends at ``log_end``, and has only damage that stays.
        config: settings of the store, with all sizes.
        folder: the folder of RocksDB; the old folder goes to quarantine.
        log_end: physical offset of the log's end.
        disk: disk of the store.
        clock: names the quarantine, in milliseconds.
        progress: gets the bytes of the log that are read, and their total.

    Raises:
        StoreUnavailable: if the disk fails, or is full.
        UnsupportedStore: if the log lacks messages of a queue between two others.
    """
    root = Path(layout.root)
    build = root / REBUILD
    if build.exists():
        shutil.rmtree(build)
    bounds = KnownBounds(durable=log_end, queued=None, is_closed=False, dispatched_timestamp=None)
    job = BuildJob(
        layout=layout,
        config=config,
        disk=disk,
        clock=clock,
        folder=build,
        names=(CONSUME_QUEUE,),
        log=LogAudit(layout, bounds, stop=log_end),
        likely_end=log_end,
        is_live=False,
        rocksdb=folder,
    )
    built = build_here(job, progress).queues
    assert isinstance(built, RocksFiles)
    built.take_over(layout)
    disk.replace(build / COMPLETE, b"complete\n")
    stamp = datetime.fromtimestamp(clock() / 1000, UTC)
    swap(build, root, (folder,), f"{stamp:recover-%Y%m%dT%H%M%SZ}", disk)
    shutil.rmtree(build)
