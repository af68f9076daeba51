"""Many small files of exports made few, whatever kind of table they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logquarry.errors import StoreNotFound, UsageError
from logquarry.spark.compaction.folder import Compaction, compact_folder, is_export
from logquarry.spark.compaction.merging import (
    DEFAULT_TARGET_SIZE,
    Merged,
    MergeTask,
    RunMerges,
    merge,
    merge_here,
)
from logquarry.spark.jobs import run_tasks
from logquarry.spark.output import OutputFolder
from logquarry.units import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Compaction", "compact"]


def compact(
    dest: str | os.PathLike[str],
    *,
    target_size: int | None = None,
    spark: SparkSession | None = None,
    table: str | None = None,
    catalog: Mapping[str, str] | None = None,
    table_storage_options: Mapping[str, str] | None = None,
    dest_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Compaction:
    """Merge the small files that exports have made: Parquet, or a Delta or Iceberg table.

    No rows change, nor their order within a broker. An export to a table may follow meanwhile; one
    to Parquet has to wait.

    Args:
        dest: where the exports went: the folder.
        target_size: bytes of a file, about; files of more than half of that stay as they are.
            Default: 256 MiB, for Delta what the table's settings say.
        spark: a session whose workers merge; None to do it here. Delta is merged here, with all
            cores.
        table: ``NAMESPACE.TABLE`` of an Iceberg table, as it was exported.
        catalog: properties of its catalog, as they were for the export.
        table_storage_options: what `deltalake` takes to reach a URL.
        dest_storage_options: what the file system of ``dest`` takes, if it is a URL.
        progress: told how many bytes of files are merged, of how many.

    Raises:
        StoreNotFound: if no export has been there.
        UsageError: if no export of ours made it, an option has no effect, or a package is missing.
        StoreUnavailable: if somebody else is at work there, or has been meanwhile.
        CorruptFile: if a file is not what the table says of it; nothing has changed then.
    """
    if target_size is not None and target_size <= 0:
        raise UsageError(f"target_size: takes bytes, not {target_size}")
    folder = OutputFolder(dest, dest_storage_options)
    size = target_size or DEFAULT_TARGET_SIZE
    run = merge_here if spark is None else _on_spark(spark, folder, progress)
    if table is not None or catalog is not None or _is_iceberg(folder):
        from logquarry.spark.compaction.tables import compact_iceberg
        from logquarry.spark.lakehouse.export import DEFAULT_TABLE
        from logquarry.spark.lakehouse.iceberg import CATALOG_FILE, Iceberg

        name = table or DEFAULT_TABLE
        below = f"{folder.location}/{name.rpartition('.')[2]}"
        own = OutputFolder(below, dest_storage_options)
        file = Path(folder.location) / CATALOG_FILE
        return compact_iceberg(Iceberg(own, name, catalog, file), size, run)
    if any(name == "_delta_log" for name, _ in folder.names()):
        from logquarry.spark.compaction.tables import compact_delta
        from logquarry.spark.lakehouse.delta import Delta

        return compact_delta(Delta(folder, table_storage_options), target_size)
    if not is_export(folder):
        raise StoreNotFound(f"{folder.location}: no export has been there")
    return compact_folder(folder, size, run)


def _is_iceberg(folder: OutputFolder) -> bool:
    from logquarry.spark.lakehouse.iceberg import CATALOG_FILE

    return any(name == CATALOG_FILE for name, _ in folder.names())


def _on_spark(spark: SparkSession, folder: OutputFolder, progress: Progress | None) -> RunMerges:
    def run(tasks: Sequence[MergeTask]) -> list[tuple[Merged, ...]]:
        name = f"compact {folder.location}"
        return run_tasks(
            spark, name, tasks, merge, weight=lambda task: task.bytes, progress=progress
        )

    return run
