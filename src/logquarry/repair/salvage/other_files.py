"""Decides which files besides the log a salvage copies.

Files that refer to messages by queue offset are copied. The timer wheel refers to messages by
physical offset, so the salvage writes a new wheel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.format import timer
from logquarry.format.broker_json import FOLDER_V2, FOLDERS_V1
from logquarry.log.filesystem import below
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import UNREADABLE
from logquarry.log.rocksdb import tables_in_rocksdb
from logquarry.log.store_files import COMPACTED, CONFIG
from logquarry.read import features as names
from logquarry.read import timers
from logquarry.read.features import Feature, find_features
from logquarry.read.pops import KV_STORE
from logquarry.repair.audit.timer_files import timer_log_file_size, write_timer_files

_CHUNK: Final = 4 << 20
_ALIGNED: Final = 4096

_LOST: Final = {
    names.ROCKSDB_QUEUES: "the queues become files of {} bytes, which each broker accepts only if "
    "its mappedFileSizeConsumeQueue agrees (for another size pass --config): run the broker with "
    "storeType=default",
    names.ROCKSDB_CONFIG: "copied as it is, but a broker with storeType=default reads JSON files: "
    "install logquarry[rocksdb] to get them, or create the topics again",
    names.ROCKSDB_STORE: "index, timers and transactions in RocksDB are not carried over",
    names.QUEUE_EXT: "the extension units of the queues; the broker then filters by the messages",
    names.TIERED: "messages that are only in the tiered storage are not read",
    names.CONTROLLER: "the epochs of the controller: the new store begins as one without them",
    names.UNKNOWN: "not known to be a part of a store; copy them if you need them",
}
"""Feature -> the loss if the feature's files are left out."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A part of the old store that the new store lacks; ``feature`` is a name in
    docs/rocketmq-5.md.
    """

    feature: str
    paths: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class OtherFiles:
    """The files to copy and to leave out, besides log, queues, index and files in ``config/``."""

    carried: tuple[str, ...]
    left: tuple[LeftBehind, ...]


def other_files(layout: StoreLayout, queue_file_size: int | None) -> OtherFiles:
    """Decide which files besides the log are copied, and which files are left out."""
    found = find_features(layout)
    is_read = tables_in_rocksdb(layout.filesystem) is not None
    carried: list[str] = []
    left = [
        LeftBehind(
            feature.name,
            feature.evidence,
            f"{feature.detail}: {_LOST[feature.name].format(queue_file_size)}",
        )
        for feature in found.features
        if feature.name in _LOST and not (is_read and feature.name == names.ROCKSDB_CONFIG)
    ]
    if layout.filesystem.list(KV_STORE):
        carried.append(KV_STORE)
    compacted: Feature | None = found.get(names.COMPACTION)
    if compacted is not None and layout.filesystem.list(COMPACTED):
        carried.append(COMPACTED)
    # Salvage writes these tables as JSON files. If it also copied RocksDB, a broker would read the
    # tables in RocksDB instead.
    in_json = {FOLDER_V2, *FOLDERS_V1.values()} if is_read else set()
    for entry in layout.filesystem.list(CONFIG):
        if entry.is_dir and entry.name not in in_json:
            carried.append(f"{CONFIG}/{entry.name}")
    left += [
        LeftBehind(UNREADABLE, (path,), f"it {wrong}")
        for path, wrong in _wrong_entries(layout, carried)
    ]
    return OtherFiles(tuple(carried), tuple(left))


def _wrong_entries(layout: StoreLayout, carried: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield pipes, broken links and other names that cannot be copied, each with the reason."""
    files = layout.filesystem
    for name in sorted(
        {entry.name for entry in files.list(CONFIG)} | {*files.broken_links(CONFIG)}
    ):
        if wrong := files.why_no_file(f"{CONFIG}/{name}"):
            yield f"{CONFIG}/{name}", wrong
    for folder in carried:
        for one in below(files, folder):
            if one.wrong is not None:
                yield one.path, one.wrong


def unreadable_files(layout: StoreLayout, copied: Iterable[str]) -> Iterator[LeftBehind]:
    """Yield the files with unreadable bytes; salvage skips them, or copies their readable bytes."""
    known = tuple(copied)
    for path, ranges in sorted(layout.filesystem.unreadable.items()):
        is_copied = any(path == name or path.startswith(f"{name}/") for name in known)
        if not ranges or not (is_copied or path.startswith(f"{CONFIG}/")):
            continue
        what = "copied with the bytes FF in their place" if is_copied else "the file is left out"
        length = sum(one.length for one in ranges)
        reason = f"{length} bytes from {ranges[0].offset} on {ranges[0].reason}: {what}"
        yield LeftBehind(UNREADABLE, (path,), reason)


def carried_names(folder: Path) -> list[str]:
    """Return the names in a folder that a salvage may have copied from a store's root."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name in (KV_STORE, COMPACTED, timer.LOG) or path.name.startswith(timer.WHEEL)
    )


def carry(layout: StoreLayout, path: str, disk: Disk, root: Path) -> None:
    """Copy a folder with its contents into a new store."""
    disk.make_folders(root / path)
    for one in below(layout.filesystem, path):
        if one.wrong is not None:
            # other_files has listed this entry as left out.
            continue
        if one.is_dir:
            disk.make_folders(root / one.path)
            continue
        with contextlib.suppress(FileNotFoundError):
            _copy(layout, one.path, disk, root / one.path)


def _copy(layout: StoreLayout, path: str, disk: Disk, target: Path) -> None:
    view = layout.open_file(path)
    if not view.size:
        disk.make_folders(target.parent)
        with disk.refusing(target):
            disk.let_go(disk.open(target, create=True))
        disk.sync_names(target.parent)
        return
    with disk.writing(target, view.size) as descriptor:
        position = 0
        while (position := view.next_data(position)) < view.size:
            position -= position % _ALIGNED
            length = min(_CHUNK, view.size - position)
            data = view.window(position, length)[:length]
            if any(data):
                disk.write_all(descriptor, data, position)
            position += length


def make_timer_files(
    layout: StoreLayout, config: StoreConfig, disk: Disk, root: Path, now: int
) -> int:
    """Write the timer wheel, the timer log and ``timercheck`` of a new store.

    Args:
        layout: the damaged store.
        root: folder of the new store, with complete log and queues.
        now: the time in milliseconds.

    Returns:
        The number of timer messages that are not delivered yet.
    """
    new = StoreLayout.open(root, config)
    if (timer.TOPIC, timers.QUEUE_ID) not in new.queue_names:
        return 0
    check = timers.check_or_none(layout)
    found = timers.timers_of(new, check)
    write_timer_files(
        *(disk, root, found, now),
        file_size=timer_log_file_size(layout),
        precision_ms=timers.precision(layout, check.read_time),
    )
    return len(found.due())
