"""How an export's files get into place: all of them once, whatever happens on the way.

::

    DEST/_temporary-ID/          what a running export has written so far
    DEST/_intent.json            while files are put in place: which ones were and will be ours
    DEST/**/part-*.parquet       the files
    DEST/_manifest.json          what an export has put there, complete
    DEST/_SUCCESS                the last thing that is written

Up to the intent nothing of an earlier export is touched. From the intent on a crash leaves a mix
of old and new files without ``_SUCCESS``, and the intent says which of them are ours: the next
export replaces or removes each of them. Files that no export of ours wrote are never touched, and
where Parquet files are among them the export is refused, for readers would take them for its own.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from logquarry.errors import UsageError
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
        self._remove_empty(os.path.dirname(path) for path in unwanted)  # noqa: PTH120
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
                found.add(self._within(name, path))
        return frozenset(found)

    def _within(self, name: str, path: Any) -> str:
        """A path of a document, which has to be one that an export may have written.

        It will be removed, and whoever wrote the document need not be allowed to remove it.
        """
        parts = path.split("/") if isinstance(path, str) else []
        plain = all(part not in ("", ".", "..") and "\0" not in part for part in parts)
        if not parts or not plain or not parts[-1].endswith(_OUR_ENDING):
            raise UsageError(
                f"{self._folder.location}: {name} names {path!r}, which no export of ours wrote: "
                "export into a folder of its own"
            )
        if self._folder.is_local:
            root = os.path.realpath(self._folder.location)
            place = os.path.realpath(os.path.join(root, *parts[:-1]))  # noqa: PTH118
            if place != os.path.join(root, *parts[:-1]):  # noqa: PTH118
                raise UsageError(
                    f"{self._folder.location}: {name} names {path!r}, and a link leads elsewhere: "
                    "export into a folder of its own"
                )
        return str(path)

    def _remove_empty(self, places: Iterable[str]) -> None:
        for place in sorted(set(places), key=len, reverse=True):
            while place and self._folder.remove_if_empty(place):
                place = os.path.dirname(place)  # noqa: PTH120, PLW2901
