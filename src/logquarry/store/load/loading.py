"""A load: staged segments, appended to the log exactly once.

::

    verify segments -> sync the log -> INTENT -> append -> sync -> LEDGER -> intent goes

Whoever dies in between leaves the intent, and the next one who opens the store to write finishes
it before anything else is put (:func:`pending_load`, :meth:`Loads.finish`):

- The segments are there: what of them stands in the log is found, and the rest is appended. The
  log is what it would have become.
- Some segment is gone or damaged, but all its frames are in the log: nothing is left to do.
- Else the load is taken back: the log is cut where it began, and what stood behind that is kept in
  quarantine. Whoever loads the same again begins anew.

Readers take what is in the log for what it is: whole messages.
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
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.disk.queue_folders import NameGuard
from logquarry.errors import CorruptFile, StoreUnavailable
from logquarry.format.rows import SIZE
from logquarry.log.layout import CHECKPOINT, COMMIT_LOG, DURABLE, LOADS, StoreLayout, quarantine
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
    """What a load came to.

    Attributes:
        rows: messages appended, by this call.
        bytes: of their frames.
        start: where the log ended before.
        end: where it ends now.
        was_there: whether an earlier call had loaded it; then nothing was done.
    """

    rows: int
    bytes: int
    start: int
    end: int
    was_there: bool = False


class Loads:
    """Brings staged segments into the log of a store that is open to be written.

    Args:
        disk: what the store is on.
        root: its folder.
        log: its log's files.
        writer: appends to them.
        flush: brings log, queues and index to the disk.
        counted: told of each topic, how many of its messages were appended, and their bytes.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        log: MappedFileQueue,
        writer: CommitLogWriter,
        flush: Callable[[], int],
        counted: Callable[[str, int, int], None] = lambda topic, messages, size: None,
    ) -> None:
        self._disk = disk
        self._root = root
        self._log = log
        self._writer = writer
        self._staged = StagedWriter(writer, counted)
        self._flush = flush
        self.ledger = Ledger(disk, root)

    def load(self, load: LoadId, segments: Sequence[Segment], loads: str = LOADS) -> Loaded:
        """Append segments, unless that was done before.

        Args:
            load: which load it is.
            segments: in their order.
            loads: the folder ``loads`` that they are in, as seen from the store.

        Raises:
            CorruptFile: if a segment is not there or not what was written; nothing is appended.
            StoreUnavailable: if the store takes no more. Once it was begun the load stays known,
                and is finished when the store is opened next.
        """
        end = self._log.wrote_offset
        if self.ledger.has(load):
            return Loaded(0, 0, end, end, was_there=True)
        self._writer.check_status()
        # A crash must not take away what the load is to stand behind.
        self._flush()
        intent = Intent(load, end, loads, tuple(segments))
        for segment in segments:
            SegmentReader(intent.folder(self._root), segment).close()
        if segments:
            self._sync_names(intent)
            self.ledger.begin(intent)
            self._append(intent, 0, 0)
        self._done(intent)
        return Loaded(intent.rows, intent.bytes, end, self._log.wrote_offset)

    def finish(self, pending: Pending) -> None:
        """Finish what an earlier writer began.

        Raises:
            StoreUnavailable: if the store takes no more; it stays begun.
        """
        intent = pending.intent
        if not pending.is_whole:
            first, start = self._find(intent)
            self._append(intent, first, start)
        self._done(intent)
        logger.warning("%s: a load that was begun is finished: %s", self._root, intent.load)

    def _sync_names(self, intent: Intent) -> None:
        """Let the segments be found after a crash: tasks sync their files and the last folder."""
        folder = Path(os.path.normpath(intent.folder(self._root)))
        top = Path(os.path.normpath(self._root / intent.loads)).parents[1]
        for place in (folder, *folder.parents):
            self._disk.sync_names(place)
            if place == top:
                break

    def _find(self, intent: Intent) -> tuple[int, int]:
        """The first frame that is not in the log: number of its segment, byte in that."""
        position = intent.start
        for number, segment in enumerate(intent.segments):
            reader = SegmentReader(intent.folder(self._root), segment, check=False)
            try:
                start, position = find_staged(self._log, position, reader.frames)
            finally:
                reader.close()
            if start < segment.bytes:
                return number, start
        return len(intent.segments), 0

    def _append(self, intent: Intent, first: int, start: int) -> None:
        for segment in intent.segments[first:]:
            reader = SegmentReader(intent.folder(self._root), segment, check=False)
            try:
                self._staged.append(reader.frames, start)
            finally:
                reader.close()
            start = 0

    def _done(self, intent: Intent) -> None:
        self._flush()
        self.ledger.add(intent.load)
        self.ledger.end()


@dataclass(frozen=True, slots=True)
class Pending:
    """A load that was begun.

    Attributes:
        intent: what was to be done.
        is_whole: whether all of it is in the log, and only that has to be noted.
    """

    intent: Intent
    is_whole: bool


def pending_load(root: Path, config: StoreConfig, disk: Disk, clock: Clock) -> Pending | None:
    """What is to be finished of a load once the store is open; None if nothing is.

    A load that cannot be finished is taken back, and the store has to be recovered then. To be
    asked with the lock held, before anything else of the store is looked at.

    Raises:
        CorruptFile: if the intent cannot be read.
        StoreUnavailable: if a load has to be taken back and cannot be.
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
        NameGuard(disk).restore([root / COMMIT_LOG])
        if _is_whole(root, config, intent):
            return Pending(intent, is_whole=True)
        logger.warning("%s: a load that was begun is taken back: %s", root, error)
        _take_back(root, config, disk, clock, intent)
        ledger.end()
        return None
    return Pending(intent, is_whole=False)


def _is_whole(root: Path, config: StoreConfig, intent: Intent) -> bool:
    """Whether all frames of a load stand in the log, without a break."""
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
    """Cut the log where a load began. Queues and index follow in the recovery that comes next."""
    layout = StoreLayout.open(root, config)
    settings = with_sizes(config, layout)
    AbortFile(disk, root).make()
    # So that the files are such that a log can be made of them.
    plan = plan_safe(root, settings)
    apply_safe(plan, disk, clock)
    if plan.log_end <= intent.start:
        return
    if intent.start < plan.log_start:
        raise StoreUnavailable(
            f"{root}: a load that began at {intent.start} can neither be finished nor taken back: "
            f"its segments are gone, and the log begins at {plan.log_start}"
        )
    size = settings.mapped_file_size_commit_log
    assert size is not None
    log = MappedFileQueue(disk, root / COMMIT_LOG, size, guard_names=True)
    try:
        log.load()
        _keep(disk, root, log, intent.start, plan.log_end)
        # Or else what stood there would count as lost.
        _lower_mark(root, disk, intent.start)
        log.truncate_to(intent.start, aside=quarantine(root, COMMIT_LOG))
    finally:
        log.close()


def _lower_mark(root: Path, disk: Disk, offset: int) -> None:
    checkpoint = CheckpointFile(disk, root / CHECKPOINT)
    try:
        DurableFile(disk, root / DURABLE, offset, checkpoint.times).close()
    finally:
        checkpoint.close()


def _keep(disk: Disk, root: Path, log: MappedFileQueue, start: int, end: int) -> None:
    """A copy of what is taken back."""
    folder = quarantine(root, COMMIT_LOG)
    disk.make_folders(folder)
    path = folder / f"{start:020d}.taken-back"
    disk.remove(path)
    descriptor = disk.make_file(path, end - start)
    try:
        at = start
        while at < end:
            data = log.select(at)
            if data is None:
                break
            data = data[: min(_STEP, end - at)]
            disk.write_all(descriptor, data, at - start)
            at += len(data)
        disk.sync(descriptor, path)
    except OSError as error:
        raise disk.refused(path, error) from error
    finally:
        disk.let_go(descriptor)
