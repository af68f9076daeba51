"""The columns of a message in Arrow and Spark, and the columns that Spark's Kafka source would
have. In the Kafka columns, the key is the first word of KEYS, or null. The timestamp is the store
timestamp, which corresponds to Kafka's LogAppendTime. The headers are the message's properties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

from logquarry.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Column:
    """One column. ``spark`` is Spark's type, and ``meaning`` is a description for the docs."""

    name: str
    spark: str
    meaning: str
    optional: bool = False


COLUMNS: Final = (
    Column("broker", "string", "name of the store"),
    Column("topic", "string", "topic"),
    Column("queue_id", "int", "number of the queue in its topic, counted from 0"),
    Column("queue_offset", "bigint", "ordinal number of the message in its queue, counted from 0"),
    Column("physical_offset", "bigint", "start of the frame in the commit log"),
    Column("size", "int", "size of the frame in bytes"),
    Column("message_id", "string", "store host and physical offset, upper-case hex"),
    Column("store_timestamp", "timestamp", "store time, by the broker's clock"),
    Column("born_timestamp", "timestamp", "time of creation, by the producer's clock"),
    Column("born_host", "string", "address of the producer, ip:port"),
    Column("store_host", "string", "address of the broker, ip:port"),
    Column("sys_flag", "int", "RocketMQ's flag bits: compression, transaction type, IPv6 hosts"),
    Column("flag", "int", "flag bits that the application sets"),
    Column("body_crc", "int", "CRC-32 of the body as stored, sign bit cleared"),
    Column("reconsume_times", "int", "how often a consumer sent the message back for a retry"),
    Column("prepared_transaction_offset", "bigint", "physical offset of the half message"),
    Column("tags", "string", "the TAGS property", optional=True),
    Column("keys", "string", "the KEYS property: keys, separated by spaces", optional=True),
    Column("uniq_key", "string", "the UNIQ_KEY property: the client's id", optional=True),
    Column("tags_code", "bigint", "hash of the tags, or delivery time of a delayed message"),
    Column("properties", "map<string,string>", "all properties of the message"),
    Column("body", "binary", "the body as stored; with decompression, the decompressed body"),
)
NAMES: Final = tuple(column.name for column in COLUMNS)

EXACT_PROPERTIES: Final = Column(
    "properties_string",
    "binary",
    "the property string, if the properties in their order do not reproduce it",
    optional=True,
)
"""Only exports read this column. It contains the property string of a message if the column
``properties`` does not determine this string; else null.
"""


@cache
def arrow_types() -> dict[str, pa.DataType]:
    """Return the Arrow type of each column."""
    import pyarrow as pa

    by_spark_name = {
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "timestamp": pa.timestamp("us", "UTC"),
        "map<string,string>": pa.map_(pa.string(), pa.string()),
        "binary": pa.binary(),
    }
    columns = (*COLUMNS, EXACT_PROPERTIES)
    return {column.name: by_spark_name[column.spark] for column in columns}


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """Check a selection of columns. Raises UsageError if a name is unknown or repeated, or if no
    name is given.
    """
    return selected(names, NAMES, "physical_offset", "the columns are")


def spelled(names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return names in the spelling of the known columns. Spark ignores the case of column names."""
    ours = {name.lower(): name for name in known}
    return tuple(ours.get(name.lower(), name) for name in names)


def selected(
    names: Iterable[str], known: Sequence[str], to_count: str, are: str
) -> tuple[str, ...]:
    """Check a selection of ``known`` columns. Two arguments are parts of error messages:
    ``to_count`` is the column that a count of messages needs, and ``are`` is the text before the
    list of known columns.
    """
    result = tuple(names)
    if not result:
        # An empty selection cannot be used to count messages, because an Arrow batch without
        # columns has no row count.
        raise UsageError(f"no column is named; to count messages, name {to_count}")
    for name in result:
        if name not in known:
            raise UsageError(f"there is no column {name!r}; {are} {', '.join(known)}")
    if len(set(result)) != len(result):
        raise UsageError(f"a column is named twice in {', '.join(result)}")
    return result


def arrow_schema(names: Sequence[str] = NAMES) -> pa.Schema:
    """Return the Arrow schema of some columns. All columns are nullable, as in Spark."""
    return _arrow_schema(tuple(names))


# The schema is cached, because a read may make many small batches, and each needs a schema.
@cache
def _arrow_schema(names: tuple[str, ...]) -> pa.Schema:
    import pyarrow as pa

    types = arrow_types()
    return pa.schema([(name, types[name]) for name in names])


def markdown() -> str:
    """Format the columns as a table for the documentation."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    lines += [f"| {c.name} | `{c.spark}` | {c.meaning} |" for c in COLUMNS]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class KafkaColumn:
    """A column of Spark's Kafka source. The column is made from the message column ``source``; if
    ``source`` is None, the column is a constant.
    """

    name: str
    spark: str
    source: str | None


HEADERS: Final = "headers"
KAFKA_COLUMNS: Final = (
    KafkaColumn("key", "binary", "keys"),
    KafkaColumn("value", "binary", "body"),
    KafkaColumn("topic", "string", "topic"),
    KafkaColumn("partition", "int", "queue_id"),
    KafkaColumn("offset", "bigint", "queue_offset"),
    KafkaColumn("timestamp", "timestamp", "store_timestamp"),
    KafkaColumn("timestampType", "int", None),
    KafkaColumn(HEADERS, "array<struct<key:string,value:binary>>", "properties"),
)
LOG_APPEND_TIME: Final = 1
"""Kafka's timestampType for a timestamp from the broker."""

_BY_NAME = {column.name: column for column in KAFKA_COLUMNS}


def kafka_names(*, headers: bool) -> tuple[str, ...]:
    """Return the names of the columns, with or without the column ``headers``."""
    return tuple(column.name for column in KAFKA_COLUMNS if headers or column.name != HEADERS)


def check_kafka_names(given: Iterable[str], *, headers: bool) -> tuple[str, ...]:
    """Check a selection of columns, ignoring the case of letters. Raises UsageError; see
    :func:`check_names`.
    """
    found = spelled(given, kafka_names(headers=True))
    if HEADERS in found and not headers:
        raise UsageError(f"the column {HEADERS} needs includeHeaders=true")
    return selected(found, kafka_names(headers=headers), "offset", "Kafka's are")


def sources(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the message columns that the Kafka columns ``wanted`` need. The result has at least
    one column, because a batch without columns has no row count.
    """
    found = (_BY_NAME[name].source for name in wanted)
    return tuple(dict.fromkeys(name for name in found if name is not None)) or ("queue_offset",)


def kafka_batch(batch: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
    """Make Kafka's columns from a batch with the columns of :func:`sources`."""
    import pyarrow as pa

    arrays = [_array(batch, _BY_NAME[name]) for name in wanted]
    return pa.RecordBatch.from_arrays(arrays, names=list(wanted))


def _array(batch: pa.RecordBatch, column: KafkaColumn) -> pa.Array:
    import pyarrow as pa

    if column.source is None:
        return pa.repeat(pa.scalar(LOG_APPEND_TIME, pa.int32()), batch.num_rows)
    array = batch.column(column.source)
    if column.name == "key":
        return _first_words(array)
    return _headers(array) if column.name == HEADERS else array


def _first_words(keys: pa.Array) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    first = pc.list_element(pc.split_pattern(pc.utf8_ltrim(keys, " "), " ", max_splits=1), 0)
    return pc.if_else(pc.equal(first, ""), pa.scalar(None, pa.string()), first).cast(pa.binary())


def _headers(properties: pa.MapArray) -> pa.Array:
    # The value is null if a message has no properties, as in Kafka's source for a message without
    # headers.
    import pyarrow as pa
    import pyarrow.compute as pc

    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    pairs = pa.StructArray.from_arrays(
        [properties.keys, properties.items.cast(pa.binary())], fields=list(pair)
    )
    offsets = properties.offsets
    empty = pc.equal(offsets[1:], offsets[:-1])
    if not pc.any(empty).as_py():
        return pa.ListArray.from_arrays(offsets, pairs)
    # If a mask is given, pyarrow rejects offsets that are a slice of an array. So copy the offsets.
    return pa.ListArray.from_arrays(pa.array(offsets.to_numpy()), pairs, mask=empty)
