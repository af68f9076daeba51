"""Verifies and salvages stores on Spark.

The rebuild of queues and index is in the module `rebuilding`.

To verify, each task reads a part of a log, or an index file. For a part of a log, the task returns
the ranges in which all frames are valid and have the right entries in queues and index
(:mod:`logquarry.repair.audit.runs`). The driver then verifies each store, but does not read these
ranges again. The findings equal those of a verification without Spark. To salvage, each task
salvages one store.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.log.layout import StoreLayout
from logquarry.log.location import Stores, as_paths, broker_names, find_stores, local_folder
from logquarry.log.splits import tiles
from logquarry.log.store_files import INDEX
from logquarry.repair.audit.index import IndexAudit
from logquarry.repair.audit.runs import FrameFacts, SoundParts, SoundReader
from logquarry.repair.findings import VerifyReport
from logquarry.repair.salvage.salvage import Salvaged, salvage_store
from logquarry.repair.salvage.target import check_target, settle
from logquarry.repair.verification import verify_store
from logquarry.spark.jobs import run_tasks
from logquarry.spark.tasks import LARGEST_SPLIT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class _Place:
    """A store of a job: id of the job, number of the store in the job, path and settings."""

    job: str
    number: int
    location: str
    config: StoreConfig
    storage_options: Mapping[str, Any] | None

    def open(self) -> StoreLayout:
        return StoreLayout.open(self.location, self.config, self.storage_options)


def _places(
    stores: Stores, config: StoreConfig | None, storage_options: Mapping[str, Any] | None
) -> list[_Place]:
    job, settings = uuid.uuid4().hex, config or StoreConfig()
    return [
        _Place(job, number, location, settings, storage_options)
        for number, location in enumerate(find_stores(as_paths(stores), storage_options))
    ]


# ------------------------------------------------------------------------------------------ verify
_INDEX_WEIGHT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _VerifyTask:
    """A part of a store's log, from `start` to `stop`; or, if `index` is a path, an index file."""

    place: _Place
    start: int = 0
    stop: int = 0
    index: str | None = None

    @property
    def weight(self) -> int:
        return _INDEX_WEIGHT if self.index is not None else self.stop - self.start


def verify_stores(
    spark: SparkSession,
    stores: Stores,
    *,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    split_size: int = LARGEST_SPLIT,
    progress: Progress | None = None,
) -> list[VerifyReport]:
    """Verify stores without changing them; the findings equal those of :func:`verify_store`.

    If a process has a store open, only the driver verifies the store, because the store's files
    change during the verification.

    Args:
        spark: a session whose workers reach the stores under the same paths.
        split_size: maximum bytes of log in one task.
        progress: called with (bytes read, bytes in total).

    Returns:
        One report for each store, sorted by path.

    Raises:
        StoreNotFound: if a path is not a store, or a glob matches none.
    """
    places = _places(stores, config, storage_options)
    # Take the physical offset of each log file from its frames, because the file's name can be
    # wrong.
    layouts = [place.open().by_content() for place in places]
    tasks = [
        task
        for place, layout in zip(places, layouts, strict=True)
        if not layout.is_live()
        for task in _verify_tasks(place, layout, split_size)
    ]
    results = run_tasks(
        spark, "verify", tasks, _verify, weight=attrgetter("weight"), progress=progress
    )
    runs: list[list[FrameFacts]] = [[] for _ in places]
    chains: list[set[str]] = [set() for _ in places]
    for task, (sound, stands) in zip(tasks, results, strict=True):
        runs[task.place.number] += sound
        if stands and task.index is not None:
            chains[task.place.number].add(task.index)
    return [
        verify_store(layout, sound=SoundParts(tuple(runs[number]), frozenset(chains[number])))
        for number, layout in enumerate(layouts)
    ]


def _verify_tasks(place: _Place, layout: StoreLayout, split_size: int) -> list[_VerifyTask]:
    tasks = [_VerifyTask(place, start, stop) for start, stop in tiles(layout, split_size)]
    return tasks + [
        _VerifyTask(place, index=f"{INDEX}/{entry.name}")
        for entry in layout.index_files
        if entry.size
    ]


_last: tuple[tuple[str, int], SoundReader] | None = None
"""The reader of this worker's last task, kept because the next task often reads the same store."""


def _verify(task: _VerifyTask) -> tuple[list[FrameFacts], bool]:
    """Verify a part of a log, or an index file.

    For a part of a log, the result is (ranges in which all frames are valid and have the right
    entries, False). For an index file, the result is ([], whether the chains of keys are correct).
    """
    global _last  # noqa: PLW0603
    which = task.place.job, task.place.number
    if _last is None or _last[0] != which:
        _last = which, SoundReader(task.place.open().by_content())
    reader = _last[1]
    if task.index is not None:
        return [], IndexAudit(reader.layout).has_right_chains(task.index)
    return reader.read(task.start, task.stop), False


# ----------------------------------------------------------------------------------------- salvage


@dataclass(frozen=True, slots=True)
class _SalvageTask:
    place: _Place
    into: Path | None
    length: int


def salvage_stores(
    spark: SparkSession,
    stores: Stores,
    into: str | os.PathLike[str] | None = None,
    *,
    include_stale: bool = False,
    config: StoreConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[Salvaged]:
    """Salvage each store: write its sound messages to a new store; see :func:`salvage_store`.

    If Spark repeats a task, the new attempt first removes the files of the earlier attempt.

    Args:
        spark: a session whose workers reach the stores and `into` under the same paths.
        into: folder for the new stores; each new store gets a folder named after its broker. If
            None, the call only reports the messages that it would save.
        include_stale: whether to also save stale frames: valid frames after the log's end.
        resume: whether to continue an interrupted call with the same `into`: skip the stores that
            it completed, and salvage all others from the start.
        progress: called with (bytes of log done, bytes in total) after each store.

    Raises:
        UsageError: if a broker's folder is not empty. In this case, the call writes nothing. With
            ``resume``, the folder can contain files of an earlier salvage of the same store.
        StoreUnavailable: if a store cannot be read or written. An error in one store ends the
            salvage of all stores.
        CorruptStore: for the same reasons as in :func:`salvage`.
    """
    folder = None if into is None else local_folder(into)
    places = _places(stores, config, storage_options)
    tasks = []
    for place, broker in zip(places, broker_names([p.location for p in places]), strict=True):
        layout = place.open().by_content()
        target = None if folder is None else folder / broker
        if target is not None:
            if resume and settle(place.location, target):
                continue
            check_target(layout, target)
        length = layout.commit_log.end - layout.commit_log.start
        tasks.append(_SalvageTask(place, target, length))
    return run_tasks(
        spark,
        "salvage",
        tasks,
        partial(_salvage, include_stale),
        weight=attrgetter("length"),
        progress=progress,
    )


def _salvage(include_stale: bool, task: _SalvageTask) -> Salvaged:
    from pyspark import TaskContext

    into, layout = task.into, task.place.open()
    context = TaskContext.get()
    is_again = context is not None and context.attemptNumber() > 0
    if into is not None and is_again and settle(task.place.location, into):
        # An earlier attempt completed the new store, but Spark lost the report of that attempt.
        # Without a target folder, salvage_store writes nothing and only makes the report.
        found = salvage_store(layout, include_stale=include_stale)
        found.into = str(into)
        return found
    return salvage_store(layout, into, include_stale=include_stale)
