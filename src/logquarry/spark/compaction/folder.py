"""What a compaction came to."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.signals import held
from logquarry.spark.commit import (
    INTENT,
    MANIFEST,
    TEMPORARY,
    WRITTEN_BY,
    CompactionIntent,
    finish_compaction,
    written_path,
)
from logquarry.spark.compaction.merging import Merged, MergeTask, RunMerges, Source, fewer, groups
from logquarry.spark.output import OutputFolder


@dataclass(frozen=True, slots=True)
class Compaction:
    """What was merged.

    Attributes:
        files_before: how many files were merged.
        files_after: how many there are instead.
        bytes_before: of those.
        bytes_after: of these.
    """

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


# --------------------------------------------------------------------------------------------------
# The files of an export to plain Parquet made fewer.
#
# Merged are neighbours: files of one folder, broker and kind, in the order of their messages, so
# that rows stay in the order that they had. Until all merged files are written and on the disk the
# folder is as it was; then they take the place of the others, and whoever comes next finishes that
# (:mod:`logquarry.spark.commit`). For that moment a reader may meet rows twice, as with an export:
# ``_SUCCESS`` is not there then.

# part-BROKER.OFFSET, part-BROKER.TOPIC.QUEUE.OFFSET, part-BROKER.at.OFFSET; of merged files with
# the offset of the last message, and with numbers where there is more than one: of the merge that
# ended there, and of its files.
_NAME: Final = re.compile(
    r"(?P<kind>part-.+?)\.(?P<first>[0-9]{20})(?:\.to\.[0-9]{20})?(?:\.[0-9]{1,9}){0,2}\.parquet"
)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a manifest."""

    entry: Mapping[str, Any]
    place: str
    kind: str
    first: int

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Where its rows stand among those of its kind: files of one merge begin alike."""
        offsets = int(self.entry["first_offset"]), int(self.entry["last_offset"])
        return self.first, *offsets, self.path

    @property
    def path(self) -> str:
        return str(self.entry["path"])

    @property
    def bytes(self) -> int:
        return int(self.entry["bytes"])


def is_export(folder: OutputFolder) -> bool:
    """Whether an export to Parquet has been here."""
    names = {name for name, _ in folder.names()}
    return MANIFEST in names or INTENT in names


def compact_folder(folder: OutputFolder, target_size: int, run: RunMerges) -> Compaction:
    """Merge the small files of an export.

    Args:
        folder: where they are.
        target_size: bytes of a file, about.
        run: runs the merges.

    Raises:
        StoreNotFound: if no export is there.
        StoreUnavailable: if somebody is at work there, or an export did not end.
        UsageError: if what tells of the export is not ours.
        CorruptFile: if a file is not what the manifest says; the folder is as it was.
    """
    if not is_export(folder):
        raise StoreNotFound(f"{folder.location}: no export is there")
    lock = folder.lock()
    try:
        finish_compaction(folder)
        return _compact(folder, target_size, run)
    finally:
        if lock is not None:
            os.close(lock)


def _compact(folder: OutputFolder, target_size: int, run: RunMerges) -> Compaction:
    manifest = _manifest(folder)
    for name, is_folder in folder.names():
        if is_folder and name.startswith(TEMPORARY):
            # Whoever left it is dead: a living one has the lock.
            folder.remove_folder(name)
    staging = TEMPORARY + uuid.uuid4().hex[:12]
    chosen = list(_chosen(_files(folder, manifest), target_size))
    if not chosen:
        return Compaction(0, 0, 0, 0)
    known = [str(entry["path"]) for entry in manifest["files"]]
    tasks = [_task(folder, staging, group, known) for group in chosen]
    folder.make(staging)
    try:
        chosen, made = fewer(chosen, run(tasks))
        if not made:
            folder.remove_folder(staging)
            return Compaction(0, 0, 0, 0)
        new = _new_manifest(manifest, made, staging)
        _check_unchanged(folder, manifest, [file.path for file in made], staging)
    except BaseException:
        folder.remove_folder(staging)
        raise
    before = [file for group in chosen for file in group]
    intent = CompactionIntent(
        staging=staging,
        moves=[(file.path, _final(file.path, staging)) for file in made],
        removed=[file.path for file in before],
        manifest=new,
    )
    with held():
        intent.commit(folder)
    return Compaction(
        files_before=len(before),
        files_after=len(made),
        bytes_before=sum(file.bytes for file in before),
        bytes_after=sum(file.bytes for file in made),
    )


def _check_unchanged(
    folder: OutputFolder, manifest: Mapping[str, Any], made: Sequence[str], staging: str
) -> None:
    """That nobody was at work here meanwhile: where there are no locks, nothing else tells.

    Raises:
        StoreUnavailable: if somebody was.
        UsageError: if there is a file that a merged one would take the place of.
    """
    there = set(folder.files())
    if _manifest(folder) != manifest or not there.issuperset(made):
        raise StoreUnavailable(f"{folder.location}: others have changed it meanwhile")
    for path in made:
        final = _final(path, staging)
        if final in there:
            raise UsageError(
                f"{folder.location}/{final}: no export of ours wrote it, and a merged file would "
                "take its place: move it elsewhere"
            )


def _manifest(folder: OutputFolder) -> dict[str, Any]:
    where = f"{folder.location}/{MANIFEST}"
    if folder.read_json(INTENT) is not None:
        raise StoreUnavailable(f"{folder.location}: an export did not end: run it again first")
    try:
        document = folder.read_json(MANIFEST)
    except ValueError as error:
        raise UsageError(f"{where}: not the manifest of an export: {error}") from error
    if not isinstance(document, dict) or document.get("written_by") != WRITTEN_BY:
        raise UsageError(f"{where}: not the manifest of an export of ours")
    return document


def _files(folder: OutputFolder, manifest: Mapping[str, Any]) -> Iterator[_File]:
    """Those that can be merged with others."""
    seen: set[str] = set()
    try:
        for entry in manifest["files"]:
            path = written_path(folder, MANIFEST, entry["path"])
            if path in seen or int(entry["last_offset"]) < 0 or int(entry["bytes"]) < 0:
                raise ValueError(f"{path}: it comes twice, or its numbers cannot be")
            seen.add(path)
            place, _, name = path.rpartition("/")
            found = _NAME.fullmatch(name)
            if found is not None and int(entry["rows"]) and int(entry["bytes"]):
                int(entry["first_offset"])
                yield _File(entry, place, found["kind"], int(found["first"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder.location}/{MANIFEST}: not the manifest of an export: {error!r}"
        ) from error


def _chosen(files: Iterator[_File], target_size: int) -> Iterator[list[_File]]:
    """Groups of files that are to be one each."""
    kinds: dict[tuple[str, str], list[_File]] = {}
    for file in files:
        kinds.setdefault((file.place, file.kind), []).append(file)
    for _, some in sorted(kinds.items()):
        yield from groups(sorted(some, key=lambda file: file.order), target_size)


def _task(
    folder: OutputFolder, staging: str, group: Sequence[_File], known: Sequence[str]
) -> MergeTask:
    first, last = group[0], int(group[-1].entry["last_offset"])
    # A name that no file has: not even one of a merge that the same files began.
    name = f"{first.kind}.{first.first:020d}.to.{last:020d}"
    path = f"{first.place}/{name}".lstrip("/")
    taken = [file[len(path) + 1 :] for file in known if file.startswith(f"{path}.")]
    if taken:
        numbers = [int(found[0]) for rest in taken if (found := re.match("[0-9]+", rest))]
        path += f".{max(numbers, default=0) + 1}"
    sources = tuple(Source(file.path, file.bytes, int(file.entry["rows"])) for file in group)
    return MergeTask(folder, sources, path, staging)


def _final(path: str, staging: str) -> str:
    """Where a staged file belongs: the folder of the attempt is of the way there."""
    return path.removeprefix(f"{staging}/").partition("/")[2]


def _new_manifest(
    manifest: Mapping[str, Any], made: Sequence[Merged], staging: str
) -> dict[str, Any]:
    """The manifest with the merged files in place of what they were made of."""
    entries = {entry["path"]: entry for entry in manifest["files"]}
    for file in made:
        sources = [entries.pop(path) for path in file.sources]
        path = _final(file.path, staging)
        if path in entries:
            raise AssertionError(f"{path} is there already")
        entries[path] = {
            **sources[0],
            "path": path,
            "rows": file.rows,
            "bytes": file.bytes,
            "last_offset": sources[-1]["last_offset"],
        }
    return {**manifest, "files": [entry for _, entry in sorted(entries.items())]}
