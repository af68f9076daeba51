"""Converts messages to the columns of Spark's Kafka source.

The key is the first word of KEYS, or null. The timestamp is the store timestamp, like Kafka's
LogAppendTime. The headers are the message's properties.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logquarry.errors import UsageError
from logquarry.log import schema

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class KafkaColumn:
    """A column of Spark's Kafka source, made from the column ``source`` (None: constant)."""

    name: str
    spark: str
    source: str | None


HEADERS: Final = "headers"
COLUMNS: Final = (
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
"""Kafka's timestampType for a timestamp that the broker set."""

_BY_NAME = {column.name: column for column in COLUMNS}


def names(*, headers: bool) -> tuple[str, ...]:
    """Return the names of the columns, with or without the column ``headers``."""
    return tuple(column.name for column in COLUMNS if headers or column.name != HEADERS)


def check_names(given: Iterable[str], *, headers: bool) -> tuple[str, ...]:
    """Check a selection of columns. Raises UsageError; see :func:`schema.check_names`."""
    found = tuple(given)
    if HEADERS in found and not headers:
        raise UsageError(f"the column {HEADERS} needs includeHeaders=true")
    return schema.selected(found, names(headers=headers), "offset", "Kafka's are")


def sources(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the message columns to read; at least one, because a batch without columns has no
    rows.
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
    # Kafka's source has null for a message without headers.
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
    # pyarrow accepts a mask only with offsets that are not a slice.
    return pa.ListArray.from_arrays(pa.array(offsets.to_numpy()), pairs, mask=empty)
