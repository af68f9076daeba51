"""Several Parquet files of an export as one: what the workers of a compaction do.

Rows keep their order, and about a row group of them is in memory at a time. What files tell beside
their columns (:mod:`logquarry.log.exact_properties`) goes along. A second attempt of a merge may
run beside the first (speculation, or one whose executor was given up), so that the files of each
have names of their own. Knows nothing of Spark.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.errors import CorruptFile
from logquarry.log import exact_properties
from logquarry.log.exact_properties import MOST_BYTES, ExactProperties
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import ROW_GROUP_BYTES, writer_settings

DEFAULT_TARGET_SIZE: Final = 256 << 20
"""Bytes of a file, about."""

S = TypeVar("S", bound="Sized")


class Sized(Protocol):
    """A file of which the size is known."""

    @property
    def bytes(self) -> int:
        """Of the file."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file that is merged.

    Attributes:
        path: below the folder.
        bytes: of the file.
        rows: how many it has, as whoever names it says.
    """

    path: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class MergeTask:
    """Files that are to be one. Small and picklable.

    Attributes:
        folder: where they are.
        sources: in the order of their rows; they have the same columns.
        stem: path of what is made, without its ending, which is below the folder: an attempt puts
            a word of its own behind it.
        staging: where attempts have folders of their own in place of that, and ``stem`` in these;
            None for none.
    """

    folder: OutputFolder
    sources: tuple[Source, ...]
    stem: str
    staging: str | None = None

    @property
    def bytes(self) -> int:
        """Of the files that are merged."""
        return sum(source.bytes for source in self.sources)


@dataclass(frozen=True, slots=True)
class Merged:
    """A file that a merge made; on the disk by then.

    Attributes:
        path: below the folder.
        sources: paths of the files whose rows it has.
        rows: how many.
        bytes: of the file.
    """

    path: str
    sources: tuple[str, ...]
    rows: int
    bytes: int


RunMerges = Callable[[Sequence[MergeTask]], Sequence[tuple[Merged, ...]]]
"""Runs :func:`merge` for each of some tasks, wherever that is."""


def groups(files: Sequence[S], target_size: int) -> Iterator[list[S]]:
    """Which of some files, neighbours in their order, are to be one: two of them or more.

    Files of the wanted size, or more than half of it, stay as they are.
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
    """Merges that have made files fewer: their sources and files.

    Others were kept apart by what stands in their metadata: what they made takes nobody's place.
    """
    kept = [
        (group, files) for group, files in zip(chosen, made, strict=True) if len(files) < len(group)
    ]
    return [group for group, _ in kept], [file for _, files in kept for file in files]


def merge_here(tasks: Sequence[MergeTask]) -> list[tuple[Merged, ...]]:
    """All of them in this process, one after the other."""
    return [merge(number, task) for number, task in enumerate(tasks)]


def merge(_: int, task: MergeTask) -> tuple[Merged, ...]:
    """Make one file of some: several only where the metadata of one would be too large.

    Raises:
        CorruptFile: if a source does not have the rows that it is said to have, or other columns.
    """
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
    """Take files from the front of those that wait into one."""
    taken: list[str] = []
    rows = 0
    exact = ExactProperties()
    with _read(folder, waiting[0].path), folder.open(waiting[0].path) as first:
        columns = _columns(pq.read_schema(first))
    with (
        folder.create(path) as sink,
        pq.ParquetWriter(sink, columns, **writer_settings(columns)) as writer,
    ):
        groups = _RowGroups(writer)
        while waiting and exact.size <= MOST_BYTES:
            source = waiting.pop(0)
            taken.append(source.path)
            for rows_of_group in _row_groups(folder, source, columns, exact):
                groups.add(rows_of_group)
                del rows_of_group
            rows += source.rows
        groups.flush()
        if found := exact.metadata():
            writer.add_key_value_metadata(found)
    folder.sync(path)
    return Merged(path, tuple(taken), rows, folder.size(path))


def _row_groups(
    folder: OutputFolder, source: Source, columns: pa.Schema, exact: ExactProperties
) -> Iterator[pa.Table]:
    """The row groups of a file; what it tells beside them is noted."""
    with _read(folder, source.path):
        opened = folder.open(source.path)
    with opened:
        with _read(folder, source.path):
            file = pq.ParquetFile(opened)
        _check(folder, source, file, columns)
        exact.add_listed(exact_properties.read(file.metadata.metadata), source.rows)
        for group in range(file.num_row_groups):
            with _read(folder, source.path):
                rows = file.read_row_group(group)
            yield rows
            del rows


@contextmanager
def _read(folder: OutputFolder, path: str) -> Iterator[None]:
    """Arrow's own troubles with a file as one of ours; those of disk and network as they are."""
    where = f"{folder.location}/{path}"
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptFile(where, 0, "it is not there") from error
    except pa.ArrowException as error:
        raise CorruptFile(where, 0, f"it is no sound Parquet file: {error}") from error
    except OSError as error:
        # Arrow has it for pages that make no sense, too.
        if error.errno is not None or not folder.is_local:
            raise
        raise CorruptFile(where, 0, f"it is no sound Parquet file: {error}") from error


def _columns(schema: pa.Schema) -> pa.Schema:
    """A schema without what is said of it beside."""
    return schema.remove_metadata()


def _check(folder: OutputFolder, source: Source, file: Any, columns: pa.Schema) -> None:
    where = f"{folder.location}/{source.path}"
    if file.metadata.num_rows != source.rows:
        reason = f"it has {file.metadata.num_rows} rows, and should have {source.rows}"
        raise CorruptFile(where, 0, reason)
    if not _columns(file.schema_arrow).equals(columns):
        raise CorruptFile(where, 0, "it has other columns than its neighbours")


class _RowGroups:
    """Small row groups put together to larger ones."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._held: list[pa.Table] = []
        self._size = 0

    def add(self, rows: pa.Table) -> None:
        if self._size + rows.nbytes > ROW_GROUP_BYTES:
            self.flush()
        self._held.append(rows.replace_schema_metadata(None))
        self._size += rows.nbytes

    def flush(self) -> None:
        rows = pa.concat_tables(self._held) if self._held else None
        self._held, self._size = [], 0
        if rows is not None and rows.num_rows:
            self._writer.write_table(rows, row_group_size=rows.num_rows)
