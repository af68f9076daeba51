"""Runs tasks in Spark's Python workers, or in this process, and returns their results.

Spark passes only the text of a Python exception from worker to driver. `explain` restores
logquarry's exceptions from this text; `root_cause` finds the cause of any other failure.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from logquarry import errors
from logquarry.arguments import Progress
from logquarry.errors import CorruptStore, LogquarryError, UsageError
from logquarry.format.frame import DamageKind
from logquarry.log.batches import BAD_COMPRESSION
from logquarry.log.walk import MISSING_FILE, TORN_TAIL
from logquarry.spark.tasks import LOST_END
from logquarry.spark.worker import settle, without_traceback
from logquarry.systems import held

if TYPE_CHECKING:
    from pyspark import RDD, Accumulator, SparkContext
    from pyspark.sql import SparkSession

_POLL_SECONDS = 0.1
_MOST_CANCEL_SECONDS = 30
"""Maximum seconds that the driver waits for the tasks of a cancelled job to stop."""

_SETTING = "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled"
_VARIABLE = "SPARK_SIMPLIFIED_TRACEBACK"
_changing = threading.Lock()

T = TypeVar("T")
R = TypeVar("R")


def context_of(spark: SparkSession) -> SparkContext:
    """Return the session's SparkContext; raise UsageError for a session of Spark Connect."""
    try:
        return spark.sparkContext
    except (AttributeError, NotImplementedError) as error:
        raise UsageError(
            "this job needs a classic Spark session; a session of Spark Connect reads and writes "
            "stores with format('rocketmq') only"
        ) from error


def _use_workers_of_queries(spark: SparkSession, tasks: RDD[R]) -> None:
    """Let tasks run in the same Python workers as the functions of Spark's queries.

    Spark reuses a worker only for tasks with the same environment variables, and it sets one more
    variable for queries. Without this call, a load starts two sets of workers: one for the query
    that stages its messages, and one for the job that appends them. Each set needs about two
    seconds of processor time on each executor.
    """
    if spark.conf.get(_SETTING, "true") != "true":
        return
    context = spark.sparkContext
    with _changing:
        # Replace the dictionary, because another thread may iterate over it.
        before = context.environment
        context.environment = {**before, _VARIABLE: "1"}
        try:
            # PySpark takes the variables when it makes the RDD of the JVM, for example for the id.
            tasks.id()
        finally:
            context.environment = before


def run_tasks(
    spark: SparkSession | None,
    name: str,
    tasks: Sequence[T],
    work: Callable[[T], R],
    *,
    weight: Callable[[T], int],
    progress: Progress | None = None,
    pause: Callable[[], None] = lambda: None,
) -> list[R]:
    """Run `work` on each task; return the results in the order of the tasks.

    Ctrl-C, or an exception from `progress` or `pause`, cancels the job.

    Args:
        spark: the session; None to run the tasks in this process, one after the other.
        work: called in a worker with a task. Tasks, `work` and results must be picklable.
        weight: returns a task's share of the progress, for example the task's bytes.
        progress: called on the driver with (weight of the finished tasks, total weight).
        pause: called on the driver several times a second; raise to cancel the job.

    Raises:
        LogquarryError: if a task raised a LogquarryError. If a task fails with any other error,
            Spark's exception for the failed job is raised.
    """
    if not tasks:
        return []
    total = sum(map(weight, tasks))
    if spark is None:
        found, done_here = [], 0
        for task in tasks:
            pause()
            found.append(work(task))
            done_here += weight(task)
            if progress is not None:
                progress(done_here, total)
        return found
    with held() as interrupts:
        from pyspark import InheritableThread

        context = context_of(spark)
        done = context.accumulator(0)
        pieces = [(task, weight(task)) for task in tasks]
        spread = context.parallelize(pieces, len(pieces))
        group = f"logquarry-{uuid.uuid4().hex}"
        outcome: Future[list[R]] = Future()

        def run() -> None:
            try:
                context.setJobGroup(group, name, interruptOnCancel=True)
                mapped = spread.map(partial(_worked, work, done))
                _use_workers_of_queries(spark, mapped)
                outcome.set_result(mapped.collect())
            except BaseException as error:
                outcome.set_exception(error)

        # The job runs in a second thread, so that the first thread can report progress and be
        # interrupted.
        InheritableThread(target=run, daemon=True).start()
        reported = -1
        try:
            while not wait([outcome], _POLL_SECONDS).done:
                interrupts.check()
                pause()
                if progress is not None and done.value != reported:
                    reported = done.value
                    progress(reported, total)
        except BaseException:
            context.cancelJobGroup(group)
            wait([outcome], _MOST_CANCEL_SECONDS)
            raise
    error = outcome.exception()
    if error is not None:
        ours = explain(error)
        if ours is not None:
            raise ours from error
        raise error
    if progress is not None:
        progress(total, total)
    return outcome.result()


def _worked(work: Callable[[T], R], done: Accumulator[int], piece: tuple[T, int]) -> R:
    task, weight = piece
    settle()
    with without_traceback():
        result = work(task)
    done.add(weight)
    return result


_OURS = re.compile(r"\blogquarry\.errors\.(\w+): (.*)")
_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = "Caused by: "
_PLACE = re.compile(r"(.*?): at offset (-?\d+): (.*)")
_KINDS = frozenset(
    {*(kind.label for kind in DamageKind), MISSING_FILE, TORN_TAIL, BAD_COMPRESSION, LOST_END}
)


def explain(error: BaseException | None) -> LogquarryError | None:
    """Return the exception of logquarry that made Spark raise `error`; None if there is none.

    A returned CorruptStore has the path, offset, kind and reason of the original exception.
    """
    while error is not None:
        if isinstance(error, LogquarryError):
            return error
        found = _OURS.search(str(error))
        if found is not None:
            return _remade(found[1], found[2].strip())
        error = error.__cause__ or error.__context__
    return None


def root_cause(error: BaseException) -> str:
    """Return the cause of a failed Spark job as text.

    If a worker raised an exception, the result is the text of this exception. Otherwise, the result
    is the text of Java's innermost cause, or the first two lines of the error if Java names no
    cause.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    raised: str | None = None
    in_traceback = False
    for line in lines:
        if _TRACEBACK in line:
            in_traceback = True
        elif in_traceback and not line[0].isspace():
            raised, in_traceback = line, False
    if raised is not None:
        return raised
    causes = [line.strip() for line in lines if line.startswith(_CAUSE)]
    return causes[-1].removeprefix(_CAUSE) if causes else " ".join(lines[:2])


def _remade(name: str, text: str) -> LogquarryError:
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, LogquarryError)):
        return LogquarryError(text)
    if issubclass(kind, CorruptStore):
        place = _PLACE.fullmatch(text)
        if place is None:
            return errors.StoreError(text)
        word = place[3].partition(":")[0]
        path, offset, reason = place[1], int(place[2]), place[3]
        return kind(path, offset, reason, kind=word if word in _KINDS else "corrupt")
    # The constructors of some exceptions need more arguments than the text. For such an exception,
    # use the nearest base class whose constructor needs only the text.
    for base in kind.__mro__:
        with suppress(TypeError):
            found = base(text)
            assert isinstance(found, LogquarryError)
            return found
    raise AssertionError(kind)
