"""The columns of a read as Spark's types, and the rows of a task as Arrow batches of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from logquarry.errors import UsageError
from logquarry.log import kafka, schema
from logquarry.log.batches import DamageLog
from logquarry.spark.adapter import arrow_schema
from logquarry.spark.options import ReadOptions
from logquarry.spark.tasks import ReadTask, read_batches
from logquarry.spark.worker import ignore_hang_ups, settle, without_traceback

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import types
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

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
    wanted = arrow_schema(struct)
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
            f"{', '.join(names)}: leave one of the two out"
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
