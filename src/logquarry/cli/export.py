"""``logquarry export``: messages as Parquet or into tables, through Spark, or as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

import click

from logquarry import text
from logquarry.cli import export_table as tables
from logquarry.cli import options
from logquarry.cli.output import Output, encoded
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.cli.reading import Reader

_STDOUT = "-"


@click.command()
@click.argument("stores", metavar="STORE...", nargs=-1, required=True)
@click.option(
    "--to",
    "target",
    metavar="DEST",
    required=True,
    help="A folder or URL for Parquet and tables; a file, or - for stdout, for JSON lines.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "jsonl", *tables.KINDS]),
    default="parquet",
    show_default=True,
    help="Parquet and tables are written by Spark, JSON lines without.",
)
@click.option(
    "--spark-master",
    metavar="URL",
    default="local[*]",
    show_default=True,
    help="Where Spark runs.",
)
@click.option(
    "--partition-by",
    metavar="topic,day",
    help="In folders of some of broker, topic, queue_id, day (of the store time, UTC).",
)
@click.option("--columns", metavar="topic,body", help="Only these, in this order (not JSON lines).")
@tables.table_flags
@options.filters
@options.on_damage
@options.decompress
@options.config
@options.quiet
def export(
    stores: tuple[str, ...],
    target: str,
    kind: str,
    spark_master: str,
    partition_by: str | None,
    columns: str | None,
    flags: tables.TableFlags,
    filters: options.Filters,
    on_damage: str | None,
    decompress: bool,
    config: str | None,
    quiet: bool,
) -> None:
    """Write the messages of stores as Parquet or JSON lines, or into a table of a lakehouse.

    A store's folder names its broker in the column of that name. What is interrupted leaves no
    half-written file. Parquet and JSON lines that are exported again replace what was written; a
    table (delta, iceberg) gets what it has not yet, each message once.
    """
    out = Output(quiet=quiet)
    if kind not in tables.KINDS:
        flags.refuse(kind)
    if kind == "jsonl":
        if partition_by is not None or columns is not None:
            raise UsageError("--partition-by and --columns are for Parquet and tables")
        _jsonl(out, stores, target, filters, on_damage, config, decompress=decompress)
        return
    if target == _STDOUT:
        raise UsageError("Parquet and tables go to a folder; only JSON lines go to stdout")
    if filters.limit is not None:
        raise UsageError("--limit is for JSON lines: Spark's tasks do not count together")
    from dataclasses import replace

    from logquarry.cli import reading, spark
    from logquarry.config import StoreConfig
    from logquarry.files.layout import StoreLayout
    from logquarry.files.names import find_stores
    from logquarry.scan.kafka import HEADERS
    from logquarry.spark.options import ReadOptions

    read = ReadOptions(
        paths=(),
        wanted=filters.message_filter(),
        on_damage=options.damage_policy(on_damage),
        decompress=decompress,
        config=options.store_config(config) or StoreConfig(),
    )
    names = None if columns is None else _words(columns)
    if flags.schema == "kafka":
        read = replace(read, schema="kafka", include_headers=HEADERS in (names or ()))
    if names is not None:
        read = replace(read, columns=read.check_names(names))
    folders = _words(partition_by or "")
    if kind in tables.KINDS:
        export = tables.prepared(kind, stores, target, read, folders, flags)
        added = tables.export_table(out, export, spark_master)
        reading.tell_damage(out, added.summary.damage, read.on_damage)
        return
    paths = find_stores(stores)
    for path in paths:
        # A wrong path is told at once, and not after Spark has started.
        StoreLayout.open(path, read.config)
    with spark.session(spark_master) as session:
        done = spark.export(out, session, paths, target, read, folders)
    reading.tell_damage(out, done.summary.damage, read.on_damage)


def _words(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# --------------------------------------------------------------------------------------- JSON lines
def _jsonl(
    out: Output,
    stores: Sequence[str],
    target: str,
    filters: options.Filters,
    on_damage: str | None,
    config: str | None,
    *,
    decompress: bool,
) -> None:
    from logquarry.cli import files, reading
    from logquarry.files.layout import StoreLayout
    from logquarry.files.names import broker_names, find_stores

    policy = options.damage_policy(on_damage)
    wanted = filters.message_filter()
    settings = options.store_config(config)
    paths = find_stores(stores)
    # All of them are opened before anything is written.
    readers = [
        reading.reader(
            StoreLayout.open(path, settings),
            wanted=wanted,
            on_damage=policy,
            broker=name,
            decompress=decompress,
        )
        for path, name in zip(paths, broker_names(paths), strict=True)
    ]
    path = None if target == _STDOUT else files.check_target(target, paths)
    if path is None:
        count, length = _write(out, readers, sys.stdout.buffer, filters.limit)
        sys.stdout.flush()
    else:
        with files.staged(path) as file:
            count, length = _write(out, readers, file, filters.limit)
    for reader in readers:
        reading.tell_damage(out, reader.damage.spans, policy)
    what = f"{text.plural(count, 'message')}, {text.size_text(length)}"
    out.note(f"wrote {what}" + (f" to {text.printable(target)}" if target != _STDOUT else ""))


def _write(
    out: Output, readers: Sequence[Reader], file: BinaryIO, limit: int | None
) -> tuple[int, int]:
    """Write messages as lines. Returns how many, and the bytes."""
    from logquarry.cli import reading
    from logquarry.scan import json_lines

    count = length = 0
    for reader in readers:
        broker = text.printable(reader.decoding.broker)
        with out.progress(f"exporting {broker}", in_bytes=True) as progress:
            left = None if limit is None else limit - count
            for run in reading.cut(reader.runs(progress), left):
                for data in encoded(json_lines.lines(run.window, run.rows, reader.decoding)):
                    file.write(data)
                    length += len(data)
                count += len(run.rows)
    return count, length
