"""What `df.write` and `df.writeStream` run: tasks stage segments, and a commit loads them.

Spark runs the commit in a Python process of the driver's machine, without a session: it appends to
all stores at once there. :func:`logquarry.spark.load` appends by tasks of a second job instead, so
that no byte of the messages passes the driver.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from logquarry.errors import StoreError, UsageError
from logquarry.ingest.load import commit_load, discard_load, plan_load
from logquarry.ingest.staging import LoadPlan, Staged, Stager, check_rows
from logquarry.spark.errors import told_plainly
from logquarry.spark.sink.options import WriteOptions, parse_write_options
from logquarry.spark.worker import let_hang_up, settle
from logquarry.store.load.ledger import LoadId

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

_QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


@dataclass
class StagedMessage(WriterCommitMessage):
    """What a task tells the commit."""

    staged: Staged


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    """What `df.write` runs.

    Raises:
        UsageError: if an option cannot be meant, or the rows can be no messages.
    """
    found = _checked(options, schema, overwrite, is_stream=False)
    return RocketMQWriter(plan_load(found.plan), load_id(found.app, found.version))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """What `df.writeStream` runs. Made anew for each commit.

    Raises:
        UsageError: if an option cannot be meant, or the rows can be no messages.
    """
    found = _checked(options, schema, overwrite, is_stream=True)
    return RocketMQStreamWriter(plan_load(found.plan), found.app)


def load_id(app: str | None, version: int | None) -> LoadId:
    """The load that a user named, or one of a name that nobody has."""
    if app is None or version is None:
        return LoadId(f"run-{uuid.uuid4().hex}", 0, is_named=False)
    return LoadId(app, version)


def _checked(
    options: Mapping[str, str], schema: StructType, overwrite: bool, *, is_stream: bool
) -> WriteOptions:
    found = parse_write_options(options, is_stream=is_stream)
    if overwrite:
        raise UsageError("mode: a log can only be appended to: say mode('append')")
    check_schema(schema)
    for remark in found.remarks:
        logger.warning("rocketmq: %s", remark)
    return found


def check_schema(schema: StructType) -> None:
    """Refuse rows that can be no messages.

    Raises:
        UsageError: that says why.
    """
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    check_rows(pa.RecordBatch.from_pylist([], to_arrow_schema(schema, timezone="UTC")))


def stage(
    plan: LoadPlan, load: LoadId, partition: int, batches: Iterator[pa.RecordBatch]
) -> Staged:
    """Stage the rows of a task, all or none."""
    stager = Stager(plan, load, partition)
    try:
        for batch in batches:
            stager.add(batch)
        return stager.finish()
    except BaseException:
        stager.discard()
        raise


class RocketMQWriter(DataSourceArrowWriter):
    """Writes a DataFrame.

    Args:
        plan: where the rows go.
        load: which load it is.
    """

    def __init__(self, plan: LoadPlan, load: LoadId) -> None:
        self._plan = plan
        self._load = load

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        settle()
        with told_plainly():
            return StagedMessage(stage(self._plan, self._load, context.partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Load what was staged."""
        let_hang_up()
        with told_plainly():
            _commit(self._plan, self._load, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Take away what was staged."""
        let_hang_up()
        _discard(self._plan, self._load, messages)


class RocketMQStreamWriter(DataSourceStreamArrowWriter):
    """Writes the batches of a stream: each is a load, with the batch's number for its version.

    Args:
        plan: where the rows go.
        app: the application that the user named; else it is the query.
    """

    def __init__(self, plan: LoadPlan, app: str | None) -> None:
        self._plan = plan
        self._app = app

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage the rows of one task of a batch."""
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        settle()
        with told_plainly():
            app = self._app or context.getLocalProperty(_QUERY_ID)
            batch = context.getLocalProperty(_BATCH_ID)
            if not app or batch is None:
                raise UsageError("a stream has to have a query and a batch, and Spark tells none")
            # The query's id is not known to the commit, which is told of the batch alone.
            load = LoadId(app, int(batch))
            return StagedMessage(stage(self._plan, load, context.partitionId(), iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Load what was staged."""
        let_hang_up()
        with told_plainly():
            loads = {message.staged.load for message in _told(messages)}
            for load in loads:
                if load.version != batch_id or len(loads) > 1:
                    raise UsageError(f"batch {batch_id} was staged as {sorted(map(str, loads))}")
                _commit(self._plan, load, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Take away what was staged."""
        let_hang_up()
        for load in {message.staged.load for message in _told(messages)}:
            _discard(self._plan, load, messages)


def _told(messages: Sequence[WriterCommitMessage | None]) -> list[StagedMessage]:
    return [message for message in messages if isinstance(message, StagedMessage)]


def _commit(plan: LoadPlan, load: LoadId, messages: Sequence[WriterCommitMessage | None]) -> None:
    told = _told(messages)
    if len(told) != len(messages):
        raise UsageError(f"{len(messages) - len(told)} tasks did not say what they staged")
    summary = commit_load(plan, load, [message.staged for message in told])
    if summary.was_there:
        logger.warning("%s: %s is there already", plan.path, load)


def _discard(plan: LoadPlan, load: LoadId, messages: Sequence[WriterCommitMessage | None]) -> None:
    try:
        discard_load(plan, load, [message.staged for message in _told(messages)])
    except StoreError as error:
        # What is left takes room, and nobody will load it.
        logger.warning("%s: what was staged for %s stays: %s", plan.path, load, error)
