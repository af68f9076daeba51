"""Checks and repairs as calls on a path: the functions behind the commands of the same names.

``recover``, ``rebuild`` and ``retain`` take a path themselves
(:mod:`logquarry.repair.recover.recover`, :mod:`logquarry.repair.rebuild.rebuild`,
:mod:`logquarry.store.retention.retain`).

Converts a store whose log is outside of ``commitlog/`` into a plain store.

A broker of RocketMQ 4.9 or 5 serves the new store. The messages of a DLedger log get new physical
offsets, because the head of each entry is not copied; their queue offsets stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logquarry import arguments
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import UsageError
from logquarry.format import dledger
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_folder
from logquarry.read.store_sizes import require_log
from logquarry.repair.salvage.salvage import Salvaged, save
from logquarry.units import Bars, Progress

if TYPE_CHECKING:
    from logquarry.repair.diff.store_diff import StoreDiff
    from logquarry.repair.verify import VerifyReport


def verify(
    path: str | os.PathLike[str],
    *,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check all files of a store, and list what is wrong. Nothing is changed.

    A writer may have the store open. ``logquarry verify --json`` prints ``to_json()`` of the report
    (docs/json.md).

    Args:
        path: the store's folder, or a URL.
        config: settings of the store; missing sizes are inferred from the files.
        storage_options: options of the file system, for a URL.
        progress: called with the checked bytes of the log, and their total.

    Returns:
        The report: ``findings``, and ``has_damage``.

    Raises:
        StoreNotFound: if there is no store.
        UsageError: if an argument is invalid.
    """
    from logquarry.repair.verify import verify_store

    arguments.optional(arguments.function, progress, "progress")
    return verify_store(StoreLayout.open(path, config, storage_options), progress=progress)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> StoreDiff:
    """Compare two stores: their logs byte by byte where both have them, then their queues.

    Nothing is changed; writers may have the stores open. ``logquarry diff --json`` prints
    ``to_json()`` of the result (docs/json.md).

    Args:
        a: folder or URL of a store.
        b: folder or URL of the other store.
        config: settings of both stores; missing sizes are inferred from the files.
        storage_options: options of the file system, for URLs.
        progress: called with the compared bytes of the log, and their total.

    Returns:
        The differences: ``verdict``, and ``has_diverged``.

    Raises:
        StoreNotFound: if there is no store.
        UsageError: if an argument is invalid.
    """
    from logquarry.repair.diff.diff import compare_stores

    arguments.optional(arguments.function, progress, "progress")
    # Check both before a store is opened.
    arguments.path(a, "a"), arguments.path(b, "b")
    layouts = [StoreLayout.open(path, config, storage_options) for path in (a, b)]
    return compare_stores(*layouts, progress=progress)


def salvage(
    path: str | os.PathLike[str],
    into: str | os.PathLike[str] | None = None,
    *,
    include_stale: bool = False,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    bars: Bars | None = None,
) -> Salvaged:
    """Copy the sound messages of a damaged store into a new store.

    The damaged store is only read, but no process may have it open. ``logquarry salvage --json``
    prints ``to_json()`` of the result (docs/json.md).

    Args:
        path: folder or URL of the damaged store.
        into: the folder of the new store, empty or missing; None to write nothing, and report what
            can be saved and what is lost.
        include_stale: whether to save also sound frames after the log's end, after all others.
        config: settings of the store; missing sizes are inferred from the files.
        storage_options: options of the file system, for a URL.
        bars: makes a progress callback, as a context, from the name of a part of the work.

    Returns:
        The result: ``plan`` with the saved messages and the losses, and ``is_whole``.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: if the new store cannot hold the store's queues.
        StoreUnavailable: if a process has the store open, or the disk fails or is full.
        CorruptStore: if queue offsets are invalid, or the store is changed meanwhile.
        UsageError: if an argument is invalid, or the folder is not empty or lies within the store.
    """
    from logquarry.repair.salvage.salvage import salvage as salvage_layout

    target = None if into is None else local_folder(into)
    arguments.flag(include_stale, "include_stale")
    arguments.optional(arguments.function, bars, "bars")
    layout = StoreLayout.open(path, config, storage_options)
    return salvage_layout(layout, target, include_stale=include_stale, bars=bars)


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        salvaged: the new store, the losses, and the files that were not copied.
        uncommitted: number of messages of a DLedger log after the last one that the group had
            committed. They are in the new store: some member may have acknowledged them.
    """

    salvaged: Salvaged
    uncommitted: int

    def to_json(self) -> dict[str, Any]:
        """The document of ``convert --json``: that of ``save --json``, and ``uncommitted``."""
        return self.salvaged.to_json() | {"uncommitted": self.uncommitted}


def convert(
    layout: StoreLayout,
    into: Path | None = None,
    *,
    disk: Disk | None = None,
    bars: Bars | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Converted:
    """Make a plain store from a DLedger log, or from a log in several folders.

    Args:
        layout: the store's files; they are not changed.
        into: the folder of the new store, empty or missing; None to write nothing.
        disk: disk of the new store.
        bars: makes progress bars.
        pause: called at safe points; raise to cancel.

    Raises:
        UsageError: if the log is in ``commitlog/``, or for the reasons of
            :func:`logquarry.repair.salvage.salvage.salvage`.
        UnsupportedStore: if a folder of the log is not found, or there are several logs.
        StoreUnavailable: if a process has the store open, or the disk fails or is full.
    """
    if layout.log_folders.feature is None and layout.commit_log.files:
        raise UsageError(
            f"{layout.root}: its log is in commitlog/ already: a broker can use the store as it "
            f"is. To copy its sound messages: `logquarry save {layout.root} --into DIR`"
        )
    require_log(layout)
    uncommitted = _uncommitted(layout)
    return Converted(save(layout, into, disk=disk, bars=bars, pause=pause), uncommitted)


def _uncommitted(layout: StoreLayout) -> int:
    """The messages of a DLedger log that the group had not committed; 0 if that is unknown."""
    folders = layout.log_folders
    if not folders.has_heads:
        return 0
    member = folders.paths[0].partition("/")[0]
    try:
        text = layout.filesystem.read(f"{member}/checkpoint").decode("ascii", "replace")
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        committed = int(values["committedIndex"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0
    last = _last_index(layout)
    return 0 if last is None else max(0, last - committed)


def _last_index(layout: StoreLayout) -> int | None:
    """The index of the last entry; None if there is none."""
    last = None
    for file in layout.commit_log.files[-2:]:
        data, at = layout.open_file(file.path).window(0, file.size), 0
        while dledger.has_head_reference(data, at, base=file.base, left=file.size - at):
            head = dledger.HEAD.struct.unpack_from(data, at)
            last, at = int(head[2]), at + int(head[1])
    return last
