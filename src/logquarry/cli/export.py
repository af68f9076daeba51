"""``logquarry export`` and ``compact``: export messages, and merge the files of exports."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from logquarry import text
from logquarry.cli import messages, options, output
from logquarry.cli import spark as with_spark
from logquarry.cli.output import Output, encoded, writing_to
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.log.batches import OnDamage
    from logquarry.spark.lakehouse.advance import TableSummary
    from logquarry.spark.lakehouse.export import TableExport
    from logquarry.spark.options import ReadOptions


KINDS: Final = ("delta", "iceberg")

_STDOUT: Final = "-"

_TABLE = click.option(
    "--table",
    metavar="NAMESPACE.TABLE",
    help="Iceberg: name of the table in the catalog.  [default: logquarry.messages]",
)
_CATALOG = click.option(
    "--catalog",
    multiple=True,
    metavar="NAME=VALUE",
    help="Iceberg: a property of the catalog.  [default: SQLite in DEST/catalog.db]",
)


def _refuse(flags: Mapping[str, Any], kind: str, takers: str) -> None:
    """Raise UsageError if a flag is set: only the formats in ``takers`` accept these flags."""
    for name, value in flags.items():
        if value:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for --format {takers}, not {kind}")


def prepared(
    kind: str,
    stores: Sequence[str],
    target: str,
    read: ReadOptions,
    partition_by: Sequence[str],
    *,
    table: str | None,
    catalog: Sequence[str],
    interval: float | None,
    max_bytes: str | None,
    decode: str | None,
    decode_schema: str | None,
    decode_message: str | None,
    **flags: Any,
) -> TableExport:
    """Make the export that the options describe, and check its stores and destination.

    These checks come before the start of Spark, because this start takes seconds.
    """
    from logquarry.spark.decode import parse_decode_options
    from logquarry.spark.lakehouse.export import (
        DEFAULT_INTERVAL,
        DEFAULT_TABLE,
        delta_export,
        iceberg_export,
    )

    most = options.parsed("--max-bytes", max_bytes, text.byte_count)
    read = replace(read, max_bytes=most or read.max_bytes)
    if interval is not None and not flags["follow"]:
        raise UsageError("--interval needs --follow")
    flags |= {"partition_by": partition_by, "interval": interval or DEFAULT_INTERVAL}
    flags["decode"] = parse_decode_options(decode or "raw", decode_schema, decode_message)
    if kind == "delta":
        _refuse({"table": table, "catalog": catalog}, kind, "iceberg")
        export = delta_export(stores, target, read, **flags)
    else:
        name, properties = table or DEFAULT_TABLE, named_values(catalog)
        export = iceberg_export(stores, target, read, table=name, catalog=properties, **flags)
    export.check()
    return export


def named_values(words: Sequence[str]) -> dict[str, str] | None:
    """Parse the values of ``--catalog NAME=VALUE``; None without values."""
    for number, word in enumerate(words, 1):
        if re.match(r"[^=]+=", word) is None:
            # The word can be a credential, so do not show it.
            raise UsageError(f"--catalog takes NAME=VALUE: value {number} has no name or no =")
    return dict(word.split("=", 1) for word in words) or None


def export_table(out: Output, export: TableExport, master: str) -> TableSummary:
    """Run the export on Spark, and print the number of added messages."""
    follow = export.options.follow
    where = export.target.table.folder.location

    def note_commit(done: TableSummary) -> None:
        out.note(
            f"{where}: {text.plural(done.summary.total.messages, 'message')} in "
            f"{text.plural(done.commits, 'commit')} so far"
        )

    with writing_to(where), with_spark.session(master) as session:
        if follow:
            done = export.run(session, on_commit=note_commit)
        else:
            with out.progress("exporting", in_bytes=True) as progress:
                done = export.run(session, progress=progress)
    out.note(
        f"added {text.plural(done.messages, 'message')} to {where}: "
        f"{text.plural(done.files, 'file')}, {text.size_text(done.bytes)}, in {done.seconds:.1f} s"
    )
    if done.dead_messages:
        count = text.plural(done.dead_messages, "body", "bodies")
        out.note(f"{count} did not decode: see {done.dead_letters}")
    return done


# ------------------------------------------------------------------------------------------ export
@click.command()
@options.stores
@click.option(
    "--to",
    "target",
    metavar="DEST",
    required=True,
    help="Parquet and tables: a folder or URL. JSON lines: a file, or - for stdout.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["parquet", "jsonl", *KINDS]),
    default="parquet",
    help="delta and iceberg need Spark.",
)
@click.option(
    "--spark-master",
    metavar="URL",
    help="The Spark master's URL.  [default: local[*]; Parquet without PySpark: this process]",
)
@click.option(
    "--partition-by",
    metavar="topic,day",
    help="Parquet and tables: partition by any of broker, topic, queue_id and day (of the store "
    "time, UTC).  [default: no partitions]",
)
@click.option(
    "--columns",
    metavar="topic,body",
    help="Parquet and tables: only these columns, in this order.  [default: all columns]",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Tables: after the export, add new messages as they are stored, until Ctrl-C.",
)
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="With --follow: seconds between two checks for new messages.  [default: 10]",
)
@click.option(
    "--max-bytes",
    metavar="SIZE",
    help="Tables: maximum bytes of log in one commit: 4g.  [default: no limit]",
)
@click.option(
    "--decode",
    metavar="raw|json|avro|protobuf",
    help="Tables: decode bodies into the column value.  [default: raw, no such column]",
)
@click.option(
    "--decode-schema",
    metavar="FILE",
    help="With --decode. json: a DDL string, or a file with a DDL or a JSON Schema (default: "
    "inferred from a sample). avro: an .avsc file. protobuf: a descriptor set of protoc.",
)
@click.option(
    "--decode-message",
    metavar="NAME",
    help="With --decode protobuf: full name of the message type.",
)
@click.option(
    "--dead-letters",
    metavar="DEST",
    help="With --decode: table for bodies that do not decode.  [default: beside the table]",
)
@_TABLE
@_CATALOG
@click.option(
    "--schema",
    type=click.Choice(["native", "kafka"]),
    help="Tables: logquarry's columns, or those of Spark's Kafka source.  [default: native]",
)
@click.option(
    "--moved",
    is_flag=True,
    help="Tables: accept that a store has another path than at the last export.",
)
@options.filters
@options.on_damage
@options.decompress
@options.config
@options.quiet
def export(
    stores: tuple[str, ...],
    target: str,
    kind: str,
    spark_master: str | None,
    partition_by: str | None,
    columns: str | None,
    schema: str | None,
    filters: options.Filters,
    on_damage: OnDamage,
    decompress: bool,
    config: str | None,
    out: Output,
    **flags: Any,
) -> None:
    """Export messages to Parquet, JSON lines or a table.

    Tables are Delta or Iceberg. STORE is a folder, a URL, or a glob of several stores. A broker may
    have the store open. The column broker contains the name of the store's folder.

    If you repeat an export to Parquet or JSON lines, it replaces the files. If you repeat an export
    to a table, it adds only the messages that the table does not have yet. An interrupted export
    leaves no incomplete file.

    Example: logquarry export /data/store --to parquet-folder --topic orders
    """
    if kind not in KINDS:
        _refuse({**flags, "schema": schema}, kind, " and ".join(KINDS))
    if kind == "jsonl":
        if partition_by is not None or columns is not None:
            raise UsageError("--partition-by and --columns are for Parquet and tables, not jsonl")
        _jsonl(out, stores, target, filters, on_damage, config, decompress=decompress)
        return
    if target == _STDOUT:
        raise UsageError(
            f"--format {kind} cannot write to stdout: give a folder, or --format jsonl"
        )
    if filters.limit is not None:
        raise UsageError("--limit is for --format jsonl: Spark's tasks do not share a count")
    from logquarry.config import StoreConfig
    from logquarry.log.schema import HEADERS
    from logquarry.spark.export import check_apart
    from logquarry.spark.options import ReadOptions
    from logquarry.spark.output import OutputFolder
    from logquarry.spark.parquet import check_partition_columns
    from logquarry.spark.tasks import open_stores

    read = ReadOptions(
        paths=(),
        wanted=filters.message_filter(),
        on_damage=on_damage,
        decompress=decompress,
        config=options.store_config(config) or StoreConfig(),
    )
    names = None if columns is None else _words(columns)
    if schema == "kafka":
        read = replace(read, schema="kafka", include_headers=HEADERS in (names or ()))
    if names is not None:
        read = replace(read, columns=read.check_names(names))
    folders = _words(partition_by or "")
    if kind in KINDS:
        export = prepared(kind, stores, target, read, folders, **flags)
        added = export_table(out, export, spark_master or "local[*]")
        messages.report_damage(out, added.summary.damage, read.on_damage)
        return
    # Check the arguments before Spark starts: the start takes seconds, and the user should see an
    # error at once.
    check_partition_columns(folders, read.names)
    paths = [layout.root for layout in open_stores(replace(read, paths=stores)).values()]
    check_apart(OutputFolder(target).location, paths, read.config)
    with writing_to(target), with_spark.session_if_installed(spark_master) as session:
        done = with_spark.export(out, session, paths, target, read, folders)
    messages.report_damage(out, done.summary.damage, read.on_damage)


def _words(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


# --------------------------------------------------------------------------------------- JSON lines
def _jsonl(
    out: Output,
    stores: Sequence[str],
    target: str,
    filters: options.Filters,
    on_damage: OnDamage,
    config: str | None,
    *,
    decompress: bool,
) -> None:
    from logquarry.log.layout import StoreLayout
    from logquarry.log.location import broker_names, find_stores
    from logquarry.read.bulk import warn_of_unknown_topics

    wanted = filters.message_filter()
    settings = options.store_config(config)
    paths = find_stores(stores)
    # Open all stores before the first write, so that the command leaves no file if a path is wrong.
    readers = [
        messages.MessageReader(
            StoreLayout.open(path, settings),
            wanted=wanted,
            on_damage=on_damage,
            broker=name,
            decompress=decompress,
        )
        for path, name in zip(paths, broker_names(paths), strict=True)
    ]
    path = None if target == _STDOUT else output.check_target(target, paths, settings)
    warn_of_unknown_topics([reader.layout for reader in readers], wanted)
    if path is None:
        count, length = _write(out, readers, sys.stdout.buffer, filters.limit)
        sys.stdout.flush()
    else:
        with output.staged(path) as file:
            count, length = _write(out, readers, file, filters.limit)
    for reader in readers:
        messages.report_damage(out, reader.damage.spans, on_damage)
    what = f"{text.plural(count, 'message')}, {text.size_text(length)}"
    out.note(f"wrote {what}" + (f" to {target}" if target != _STDOUT else ""))


def _write(
    out: Output, readers: Sequence[messages.MessageReader], file: BinaryIO, limit: int | None
) -> tuple[int, int]:
    from logquarry.log.frames import decoded

    count = length = 0
    for reader in readers:
        broker = text.printable(reader.decoding.broker)
        with out.progress(f"exporting {broker}", in_bytes=True) as progress:
            left = None if limit is None else limit - count
            for lines in decoded(messages.limited(reader.runs(progress), left), reader.lines):
                for data in encoded(lines):
                    file.write(data)
                    length += len(data)
                count += len(lines)
    return count, length


# ----------------------------------------------------------------------------------------- compact
@click.command()
@click.argument("dest", metavar="DEST")
@click.option(
    "--target-size",
    metavar="SIZE",
    help="Approximate size of a merged file: 256m.  [default: 256m; Delta: the table's setting]",
)
@_TABLE
@_CATALOG
@options.spark_master
@options.quiet
def compact(
    dest: str,
    target_size: str | None,
    table: str | None,
    catalog: tuple[str, ...],
    spark_master: str | None,
    out: Output,
) -> None:
    """Merge the small files of an export.

    DEST is a folder of Parquet, or the folder or URL of a Delta or Iceberg table. The rows stay the
    same. In a folder of Parquet, the merged files replace the small files. In a table, older
    versions of the table still use the small files, so these files remain until you vacuum the
    table. During a compaction, an export may write to the table.

    Example: logquarry compact parquet-folder
    """
    from logquarry.spark.compaction import compact as merge

    size = options.parsed("--target-size", target_size, text.byte_count)
    session = nullcontext() if spark_master is None else with_spark.session(spark_master)
    progress_bar = out.progress("merging", in_bytes=True)
    with writing_to(dest), session as spark, progress_bar as progress:
        done = merge(
            dest,
            target_size=size,
            spark=spark,
            table=table,
            catalog=named_values(catalog),
            progress=progress,
        )
    out.note(
        f"merged {text.plural(done.files_before, 'file')} ({text.size_text(done.bytes_before)}) "
        f"into {text.plural(done.files_after, 'file')} ({text.size_text(done.bytes_after)})"
    )
