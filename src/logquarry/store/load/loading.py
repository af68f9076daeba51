"""Appends staged segments to the log exactly once.

::

    verify segments -> sync log -> write intent -> append -> sync -> write ledger -> delete intent

Readers see the messages of an unfinished load. After a crash the intent stays. When the next writer
opens the store (:func:`pending_load`):

- If the segments are intact, the writer appends the missing frames.
- If the log has all frames, the writer writes only the ledger.
- Otherwise the writer copies the load's bytes to quarantine, and truncates the log to the load's
  start. The load can then be repeated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.locks import AbortFile
from logquarry.disk.log_files import log_paths, open_log
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.disk.queue_folders import NameGuard
from logquarry.errors import CorruptFile, StoreUnavailable
from logquarry.format.rows import SIZE
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT, COMMIT_LOG, DURABLE, LOADS, quarantine
from logquarry.log.walk import BlankSpan, LogReader, Run
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.recover.apply import apply_safe
from logquarry.repair.recover.safe import plan_safe
from logquarry.store.load.ledger import Intent, Ledger, LoadId
from logquarry.store.load.segment import Segment, SegmentReader
from logquarry.units import Clock
from logquarry.write.append import CommitLogWriter
from logquarry.write.staged_put import StagedWriter, find_staged

logger = logging.getLogger(__name__)

_STEP: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load, with the log's end before and after the load (physical offsets).

    Attributes:
        rows: number of messages that this call appended.
        was_there: whether the load was in the log already; then this call did nothing.
    """

    rows: int
    bytes: int
    start: int
    end: int
    was_there: bool = False


@dataclass(eq=False, repr=False)
class Loads:
    """Appends staged segments to the log of an open writer.

    ``counted`` is called with each topic, the number of appended messages, and their bytes.
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
        """Append segments from the folder ``loads``, unless the log has the load already.

        Raises:
            CorruptFile: if a segment is missing or damaged; nothing is appended.
            StoreUnavailable: if the store accepts no more writes. A load that has begun stays
                recorded, and the next opening of the store finishes the load.
        """
        end = self.log.wrote_offset
        if self.ledger.has(load):
            return Loaded(0, 0, end, end, was_there=True)
        self.writer.check_status()
        # Sync the messages before the load, because a crash must not remove these messages.
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
        """Sync the names of all folders above the segments: tasks sync only the inner folder."""
        folder = Path(os.path.normpath(intent.folder(self.root)))
        top = Path(os.path.normpath(self.root / intent.loads)).parents[1]
        for place in (folder, *folder.parents):
            self.disk.sync_names(place)
            if place == top:
                break

    def _find(self, intent: Intent) -> tuple[int, int]:
        """Return the segment number and the position of the first frame that the log lacks."""
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
        # Create no log file in advance, unless the load needs it.
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
    """A load to finish. If ``is_whole``, the log has the load, and only the ledger lacks it."""

    intent: Intent
    is_whole: bool


def pending_load(root: Path, config: StoreConfig, disk: Disk, clock: Clock) -> Pending | None:
    """Return the interrupted load to finish once the store is open; None if there is none.

    The caller holds the lock, and has not read the store yet. After a rollback of the load, the
    store needs a recovery.

    Raises:
        CorruptFile: if the intent is unreadable.
        StoreUnavailable: if the load must be rolled back, but the rollback is impossible.
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
    """Truncate the log to a load's start; a later recovery corrects queues and index."""
    layout = StoreLayout.open(root, config)
    settings = with_sizes(config, layout)
    AbortFile(disk, root).make()
    # Recover the store first: otherwise the log's files cannot be opened for writing.
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
        # Lower the durable offset: otherwise a recovery would report the truncated bytes as lost.
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
