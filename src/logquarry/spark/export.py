"""Exports stores to Parquet, counts their messages, and merges exported files; on Spark, or in this
process.

A file's name depends only on the store and the offsets of its messages. A repeated export therefore
replaces files and never duplicates rows. :mod:`logquarry.spark.output` commits the files.

A merge runs in a worker of a compaction, and needs memory for about one row group of Parquet. The
rows keep their order. Spark can run two attempts of a merge at the same time, so each attempt uses
its own file names. This module does not import PySpark.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.errors import CorruptFile, StoreUnavailable, UsageError, reason_of, write_reason
from logquarry.log.batches import DamageLog
from logquarry.log.exported import MOST_BYTES, ExactProperties, read_exact
from logquarry.log.location import Stores, as_paths, find_stores, overlaps_store
from logquarry.spark.jobs import context_of, run_tasks
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.output import ExportCommit, OutputFolder
from logquarry.spark.parquet import (
    ROW_GROUP_BYTES,
    TALLY_COLUMNS,
    Summary,
    TaskResult,
    WrittenFile,
    check_partition_columns,
    write_empty,
    write_task,
    writer_settings,
)
from logquarry.spark.tasks import ReadTask, plan_tasks, read_batches
from logquarry.systems import held
from logquarry.text import counted, document

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """The result of an export; `files` are sorted by path."""

    location: str
    files: tuple[WrittenFile, ...]
    summary: Summary
    seconds: float

    @property
    def messages(self) -> int:
        """Number of exported messages."""
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)


def export_parquet(
    spark: SparkSession | None,
    stores: Stores,
    dest: str | os.PathLike[str],
    options: ReadOptions | Mapping[str, str] | None = None,
    *,
    partition_by: Sequence[str] = (),
    progress: Progress | None = None,
    dest_storage_options: Mapping[str, Any] | None = None,
) -> ExportSummary:
    """Export the messages of stores to Parquet files with the columns of the data source.

    The rows of a file are in the order of the log. If the options select topics or queues, the rows
    are in the order of the queue entries instead, one queue after the other. With ``partition_by``,
    the files are in folders ``topic=.../day=...`` and still contain the partition columns. Ctrl-C
    before the commit leaves ``dest`` unchanged. If you press Ctrl-C during the commit, the export
    stops after the commit.

    Args:
        spark: a session whose workers reach the stores and ``dest`` under the same paths; None to
            export in this process, without PySpark.
        dest: a folder that does not exist, is empty, or holds an earlier export.
        options: options of the data source, or :class:`ReadOptions`. Only in ReadOptions,
            ``on_damage`` can also be ``"stop"`` or ``"fail"``.
        partition_by: any of broker, topic, queue_id and day (of the store timestamp, UTC).
        progress: called with (bytes of log done, bytes in total).
        dest_storage_options: options for the file system of ``dest``, if ``dest`` is a URL; None
            for the stores' options.

    Raises:
        CorruptFrame: if a log is damaged, and the options do not make the export skip damage or
            stop at damage. ``dest`` stays unchanged.
        UsageError: if ``dest`` holds other Parquet files, or overlaps with a store.
        StoreNotFound: if a path is not a store.
        StoreUnavailable: if another export is running in ``dest``.
    """
    began = time.monotonic()
    read = read_options(stores, options)
    columns = read.names
    partition_by = check_partition_columns(partition_by, columns)
    folder = OutputFolder(dest, dest_storage_options or read.storage_options)
    tasks = plan_tasks(read, min_tasks=_cores(spark))
    check_apart(folder.location, find_stores(read.paths, read.storage_options), read.config)
    commit = ExportCommit(folder)
    commit.begin()
    try:
        results = run_tasks(
            spark,
            f"export to {folder.location}",
            tasks,
            partial(write_task, folder=folder, staging=commit.staging, partition_by=partition_by),
            weight=attrgetter("length"),
            progress=progress,
        )
        if read.on_damage == "stop":
            results = _up_to_damage(tasks, results)
        files = [file for result in results for file in result.files]
        if not files:
            files = [write_empty(folder, commit.staging, columns)]
        summary = Summary.of(result.summary for result in results)
        manifest = _manifest(tasks, files, summary, columns, partition_by)
    except BaseException:
        commit.abort()
        raise
    with held():
        commit.commit([(file.staged, file.path) for file in files], manifest)
    return ExportSummary(
        location=folder.location,
        files=tuple(sorted(files, key=lambda file: file.path)),
        summary=summary,
        seconds=time.monotonic() - began,
    )


def summarize(
    spark: SparkSession | None,
    stores: Stores,
    options: ReadOptions | Mapping[str, str] | None = None,
    *,
    progress: Progress | None = None,
) -> Summary:
    """Return each topic's number of messages, bytes and time range; also return the damage.

    The function does not read bodies, so it does not find damage inside bodies. For the arguments
    see :func:`export_parquet`.
    """
    read = read_options(stores, options)
    tasks = plan_tasks(read, TALLY_COLUMNS, min_tasks=_cores(spark))
    results = run_tasks(
        spark, "summary", tasks, _tally, weight=attrgetter("length"), progress=progress
    )
    if read.on_damage == "stop":
        results = _up_to_damage(tasks, results)
    return Summary.of(result.summary for result in results)


def read_options(
    stores: Stores,
    options: ReadOptions | Mapping[str, str] | None,
    *,
    is_stream: bool = False,
    takes_kafka: bool = False,
) -> ReadOptions:
    """Parse the options of an export; raise UsageError if an option has no effect."""
    paths = as_paths(stores)
    if isinstance(options, ReadOptions):
        return replace(options, paths=paths)
    given = {name: value for name, value in (options or {}).items() if name.lower() != "path"}
    read = parse_read_options({**given, "path": paths[0] if paths else ""}, is_stream=is_stream)
    if read.remarks:
        raise UsageError("; ".join(read.remarks))
    if read.is_kafka and not takes_kafka:
        raise UsageError("schema: kafka is for DataFrames: an export has the native columns")
    return replace(read, paths=paths)


def _cores(spark: SparkSession | None) -> int:
    if spark is None:
        return 1
    with held():
        return context_of(spark).defaultParallelism


def _tally(task: ReadTask) -> TaskResult:
    damage = DamageLog()
    summary = Summary()
    for batch in read_batches(task, damage):
        summary.add_rows(pa.Table.from_batches([batch]))
    summary.damage = damage.spans
    return TaskResult(files=(), summary=summary)


def _up_to_damage(tasks: Sequence[ReadTask], results: Sequence[TaskResult]) -> list[TaskResult]:
    """For each store, drop the results of all tasks after the first task that found damage.

    The tasks of a store are in log order. Each task has already stopped at the first damage in its
    own part of the log.
    """
    ended: set[str] = set()
    kept: list[TaskResult] = []
    for task, result in zip(tasks, results, strict=True):
        if task.broker not in ended:
            kept.append(result)
            if result.summary.damage:
                ended.add(task.broker)
    return kept


def check_apart(dest: str, locations: Iterable[str], config: StoreConfig) -> None:
    """Raise UsageError if the destination is no folder, or overlaps with a store.

    Args:
        config: the stores' configuration; the configuration can name further folders of the logs.
    """
    for path in (dest, *map(str, Path(dest).parents)):
        if os.path.isfile(path):  # noqa: PTH113 - unlike Path.is_file, it never raises an error
            raise UsageError(f"{path}: is a file: give a folder as the destination")
    for location in locations:
        if overlaps_store(dest, location, config):
            raise UsageError(
                f"{dest}: overlaps with the store {location}: give a folder outside of it"
            )


def _manifest(
    tasks: Sequence[ReadTask],
    files: Sequence[WrittenFile],
    summary: Summary,
    columns: Sequence[str],
    partition_by: Sequence[str],
) -> dict[str, Any]:
    stores = {task.location: task.broker for task in tasks}
    return {
        "version": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "format": "parquet",
        "stores": [{"location": loc, "broker": broker} for loc, broker in stores.items()],
        "columns": list(columns),
        "partition_by": list(partition_by),
        **summary.total.as_dict(),
        "topics": {name: topic.as_dict() for name, topic in summary.topics.items()},
        "damage": [span.to_json() for span in summary.damage],
        "files": [
            document(file, ("path", "broker", "rows", "bytes", "first_offset", "last_offset"))
            for file in sorted(files, key=lambda file: file.path)
        ],
    }


DEFAULT_TARGET_SIZE: Final = 256 << 20
"""Approximate bytes of a merged file."""

S = TypeVar("S", bound="Source")


@dataclass(frozen=True, slots=True)
class Source:
    """A file to merge."""

    path: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Files to merge into one. Small and picklable.

    Attributes:
        sources: the files, in the order of their rows; all files have the same columns.
        stem: path of the merged file without its ending.
        staging: folder in which each attempt makes its own folder; None to write beside the
            sources, with a unique suffix for each attempt.
    """

    folder: OutputFolder
    sources: tuple[Source, ...]
    stem: str
    staging: str | None = None

    @property
    def bytes(self) -> int:
        """Size of all sources in bytes."""
        return sum(source.bytes for source in self.sources)


@dataclass(frozen=True, slots=True)
class Merged:
    """A file that a merge wrote and synced."""

    path: str
    sources: tuple[str, ...]
    rows: int
    bytes: int


RunMerges = Callable[[Sequence[MergeTask]], Sequence[tuple[Merged, ...]]]
"""Runs :func:`merge` for each task, in this process or on Spark."""


def groups(files: Sequence[S], target_size: int) -> Iterator[list[S]]:
    """Group consecutive files of a list so that each group has about `target_size` bytes.

    A group has at least two files. A file larger than half of `target_size` is in no group.
    """
    group: list[S] = []
    size = 0
    for file in files:
        if file.bytes * 2 > target_size or size + file.bytes > target_size:
            if len(group) > 1:
                yield group
            group, size = [], 0
            if file.bytes * 2 > target_size:
                continue
        group.append(file)
        size += file.bytes
    if len(group) > 1:
        yield group


def fewer(
    chosen: Sequence[list[S]], made: Sequence[tuple[Merged, ...]]
) -> tuple[list[list[S]], list[Merged]]:
    """Select the merges that reduced the number of files; return their sources and new files.

    The metadata of a file stores the property strings that the column ``properties`` cannot
    represent. If these strings are too large for the metadata of one file, a merge writes several
    files.
    """
    kept = [
        (group, files) for group, files in zip(chosen, made, strict=True) if len(files) < len(group)
    ]
    return [group for group, _ in kept], [file for _, files in kept for file in files]


def merge(task: MergeTask) -> tuple[Merged, ...]:
    """Merge files into one file, or into several if the metadata of one file would be too large."""
    attempt = uuid.uuid4().hex[:12]
    stem = f"{task.stem}-{attempt}"
    if task.staging is not None:
        stem = f"{task.staging}/{attempt}/{task.stem}"
        task.folder.make(stem.rpartition("/")[0])
    made: list[Merged] = []
    path = ""
    waiting = list(task.sources)
    try:
        while waiting:
            path = f"{stem}{f'.{len(made)}' * bool(made)}.parquet"
            made.append(_merge_to(task.folder, path, waiting))
    except BaseException:
        for one in (*(one.path for one in made), path):
            task.folder.remove(one)
        raise
    return tuple(made)


def _merge_to(folder: OutputFolder, path: str, waiting: list[Source]) -> Merged:
    """Merge sources from the start of ``waiting`` into one file; remove them from ``waiting``."""
    taken: list[Source] = []
    exact = ExactProperties()
    with _read(folder, waiting[0].path), folder.open(waiting[0].path) as first:
        columns = pq.read_schema(first).remove_metadata()

    def read() -> Iterator[pa.Table]:
        while waiting and exact.size <= MOST_BYTES:
            taken.append(waiting.pop(0))
            yield from _row_groups(folder, taken[-1], columns, exact)

    try:
        with (
            folder.create(path) as sink,
            pq.ParquetWriter(sink, columns, **writer_settings(columns)) as writer,
        ):
            for rows in _joined(read()):
                if rows.num_rows:
                    writer.write_table(rows, row_group_size=rows.num_rows)
                del rows
            if found := exact.metadata():
                writer.add_key_value_metadata(found)
        folder.sync(path)
    except OSError as error:
        where = f"{folder.location}/{path}"
        raise StoreUnavailable(f"{where}: cannot be written: {write_reason(error)}") from error
    names, count = tuple(source.path for source in taken), sum(source.rows for source in taken)
    return Merged(path, names, count, folder.size(path))


def _joined(groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join small row groups to groups of at most ROW_GROUP_BYTES."""
    held: list[pa.Table] = []
    size = 0
    for rows in groups:
        if held and size + rows.nbytes > ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
        held.append(rows.replace_schema_metadata(None))
        size += rows.nbytes
        del rows
    if held:
        yield pa.concat_tables(held)


def _row_groups(
    folder: OutputFolder, source: Source, columns: pa.Schema, exact: ExactProperties
) -> Iterator[pa.Table]:
    with _read(folder, source.path):
        opened = folder.open(source.path)
    with opened:
        with _read(folder, source.path):
            file = pq.ParquetFile(opened)
        _check(folder, source, file, columns)
        exact.add_listed(read_exact(file.metadata.metadata), source.rows)
        for group in range(file.num_row_groups):
            with _read(folder, source.path):
                rows = file.read_row_group(group)
            yield rows
            del rows


@contextmanager
def _read(folder: OutputFolder, path: str) -> Iterator[None]:
    """Turn Arrow's errors into errors of logquarry that name the file. An error about the file's
    content becomes CorruptFile, and an I/O error becomes StoreUnavailable.
    """
    where = f"{folder.location}/{path}"
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptFile(where, 0, "the file is missing") from error
    except MemoryError:
        raise
    except pa.ArrowException as error:
        raise CorruptFile(where, 0, f"is not a valid Parquet file: {error}") from error
    except OSError as error:
        # Arrow raises OSError without errno if the pages inside the file are invalid.
        if error.errno is not None or not folder.is_local:
            raise StoreUnavailable(f"{where}: cannot be read: {reason_of(error)}") from error
        raise CorruptFile(where, 0, f"is not a valid Parquet file: {error}") from error


def _check(folder: OutputFolder, source: Source, file: Any, columns: pa.Schema) -> None:
    where = f"{folder.location}/{source.path}"
    if file.metadata.num_rows != source.rows:
        reason = f"has {counted(file.metadata.num_rows, 'row')}, but should have {source.rows}"
        raise CorruptFile(where, 0, reason)
    if not file.schema_arrow.remove_metadata().equals(columns):
        raise CorruptFile(where, 0, "has other columns than the files to merge with")
