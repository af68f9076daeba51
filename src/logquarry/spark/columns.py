"""Makes Spark schemas and Arrow batches for the rows of a read.

This module also hides the differences between PySpark versions:

| feature | first PySpark | without the feature |
|---|---|---|
| data sources in Python | 4.0 | batch reads by `logquarry.spark.read` with mapInArrow |
| Arrow batches for the sink of a stream | 4.1 | see `DataSourceStreamArrowWriter` below |
| `to_arrow_schema(timezone=)` | 4.2 | timestamps are UTC |
| limits for the batches of a stream | 4.2 | a batch takes all new messages: `stream_planner.py` |

Other modules import PySpark's classes from this module. If the installed PySpark lacks a class,
this module defines an empty class of the same name.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.log import schema
from logquarry.log.batches import DamageLog
from logquarry.spark.options import ReadOptions
from logquarry.spark.tasks import ReadTask, read_batches
from logquarry.spark.worker import settle, without_traceback

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
        InputPartition,
        WriterCommitMessage,
    )
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
    from pyspark.sql.types import StructType

try:
    import pyspark
    from pyspark.sql import types
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "PySpark is not installed: pip install 'logquarry[spark]'", name=error.name
    ) from error


__all__ = [
    "DataSource",
    "DataSourceArrowWriter",
    "DataSourceReader",
    "DataSourceStreamArrowWriter",
    "DataSourceStreamReader",
    "DataSourceWriter",
    "InputPartition",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
    "arrow_schema",
    "has_admission",
    "has_sources",
    "require_sources",
]


def _class_of(name: str) -> Any:
    """Return PySpark's class of this name; an empty class if PySpark has none."""
    for module in ("pyspark.sql.datasource", "pyspark.sql.streaming.datasource"):
        try:
            found = getattr(import_module(module), name, None)
        except ModuleNotFoundError as error:
            # If PySpark is installed, but lacks a package that it needs, raise the error that names
            # this package.
            if error.name is None or not error.name.startswith("pyspark"):
                raise
            continue
        if found is not None:
            return found
    return type(name, (_Absent,), {})


class _Absent:
    """Base of the empty classes that replace missing classes of PySpark."""


if not TYPE_CHECKING:
    globals().update({name: _class_of(name) for name in __all__ if name[0].isupper()})
    if issubclass(DataSourceStreamArrowWriter, _Absent):
        # PySpark 4.0 passes Arrow batches to each DataSourceArrowWriter, even to a stream's writer.
        class DataSourceStreamArrowWriter(
            _class_of("DataSourceStreamWriter"), DataSourceArrowWriter
        ):
            """Base class of a stream writer. Spark passes Arrow batches to the writer."""


def has_sources() -> bool:
    """Return whether the installed PySpark has data sources in Python."""
    return not issubclass(DataSource, _Absent)


def require_sources() -> None:
    """Raise UsageError if the installed PySpark has no data sources in Python."""
    if not has_sources():
        raise UsageError(
            f"PySpark {pyspark.__version__} has no data sources in Python (PySpark 4.0 has): read "
            "stores with logquarry.spark.read(spark, path), or install PySpark 4.0 or later"
        )


def has_admission() -> bool:
    """Return whether Spark passes each batch's start and limit to a stream's reader."""
    method = getattr(DataSourceStreamReader, "latestOffset", None)
    return method is not None and "limit" in inspect.signature(method).parameters


def arrow_schema(struct: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for rows of `struct`.

    Its timestamps are in UTC.
    """
    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(struct, timezone="UTC")
    return to_arrow_schema(struct)


logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------- rows, in the worker


def task_rows(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task as batches of exactly the schema `struct`."""
    settle()
    # Spark closes the connection as soon as the query needs no more rows, for example with a limit
    # or show().
    with without_traceback():
        wanted = arrow_schema(struct)
        damage = DamageLog()
        logged = 0
        for batch in read_batches(task, damage):
            yield _with_schema(batch, wanted)
            logged = _log_damage(damage, logged)
        _log_damage(damage, logged)


def _with_schema(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """Make a batch that has the same arrays, but the names, types and nullability of `wanted`."""
    arrays = [
        array if array.type.equals(field.type) else _retyped(array, field.type)
        for array, field in zip(batch.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _retyped(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_map(kind):
        return array.cast(kind)
    # Make an array of the wanted type from the same buffers: a cast would take longer than all
    # other work on a batch.
    entries = pa.struct([kind.key_field, kind.item_field])
    pairs = pa.Array.from_buffers(entries, len(array.keys), [None], 0, 0, [array.keys, array.items])
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        kind, len(array), [validity, offsets], array.null_count, array.offset, [pairs]
    )


def _log_damage(damage: DamageLog, logged: int) -> int:
    for span in damage.spans[logged:]:
        where = span.path, span.offset, span.kind, span.reason, span.length
        logger.warning("%s: at offset %d: %s: %s (%d bytes skipped)", *where)
    return len(damage.spans)


# ------------------------------------------------------------------------- columns as Spark types


def struct_of(options: ReadOptions) -> StructType:
    """Return Spark's schema of the selected columns.

    Kafka's columns are all nullable. Native columns that every message has are not nullable, so
    Spark does not test each value for null.
    """
    kinds, always = _kinds(options), _never_null(options)
    return types.StructType(
        [types.StructField(n, _TYPES[kinds[n]], n not in always) for n in options.names]
    )


def _never_null(options: ReadOptions) -> Collection[str]:
    return () if options.is_kafka else [c.name for c in schema.COLUMNS if not c.optional]


def _kinds(options: ReadOptions) -> dict[str, str]:
    columns = schema.KAFKA_COLUMNS if options.is_kafka else schema.COLUMNS
    return {column.name: column.spark for column in columns}


_STRING, _BINARY = types.StringType(), types.BinaryType()
_HEADER = [types.StructField("key", _STRING), types.StructField("value", _BINARY)]
_TYPES: Final[Mapping[str, types.DataType]] = {
    "string": _STRING,
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "timestamp": types.TimestampType(),
    "binary": _BINARY,
    "map<string,string>": types.MapType(_STRING, _STRING, valueContainsNull=False),
    "array<struct<key:string,value:binary>>": types.ArrayType(types.StructType(_HEADER)),
}


def checked(struct: StructType, options: ReadOptions) -> tuple[str, ...]:
    """Return a schema's columns in logquarry's spelling, or raise UsageError."""
    given = struct.fieldNames()
    if not given:
        raise UsageError("schema: it has no columns")
    kinds, always = _kinds(options), _never_null(options)
    names = options.check_names(given)
    if options.columns is not None and set(names) != set(options.columns):
        raise UsageError(
            f"columns: the option has {', '.join(options.columns)}, but the schema has "
            f"{', '.join(names)}: leave one of the two out"
        )
    for name, field in zip(names, struct.fields, strict=True):
        theirs = field.dataType.simpleString()
        if theirs != kinds[name]:
            raise UsageError(f"schema: the column {field.name} is {kinds[name]}, not {theirs}")
        if not field.nullable and name not in always:
            # If a column is declared NOT NULL, Spark skips tests for null: `tags IS NULL` would
            # find no message.
            raise UsageError(f"schema: the column {field.name} can be null: leave NOT NULL out")
    return names
