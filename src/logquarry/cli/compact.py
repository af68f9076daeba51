"""``logquarry compact``: the small files of many exports into larger ones."""

from __future__ import annotations

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output


@click.command()
@click.argument("dest", metavar="DEST")
@click.option(
    "--target-size",
    metavar="SIZE",
    help="Of a file, about, as 256m.  [default: what the table's settings say]",
)
@options.quiet
def compact(dest: str, target_size: str | None, quiet: bool) -> None:
    """Merge the small files of a Delta table that exports have made, in one commit.

    No rows change, and an export may follow into the table meanwhile. The old files stay for older
    versions of the table, until its own vacuum removes them.
    """
    from logquarry.errors import UsageError
    from logquarry.spark.lakehouse.compact import compact as merge
    from logquarry.values import byte_count

    out = Output(quiet=quiet)
    try:
        size = None if target_size is None else byte_count(target_size)
    except UsageError as error:
        raise UsageError(f"--target-size {error}") from None
    done = merge(dest, target_size=size)
    out.note(
        f"merged {text.plural(done.files_before, 'file')} ({text.size_text(done.bytes_before)}) "
        f"into {text.plural(done.files_after, 'file')} ({text.size_text(done.bytes_after)})"
    )
