"""Spark as commands use it: a session for as long as it is needed, and its troubles in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from logquarry import text
from logquarry.cli.output import Output
from logquarry.errors import LogquarryError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from logquarry.spark.export import ExportSummary
    from logquarry.spark.options import ReadOptions


class SparkTrouble(LogquarryError):
    """Spark is not installed, or failed on its own account."""


@contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """A session that ends with the block, unless it was there before.

    Raises:
        SparkTrouble: if PySpark is not there, or Spark fails in the block.
    """
    try:
        from logquarry.spark import get_session
    except ModuleNotFoundError as error:
        raise SparkTrouble(str(error)) from error
    from pyspark import SparkContext

    # A session is active by thread, and a context in the whole process.
    running = SparkContext._active_spark_context is not None
    with _told_in_words():
        made = get_session(master=master)
        try:
            yield made
        finally:
            if not running:
                made.stop()


@contextmanager
def _told_in_words() -> Iterator[None]:
    """Spark's own exceptions as one of ours: their text is a page of Java."""
    try:
        yield
    except LogquarryError:
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise SparkTrouble(f"Spark failed: {' '.join(lines[:2])}") from error


def export(
    out: Output,
    spark: SparkSession,
    stores: Sequence[str],
    target: str,
    options: ReadOptions | None = None,
    partition_by: Sequence[str] = (),
) -> ExportSummary:
    """Write Parquet with a progress bar, and tell what was written."""
    from logquarry.spark.export import export_parquet

    with out.progress("exporting", in_bytes=True) as progress:
        done = export_parquet(
            spark, stores, target, options, partition_by=partition_by, progress=progress
        )
    out.note(
        f"wrote {text.plural(done.messages, 'message')} to {text.printable(done.location)}: "
        f"{text.plural(len(done.files), 'file')}, {text.size_text(done.bytes)}, in "
        f"{done.seconds:.1f} s"
    )
    return done
