"""Keeps the property strings that a Parquet file's column ``properties`` cannot reproduce.

The column is a map, which loses doubled separators, repeated keys, empty values and bytes that are
not UTF-8. An import must restore the string, so an export writes the strings of such rows into the
metadata of the Parquet file. Clients before 4.9.3 write a separator after the last property too. If
this separator is the only difference between a string and the encoded map, the list contains a null
in place of the string.

::

    metadata "logquarry.properties_string": base64 of an Arrow IPC stream (zstd) with the columns
        skip    uint32   rows of the file since the last listed row
        string  binary   the bytes; null means: the encoded map plus a separator
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logquarry.format import properties as props
from logquarry.format.arrays import Int64
from logquarry.log.schema import EXACT_PROPERTIES

KEY: Final = b"logquarry.properties_string"
"""Key of the list in the file's metadata."""
MOST_BYTES: Final = 16 << 20
"""Approximate maximum bytes of strings in one file. There is a limit because readers of Parquet
reject a file with too much metadata.
"""

_END: Final = props.PROPERTY_SEPARATOR.encode()
_SCHEMA: Final = pa.schema({"skip": pa.uint32(), "string": pa.binary()})


class ExactProperties:
    """Collects the property strings of one file. ``size``: bytes of the listed strings."""

    def __init__(self) -> None:
        self.size = 0
        self._rows = 0
        self._last = -1
        self._parts: list[pa.RecordBatch] = []

    def add(self, rows: pa.Table) -> None:
        """Add rows with the columns ``properties`` and ``properties_string``."""
        column = rows.column(EXACT_PROPERTIES.name)
        if column.null_count < len(column):
            exact = column.combine_chunks()
            odd = np.flatnonzero(exact.is_valid().to_numpy(zero_copy_only=False))
            strings = exact.take(pa.array(odd))
            maps = rows.column("properties").take(pa.array(odd)).to_pylist()
            values = [
                None if string == _made(pairs) + _END else string
                for string, pairs in zip(strings.to_pylist(), maps, strict=True)
            ]
            self._list(odd + self._rows, pa.array(values, pa.binary()))
        self._rows += rows.num_rows

    def add_listed(self, listed: tuple[Int64, pa.Array] | None, count: int) -> None:
        """Add the ``count`` rows of another file. ``listed`` is the result of :func:`read` for that
        file.
        """
        if listed is not None and len(listed[0]):
            rows, values = listed
            self._list(rows + self._rows, values)
        self._rows += count

    def _list(self, places: Int64, values: pa.Array) -> None:
        skips = np.diff(places, prepend=self._last) - 1
        self._last = int(places[-1])
        self.size += int(pc.sum(pc.binary_length(values)).as_py() or 0)
        self._parts.append(
            pa.record_batch([pa.array(skips.astype(np.uint32)), values], schema=_SCHEMA)
        )

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file; an empty dict if the maps reproduce all strings."""
        if not self._parts:
            return {}
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, _SCHEMA, options=options) as writer:
            writer.write_table(pa.Table.from_batches(self._parts).combine_chunks())
        return {KEY.decode(): base64.b64encode(sink.getvalue()).decode("ascii")}


def read(metadata: Mapping[bytes, bytes] | None) -> tuple[Int64, pa.Array] | None:
    """Read the list in a file's metadata. Return the numbers of the listed rows and their strings;
    None if the file has no list.
    """
    data = (metadata or {}).get(KEY)
    if data is None:
        return None
    with pa.ipc.open_stream(base64.b64decode(data, validate=True)) as reader:
        table = reader.read_all()
    if not table.schema.equals(_SCHEMA):
        raise ValueError(f"{KEY.decode()} has the columns {table.schema.names}")
    skips = table.column("skip").combine_chunks().to_numpy(zero_copy_only=False)
    rows = np.cumsum(skips.astype(np.int64) + 1) - 1
    return rows, table.column("string").combine_chunks()


def strings(exact: tuple[Int64, pa.Array], maps: pa.Array, first: int) -> pa.Array:
    """Return the strings of rows from row ``first`` on; null for a row that is not listed."""
    rows, listed = exact
    begin, end = np.searchsorted(rows, [first, first + len(maps)]).tolist()
    values: list[bytes | None] = [None] * len(maps)
    places = (rows[begin:end] - first).tolist()
    for place, value in zip(places, listed[begin:end].to_pylist(), strict=True):
        values[place] = _made(maps[place].as_py()) + _END if value is None else value
    return pa.array(values, pa.binary())


def _made(pairs: list[tuple[str, str]] | None) -> bytes:
    return props.encode(dict(pairs or ())).encode()
