"""Reads the rows of exported Parquet files for an import."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logquarry.errors import BadRow, SourceNotReadable
from logquarry.format import properties as props
from logquarry.ingest.rows import WORDS, Rows, SourceFile
from logquarry.log import exported, schema

PARQUET_BYTES: Final = 8 << 20
"""Approximate bytes of the rows that one call puts into the store."""

_MOST_ROWS: Final = 1 << 16
_EXACT: Final = schema.EXACT_PROPERTIES.name
_NEEDED: Final = ("topic", "body")
_READ: Final = (
    *("topic", "queue_id", "queue_offset", "store_timestamp", "born_timestamp", "born_host"),
    *("store_host", "sys_flag", "flag", "body_crc", "reconsume_times"),
    *("prepared_transaction_offset", "tags", "keys", "uniq_key", "properties", "body", _EXACT),
)
"""The columns to read. A column becomes a field of the message, or its values must agree with the
message.
"""


def read_parquet(file: SourceFile) -> Iterator[Rows]:
    """Yield the messages of a Parquet file in batches."""
    try:
        with pq.ParquetFile(file.path) as opened:
            _check_schema(file, opened.schema_arrow)
            count = opened.metadata.num_rows
            if file.rows is not None and file.rows != count:
                raise SourceNotReadable(
                    f"{file.path}: has {count} rows, but the export's manifest states {file.rows}"
                )
            try:
                exact = exported.read_exact(opened.metadata.metadata)
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
    kinds = {field.name: field.type for field in opened.schema_arrow}
    names = [n for n in _READ if n in kinds and (n != "properties" or kinds[n] != pa.null())]
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
    groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
    width = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return int(min(_MOST_ROWS, max(1, PARQUET_BYTES // max(width, 1))))


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    # Choose the number of rows by the bytes of the batch, because the sizes of rows can differ
    # much.
    pieces = -(-batch.nbytes // PARQUET_BYTES)
    step = max(1, -(-batch.num_rows // max(pieces, 1)))
    for first in range(0, batch.num_rows, step):
        yield batch[first : first + step]


def _batch(file: SourceFile, batch: pa.RecordBatch, exact: Any, first: int) -> pa.RecordBatch:
    kinds = schema.arrow_types()
    columns: dict[str, pa.Array] = {}
    for name in batch.schema.names:
        columns[name] = _cast(file, name, batch.column(name), kinds[name])
    if "properties" in columns and exact is not None and _EXACT not in columns:
        columns[_EXACT] = exported.exact_strings(exact, columns["properties"], first)
    strings = _with_words(file, columns, first)
    if strings is not None:
        columns[_EXACT] = strings
    return pa.record_batch({name: c for name, c in columns.items() if name not in WORDS})


def _cast(file: SourceFile, name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    given = column.type
    if given == pa.null():  # for example a column of pandas in which all values are missing
        return pa.nulls(len(column), kind)
    same = (
        (pa.types.is_map(kind) and pa.types.is_map(given))
        # An integer in a column of timestamps is a number of milliseconds.
        or (pa.types.is_timestamp(kind) and (pa.types.is_timestamp(given) or given == pa.int64()))
        or (pa.types.is_integer(kind) and pa.types.is_integer(given))
        or (pa.types.is_string(kind) and _is_text(given))
        or (pa.types.is_binary(kind) and (_is_text(given) or _is_bytes(given)))
    )
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


def _with_words(file: SourceFile, columns: dict[str, pa.Array], first: int) -> pa.Array | None:
    # Return the property strings. The string of a row is null if the row's map is complete. Return
    # None if all maps are complete. As in JSON Lines and in a put, the value of a column in WORDS
    # replaces the value in the map. A property string replaces both.
    maps, exact = columns.get("properties"), columns.get(_EXACT)
    count = len(columns["topic"])
    differs = np.zeros(count, np.bool_)
    for name, word in WORDS.items():
        if name in columns:
            differs |= _differing(columns[name], maps, word)
    if exact is not None:
        differs &= exact.is_null().to_numpy(zero_copy_only=False)
    if not differs.any():
        return exact
    strings = [None] * count if exact is None else exact.to_pylist()
    for row in np.flatnonzero(differs).tolist():
        try:
            strings[row] = _made(columns, row)
        except ValueError as error:
            raise BadRow(file.path, "row", first + row + 1, str(error)) from error
    return pa.array(strings, pa.binary())


def _differing(column: pa.Array, maps: pa.Array | None, word: str) -> Any:
    is_given = column.is_valid()
    if maps is not None:
        same = pc.equal(column, pc.map_lookup(maps, pa.scalar(word), "last"))
        is_given = pc.and_(is_given, pc.invert(pc.fill_null(same, False)))
    return is_given.to_numpy(zero_copy_only=False)


def _made(columns: dict[str, pa.Array], row: int) -> bytes:
    maps = columns.get("properties")
    found = dict((maps[row].as_py() if maps is not None else None) or ())
    for name, word in WORDS.items():
        value = columns[name][row].as_py() if name in columns else None
        if value is not None:
            found[word] = value
    for name, value in found.items():
        if value is None:
            raise ValueError(f"the property {name!r} is null")
    return props.encode(found).encode()
