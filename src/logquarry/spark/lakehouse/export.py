"""Stores into Delta and Iceberg tables: what users call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logquarry.errors import UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.store_names import Stores, find_stores
from logquarry.spark.decode import DecodeOptions, parse_decode_options
from logquarry.spark.export import check_apart, read_options
from logquarry.spark.jobs import run_tasks
from logquarry.spark.lakehouse.advance import Advance, Done, RunTasks, Target, Work
from logquarry.spark.lakehouse.runs import CONTROL, Run
from logquarry.spark.lakehouse.table import Table
from logquarry.spark.lakehouse.write import TableResult
from logquarry.spark.options import ReadOptions
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import check_partition_columns
from logquarry.spark.summary import Summary
from logquarry.spark.tasks import ReadTask
from logquarry.units import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEAD_LETTERS: Final = "_dead_letters"
"""What is put behind a destination's name where nothing else is said."""
DEFAULT_TABLE: Final = "logquarry.messages"
DEFAULT_INTERVAL: Final = 10.0
"""Seconds between two looks at stores that are followed."""


@dataclass(frozen=True, kw_only=True)
class TableSummary:
    """What an export into a table has added.

    Attributes:
        location: the table's folder.
        dead_letters: that of the bodies that do not decode; None where nothing is decoded.
        files: how many files.
        bytes: of them.
        summary: messages and bytes by topic, and the damage that was passed over.
        dead_messages: how many bodies did not decode.
        commits: how many commits it took.
        seconds: how long.
    """

    location: str
    dead_letters: str | None
    files: int
    bytes: int
    summary: Summary
    dead_messages: int
    commits: int
    seconds: float

    @property
    def messages(self) -> int:
        """How many messages came into the table."""
        return self.summary.total.messages


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """What the exports to all kinds of tables take.

    Attributes:
        partition_by: some of broker, topic, queue_id and day (of the store timestamp, UTC).
        decode: how bodies become the column ``value``; None for not at all. The word ``json`` is
            enough where a sample tells the schema.
        dead_letters: the folder of bodies that do not decode; None for one beside the table.
        follow: whether to go on with what comes later, until interrupted.
        interval: seconds between two looks at the stores then.
        moved: whether stores may lie elsewhere than when the table last had something of them.
        dest_storage_options: what the file system of the destination takes, if it is a URL.
    """

    partition_by: Sequence[str] = ()
    decode: DecodeOptions | str | None = None
    dead_letters: str | os.PathLike[str] | None = None
    follow: bool = False
    interval: float = DEFAULT_INTERVAL
    moved: bool = False
    dest_storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TableExport:
    """An export that has been looked at, and not begun.

    Attributes:
        target: what is exported to where.
        folder: the destination.
        options: how.
    """

    target: Target
    folder: OutputFolder
    options: TableOptions

    def check(self) -> None:
        """Find what can be found without doing anything.

        Raises:
            UsageError: if the destination holds something else, or lies in a store.
            StoreNotFound: if a store is not there.
        """
        read, table = self.target.read, self.target.table
        locations = find_stores(read.paths, read.storage_options)
        for location in locations:
            StoreLayout.open(location, read.config, read.storage_options)
        check_apart(self.folder.location, locations)
        if table.look() is None:
            _check_free(self.folder, table)

    def run(
        self,
        spark: SparkSession,
        *,
        progress: Progress | None = None,
        on_commit: Callable[[Done], None] | None = None,
    ) -> TableSummary:
        """Have Spark's workers do it; see :func:`export_delta`."""

        def on_spark(tasks: Sequence[ReadTask], work: Work) -> list[TableResult]:
            name = f"export to {self.target.table.name}"
            return run_tasks(spark, name, tasks, work, weight=_weight, progress=progress)

        return self.run_with(on_spark, on_commit=on_commit)

    def run_with(
        self, run: RunTasks, *, on_commit: Callable[[Done], None] | None = None
    ) -> TableSummary:
        """The same, with tasks done by whoever is given."""
        began = time.monotonic()
        self.check()
        done = self._advance(run, on_commit)
        letters = self.target.dead_letters
        return TableSummary(
            location=self.target.table.folder.location,
            dead_letters=None if letters is None else letters.folder.location,
            files=done.files,
            bytes=done.bytes,
            summary=done.summary,
            dead_messages=done.dead_messages,
            commits=done.commits,
            seconds=time.monotonic() - began,
        )

    def _advance(self, run_tasks: RunTasks, on_commit: Callable[[Done], None] | None) -> Done:
        target = self.target
        tables = [target.table, *([target.dead_letters] if target.dead_letters else [])]
        run = Run(self.folder, tables)
        run.begin()
        try:
            steps = Advance(target, run, run_tasks)
            if not self.options.follow:
                steps.to_what_is_there()
            while True:
                while steps.step():
                    if on_commit is not None:
                        on_commit(steps.done)
                if not self.options.follow or steps.done.is_stopped:
                    break
                time.sleep(self.options.interval)
            steps.settle()
            return steps.done
        finally:
            run.end()


# ------------------------------------------------------------------------------------------ Delta
def export_delta(
    spark: SparkSession,
    stores: Stores,
    dest: str | os.PathLike[str],
    options: ReadOptions | Mapping[str, str] | None = None,
    *,
    table_storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    on_commit: Callable[[Done], None] | None = None,
    **table_options: Any,
) -> TableSummary:
    """Add to a Delta table what some stores have that it has not.

    The table is made if it is not there. Each message comes into it once, however often an export
    dies and is run again.

    Args:
        spark: a session; its workers have to reach the stores and ``dest`` by the same names.
        stores: a path, URL or glob, or several.
        dest: the table's folder.
        options: which messages, and what to do about damage; ``maxBytesPerTrigger`` and
            ``maxOffsetsPerTrigger`` bound a commit. Filters and columns are those that the table
            was begun with.
        table_storage_options: what `deltalake` takes to reach a URL.
        progress: told how many bytes of log of a commit are done, of how many.
        on_commit: told of what has been done so far, after each step.
        **table_options: those of :class:`TableOptions`.

    Raises:
        CorruptFrame: on damage, as the options say; the table is as it was before the commit.
        UsageError: if options make no sense, or are not those that the table was begun with.
        StoreNotFound, StoreUnavailable: if a store is not there, or ``dest`` in use.
    """
    export = delta_export(
        stores, dest, options, table_storage_options=table_storage_options, **table_options
    )
    return export.run(spark, progress=progress, on_commit=on_commit)


def delta_export(
    stores: Stores,
    dest: str | os.PathLike[str],
    options: ReadOptions | Mapping[str, str] | None = None,
    *,
    table_storage_options: Mapping[str, str] | None = None,
    **table_options: Any,
) -> TableExport:
    """What :func:`export_delta` does, looked at and not begun.

    Raises:
        UsageError: if options make no sense, or a package is missing.
    """
    from logquarry.spark.lakehouse.delta import Delta

    chosen = _chosen(table_options)
    folder = OutputFolder(dest, chosen.dest_storage_options)
    place = chosen.dead_letters or f"{folder.location}{DEAD_LETTERS}"
    letters = OutputFolder(place, chosen.dest_storage_options)
    table = Delta(folder, table_storage_options)
    target = _target(stores, options, chosen, table, Delta(letters, table_storage_options))
    return TableExport(target=target, folder=folder, options=chosen)


# ---------------------------------------------------------------------------------------- Iceberg
def export_iceberg(
    spark: SparkSession,
    stores: Stores,
    dest: str | os.PathLike[str],
    options: ReadOptions | Mapping[str, str] | None = None,
    *,
    table: str = DEFAULT_TABLE,
    catalog: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    on_commit: Callable[[Done], None] | None = None,
    **table_options: Any,
) -> TableSummary:
    """Add to an Iceberg table what some stores have that it has not.

    As :func:`export_delta`, but for these:

    Args:
        spark: a session.
        stores: a path, URL or glob, or several.
        dest: the folder in which the table has its folder, and where the catalog is.
        options: as for :func:`export_delta`.
        table: ``NAMESPACE.TABLE``; the dead letters are in ``NAMESPACE.TABLE_dead_letters``.
        catalog: properties of a catalog, as `pyiceberg` takes them. Default: SQLite, in
            ``dest/catalog.db``.
        progress: as for :func:`export_delta`.
        on_commit: as for :func:`export_delta`.
        **table_options: those of :class:`TableOptions`.

    Raises:
        LogquarryError: as for :func:`export_delta`.
    """
    export = iceberg_export(stores, dest, options, table=table, catalog=catalog, **table_options)
    return export.run(spark, progress=progress, on_commit=on_commit)


def iceberg_export(
    stores: Stores,
    dest: str | os.PathLike[str],
    options: ReadOptions | Mapping[str, str] | None = None,
    *,
    table: str = DEFAULT_TABLE,
    catalog: Mapping[str, str] | None = None,
    **table_options: Any,
) -> TableExport:
    """What :func:`export_iceberg` does, looked at and not begun.

    Raises:
        UsageError: if options make no sense, or a package is missing.
    """
    from logquarry.spark.lakehouse.iceberg import CATALOG_FILE, Iceberg

    chosen = _chosen(table_options)
    folder = OutputFolder(dest, chosen.dest_storage_options)
    if catalog is None and not folder.is_local:
        raise UsageError(f"{folder.location}: SQLite's catalog is a local file: name another")
    file = Path(folder.location) / CATALOG_FILE
    place = f"{folder.location}/{table.rpartition('.')[2]}"
    own = OutputFolder(place, chosen.dest_storage_options)
    letters = OutputFolder(
        chosen.dead_letters or f"{place}{DEAD_LETTERS}", chosen.dest_storage_options
    )
    target = _target(
        stores,
        options,
        chosen,
        Iceberg(own, table, catalog, file),
        Iceberg(letters, f"{table}{DEAD_LETTERS}", catalog, file),
    )
    return TableExport(target=target, folder=folder, options=chosen)


# ---------------------------------------------------------------------------------------- details
def _chosen(given: Mapping[str, Any]) -> TableOptions:
    try:
        chosen = TableOptions(**given)
    except TypeError as error:
        raise UsageError(str(error).partition(" ")[2]) from None
    if chosen.interval <= 0:
        raise UsageError(f"interval: takes seconds, not {chosen.interval}")
    return chosen


def _weight(task: ReadTask) -> int:
    return task.length


def _target(
    stores: Stores,
    options: ReadOptions | Mapping[str, str] | None,
    chosen: TableOptions,
    table: Table,
    letters: Table,
) -> Target:
    read = read_options(stores, options, is_stream=True, takes_kafka=True)
    ranges = (read.wanted.queue_ranges or {}).values()
    if read.stop.default is not None or read.stop.brokers or any(stop for _, stop in ranges):
        raise UsageError("endingOffsets: a table gets all that comes: bound it by time instead")
    decode = chosen.decode
    if isinstance(decode, str):
        decode = parse_decode_options(decode)
    columns = list(read.names)
    if read.is_kafka:
        if decode is not None:
            raise UsageError("decode: in Kafka's table the column value is the body: take ours")
        columns += ["store_timestamp"] if "timestamp" in columns else []
    if decode is not None:
        # What is compressed decodes to nothing.
        read = replace(read, decompress=True)
    elif chosen.dead_letters is not None:
        raise UsageError("dead letters are bodies that do not decode: say how to decode them")
    return Target(
        table=table,
        dead_letters=None if decode is None else letters,
        read=read,
        partition_by=check_partition_columns(chosen.partition_by, columns),
        decode=decode,
        moved=chosen.moved,
    )


def _check_free(folder: OutputFolder, table: Table) -> None:
    """That a destination without a table has nothing else, but what dead exports have left."""
    below = table.folder.location.removeprefix(folder.location).lstrip("/")
    ours = (CONTROL, f"{below}/", f"{below}{DEAD_LETTERS}/") if below else (CONTROL,)
    for path in folder.files():
        name = path.rpartition("/")[2]
        is_part = name.startswith("part-") and name.endswith(".parquet")
        if not (path.startswith(ours) or path == "catalog.db" or (is_part and not below)):
            raise UsageError(
                f"{folder.location}: there is something else ({path}): export into a folder of "
                "its own"
            )
