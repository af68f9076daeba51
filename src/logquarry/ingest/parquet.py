"""Reads Parquet files of an export back into rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.errors import SourceNotReadable
from logquarry.format import properties as props
from logquarry.ingest.rows import Rows, SourceFile
from logquarry.log import exact_properties, schema

CHUNK_BYTES: Final = 8 << 20
"""Approximate bytes of rows in one put."""

_MOST_ROWS: Final = 1 << 16
_EXACT: Final = schema.EXACT_PROPERTIES.name
_NEEDED: Final = ("topic", "body")
_READ: Final = (
    *("topic", "queue_id", "queue_offset", "store_timestamp", "born_timestamp", "born_host"),
    *("store_host", "sys_flag", "flag", "body_crc", "reconsume_times"),
    *("prepared_transaction_offset", "tags", "keys", "uniq_key", "properties", "body", _EXACT),
)
"""The columns that become fields of a message, or that are compared with the message."""


def read_parquet(file: SourceFile) -> Iterator[Rows]:
    """Yield the messages of a file in batches.

    Raises:
        SourceNotReadable: if the file is damaged, if its columns are not those of an export, or if
            the manifest states another number of rows.
    """
    try:
        with pq.ParquetFile(file.path) as opened:
            _check_schema(file, opened.schema_arrow)
            count = opened.metadata.num_rows
            if file.rows is not None and file.rows != count:
                raise SourceNotReadable(
                    f"{file.path}: has {count} rows, but the export's manifest states {file.rows}"
                )
            try:
                exact = exact_properties.read(opened.metadata.metadata)
            except ValueError as error:
                raise SourceNotReadable(f"{file.path}: {error}") from error
            yield from _read(file, opened, exact)
    except (pa.ArrowException, OSError) as error:
        raise SourceNotReadable(f"{file.path}: {error}") from error


def _check_schema(file: SourceFile, found: pa.Schema) -> None:
    for name in found.names:
        if name not in schema.NAMES and name != _EXACT:
            raise SourceNotReadable(f"{file.path}: an export has no column {name!r}")
    if len(set(found.names)) != len(found.names):
        raise SourceNotReadable(f"{file.path}: a column appears twice: {', '.join(found.names)}")
    for name in _NEEDED:
        if name not in found.names:
            raise SourceNotReadable(f"{file.path}: the column {name} is missing")


def _read(file: SourceFile, opened: pq.ParquetFile, exact: Any) -> Iterator[Rows]:
    names = [name for name in _READ if name in opened.schema_arrow.names]
    if "properties" in names or _EXACT in names:
        # The properties contain them.
        names = [name for name in names if name not in ("tags", "keys", "uniq_key")]
    first = 0
    for read in opened.iter_batches(_batch_rows(opened), columns=names):
        for batch in _cut(read):
            yield Rows(
                _batch(file, batch, exact, first),
                file.path,
                "row",
                range(first + 1, first + batch.num_rows + 1),
                file.size * (first + batch.num_rows) // max(opened.metadata.num_rows, 1),
            )
            first += batch.num_rows


def _batch_rows(opened: pq.ParquetFile) -> int:
    """Return how many rows have about CHUNK_BYTES, by the row group with the largest rows."""
    groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
    width = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return int(min(_MOST_ROWS, max(1, CHUNK_BYTES // max(width, 1))))


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into pieces of about CHUNK_BYTES: rows can differ much in size."""
    pieces = -(-batch.nbytes // CHUNK_BYTES)
    step = max(1, -(-batch.num_rows // max(pieces, 1)))
    for first in range(0, batch.num_rows, step):
        yield batch[first : first + step]


def _batch(file: SourceFile, batch: pa.RecordBatch, exact: Any, first: int) -> pa.RecordBatch:
    kinds = schema.arrow_types()
    columns: dict[str, pa.Array] = {}
    for name in batch.schema.names:
        columns[name] = _cast(file, name, batch.column(name), kinds[name])
    if "properties" in columns:
        if exact is not None and _EXACT not in columns:
            columns[_EXACT] = exact_properties.strings(exact, columns["properties"], first)
    elif _EXACT not in columns:
        columns[_EXACT] = _strings_of_words(columns, batch.num_rows)
        columns = {name: columns[name] for name in columns if name not in ("tags", "keys")}
    columns.pop("uniq_key", None)
    return pa.record_batch(columns)


def _cast(file: SourceFile, name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    given = column.type
    same = (
        (pa.types.is_map(kind) and pa.types.is_map(given))
        or (pa.types.is_timestamp(kind) and pa.types.is_timestamp(given))
        or (pa.types.is_integer(kind) and pa.types.is_integer(given))
        or (pa.types.is_string(kind) and _is_text(given))
        or (pa.types.is_binary(kind) and (_is_text(given) or _is_bytes(given)))
    )
    # Accept a whole number for a timestamp, as milliseconds.
    same = same or (pa.types.is_timestamp(kind) and given == pa.int64())
    if same and pa.types.is_timestamp(kind):
        return column
    try:
        if same:
            return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SourceNotReadable(f"{file.path}: the column {name}: {error}") from error
    raise SourceNotReadable(f"{file.path}: the column {name} is {given}, but must be {kind}")


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _strings_of_words(columns: dict[str, pa.Array], count: int) -> pa.Array:
    """Make property strings from keys, tags and unique key, if the properties were not exported."""
    words = {
        word: columns[name].to_pylist() if name in columns else [None] * count
        for name, word in (
            ("keys", props.KEYS),
            ("tags", props.TAGS),
            ("uniq_key", props.UNIQ_KEY),
        )
    }
    strings = [
        props.encode({word: text for word, of in words.items() if (text := of[row])}).encode()
        for row in range(count)
    ]
    return pa.array(strings, pa.binary())
