"""The check of stores on Spark: tasks say what is sound, the driver looks at the rest.

A task gets a part of a log, or an index file, and sends back a few numbers for each run of frames
that is sound (:mod:`logquarry.repair.verify.sound_parts`). The driver then checks each store as it
would alone, and takes over the sound runs, so that its findings do not depend on the tasks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from logquarry.config import StoreConfig
from logquarry.log.layout import INDEX, StoreLayout
from logquarry.log.splits import tiles
from logquarry.log.store_names import Stores, as_paths, find_stores
from logquarry.repair.audit.index import IndexAudit
from logquarry.repair.verify.findings import VerifyReport
from logquarry.repair.verify.sound_parts import SoundParts, SoundReader, SoundRun
from logquarry.repair.verify.verify import verify_store
from logquarry.spark.jobs import run_tasks
from logquarry.spark.tasks import LARGEST_SPLIT
from logquarry.units import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INDEX_WEIGHT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Place:
    """A store, as a task finds it. Picklable.

    Attributes:
        job: of the check that looks at it,
        number: and among its stores.
    """

    job: str
    number: int
    location: str
    config: StoreConfig
    storage_options: Mapping[str, Any] | None

    def open(self) -> StoreLayout:
        return StoreLayout.open(self.location, self.config, self.storage_options)


@dataclass(frozen=True, slots=True)
class _Task:
    """A part of the log of a store, or one of its index files.

    Attributes:
        place: the store.
        start: where the part begins,
        stop: and ends.
        index: the path of the index file, None for a part of the log.
    """

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
    """Check stores, changing nothing; the findings are those of :func:`verify_store`.

    A store that a process has open is checked by the driver alone: its files come and go.

    Args:
        spark: a session; its workers have to reach the stores by the same names.
        stores: a path, URL or glob, or several.
        config: what the files of the stores do not tell.
        storage_options: what the file system of a URL takes.
        split_size: most bytes of log of one task.
        progress: told how many bytes were looked at, and how many there are.

    Returns:
        A report for each store, in the order of their names.

    Raises:
        StoreNotFound: if one of them is no store, or a glob matches none.
    """
    locations = find_stores(as_paths(stores), storage_options)
    job, settings = uuid.uuid4().hex, config or StoreConfig()
    places = [
        _Place(job, number, location, settings, storage_options)
        for number, location in enumerate(locations)
    ]
    layouts = [place.open() for place in places]
    tasks = [
        task
        for place, layout in zip(places, layouts, strict=True)
        if not layout.is_live()
        for task in _tasks(place, layout, split_size)
    ]
    results = run_tasks(
        spark, "verify", tasks, _look, weight=lambda task: task.weight, progress=progress
    )
    runs: list[list[SoundRun]] = [[] for _ in places]
    chains: list[set[str]] = [set() for _ in places]
    for task, (sound, stands) in zip(tasks, results, strict=True):
        runs[task.place.number] += sound
        if stands and task.index is not None:
            chains[task.place.number].add(task.index)
    return [
        verify_store(layout, sound=SoundParts(tuple(runs[number]), frozenset(chains[number])))
        for number, layout in enumerate(layouts)
    ]


def _tasks(place: _Place, layout: StoreLayout, split_size: int) -> list[_Task]:
    tasks = [_Task(place, start, stop) for start, stop in tiles(layout, split_size)]
    return tasks + [
        _Task(place, index=f"{INDEX}/{entry.name}") for entry in layout.index_files if entry.size
    ]


# -------------------------------------------------------------------------------- in the worker
def _look(_: int, task: _Task) -> tuple[list[SoundRun], bool]:
    reader = _reader(task.place)
    if task.index is not None:
        return [], IndexAudit(reader.layout).has_right_chains(task.index)
    return reader.read(task.start, task.stop), False


_last: tuple[tuple[str, int], SoundReader] | None = None
"""What the last task of this worker read with, and what: the next one is often for the same."""


def _reader(place: _Place) -> SoundReader:
    global _last  # noqa: PLW0603
    which = place.job, place.number
    if _last is None or _last[0] != which:
        _last = which, SoundReader(place.open())
    return _last[1]
