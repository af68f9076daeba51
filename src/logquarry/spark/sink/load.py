"""A DataFrame into stores by two jobs: one stages, one appends, a task for each store.

The driver moves no bytes and holds none: it decides. So loading scales with the executors, as long
as all of them see the folder.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from logquarry.config import StoreConfig
from logquarry.ingest.load import (
    Appending,
    LoadSummary,
    append_to_store,
    commit_load,
    discard_load,
    plan_load,
)
from logquarry.ingest.staging import LoadPlan, Staged
from logquarry.spark.errors import explain, told_plainly
from logquarry.spark.jobs import run_tasks
from logquarry.spark.sink.options import DEFAULT_QUEUES, parse_write_options
from logquarry.spark.worker import settle
from logquarry.store.load.ledger import LoadId
from logquarry.store.load.loading import Loaded
from logquarry.units import Progress

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


def load(
    df: DataFrame,
    path: str | os.PathLike[str],
    *,
    brokers: int = 1,
    queues: int = DEFAULT_QUEUES,
    txn_app_id: str | None = None,
    txn_version: int | None = None,
    on_rejected: str = "fail",
    dead_letter_path: str | os.PathLike[str] | None = None,
    config: StoreConfig | None = None,
    progress: Progress | None = None,
) -> LoadSummary:
    """Write a DataFrame into stores, exactly once, with all bytes moved by tasks.

    It does what ``df.write.format("rocketmq")`` does, with its options; in ``foreachBatch`` of a
    stream the batch's number is the version.

    Args:
        df: the rows; columns as for the sink.
        path: the store; with several brokers the folder of their stores.
        brokers: how many stores.
        queues: how many queues each has of a topic, for rows that name none.
        txn_app_id: the application, if the load may be tried again,
        txn_version: and which of its loads it is; they grow.
        on_rejected: ``fail`` or ``deadLetter``.
        dead_letter_path: where rejected rows go.
        config: settings of the stores.
        progress: told how many bytes of frames are in the logs, of how many.

    Returns:
        What came of it.

    Raises:
        UsageError: if an argument cannot be meant, or the rows can be no messages.
        StoreError: if no store takes a row, and that is to end the load.
        StoreUnavailable: if a store cannot be written.
    """
    from logquarry.spark.sink.writer import check_schema, load_id

    given = {
        "path": os.fspath(path),
        "brokers": str(brokers),
        "queues": str(queues),
        "onRejected": on_rejected,
        "txnAppId": txn_app_id,
        "txnVersion": None if txn_version is None else str(txn_version),
        "deadLetterPath": None if dead_letter_path is None else os.fspath(dead_letter_path),
    }
    options = parse_write_options(
        {name: value for name, value in given.items() if value is not None}, is_stream=False
    )
    check_schema(df.schema)
    plan = LoadPlan(
        path=options.plan.path,
        brokers=options.plan.brokers,
        queues=options.plan.queues,
        config=config or StoreConfig(),
        on_rejected=options.plan.on_rejected,
        dead_letters=options.plan.dead_letters,
    )
    plan = plan_load(plan)
    which = load_id(options.app, options.version)
    tasks: list[Staged] = []
    try:
        tasks = _staged(df, plan, which)
        return commit_load(plan, which, tasks, run=_Appends(df.sparkSession, progress))
    except BaseException:
        discard_load(plan, which, tasks)
        raise


def _staged(df: DataFrame, plan: LoadPlan, which: LoadId) -> list[Staged]:
    """The first job."""
    try:
        rows = df.mapInArrow(_Stage(plan, which), "staged binary").collect()
    except Exception as error:
        ours = explain(error)
        if ours is None:
            raise
        raise ours from error
    return [pickle.loads(row[0]) for row in rows]


class _Stage:
    """Runs in the workers."""

    def __init__(self, plan: LoadPlan, load: LoadId) -> None:
        self._plan = plan
        self._load = load

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyspark import TaskContext

        from logquarry.spark.sink.writer import stage

        context = TaskContext.get()
        assert context is not None
        settle()
        with told_plainly():
            staged = stage(self._plan, self._load, context.partitionId(), batches)
        data = pa.array([pickle.dumps(staged)], pa.binary())
        yield pa.record_batch([data], names=["staged"])


class _Appends:
    """The second job: a task for each store."""

    def __init__(self, spark: SparkSession, progress: Progress | None) -> None:
        self._spark = spark
        self._progress = progress

    def __call__(self, appendings: Sequence[Appending], /) -> Sequence[Loaded]:
        return run_tasks(
            self._spark,
            "append to the logs",
            appendings,
            _append,
            weight=lambda appending: max(1, appending.bytes),
            progress=self._progress,
        )


def _append(number: int, appending: Appending) -> Loaded:
    return append_to_store(appending)
