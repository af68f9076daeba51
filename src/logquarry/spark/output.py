"""The destination folder of an export, and how exports and compactions commit files into it::

    DEST/_temporary-ID/          files that a running export has written so far
    DEST/_intent.json            during the commit: all files of the new and the earlier export
    DEST/**/part-*.parquet       the files
    DEST/_manifest.json          the files of the last complete export
    DEST/_SUCCESS                written last

Before ``_intent.json`` exists, the export changes no file of an earlier export. After a crash
during the commit, ``_SUCCESS`` is missing, and the next export replaces or removes each file that
the intent lists. The intent of a compaction lists new files, removed files and the new manifest.
After a crash, the next export or compaction completes the compaction. A commit syncs the result of
each step before the next step, so a power cut leaves the folder in the same states as a crash.

An export into a folder with other Parquet files is rejected, because readers would mix the files.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Final

from pyarrow import fs as pafs

from logquarry.disk.folders import lock_folder
from logquarry.errors import CorruptFile, UsageError
from logquarry.log.location import absolute, arrow_folder
from logquarry.systems import fcntl, sync_path
from logquarry.text import listed


class OutputFolder:
    """A local folder, or a folder of an object store; all paths are below the folder. Picklable."""

    def __init__(
        self, location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self.location = absolute(location)
        try:
            self.location.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{self.location}: Parquet and tables need a folder whose path is UTF-8. Give "
                "another folder; or if the path is UTF-8, set PYTHONUTF8=1"
            ) from None
        self.storage_options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputFolder, (self.location, self.storage_options)

    @property
    def is_local(self) -> bool:
        """Whether the folder is in a file system of this machine; false for an object store."""
        return "://" not in self.location

    @cached_property
    def _opened(self) -> tuple[pafs.FileSystem, str]:
        if self.is_local:
            return pafs.LocalFileSystem(), self.location
        filesystem, base = arrow_folder(self.location, self.storage_options)
        return filesystem, base.rstrip("/")

    @property
    def _fs(self) -> pafs.FileSystem:
        return self._opened[0]

    def _full(self, path: str) -> str:
        return f"{self._opened[1]}/{path}" if path else self._opened[1]

    def lock(self) -> int | None:
        """Lock the folder until the returned descriptor is closed; return None for an object store.

        The caller must list the folder after it has locked the folder. Otherwise another export
        could commit files after the listing, and the caller would not remove those files.
        """
        if not self.is_local:
            return None
        while True:
            try:
                return lock_folder(self.location, "another export is running there")
            except FileNotFoundError:
                self.make()

    def files(self, path: str = "") -> Iterator[str]:
        """Yield the paths of all files in a folder and below; none if the folder does not exist."""
        start = len(self._full("")) + 1
        for info in self._listed(path, recursive=True):
            if info.type != pafs.FileType.Directory:
                yield info.path[start:]

    def names(self, path: str = "") -> list[tuple[str, bool]]:
        """Return (name, whether the entry is a folder) for a folder's entries, sorted by name."""
        found = self._listed(path)
        return sorted((info.base_name, info.type == pafs.FileType.Directory) for info in found)

    def _listed(self, path: str, *, recursive: bool = False) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(self._full(path), recursive=recursive, allow_not_found=True)
        return list(self._fs.get_file_info(selector))

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        return int(self._fs.get_file_info(self._full(path)).size)

    def make(self, path: str = "") -> None:
        """Create a folder and its parents."""
        self._fs.create_dir(self._full(path), recursive=True)

    def create(self, path: str) -> Any:
        """Open a file to write; replace an existing file."""
        return self._fs.open_output_stream(self._full(path))

    def open(self, path: str) -> Any:
        """Open a file to read."""
        return self._fs.open_input_file(self._full(path))

    def sync(self, path: str) -> None:
        """Sync a local file and the folders that contain it; an object store needs no sync."""
        if not self.is_local or fcntl is None:  # Windows cannot open a folder to sync it
            return
        words = path.split("/")
        for count in range(len(words), -1, -1):
            sync_path(self._full("/".join(words[:count])))

    def sync_new(self, before: Collection[str], path: str = "") -> Collection[str]:
        """Sync each local file below ``path`` that is not in ``before``, and its folders.

        Return all files below ``path``.
        """
        if not self.is_local or fcntl is None:
            return before
        found = set(self.files(path))
        new = found.difference(before)
        places = {str(place) for file in new for place in PurePosixPath(file).parents}
        for place in (*new, *places):
            # Another program can remove files at any moment.
            with suppress(FileNotFoundError):
                sync_path(self._full(place))
        return found

    def move(self, source: str, target: str) -> None:
        """Move a file; replace an existing target."""
        if not self.is_local:
            # In some object stores, a move does not replace an existing object.
            self.remove(target)
        self._fs.move(self._full(source), self._full(target))

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""
        if self._fs.get_file_info(self._full(path)).type != pafs.FileType.NotFound:
            self._fs.delete_file(self._full(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all its files, if the folder exists."""
        with suppress(FileNotFoundError):
            self._fs.delete_dir(self._full(path))

    def remove_if_empty(self, path: str) -> bool:
        """Remove a folder if the folder is empty; return whether it was empty."""
        if self._listed(path):
            return False
        self.remove_folder(path)
        return True

    def read_json(self, path: str) -> Any:
        """Read a JSON document; return None if the file does not exist."""
        try:
            with self._fs.open_input_stream(self._full(path)) as source:
                return json.loads(source.read())
        except FileNotFoundError:
            return None

    def write_json(self, path: str, document: Any, *, by_way_of: str) -> None:
        """Write a JSON document atomically: write the file ``by_way_of``, then move it to ``path``.

        A power cut during the call leaves either the earlier document or the complete new document.
        """
        with self.create(by_way_of) as sink:
            sink.write(json.dumps(document, indent=1).encode())
        # Without the first sync, a power cut after the move could leave an empty document.
        self.sync(by_way_of)
        self.move(by_way_of, path)
        self.sync(path)


# ------------------------------------------------------------------------------------------ export

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
_AT_ONCE: Final = 8


class ExportCommit:
    """The commit of one export: :meth:`begin`, then :meth:`commit` or :meth:`abort`."""

    def __init__(self, folder: OutputFolder) -> None:
        self._folder = folder
        self.staging = TEMPORARY + uuid.uuid4().hex[:12]
        """Name of the subfolder of the destination in which the tasks write their files."""
        self._earlier: frozenset[str] = frozenset()
        self._remains = ""
        self._lock: int | None = None

    def begin(self) -> None:
        """Lock and check the destination, clean up after crashed exports, make the staging
        folder."""
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
                raise UsageError(
                    f"{self._folder.location}: holds {what}: give another folder for the export"
                )
        self._earlier = self._ours()
        foreign = sorted(
            path
            for path in self._folder.files()
            if path.lower().endswith(_PARQUET_ENDINGS)
            and path not in self._earlier
            and not path.startswith(TEMPORARY)
        )
        if foreign:
            raise UsageError(
                f"{self._folder.location}: holds Parquet files that no export wrote "
                f"({listed(foreign, _MOST_NAMED)}): give a folder without them"
            )
        remove_temporary(self._folder)
        self._folder.make(self.staging)

    def commit(self, files: Sequence[tuple[str, str]], manifest: Mapping[str, Any]) -> None:
        """Put files in place, remove other files of an earlier export, write manifest and _SUCCESS.

        `files` holds (staged path, final path) of each new file, below the destination.
        """
        try:
            try:
                self._put(files, manifest)
            except OSError as error:
                # No later export uses the staged files, and removing them frees the disk.
                with suppress(OSError):
                    self._folder.remove_folder(self.staging)
                if not self._remains:
                    raise
                when = "while the export moved its files into place"
                raise failed_commit(self._folder, when, self._remains, error) from error
            self._folder.remove_folder(self.staging)
        finally:
            self._unlock()

    def abort(self) -> None:
        """Remove the staged files; files of an earlier export stay unchanged."""
        try:
            self._folder.remove_folder(self.staging)
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
        draft = f"{self.staging}/{MANIFEST}"
        intent = {"written_by": WRITTEN_BY, "files": sorted({*self._earlier, *wanted})}
        folder.write_json(INTENT, intent, by_way_of=draft)
        self._remains = (
            "The folder has no complete export now. Run the export again: it replaces or removes "
            f"all files that {INTENT} lists"
        )
        document = {"written_by": WRITTEN_BY, **manifest}
        _replace(folder, files, self._earlier - set(wanted), document, draft)
        self._remains = f"The export is complete, but {INTENT} is still there: remove this file"
        folder.remove(INTENT)

    def _ours(self) -> frozenset[str]:
        """Return the files that the manifest or the intent of an earlier export lists."""
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
                    f"{self._folder.location}: {name} was not written by an export: "
                    "give another folder"
                )
            files = document.get("files")
            for entry in files if isinstance(files, list) else [None]:
                path = entry.get("path") if isinstance(entry, dict) else entry
                found.add(written_path(self._folder, name, path))
        return frozenset(found)


def failed_commit(folder: OutputFolder, when: str, step: str, error: OSError) -> OSError:
    """Return an OSError with the errno of ``error``, and a text that names the next step."""
    return OSError(error.errno, f"{when}: {error.strerror or error}. {step}", folder.location)


def remove_temporary(folder: OutputFolder) -> None:
    """Remove staging folders of crashed exports and compactions. The caller must hold the lock."""
    for name, is_folder in folder.names():
        if is_folder and name.startswith(TEMPORARY):
            folder.remove_folder(name)


def _each(work: Callable[..., None], *arguments: Iterable[str]) -> None:
    """Call `work` for all arguments, several at a time, because object stores answer slowly."""
    with ThreadPoolExecutor(_AT_ONCE, "commit") as pool:
        for _ in pool.map(work, *arguments):
            pass


def _replace(
    folder: OutputFolder,
    moves: Sequence[tuple[str, str]],
    removed: Collection[str],
    manifest: Mapping[str, Any],
    draft: str,
) -> None:
    """Move files into place, remove old files, write manifest and _SUCCESS.

    The caller must have written INTENT before.

    Args:
        moves: (staged path, final path) of each new file. If there is no staged path, the file is
            already at its final path.
        draft: path at which the manifest is written before it is moved to its place.
    """
    folder.remove(SUCCESS)
    folder.sync(INTENT)
    for place in sorted({os.path.dirname(path) for _, path in moves}):  # noqa: PTH120
        folder.make(place)

    def put(staged: str, path: str) -> None:
        if staged:
            folder.move(staged, path)
        folder.sync(path)

    _each(put, *zip(*moves, strict=True))
    _each(folder.remove, sorted(removed))
    places = {os.path.dirname(path) for path in removed}  # noqa: PTH120
    for place in sorted(places, key=len, reverse=True):
        while place and folder.remove_if_empty(place):
            place = os.path.dirname(place)  # noqa: PTH120, PLW2901
        # Sync the removals. If a power cut restored a removed file, no later export would remove
        # the file.
        folder.sync(place)
    folder.write_json(MANIFEST, manifest, by_way_of=draft)
    with folder.create(SUCCESS):
        pass


def written_path(folder: OutputFolder, name: str, path: Any) -> str:
    """Check a path of a manifest or intent; raise UsageError if no export writes such a path.

    Without the check, a forged manifest could make the commit remove any file.
    """
    parts = path.split("/") if isinstance(path, str) else []
    plain = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
    foreign = UsageError(
        f"{folder.location}: {name} lists {path!r}, which no export wrote: give another folder"
    )
    if not parts or not plain or not parts[-1].endswith(_OUR_ENDING):
        raise foreign
    if folder.is_local:
        root = os.path.realpath(folder.location)
        try:
            place = os.path.realpath(os.path.join(root, *parts[:-1]))  # noqa: PTH118
        except UnicodeError as error:
            raise foreign from error
        if place != os.path.join(root, *parts[:-1]):  # noqa: PTH118
            raise UsageError(
                f"{folder.location}: {name} lists {path!r}, but a symbolic link leads out of "
                "the folder there: give another folder"
            )
    return str(path)


# ------------------------------------------------------------------------------------- compaction
def commit_compaction(
    folder: OutputFolder,
    staging: str,
    moves: Sequence[tuple[str, str]],
    removed: Sequence[str],
    manifest: Mapping[str, Any],
) -> None:
    """Write the intent of a compaction, then complete the compaction. The caller must have synced
    the new files.

    Args:
        moves: (staged path, final path) of each new file.
        removed: the old files to remove.
        manifest: the new manifest.
    """
    before = {entry["path"] for entry in manifest["files"]}
    plan = {"staging": staging, "moves": moves, "removed": removed, "manifest": manifest}
    files = sorted({*before, *removed})
    intent = {"written_by": WRITTEN_BY, "files": files, _COMPACTION: plan}
    try:
        folder.write_json(INTENT, intent, by_way_of=f"{staging}/{INTENT}")
    except OSError:
        if folder.read_json(INTENT) is None:
            folder.remove_folder(staging)
        raise
    try:
        finish_compaction(folder)
    except OSError as error:
        raise failed_commit(
            folder,
            "while the compaction moved its files into place",
            f"Run the compaction again to complete it. It needs the files in {staging}",
            error,
        ) from error


def finish_compaction(folder: OutputFolder) -> bool:
    """If an intent file exists, complete its compaction. Return whether one existed.

    Raises:
        UsageError: if the intent is invalid.
        CorruptFile: if a new file is neither in the staging folder nor at its final path.
    """
    try:
        document = folder.read_json(INTENT)
    except ValueError:
        return False
    plan = document.get(_COMPACTION) if isinstance(document, dict) else None
    if plan is None or document.get("written_by") != WRITTEN_BY:
        return False
    staging, moves, removed, manifest = _checked(folder, plan)
    there = set(folder.files())
    for staged, path in moves:
        if staged not in there and path not in there:
            reason = f"the file is missing, also at {staged}"
            raise CorruptFile(f"{folder.location}/{path}", 0, reason)
    folder.make(staging)
    # After a crash, some of the files are in place already.
    left = [(staged if staged in there else "", path) for staged, path in moves]
    _replace(folder, left, removed, manifest, f"{staging}/{MANIFEST}")
    folder.remove(INTENT)
    folder.remove_folder(staging)
    return True


def _checked(
    folder: OutputFolder, plan: Any
) -> tuple[str, list[tuple[str, str]], list[str], dict[str, Any]]:
    """Return (staging, moves, removed, manifest) of an intent; raise UsageError if invalid."""
    try:
        staging, manifest = plan["staging"], dict(plan["manifest"])
        moves = [(str(staged), str(path)) for staged, path in plan["moves"]]
        removed = [written_path(folder, INTENT, path) for path in plan["removed"]]
        if not isinstance(staging, str) or not re.fullmatch(f"{TEMPORARY}[0-9a-f]+", staging):
            raise ValueError(f"staging {staging!r}")
        # The commit writes the new manifest into the staging folder first, so check the folder's
        # path even if the commit moves no file.
        written_path(folder, INTENT, f"{staging}/{_OUR_ENDING}")
        for staged, path in moves:
            written_path(folder, INTENT, path)
            written_path(folder, INTENT, staged)
            if not staged.startswith(f"{staging}/"):
                raise ValueError(f"staged {staged!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{folder.location}: {INTENT} is not a valid intent of a compaction: {error!r}"
        ) from error
    return staging, moves, removed, manifest
