"""``logquarry export --format delta`` and ``iceberg``: options of their own, and what is told."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output, encoded
from logquarry.errors import UsageError

if TYPE_CHECKING:
    from logquarry.cli.reading import Reader
    from logquarry.spark.lakehouse.advance import Done
    from logquarry.spark.lakehouse.export import TableExport, TableSummary
    from logquarry.spark.options import ReadOptions


KINDS = ("delta", "iceberg")

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--follow", is_flag=True, help="Go on with what comes, until interrupted (tables only)."
    ),
    click.option(
        "--interval",
        metavar="SECONDS",
        type=click.FloatRange(min=0, min_open=True),
        help="Between two looks at the stores that are followed.  [default: 10]",
    ),
    click.option(
        "--max-bytes",
        metavar="SIZE",
        help="Most bytes of log in one commit to a table, as 4g.  [default: all there is]",
    ),
    click.option(
        "--decode",
        metavar="raw|json|avro|protobuf",
        help="Bodies as the column value, too (tables only).",
    ),
    click.option(
        "--decode-schema",
        metavar="FILE",
        help="For json a DDL, or a file with one or with a JSON Schema (default: from a sample); "
        "an .avsc; a descriptor set of protoc.",
    ),
    click.option("--decode-message", metavar="NAME", help="Full name of the Protobuf message."),
    click.option(
        "--dead-letters",
        metavar="DEST",
        help="Table of bodies that do not decode.  [default: beside the table]",
    ),
    click.option(
        "--table",
        metavar="NAMESPACE.TABLE",
        help="In the Iceberg catalog.  [default: logquarry.messages]",
    ),
    click.option(
        "--catalog",
        multiple=True,
        metavar="NAME=VALUE",
        help="Properties of an Iceberg catalog.  [default: SQLite in DEST/catalog.db]",
    ),
    click.option(
        "--schema",
        type=click.Choice(["native", "kafka"]),
        help="Our columns, or those of Spark's Kafka source (tables only).  [default: native]",
    ),
    click.option("--moved", is_flag=True, help="A store lies elsewhere than at the export before."),
)


class TableFlags(NamedTuple):
    """What the options of :func:`table_flags` say, word for word."""

    follow: bool = False
    interval: float | None = None
    max_bytes: str | None = None
    decode: str | None = None
    decode_schema: str | None = None
    decode_message: str | None = None
    dead_letters: str | None = None
    table: str | None = None
    catalog: tuple[str, ...] = ()
    schema: str | None = None
    moved: bool = False

    def refuse(self, kind: str, *names: str) -> None:
        """Raises UsageError for options that make no sense for a format: these, or all."""
        for name in names or self._fields:
            if getattr(self, name):
                takers = "iceberg" if names else " and ".join(KINDS)
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} is for --format {takers}, not {kind}")


def table_flags(command: _Command) -> Callable[..., Any]:
    """Give a command the options of tables, as its argument ``flags``."""

    @functools.wraps(command)
    def bundled(**arguments: Any) -> Any:
        own = TableFlags(**{name: arguments.pop(name) for name in TableFlags._fields})
        return command(flags=own, **arguments)

    for option in reversed(_OPTIONS):
        bundled = option(bundled)
    return bundled


def prepared(
    kind: str,
    stores: Sequence[str],
    target: str,
    read: ReadOptions,
    partition_by: Sequence[str],
    flags: TableFlags,
) -> TableExport:
    """The export that the options want, looked at and not begun.

    Raises:
        UsageError: if they make no sense, or a package is missing.
    """
    from dataclasses import replace

    from logquarry.spark.decode import parse_decode_options
    from logquarry.spark.lakehouse.export import (
        DEFAULT_INTERVAL,
        DEFAULT_TABLE,
        delta_export,
        iceberg_export,
    )
    from logquarry.text import byte_count

    if flags.max_bytes is not None:
        try:
            read = replace(read, max_bytes=byte_count(flags.max_bytes))
        except UsageError as error:
            raise UsageError(f"--max-bytes {error}") from None
    if flags.interval is not None and not flags.follow:
        raise UsageError("--interval goes with --follow")
    common: dict[str, Any] = {
        "partition_by": partition_by,
        "decode": parse_decode_options(
            flags.decode or "raw", flags.decode_schema, flags.decode_message
        ),
        "dead_letters": flags.dead_letters,
        "follow": flags.follow,
        "interval": flags.interval or DEFAULT_INTERVAL,
        "moved": flags.moved,
    }
    if kind == "delta":
        flags.refuse(kind, "table", "catalog")
        export = delta_export(stores, target, read, **common)
    else:
        export = iceberg_export(
            stores,
            target,
            read,
            table=flags.table or DEFAULT_TABLE,
            catalog=named_values(flags.catalog),
            **common,
        )
    export.check()
    return export


def named_values(words: Sequence[str]) -> dict[str, str] | None:
    """What ``--catalog NAME=VALUE`` says, as often as it was given; None for not at all."""
    for word in words:
        if re.match(r"[^=]+=", word) is None:
            raise UsageError(f"--catalog takes NAME=VALUE, not {word!r}")
    return dict(word.split("=", 1) for word in words) or None


def export_table(out: Output, export: TableExport, master: str) -> TableSummary:
    """Have Spark do it, and tell what was added."""
    from logquarry.cli import spark

    follow = export.options.follow
    where = text.printable(export.target.table.folder.location)

    def told(done: Done) -> None:
        if follow:
            out.note(
                f"{where}: {text.plural(done.summary.total.messages, 'message')} in "
                f"{text.plural(done.commits, 'commit')} so far"
            )

    with spark.session(master) as session:
        if follow:
            done = export.run(session, on_commit=told)
        else:
            with out.progress("exporting", in_bytes=True) as progress:
                done = export.run(session, progress=progress)
    out.note(
        f"added {text.plural(done.messages, 'message')} to {where}: "
        f"{text.plural(done.files, 'file')}, {text.size_text(done.bytes)}, in {done.seconds:.1f} s"
    )
    if done.dead_messages:
        assert done.dead_letters is not None
        out.note(
            f"{text.plural(done.dead_messages, 'body', 'bodies')} did not decode: see "
            f"{text.printable(done.dead_letters)}"
        )
    return done


# --------------------------------------------------------------------------------------------------
# ``logquarry export``: messages as Parquet or into tables, through Spark, or as JSON lines.

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
    type=click.Choice(["parquet", "jsonl", *KINDS]),
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
@table_flags
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
    flags: TableFlags,
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
    if kind not in KINDS:
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
    from logquarry.log.kafka import HEADERS
    from logquarry.log.layout import StoreLayout
    from logquarry.log.store_names import find_stores
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
    if kind in KINDS:
        export = prepared(kind, stores, target, read, folders, flags)
        added = export_table(out, export, spark_master)
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
    from logquarry.cli import output, reading
    from logquarry.log.layout import StoreLayout
    from logquarry.log.store_names import broker_names, find_stores

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
    path = None if target == _STDOUT else output.check_target(target, paths)
    if path is None:
        count, length = _write(out, readers, sys.stdout.buffer, filters.limit)
        sys.stdout.flush()
    else:
        with output.staged(path) as file:
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
    from logquarry.log import json_lines

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
