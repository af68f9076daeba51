"""Jobs that do their work in the Python workers and bring small results back."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from logquarry.signals import held
from logquarry.spark.errors import explain, told_plainly
from logquarry.spark.worker import settle
from logquarry.units import Progress

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession

_POLL_SECONDS = 0.1

T = TypeVar("T")
R = TypeVar("R")


def run_tasks(
    spark: SparkSession,
    name: str,
    tasks: Sequence[T],
    work: Callable[[int, T], R],
    *,
    weight: Callable[[T], int],
    progress: Progress | None = None,
    pause: Callable[[], None] = lambda: None,
) -> list[R]:
    """The results of some work, one task each, in the order of the tasks.

    An interrupt (Ctrl-C) or any other exception cancels the job.

    Args:
        spark: the session.
        name: what Spark calls the job.
        tasks: what to work on; picklable.
        work: gets a task's number and the task; picklable, as its result.
        weight: how much a task counts towards progress.
        progress: called now and then, and once when all is done.
        pause: called now and then; what it raises cancels the job, too.

    Raises:
        LogquarryError: what a task raised, with its own type; other exceptions as Spark has them.
    """
    if not tasks:
        return []
    total = sum(map(weight, tasks))
    with held() as interrupts:
        context = spark.sparkContext
        done = context.accumulator(0)
        pieces = [(number, task, weight(task)) for number, task in enumerate(tasks)]
        spread = context.parallelize(pieces, len(pieces))
        job = _Job(lambda: spread.map(_Work(work, done)).collect(), context, name)
        job.start()
        told = -1
        try:
            while not job.wait(_POLL_SECONDS):
                interrupts.check()
                pause()
                if progress is not None and done.value != told:
                    told = done.value
                    progress(told, total)
        except BaseException:
            job.cancel()
            raise
    if job.error is not None:
        ours = explain(job.error)
        if ours is not None:
            raise ours from job.error
        raise job.error
    if progress is not None:
        progress(total, total)
    results: list[R] = job.result
    return results


class _Work(Generic[T, R]):
    """Runs in the worker."""

    def __init__(self, work: Callable[[int, T], R], done: Accumulator[int]) -> None:
        self._work = work
        self._done = done

    def __call__(self, piece: tuple[int, T, int]) -> R:
        number, task, weight = piece
        settle()
        with told_plainly():
            result = self._work(number, task)
        self._done.add(weight)
        return result


class _Job:
    """A job in a thread of its own, so that this one can tell of progress and be interrupted."""

    def __init__(self, run: Callable[[], Any], context: Any, name: str) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._run = run
        self._context = context
        self._name = name
        self._group = f"logquarry-{uuid.uuid4().hex}"
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        from pyspark import InheritableThread

        self._thread = InheritableThread(target=self._target, daemon=True)
        self._thread.start()

    def _target(self) -> None:
        try:
            self._context.setJobGroup(self._group, self._name, interruptOnCancel=True)
            self.result = self._run()
        except BaseException as error:
            self.error = error

    def wait(self, seconds: float) -> bool:
        """Whether it is over, after so many seconds at the most."""
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def cancel(self) -> None:
        """Cancel it, and wait until no task of it is at work any more."""
        self._context.cancelJobGroup(self._group)
        self.wait(30)
