"""The columns of a read as a schema of Spark's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from logquarry.errors import UsageError
from logquarry.scan import kafka, schema

if TYPE_CHECKING:
    from pyspark.sql import types
    from pyspark.sql.types import StructType

    from logquarry.spark.options import ReadOptions


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
