"""Merges Parquet files of an export into one file, in a worker of a compaction.

This module does not import PySpark.

The rows keep their order. A merge needs memory for about one row group of Parquet. Spark can run
two attempts of a merge at the same time, so each attempt uses its own file names.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.errors import CorruptFile, StoreUnavailable, reason_of, write_reason
from logquarry.log.exported import MOST_BYTES, ExactProperties, read_exact
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import ROW_GROUP_BYTES, writer_settings
from logquarry.text import counted

DEFAULT_TARGET_SIZE: Final = 256 << 20
"""Approximate bytes of a merged file."""

S = TypeVar("S", bound="Source")


@dataclass(frozen=True, slots=True)
class Source:
    """A file to merge."""

    path: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Files to merge into one. Small and picklable.

    Attributes:
        sources: the files, in the order of their rows; all files have the same columns.
        stem: path of the merged file without its ending.
        staging: folder in which each attempt makes its own folder; None to write beside the
            sources, with a unique suffix for each attempt.
    """

    folder: OutputFolder
    sources: tuple[Source, ...]
    stem: str
    staging: str | None = None

    @property
    def bytes(self) -> int:
        """Size of all sources in bytes."""
        return sum(source.bytes for source in self.sources)


@dataclass(frozen=True, slots=True)
class Merged:
    """A file that a merge wrote and synced."""

    path: str
    sources: tuple[str, ...]
    rows: int
    bytes: int


RunMerges = Callable[[Sequence[MergeTask]], Sequence[tuple[Merged, ...]]]
"""Runs :func:`merge` for each task, in this process or on Spark."""


def groups(files: Sequence[S], target_size: int) -> Iterator[list[S]]:
    """Group consecutive files of a list so that each group has about `target_size` bytes.

    A group has at least two files. A file larger than half of `target_size` is in no group.
    """
    group: list[S] = []
    size = 0
    for file in files:
        if file.bytes * 2 > target_size or size + file.bytes > target_size:
            if len(group) > 1:
                yield group
            group, size = [], 0
            if file.bytes * 2 > target_size:
                continue
        group.append(file)
        size += file.bytes
    if len(group) > 1:
        yield group


def fewer(
    chosen: Sequence[list[S]], made: Sequence[tuple[Merged, ...]]
) -> tuple[list[list[S]], list[Merged]]:
    """Keep only the merges that reduced the number of files; return their sources and new files.

    The metadata of a file stores the property strings that the column ``properties`` cannot
    represent. If these strings are too large for the metadata of one file, a merge writes several
    files.
    """
    kept = [
        (group, files) for group, files in zip(chosen, made, strict=True) if len(files) < len(group)
    ]
    return [group for group, _ in kept], [file for _, files in kept for file in files]


def merge(task: MergeTask) -> tuple[Merged, ...]:
    """Merge files into one file, or into several if the metadata of one file would be too large."""
    attempt = uuid.uuid4().hex[:12]
    stem = f"{task.stem}-{attempt}"
    if task.staging is not None:
        stem = f"{task.staging}/{attempt}/{task.stem}"
        task.folder.make(stem.rpartition("/")[0])
    made: list[Merged] = []
    path = ""
    waiting = list(task.sources)
    try:
        while waiting:
            path = f"{stem}{f'.{len(made)}' * bool(made)}.parquet"
            made.append(_merge_to(task.folder, path, waiting))
    except BaseException:
        for one in (*(one.path for one in made), path):
            task.folder.remove(one)
        raise
    return tuple(made)


def _merge_to(folder: OutputFolder, path: str, waiting: list[Source]) -> Merged:
    """Merge sources from the start of ``waiting`` into one file; remove them from ``waiting``."""
    taken: list[Source] = []
    exact = ExactProperties()
    with _read(folder, waiting[0].path), folder.open(waiting[0].path) as first:
        columns = pq.read_schema(first).remove_metadata()

    def read() -> Iterator[pa.Table]:
        while waiting and exact.size <= MOST_BYTES:
            taken.append(waiting.pop(0))
            yield from _row_groups(folder, taken[-1], columns, exact)

    try:
        with (
            folder.create(path) as sink,
            pq.ParquetWriter(sink, columns, **writer_settings(columns)) as writer,
        ):
            for rows in _joined(read()):
                if rows.num_rows:
                    writer.write_table(rows, row_group_size=rows.num_rows)
                del rows
            if found := exact.metadata():
                writer.add_key_value_metadata(found)
        folder.sync(path)
    except OSError as error:
        where = f"{folder.location}/{path}"
        raise StoreUnavailable(f"{where}: cannot be written: {write_reason(error)}") from error
    names, count = tuple(source.path for source in taken), sum(source.rows for source in taken)
    return Merged(path, names, count, folder.size(path))


def _joined(groups: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join small row groups to groups of at most ROW_GROUP_BYTES."""
    held: list[pa.Table] = []
    size = 0
    for rows in groups:
        if held and size + rows.nbytes > ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held, size = [], 0
        held.append(rows.replace_schema_metadata(None))
        size += rows.nbytes
        del rows
    if held:
        yield pa.concat_tables(held)


def _row_groups(
    folder: OutputFolder, source: Source, columns: pa.Schema, exact: ExactProperties
) -> Iterator[pa.Table]:
    with _read(folder, source.path):
        opened = folder.open(source.path)
    with opened:
        with _read(folder, source.path):
            file = pq.ParquetFile(opened)
        _check(folder, source, file, columns)
        exact.add_listed(read_exact(file.metadata.metadata), source.rows)
        for group in range(file.num_row_groups):
            with _read(folder, source.path):
                rows = file.read_row_group(group)
            yield rows
            del rows


@contextmanager
def _read(folder: OutputFolder, path: str) -> Iterator[None]:
    """Turn Arrow's errors about a file's content into CorruptFile, and I/O errors, which do not
    name the file, into StoreUnavailable.
    """
    where = f"{folder.location}/{path}"
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptFile(where, 0, "the file is missing") from error
    except pa.ArrowException as error:
        raise CorruptFile(where, 0, f"is not a valid Parquet file: {error}") from error
    except OSError as error:
        # Arrow raises OSError without errno if the pages inside the file are invalid.
        if error.errno is not None or not folder.is_local:
            raise StoreUnavailable(f"{where}: cannot be read: {reason_of(error)}") from error
        raise CorruptFile(where, 0, f"is not a valid Parquet file: {error}") from error


def _check(folder: OutputFolder, source: Source, file: Any, columns: pa.Schema) -> None:
    where = f"{folder.location}/{source.path}"
    if file.metadata.num_rows != source.rows:
        reason = f"has {counted(file.metadata.num_rows, 'row')}, but should have {source.rows}"
        raise CorruptFile(where, 0, reason)
    if not file.schema_arrow.remove_metadata().equals(columns):
        raise CorruptFile(where, 0, "has other columns than the files to merge with")
