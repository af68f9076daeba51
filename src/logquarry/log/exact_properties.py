"""What the column ``properties`` cannot say of a message's property string, beside a Parquet file.

A map has no doubled separators, no key that comes twice, no empty values and no bytes that are not
UTF-8; sound stores have them all, and an import has to give them back. So the strings that are not
what their map makes, in its order, stand in the file's own metadata, where no reader of tables
meets them. They are few, but where clients of before 4.9.3 wrote: their strings all end with a
separator, and that is said without a copy.

::

    metadata "logquarry.properties_string": base64 of an Arrow IPC stream (zstd) with the columns
        skip    uint32   rows of the file since the last one that is listed
        string  binary   the bytes; null for what the map makes and a separator
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from logquarry.format import properties as props
from logquarry.log.schema import EXACT_PROPERTIES

KEY: Final = b"logquarry.properties_string"
"""The name in the file's metadata."""
MOST_BYTES: Final = 16 << 20
"""Bytes of strings in one file, about: readers bound the metadata that they take."""

_END: Final = props.PROPERTY_SEPARATOR.encode()
_SCHEMA: Final = pa.schema({"skip": pa.uint32(), "string": pa.binary()})

Int64 = npt.NDArray[np.int64]


class ExactProperties:
    """Collects the strings of one file.

    Attributes:
        size: bytes of those that are kept.
    """

    def __init__(self) -> None:
        self.size = 0
        self._rows = 0
        self._last = -1
        self._parts: list[pa.RecordBatch] = []

    def add(self, rows: pa.Table) -> None:
        """Take in the next rows: columns ``properties`` and ``properties_string``."""
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
        """Take in the next rows as another file had them: what :func:`read` gave of it.

        Args:
            listed: the rows that are listed there, and their strings; None for none.
            count: how many rows that file has.
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
        """What goes into the file's metadata; nothing where its maps say all."""
        if not self._parts:
            return {}
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, _SCHEMA, options=options) as writer:
            writer.write_table(pa.Table.from_batches(self._parts).combine_chunks())
        return {KEY.decode(): base64.b64encode(sink.getvalue()).decode("ascii")}


def read(metadata: Mapping[bytes, bytes] | None) -> tuple[Int64, pa.Array] | None:
    """The rows of a file whose map does not say all, and their strings; None where all do.

    A null stands for what the map makes, and a separator.

    Raises:
        ValueError: if the metadata holds something else.
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
    """The property strings of some rows where their maps do not say all, and null elsewhere.

    Args:
        exact: what :func:`read` gave.
        maps: the column ``properties`` of the rows.
        first: number of the first of them in the file.
    """
    rows, listed = exact
    begin, end = np.searchsorted(rows, [first, first + len(maps)]).tolist()
    values: list[bytes | None] = [None] * len(maps)
    places = (rows[begin:end] - first).tolist()
    for place, value in zip(places, listed[begin:end].to_pylist(), strict=True):
        values[place] = _made(maps[place].as_py()) + _END if value is None else value
    return pa.array(values, pa.binary())


def _made(pairs: list[tuple[str, str]] | None) -> bytes:
    return props.encode(dict(pairs or ())).encode()
