"""Rebuilds consume queues and index on Spark, without a shuffle.

The queue offset of a message determines the position of its entry in the queue's files. So each
task reads a part of the log, and writes the entries directly to their positions. In the last job,
each task writes one index file, from the keys of a part of the log. The code of a task is in
:mod:`logquarry.repair.rebuild.parts`.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import quote

import numpy as np

from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import UsageError
from logquarry.log.follow import Follower, follow_run
from logquarry.log.layout import StoreLayout
from logquarry.log.location import (
    Stores,
    as_paths,
    broker_names,
    find_stores,
    local_folder,
    local_store,
)
from logquarry.log.splits import tiles
from logquarry.log.store_files import CONSUME_QUEUE, INDEX, SIDECAR
from logquarry.log.walk import Run
from logquarry.read.log_queues import QueueKey
from logquarry.repair.audit.harmed_frames import placed
from logquarry.repair.audit.runs import audited
from logquarry.repair.rebuild import parts
from logquarry.repair.rebuild.build import (
    BuildJob,
    Built,
    RebuildReport,
    build_here,
    check_into,
    finish_into,
)
from logquarry.repair.rebuild.parts import FoundRun, Harmed, KeyCount, KeySource
from logquarry.repair.rebuild.queue_files import QueueFiles, topic_fault
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.spark.jobs import run_tasks
from logquarry.spark.tasks import LARGEST_SPLIT
from logquarry.write.index_writer import next_name
from logquarry.write.queue_writer import MOST_GAP, parts_with_copies, with_queued

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")

_NOTES: Final = "rebuilt"
"""Folder in `.logquarry/` of ``into``. It contains one note for each rebuilt store. The note has
the path of the source store.
"""
_STAGES: Final = 3
_AT_ONCE: Final = 8
"""Maximum number of stores that are rebuilt at the same time: while the driver works on one store,
tasks work on the others.
"""


def rebuild_on_spark(
    spark: SparkSession,
    path: str | os.PathLike[str],
    *,
    into: str | os.PathLike[str] | None = None,
    apply: bool = False,
    queues: bool = True,
    index: bool = True,
    config: StoreConfig | None = None,
    split_size: int = LARGEST_SPLIT,
    progress: Progress | None = None,
    pause: Callable[[], None] = lambda: None,
    note: Path | None = None,
) -> RebuildReport:
    """Rebuild consume queues and index; the files equal those that :func:`rebuild` writes.

    The tasks build most queues. The driver itself builds the queues of recreated topics, because
    their queue offsets start again at 0. If damage changed the topic, queue id or transaction type
    of a frame, the driver also builds the queue of this frame. If a process has the store open, the
    driver builds all queues and the index.

    Args:
        spark: a session whose workers reach the store and ``into`` under the same paths.
        path: the store's folder. For all other arguments, and for errors, see :func:`rebuild`.
        split_size: maximum bytes of log in one task.
        progress: called with (done, total). The rebuild has three jobs. The first two count bytes
            of log, and the last one counts keys. ``total`` is three times the running job's bytes
            or keys.
        pause: called at safe points; raise to cancel.
    """

    def build(job: BuildJob, progress: Progress | None) -> Built:
        if job.is_live:
            return build_here(job, progress)
        return _SparkBuild(spark, job, split_size, progress, pause).run()

    return rebuild(
        path,
        into=into,
        apply=apply,
        queues=queues,
        index=index,
        config=config,
        builder=build,
        progress=progress,
        note=note,
    )


def rebuild_stores(
    spark: SparkSession,
    stores: Stores,
    *,
    into: str | os.PathLike[str] | None = None,
    apply: bool = False,
    queues: bool = True,
    index: bool = True,
    config: StoreConfig | None = None,
    split_size: int = LARGEST_SPLIT,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[RebuildReport]:
    """Rebuild queues and index of many stores, several at the same time; return their reports.

    For other arguments see :func:`rebuild_on_spark`.

    Args:
        into: folder for the rebuilt files; each store gets a folder named after its broker.
        apply: whether to replace each store's own files, if ``into`` is None.
        resume: whether to continue an interrupted call with the same ``into``, and to skip complete
            stores. Notes in ``into`` record the store of each folder.

    Raises:
        StoreNotFound: if a path is not a store.
        StoreUnavailable: for the same reasons as in :func:`rebuild`. The first error cancels all
            other rebuilds that are not complete.
        UsageError: for the same reasons as in :func:`rebuild`. With ``resume``, also if a folder of
            ``into`` belongs to another store or was built with other settings.
    """
    if resume and into is None:
        raise UsageError("resume: needs a target folder: a rebuild in place leaves no notes")
    locations = find_stores(as_paths(stores))
    names = [name for name, wanted in ((CONSUME_QUEUE, queues), (INDEX, index)) if wanted]
    chosen: list[tuple[str, Path | None, Path | None]] = []
    folder = None if into is None else local_folder(into)
    for location, broker in zip(locations, broker_names(locations), strict=True):
        if folder is None:
            chosen.append((location, None, None))
            continue
        target = folder / broker
        note = folder / SIDECAR / _NOTES / f"{quote(broker, safe='')}.json"
        if not (resume and finish_into(location, target, names, note=note, config=config)):
            check_into(local_store(location), target, names)
            chosen.append((location, target, note))
    ended, lock = threading.Event(), threading.Lock()
    known: dict[str, tuple[int, int]] = {}

    def report(location: str, done: int, total: int) -> None:
        with lock:
            known[location] = done, total
            if progress is not None:
                progress(*map(sum, zip(*known.values(), strict=True)))

    def pause() -> None:
        if ended.is_set():
            raise _GivenUp

    def one(location: str, target: Path | None, note: Path | None) -> RebuildReport:
        pause()
        return rebuild_on_spark(
            spark,
            location,
            into=target,
            apply=apply,
            queues=queues,
            index=index,
            config=config,
            split_size=split_size,
            progress=None if progress is None else partial(report, location),
            pause=pause,
            note=note,
        )

    with ThreadPoolExecutor(_AT_ONCE, "rebuild") as pool:
        work = [pool.submit(one, *place) for place in chosen]
        try:
            wait(work, return_when=FIRST_EXCEPTION)
        finally:
            # Cancel the other rebuilds after an error or Ctrl-C.
            ended.set()
            wait(work)
    for future in work:
        error = future.exception()
        if error is not None and not isinstance(error, _GivenUp):
            raise error
    return [future.result() for future in work]


class _GivenUp(Exception):
    """Cancels a rebuild after Ctrl-C, or after the rebuild of another store failed."""


_Piece = tuple[FoundRun, Run | None]
"""Facts about consecutive valid frames. If the driver must write the frames' entries because the
tasks cannot, the second item has the frames; otherwise it is None.
"""


@dataclass(frozen=True)
class _SparkBuild:
    spark: SparkSession
    job: BuildJob
    split_size: int
    progress: Progress | None
    pause: Callable[[], None]

    @cached_property
    def _follower(self) -> Follower:
        return Follower(self.job.config.delay_levels_ms, keys=self.job.config.index_keys)

    @property
    def _store(self) -> tuple[str, StoreConfig]:
        return self.job.layout.root, self.job.config

    def run(self) -> Built:
        job = self.job
        # Make all folders here, because a task makes a folder only if it writes an entry there.
        for name in job.names:
            job.disk.make_folders(job.folder / name)
        parts_of_log = list(tiles(job.layout, self.split_size))
        found = self._run(0, "look", parts_of_log, partial(_find, *self._store), _length)
        guesses = [run for runs in found for run in runs]
        pieces = [self._piece(run) for run in job.log.guided_runs(guesses)]
        queues = job.queue_files()
        if queues is not None:
            self._build_queues(queues, pieces)
        if INDEX not in job.names:
            return Built(queues)
        return self._build_index(queues, pieces)

    def _run(
        self,
        stage: int,
        name: str,
        tasks: Sequence[T],
        work: Callable[[T], R],
        weight: Callable[[T], int],
    ) -> list[R]:
        progress = self.progress

        def report(done: int, total: int) -> None:
            assert progress is not None
            progress(stage * total + done, _STAGES * total)

        return run_tasks(
            self.spark,
            f"rebuild: {name}",
            tasks,
            work,
            weight=weight,
            progress=None if progress is None else report,
            pause=self.pause,
        )

    def _piece(self, run: Run | FoundRun) -> _Piece:
        if isinstance(run, FoundRun):
            return run, None
        return audited(self._follower, run, FoundRun(config=self.job.config)), run

    # ---------------------------------------------------------------------------------- queues
    def _build_queues(self, queues: QueueFiles, pieces: list[_Piece]) -> None:
        summaries = [summary for summary, _ in pieces]
        keys = {key for summary in summaries for key in summary.queues}
        harmed = parts.find_harmed(self.job.layout, self.job.config, self.job.old, summaries)
        queued, places = partial(with_queued, harmed=harmed.types), sorted(harmed.types)
        odd = harmed.queues | parts.odd_queues((summary.queues for summary in summaries), MOST_GAP)
        odd |= {key for key in keys if topic_fault(key) is not None}
        groups = _grouped([summary for summary, run in pieces if run is None], self.split_size)
        write = partial(_write_entries, *self._store, self.job.folder / CONSUME_QUEUE, odd)
        self._run(1, "queues", groups, write, lambda spans: sum(map(_length, spans)))
        for summary, run in pieces:
            if run is not None:
                for window, followed in follow_run(self._follower, run):
                    found = parts_with_copies(window, queued(followed), self.job.config)
                    queues.add(placed(found, harmed.ids))
                continue
            self._add_odd(queues, summary, odd, harmed, places)
            for key, segments in summary.queues.items():
                if key not in odd:
                    for first, stop in segments or ():
                        queues.reserve(key, first, stop)
        queues.finish()

    def _add_odd(
        self,
        queues: QueueFiles,
        piece: FoundRun,
        odd: frozenset[QueueKey],
        harmed: Harmed,
        places: Sequence[int],
    ) -> None:
        harmed_here = bisect_left(places, piece.end) - bisect_left(places, piece.start)
        if odd.isdisjoint(piece.queues) and not harmed_here:
            return
        queued = partial(with_queued, harmed=harmed.types)
        for found in parts.read_entries(
            self.job.layout, self.job.config, [(piece.start, piece.end)], queued
        ):
            entries = {key: part for key, part in found.items() if key in odd}
            queues.add(placed(entries, harmed.ids))

    # ----------------------------------------------------------------------------------- index
    def _build_index(self, queues: QueueFiles | None, pieces: list[_Piece]) -> Built:
        job, shape = self.job, self.job.config.index_shape
        assert shape is not None
        count = KeyCount(shape)
        for summary, run in pieces:
            own = None
            if run is not None:
                found = [parts.keys_of(part) for _, part in follow_run(self._follower, run)]
                offsets, times, hashes = map(np.concatenate, zip(*found, strict=True))
                own = offsets, times, hashes
            source = KeySource(summary.start, summary.end, 0, summary.keys, own)
            count.add(source, ends_with_key=summary.ends_with_key)
        files, name = [], ""
        for number, sources in enumerate(count.files()):
            name = next_name(name, job.clock())
            files.append(_IndexFile(job.folder / INDEX / name, tuple(sources), number == 0))
        write = partial(_write_index, *self._store)
        self._run(2, "index", files, write, lambda f: sum(source.take for source in f.sources))
        job.disk.sync_names(job.folder / INDEX)
        return Built(queues, len(files), count.keys)


def _grouped(runs: list[FoundRun], size: int) -> list[list[tuple[int, int]]]:
    groups: list[list[tuple[int, int]]] = []
    filled = size
    for run in runs:
        if filled >= size:
            groups.append([])
            filled = 0
        groups[-1].append((run.start, run.end))
        filled += run.end - run.start
    return groups


def _length(part: tuple[int, int]) -> int:
    return part[1] - part[0]


@dataclass(frozen=True, slots=True)
class _IndexFile:
    path: Path
    sources: tuple[KeySource, ...]
    is_first: bool


# -------------------------------------------------------------------------------- in the worker
def _find(root: str, config: StoreConfig, part: tuple[int, int]) -> list[FoundRun]:
    return parts.find_runs(StoreLayout.open(root, config), config, *part)


def _write_entries(
    root: str,
    config: StoreConfig,
    folder: Path,
    odd: frozenset[QueueKey],
    spans: list[tuple[int, int]],
) -> None:
    parts.write_entries(StoreLayout.open(root, config), config, spans, Disk(), folder, odd)


def _write_index(root: str, config: StoreConfig, file: _IndexFile) -> None:
    shape = config.index_shape
    assert shape is not None
    # Remove the unfinished file of an earlier attempt.
    file.path.unlink(missing_ok=True)
    layout = StoreLayout.open(root, config)
    parts.write_index_file(layout, file.sources, Disk(), file.path, shape, is_first=file.is_first)
