"""Counts the messages of one task, and writes them to Parquet files, in a worker.

This module does not import PySpark.

Rows keep the order in which the task reads messages. A task of any size needs memory for about one
row group. Each attempt of a task writes to its own folder.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.errors import StoreUnavailable, UsageError, write_reason
from logquarry.log import schema
from logquarry.log.batches import DamageLog
from logquarry.log.exported import MOST_BYTES, ExactProperties
from logquarry.log.schema import EXACT_PROPERTIES
from logquarry.log.splits import LogSplit
from logquarry.log.walk import DamagedSpan
from logquarry.read.selection import QueueSlice
from logquarry.spark.output import OutputFolder
from logquarry.spark.tasks import ReadTask, read_batches

PARTITION_COLUMNS: Final = ("broker", "topic", "queue_id", "day")
"""Columns by which an export can be partitioned; ``day`` is the day of the store time in UTC."""

ROW_GROUP_BYTES: Final = 64 << 20
"""Bytes of Arrow data in one row group. docs/performance.md has the measurement."""
COMPRESSION_LEVEL: Final = 1
"""Compression level of zstd: higher levels save a few percent of space and take far more time."""

_MOST_FILES: Final = 64
"""Maximum open files of a task; at the limit, the task closes the least recently used file."""
_LONGEST_STEM: Final = 180
_DAY_US: Final = 86_400_000_000
_NULL_PARTITION: Final = "__HIVE_DEFAULT_PARTITION__"
_EPOCH: Final = date(1970, 1, 1)
# The characters that Hive and Spark escape in folder names such as topic=a%3Ab.
_HIVE_ESCAPED = re.compile(r'[\x00-\x1f"#%\'*/:=?\\\x7f{\[\]^]')

# Columns with repeated values get a dictionary. For other columns, a dictionary costs time and
# saves no space.
_DICTIONARY: Final = (
    "broker", "topic", "queue_id", "born_host", "store_host", "sys_flag", "flag", "reconsume_times",
    "prepared_transaction_offset", "tags", "tags_code",
)  # fmt: skip
_DICTIONARY_PATHS: Final = {"properties": "properties.key_value.key"}
STATISTICS: Final = (
    "broker", "topic", "queue_id", "queue_offset", "physical_offset", "store_timestamp",
    "born_timestamp", "tags",
)  # fmt: skip
"""Columns whose minimum and maximum each row group records, for range queries."""
_ASCENDING: Final = ("queue_offset", "physical_offset", "store_timestamp", "born_timestamp")


# ------------------------------------------------------------------------------------------ counts
TALLY_COLUMNS = ("topic", "size", "store_timestamp")
"""Columns that :meth:`Summary.add_rows` needs."""


@dataclass(slots=True)
class TopicSummary:
    """Counts of one topic, or of all topics; `bytes` is the size of the frames in the log.

    `first_ms` and `last_ms` are the smallest and largest store timestamp in milliseconds.
    """

    messages: int = 0
    bytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None

    def add(self, other: TopicSummary) -> None:
        """Add the counts of `other`."""
        self.messages += other.messages
        self.bytes += other.bytes
        firsts = [ms for ms in (self.first_ms, other.first_ms) if ms is not None]
        lasts = [ms for ms in (self.last_ms, other.last_ms) if ms is not None]
        self.first_ms, self.last_ms = min(firsts, default=None), max(lasts, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "first_store_timestamp": self.first_ms,
            "last_store_timestamp": self.last_ms,
        }


@dataclass(slots=True)
class Summary:
    """Counts by topic, and the damage that the read skipped.

    The damage is sorted only in a result of :meth:`of`.
    """

    topics: dict[str, TopicSummary] = field(default_factory=dict)
    damage: list[DamagedSpan] = field(default_factory=list)

    @property
    def total(self) -> TopicSummary:
        """Counts of all topics together."""
        total = TopicSummary()
        for topic in self.topics.values():
            total.add(topic)
        return total

    def add_rows(self, rows: pa.Table) -> None:
        """Count the rows of a table that has the TALLY_COLUMNS."""
        if not rows.num_rows:
            return
        topics, sizes, times = (rows.column(name) for name in TALLY_COLUMNS)
        columns = {"topic": topics, "size": sizes, "us": times.cast("int64")}
        counts = [("size", "count"), ("size", "sum"), ("us", "min"), ("us", "max")]
        for found in pa.table(columns).group_by("topic").aggregate(counts).to_pylist():
            first, last = found["us_min"] // 1000, found["us_max"] // 1000
            own = TopicSummary(found["size_count"], found["size_sum"], first, last)
            self._topic(found["topic"]).add(own)

    def add(self, other: Summary) -> None:
        """Add the counts and the damage of `other`."""
        for name, topic in other.topics.items():
            self._topic(name).add(topic)
        self.damage += other.damage

    def _topic(self, name: str) -> TopicSummary:
        return self.topics.setdefault(name, TopicSummary())

    @classmethod
    def of(cls, parts: Iterable[Summary]) -> Summary:
        """Merge summaries; sort topics by name, and damage by file and offset.

        Entries of two queues can point to the same damaged bytes, so two tasks can report the same
        damage. The result lists such damage once.
        """
        whole = cls()
        for part in parts:
            whole.add(part)
        whole.topics = dict(sorted(whole.topics.items()))
        spans = {(span.path, span.offset): span for span in whole.damage}
        whole.damage = [spans[place] for place in sorted(spans)]
        return whole


# ------------------------------------------------------------------------------------------- tasks
@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """A file that a task wrote to the path `staged`; the commit moves the file to `path`.

    `values` are the values of the partition columns, if the export is partitioned.
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
    """The result of one task."""

    files: tuple[WrittenFile, ...]
    summary: Summary


def check_partition_columns(names: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return `names` as a tuple; raise UsageError if `columns` cannot be partitioned by `names`."""
    for name in names:
        if name not in PARTITION_COLUMNS:
            known = ", ".join(PARTITION_COLUMNS)
            raise UsageError(f"partition by {name!r}: takes {known}")
        needed = "store_timestamp" if name == "day" else name
        if needed not in columns:
            raise UsageError(f"partition by {name!r}: export the column {needed} too")
    if len(set(names)) != len(names):
        raise UsageError(f"partition by {', '.join(names)}: a column appears twice")
    return tuple(names)


def write_task(
    task: ReadTask, folder: OutputFolder, staging: str, partition_by: Sequence[str]
) -> TaskResult:
    """Write the messages of a task below `staging`, in a folder for this attempt."""
    # Spark can run two attempts of the task at the same time (speculation).
    attempt = f"{staging}/{uuid.uuid4().hex}"
    stem = file_stem(task)

    def name(values: tuple[Any, ...], count: int) -> tuple[str, str]:
        file = f"{stem}.{count}.parquet" if count else f"{stem}.parquet"
        path = f"{partition_folder(partition_by, values)}/{file}".lstrip("/")
        return path, f"{attempt}/{path}"

    columns = schema.arrow_schema(task.columns)
    exact = "properties" in task.columns
    files = PartedFiles(folder, task.broker, columns, name, tuple(partition_by), exact)
    damage = DamageLog()
    # The manifest needs these columns, even if the user did not select them.
    needed = [*TALLY_COLUMNS, "physical_offset"]
    needed += [EXACT_PROPERTIES.name] if exact else []
    more = [name for name in needed if name not in task.columns]
    read = replace(task, columns=(*task.columns, *more))
    summary = files.add_all(read_batches(read, damage))
    summary.damage = damage.spans
    return TaskResult(files=files.close(), summary=summary)


def write_empty(folder: OutputFolder, staging: str, columns: Sequence[str]) -> WrittenFile:
    """Write a file without rows, so that a reader finds the schema even in an empty export."""
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
    """Join batches to tables of about the size of a row group.

    If `in_one` is true, each column is copied into one chunk.

    The caller should delete each table before it requests the next table, because one table takes
    most of a task's memory.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            size = 0
            yield _joined(held, in_one)
    if held:
        yield _joined(held, in_one)


def _joined(held: list[pa.RecordBatch], in_one: bool) -> pa.Table:
    """Make a table of batches; clear the list to free the batches."""
    table = pa.Table.from_batches(held)
    held.clear()
    return table.combine_chunks() if in_one else table


# ------------------------------------------------------------------------------------------ files
@dataclass
class PartedFiles:
    """The files of one attempt, with one open file for each partition.

    Attributes:
        schema: columns of the files, in order; a subset of the rows' columns.
        name: called with the values of a partition and the number of files that the partition
            already has; returns (final path, staged path) of the next file.
        exact: whether the file's metadata stores the property strings that the column
            ``properties`` cannot represent, for example because a name occurs twice. If true, the
            rows need the column ``properties_string``.
    """

    folder: OutputFolder
    broker: str
    schema: pa.Schema
    name: Callable[[tuple[Any, ...], int], tuple[str, str]]
    partition_by: tuple[str, ...] = ()
    exact: bool = False
    _open: dict[tuple[Any, ...], _File] = field(default_factory=dict)
    _begun: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _staged: list[str] = field(default_factory=list)
    _written: list[WrittenFile] = field(default_factory=list)

    def add_all(self, batches: Iterator[pa.RecordBatch]) -> Summary:
        """Write all rows of batches, and count them; see :meth:`add`."""
        summary = Summary()
        for rows in chunks(batches, in_one=bool(self.partition_by)):
            summary.add_rows(rows)
            self.add(rows)
            del rows
        return summary

    def add(self, rows: pa.Table) -> None:
        """Write rows, which need ``physical_offset`` and the columns of the files."""
        for values, part in _parted(rows, self.partition_by):
            with self._writing():
                # Move the file to the end of the dict, so that the first file is the least recently
                # used one. If too many files are open, the task closes the first file.
                file = self._open.pop(values, None) or self._begin(values)
                self._open[values] = file
                file.add(part)
                if file.is_full:
                    self._close(values)
            del part

    def close(self) -> tuple[WrittenFile, ...]:
        """Complete and sync all files, and return them, sorted by path."""
        with self._writing():
            while self._open:
                self._close(next(iter(self._open)))
            for file in self._written:
                # Without a sync, a power cut could remove a file that the manifest or the table
                # lists. The task syncs its files, because the commit would have to wait for the
                # bytes of all tasks.
                self.folder.sync(file.staged)
        return tuple(sorted(self._written, key=lambda file: file.path))

    def remove_all(self) -> None:
        """Remove all files of the attempt; ignore I/O errors."""
        with suppress(OSError):
            for path in self._staged:
                self.folder.remove(path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        # Arrow's errors lack the path, and Spark would show them below a Java stack trace.
        try:
            yield
        except OSError as error:
            where = self.folder.location
            raise StoreUnavailable(f"{where}: cannot be written: {write_reason(error)}") from error

    def _begin(self, values: tuple[Any, ...]) -> _File:
        if len(self._open) >= _MOST_FILES:
            self._close(next(iter(self._open)))
        number = self._begun[values] = self._begun.get(values, -1) + 1
        path, staged = self.name(values, number)
        self._staged.append(staged)
        if not number:
            self.folder.make(staged.rpartition("/")[0])
        return _File(self, path, staged, values)

    def _close(self, values: tuple[Any, ...]) -> None:
        self._written.append(self._open.pop(values).close())


class _File:
    def __init__(
        self, parted: PartedFiles, path: str, staged: str, values: tuple[Any, ...]
    ) -> None:
        # Keep no reference to `parted`: after an error, a reference cycle would delay closing the
        # sink.
        self._folder, self._schema, self._broker = parted.folder, parted.schema, parted.broker
        self._path = path
        self._staged = staged
        self._values = values
        self._rows = 0
        self._first = self._last = 0
        self._exact = ExactProperties() if parted.exact else None
        self._sink = parted.folder.create(staged)
        settings = writer_settings(parted.schema)
        self._writer = pq.ParquetWriter(self._sink, parted.schema, **settings)

    @property
    def is_full(self) -> bool:
        """Whether the file's metadata is too large for further rows."""
        return self._exact is not None and self._exact.size > MOST_BYTES

    def add(self, rows: pa.Table) -> None:
        offsets = rows.column("physical_offset")
        if not self._rows:
            self._first = offsets[0].as_py()
        self._last = offsets[-1].as_py()
        self._rows += rows.num_rows
        if self._exact is not None:
            self._exact.add(rows)
        self._writer.write_table(rows.select(self._schema.names), row_group_size=rows.num_rows)

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
    """Return the settings of a Parquet writer for files with these columns."""
    columns = schema.names
    return {
        "compression": "zstd",
        "compression_level": COMPRESSION_LEVEL,
        "use_dictionary": [
            *(name for name in columns if name in _DICTIONARY),
            *(path for name, path in _DICTIONARY_PATHS.items() if name in columns),
        ],
        "write_statistics": [name for name in columns if name in STATISTICS],
        "column_encoding": {n: "DELTA_BINARY_PACKED" for n in columns if n in _ASCENDING},
    }


# ------------------------------------------------------------------------------------------ names
def file_stem(task: ReadTask) -> str:
    """Return the file name of a task, without ending; the name depends only on the task's range.

    - A range of the log: ``part-BROKER.OFFSET``.
    - A range of a queue: ``part-BROKER.TOPIC.QUEUE.OFFSET``, with the first queue offset.
    - Single messages: ``part-BROKER.at.OFFSET``.
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
    """Encode each byte except letters, digits, ``_`` and ``-`` as ``~`` and hex.

    The result contains no dot, because dots separate the parts of a file name.
    """
    return re.sub(
        r"[^A-Za-z0-9_-]", lambda m: "".join(f"~{byte:02x}" for byte in m[0].encode()), word
    )


def partition_folder(names: Sequence[str], values: Sequence[Any]) -> str:
    """Return a folder such as ``topic=orders/day=2024-05-01``, with Hive's escapes."""
    folders = []
    for name, value in zip(names, values, strict=True):
        text = "" if value is None else str(value)
        escaped = _HIVE_ESCAPED.sub(lambda m: f"%{ord(m[0]):02X}", text)
        folders.append(f"{name}={escaped or _NULL_PARTITION}")
    return "/".join(folders)


def _day(number: int) -> date | None:
    try:
        return _EPOCH + timedelta(days=number)
    except OverflowError:
        return None


def _parted(
    rows: pa.Table, partition_by: tuple[str, ...]
) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
    """Split rows by their partition values; within each part, the rows keep their order."""
    if not partition_by:
        yield (), rows
        return
    keys = [_key(rows, name) for name in partition_by]
    codes = np.zeros(rows.num_rows, np.int64)
    for key in keys:
        encoded = key.dictionary_encode()
        codes = codes * len(encoded.dictionary) + encoded.indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    cuts = np.flatnonzero(np.diff(codes[order])) + 1
    # Join the chunks once, because ``take`` would join the chunks of a column again for each part.
    together = rows.combine_chunks()
    for indices in np.split(order, cuts):
        part = together if len(indices) == len(rows) else together.take(pa.array(indices))
        values = [key[int(indices[0])].as_py() for key in keys]
        named = zip(partition_by, values, strict=True)
        yield tuple(_day(value) if name == "day" else value for name, value in named), part
        del part


def _key(rows: pa.Table, name: str) -> pa.Array:
    if name == "day":
        return pa.array(rows.column("store_timestamp").cast("int64").to_numpy() // _DAY_US)
    return rows.column(name).combine_chunks()
