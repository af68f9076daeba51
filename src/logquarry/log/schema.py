"""The columns of a message: one table for the Arrow schema and the Spark schema."""

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
    Column("queue_id", "int", "queue id: number of the queue in the topic"),
    Column("queue_offset", "bigint", "number of the message in its consume queue"),
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
    Column("body", "binary", "the body as stored"),
)
NAMES: Final = tuple(column.name for column in COLUMNS)

EXACT_PROPERTIES: Final = Column(
    "properties_string",
    "binary",
    "the property string, if the properties in their order do not reproduce it",
    optional=True,
)
"""A hidden column for exports. Without this column, the exact property string would be lost."""


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
    """Check a selection of columns. Raises UsageError if names are unknown or repeated, or if there
    are none.
    """
    return selected(names, NAMES, "physical_offset", "the columns are")


def selected(
    names: Iterable[str], known: Sequence[str], to_count: str, are: str
) -> tuple[str, ...]:
    """Check a selection of ``known`` columns; ``to_count`` and ``are`` are parts of errors."""
    result = tuple(names)
    if not result:
        # An Arrow batch without columns has no row count.
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


# Cached, because each of many small batches needs its schema.
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
