"""Salvage of many stores at once: a task saves all of one, as one process would."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logquarry.config import StoreConfig
from logquarry.log.filesystem import local_folder
from logquarry.log.layout import StoreLayout
from logquarry.log.store_names import Stores, as_paths, broker_names, find_stores
from logquarry.repair.salvage.salvage import Salvaged, check_target, salvage, settle
from logquarry.spark.jobs import run_tasks
from logquarry.units import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class _Task:
    """One store, and where it goes."""

    location: str
    into: str | None
    include_stale: bool
    config: StoreConfig
    storage_options: Mapping[str, Any] | None
    length: int

    def open(self) -> StoreLayout:
        return StoreLayout.open(self.location, self.config, self.storage_options)


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
    """Save every sound message of each store into a new one; see :func:`salvage`.

    A task that Spark tries a second time removes what the first try has left, and begins anew.

    Args:
        spark: a session; its workers have to reach the stores, and the new ones, by the same names.
        stores: a path, URL or glob, or several.
        into: a folder, in which each gets the folder of its broker's name; None to write nothing.
        include_stale: whether sound frames behind the log's end are saved too.
        config: what the files of the stores do not tell.
        storage_options: what the file system of a URL takes.
        resume: leave out stores that are saved already, from a call before that did not come to its
            end; those that it had begun are begun anew.
        progress: told of the bytes of log that are done, store by store.

    Raises:
        UsageError: if the folder of a broker is not empty, or with ``resume`` holds something that
            its salvage did not make; nothing is written then.
        StoreUnavailable, CorruptStore: as :func:`salvage`, of the first store that fails.
    """
    folder = None if into is None else local_folder(into)
    locations = find_stores(as_paths(stores), storage_options)
    tasks = []
    for location, broker in zip(locations, broker_names(locations), strict=True):
        layout = StoreLayout.open(location, config or StoreConfig(), storage_options)
        target = None if folder is None else folder / broker
        if target is not None:
            if resume and settle(location, target):
                continue
            check_target(layout, target)
        length = layout.commit_log.end - layout.commit_log.start
        tasks.append(
            _Task(
                location,
                None if target is None else str(target),
                include_stale,
                config or StoreConfig(),
                storage_options,
                length,
            )
        )
    return run_tasks(
        spark, "salvage", tasks, _save, weight=lambda task: task.length, progress=progress
    )


# -------------------------------------------------------------------------------- in the worker
def _save(_: int, task: _Task) -> Salvaged:
    from pyspark import TaskContext

    into = None if task.into is None else Path(task.into)
    context = TaskContext.get()
    is_again = context is not None and context.attemptNumber() > 0
    if into is not None and is_again and settle(task.location, into):
        # The first try came to its end, and what it had to say got lost.
        found = salvage(task.open(), include_stale=task.include_stale)
        found.into = task.into
        return found
    return salvage(task.open(), into, include_stale=task.include_stale)
