"""Compacts exports: merges many small files into few, for Parquet, Delta and Iceberg.

Merges of Parquet exports and Iceberg tables (:mod:`logquarry.spark.export`) keep the order of
rows. The package `deltalake` merges the files of Delta tables, and can change the order of rows.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from logquarry.arguments import Progress
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.spark import output
from logquarry.spark.export import (
    DEFAULT_TARGET_SIZE,
    Merged,
    MergeTask,
    RunMerges,
    Source,
    fewer,
    groups,
    merge,
)
from logquarry.spark.jobs import run_tasks
from logquarry.spark.lakehouse.delta import Delta
from logquarry.spark.lakehouse.export import DEFAULT_TABLE
from logquarry.spark.lakehouse.iceberg import CATALOG_FILE, Iceberg, TableDataFile
from logquarry.spark.lakehouse.table import TableUnchanged
from logquarry.spark.lakehouse.write import table_file
from logquarry.spark.output import OutputFolder
from logquarry.systems import held

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["Compaction", "compact"]


def compact(
    dest: str | os.PathLike[str],
    *,
    target_size: int | None = None,
    spark: SparkSession | None = None,
    table: str | None = None,
    catalog: Mapping[str, str] | None = None,
    table_storage_options: Mapping[str, str] | None = None,
    dest_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Compaction:
    """Merge the small files of a Parquet export, or of a Delta or Iceberg table.

    During the compaction, an export can add to the same Delta or Iceberg table. An export into the
    same Parquet folder is not allowed at that time.

    Args:
        target_size: approximate bytes of a merged file; None for 256 MiB; for a Delta table, None
            uses the table's setting. A file larger than half of `target_size` stays unchanged.
        spark: a session whose workers merge; None to merge in this process. Delta tables are always
            merged in this process, on all cores.
        table: ``NAMESPACE.TABLE`` of an Iceberg table; pass the value that the export got.
        catalog: properties of the Iceberg catalog; pass the value that the export got.
        progress: called with (bytes of files merged, bytes in total).

    Raises:
        StoreNotFound: if there is no export.
        UsageError: if the table was not created by an export, if an argument does not apply to this
            kind of table, or if a package is missing.
        StoreUnavailable: if another program changed the files during this compaction; for a local
            Parquet folder, also if an export or another compaction is running. Also raised if a
            file cannot be read or written; the table is then unchanged.
        CorruptFile: if a file differs from its description in the table; the table is unchanged.
    """
    if target_size is not None and target_size <= 0:
        raise UsageError(f"target_size: takes bytes > 0, not {target_size}")
    folder = OutputFolder(dest, dest_storage_options)
    size = target_size or DEFAULT_TARGET_SIZE
    name, weight = f"compact {folder.location}", attrgetter("bytes")
    run = partial(run_tasks, spark, name, work=merge, weight=weight, progress=progress)
    names = dict(folder.names())
    if table is not None or catalog is not None or CATALOG_FILE in names:
        return compact_iceberg(Iceberg(folder, table or DEFAULT_TABLE, catalog), size, run)
    if "_delta_log" in names:
        return compact_delta(Delta(folder, table_storage_options), target_size)
    return compact_folder(folder, size, run)


@dataclass(frozen=True, slots=True)
class Compaction:
    """The number and size of the merged files (before), and of the files that replaced them
    (after).
    """

    files_before: int = 0
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0

    @classmethod
    def of(cls, before: Collection[Source], after: Sequence[Merged]) -> Compaction:
        """Count the replaced files `before` and the new files `after`, and add up their sizes."""
        sizes = sum(file.bytes for file in before), sum(file.bytes for file in after)
        return cls(len(before), len(after), *sizes)


# ---------------------------------------------------------------------------------------- Parquet
# A merge joins files of one folder and one broker, in the order of the offsets in their names.
# During the commit, a reader can see rows twice; the file _SUCCESS is then missing.

# Names are part-BROKER.OFFSET, part-BROKER.TOPIC.QUEUE.OFFSET or part-BROKER.at.OFFSET. A merged
# file's name also contains ".to." and the last offset; up to two numbers make the name unique.
_NAME: Final = re.compile(
    r"(?P<kind>part-.+?)\.(?P<first>[0-9]{20})(?:\.to\.[0-9]{20})?(?:\.[0-9]{1,9}){0,2}\.parquet"
)


@dataclass(frozen=True, slots=True)
class _File(Source):
    """A file of the manifest that can be merged.

    Attributes:
        first: the offset in the file's name.
        order: sort key of files of the same kind. The offset in the name is not enough: if a merge
            writes several files, all of them have the same first offset in their names.
    """

    place: str
    kind: str
    first: int
    last_offset: int
    order: tuple[int, int, int, str]


def compact_folder(folder: OutputFolder, target_size: int, run: RunMerges) -> Compaction:
    """Merge the small Parquet files of an export."""
    if not dict(folder.names()).keys() & {output.MANIFEST, output.INTENT}:
        raise StoreNotFound(f"{folder.location}: holds no export: give the folder of an export")
    lock = folder.lock()
    try:
        output.finish_compaction(folder)
        return _compact(folder, target_size, run)
    finally:
        if lock is not None:
            os.close(lock)


def _compact(folder: OutputFolder, target_size: int, run: RunMerges) -> Compaction:
    manifest = _manifest(folder)
    output.remove_temporary(folder)
    staging = output.TEMPORARY + uuid.uuid4().hex[:12]
    chosen = list(_chosen(_files(folder, manifest), target_size))
    if not chosen:
        return Compaction()
    known = [str(entry["path"]) for entry in manifest["files"]]
    tasks = [_task(folder, staging, group, known) for group in chosen]
    folder.make(staging)
    try:
        chosen, made = fewer(chosen, run(tasks))
        if not made:
            folder.remove_folder(staging)
            return Compaction()
        new = _new_manifest(manifest, made, staging)
        _check_unchanged(folder, manifest, [file.path for file in made], staging)
    except BaseException:
        folder.remove_folder(staging)
        raise
    before = [file for group in chosen for file in group]
    moves = [(file.path, _final(file.path, staging)) for file in made]
    with held():
        output.commit_compaction(folder, staging, moves, [file.path for file in before], new)
    return Compaction.of(before, made)


def _check_unchanged(
    folder: OutputFolder, manifest: Mapping[str, Any], made: Sequence[str], staging: str
) -> None:
    """Raise StoreUnavailable if the folder changed during the merge.

    A folder of an object store has no lock that prevents such a change.
    """
    there = set(folder.files())
    if _manifest(folder) != manifest or not there.issuperset(made):
        raise StoreUnavailable(
            f"{folder.location}: another process changed the export meanwhile: run again"
        )
    for path in made:
        final = _final(path, staging)
        if final in there:
            raise UsageError(
                f"{folder.location}/{final}: a merged file needs this name, but no export wrote "
                "the existing file: move it elsewhere"
            )


def _manifest(folder: OutputFolder) -> dict[str, Any]:
    where = f"{folder.location}/{output.MANIFEST}"
    if folder.read_json(output.INTENT) is not None:
        raise StoreUnavailable(
            f"{folder.location}: an export was interrupted: run the export again first"
        )
    try:
        document = folder.read_json(output.MANIFEST)
    except ValueError as error:
        raise UsageError(f"{where}: is not a manifest of an export: {error}") from error
    if not isinstance(document, dict) or document.get("written_by") != output.WRITTEN_BY:
        raise UsageError(f"{where}: is not a manifest of an export")
    return document


def _files(folder: OutputFolder, manifest: Mapping[str, Any]) -> Iterator[_File]:
    seen: set[str] = set()
    try:
        for entry in manifest["files"]:
            path = output.written_path(folder, output.MANIFEST, entry["path"])
            size, last = int(entry["bytes"]), int(entry["last_offset"])
            if path in seen or last < 0 or size < 0:
                raise ValueError(f"{path}: appears twice, or has invalid numbers")
            seen.add(path)
            place, _, name = path.rpartition("/")
            found = _NAME.fullmatch(name)
            if found is not None and (rows := int(entry["rows"])) and size:
                first = int(found["first"])
                order = first, int(entry["first_offset"]), last, path
                yield _File(path, size, rows, place, found["kind"], first, last, order)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder.location}/{output.MANIFEST}: is not a manifest of an export: {error!r}"
        ) from error


def _chosen(files: Iterator[_File], target_size: int) -> Iterator[list[_File]]:
    kinds: dict[tuple[str, str], list[_File]] = {}
    for file in files:
        kinds.setdefault((file.place, file.kind), []).append(file)
    for _, some in sorted(kinds.items()):
        yield from groups(sorted(some, key=lambda file: file.order), target_size)


def _task(
    folder: OutputFolder, staging: str, group: Sequence[_File], known: Sequence[str]
) -> MergeTask:
    first, last = group[0], group[-1].last_offset
    # If a file of an earlier merge already has this name, add a number to the name.
    name = f"{first.kind}.{first.first:020d}.to.{last:020d}"
    path = f"{first.place}/{name}".lstrip("/")
    taken = [file[len(path) + 1 :] for file in known if file.startswith(f"{path}.")]
    if taken:
        numbers = [int(found[0]) for rest in taken if (found := re.match("[0-9]+", rest))]
        path += f".{max(numbers, default=0) + 1}"
    sources = tuple(Source(file.path, file.bytes, file.rows) for file in group)
    return MergeTask(folder, sources, path, staging)


def _final(path: str, staging: str) -> str:
    """Return the final path of a file that is in the folder of an attempt."""
    return path.removeprefix(f"{staging}/").partition("/")[2]


def _new_manifest(
    manifest: Mapping[str, Any], made: Sequence[Merged], staging: str
) -> dict[str, Any]:
    entries = {entry["path"]: entry for entry in manifest["files"]}
    for file in made:
        sources = [entries.pop(path) for path in file.sources]
        path = _final(file.path, staging)
        if path in entries:
            raise AssertionError(f"{path} exists already")
        entries[path] = {
            **sources[0],
            "path": path,
            "rows": file.rows,
            "bytes": file.bytes,
            "last_offset": sources[-1]["last_offset"],
        }
    return {**manifest, "files": [entry for _, entry in sorted(entries.items())]}


# ----------------------------------------------------------------------------- Delta and Iceberg
# An export can append at the same time, because a compaction replaces only files that were in the
# table when the compaction began. Older versions of the table need the old files, so these files
# stay until you run vacuum or expire_snapshots.
_WORDS: Final = re.compile(r"part-.*-[0-9]{20}-")


def compact_delta(delta: Delta, target_size: int | None) -> Compaction:
    """Merge the small files of a Delta table with `deltalake`."""
    if delta.look() is None:
        raise StoreNotFound(f"{delta.name}: there is no Delta table")
    from deltalake.exceptions import CommitFailedError

    try:
        done = delta.compact(target_size)
    except CommitFailedError as error:
        raise StoreUnavailable(
            f"{delta.name}: another process changed the table meanwhile: run again: {error}"
        ) from error
    return Compaction(
        files_before=int(done["numFilesRemoved"]),
        files_after=int(done["numFilesAdded"]),
        bytes_before=_total(done["filesRemoved"]),
        bytes_after=_total(done["filesAdded"]),
    )


def _total(sizes: Any) -> int:
    # deltalake returns JSON text or a dict here, depending on its version.
    found = json.loads(sizes) if isinstance(sizes, str) else sizes
    return int(found["totalSize"])


def compact_iceberg(table: Iceberg, target_size: int, run: RunMerges) -> Compaction:
    """Merge the small files of an Iceberg table.

    The snapshot's operation is ``overwrite``. Iceberg has the operation ``replace`` for changes
    that keep all rows, but `pyiceberg` does not support it.
    """
    if table.look() is None:
        raise StoreNotFound(f"{table.name}: there is no Iceberg table of this name")
    chosen = list(_iceberg_groups(table.data_files(), target_size))
    if not chosen:
        return Compaction()
    made: list[Merged] = []
    try:
        results = run([_iceberg_task(table, group) for group in chosen])
        made = [file for files in results for file in files]
        chosen, kept = fewer(chosen, results)
        _remove(table, [file for file in made if file not in kept])
        made = kept
        if not made:
            return Compaction()
        before = {file.path: file for group in chosen for file in group}
        added = [table_file(table.folder, f, before[f.sources[0]].values) for f in made]
    except BaseException:
        _remove(table, made)
        raise
    try:
        with held():
            table.replace(before.values(), added)
    except TableUnchanged:
        # Keep the new files after other errors: the commit may have succeeded.
        _remove(table, made)
        raise
    return Compaction.of(before.values(), made)


def _remove(table: Iceberg, made: Sequence[Merged]) -> None:
    for file in made:
        table.folder.remove(file.path)


def _iceberg_groups(
    files: Sequence[TableDataFile], target_size: int
) -> Iterator[list[TableDataFile]]:
    """Yield groups of files to merge; the files of a group have the same broker and partition."""
    kinds: dict[tuple[Any, str, str], list[TableDataFile]] = {}
    for file in files:
        place, _, name = file.path.rpartition("/")
        words = _WORDS.match(name)
        if words is not None:
            broker = words[0][:-22]
            kinds.setdefault((tuple(file.values.items()), place, broker), []).append(file)
    for some in kinds.values():
        yield from groups(sorted(some, key=lambda file: file.path), target_size)


def _iceberg_task(table: Iceberg, group: Sequence[TableDataFile]) -> MergeTask:
    place, slash, name = group[0].path.rpartition("/")
    words = _WORDS.match(name)
    assert words is not None
    sources = tuple(Source(file.path, file.bytes, file.rows) for file in group)
    stem = f"{place}{slash}{words[0]}merged"
    return MergeTask(table.folder, sources, stem)
