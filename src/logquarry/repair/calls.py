"""The functions behind the commands of the same names: they check or repair the store at a path.

The functions for ``recover``, ``rebuild`` and ``retain`` are elsewhere
(:mod:`logquarry.repair.recover.recover`, :mod:`logquarry.repair.rebuild.rebuild`,
:mod:`logquarry.store.retention.retain`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from logquarry import arguments
from logquarry.config import StoreConfig
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_folder
from logquarry.units import Bars, Progress

if TYPE_CHECKING:
    from logquarry.repair.diff.store_diff import StoreDiff
    from logquarry.repair.salvage.salvage import Salvaged
    from logquarry.repair.verify import VerifyReport


def verify(
    path: str | os.PathLike[str],
    *,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check all files of a store, and list their faults. Nothing is changed.

    Another process may write to the store during the check. ``to_json()`` of the report is the
    document that ``logquarry verify --json`` prints (docs/json.md).

    Args:
        path: the store's folder, or a URL.
        config: settings of the store; missing sizes are inferred from the files.
        storage_options: options of the file system, for a URL.
        progress: called with two numbers of bytes: those checked so far, and all bytes to check.

    Returns:
        The report: ``findings`` lists the faults, ``has_damage`` is true if one of them is damage.

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
    """Compare two stores: the common part of their logs byte by byte, then their queues.

    Nothing is changed. Other processes may write to the stores during the comparison. ``to_json()``
    of the result is the document that ``logquarry diff --json`` prints (docs/json.md).

    Args:
        a: folder or URL of a store.
        b: folder or URL of the other store.
        config: settings of both stores; missing sizes are inferred from the files.
        storage_options: options of the file system, for URLs.
        progress: called with two numbers of bytes of the log: those compared so far, and all bytes
            to compare.

    Returns:
        The differences: ``verdict`` summarizes them, ``has_diverged`` is true if neither store can
        replace the other.

    Raises:
        StoreNotFound: if there is no store.
        UsageError: if an argument is invalid.
    """
    from logquarry.repair.diff.diff import compare_stores

    arguments.optional(arguments.function, progress, "progress")
    # Check both paths first, so that no store is opened if one of them is invalid.
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
    """Copy all messages of a damaged store that can be read without errors into a new store.

    The damaged store is not changed, but no other process may have it open. ``to_json()`` of the
    result is the document that ``logquarry salvage --json`` prints (docs/json.md).

    Args:
        path: folder or URL of the damaged store.
        into: the folder of the new store, empty or missing. If it is None, nothing is written, and
            the result shows the messages that can be saved and those that are lost.
        include_stale: whether to also save valid frames after the log's end, which an earlier
            truncation left there. They become the last messages of the new log.
        config: settings of the store; missing sizes are inferred from the files.
        storage_options: options of the file system, for a URL.
        bars: called with the name of each part of the work; returns a context manager that gives
            the function to call with this part's progress.

    Returns:
        The result: ``plan`` has the saved messages and the losses, ``is_whole`` is true if nothing
        is lost.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: if the new store cannot hold the store's queues.
        StoreUnavailable: if a process has the store open, or the disk fails or is full.
        CorruptStore: if queue offsets are invalid and cannot be corrected, if the store changes
            during the call, or if a part of the log can no longer be read that could be read
            before.
        UsageError: if an argument is invalid, or the folder is not empty or lies within the store.
    """
    from logquarry.repair.salvage.salvage import salvage as salvage_layout

    arguments.optional(arguments.path, into, "into")
    target = None if into is None else local_folder(into)
    arguments.flag(include_stale, "include_stale")
    arguments.optional(arguments.function, bars, "bars")
    layout = StoreLayout.open(path, config, storage_options)
    return salvage_layout(layout, target, include_stale=include_stale, bars=bars)
