"""What a task of the source hands to Spark: batches of exactly the schema that Spark was told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from logquarry.errors import UsageError
from logquarry.log import kafka, schema
from logquarry.spark.errors import told_plainly
from logquarry.spark.worker import let_hang_up, settle

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import types
    from pyspark.sql.types import StructType

    from logquarry.spark.options import ReadOptions
    from logquarry.spark.tasks import ReadTask


logger = logging.getLogger(__name__)


def task_rows(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    """The messages of a task, in a worker.

    Raises:
        CorruptFrame: on damage, unless it is to be skipped; then it is told on stderr.
    """
    settle()
    # Spark hangs up once it has all the rows it needs (a limit, show()).
    let_hang_up()
    with told_plainly():
        yield from _batches(task, struct)


def _batches(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.pandas.types import to_arrow_schema

    from logquarry.log.batches import DamageLog
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
        array if array.type.equals(field.type) else _retyped(array, field.type)
        for array, field in zip(batch.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _retyped(array: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    return _as_map(array, kind) if pa.types.is_map(kind) else array.cast(kind)


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


# --------------------------------------------------------------------------------------------------
# The columns of a read as a schema of Spark's.


def struct_of(options: ReadOptions) -> StructType:
    """The schema of the columns that some options ask for."""
    return kafka_struct(options.names) if options.is_kafka else native_struct(options.names)


def native_struct(names: Sequence[str]) -> StructType:
    """The schema of some of our columns.

    It says which of them every message has: for the others alone does Spark look, value by value,
    whether there is one. DDL could not say so of the values of a map.
    """
    from pyspark.sql import types

    by_name = {column.name: column for column in schema.COLUMNS}
    chosen = [by_name[name] for name in names]
    return types.StructType(
        [types.StructField(column.name, _type(column.spark), column.optional) for column in chosen]
    )


def kafka_struct(names: Sequence[str]) -> StructType:
    """The schema of some of Kafka's columns: all may be null, as its source says of them."""
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
    """The columns of a schema that a user may have written, in our spelling.

    Raises:
        UsageError: if one of them is no column, or not of its type.
    """
    given = struct.fieldNames()
    if not given:
        raise UsageError("schema: it has no columns")
    types = {column.name: column.spark for column in _columns(options)}
    # In Spark `TOPIC` is the column `topic`.
    ours = {name.lower(): name for name in types}
    names = options.check_names(ours.get(name.lower(), name) for name in given)
    if options.columns is not None and set(names) != set(options.columns):
        raise UsageError(
            f"columns: the option says {', '.join(options.columns)}, and the schema "
            f"{', '.join(names)}: give one of them"
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
