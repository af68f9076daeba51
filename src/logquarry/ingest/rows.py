"""Finds the files of an import, and prepares their rows for the store.

The source is a file, a folder or a glob. An export to Parquet has a manifest with its files and the
number of rows in each file. The import reads these files in the order of broker and first offset,
so each queue keeps the order of its messages.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logquarry.errors import BadRow, DecompressionError, SourceNotReadable, UsageError
from logquarry.format import java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import Bools, Int64
from logquarry.format.frame import HOST_SIZE_V4, valid_host_bytes
from logquarry.format.java import crc32
from logquarry.log import codec
from logquarry.log.location import path_or_url
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
    name = path_or_url(os.fspath(location))
    if "://" in name:
        raise UsageError(f"{name}: only local files can be imported")
    path = Path(name)
    if path.is_dir():
        if (path / MANIFEST).is_file() or (path / SUCCESS).is_file():
            return _exported(path)
        found = [child for child in sorted(path.iterdir()) if _is_data(child)]
    elif path.exists() or not glob.has_magic(name):
        found = [path]
    else:
        found = [Path(match) for match in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207
        found = [match for match in found if _is_data(match)]
    if not found:
        raise SourceNotReadable(f"{name}: contains no files to import")
    return Source(name, tuple(_file(child) for child in found))


def _is_data(path: Path) -> bool:
    # Like Spark and pyarrow, ignore names that begin with an underscore or a dot.
    return path.is_file() and not path.name.startswith(("_", "."))


def _file(path: Path, rows: int | None = None) -> SourceFile:
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        return SourceFile(str(path), is_parquet, path.stat().st_size, rows)
    except OSError as error:
        raise SourceNotReadable(f"{path}: {error.strerror}") from error


# --------------------------------------------------------------------------------------- manifest
def _exported(folder: Path) -> Source:
    if not (folder / SUCCESS).is_file():
        raise SourceNotReadable(
            f"{folder}: the export is incomplete ({SUCCESS} is missing): run the export again"
        )
    manifest = folder / MANIFEST
    try:
        document = json.loads(manifest.read_bytes())
        entries = sorted(document["files"], key=_place)
        files = [(folder / entry["path"], _count(entry["rows"])) for entry in entries]
        damage = len(document.get("damage", ()))
    except OSError as error:
        raise SourceNotReadable(f"{manifest}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SourceNotReadable(f"{manifest}: is not a manifest of an export: {error!r}") from error
    _require_within(folder, [path for path, _ in files])
    return Source(str(folder), tuple(_file(path, rows) for path, rows in files), damage)


def _place(entry: dict[str, Any]) -> tuple[str, int, str]:
    return entry["broker"], entry["first_offset"], entry["path"]


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"rows is {value!r}")
    return value


def _require_within(folder: Path, paths: Sequence[Path]) -> None:
    root = folder.resolve()
    for path in paths:
        if not path.resolve().is_relative_to(root):
            raise SourceNotReadable(f"{folder}: {MANIFEST} names {path}, which is outside of it")


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
    """Check all bodies; return a batch that ``put_stored`` accepts: its hosts are bytes."""
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
    # compressed bodies set. If the file has no CRC, detect such bodies: check that each body with
    # the bit decompresses.
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
