"""Spark as commands use it: a session for as long as it is needed, and its troubles in words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
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

    from logquarry.signals import held

    # A session is active by thread, and a context in the whole process.
    running = SparkContext._active_spark_context is not None
    with _told_in_words():
        made: SparkSession | None = None
        try:
            yield (made := _made(lambda: get_session(master=master)))
        except BaseException:
            if made is not None and not running:
                with held():
                    # Tasks that are still ending miss what the session takes with it.
                    made.sparkContext.setLogLevel("OFF")
            raise
        finally:
            if made is not None and not running:
                with held():
                    made.stop()


def _made(make: Callable[[], SparkSession]) -> SparkSession:
    """A session that is made in another thread, so that an interrupt need not wait for it.

    In this one PySpark would set a handler of its own for Ctrl-C, too, that calls the JVM wherever
    the program is just then.
    """
    made: list[SparkSession] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target, daemon=True, name="make-session")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


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
        from logquarry.spark.errors import root_cause

        raise SparkTrouble(f"Spark failed: {root_cause(error)}") from error


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
