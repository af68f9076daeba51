"""Finds the files of an import, reads Parquet files, and prepares rows for the store.

The source is a file, a folder or a glob. An export to Parquet has a manifest with its files and the
number of rows in each file. The import reads these files in the order of broker and first offset,
so each queue keeps the order of its messages.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from logquarry import arguments
from logquarry.errors import BadRow, DecompressionError, SourceNotReadable, UsageError
from logquarry.format import java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import Bools, Int64
from logquarry.format.frame import HOST_SIZE_V4, valid_host_bytes
from logquarry.format.java import crc32
from logquarry.log import codec, exported, schema
from logquarry.log.location import path_or_url
from logquarry.paths import exists, is_file, is_folder, matching
from logquarry.text import counted
from logquarry.write.outgoing_arrow import binary_spans

# The names of an export's files, repeated from spark/output.py: this module must not import from
# that layer.
MANIFEST: Final = "_manifest.json"
SUCCESS: Final = "_SUCCESS"

WORDS: Final = {"keys": props.KEYS, "tags": props.TAGS, "uniq_key": props.UNIQ_KEY}
"""Columns whose values are also in the properties of the message."""

_PARQUET_MAGIC: Final = b"PAR1"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to import.

    Attributes:
        is_parquet: True for Parquet, False for JSON Lines.
        rows: number of rows, from the manifest; None without a manifest.
    """

    path: str
    is_parquet: bool
    size: int
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The files of an import, in reading order.

    Attributes:
        damage: number of damaged places that the export skipped, from its manifest.
    """

    location: str
    files: tuple[SourceFile, ...]
    damage: int = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def open_source(location: str | os.PathLike[str]) -> Source:
    """Find the files to import."""
    name = path_or_url(arguments.path(location, "source", may_be_long=True))
    if "://" in name:
        raise UsageError(f"{name}: only local files can be imported")
    path = Path(name)
    if is_folder(path):
        if is_file(path / MANIFEST) or is_file(path / SUCCESS):
            return _exported(path)
        found = [child for child in sorted(path.iterdir()) if _is_data(child)]
    elif exists(path) or not glob.has_magic(name):
        found = [path]
    else:
        found = [match for match in matching(name) if _is_data(match)]
    if not found:
        raise SourceNotReadable(f"{name}: contains no files to import")
    return Source(name, tuple(_file(child) for child in found))


def _is_data(path: Path) -> bool:
    # Like Spark and pyarrow, ignore names that begin with an underscore or a dot.
    return is_file(path) and not path.name.startswith(("_", "."))


def _file(path: Path, rows: int | None = None) -> SourceFile:
    try:
        if exists(path) and not is_file(path):
            # Do not open a pipe: it delivers its bytes only once, and an import reads a file twice.
            raise SourceNotReadable(f"{path}: is not a plain file: save its content in a file")
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        return SourceFile(str(path), is_parquet, path.stat().st_size, rows)
    except OSError as error:
        raise SourceNotReadable(f"{path}: {error.strerror}") from error


# --------------------------------------------------------------------------------------- manifest
def _exported(folder: Path) -> Source:
    if not is_file(folder / SUCCESS):
        raise SourceNotReadable(
            f"{folder}: the export is incomplete ({SUCCESS} is missing): run the export again"
        )
    manifest = folder / MANIFEST
    try:
        document = json.loads(manifest.read_bytes())
        entries = sorted(document["files"], key=itemgetter("broker", "first_offset", "path"))
        files = [(folder / entry["path"], _count(entry["rows"])) for entry in entries]
        damage = len(document.get("damage", ()))
    except OSError as error:
        raise SourceNotReadable(f"{manifest}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SourceNotReadable(f"{manifest}: is not a manifest of an export: {error!r}") from error
    root = folder.resolve()
    for path, _ in files:
        if not path.resolve().is_relative_to(root):
            raise SourceNotReadable(f"{folder}: {MANIFEST} names {path}, which is outside of it")
    return Source(str(folder), tuple(_file(path, rows) for path, rows in files), damage)


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"rows is {value!r}")
    return value


# ------------------------------------------------------------------------------------------- rows

_HOSTS: Final = (("born_host", sys_flag.BORN_HOST_V6), ("store_host", sys_flag.STORE_HOST_V6))
_MAPPED_V4: Final = bytes(10) + b"\xff\xff"
_MOST_CONTENT: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of rows of a file, with the columns of an export.

    Attributes:
        unit: the word for a row of this file in error texts: ``line`` or ``row``.
        numbers: for each row, its number in the file, from 1.
        done: approximate number of bytes read from the file up to the end of this batch.
    """

    batch: pa.RecordBatch
    path: str
    unit: str
    numbers: Sequence[int]
    done: int

    def bad(self, index: int, reason: str) -> BadRow:
        """Return the error for a row that cannot be imported."""
        return BadRow(self.path, self.unit, self.numbers[index], reason)

    def after(self, count: int) -> Rows:
        """Return the batch without its first ``count`` rows."""
        return replace(self, batch=self.batch[count:], numbers=self.numbers[count:])


def as_stored(rows: Rows) -> pa.RecordBatch:
    """Check all bodies, and convert the hosts to bytes. Return the batch for ``put_stored``."""
    batch = rows.batch
    for name in ("topic", "body"):
        column = batch.column(name)
        if column.null_count:
            index = pc.index(column.is_null(), True).as_py()
            why = " (was it redacted?)" if name == "body" else ""
            raise rows.bad(index, f"the {name} is missing{why}")
    flags = _numbers(batch, "sys_flag", 0)
    _check_bodies(rows, flags)
    for name, bit in _HOSTS:
        if name in batch.schema.names:
            place = batch.schema.get_field_index(name)
            batch = batch.set_column(place, name, _hosts(rows, name, (flags & bit) != 0))
    return batch


def _numbers(batch: pa.RecordBatch, name: str, default: int) -> Int64:
    if name not in batch.schema.names:
        return np.full(batch.num_rows, default, np.int64)
    filled = pc.fill_null(batch.column(name), default)
    values: Int64 = filled.to_numpy(zero_copy_only=False).astype(np.int64)
    return values


# ------------------------------------------------------------------------------------------ hosts
def _hosts(rows: Rows, name: str, is_v6: Bools) -> pa.Array:
    # If SYSFLAG has the IPv6 bit, the frame stores an address in 16 bytes, even if it is an IPv4
    # address.
    coded = rows.batch.column(name).dictionary_encode()
    words = coded.dictionary.to_pylist()
    table: list[bytes | None] = []
    for wide in (False, True):
        for number, word in enumerate(words):
            try:
                table.append(_host_bytes(word, wide))
            except UsageError as error:
                chosen = pc.equal(coded.indices, number).to_numpy(zero_copy_only=False)
                raise rows.bad(int(np.flatnonzero(chosen)[0]), f"{name}: {error}") from error
    indices = pc.add(coded.indices.cast(pa.int64()), pa.array(is_v6 * len(words), pa.int64()))
    return pa.array(table, pa.binary()).take(indices)


def _host_bytes(word: str, wide: bool) -> bytes:
    data = valid_host_bytes(word)
    if wide and len(data) == HOST_SIZE_V4:
        return _MAPPED_V4 + data
    return data


# ----------------------------------------------------------------------------------------- bodies
def _check_bodies(rows: Rows, flags: Int64) -> None:
    # An export with --decompress stores decompressed bodies, but leaves SYSFLAG's bit for
    # compressed bodies set. If a row has this bit but no CRC, try to decompress its body. The
    # attempt fails if the body is already decompressed.
    crcs = _numbers(rows.batch, "body_crc", -1)
    body = rows.batch.column("body")
    wrong = _first_wrong(body, crcs)
    if wrong is not None:
        raise rows.bad(wrong, _reason(int(flags[wrong])))
    for index in np.flatnonzero((crcs < 0) & ((flags & sys_flag.COMPRESSED) != 0)).tolist():
        try:
            sys_flag.decompress(body[index].as_py(), int(flags[index]), limit=_MOST_CONTENT)
        except DecompressionError as error:
            raise rows.bad(index, f"{_reason(int(flags[index]))} ({error})") from error


def _reason(flag: int) -> str:
    if sys_flag.is_compressed(flag):
        return (
            "sys_flag marks the body as compressed, but it is not: it comes from an export "
            "with --decompress: export without it"
        )
    return "the CRC of the body differs from body_crc"


def _first_wrong(body: pa.Array, crcs: Int64) -> int | None:
    # A CRC below 0 means that the CRC is unknown: `put_stored` then does not check the body.
    spans = binary_spans(body, len(body), "body")
    kernels = codec.kernels()
    if kernels is not None:
        address = codec.crc32_address()
        found = int(kernels.first_wrong_crc(spans.at, spans.length, crcs, address))
        return None if found < 0 else found
    for number, (data, crc) in enumerate(zip(body.to_pylist(), crcs.tolist(), strict=True)):
        if crc >= 0 and crc32(data) & java.INT_MAX != crc:
            return number
    return None


# ---------------------------------------------------------------------------------------- Parquet
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
"""The columns to read. A column either becomes a field of the message, or the import compares its
values with the message.
"""


def read_parquet(file: SourceFile) -> Iterator[Rows]:
    """Yield the messages of a Parquet file in batches."""
    try:
        # The path can have bytes that are not UTF-8, which pyarrow accepts only as bytes.
        with pa.OSFile(os.fsencode(file.path)) as source, pq.ParquetFile(source) as opened:
            _check_schema(file, opened.schema_arrow)
            count = opened.metadata.num_rows
            if file.rows is not None and file.rows != count:
                raise SourceNotReadable(
                    f"{file.path}: has {counted(count, 'row')}, but the export's manifest states "
                    f"{file.rows}"
                )
            try:
                exact = exported.read_exact(opened.metadata.metadata)
            except ValueError as error:
                raise SourceNotReadable(f"{file.path}: {error}") from error
            yield from _read(file, opened, exact)
    except MemoryError:
        raise
    except (pa.ArrowException, OSError) as error:
        if "Failed to launch worker thread" in str(error):  # The source is not the cause.
            raise
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
    # Choose the number of rows by the bytes of the batch, because rows can have very different
    # sizes.
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
    # Return the property string of each row. The string of a row is null if the map in the row
    # contains all properties. Return None if no row needs a string. The value of the column
    # ``keys``, ``tags`` or ``uniq_key`` replaces the value in the map, as in JSON Lines and in a
    # put. If the row has a property string, the string replaces the map and these columns.
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
