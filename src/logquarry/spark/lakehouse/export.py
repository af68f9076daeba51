"""Exports stores to Delta and Iceberg tables: the functions that users call."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from logquarry import arguments
from logquarry.arguments import Progress
from logquarry.errors import UsageError
from logquarry.log.location import Stores
from logquarry.spark.decode import DecodeOptions, parse_decode_options
from logquarry.spark.export import check_apart, read_options
from logquarry.spark.jobs import run_tasks
from logquarry.spark.lakehouse.advance import Advance, RunTasks, TableSummary, Target
from logquarry.spark.lakehouse.delta import Delta
from logquarry.spark.lakehouse.iceberg import CATALOG_FILE, Iceberg
from logquarry.spark.lakehouse.table import DEAD_LETTERS, Table
from logquarry.spark.lakehouse.write import (
    CONTROL,
    Run,
    is_of_run,
    noted_run,
    table_folders,
)
from logquarry.spark.options import ReadOptions, is_read_option
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import check_partition_columns
from logquarry.spark.tasks import open_stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_TABLE: Final = "logquarry.messages"
DEFAULT_INTERVAL: Final = 10.0
"""Seconds between two steps of an export that follows the stores."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options of an export to any kind of table.

    Attributes:
        partition_by: any of broker, topic, queue_id and day (of the store timestamp, UTC).
        decode: how to decode bodies into the column ``value``; None to leave bodies undecoded. The
            text ``json`` means JSON bodies, whose schema is inferred from a sample of messages.
        dead_letters: folder for undecodable messages; None for a folder beside the table.
        follow: whether to continue with messages that arrive during the export, until the user
            interrupts it.
        interval: seconds between two steps of an export with `follow`.
        moved: whether to accept a store whose path has changed since the last export.
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
    """An export that is prepared but not started."""

    target: Target
    folder: OutputFolder
    options: TableOptions

    def check(self) -> None:
        """Check stores and destination without changing a file."""
        read, table = self.target.read, self.target.table
        locations = [layout.root for layout in open_stores(read).values()]
        check_apart(self.folder.location, locations, read.config)
        if (letters := self.target.dead_letters) is not None:
            check_apart(letters.folder.location, locations, read.config)
            _check_letters_apart(table, letters)
        state = table.look()
        if state is None:
            _check_free(self.folder, table)
        self.target.look_at_letters(state)

    def run(
        self,
        spark: SparkSession,
        *,
        progress: Progress | None = None,
        on_commit: Callable[[TableSummary], None] | None = None,
    ) -> TableSummary:
        """Run the export on Spark; see :func:`export_delta`."""
        name = f"export to {self.target.table.name}"
        run = partial(run_tasks, spark, name, weight=attrgetter("length"), progress=progress)
        return self.run_with(run, on_commit=on_commit)

    def run_with(
        self, run: RunTasks, *, on_commit: Callable[[TableSummary], None] | None = None
    ) -> TableSummary:
        """Run the export; ``run`` is a function that runs tasks."""
        began = time.monotonic()
        self.check()
        target, follow = self.target, self.options.follow
        tables = [target.table, *([target.dead_letters] if target.dead_letters else [])]
        own = Run(self.folder, tables)
        with own.locked():
            steps = Advance(target, own, run)
            if not follow:
                steps.to_what_is_there()
            while True:
                while steps.step():
                    if on_commit is not None:
                        on_commit(replace(steps.done))
                if not follow or steps.is_stopped:
                    break
                time.sleep(self.options.interval)
            steps.settle()
        steps.done.seconds = time.monotonic() - began
        return steps.done


# ------------------------------------------------------------------------------------------ Delta
def export_delta(
    spark: SparkSession,
    stores: Stores,
    dest: str | os.PathLike[str],
    options: ReadOptions | Mapping[str, str] | None = None,
    *,
    table_storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    on_commit: Callable[[TableSummary], None] | None = None,
    **table_options: Any,
) -> TableSummary:
    """Add the messages of stores to a Delta table, each exactly once.

    The first export creates the table. A later export continues at the offsets of the last commit,
    even after a crash.

    Args:
        spark: a session whose workers reach the stores and ``dest`` under the same paths.
        options: options of the data source. ``maxBytesPerTrigger`` and ``maxOffsetsPerTrigger``
            limit the size of a commit. Filters and columns must equal the filters and columns of
            the first export into the table.
        table_storage_options: options of `deltalake` for a URL.
        progress: called with (bytes of log done, bytes in total); both count only the current
            commit.
        on_commit: called after each step with the totals so far.
        **table_options: see :class:`TableOptions`.

    Raises:
        CorruptFrame: if a log is damaged, and the options do not make the export skip damage or
            stop at damage. The table keeps the state of its last commit.
        UsageError: if an option is invalid, or if filters, columns, partitions or decoding differ
            from the first export into the table.
        StoreNotFound: if a path is not a store.
        StoreUnavailable: if another export is running in ``dest``, or ``dest`` cannot be written.
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
    """Prepare :func:`export_delta`; raise UsageError for an invalid option or a missing package."""
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
    on_commit: Callable[[TableSummary], None] | None = None,
    **table_options: Any,
) -> TableSummary:
    """Add the messages of stores to an Iceberg table, each exactly once, like :func:`export_delta`.

    Args:
        dest: folder for the catalog and for one folder per table; several tables can share `dest`.
        table: ``NAMESPACE.TABLE``; the table of dead letters is ``NAMESPACE.TABLE_dead_letters``.
        catalog: properties of a catalog, with `pyiceberg`'s names; None for SQLite in
            ``dest/catalog.db``.
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
    """Prepare :func:`export_iceberg`; raise UsageError for invalid options or a missing package."""
    chosen = _chosen(table_options)
    folder = OutputFolder(dest, chosen.dest_storage_options)
    if catalog is None and not folder.is_local:
        raise UsageError(
            f"{folder.location}: the default catalog (SQLite) needs a local folder: give catalog"
        )
    letters = None
    if chosen.dead_letters is not None:
        letters = OutputFolder(chosen.dead_letters, chosen.dest_storage_options)
    target = _target(
        stores,
        options,
        chosen,
        Iceberg(folder, table, catalog),
        Iceberg(folder, f"{table}{DEAD_LETTERS}", catalog, letters),
    )
    return TableExport(target=target, folder=folder, options=chosen)


# ---------------------------------------------------------------------------------------- details
def _chosen(given: Mapping[str, Any]) -> TableOptions:
    try:
        chosen = TableOptions(**given)
    except TypeError as error:
        own = {field.name for field in fields(TableOptions)}
        for name in given.keys() - own:
            if is_read_option(name):
                raise UsageError(
                    f"{name}: this is an option of the read: pass options={{{name!r}: ...}}"
                ) from None
        raise UsageError(str(error).partition(" ")[2]) from None
    interval = arguments.seconds(chosen.interval, "interval")
    if interval <= 0:
        raise UsageError(f"interval: takes seconds > 0, not {chosen.interval}")
    return replace(chosen, interval=interval)


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
        raise UsageError("endingOffsets: not for tables: bound the export by time instead")
    decode = chosen.decode
    if isinstance(decode, str):
        decode = parse_decode_options(decode)
    columns = list(read.names)
    if read.is_kafka:
        if decode is not None:
            raise UsageError("decode: schema=kafka has a column value already: use schema=native")
        columns += ["store_timestamp"] if "timestamp" in columns else []
    if decode is not None:
        # Decoders can read only decompressed bodies.
        read = replace(read, decompress=True)
    elif chosen.dead_letters is not None:
        raise UsageError("dead letters: only with decode: without it no body can fail")
    return Target(
        table=table,
        dead_letters=None if decode is None else letters,
        read=read,
        partition_by=check_partition_columns(chosen.partition_by, columns),
        decode=decode,
        moved=chosen.moved,
    )


def _check_letters_apart(table: Table, letters: Table) -> None:
    """Raise UsageError if the folder of one table is inside the folder of the other table.

    A cleanup of the outer table (Delta's ``vacuum``) would remove the files of the inner table.
    """
    places = [table.folder.location, letters.folder.location]
    if table.folder.is_local and letters.folder.is_local:
        places = [os.path.realpath(place) for place in places]
    one, other = (f"{place}/" for place in places)
    if one.startswith(other) or other.startswith(one):
        raise UsageError(
            f"{letters.folder.location}: overlaps with the folder of the table, "
            f"{table.folder.location}: give a folder outside of it for the dead letters"
        )


def _check_free(folder: OutputFolder, table: Table) -> None:
    """Raise UsageError if the destination of a new table holds files that no export wrote.

    If the new table is an Iceberg table, other Iceberg tables in the destination are allowed,
    unless the catalog of these tables is lost. A new table would have all messages again.
    """
    below = table.folder.location.removeprefix(folder.location).lstrip("/")
    ours: tuple[str, ...] = (CONTROL,)
    paths = list(folder.files())
    known = sorted(path for path in paths if path.endswith(".metadata.json"))
    if known and isinstance(table, Iceberg) and table.lacks_catalog():
        newest = [path for path in known if path.startswith(f"{below}/")] or known
        raise UsageError(
            f"{folder.location}/{CATALOG_FILE}: the catalog is missing or empty, but the folder "
            f"has Iceberg tables ({newest[-1]}): restore the catalog, or register the newest "
            "metadata file of each table in it (register_table of pyiceberg). If another catalog "
            "has the tables, pass --catalog (catalog). For a new table, give another folder"
        )
    runs = [run for path in paths if (run := noted_run(path)) is not None]
    if below:
        ours += (f"{below}/", f"{below}{DEAD_LETTERS}/", *table_folders(paths))
    for path in paths:
        name = path.rpartition("/")[2]
        is_part = name.startswith("part-") and name.endswith(".parquet")
        # If the new table is `folder` itself, allow every part file. If the new table is in a
        # subfolder, allow outside of tables only the part files of exports that have left a note:
        # if an export crashed before it created its table, it has left a note, but `table_folders`
        # does not list its folder.
        is_part = is_part and (not below or any(is_of_run(path, run) for run in runs))
        if not (path.startswith(ours) or path == CATALOG_FILE or is_part):
            raise UsageError(
                f"{folder.location}: holds other files ({path}): give another folder for the export"
            )
