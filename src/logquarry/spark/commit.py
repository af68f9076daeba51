"""How an export's files get into place: all of them once, whatever happens on the way.

::

    DEST/_temporary-ID/          what a running export has written so far
    DEST/_intent.json            while files are put in place: which ones were and will be ours
    DEST/**/part-*.parquet       the files
    DEST/_manifest.json          what an export has put there, complete
    DEST/_SUCCESS                the last thing that is written

A compaction changes such a folder, too. Its intent says which files come and which go then, and the
manifest that is to be: whoever comes next finishes it.

Up to the intent nothing of an earlier export is touched. From the intent on a crash leaves a mix
of old and new files without ``_SUCCESS``, and the intent says which of them are ours: the next
export replaces or removes each of them. Files that no export of ours wrote are never touched, and
where Parquet files are among them the export is refused, for readers would take them for its own.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from logquarry.errors import CorruptFile, UsageError
from logquarry.spark.output import OutputFolder

MANIFEST: Final = "_manifest.json"
SUCCESS: Final = "_SUCCESS"
INTENT: Final = "_intent.json"
TEMPORARY: Final = "_temporary-"
WRITTEN_BY: Final = "logquarry"

_PARQUET_ENDINGS: Final = (".parquet", ".parq")
_OUR_ENDING: Final = ".parquet"
_TABLE_FOLDERS: Final = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}
_MOST_NAMED: Final = 3
_COMPACTION: Final = "compaction"


class ExportCommit:
    """One export into a folder: :meth:`begin`, then :meth:`commit` or :meth:`abort`.

    Args:
        folder: where to.
    """

    def __init__(self, folder: OutputFolder) -> None:
        self._folder = folder
        self._staging = TEMPORARY + uuid.uuid4().hex[:12]
        self._earlier: frozenset[str] = frozenset()
        self._lock: int | None = None

    @property
    def staging(self) -> str:
        """Name of the folder that tasks write into, below the destination."""
        return self._staging

    def begin(self) -> None:
        """See that the folder can be exported to, and make the staging folder.

        Raises:
            UsageError: if it holds Parquet files that no export of ours wrote, or another table.
            StoreUnavailable: if another export is at work there.
        """
        self._folder.make()
        self._lock = self._folder.lock()
        try:
            self._begin()
        except BaseException:
            self.abort()
            raise

    def _begin(self) -> None:
        finish_compaction(self._folder)
        names = dict(self._folder.names())
        for name, what in _TABLE_FOLDERS.items():
            if name in names:
                raise UsageError(f"{self._folder.location}: there is {what}: export elsewhere")
        self._earlier = self._ours()
        foreign = sorted(
            path
            for path in self._folder.files()
            if path.lower().endswith(_PARQUET_ENDINGS)
            and path not in self._earlier
            and not path.startswith(TEMPORARY)
        )
        if foreign:
            some = ", ".join(foreign[:_MOST_NAMED])
            more = f" and {len(foreign) - _MOST_NAMED} more" * (len(foreign) > _MOST_NAMED)
            raise UsageError(
                f"{self._folder.location}: holds Parquet files that no export of ours wrote "
                f"({some}{more}): export into a folder of its own"
            )
        for name, is_folder in names.items():
            if is_folder and name.startswith(TEMPORARY):
                # An export that died has left it: a living one has the lock.
                self._folder.remove_folder(name)
        self._folder.make(self._staging)

    def commit(self, files: Sequence[tuple[str, str]], manifest: Mapping[str, Any]) -> None:
        """Put files in place, remove what an earlier export had besides, and say that it is done.

        Args:
            files: (where a file is, where it belongs), below the destination.
            manifest: the document that tells of them; the names of the files are added to it.
        """
        try:
            self._put(files, manifest)
            self._folder.remove_folder(self._staging)
        finally:
            self._unlock()

    def abort(self) -> None:
        """Remove what is staged; what was in place stays as it is."""
        try:
            self._folder.remove_folder(self._staging)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _put(self, files: Sequence[tuple[str, str]], manifest: Mapping[str, Any]) -> None:
        folder = self._folder
        wanted = [path for _, path in files]
        if len(set(wanted)) != len(wanted):
            raise AssertionError("two tasks of one export wrote files of the same name")
        draft = f"{self._staging}/{MANIFEST}"
        intent = {"written_by": WRITTEN_BY, "files": sorted({*self._earlier, *wanted})}
        folder.write_json(INTENT, intent, by_way_of=draft)
        folder.remove(SUCCESS)
        for place in sorted({os.path.dirname(path) for path in wanted}):  # noqa: PTH120
            folder.make(place)
        for staged, path in files:
            folder.move(staged, path)
        unwanted = self._earlier - set(wanted)
        for path in sorted(unwanted):
            folder.remove(path)
        _remove_empty(folder, unwanted)
        document = {"written_by": WRITTEN_BY, **manifest}
        folder.write_json(MANIFEST, document, by_way_of=draft)
        with folder.create(SUCCESS):
            pass
        folder.remove(INTENT)

    def _ours(self) -> frozenset[str]:
        """The files that earlier exports put here, or were about to."""
        found: set[str] = set()
        for name in (MANIFEST, INTENT):
            try:
                document = self._folder.read_json(name)
            except ValueError:
                document = {}
            if document is None:
                continue
            if not isinstance(document, dict) or document.get("written_by") != WRITTEN_BY:
                raise UsageError(
                    f"{self._folder.location}: {name} is not ours: export into a folder of its own"
                )
            files = document.get("files")
            for entry in files if isinstance(files, list) else [None]:
                path = entry.get("path") if isinstance(entry, dict) else entry
                found.add(written_path(self._folder, name, path))
        return frozenset(found)


def _remove_empty(folder: OutputFolder, removed: Iterable[str]) -> None:
    """Remove the folders that are empty now that some files are gone."""
    places = {os.path.dirname(path) for path in removed}  # noqa: PTH120
    for place in sorted(places, key=len, reverse=True):
        while place and folder.remove_if_empty(place):
            place = os.path.dirname(place)  # noqa: PTH120, PLW2901


def written_path(folder: OutputFolder, name: str, path: Any) -> str:
    """A path of a document, which has to be one that an export may have written.

    It will be removed, and whoever wrote the document need not be allowed to remove it.
    """
    parts = path.split("/") if isinstance(path, str) else []
    plain = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
    if not parts or not plain or not parts[-1].endswith(_OUR_ENDING):
        raise UsageError(
            f"{folder.location}: {name} names {path!r}, which no export of ours wrote: "
            "export into a folder of its own"
        )
    if folder.is_local:
        root = os.path.realpath(folder.location)
        place = os.path.realpath(os.path.join(root, *parts[:-1]))  # noqa: PTH118
        if place != os.path.join(root, *parts[:-1]):  # noqa: PTH118
            raise UsageError(
                f"{folder.location}: {name} names {path!r}, and a link leads elsewhere: "
                "export into a folder of its own"
            )
    return str(path)


# ------------------------------------------------------------------------------------- compaction
@dataclass(frozen=True, kw_only=True)
class CompactionIntent:
    """Which files of an export come, and which go for them.

    Attributes:
        staging: the folder in which the new ones are, below the destination.
        moves: where each is, and where it belongs.
        removed: those whose rows they have.
        manifest: what tells of the folder afterwards.
    """

    staging: str
    moves: Sequence[tuple[str, str]]
    removed: Sequence[str]
    manifest: Mapping[str, Any]

    def commit(self, folder: OutputFolder) -> None:
        """Say what is to be, and do it. The new files are on the disk by now."""
        before = {entry["path"] for entry in self.manifest["files"]}
        intent = {
            "written_by": WRITTEN_BY,
            "files": sorted({*before, *self.removed}),
            _COMPACTION: {
                "staging": self.staging,
                "moves": [list(move) for move in self.moves],
                "removed": list(self.removed),
                "manifest": dict(self.manifest),
            },
        }
        folder.write_json(INTENT, intent, by_way_of=f"{self.staging}/{INTENT}")
        folder.sync(INTENT)
        finish_compaction(folder)


def finish_compaction(folder: OutputFolder) -> bool:
    """Do what the intent of a compaction says, as far as it is not done; whether there was one.

    Raises:
        UsageError: if it is not the intent of a compaction of ours.
        CorruptFile: if a new file is neither where it was nor where it belongs.
    """
    try:
        document = folder.read_json(INTENT)
    except ValueError:
        return False
    told = document.get(_COMPACTION) if isinstance(document, dict) else None
    if told is None or document.get("written_by") != WRITTEN_BY:
        return False
    staging, moves, removed, manifest = _checked(folder, told)
    there = set(folder.files())
    for staged, path in moves:
        if staged not in there and path not in there:
            raise CorruptFile(f"{folder.location}/{path}", 0, f"it is not there, nor at {staged}")
    folder.remove(SUCCESS)
    for staged, path in moves:
        if staged in there:
            folder.move(staged, path)
        folder.sync(path)
    for path in removed:
        folder.remove(path)
    folder.make(staging)
    folder.write_json(MANIFEST, manifest, by_way_of=f"{staging}/{MANIFEST}")
    with folder.create(SUCCESS):
        pass
    folder.remove(INTENT)
    folder.remove_folder(staging)
    return True


def _checked(
    folder: OutputFolder, told: Any
) -> tuple[str, list[tuple[str, str]], list[str], dict[str, Any]]:
    """What an intent says, if it can be meant: files are going to be moved and removed by it."""
    try:
        staging, manifest = told["staging"], dict(told["manifest"])
        moves = [(str(staged), str(path)) for staged, path in told["moves"]]
        removed = [written_path(folder, INTENT, path) for path in told["removed"]]
        if not isinstance(staging, str) or not re.fullmatch(f"{TEMPORARY}[0-9a-f]+", staging):
            raise ValueError(f"staging {staging!r}")
        # The new manifest is written there, also where no file is moved.
        written_path(folder, INTENT, f"{staging}/{_OUR_ENDING}")
        for staged, path in moves:
            written_path(folder, INTENT, path)
            written_path(folder, INTENT, staged)
            if not staged.startswith(f"{staging}/"):
                raise ValueError(f"staged {staged!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder.location}: {INTENT} is not ours: {error!r}") from error
    return staging, moves, removed, manifest
