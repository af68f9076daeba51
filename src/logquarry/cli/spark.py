"""Runs commands on Spark: makes sessions, and turns Spark's failures into one-line errors."""

from __future__ import annotations

import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logquarry import text
from logquarry.cli.output import FULL, Output
from logquarry.errors import LogquarryError, MissingExtra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from logquarry.spark.export import ExportSummary
    from logquarry.spark.options import ReadOptions

_OS_ERROR: Final = re.compile(r"OSError: \[Errno (\d{1,9})\]")


class SparkTrouble(LogquarryError):
    """Spark failed."""


@contextmanager
def session(master: str) -> Iterator[SparkSession]:
    """Yield a Spark session; at the end, stop it unless it existed before."""
    if find_spec("pyspark") is None:
        raise MissingExtra(
            "the command needs PySpark, which is not installed: pip install 'logquarry[spark]'"
        )
    from pyspark import SparkContext

    from logquarry.spark import get_session
    from logquarry.systems import held

    # Look for a running context and not for an active session: each thread has its own active
    # session, but the process has only one context.
    running = SparkContext._active_spark_context is not None
    with _spark_trouble():
        made: SparkSession | None = None
        try:
            yield (made := _in_other_thread(lambda: get_session(master=master)))
        except BaseException:
            if made is not None and not running:
                with held():
                    # Hide the errors that running tasks would log about the stopped session.
                    made.sparkContext.setLogLevel("OFF")
            raise
        finally:
            if made is not None and not running:
                with held():
                    made.stop()


@contextmanager
def session_if_installed(master: str | None) -> Iterator[SparkSession | None]:
    """Yield a session; yield None if no master is given and PySpark is not installed."""
    if master is None and find_spec("pyspark") is None:
        yield None
    else:
        with session(master or "local[*]") as made:
            yield made


def _in_other_thread(make: Callable[[], SparkSession]) -> SparkSession:
    # Start Spark in a second thread: in the main thread, Ctrl-C would not work during the start,
    # and PySpark would install a handler for Ctrl-C that can call the JVM at any moment.
    made: Future[SparkSession] = Future()

    def target() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=target, daemon=True, name="make-session").start()
    return made.result()


@contextmanager
def _spark_trouble() -> Iterator[None]:
    # Print only the cause, because the text of Spark's exceptions is a Java stack trace.
    try:
        yield
    except LogquarryError:
        raise
    except Exception as error:
        if isinstance(error, ConnectionError) and _was_raised_in_py4j(error):
            raise SparkTrouble(
                f"Spark's Java process does not answer ({error}). It did not start, or the system "
                "has ended it: check the free memory, and run the command again"
            ) from error
        if type(error).__module__.partition(".")[0] not in ("pyspark", "py4j"):
            raise
        from logquarry.spark.jobs import root_cause

        cause = root_cause(error)
        if (found := _OS_ERROR.match(cause)) and (number := int(found[1])) in FULL:
            # This error gives the command the right exit code (output.writing_to).
            raise OSError(number, os.strerror(number)) from error
        if hint := _missing_account():
            cause = f"{cause.rstrip('.')}. {hint}"
        raise SparkTrouble(f"Spark failed: {cause}") from error


def _missing_account() -> str:
    """Return a sentence if this user id has no account, as in some containers; else no text."""
    try:
        import pwd

        pwd.getpwuid(os.getuid())
    except KeyError:
        return (
            f"The user id {os.getuid()} has no entry in /etc/passwd, which Spark's Java process "
            "needs: add an entry, or run the command as another user"
        )
    except ImportError:
        pass
    return ""


def _was_raised_in_py4j(error: BaseException) -> bool:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any("py4j" in Path(file).parts for file in files)


def export(
    out: Output,
    spark: SparkSession | None,
    stores: Sequence[str],
    target: str,
    options: ReadOptions | None = None,
    partition_by: Sequence[str] = (),
) -> ExportSummary:
    """Export to Parquet with a progress bar, and print the number of written messages."""
    from logquarry.spark.export import export_parquet

    with out.progress("exporting", in_bytes=True) as progress:
        done = export_parquet(
            spark, stores, target, options, partition_by=partition_by, progress=progress
        )
    out.note(
        f"wrote {text.plural(done.messages, 'message')} to {done.location}: "
        f"{text.plural(len(done.files), 'file')}, {text.size_text(done.bytes)}, in "
        f"{done.seconds:.1f} s"
    )
    return done
