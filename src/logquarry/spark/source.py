"""The batch source `rocketmq`: stores as DataFrames.

Options choose what is read, instead of filters that Spark would push down (see `pushFilters`
below). Bodies are compared with their CRC exactly where the column `body` is read: a subset of the
columns, by `.schema(...)` or the option `columns`, is decoded alone and does not touch the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceWriter,
    InputPartition,
)

from logquarry.errors import UsageError
from logquarry.scan import schema
from logquarry.spark.errors import told_plainly
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.worker import let_hang_up, settle

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from logquarry.spark.tasks import ReadTask

logger = logging.getLogger(__name__)

FORMAT = "rocketmq"


class RocketMQDataSource(DataSource):
    """What `spark.read.format("rocketmq")` makes.

    The stores are looked for when `load` is called (without a schema of the user's own), and
    planned when a query runs: a DataFrame keeps the plan of its first query.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """All columns, or those of the option `columns`.

        Raises:
            UsageError: if an option cannot be meant.
            StoreNotFound: if there is no store.
        """
        from logquarry.spark.tasks import open_stores

        let_hang_up()
        with told_plainly():
            options = parse_read_options(self.options)
            open_stores(options)
            return struct_of(options.columns or schema.NAMES)

    # The parameter's name is PySpark's: it is passed by keyword.
    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns of `schema`: all, or some, in any order.

        Raises:
            UsageError: if one of them is no column of ours, or not of its type.
        """
        let_hang_up()
        with told_plainly():
            options = parse_read_options(self.options)
            for remark in options.remarks:
                logger.warning("%s: %s", FORMAT, remark)
            return RocketMQReader(options, _checked(schema, options.columns), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """What writes rows of `schema` into stores.

        Raises:
            UsageError: if an option cannot be meant, or the rows can be no messages.
        """
        from logquarry.spark.sink.writer import batch_writer

        let_hang_up()
        with told_plainly():
            return batch_writer(self.options, schema, overwrite)

    # PySpark's name.
    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """What writes the batches of a stream of rows of `schema` into stores.

        Raises:
            UsageError: if an option cannot be meant, or the rows can be no messages.
        """
        from logquarry.spark.sink.writer import stream_writer

        let_hang_up()
        with told_plainly():
            return stream_writer(self.options, schema, overwrite)


class RocketMQReader(DataSourceReader):
    """Plans on the driver, reads in the workers.

    `pushFilters` is not overridden, on purpose: PySpark up to 4.3 caches a filtered plan with the
    loaded table, and later queries on the same DataFrame then miss rows.
    """

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], struct: StructType) -> None:
        self._options = options
        self._columns = columns
        self._struct = struct

    def partitions(self) -> Sequence[InputPartition]:
        """One partition a task. Where there is nothing to read, one that says so.

        Raises:
            LogquarryError: if the stores cannot be read as the options say.
        """
        from logquarry.spark.tasks import plan_tasks

        with told_plainly():
            tasks = plan_tasks(self._options, self._columns)
        # An empty list would have Spark make a partition of its own, with None in it: the same.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless it is to be skipped; then it is told on stderr.
        """
        task: ReadTask | None = partition.value
        if task is None:
            return
        settle()
        # Spark hangs up once it has all the rows it needs (a limit, show()).
        let_hang_up()
        with told_plainly():
            yield from _batches(task, self._struct)


def _batches(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.pandas.types import to_arrow_schema

    from logquarry.scan.batches import DamageLog
    from logquarry.spark.tasks import read_batches

    wanted = to_arrow_schema(struct, timezone="UTC")
    damage = DamageLog()
    told = 0
    for batch in read_batches(task, damage):
        yield _with_schema(batch, wanted)
        told = _tell(damage, told)
    _tell(damage, told)


def _with_schema(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """The same arrays as a schema calls them, which also says what may be null."""
    import pyarrow as pa

    arrays = [
        array if array.type.equals(field.type) else _as_map(array, field.type)
        for array, field in zip(batch.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _as_map(array: pa.MapArray, kind: pa.MapType) -> pa.Array:
    """A map of which the type says otherwise whether values may be null.

    A cast would do; it takes longer than all else about such a batch.
    """
    import pyarrow as pa

    entries = pa.struct([kind.key_field, kind.item_field])
    pairs = pa.Array.from_buffers(entries, len(array.keys), [None], 0, 0, [array.keys, array.items])
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        kind, len(array), [validity, offsets], array.null_count, array.offset, [pairs]
    )


def _tell(damage: Any, told: int) -> int:
    for span in damage.spans[told:]:
        logger.warning(
            "%s: at offset %d: %s: %s (%d bytes passed over)",
            span.path,
            span.offset,
            span.kind,
            span.reason,
            span.length,
        )
    return len(damage.spans)


def struct_of(names: Sequence[str]) -> StructType:
    """The schema of some columns.

    It says which of them every message has: for the others alone does Spark look, value by value,
    whether there is one. DDL could not say so of the values of a map.
    """
    from pyspark.sql import types

    kinds: dict[str, types.DataType] = {
        "string": types.StringType(),
        "int": types.IntegerType(),
        "bigint": types.LongType(),
        "timestamp": types.TimestampType(),
        "binary": types.BinaryType(),
        "map<string,string>": types.MapType(
            types.StringType(), types.StringType(), valueContainsNull=False
        ),
    }
    by_name = {column.name: column for column in schema.COLUMNS}
    chosen = [by_name[name] for name in names]
    return types.StructType(
        [types.StructField(column.name, kinds[column.spark], column.optional) for column in chosen]
    )


def _checked(struct: StructType, chosen: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of a schema that a user may have written, in our spelling."""
    given = struct.fieldNames()
    if not given:
        raise UsageError("schema: it has no columns")
    # In Spark `TOPIC` is the column `topic`.
    ours = {name.lower(): name for name in schema.NAMES}
    names = schema.check_names(ours.get(name.lower(), name) for name in given)
    if chosen is not None and set(names) != set(chosen):
        raise UsageError(
            f"columns: the option says {', '.join(chosen)}, and the schema {', '.join(names)}: "
            "give one of them"
        )
    types = {column.name: column.spark for column in schema.COLUMNS}
    for name, field in zip(names, struct.fields, strict=True):
        theirs = field.dataType.simpleString()
        if theirs != types[name]:
            raise UsageError(f"schema: the column {field.name} is {types[name]}, not {theirs}")
    return names
