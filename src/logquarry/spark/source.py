"""The data source `rocketmq`: reads stores as DataFrames, as a batch or as a stream.

Options, not filters pushed down by Spark, select the messages (see `RocketMQReader`). The readers
decode only the columns of the schema, and check the CRC of a body only if the column `body` is
among them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from logquarry.errors import UsageError
from logquarry.log import kafka, schema
from logquarry.log.batches import DamageLog
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.stream.planner import Limits, StreamPlanner
from logquarry.spark.tasks import ReadTask, open_stores, plan_tasks, read_batches
from logquarry.spark.worker import ignore_hang_ups, settle, without_traceback

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import types
    from pyspark.sql.types import StructType


logger = logging.getLogger(__name__)

FORMAT = "rocketmq"


class RocketMQDataSource(DataSource):
    """The class behind `format("rocketmq")` of `read`, `readStream`, `write` and `writeStream`.

    `load` checks that the stores exist, unless the user gives a schema. The first query on a
    DataFrame plans its tasks; later queries on the same DataFrame reuse that plan.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return all columns, or those of the option `columns`.

        Raises:
            UsageError: if an option has an invalid value.
            StoreNotFound: if there is no store.
        """
        ignore_hang_ups()
        with without_traceback():
            options = parse_read_options(self.options)
            open_stores(options)
            return struct_of(options)

    # The parameter's name is PySpark's: it is passed by keyword.
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a batch reader of the columns of `schema`: all or some, in any order.

        Raises:
            UsageError: if the table has no such column, or its type differs.
        """
        ignore_hang_ups()
        with without_traceback():
            options = parse_read_options(self.options)
            for remark in options.remarks:
                logger.warning("%s: %s", FORMAT, remark)
            return RocketMQReader(options, checked(schema, options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Make a stream reader of the columns of `schema`: all or some, in any order."""
        ignore_hang_ups()
        return RocketMQStreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer that puts the rows of a batch into stores.

        Raises:
            UsageError: if an option has an invalid value, or `schema` does not describe messages.
        """
        from logquarry.spark.sink import batch_writer

        ignore_hang_ups()
        with without_traceback():
            return batch_writer(self.options, schema, overwrite)

    # PySpark's name.
    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Make a writer that puts the batches of a stream into stores.

        Raises:
            UsageError: if an option has an invalid value, or `schema` does not describe messages.
        """
        from logquarry.spark.sink import stream_writer

        ignore_hang_ups()
        with without_traceback():
            return stream_writer(self.options, schema, overwrite)


class RocketMQReader(DataSourceReader):
    """Reads a batch: plans on the driver, reads in the workers.

    It does not override `pushFilters`: PySpark up to 4.3 caches a filtered plan with the loaded
    table, and later queries on the same DataFrame then miss rows.
    """

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], struct: StructType) -> None:
        self._options = options
        self._columns = columns
        self._struct = struct

    def partitions(self) -> Sequence[InputPartition]:
        """Plan one partition for each task.

        Raises:
            LogquarryError: if the stores cannot be read with these options.
        """

        with without_traceback():
            tasks = plan_tasks(self._options, self._columns)
        # For an empty list PySpark makes the same single partition of None.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless onDamage=skip; then the worker logs it to stderr.
        """
        task: ReadTask | None = partition.value
        if task is None:
            return
        yield from task_rows(task, self._struct)


# ---------------------------------------------------------------------------- rows, in the worker


def task_rows(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task as batches of exactly the schema `struct`.

    Raises:
        CorruptFrame: on damage, unless onDamage=skip; then the worker logs it to stderr.
    """
    settle()
    # Spark closes the connection once it has all the rows that it needs (a limit, show()).
    ignore_hang_ups()
    with without_traceback():
        yield from _batches(task, struct)


def _batches(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.pandas.types import to_arrow_schema

    wanted = to_arrow_schema(struct, timezone="UTC")
    damage = DamageLog()
    logged = 0
    for batch in read_batches(task, damage):
        yield _with_schema(batch, wanted)
        logged = _log_damage(damage, logged)
    _log_damage(damage, logged)


def _with_schema(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Make a batch of the same arrays with the names and nullability of `wanted`."""
    import pyarrow as pa

    arrays = [
        array if array.type.equals(field.type) else _retyped(array, field.type)
        for array, field in zip(batch.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _retyped(array: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    return _as_map(array, kind) if pa.types.is_map(kind) else array.cast(kind)


def _as_map(array: pa.MapArray, kind: pa.MapType) -> pa.Array:
    """Make a map array of type `kind`; the types differ only in whether values may be null.

    A cast gives the same result, but takes longer than all other work on the batch.
    """
    import pyarrow as pa

    entries = pa.struct([kind.key_field, kind.item_field])
    pairs = pa.Array.from_buffers(entries, len(array.keys), [None], 0, 0, [array.keys, array.items])
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        kind, len(array), [validity, offsets], array.null_count, array.offset, [pairs]
    )


def _log_damage(damage: DamageLog, logged: int) -> int:
    for span in damage.spans[logged:]:
        logger.warning(
            "%s: at offset %d: %s: %s (%d bytes skipped)",
            span.path,
            span.offset,
            span.kind,
            span.reason,
            span.length,
        )
    return len(damage.spans)


# ------------------------------------------------------------------------- columns as Spark types


def struct_of(options: ReadOptions) -> StructType:
    """Return Spark's schema of the columns that the options name."""
    return kafka_struct(options.names) if options.is_kafka else native_struct(options.names)


def native_struct(names: Sequence[str]) -> StructType:
    """Return Spark's schema of some of our columns.

    It marks the columns that every message has as not nullable, so Spark does not test each value
    for null. A DDL string cannot mark the values of a map.
    """
    from pyspark.sql import types

    by_name = {column.name: column for column in schema.COLUMNS}
    chosen = [by_name[name] for name in names]
    return types.StructType(
        [types.StructField(column.name, _type(column.spark), column.optional) for column in chosen]
    )


def kafka_struct(names: Sequence[str]) -> StructType:
    """Return Spark's schema of some of Kafka's columns; all are nullable, as in Kafka's source."""
    from pyspark.sql import types

    by_name = {column.name: column for column in kafka.COLUMNS}
    return types.StructType([types.StructField(n, _type(by_name[n].spark)) for n in names])


def _type(text: str) -> types.DataType:
    from pyspark.sql import types

    kinds: dict[str, Callable[[], types.DataType]] = {
        "string": types.StringType,
        "int": types.IntegerType,
        "bigint": types.LongType,
        "timestamp": types.TimestampType,
        "binary": types.BinaryType,
        "map<string,string>": lambda: types.MapType(
            types.StringType(), types.StringType(), valueContainsNull=False
        ),
        "array<struct<key:string,value:binary>>": lambda: types.ArrayType(
            types.StructType(
                [
                    types.StructField("key", types.StringType()),
                    types.StructField("value", types.BinaryType()),
                ]
            )
        ),
    }
    return kinds[text]()


def checked(struct: StructType, options: ReadOptions) -> tuple[str, ...]:
    """Return the columns of a schema in logquarry's spelling; the user may have written the schema.

    Raises:
        UsageError: if the table has no such column, or its type differs.
    """
    given = struct.fieldNames()
    if not given:
        raise UsageError("schema: it has no columns")
    types = {column.name: column.spark for column in _columns(options)}
    # Spark ignores case: `TOPIC` is the column `topic`.
    ours = {name.lower(): name for name in types}
    names = options.check_names(ours.get(name.lower(), name) for name in given)
    if options.columns is not None and set(names) != set(options.columns):
        raise UsageError(
            f"columns: the option names {', '.join(options.columns)}, but the schema names "
            f"{', '.join(names)}: give one of the two"
        )
    for name, field in zip(names, struct.fields, strict=True):
        theirs = field.dataType.simpleString()
        if theirs != types[name]:
            raise UsageError(f"schema: the column {field.name} is {types[name]}, not {theirs}")
    return names


def _columns(
    options: ReadOptions,
) -> Sequence[schema.Column] | Sequence[kafka.KafkaColumn]:
    return kafka.COLUMNS if options.is_kafka else schema.COLUMNS


# ------------------------------------------------------------------------------------------ stream


class RocketMQStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream: plans in one process beside the driver, reads in the workers.

    Spark makes a second instance and sends it to the workers for `read`. The options are parsed at
    the query's first call, not in the constructor: PySpark up to 4.3 replaces an exception that
    the constructor raises with an error without its text.

    Args:
        given: the options, as the user gave them.
        struct: the schema that is read.
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

    @cached_property
    def _planner(self) -> StreamPlanner:
        with without_traceback():
            return StreamPlanner(self._options, checked(self._struct, self._options))

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a new query starts.

        Raises:
            LogquarryError: if the stores cannot be read with these options.
        """
        with without_traceback():
            return self._planner.initial()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of one batch; if the options set both, the limit of messages."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which the next batch ends.

        Raises:
            LogquarryError: if a store, or the part of it that was read, no longer exists.
        """
        with without_traceback():
            return self._planner.latest(start, self._limits(limit))

    def _limits(self, limit: ReadLimit) -> Limits:
        # Trigger.Once reads all there is and ignores the options.
        if isinstance(limit, ReadAllAvailable):
            return Limits()
        found = Limits(self._options.max_bytes, self._options.max_rows)
        if isinstance(limit, ReadMaxRows):
            return Limits(found.max_bytes, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            return Limits(limit.max_bytes, found.max_rows)
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query stop at the current ends of the logs."""
        with without_traceback():
            self._planner.prepare_available_now()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the newest known ends of the logs, for the query's progress."""
        return self._planner.newest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one partition for each task.

        Raises:
            MessageNotFound: if messages were deleted, unless failOnDataLoss=false.
        """
        with without_traceback():
            return [InputPartition(task) for task in self._planner.tasks(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless onDamage=skip; then the worker logs it to stderr.
        """
        yield from task_rows(partition.value, self._struct)
