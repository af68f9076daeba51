"""Appends staged segments to the log exactly once, and records each load in ``.logquarry/loads/``.

::

    verify segments -> sync log -> write intent -> append -> sync -> write ledger -> delete intent

    intent.json             the load that is being appended, written before its first frame
    ledger/<app>.json       for each application the last version that is in the log
    staged/<app>/<version>/ segments to load

Each file is written under a temporary name, synced, and renamed. The version numbers of an
application's loads increase, as in Delta Lake (``txnAppId`` and ``txnVersion``). A recorded version
means that the log also has the loads of all lower versions. If the process crashes during a load,
``intent.json`` remains. When a writer opens the store the next time (:func:`pending_load`):

- If all segments are intact, the writer appends the frames that the log still lacks.
- If a segment is missing or damaged, but the log has all frames of the load, the writer only writes
  the ledger.
- Otherwise the writer copies the load's bytes to quarantine, and truncates the log to the load's
  start. After such a rollback, the application can repeat the load.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile, NameGuard
from logquarry.disk.log_files import log_paths, open_log
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.errors import CorruptFile, StoreUnavailable, UsageError
from logquarry.format.arrays import SIZE
from logquarry.format.java import LONG_MAX
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT, COMMIT_LOG, DURABLE, INTENT, LOADS, quarantine
from logquarry.log.walk import BlankSpan, LogReader, Run
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.recover.apply import apply_safe, disk_json
from logquarry.repair.recover.safe import plan_safe
from logquarry.store.load.segment import Segment, SegmentReader
from logquarry.systems import read_file
from logquarry.text import document
from logquarry.units import Clock
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.staged_put import StagedWriter, find_staged

STAGED: Final = "staged"
_LEDGER: Final = "ledger"
_WRITTEN_BY: Final = "logquarry load"
_RUN: Final = re.compile(r"run-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class LoadId:
    """Identifies a load.

    Attributes:
        version: number of the load, 0 to 2**63 - 1; later loads have larger numbers.
        is_named: whether the application chose the name, so that it may repeat the load later. A
            load without a name is recorded only while it runs.
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

    def to_json(self) -> dict[str, Any]:
        """Return the load as a JSON document."""
        return document(self)

    @classmethod
    def from_json(cls, document: Any) -> LoadId:
        """Parse the result of :meth:`to_json`."""
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
        path = self._path(load)
        document = read_document(path)
        if document is None:
            return False
        version = document.get("version")
        if document.get("app") != load.app or type(version) is not int:
            raise CorruptFile(str(path), 0, f"it is not the record of {load.app!r}")
        return version >= load.version

    def add(self, load: LoadId) -> None:
        """Record that a load is in the log and synced."""
        write_document(self._disk, self._path(load), load.to_json())

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
        document = {
            "load": intent.load.to_json(),
            "start": intent.start,
            "loads": intent.loads,
            "segments": [segment.to_json() for segment in intent.segments],
        }
        write_document(self._disk, self.folder / INTENT, document)

    def end(self) -> None:
        """Delete the record of the load that was being appended."""
        self._disk.remove(self.folder / INTENT)


def read_document(path: Path) -> dict[str, Any] | None:
    """Read a JSON document that this module wrote; return None if there is no file.

    Raises CorruptFile if the document is invalid.
    """
    try:
        document = json.loads(read_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
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
        _remove_files(own, names)
        return
    for name in _names(own.parent):
        if re.fullmatch("[0-9]+", name) and int(name) <= load.version:
            old = own.parent / str(int(name))
            _remove_files(old, _names(old))
            with suppress(OSError):
                old.rmdir()
    with suppress(OSError):
        own.parent.rmdir()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _remove_files(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


logger = logging.getLogger(__name__)

_STEP: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load.

    ``start`` and ``end`` are the log's ends (physical offsets) before and after the load.

    Attributes:
        rows: number of messages that this call appended.
        was_there: whether the log already had the load; then this call appended nothing.
    """

    rows: int
    bytes: int
    start: int
    end: int
    was_there: bool = False


@dataclass(eq=False, repr=False)
class Loads:
    """Appends staged segments to the log of an open writer.

    ``counted`` is called with each topic, the number of its appended messages, and their size in
    bytes.
    """

    disk: Disk
    root: Path
    log: MappedFileQueue
    writer: CommitLogWriter
    flush: Callable[[], int]
    grown: Callable[[], None]
    counted: Callable[[str, int, int], None]

    def __post_init__(self) -> None:
        self._staged = StagedWriter(self.writer, self.grown, self.counted)
        self.ledger = Ledger(self.disk, self.root)

    def load(self, load: LoadId, segments: Sequence[Segment], loads: str = LOADS) -> Loaded:
        """Append a load's segments from the folder ``loads``.

        Do nothing if the log already has the load.

        Raises:
            CorruptFile: if a segment is missing or damaged; then nothing is appended.
            StoreUnavailable: if the store accepts no more writes. If the load has begun, its intent
                stays on the disk, and the next opening of the store finishes the load.
        """
        end = self.log.wrote_offset
        if self.ledger.has(load):
            return Loaded(0, 0, end, end, was_there=True)
        self.writer.check_status()
        # Sync the messages before the load: the intent will contain `end`, so a crash must not
        # remove messages before `end`.
        self.flush()
        intent = Intent(load, end, loads, tuple(segments))
        for segment in segments:
            SegmentReader(intent.folder(self.root), segment).close()
        if segments:
            self._sync_names(intent)
            self.ledger.begin(intent)
            self._append(intent, 0, 0)
        self._done(intent)
        return Loaded(intent.rows, intent.bytes, end, self.log.wrote_offset)

    def finish(self, pending: Pending) -> None:
        """Finish a load that an earlier writer began."""
        intent = pending.intent
        if not pending.is_whole:
            first, start = self._find(intent)
            self._append(intent, first, start)
        self._done(intent)
        logger.warning("%s: finished an interrupted load: %s", self.root, intent.load)

    def _sync_names(self, intent: Intent) -> None:
        """Sync the names of all folders above the segments.

        A task syncs only the folder of its segment.
        """
        folder = Path(os.path.normpath(intent.folder(self.root)))
        top = Path(os.path.normpath(self.root / intent.loads)).parents[1]
        for place in (folder, *folder.parents):
            self.disk.sync_names(place)
            if place == top:
                break

    def _find(self, intent: Intent) -> tuple[int, int]:
        """Return the first frame that the log lacks: number of its segment, and position there."""
        position = intent.start
        for number, segment in enumerate(intent.segments):
            reader = SegmentReader(intent.folder(self.root), segment, check=False)
            try:
                start, position = find_staged(self.log, position, reader.frames)
            finally:
                reader.close()
            if start < segment.bytes:
                return number, start
        return len(intent.segments), 0

    def _append(self, intent: Intent, first: int, start: int) -> None:
        # The log must not create the next file in advance, unless the load needs this file.
        self.log.reach = intent.start + intent.bytes
        try:
            for segment in intent.segments[first:]:
                reader = SegmentReader(intent.folder(self.root), segment, check=False)
                try:
                    self._staged.append(reader.frames, start)
                finally:
                    reader.close()
                start = 0
        finally:
            self.log.reach = None

    def _done(self, intent: Intent) -> None:
        self.flush()
        self.ledger.add(intent.load)
        self.ledger.end()


@dataclass(frozen=True, slots=True)
class Pending:
    """An interrupted load.

    If ``is_whole``, the log has all its frames, and only the ledger lacks it.
    """

    intent: Intent
    is_whole: bool


def pending_load(root: Path, config: StoreConfig, disk: Disk, clock: Clock) -> Pending | None:
    """Return the interrupted load that the caller must finish once the store is open, or None.

    The caller holds the lock, and has not read the store yet. This function may roll a load back;
    then the store needs a recovery.

    Raises:
        CorruptFile: if the intent is unreadable.
        StoreUnavailable: if the load must be rolled back, but the log begins after the load's
            start, or cannot be recovered.
    """
    ledger = Ledger(disk, root)
    intent = ledger.intent()
    if intent is None:
        return None
    if ledger.has(intent.load):
        ledger.end()
        return None
    try:
        for segment in intent.segments:
            SegmentReader(intent.folder(root), segment).close()
    except CorruptFile as error:
        folders = StoreLayout.open(root, config).log_folders
        NameGuard(disk).restore(log_paths(root, folders))
        if _is_whole(root, config, intent):
            return Pending(intent, is_whole=True)
        logger.warning("%s: rolling back an interrupted load: %s", root, error)
        _take_back(root, config, disk, clock, intent)
        ledger.end()
        return None
    return Pending(intent, is_whole=False)


def _is_whole(root: Path, config: StoreConfig, intent: Intent) -> bool:
    """Whether the log has all frames of a load, without damage between them."""
    rows, size = intent.rows, intent.bytes
    for event in LogReader(StoreLayout.open(root, config)).events(intent.start):
        if isinstance(event, Run):
            found = event.rows[:rows, SIZE]
            rows -= len(found)
            size -= int(found.sum())
        elif not isinstance(event, BlankSpan):
            break
        if not rows:
            break
    return not rows and not size


def _take_back(root: Path, config: StoreConfig, disk: Disk, clock: Clock, intent: Intent) -> None:
    """Truncate the log to the start of a load. A later recovery corrects queues and index."""
    layout = StoreLayout.open(root, config)
    settings = with_sizes(config, layout)
    AbortFile(disk, root).make()
    # Recover the store first: before that, the log's files cannot be opened for writing.
    plan = plan_safe(root, settings)
    apply_safe(plan, disk, clock)
    if plan.log_end <= intent.start:
        return
    if intent.start < plan.log_start:
        raise StoreUnavailable(
            f"{root}: a load that began at {intent.start} can neither be finished nor rolled back: "
            f"its segments are gone, and the log begins at {plan.log_start}"
        )
    size = settings.mapped_file_size_commit_log
    assert size is not None
    log = open_log(disk, root, layout.log_folders, size)
    try:
        log.load()
        _keep(disk, root, log, intent.start, plan.log_end)
        # Lower the durable offset to the load's start: otherwise a recovery would report the
        # truncated bytes as lost.
        checkpoint = CheckpointFile(disk, root / CHECKPOINT)
        try:
            DurableFile(disk, root / DURABLE, intent.start, checkpoint.times).close()
        finally:
            checkpoint.close()
        log.truncate_to(intent.start, aside=quarantine(root, COMMIT_LOG))
    finally:
        log.close()


def _keep(disk: Disk, root: Path, log: MappedFileQueue, start: int, end: int) -> None:
    folder = quarantine(root, COMMIT_LOG)
    disk.make_folders(folder)
    path = folder / f"{start:020d}.taken-back"
    disk.remove(path)
    with disk.writing(path, end - start) as descriptor:
        at = start
        while at < end:
            data = log.select(at, most=min(_STEP, end - at))
            if data is None:
                break
            data = data[: min(_STEP, end - at)]
            disk.write_all(descriptor, data, at - start)
            at += len(data)
