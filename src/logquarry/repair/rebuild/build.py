"""Builds consume queues and index from the log into a folder, and moves the folder into place.

A note file next to the folder records the store and the settings of the build, so that a later
rebuild does not continue with files of another store. If the file ``complete`` exists, all files
are built, and a later call finishes the renames. :func:`replace_queues` builds queues in RocksDB.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from logquarry.arguments import Clock, Progress
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.folders import alone_in
from logquarry.errors import CorruptFile, StoreNotFound, UsageError
from logquarry.log.batches import ahead
from logquarry.log.follow import Followed, Follower, follow_run
from logquarry.log.layout import StoreLayout
from logquarry.log.location import lies_in_store, local_store
from logquarry.log.readable import none_lost
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CONSUME_QUEUE,
    INDEX,
    REBUILD,
    SALVAGE,
)
from logquarry.log.walk import DamagedSpan
from logquarry.paths import exists, is_file, is_folder
from logquarry.read.log_queues import QueueKey
from logquarry.read.rocksdb_queue import QueueDb, require_package, rocksdb_folders
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.audit.differences import AuditedQueue, queue_name
from logquarry.repair.audit.log import KnownBounds, LogAudit
from logquarry.repair.audit.other_queues import wrong_end
from logquarry.repair.rebuild.in_place import COMPLETE, bring_out_cut_off, swap
from logquarry.repair.rebuild.other_queues import BatchFiles, RocksFiles
from logquarry.repair.rebuild.queue_files import IndexFiles, LeftOut, OldQueues, QueueFiles
from logquarry.systems import folders_below, read_file
from logquarry.text import document
from logquarry.write.queue_writer import QueuePart, is_batch, parts_with_copies

_WRITTEN_BY: Final = "logquarry"
Parts = Mapping[QueueKey, QueuePart]


def made_of(store: str, names: Iterable[str], config: StoreConfig) -> dict[str, Any]:
    """Return the contents of a rebuild's note; ``store`` is an absolute path."""
    shape = config.index_shape
    settings: dict[str, dict[str, Any]] = {
        CONSUME_QUEUE: {
            "file_size": config.queue_file_size,
            "message_delay_level": config.message_delay_level,
            "enable_multi_dispatch": config.enable_multi_dispatch,
            "enable_lmq": config.enable_lmq,
        },
        BATCH_QUEUE: {"file_size": config.batch_queue_file_size},
        INDEX: {
            "slots": None if shape is None else shape.slots,
            "entries": None if shape is None else shape.entries,
        },
    }
    return {
        name: {"store": store, "settings": {"dialect": config.dialect, **settings[name]}}
        for name in names
    }


def read_note(note: Path) -> dict[str, Any]:
    """Return a note, folder -> store and settings; {} if the file is missing, or empty after a
    power cut. Raises UsageError if the file is not a note.
    """
    try:
        found = json.loads(read_file(note) or b"{}")
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{note}: not the note of a rebuild: {error}") from error
    folders = found.get("folders", {}) if isinstance(found, dict) else None
    if not isinstance(folders, dict) or found.get("written_by", _WRITTEN_BY) != _WRITTEN_BY:
        raise UsageError(f"{note}: not the note of a rebuild")
    return folders


def write_note(note: Path, folders: dict[str, Any], disk: Disk) -> None:
    """Add folders to a note, and sync it. Raises UsageError if the file is not a note."""
    disk.make_folders(note.parent)
    text = json.dumps(
        {"written_by": _WRITTEN_BY, "folders": {**read_note(note), **folders}}, indent=1
    )
    disk.replace(note, text.encode(errors="backslashreplace") + b"\n")


def check_made_of(target: Path, note: Path, wanted: dict[str, Any]) -> None:
    """Raise UsageError if a folder was built from another store or with other settings."""
    known = read_note(note)
    # JSON turns tuples into lists, and the stored note comes from JSON. So convert ``wanted`` too.
    wanted = json.loads(json.dumps(wanted))
    for name, expected in wanted.items():
        place = target / name
        if not exists(place) or known.get(name) == expected:
            continue
        found = known.get(name)
        if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
            why = "the store that it belongs to is unknown"
        elif found.get("store") != expected["store"]:
            why = f"it belongs to the store {found.get('store')}, not to {expected['store']}"
        else:
            differs = [
                f"{key} {found['settings'].get(key)!r}, not {value!r}"
                for key, value in expected["settings"].items()
                if found["settings"].get(key) != value
            ]
            why = f"it was made with other settings: {'; '.join(differs)}"
        raise UsageError(f"{place}: {why}: give another folder, or remove it")


# ------------------------------------------------------------------------------------- the report


@dataclass(frozen=True, slots=True)
class FileCount:
    """Number of files in one folder of the store, and their total size in bytes."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class QueueReport:
    """The result for one queue. Offsets are queue offsets.

    Attributes:
        min_offset: offset of the first message in the log; ``max_offset`` if there is none.
        fillers: number of fillers, for messages that the log has lost.
        restarts: number of times that the topic was deleted and created again.
        harmed: number of frames with a harmed queue offset; their entries are at the right offset.
        is_taken_over: whether the log has no message of the queue. The rebuild then keeps the
            queue's old end, if it can be found; see ``is_end_sure``.
        is_end_sure: whether ``max_offset`` is certainly the queue's old end. It is False only if
            the old files were unusable and did not show the end; the old end may be higher.
    """

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    fillers: int
    restarts: int
    harmed: int = 0
    is_taken_over: bool = False
    is_end_sure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """The result of a rebuild, or a preview. A preview does not read the log, so ``log_end``,
    ``messages``, ``queues``, ``index`` and ``keys`` are None.

    Attributes:
        into: folder of the new files, None for the store itself.
        has_abort: whether the store was not shut down cleanly. ``has_abort`` is also False if a
            process has the store open.
        old: the old files of each folder that is rebuilt.
        quarantine: folder with the old files, None if no file was moved.
        messages: number of messages in the log, without damaged ones.
        left_out: messages for which no queue entry can be made.
    """

    store: str
    into: str | None
    is_applied: bool
    is_live: bool
    has_abort: bool
    old: dict[str, FileCount]
    log_start: int
    quarantine: str | None = None
    log_end: int | None = None
    messages: int | None = None
    queues: tuple[QueueReport, ...] | None = None
    index: FileCount | None = None
    keys: int | None = None
    damage: tuple[DamagedSpan, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document that docs/json.md describes."""
        return {
            "store": self.store,
            "into": self.into,
            "applied": self.is_applied,
            "live": self.is_live,
            "abort": self.has_abort,
            **document(self, ("old", "quarantine", "log_start", "log_end", "messages")),
            "queues": None if self.queues is None else [_queue(queue) for queue in self.queues],
            "index": None if self.index is None else asdict(self.index) | {"keys": self.keys},
            **document(self, ("damage", "left_out")),
        }


def _queue(queue: QueueReport) -> dict[str, Any]:
    found = asdict(queue)
    return {name.removeprefix("is_"): value for name, value in found.items()}


# -------------------------------------------------------------------------------------- the build


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """The input of a rebuild.

    Attributes:
        config: settings of the store, with all sizes.
        folder: parent folder of the new ``consumequeue/`` and ``index/``.
        log: the audit that reads the log. After the build, it has read the whole log.
        likely_end: physical offset near the log's end, for the progress.
        old: the old queues, except batch queues and queues with unusable files.
        batch: the builder of the batch queues; None to build no batch queues.
        rocksdb: the folder of RocksDB below ``folder``, if the store has its queues in RocksDB.
        place: moves the entries of frames with a harmed topic or queue id to their right queues.
        queued: gives queue entries also to frames with a harmed transaction type.
    """

    layout: StoreLayout
    config: StoreConfig
    disk: Disk
    clock: Callable[[], int]
    folder: Path
    names: tuple[str, ...]
    log: LogAudit
    likely_end: int
    is_live: bool
    old: OldQueues = field(default_factory=dict)
    batch: BatchFiles | None = None
    rocksdb: str | None = None
    place: Callable[[Parts], Parts] = lambda parts: parts
    queued: Callable[[Followed], Followed] = lambda followed: followed

    def queue_files(self) -> QueueFiles | None:
        """Return the builder of the queues; None to build only the index."""
        if CONSUME_QUEUE not in self.names:
            return None
        assert self.config.queue_file_size is not None
        kind = QueueFiles if self.rocksdb is None else RocksFiles
        folder = self.folder / (self.rocksdb or CONSUME_QUEUE)
        return kind(self.disk, folder, self.config.queue_file_size, self.old)


@dataclass(frozen=True, slots=True)
class Built:
    """The built files, all synced; ``queues`` is None if only the index was built."""

    queues: QueueFiles | None
    index_files: int = 0
    keys: int = 0


Builder = Callable[[BuildJob, "Progress | None"], Built]


def build_here(job: BuildJob, progress: Progress | None) -> Built:
    """Read the log once, and build queues and index from it. Raises UnreadableFile if the disk no
    longer returns bytes that it returned before.
    """
    with none_lost(str(job.folder)):
        return _build(job, progress)


def _build(job: BuildJob, progress: Progress | None) -> Built:
    log, shape = job.log, job.config.index_shape
    assert shape is not None
    queues, index = job.queue_files(), None
    if INDEX in job.names:
        is_3_1 = job.config.is_3_1
        index = IndexFiles(job.disk, job.folder / INDEX, shape, job.clock, counts_keys=is_3_1)
    follower = Follower(job.config.delay_levels_ms, keys=job.config.index_keys)
    try:
        for run in ahead(log.runs()):
            for window, found in follow_run(follower, run):
                if index is not None:
                    index.put(
                        *(found.requests.physical_offset, found.requests.store_timestamp),
                        *(found.key_hashes, found.key_numbers),
                    )
                if queues is not None:
                    queued = job.queued(found)
                    parts = dict(job.place(parts_with_copies(window, queued, job.config)))
                    for key in [key for key, part in parts.items() if is_batch(part.units)]:
                        units = parts.pop(key).units
                        if job.batch is not None:
                            job.batch.add(key, units)
                    if isinstance(queues, RocksFiles):
                        queues.add_run(found, parts)
                    else:
                        queues.add(parts)
            if progress is not None:
                progress(run.end - log.start, max(run.end, job.likely_end) - log.start)
        if queues is not None:
            queues.finish()
        if job.batch is not None:
            job.batch.finish()
        if index is not None:
            index.finish()
    finally:
        if index is not None:
            index.end()
    return Built(queues) if index is None else Built(queues, index.files, index.keys)


def sizes_below(folder: Path) -> list[int]:
    """Return the sizes of the files below a folder, or of the file with the folder's name."""
    if is_file(folder):
        # If a file has the name of the folder, the rebuild moves this file to quarantine too.
        return [folder.stat().st_size]
    sizes = []
    for below, names in folders_below(folder, _raise_unreadable):
        for name in names:
            path = below / name
            try:
                status = path.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ELOOP):
                    # The path is a broken link, or a running broker has just deleted the file.
                    continue
                _raise_unreadable(path, error)
            if stat.S_ISREG(status.st_mode):
                sizes.append(status.st_size)
    return sizes


def _raise_unreadable(path: Path, error: OSError) -> NoReturn:
    raise StoreNotFound(f"{path}: cannot be read: {error.strerror}") from error


def check_into(root: Path, target: Path, names: Iterable[str]) -> Path:
    """Return ``target``. Raises UsageError if ``target`` cannot receive the folders ``names``."""
    if lies_in_store(target, root):
        raise UsageError(f"{target}: lies in the store; use --in-place to rebuild there")
    if exists(target) and not is_folder(target):
        raise UsageError(f"{target}: not a folder")
    if exists(target / SALVAGE):
        raise UsageError(f"{target}: a salvage into it was interrupted")
    if is_file(target / REBUILD / COMPLETE):
        # An interrupted rebuild may have moved only some folders into place.
        return target
    for name in names:
        if exists(target / name):
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
    if not is_folder(target):
        return False
    root, disk = local_store(path), Disk()
    with alone_in(disk, target):
        bring_out_cut_off(target, disk)
        there = [name for name in names if exists(target / name)]
        layout = StoreLayout.open(root, config or StoreConfig())
        settings = with_sizes(config or StoreConfig(), layout)
        check_made_of(target, note, made_of(str(root), there, settings))
    return len(there) == len(names)


def finish_cut_off(target: Path, names: Iterable[str], disk: Disk) -> None:
    """If an interrupted rebuild has begun its renames, finish them. If ``target`` then has one of
    the folders ``names``, raise UsageError.
    """
    is_begun = any(exists(target / name) for name in (CONSUME_QUEUE, BATCH_QUEUE, INDEX))
    if is_begun and bring_out_cut_off(target, disk):
        for name in names:
            if exists(target / name):
                raise UsageError(
                    f"{target / name}: an interrupted rebuild was complete and is in place now; a "
                    "rebuild overwrites nothing"
                )


def folder_to_recover(layout: StoreLayout) -> str | None:
    """Return the folder of the queues in RocksDB; None if the store has no such folder. Raises
    UsageError if the package ``rocksdict`` is missing.
    """
    require_package(layout)
    return next(iter(rocksdb_folders(layout)), None)


def why_replaced(
    layout: StoreLayout, folder: str, queues: Iterable[AuditedQueue], log_end: int
) -> str | None:
    """Return why queues in RocksDB must be rebuilt; None if the queues agree with the log."""
    try:
        # Open RocksDB first: damage in it explains why its queues differ from the log.
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
        return f"its dispatched end is {database.dispatched_end}, but it has the message at {last}"
    ends = (wrong_end(database, key, layout.commit_log.start) for key in database.bounds)
    return next(filter(None, ends), None)


def replace_queues(
    layout: StoreLayout,
    config: StoreConfig,
    folder: str,
    log_end: int,
    disk: Disk,
    clock: Clock,
    progress: Progress | None,
    place: Callable[[Parts], Parts] = lambda parts: parts,
    queued: Callable[[Followed], Followed] = lambda followed: followed,
) -> None:
    """Rebuild the queues in RocksDB from a repaired log; move the old folder to quarantine.
    For ``place`` and ``queued``, see :class:`BuildJob`. Raises UnsupportedStore if the
    log has lost messages in the middle of a queue.
    """
    root = Path(layout.root)
    build = root / REBUILD
    if exists(build):
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
        place=place,
        queued=queued,
    )
    built = build_here(job, progress).queues
    assert isinstance(built, RocksFiles)
    built.take_over(layout)
    disk.replace(build / COMPLETE, b"complete\n")
    swap(build, root, (folder,), "recover", clock(), disk)
    shutil.rmtree(build)
