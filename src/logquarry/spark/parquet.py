"""One task's messages as Parquet files: what the workers of an export do. Knows nothing of Spark.

Rows stay in physical order. Rows of about one row group are in memory at a time, however large the
task is. Files go to a folder of the attempt's own; the driver moves those of the attempts that
count.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.errors import UsageError
from logquarry.log import schema
from logquarry.log.batches import DamageLog
from logquarry.log.exact_properties import MOST_BYTES, ExactProperties
from logquarry.log.schema import EXACT_PROPERTIES
from logquarry.log.splits import LogSplit
from logquarry.read.selection import QueueSlice
from logquarry.spark.output import OutputFolder
from logquarry.spark.summary import TALLY_COLUMNS, Summary
from logquarry.spark.tasks import ReadTask, read_batches

PARTITION_COLUMNS: Final = ("broker", "topic", "queue_id", "day")
"""What files can be parted by: columns, and the day of the store timestamp (UTC)."""

ROW_GROUP_BYTES: Final = 64 << 20
"""Bytes of Arrow data in one row group: measured, see docs/performance.md."""
COMPRESSION_LEVEL: Final = 1
"""Of zstd: a higher one saves a few percent of space and takes far more time."""

_MOST_FILES: Final = 64
"""Files that one task has open at once; with more partitions the one not used longest is closed."""
_LONGEST_STEM: Final = 180
_DAY_US: Final = 86_400_000_000
_NULL_PARTITION: Final = "__HIVE_DEFAULT_PARTITION__"
_EPOCH: Final = date(1970, 1, 1)
# What Hive and Spark escape in a partition's value.
_HIVE_ESCAPED = re.compile(r'[\x00-\x1f"#%\'*/:=?\\\x7f{\[\]^]')

# Values that come again and again; for the others a dictionary is made and thrown away.
_DICTIONARY: Final = (
    "broker", "topic", "queue_id", "born_host", "store_host", "sys_flag", "flag", "reconsume_times",
    "prepared_transaction_offset", "tags", "tags_code",
)  # fmt: skip
_DICTIONARY_PATHS: Final = {"properties": "properties.key_value.key"}
# Least and largest value by row group, where queries ask for ranges. Not of keys and bodies.
_STATISTICS: Final = (
    "broker", "topic", "queue_id", "queue_offset", "physical_offset", "store_timestamp",
    "born_timestamp", "tags",
)  # fmt: skip
_ASCENDING: Final = ("queue_offset", "physical_offset", "store_timestamp", "born_timestamp")


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """A file that a task has written.

    Attributes:
        path: where it belongs, below the destination.
        staged: where it is, below the destination.
        broker: whose messages it has.
        rows: how many.
        bytes: of the file.
        first_offset: physical offset of the first message.
        last_offset: of the last.
        values: what its rows have in common, where files are parted.
    """

    path: str
    staged: str
    broker: str
    rows: int
    bytes: int
    first_offset: int
    last_offset: int
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """What one task did.

    Attributes:
        task: its number.
        files: what it wrote.
        summary: what was in it.
        length: bytes of log that it was made for.
    """

    task: int
    files: tuple[WrittenFile, ...]
    summary: Summary
    length: int


def check_partition_columns(names: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """``names`` as a tuple.

    Raises:
        UsageError: if files cannot be parted by one of them.
    """
    for name in names:
        if name not in PARTITION_COLUMNS:
            known = ", ".join(PARTITION_COLUMNS)
            raise UsageError(f"partition by {name!r}: files can be parted by {known}")
        needed = "store_timestamp" if name == "day" else name
        if needed not in columns:
            raise UsageError(f"partition by {name!r}: the column {needed} is not exported")
    if len(set(names)) != len(names):
        raise UsageError(f"partition by {', '.join(names)}: one comes twice")
    return tuple(names)


def write_task(
    number: int, task: ReadTask, folder: OutputFolder, staging: str, partition_by: Sequence[str]
) -> TaskResult:
    """Write the messages of a task into a folder of its own below ``staging``.

    Raises:
        CorruptFrame: on damage, as the task's options say.
    """
    # A second attempt of the same task may run beside the first (speculation).
    attempt = f"{staging}/{number:06d}-{uuid.uuid4().hex[:12]}"
    files = PartedFiles(
        folder,
        task.broker,
        FileForm(
            schema.arrow_schema(task.columns), tuple(partition_by), "properties" in task.columns
        ),
        _Names(attempt, file_stem(task), tuple(partition_by)),
    )
    damage = DamageLog()
    summary = Summary()
    # What the manifest tells is read in any case; what is not wanted of it is not written.
    needed = [*TALLY_COLUMNS, "physical_offset"]
    needed += [EXACT_PROPERTIES.name] if "properties" in task.columns else []
    more = [name for name in needed if name not in task.columns]
    read = replace(task, columns=(*task.columns, *more))
    for rows in chunks(read_batches(read, damage), in_one=bool(partition_by)):
        summary.add_rows(rows)
        files.add(rows)
        del rows
    written = files.close()
    summary.damage = damage.spans
    return TaskResult(task=number, files=written, summary=summary, length=task.length)


@dataclass(frozen=True, slots=True)
class _Names:
    """Where the files of an attempt belong, and where they are until then."""

    attempt: str
    stem: str
    partition_by: tuple[str, ...]

    def __call__(self, values: tuple[Any, ...], number: int) -> tuple[str, str]:
        name = f"{self.stem}.{number}.parquet" if number else f"{self.stem}.parquet"
        path = f"{partition_folder(self.partition_by, values)}/{name}".lstrip("/")
        return path, f"{self.attempt}/{path}"


def write_empty(folder: OutputFolder, staging: str, columns: Sequence[str]) -> WrittenFile:
    """A file without rows: what readers take the columns from where nothing was exported."""
    name = "part-empty.parquet"
    staged = f"{staging}/{name}"
    with folder.create(staged) as sink:
        pq.write_table(schema.arrow_schema(columns).empty_table(), sink)
    return WrittenFile(
        path=name,
        staged=staged,
        broker="",
        rows=0,
        bytes=folder.size(staged),
        first_offset=0,
        last_offset=0,
    )


def chunks(batches: Iterator[pa.RecordBatch], *, in_one: bool = False) -> Iterator[pa.Table]:
    """Batches put together to about a row group each.

    Whoever takes one lets go of it before the next: it is most of the memory of a task.

    Args:
        batches: of rows.
        in_one: whether each column is to be in one piece, for rows that are parted.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            size = 0
            yield _put_together(held, in_one)
    if held:
        yield _put_together(held, in_one)


def _put_together(held: list[pa.RecordBatch], in_one: bool) -> pa.Table:
    """Some batches as a table; the list has none of them any more."""
    table = pa.Table.from_batches(held)
    held.clear()
    return table.combine_chunks() if in_one else table


# ------------------------------------------------------------------------------------------ files
@dataclass(frozen=True, slots=True)
class FileForm:
    """What is in the files of a task.

    Attributes:
        schema: their columns, in order; some of those of the rows that are added.
        partition_by: what they are parted by.
        exact: whether the metadata tells what the column ``properties`` cannot say; the rows have
            the column ``properties_string`` then.
    """

    schema: pa.Schema
    partition_by: tuple[str, ...] = ()
    exact: bool = False


class PartedFiles:
    """The files of one attempt, one open at a time for each partition's values.

    Args:
        folder: where they go.
        broker: whose messages they have.
        form: what is in them.
        name: path of a partition's file, and where it is until it is put in place, by the
            partition's values and the number of files that the partition has had before.
    """

    def __init__(
        self,
        folder: OutputFolder,
        broker: str,
        form: FileForm,
        name: Callable[[tuple[Any, ...], int], tuple[str, str]],
    ) -> None:
        self._folder = folder
        self._broker = broker
        self._form = form
        self._name = name
        self._open: dict[tuple[Any, ...], _File] = {}
        self._begun: dict[tuple[Any, ...], int] = {}
        self._written: list[WrittenFile] = []

    def add(self, rows: pa.Table) -> None:
        """Write some rows; they have ``physical_offset``, and what the form wants."""
        for values, part in _parted(rows, self._form.partition_by):
            # The one used last goes to the end.
            file = self._open.pop(values, None) or self._begin(values)
            self._open[values] = file
            file.add(part)
            if file.is_full:
                self._close(values)
            del part

    def close(self) -> tuple[WrittenFile, ...]:
        """Complete all files, and tell of them."""
        while self._open:
            self._close(next(iter(self._open)))
        return tuple(sorted(self._written, key=lambda file: file.path))

    def _begin(self, values: tuple[Any, ...]) -> _File:
        if len(self._open) >= _MOST_FILES:
            self._close(next(iter(self._open)))
        number = self._begun[values] = self._begun.get(values, -1) + 1
        path, staged = self._name(values, number)
        if not number:
            self._folder.make(staged.rpartition("/")[0])
        return _File(self._folder, path, staged, values, self._broker, self._form)

    def _close(self, values: tuple[Any, ...]) -> None:
        self._written.append(self._open.pop(values).close())


class _File:
    def __init__(
        self,
        folder: OutputFolder,
        path: str,
        staged: str,
        values: tuple[Any, ...],
        broker: str,
        form: FileForm,
    ) -> None:
        self._folder = folder
        self._path = path
        self._staged = staged
        self._values = values
        self._broker = broker
        self._columns = form.schema.names
        self._rows = 0
        self._first = self._last = 0
        self._exact = ExactProperties() if form.exact else None
        self._sink = folder.create(self._staged)
        self._writer = pq.ParquetWriter(self._sink, form.schema, **writer_settings(form.schema))

    @property
    def is_full(self) -> bool:
        """Whether further rows had better go to another file."""
        return self._exact is not None and self._exact.size > MOST_BYTES

    def add(self, rows: pa.Table) -> None:
        offsets = rows.column("physical_offset")
        if not self._rows:
            self._first = offsets[0].as_py()
        self._last = offsets[-1].as_py()
        self._rows += rows.num_rows
        if self._exact is not None:
            self._exact.add(rows)
        self._writer.write_table(rows.select(self._columns), row_group_size=rows.num_rows)

    def close(self) -> WrittenFile:
        if self._exact is not None and (found := self._exact.metadata()):
            self._writer.add_key_value_metadata(found)
        self._writer.close()
        self._sink.close()
        return WrittenFile(
            path=self._path,
            staged=self._staged,
            broker=self._broker,
            rows=self._rows,
            bytes=self._folder.size(self._staged),
            first_offset=self._first,
            last_offset=self._last,
            values=self._values,
        )


def writer_settings(schema: pa.Schema) -> dict[str, Any]:
    """What a Parquet writer is given for files with these columns."""
    columns = schema.names
    return {
        "compression": "zstd",
        "compression_level": COMPRESSION_LEVEL,
        "use_dictionary": [
            *(name for name in columns if name in _DICTIONARY),
            *(path for name, path in _DICTIONARY_PATHS.items() if name in columns),
        ],
        "write_statistics": [name for name in columns if name in _STATISTICS],
        "column_encoding": {n: "DELTA_BINARY_PACKED" for n in columns if n in _ASCENDING},
    }


# ------------------------------------------------------------------------------------------ names
def file_stem(task: ReadTask) -> str:
    """The name of a task's file without its ending: the same whenever the same part is exported.

    ``part-BROKER.OFFSET`` for a range of the log, ``part-BROKER.TOPIC.QUEUE.OFFSET`` (a queue
    offset) for a slice of a queue, ``part-BROKER.at.OFFSET`` for places.
    """
    first = task.plan.parts[0]
    if isinstance(first, LogSplit):
        words = [f"{first.start:020d}"]
    elif isinstance(first, QueueSlice):
        words = [first.topic, str(first.queue_id), f"{first.start:020d}"]
    else:
        words = ["at", f"{first.offsets[0]:020d}"]
    stem = "part-" + ".".join(_plain_name(word) for word in (task.broker, *words))
    if len(stem) <= _LONGEST_STEM:
        return stem
    return f"{stem[: _LONGEST_STEM - 41]}-{hashlib.sha1(stem.encode()).hexdigest()}"


def _plain_name(word: str) -> str:
    """Letters, digits, ``_`` and ``-`` as they are, all else as ``~`` and hex: never a dot."""
    return re.sub(
        r"[^A-Za-z0-9_-]", lambda m: "".join(f"~{byte:02x}" for byte in m[0].encode()), word
    )


def partition_folder(names: Sequence[str], values: Sequence[Any]) -> str:
    """``topic=orders/day=2024-05-01``, escaped as Hive and Spark do."""
    return "/".join(f"{n}={_hive_value(v)}" for n, v in zip(names, values, strict=True))


def _hive_value(value: Any) -> str:
    text = "" if value is None else str(value)
    return _HIVE_ESCAPED.sub(lambda m: f"%{ord(m[0]):02X}", text) or _NULL_PARTITION


def _day(number: int) -> date | None:
    """A day by its number since 1970; None where no calendar has it."""
    try:
        return _EPOCH + timedelta(days=number)
    except OverflowError:
        return None


def _parted(
    rows: pa.Table, partition_by: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Rows by the values of their partition, each in the order they had."""
    if not partition_by:
        yield (), rows
        return
    codes = np.zeros(rows.num_rows, np.int64)
    for name in partition_by:
        own, count = _codes(rows, name)
        codes = codes * count + own
    order = np.argsort(codes, kind="stable")
    cuts = np.flatnonzero(np.diff(codes[order])) + 1
    # One take of a column in pieces would put these together, for each part anew.
    together = rows.combine_chunks()
    for indices in np.split(order, cuts):
        part = together if len(indices) == len(rows) else together.take(pa.array(indices))
        values = tuple(_partition_value(part, name) for name in partition_by)
        yield values, part
        # Not beside the next one.
        del part


def _codes(rows: pa.Table, name: str) -> tuple[Any, int]:
    """A number from 0 on for each row's value, and how many there are."""
    if name == "day":
        values = rows.column("store_timestamp").cast("int64").to_numpy() // _DAY_US
        distinct, codes = np.unique(values, return_inverse=True)
        return codes, len(distinct)
    encoded = rows.column(name).combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy(), len(encoded.dictionary)


def _partition_value(rows: pa.Table, name: str) -> Any:
    if name == "day":
        return _day(rows.column("store_timestamp")[0].cast("int64").as_py() // _DAY_US)
    return rows.column(name)[0].as_py()
