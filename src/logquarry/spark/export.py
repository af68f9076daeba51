"""Exports stores to Parquet, and counts their messages; on Spark, or in this process.

A file's name depends only on the store and the offsets of its messages. A repeated export therefore
replaces files and never duplicates rows. :mod:`logquarry.spark.output` commits the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.log.batches import DamageLog
from logquarry.log.location import Stores, as_paths, find_stores, overlaps_store
from logquarry.spark.jobs import context_of, run_tasks
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.output import ExportCommit, OutputFolder
from logquarry.spark.parquet import (
    TALLY_COLUMNS,
    Summary,
    TaskResult,
    WrittenFile,
    check_partition_columns,
    write_empty,
    write_task,
)
from logquarry.spark.tasks import ReadTask, plan_tasks, read_batches
from logquarry.systems import held
from logquarry.text import document
from logquarry.units import Progress

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
        CorruptFrame: if a log is damaged, unless the options make the export skip damage or stop at
            damage; ``dest`` is unchanged.
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

    The count reads no bodies, so damage inside bodies is not found. For the arguments see
    :func:`export_parquet`.
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

    The tasks of a store are in log order, and each task stopped at the first damage in its part.
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
