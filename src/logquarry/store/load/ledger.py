"""What a store remembers of loads, in ``.logquarry/loads/``.

::

    intent.json             the load that is being appended, from before its first frame is
    ledger/<app>.json       the last version of each application that is in the log
    staged/<app>/<version>/ segments that wait

All of it is written whole, beside first and then in place, and synced before the next step. An
application counts its versions upwards, as Delta Lake's ``txnAppId`` and ``txnVersion``: a version
that is not above the last one is in the log already.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from logquarry.disk.disk import Disk
from logquarry.errors import CorruptFile, UsageError
from logquarry.log.layout import INTENT, LOADS
from logquarry.repair.recover.apply import disk_json
from logquarry.store.load.segment import Segment

STAGED: Final = "staged"
_LEDGER: Final = "ledger"
_WRITTEN_BY: Final = "logquarry load"
_RUN: Final = re.compile(r"run-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class LoadId:
    """Which load it is.

    Attributes:
        app: the application's name.
        version: which of its loads; later ones have larger numbers.
        is_named: whether anybody may come again with the same. A load without a name is known
            for as long as it takes.
    """

    app: str
    version: int
    is_named: bool = True

    def __post_init__(self) -> None:
        if not self.app or self.version < 0:
            raise UsageError(f"no load: {self.app!r}, version {self.version}")
        if not self.is_named and _RUN.fullmatch(self.app) is None:
            raise UsageError(f"no name of a run: {self.app!r}")

    def __str__(self) -> str:
        return f"version {self.version} of {self.app}" if self.is_named else self.app

    @property
    def folder(self) -> str:
        """A name for the application's files."""
        return hashlib.sha256(self.app.encode()).hexdigest()[:32] if self.is_named else self.app

    @property
    def staged(self) -> str:
        """Where its segments are, below ``loads``."""
        return f"{STAGED}/{self.folder}/{self.version}"

    def to_json(self) -> dict[str, Any]:
        """As a document."""
        return {"app": self.app, "version": self.version, "is_named": self.is_named}

    @classmethod
    def from_json(cls, document: Any) -> LoadId:
        """The same read back.

        Raises:
            ValueError: if it is no such document.
        """
        app, version = document.get("app"), document.get("version")
        is_named = document.get("is_named")
        if not isinstance(app, str) or type(version) is not int or type(is_named) is not bool:
            raise ValueError(f"no load: {document!r}")
        return cls(app, version, is_named)


@dataclass(frozen=True, slots=True)
class Intent:
    """A load that is about to be appended, or half appended.

    Attributes:
        load: which one.
        start: offset in the log of its first frame, or before it.
        loads: where its segments' folder is in: ``loads`` of this store, or of the folder that
            this store is one of several brokers in; as seen from the store.
        segments: in the order in which they are appended.
    """

    load: LoadId
    start: int
    loads: str
    segments: tuple[Segment, ...]

    def folder(self, root: Path) -> Path:
        """Where the segments are."""
        return root / self.loads / self.load.staged

    @property
    def rows(self) -> int:
        """How many frames."""
        return sum(segment.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Bytes of the frames."""
        return sum(segment.bytes for segment in self.segments)


LOADS_PLACES: Final = (LOADS, f"../{LOADS}")
"""Where segments may be, as seen from a store."""


class Ledger:
    """The memory of one store, or of a folder with several.

    Args:
        disk: what it is on.
        root: the store.
    """

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk = disk
        self.folder = root / LOADS

    def _path(self, load: LoadId) -> Path:
        return self.folder / _LEDGER / f"{load.folder}.json"

    def has(self, load: LoadId) -> bool:
        """Whether a load is in the log.

        Raises:
            CorruptFile: if that cannot be told.
        """
        path = self._path(load)
        document = read_document(path)
        if document is None:
            return False
        version = document.get("version")
        if document.get("app") != load.app or type(version) is not int:
            raise CorruptFile(str(path), 0, f"it does not speak of {load.app!r}")
        return version >= load.version

    def add(self, load: LoadId) -> None:
        """A load is in the log, and on the disk.

        Raises:
            StoreUnavailable: if the disk does not take it.
        """
        write_document(self._disk, self._path(load), load.to_json())

    def forget(self, load: LoadId) -> None:
        """Nobody will ask for a load any more."""
        self._disk.remove(self._path(load))

    def intent(self) -> Intent | None:
        """The load that somebody began to append, None without one.

        Raises:
            CorruptFile: if it cannot be read.
        """
        path = self.folder / INTENT
        document = read_document(path)
        if document is None:
            return None
        try:
            segments = tuple(map(Segment.from_json, document["segments"]))
            start, loads = document["start"], document["loads"]
            if type(start) is not int or start < 0 or loads not in LOADS_PLACES:
                raise ValueError(f"start {start!r}, loads {loads!r}")
            return Intent(LoadId.from_json(document["load"]), start, loads, segments)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CorruptFile(str(path), 0, f"no intent of ours: {error}") from error

    def begin(self, intent: Intent) -> None:
        """A load is about to be appended: known from here on, whatever happens.

        Raises:
            StoreUnavailable: if the disk does not take it.
        """
        document = {
            "load": intent.load.to_json(),
            "start": intent.start,
            "loads": intent.loads,
            "segments": [segment.to_json() for segment in intent.segments],
        }
        write_document(self._disk, self.folder / INTENT, document)

    def end(self) -> None:
        """Nothing is being appended any more."""
        self._disk.remove(self.folder / INTENT)


def staged_folder(folder: Path, load: LoadId) -> Path:
    """Where the segments of a load are, below a folder ``loads``."""
    return folder / load.staged


def read_document(path: Path) -> dict[str, Any] | None:
    """A document of ours, None if it is not there.

    Raises:
        CorruptFile: if it is something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CorruptFile(str(path), 0, f"cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("written_by") != _WRITTEN_BY:
        raise CorruptFile(str(path), 0, "no load wrote it")
    return document


def write_document(disk: Disk, path: Path, document: dict[str, Any]) -> None:
    """Write one durably, in place of the one before."""
    disk_json(disk, path, {"written_by": _WRITTEN_BY, **document})


def remove_staged(folder: Path, load: LoadId, names: Sequence[str] | None = None) -> None:
    """Take segments away, and what is left of earlier versions of the same application.

    What cannot be removed stays; nobody will load it.

    Args:
        folder: ``loads``.
        load: is in the log, or will never be.
        names: only these segments of this version; else all of it and all that is older.
    """
    own = folder / load.staged
    if names is not None:
        _remove_files(own, names)
        return
    for version in _versions(own.parent):
        if version <= load.version:
            old = own.parent / str(version)
            _remove_files(old, _names(old))
            _rmdir(old)
    _rmdir(own.parent)


def _versions(folder: Path) -> list[int]:
    return [int(name) for name in _names(folder) if re.fullmatch("[0-9]+", name)]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _remove_files(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        try:
            (folder / name).unlink()
        except OSError:
            continue


def _rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
