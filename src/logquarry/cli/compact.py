"""``logquarry compact``: the small files of many exports into larger ones."""

from __future__ import annotations

from typing import Any

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output


@click.command()
@click.argument("dest", metavar="DEST")
@click.option(
    "--target-size",
    metavar="SIZE",
    help="Of a file, about.  [default: 256m, for Delta what the table's settings say]",
)
@click.option(
    "--table", metavar="NAMESPACE.TABLE", help="Of Iceberg.  [default: logquarry.messages]"
)
@click.option(
    "--catalog",
    multiple=True,
    metavar="NAME=VALUE",
    help="Properties of an Iceberg catalog.  [default: SQLite in DEST/catalog.db]",
)
@click.option(
    "--spark-master", metavar="URL", help="Merge on Spark, as local[*].  [default: in this process]"
)
@options.quiet
def compact(
    dest: str,
    target_size: str | None,
    table: str | None,
    catalog: tuple[str, ...],
    spark_master: str | None,
    quiet: bool,
) -> None:
    """Merge the small files that exports have made: Parquet, or a Delta or Iceberg table.

    No rows change. An export may follow into a table meanwhile, whose old files stay for its older
    versions, until its own vacuum removes them. In a folder of Parquet the larger files take the
    place of the small ones.
    """
    from logquarry.cli.export import named_values
    from logquarry.errors import UsageError
    from logquarry.spark.compaction import compact as merge
    from logquarry.text import byte_count

    out = Output(quiet=quiet)
    try:
        size = None if target_size is None else byte_count(target_size)
    except UsageError as error:
        raise UsageError(f"--target-size {error}") from None
    given: dict[str, Any] = {"table": table, "catalog": named_values(catalog)}
    if spark_master is None:
        done = merge(dest, target_size=size, **given)
    else:
        from logquarry.cli.spark import session

        with session(spark_master) as spark, out.progress("merging", in_bytes=True) as progress:
            done = merge(dest, target_size=size, spark=spark, progress=progress, **given)
    out.note(
        f"merged {text.plural(done.files_before, 'file')} ({text.size_text(done.bytes_before)}) "
        f"into {text.plural(done.files_after, 'file')} ({text.size_text(done.bytes_after)})"
    )
