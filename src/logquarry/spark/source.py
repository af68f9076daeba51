"""The data source `rocketmq`: reads stores as DataFrames, as a batch or as a stream.

To select messages, use the options: the source accepts no filters that Spark pushes down (see
`RocketMQReader`), so Spark applies the conditions of a query after the read. The readers decode
only the schema's columns, and check the CRC of a body only if `body` is one of these columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from logquarry.spark.columns import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    checked,
    has_admission,
    struct_of,
    task_rows,
)
from logquarry.spark.options import FORMAT, ReadOptions, parse_read_options
from logquarry.spark.stream_planner import Limits, StreamPlanner, UnlimitedPlanner
from logquarry.spark.tasks import ReadTask, open_stores, plan_tasks
from logquarry.spark.worker import Packaged, without_traceback

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


class _Reader(Packaged, DataSourceStreamReader):
    """Base class of the stream readers.

    A Python process on the driver's machine plans the tasks, and the workers read the messages.

    The options are parsed at the query's first call and not in the constructor: up to version 4.3,
    PySpark drops the text of a constructor's exception.
    """

    def __init__(self, given: Mapping[str, str], struct: StructType) -> None:
        self._given = dict(given)
        self._struct = struct

    @cached_property
    def _options(self) -> ReadOptions:
        with without_traceback():
            options = parse_read_options(self._given, is_stream=True)
        for remark in options.remarks:
            logger.warning("%s: %s", FORMAT, remark)
        return options

    @property
    def _columns(self) -> tuple[str, ...]:
        return checked(self._struct, self._options)

    @cached_property
    def _planner(self) -> StreamPlanner:
        with without_traceback():
            return StreamPlanner(self._options, self._columns)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a new query starts."""
        with without_traceback():
            return self._planner.initial()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one partition for each task.

        Raises:
            MessageNotFound: if messages were deleted, unless failOnDataLoss=false.
            UsageError: before Spark 4.2, if the start in the options differs from the start that
                the checkpoint recorded.
        """
        with without_traceback():
            return [InputPartition(task) for task in self._planner.tasks(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless onDamage=skip; the worker then logs damage to stderr.
        """
        yield from task_rows(partition.value, self._struct)


class RocketMQStreamReader(_Reader, SupportsTriggerAvailableNow):
    """Reads a stream with limits for its batches."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of messages, else the limit of bytes.

        Spark accepts one limit here; :meth:`latestOffset` applies both.
        """
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which the next batch ends."""
        with without_traceback():
            return self._planner.latest(start, self._limits(limit))

    def _limits(self, limit: ReadLimit) -> Limits:
        # Trigger.Once passes ReadAllAvailable and ignores the limits of the options.
        if isinstance(limit, ReadAllAvailable):
            return Limits()
        found = Limits(self._options.max_bytes, self._options.max_rows)
        if isinstance(limit, ReadMaxRows):
            return Limits(found.max_bytes, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            return Limits(limit.max_bytes, found.max_rows)
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query end where the logs end now."""
        with without_traceback():
            self._planner.prepare_available_now()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the ends of the logs that the last plan saw, for the query's progress report."""
        return self._planner.newest()


class RocketMQUnlimitedReader(_Reader):
    """Reads a stream if Spark does not support limits; each batch takes all new messages."""

    @cached_property
    def _planner(self) -> UnlimitedPlanner:
        with without_traceback():
            return UnlimitedPlanner(self._options, self._columns)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        """Return the offset at which the next batch ends: the current ends of the logs."""
        with without_traceback():
            return self._planner.newest_end()


class RocketMQDataSource(DataSource):
    """The format `rocketmq` of Spark's `read`, `readStream`, `write` and `writeStream`.

    Spark's `load` checks that the stores exist, unless the user gives a schema. The first query on
    a DataFrame plans the tasks; later queries on the same DataFrame reuse the plan, so they do not
    read newer messages.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return all columns, or the columns of the option `columns`."""
        with without_traceback():
            options = parse_read_options(self.options)
            open_stores(options)
            return struct_of(options)

    # PySpark passes `schema` by keyword, so the parameter's name must stay.
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a batch reader of the columns of `schema`: all or some, in any order."""
        with without_traceback():
            options = parse_read_options(self.options)
            for remark in options.remarks:
                logger.warning("%s: %s", FORMAT, remark)
            return RocketMQReader(options, checked(schema, options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Make a stream reader of the columns of `schema`: all or some, in any order."""
        kind = RocketMQStreamReader if has_admission() else RocketMQUnlimitedReader
        return kind(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer that puts the rows of a batch into stores."""
        from logquarry.spark.sink import batch_writer

        with without_traceback():
            return batch_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Make a writer that puts the batches of a stream into stores."""
        from logquarry.spark.sink import stream_writer

        with without_traceback():
            return stream_writer(self.options, schema, overwrite)


class RocketMQReader(Packaged, DataSourceReader):
    """Reads a batch. Spark plans the tasks on the driver, and reads the messages in the workers.

    This class must not override `pushFilters`: up to version 4.3, PySpark caches the plan of the
    first query with its filters, so later queries with other filters on the same DataFrame would
    miss rows.
    """

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], struct: StructType) -> None:
        self._options = options
        self._columns = columns
        self._struct = struct

    def partitions(self) -> Sequence[InputPartition]:
        """Plan one partition for each task."""
        with without_traceback():
            tasks = plan_tasks(self._options, self._columns)
        # If there are no tasks, return one partition with None, as PySpark itself does for an empty
        # list.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless onDamage=skip; the worker then logs damage to stderr.
        """
        task: ReadTask | None = partition.value
        if task is None:
            return
        yield from task_rows(task, self._struct)
