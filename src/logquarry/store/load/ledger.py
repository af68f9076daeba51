"""The records of bulk loads in ``.logquarry/loads/``: which load is being appended, and which loads
are in the log.

::

    intent.json             the load that is being appended, written before its first frame
    ledger/<app>.json       for each application the last version that is in the log, and its rows
    staged/<app>/<version>/ segments to load

Each JSON file is written under a temporary name, synced, and renamed. The version numbers of an
application's loads increase, as in Delta Lake (``txnAppId`` and ``txnVersion``). If a version is
recorded, the log has the loads of this version and of all lower versions.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logquarry.disk.disk import Disk
from logquarry.errors import LIMITS, CorruptFile, StoreUnavailable, UsageError, reason_of
from logquarry.format.java import LONG_MAX
from logquarry.log.store_files import INTENT, LOADS
from logquarry.repair.recover.apply import disk_json
from logquarry.store.load.segment import Segment
from logquarry.systems import read_file, sync_path
from logquarry.text import document

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

STAGED: Final = "staged"
_LEDGER: Final = "ledger"
_WRITTEN_BY: Final = "logquarry load"
_RUN: Final = re.compile(r"run-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class LoadId:
    """Identifies a load.

    Attributes:
        version: number of the load, 0 to 2**63 - 1; later loads have larger numbers.
        is_named: whether the application chose the name. Only then may the application repeat the
            load later. A load without a name is recorded only while it runs.
    """

    app: str
    version: int
    is_named: bool = True

    def __post_init__(self) -> None:
        if not self.app or not 0 <= self.version <= LONG_MAX:
            raise UsageError(f"invalid load: application {self.app!r}, version {self.version}")
        if not self.is_named and _RUN.fullmatch(self.app) is None:
            raise UsageError(f"invalid name of a load: {self.app!r}")

    def __str__(self) -> str:
        return f"version {self.version} of {self.app}" if self.is_named else self.app

    @property
    def folder(self) -> str:
        """The application's name as a file name."""
        return hashlib.sha256(self.app.encode()).hexdigest()[:32] if self.is_named else self.app

    @property
    def staged(self) -> str:
        """Folder of the load's segments, below ``loads``."""
        return f"{STAGED}/{self.folder}/{self.version}"

    @classmethod
    def from_json(cls, document: Any) -> LoadId:
        """Return the load that a JSON document describes; :func:`~logquarry.text.document` makes
        the document.
        """
        app, version = document.get("app"), document.get("version")
        is_named = document.get("is_named")
        if not isinstance(app, str) or type(version) is not int or type(is_named) is not bool:
            raise ValueError(f"invalid load: {document!r}")
        return cls(app, version, is_named)


@dataclass(frozen=True, slots=True)
class Intent:
    """A load that is being appended.

    Attributes:
        start: physical offset at or before the load's first frame.
        loads: relative path from the store to the ``loads`` folder that contains the segments. This
            folder is in the store, or in the parent folder of the stores of several brokers.
    """

    load: LoadId
    start: int
    loads: str
    segments: tuple[Segment, ...]

    def folder(self, root: Path) -> Path:
        """Return the folder of the segments."""
        return root / self.loads / self.load.staged

    @property
    def rows(self) -> int:
        """Number of frames."""
        return sum(segment.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        """Size of all frames."""
        return sum(segment.bytes for segment in self.segments)


LOADS_PLACES: Final = (LOADS, f"../{LOADS}")
"""The possible ``loads`` folders with segments, relative to a store."""


class Ledger:
    """Reads and writes the records of loads, for one store or for a folder with several stores."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self._disk = disk
        self.folder = root / LOADS

    def _path(self, load: LoadId) -> Path:
        return self.folder / _LEDGER / f"{load.folder}.json"

    def has(self, load: LoadId) -> bool:
        """Whether the ledger records that a load is in the log.

        Raises CorruptFile if the record is unreadable.
        """
        return (self.last(load) or (-1, None))[0] >= load.version

    def last(self, load: LoadId) -> tuple[int, int | None] | None:
        """Return the version and the number of rows of the application's last load, or None.

        The number of rows is None if an earlier version of logquarry wrote the record.

        Raises CorruptFile if the record is unreadable.
        """
        path = self._path(load)
        document = read_document(path)
        if document is None:
            return None
        version, rows = document.get("version"), document.get("rows")
        if document.get("app") != load.app or type(version) is not int:
            raise CorruptFile(str(path), 0, f"it is not the record of {load.app!r}")
        return version, rows if type(rows) is int else None

    def add(self, load: LoadId, rows: int) -> None:
        """Record that a load with a number of rows is in the log and synced."""
        write_document(self._disk, self._path(load), {**document(load), "rows": rows})

    def forget(self, load: LoadId) -> None:
        """Delete the record of a load that the application will not repeat."""
        self._disk.remove(self._path(load))

    def intent(self) -> Intent | None:
        """Return the load that is being appended, or None.

        Raises CorruptFile if the record is invalid.
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
            raise CorruptFile(str(path), 0, f"invalid intent: {error}") from error

    def begin(self, intent: Intent) -> None:
        """Record that a load will be appended."""
        write_document(self._disk, self.folder / INTENT, document(intent))

    def end(self) -> None:
        """Delete the record of the load that was being appended."""
        self._disk.remove(self.folder / INTENT)


def read_document(path: Path) -> dict[str, Any] | None:
    """Read a JSON document that this module wrote; return None if there is no file.

    Raises:
        CorruptFile: if the document is invalid, or the disk cannot read it.
        StoreUnavailable: if the file could not be opened because a limit was reached.
    """
    try:
        document = json.loads(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in LIMITS:
            raise StoreUnavailable(f"{path}: {reason_of(error)}") from error
        raise CorruptFile(str(path), 0, f"cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("written_by") != _WRITTEN_BY:
        raise CorruptFile(str(path), 0, "it was not written by a load")
    return document


def write_document(disk: Disk, path: Path, document: dict[str, Any]) -> None:
    """Write and sync a JSON document; it replaces the previous document."""
    disk_json(disk, path, {"written_by": _WRITTEN_BY, **document})


def remove_staged(folder: Path, load: LoadId, names: Sequence[str] | None = None) -> None:
    """Delete the segments of a load and of earlier loads of the same application.

    Call this function only if the load is in the log, or will never be appended.

    Args:
        folder: the ``loads`` folder.
        names: names of the segments to delete; by default, all segments of this version and of
            lower versions.
    """
    own = folder / load.staged
    if names is not None:
        for name in names:
            with suppress(OSError):
                (own / name).unlink()
        return
    with suppress(OSError):
        for old in list(own.parent.iterdir()):
            if re.fullmatch("[0-9]+", old.name) and int(old.name) <= load.version:
                shutil.rmtree(old, ignore_errors=True)
        own.parent.rmdir()


# --------------------------------------------------------------------------------------------------
# The dead letters of a load: Parquet files with the rows that no store accepts, and the reasons
#
# The tasks write these files into a staging folder; the commit of the load moves them to their
# final folder. The file names contain the identity of the load, so a repeated load replaces its own
# files.

REASON: Final = "reason"
_STAGED_LETTERS: Final = "_logquarry"
"""Readers of Parquet ignore a folder whose name begins with an underscore."""


class DeadLetters:
    """Stages the rejected rows of one task."""

    def __init__(self, folder: Path, load: LoadId, partition: int) -> None:
        name = f"{partition:05d}-{uuid.uuid4().hex}.parquet"
        self.path = folder / _STAGED_LETTERS / load.staged / name
        self.rows = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.RecordBatch, reasons: Sequence[str]) -> None:
        """Add rows, with a reason for each row."""
        if REASON in rows.schema.names:
            raise UsageError(
                f"a rejected row has a column {REASON!r} already: rename the column of the rows"
            )
        # Import late: the imports take 0.1 s, and only a load with rejected rows needs them.
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = rows.append_column(REASON, pa.array(reasons, pa.string()))
        try:
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = pq.ParquetWriter(self.path, rows.schema, compression="zstd")
            self._writer.write_batch(rows)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: cannot be written: {error}") from error
        self.rows += rows.num_rows

    def finish(self) -> str | None:
        """Sync the file and return its name; None if no row was rejected."""
        if self._writer is None:
            return None
        try:
            self._writer.close()
            sync_path(self.path)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: cannot be written: {error}") from error
        return self.path.name

    def discard(self) -> None:
        """Remove the staged file."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            with suppress(OSError):
                self.path.unlink()


def place_letters(folder: Path, load: LoadId, names: Sequence[str], disk: Disk) -> None:
    """Move the staged files of a load into place; remove files of an earlier attempt."""
    prefix = f"rejected-{load.folder}-{load.version:012d}-"
    wanted = {f"{prefix}{number:05d}.parquet": name for number, name in enumerate(names)}
    for name in disk.names_in(folder):
        if name.startswith(prefix) and name not in wanted:
            disk.remove(folder / name)
    staged = folder / _STAGED_LETTERS / load.staged
    for to, name in wanted.items():
        with disk.refusing(staged / name):
            disk.rename(staged / name, folder / to)
    if wanted:
        disk.sync_names(folder)


def forget_letters(folder: Path, load: LoadId, names: Sequence[str] | None = None) -> None:
    """Remove the staged files of a load; see :func:`remove_staged`."""
    remove_staged(folder / _STAGED_LETTERS, load, names)
    for place in (f"{_STAGED_LETTERS}/{STAGED}", _STAGED_LETTERS):
        with suppress(OSError):
            (folder / place).rmdir()
