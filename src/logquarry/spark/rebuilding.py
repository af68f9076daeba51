"""Consume queues and index made anew on Spark: map-only, without a shuffle.

A unit's place is its message's queue offset, so that tasks write units where they belong, each
from its part of the log. Index files are made one by a task, of the keys from one number to
another. See :mod:`logquarry.store.rebuild.parts`; what is put in place, and how, is
:mod:`logquarry.store.rebuild.rebuild`'s.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.files.layout import CONSUME_QUEUE, INDEX, StoreLayout
from logquarry.scan.follow import Follower, follow_run
from logquarry.scan.stretches import Stretch, tiles
from logquarry.scan.walk import Run
from logquarry.spark.jobs import run_tasks
from logquarry.spark.tasks import LARGEST_SPLIT
from logquarry.store.disk.disk import LocalDisk
from logquarry.store.dispatch.index_writer import next_name
from logquarry.store.dispatch.queue_units import parts_with_copies
from logquarry.store.dispatch.queue_writer import MOST_GAP
from logquarry.store.queue.log_queues import QueueKey
from logquarry.store.rebuild import parts
from logquarry.store.rebuild.build import BuildJob, Built, build_here
from logquarry.store.rebuild.parts import FoundRun, KeyCount, KeySource, RunSummary
from logquarry.store.rebuild.queue_files import QueueFiles
from logquarry.store.rebuild.rebuild import rebuild
from logquarry.store.rebuild.report import RebuildReport
from logquarry.units import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STAGES: Final = 3


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
) -> RebuildReport:
    """Make consume queues and index anew; see :func:`rebuild`, whose bytes these are.

    Queues whose offsets fall back, as those of a topic that was deleted and made anew, are built by
    the driver in the log's order; so is all of a store that a process has open.

    Args:
        spark: a session; its workers have to reach the store, and ``into``, by the same names.
        path: the store's folder.
        into: see :func:`rebuild`.
        apply: likewise.
        queues: likewise.
        index: likewise.
        config: likewise.
        split_size: most bytes of log of one task.
        progress: told of bytes; the log counts three times.

    Raises:
        StoreNotFound, StoreUnavailable, UsageError: as :func:`rebuild`.
    """

    def build(job: BuildJob, told: Progress | None) -> Built:
        if job.is_live:
            return build_here(job, told)
        return _SparkBuild(spark, job, split_size, told).run()

    return rebuild(
        path,
        into=into,
        apply=apply,
        queues=queues,
        index=index,
        config=config,
        builder=build,
        progress=progress,
    )


@dataclass(frozen=True, slots=True)
class _Local:
    """A run that only the walk could read."""

    run: Run
    summary: FoundRun


_Piece = FoundRun | _Local


class _SparkBuild:
    """Builds one store's."""

    def __init__(
        self, spark: SparkSession, job: BuildJob, split_size: int, progress: Progress | None
    ) -> None:
        self._spark = spark
        self._job = job
        self._split_size = split_size
        self._progress = progress
        is_3_1 = job.config.is_3_1
        self._follower = Follower(job.config.delay_levels_ms, keys_of_3_1=is_3_1)
        self._store = _Store(job.layout.root, job.config)

    def run(self) -> Built:
        job = self._job
        # Folders that nobody makes where there is nothing to put into them.
        for name in job.names:
            job.disk.make_folders(job.folder / name)
        parts_of_log = list(tiles(job.layout, self._split_size))
        found = run_tasks(
            self._spark,
            "rebuild: look",
            parts_of_log,
            _Find(self._store),
            weight=_length,
            progress=self._stage(0),
        )
        guesses = [run for runs in found for run in runs]
        pieces = [self._piece(run) for run in job.look.guided_runs(guesses)]
        queues = job.queue_files()
        if queues is not None:
            self._build_queues(queues, pieces)
        if INDEX not in job.names:
            return Built(queues)
        return self._build_index(queues, pieces)

    def _stage(self, number: int) -> Progress | None:
        progress = self._progress
        if progress is None:
            return None

        def told(done: int, total: int) -> None:
            progress(number * total + done, _STAGES * total)

        return told

    def _piece(self, run: Run | FoundRun) -> _Piece:
        if isinstance(run, FoundRun):
            return run
        summary = RunSummary(self._job.config)
        for window, followed in follow_run(self._follower, run):
            summary(window, followed)
        return _Local(run, summary.run(Stretch(run.start, run.end, len(run.rows))))

    # ---------------------------------------------------------------------------------- queues
    def _build_queues(self, queues: QueueFiles, pieces: list[_Piece]) -> None:
        summaries = [piece if isinstance(piece, FoundRun) else piece.summary for piece in pieces]
        keys = {key for summary in summaries for key in summary.queues}
        odd = parts.odd_queues((summary.queues for summary in summaries), MOST_GAP)
        odd |= {key for key in keys if not queues.takes(key)}
        run_tasks(
            self._spark,
            "rebuild: queues",
            _grouped([piece for piece in pieces if isinstance(piece, FoundRun)], self._split_size),
            _WriteUnits(self._store, self._job.folder / CONSUME_QUEUE, odd),
            weight=_length_of_all,
            progress=self._stage(1),
        )
        for piece in pieces:
            if isinstance(piece, _Local):
                for window, followed in follow_run(self._follower, piece.run):
                    queues.add(parts_with_copies(window, followed, self._job.config))
                continue
            self._add_odd(queues, piece, odd)
            for key, segments in piece.queues.items():
                if key not in odd:
                    for first, stop in segments or ():
                        queues.reserve(key, first, stop)
        queues.finish()

    def _add_odd(self, queues: QueueFiles, piece: FoundRun, odd: frozenset[QueueKey]) -> None:
        """What a run brings to queues that are built in the log's order."""
        if odd.isdisjoint(piece.queues):
            return
        for found in parts.read_units(
            self._job.layout, self._job.config, [(piece.start, piece.end)]
        ):
            queues.add({key: part for key, part in found.items() if key in odd})

    # ----------------------------------------------------------------------------------- index
    def _build_index(self, queues: QueueFiles | None, pieces: list[_Piece]) -> Built:
        job, shape = self._job, self._job.config.index_shape
        assert shape is not None
        count = KeyCount(shape)
        for piece in pieces:
            if isinstance(piece, FoundRun):
                source = KeySource(piece.start, piece.end, 0, piece.keys)
                count.add(source, ends_with_key=piece.ends_with_key)
                continue
            summary = piece.summary
            found = [
                parts.keys_of(followed) for _, followed in follow_run(self._follower, piece.run)
            ]
            offsets, times, hashes = (np.concatenate(values) for values in zip(*found, strict=True))
            source = KeySource(
                summary.start, summary.end, 0, summary.keys, (offsets, times, hashes)
            )
            count.add(source, ends_with_key=summary.ends_with_key)
        files, name = [], ""
        for number, sources in enumerate(count.files()):
            name = next_name(name, job.clock())
            files.append(_IndexFile(job.folder / INDEX / name, tuple(sources), number == 0))
        run_tasks(
            self._spark,
            "rebuild: index",
            files,
            _WriteIndex(self._store),
            weight=_keys_of_file,
            progress=self._stage(2),
        )
        job.disk.sync_names(job.folder / INDEX)
        return Built(queues, len(files), count.keys)


def _grouped(runs: list[FoundRun], size: int) -> list[list[tuple[int, int]]]:
    """Runs as tasks of about so many bytes."""
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


def _length_of_all(spans: list[tuple[int, int]]) -> int:
    return sum(map(_length, spans))


@dataclass(frozen=True, slots=True)
class _IndexFile:
    """One index file that is to be."""

    path: Path
    sources: tuple[KeySource, ...]
    is_first: bool


def _keys_of_file(file: _IndexFile) -> int:
    return sum(source.take for source in file.sources)


# -------------------------------------------------------------------------------- in the worker
@dataclass(frozen=True, slots=True)
class _Store:
    """A store, as a task finds it."""

    location: str
    config: StoreConfig

    def open(self) -> StoreLayout:
        return StoreLayout.open(self.location, self.config)


@dataclass(frozen=True, slots=True)
class _Find:
    store: _Store

    def __call__(self, _: int, part: tuple[int, int]) -> list[FoundRun]:
        return parts.find_runs(self.store.open(), self.store.config, *part)


@dataclass(frozen=True, slots=True)
class _WriteUnits:
    store: _Store
    folder: Path
    odd: frozenset[QueueKey]

    def __call__(self, _: int, spans: list[tuple[int, int]]) -> None:
        parts.write_units(
            self.store.open(), self.store.config, spans, LocalDisk(), self.folder, self.odd
        )


@dataclass(frozen=True, slots=True)
class _WriteIndex:
    store: _Store

    def __call__(self, _: int, file: _IndexFile) -> None:
        shape = self.store.config.index_shape
        assert shape is not None
        # A task that is tried again begins its file anew.
        file.path.unlink(missing_ok=True)
        parts.write_index_file(
            self.store.open(),
            file.sources,
            LocalDisk(),
            file.path,
            shape,
            is_first=file.is_first,
        )
