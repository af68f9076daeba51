"""Small files of many commits into larger ones, in one commit that changes no rows.

An export may follow into the table meanwhile: it appends, and a compaction takes nothing but files
that were there. Old files stay for older versions of the table; a table's own cleaning (``vacuum``,
``expire_snapshots``) takes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from logquarry.errors import StoreNotFound, StoreUnavailable
from logquarry.signals import held
from logquarry.spark.compaction.folder import Compaction
from logquarry.spark.compaction.merging import Merged, MergeTask, RunMerges, Source, fewer, groups
from logquarry.spark.lakehouse.table import TableFile, TableUnchanged
from logquarry.spark.lakehouse.write import column_bounds

if TYPE_CHECKING:
    from logquarry.spark.lakehouse.delta import Delta
    from logquarry.spark.lakehouse.iceberg import Iceberg, TableDataFile

_WORDS: Final = re.compile(r"part-.*-[0-9]{20}-")


# ------------------------------------------------------------------------------------------ Delta
def compact_delta(delta: Delta, target_size: int | None) -> Compaction:
    """Merge the files of a Delta table, by `deltalake`.

    Args:
        delta: the table.
        target_size: bytes of a file, about; None for what the table's settings say.

    Raises:
        StoreNotFound: if there is no Delta table.
        UsageError: if no export of ours made it, or a package is missing.
        StoreUnavailable: if somebody else has compacted it meanwhile.
    """
    if delta.look() is None:
        raise StoreNotFound(f"{delta.name}: no Delta table is there")
    from deltalake.exceptions import CommitFailedError

    try:
        told = delta.compact(target_size)
    except CommitFailedError as error:
        raise StoreUnavailable(f"{delta.name}: changed meanwhile: {error}") from error
    return Compaction(
        files_before=int(told["numFilesRemoved"]),
        files_after=int(told["numFilesAdded"]),
        bytes_before=_total(told["filesRemoved"]),
        bytes_after=_total(told["filesAdded"]),
    )


def _total(sizes: Any) -> int:
    # A document within a document, in some versions.
    found = json.loads(sizes) if isinstance(sizes, str) else sizes
    return int(found["totalSize"])


# ---------------------------------------------------------------------------------------- Iceberg
def compact_iceberg(table: Iceberg, target_size: int, run: RunMerges) -> Compaction:
    """Merge the files of an Iceberg table.

    The snapshot's operation is ``overwrite``: `pyiceberg` has none that says that rows stay.

    Args:
        table: the table.
        target_size: bytes of a file, about.
        run: runs the merges.

    Raises:
        StoreNotFound: if there is no such table.
        UsageError: if no export of ours made it, or a package is missing.
        StoreUnavailable: if somebody else has changed those files meanwhile.
        CorruptFile: if a file is not what the table says of it.
    """
    if table.look() is None:
        raise StoreNotFound(f"{table.name}: no Iceberg table is there")
    chosen = list(_chosen(table.data_files(), target_size))
    if not chosen:
        return Compaction(0, 0, 0, 0)
    made: list[Merged] = []
    try:
        results = run([_task(table, group) for group in chosen])
        made = [file for files in results for file in files]
        chosen, kept = fewer(chosen, results)
        _remove(table, [file for file in made if file not in kept])
        made = kept
        if not made:
            return Compaction(0, 0, 0, 0)
        before = {file.path: file for group in chosen for file in group}
        added = [_table_file(table, file, before[file.sources[0]]) for file in made]
    except BaseException:
        _remove(table, made)
        raise
    try:
        with held():
            table.replace(before.values(), added)
    except TableUnchanged:
        # Of any other end nobody knows whether the table has them: an answer that got lost, or an
        # interrupt behind the commit.
        _remove(table, made)
        raise
    return Compaction(
        files_before=len(before),
        files_after=len(made),
        bytes_before=sum(file.bytes for file in before.values()),
        bytes_after=sum(file.bytes for file in made),
    )


def _remove(table: Iceberg, made: Sequence[Merged]) -> None:
    for file in made:
        table.folder.remove(file.path)


def _chosen(files: Sequence[TableDataFile], target_size: int) -> Iterator[list[TableDataFile]]:
    """Groups of files that are to be one each: neighbours of one broker and partition."""
    kinds: dict[tuple[Any, str, str], list[TableDataFile]] = {}
    for file in files:
        place, _, name = file.path.rpartition("/")
        words = _WORDS.match(name)
        if words is not None:
            broker = words[0][:-22]
            kinds.setdefault((tuple(file.values.items()), place, broker), []).append(file)
    for some in kinds.values():
        yield from groups(sorted(some, key=lambda file: file.path), target_size)


def _task(table: Iceberg, group: Sequence[TableDataFile]) -> MergeTask:
    place, slash, name = group[0].path.rpartition("/")
    words = _WORDS.match(name)
    assert words is not None
    sources = tuple(Source(file.path, file.bytes, file.rows) for file in group)
    stem = f"{place}{slash}{words[0]}merged"
    return MergeTask(table.folder, sources, stem)


def _table_file(table: Iceberg, file: Merged, first: TableDataFile) -> TableFile:
    return TableFile(
        path=file.path,
        rows=file.rows,
        bytes=file.bytes,
        values=first.values,
        bounds=column_bounds(table.folder, file.path),
    )
