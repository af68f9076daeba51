"""Writes DataFrames into stores: the sink `rocketmq`, and `load`.

Tasks write (stage) the messages to segments, which are temporary files; then a commit appends the
segments to the logs. For `df.write` and `df.writeStream`, Spark runs the commit in one Python
process on the driver's machine. `load` runs the commit as a second Spark job, with one task for
each store. All executors must reach the stores' folder under one path.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, get_args
from weakref import WeakKeyDictionary

import pyarrow as pa

from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.errors import StoreError, UsageError
from logquarry.format import java
from logquarry.ingest.load import (
    LoadSummary,
    RunAppends,
    append_here,
    append_to_store,
    commit_load,
    discard_load,
    plan_load,
)
from logquarry.ingest.staging import LoadPlan, OnRejected, Staged, Stager, check_rows
from logquarry.log.location import local_folder
from logquarry.spark.columns import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
    arrow_schema,
    has_sources,
)
from logquarry.spark.jobs import context_of, explain, run_tasks
from logquarry.spark.options import Given, one_of, store_config, whole_number
from logquarry.spark.worker import Packaged, ignore_hang_ups, settle, without_traceback
from logquarry.store.load.ledger import LoadId
from logquarry.text import counted

if TYPE_CHECKING:
    from pyspark import SparkContext, TaskContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

DEFAULT_QUEUES: Final = 4

_JOINED_ROWS: Final = 10_000
_JOINED_BYTES: Final = 8 << 20

_ROWS_SETTING: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
_SPARKS_ROWS: Final = "10000"
_SMALL_ROWS: Final = "64"
_OURS: Final = (
    *("path", "brokers", "queues", "txnAppId", "txnVersion", "onRejected", "deadLetterPath"),
    "config",
)
_MOST_BROKERS: Final = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """Target and settings of a write.

    `app` is the option txnAppId, the name of the application; `version` is the option txnVersion,
    the number of the load.
    """

    plan: LoadPlan
    app: str | None = None
    version: int | None = None
    remarks: tuple[str, ...] = ()

    def load_id(self) -> LoadId:
        """Return the load's identity: application and version if given, else a new unique name."""
        if self.app is None or self.version is None:
            return LoadId(f"run-{uuid.uuid4().hex}", 0, is_named=False)
        return LoadId(self.app, self.version)


def parse_write_options(options: Mapping[str, str], *, is_stream: bool) -> WriteOptions:
    """Parse the options of a write. Opens no store; reads a file only for ``config``."""
    given = Given(options, {name.lower(): name for name in _OURS})
    given.refuse_unknown()
    app = given.parsed("txnAppId", _some)
    version = given.parsed("txnVersion", lambda text: whole_number(text, 0, java.LONG_MAX))
    if not is_stream and (app is None) is not (version is None):
        raise UsageError("txnAppId: needs txnVersion too: give both or none")
    on_rejected: OnRejected = given.parsed("onRejected", one_of(*get_args(OnRejected))) or "fail"
    dead_letters = given.parsed("deadLetterPath", _dead_letters)
    if on_rejected == "deadLetter" and dead_letters is None:
        raise UsageError("onRejected: deadLetter needs a folder: give deadLetterPath too")
    plan = LoadPlan(
        path=_path(given.text("path") or ""),
        brokers=given.parsed("brokers", lambda text: whole_number(text, 1, _MOST_BROKERS)) or 1,
        queues=given.parsed("queues", lambda text: whole_number(text, 1, java.INT_MAX))
        or DEFAULT_QUEUES,
        config=given.parsed("config", store_config) or StoreConfig(),
        on_rejected=on_rejected,
        dead_letters=dead_letters if on_rejected == "deadLetter" else None,
    )
    remarks = given.remarks(is_batch_read=False)
    if is_stream and version is not None:
        remarks.append("txnVersion has no effect on a stream: its batches have numbers already")
    if dead_letters is not None and given.text("onRejected") is None:
        remarks.append("deadLetterPath has no effect without onRejected=deadLetter")
    return WriteOptions(plan=plan, app=app, version=version, remarks=tuple(remarks))


def _path(text: str) -> str:
    if not text:
        raise UsageError("path: no store to write to: give save(path) or the option path")
    try:
        return str(local_folder(text, "only a local store can be written"))
    except UsageError as error:
        raise UsageError(f"path: {error}") from None


def _some(text: str) -> str:
    if not text:
        raise UsageError("is empty")
    return text


def _dead_letters(text: str) -> str:
    return str(local_folder(_some(text), "dead letters need a folder on a mounted disk"))


# --------------------------------------------------------------------- df.write and df.writeStream
_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


@dataclass
class StagedMessage(WriterCommitMessage):
    """The message from a task to the commit: it lists the segments that the task has staged."""

    staged: Staged


def checked_write_options(
    options: Mapping[str, str], schema: StructType, overwrite: bool, *, is_stream: bool
) -> WriteOptions:
    """Parse the options of `df.write` or `df.writeStream`, and check the target.

    The returned plan has the file sizes of the existing stores.
    """
    found = parse_write_options(options, is_stream=is_stream)
    if overwrite:
        raise UsageError("mode: a log can only be appended to: give mode('append')")
    _check_schema(schema)
    for remark in found.remarks:
        logger.warning("rocketmq: %s", remark)
    return replace(found, plan=plan_load(found.plan))


def _check_schema(schema: StructType) -> None:
    """Raise UsageError if the columns of `schema` do not describe messages."""
    from pyspark.sql.types import TimestampNTZType

    for column in schema:
        is_time = column.name.lower() == "born_timestamp"
        if is_time and isinstance(column.dataType, TimestampNTZType):
            raise UsageError(
                f"the column {column.name} has the type TIMESTAMP_NTZ, which has no time zone: "
                f"give cast({column.name} AS timestamp), which takes the session's time zone"
            )
    check_rows(pa.RecordBatch.from_pylist([], arrow_schema(schema)))


class _Stage(Packaged):
    """Stages the rows of a load. In a stream, each batch is a load.

    `load` is the identity of the load. For a stream, `load` is the value of the option txnAppId, or
    None if the option is not set.
    """

    def __init__(self, plan: LoadPlan, load: LoadId | str | None) -> None:
        self._plan = plan
        self._load = load

    def staged(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Stage all rows of a task; after an error, remove the staged files."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        settle()
        with without_traceback():
            stager = Stager(self._plan, self._load_of(context), context.partitionId())
            try:
                for batch in _joined(batches):
                    stager.add(batch)
                return stager.finish()
            except BaseException:
                stager.discard()
                raise

    def _load_of(self, context: TaskContext) -> LoadId:
        if isinstance(self._load, LoadId):
            return self._load
        # Spark gives the query's id only to tasks. So each task sends the load's identity to the
        # commit, in the task's message.
        app = self._load or context.getLocalProperty(_QUERY_ID)
        batch = context.getLocalProperty(_BATCH_ID)
        if not app or batch is None:
            raise UsageError("Spark passes no query id and batch number: use a streaming query")
        return LoadId(app, int(batch))

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Stage all rows of a task of mapInArrow."""
        data = pa.array([pickle.dumps(self.staged(batches))], pa.binary())
        yield pa.record_batch([data], names=["staged"])

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage all rows of a task of a writer."""
        return StagedMessage(self.staged(iterator))

    def _loads(self, staged: Sequence[Staged]) -> set[LoadId]:
        if isinstance(self._load, LoadId):
            return {self._load}
        return {task.load for task in staged}

    def _commit(
        self, messages: Sequence[WriterCommitMessage | None], *, is_batch: bool = False
    ) -> None:
        staged = _staged_of(messages)
        if len(staged) != len(messages):
            raise UsageError(
                f"{counted(len(messages) - len(staged), 'task')} did not report the staged messages"
            )
        for load in self._loads(staged):
            _commit(self._plan, load, staged, is_batch=is_batch)

    def _discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        ignore_hang_ups()
        staged = _staged_of(messages)
        for load in self._loads(staged):
            _discard_quietly(self._plan, load, staged)


def _commit(
    plan: LoadPlan,
    load: LoadId,
    staged: Sequence[Staged],
    *,
    run: RunAppends = append_here,
    is_batch: bool,
) -> LoadSummary:
    """Append the segments of all tasks; log a warning if the stores already have the load."""
    done = commit_load(plan, load, staged, run=run, is_batch=is_batch)
    if done.was_there:
        logger.warning("%s: %s was loaded before: nothing appended", plan.path, load)
    return done


def _discard_quietly(plan: LoadPlan, load: LoadId, staged: Sequence[Staged]) -> None:
    """Remove the staged files of a load that failed. If the removal fails too, only log a warning,
    so that the user sees the first error.
    """
    try:
        discard_load(plan, load, staged)
    except StoreError as error:
        # The remaining staged files take space, but no later commit loads them.
        logger.warning("%s: staged files of %s could not be removed: %s", plan.path, load, error)


def _staged_of(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [message.staged for message in messages if isinstance(message, StagedMessage)]


class RocketMQWriter(_Stage, DataSourceArrowWriter):
    """Writer of `df.write`.

    The tasks stage the rows, then a process on the driver's machine appends the segments to the
    logs.
    """

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Append the segments of all tasks."""
        with without_traceback():
            self._commit(messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Remove the files that the tasks staged."""
        self._discard(messages)


class RocketMQStreamWriter(_Stage, DataSourceStreamArrowWriter):
    """Writer of `df.writeStream`; each batch is a load whose version is the batch's number."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Append the segments of all tasks."""
        with without_traceback():
            loads = self._loads(_staged_of(messages))
            if len(loads) > 1 or any(load.version != batch_id for load in loads):
                raise UsageError(
                    f"batch {batch_id}: tasks staged other loads: {sorted(map(str, loads))}"
                )
            if loads:
                self._commit(messages, is_batch=True)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove the files that the tasks staged."""
        self._discard(messages)


# -------------------------------------------------------------------------------------------- load


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
    """Write a DataFrame into stores exactly once, with two Spark jobs.

    ``df.write.format("rocketmq")`` with the same options has the same effect.

    Args:
        path: the store; with several brokers, the folder of their stores.
        queues: number of queues of each topic in each store, for rows without a queue id.
        txn_app_id: name of the application. Each `txn_version` of an application is loaded only
            once, so a repeated load adds nothing.
        txn_version: number of the load; it must grow with each load of the application. In
            ``foreachBatch``, pass the batch id.
        on_rejected: what to do with a row that no store accepts: ``fail`` raises an error, and
            ``deadLetter`` writes the row to ``dead_letter_path``.
        dead_letter_path: folder for rejected rows.
        progress: called with (bytes of frames appended, bytes in total).

    Raises:
        UsageError: if an argument is invalid, or the rows do not describe messages.
        StoreError: if a row is rejected and `on_rejected` is ``fail``.
        StoreUnavailable: if a store cannot be written.
    """
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
    # Call this before any row is staged, because it raises an error for a session of Spark Connect.
    context = context_of(df.sparkSession)
    _check_schema(df.schema)
    plan = plan_load(replace(options.plan, config=config or StoreConfig()))
    which = options.load_id()
    # The second job: one task for each store appends the store's segments.
    append = partial(
        run_tasks,
        df.sparkSession,
        "append to the logs",
        work=append_to_store,
        weight=lambda appending: max(1, appending.bytes),
        progress=progress,
    )
    tasks: list[Staged] = []
    try:
        tasks = _staged(df, _Stage(plan, which))
        is_batch = _is_batch(context, which)
        return _commit(plan, which, tasks, run=append, is_batch=is_batch)
    except BaseException:
        _discard_quietly(plan, which, tasks)
        raise


def _is_batch(context: SparkContext, load: LoadId) -> bool:
    """Return whether a load is the micro-batch for which Spark has called `foreachBatch`."""
    return load.is_named and context.getLocalProperty(_BATCH_ID) == str(load.version)


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches, because the stager needs almost a millisecond for each batch."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if held and (rows + batch.num_rows > _JOINED_ROWS or size + batch.nbytes > _JOINED_BYTES):
            yield _one(held)
            rows = size = 0
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if held:
        yield _one(held)


def _one(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Make one batch of some batches; clear the list to free them."""
    found = held[0]
    if len(held) > 1:
        (found,) = pa.Table.from_batches(held).combine_chunks().to_batches() or (found,)
    held.clear()
    return found


_limiting = threading.Lock()
_limited: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()
"""Number of loads for which a session's batches have few rows."""


@contextmanager
def _few_rows(session: SparkSession) -> Iterator[None]:
    """Make Spark 3.5 send batches with few rows, unless the user has set the number of rows.

    Spark 4 limits the bytes of each batch, but Spark 3.5 limits only the rows. With its default of
    10,000 rows, bodies of more than 50 KB need more than the direct memory of a JVM with 1 GiB.
    Spark then waits forever, because the thread that has failed does not end its task.
    """
    if has_sources():
        yield
        return
    with _limiting:
        loads = _limited.get(session, 0)
        is_ours = loads > 0 or session.conf.get(_ROWS_SETTING) == _SPARKS_ROWS
        if is_ours:
            session.conf.set(_ROWS_SETTING, _SMALL_ROWS)
            _limited[session] = loads + 1
    try:
        yield
    finally:
        if is_ours:
            with _limiting:
                _limited[session] -= 1
                if not _limited[session]:
                    # If the JVM has ended, the user must see the first error.
                    with suppress(Exception):
                        session.conf.unset(_ROWS_SETTING)


def _staged(df: DataFrame, work: _Stage) -> list[Staged]:
    try:
        with _few_rows(df.sparkSession):
            rows = df.mapInArrow(work, "staged binary").collect()
    except Exception as error:
        if (ours := explain(error)) is None:
            raise
        raise ours from error
    return [pickle.loads(row[0]) for row in rows]
