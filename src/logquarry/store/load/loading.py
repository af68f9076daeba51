"""Appends staged segments to the log exactly once; :mod:`logquarry.store.load.ledger` has the
records of the loads.

::

    verify segments -> sync log -> write intent -> append -> sync -> write ledger -> delete intent

If the process crashes after it has written the intent, ``intent.json`` remains. When a writer opens
the store the next time (:func:`pending_load`):

- If all segments are intact, the writer appends the frames that the log still lacks. After a power
  cut, a frame may have zeros in its topic or properties, which no CRC covers. Before the writer
  appends, it copies such a frame and all bytes after it to quarantine, and truncates the log there.
  The writer does not truncate the log if another program may have written to the store since the
  load began.
- If a segment is missing or damaged, but the log has all frames of the load, the writer only writes
  the ledger.
- If a segment is missing or damaged, and the log lacks frames of the load, the writer rolls the
  load back: it copies the load's bytes to quarantine, and truncates the log to the load's start.
  After a rollback, the application can repeat the load. In three cases the writer refuses to open
  the store instead. Case 1: another program may have written to the store since the load began.
  Case 2: after the load's start, the log has more messages than the load has. Case 3: the log now
  starts after the load's start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.arguments import Clock
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.errors import CorruptFile, StoreUnavailable
from logquarry.format import put_frames
from logquarry.format.arrays import POSITION, SIZE
from logquarry.log.columns import suspect_rows
from logquarry.log.earlier_writers import read_durable
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT, CONSUME_QUEUE, DURABLE, INTENT, LOADS
from logquarry.log.walk import BlankSpan, DamagedSpan, ExpiredSpan, LogEnd, LogReader, Run
from logquarry.repair.recover.apply import apply_safe
from logquarry.repair.recover.open_check import settled_names
from logquarry.repair.recover.safe import plan_safe
from logquarry.repair.recover.store_folders import check_queue_folder
from logquarry.store.load.ledger import Intent, Ledger, LoadId
from logquarry.store.load.segment import (
    Segment,
    SegmentReader,
    StagedLoad,
    StagedWriter,
    same_frames,
)

logger = logging.getLogger(__name__)

_STEP: Final = 8 << 20
_UNKNOWN: Final = -1


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
    """Appends staged segments to the log of an open writer."""

    disk: Disk
    root: Path
    log: MappedFileQueue
    staged: StagedWriter
    flush: Callable[[], int]

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.disk, self.root)

    def load(self, load: LoadId, segments: Sequence[Segment], loads: str = LOADS) -> Loaded:
        """Append a load's segments from the folder ``loads``.

        Do nothing if the log already has the load.

        Raises:
            CorruptFile: if a segment is missing or damaged; then nothing is appended.
            WrongEntry: if a file has the path of a queue's folder; then nothing is appended.
            StoreUnavailable: if the store accepts no more writes, or if an earlier load of the
                store was interrupted. If this load fails after its intent was written, the intent
                stays on the disk, and the next opening of the store finishes the load or rolls it
                back.
        """
        end = self.log.wrote_offset
        if self.ledger.has(load):
            return Loaded(0, 0, end, end, was_there=True)
        self.staged.writer.check_status()
        begun = self.ledger.intent()
        if begun is not None:
            raise StoreUnavailable(
                f"{self.root}: an earlier load was interrupted: {begun.load}. Close the store and "
                "open it again, which finishes or removes this load. Then repeat the new load"
            )
        # Sync the messages before the load. The intent names `end` as the start of the load, so
        # the log must still reach `end` after a crash.
        self.flush()
        intent = Intent(load, end, loads, tuple(segments))
        for segment in segments:
            reader = SegmentReader(intent.folder(self.root), segment)
            reader.close()
            for topic, queue_id in reader.frames.queues:
                # If a file has this path, refuse the load, because the dispatcher could not put the
                # load's messages into a queue.
                check_queue_folder(self.root / CONSUME_QUEUE / topic / str(queue_id))
        if segments:
            self._sync_names(intent)
            self.ledger.begin(intent)
            self._append(intent, 0)
        self._done(intent)
        return Loaded(intent.rows, intent.bytes, end, self.log.wrote_offset)

    def finish(self, pending: Pending) -> None:
        """Finish a load that an earlier writer began.

        If the log now starts after the load's start, frames of the load may have expired. In this
        case, raise StoreUnavailable if the rest of the log does not show how many frames of the
        load the log once had.
        """
        intent, config = pending.intent, pending.config
        if not pending.is_whole:
            end = self.log.wrote_offset
            if end < intent.start:
                # A recovery has removed messages before the load, so the load begins earlier now.
                intent = replace(intent, start=end)
                self.ledger.begin(intent)
            found = _find(self.root, config, intent, stop=end, durable=end)
            log_start = self.log.bases[0] if self.log.bases else intent.start
            if found.lost is not None and log_start > intent.start:
                raise StoreUnavailable(
                    f"{self.root}: a load that began at {intent.start} cannot be finished: the log "
                    f"begins at {log_start} now, and does not show how much of the load it had. "
                    "To keep the log as it is, without the rest of the load, move "
                    f"{self.ledger.folder / INTENT} out of the store"
                )
            self._append(intent, found.place)
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

    def _append(self, intent: Intent, place: int) -> None:
        """Append the load's frames from a place on (:class:`StagedLoad`)."""
        # The log must not create the next file in advance, unless the load needs this file.
        self.log.reach = intent.start + intent.bytes
        try:
            for segment in intent.segments:
                if place < segment.bytes:
                    folder = intent.folder(self.root)
                    with closing(SegmentReader(folder, segment, check=False)) as reader:
                        self.staged.append(reader.frames, max(0, place))
                place -= segment.bytes
        finally:
            self.log.reach = None

    def _done(self, intent: Intent) -> None:
        self.flush()
        self.ledger.add(intent.load, intent.rows)
        self.ledger.end()


@dataclass(frozen=True, slots=True)
class Pending:
    """An interrupted load.

    If ``is_whole``, the log has all frames of the load, and only the ledger's record is missing.
    """

    intent: Intent
    config: StoreConfig
    is_whole: bool


def pending_load(root: Path, config: StoreConfig, disk: Disk, clock: Clock) -> Pending | None:
    """Return the interrupted load that the caller must finish once the store is open, or None.

    The caller holds the lock, and has not read the store yet. This function may roll a load back.
    The store needs a recovery after the rollback.

    Raises:
        CorruptFile: if the intent is unreadable.
        StoreUnavailable: if the load must be rolled back, but the writer refuses to do so (the
            module's docstring has the cases), or the log cannot be recovered.
    """
    ledger = Ledger(disk, root)
    intent = ledger.intent()
    if intent is None:
        return None
    if ledger.has(intent.load):
        ledger.end()
        return None
    # Before the log is read, restore log files that another program has deleted.
    with settled_names(StoreLayout.open(root, config), config, disk):
        pass
    try:
        for segment in intent.segments:
            SegmentReader(intent.folder(root), segment).close()
    except CorruptFile as error:
        if _is_whole(root, config, intent):
            return Pending(intent, config, is_whole=True)
        why = _why_not_rolled_back(root, config, intent)
        if why is not None:
            raise StoreUnavailable(
                f"{root}: a load that began at {intent.start} can neither be finished nor rolled "
                f"back: a segment is missing or damaged ({error}), and {why}. Restore the segment. "
                "Or, to keep the log as it is, without the rest of the load, move "
                f"{ledger.folder / INTENT} out of the store"
            ) from error
        logger.warning("%s: rolling back an interrupted load: %s", root, error)
        _truncate(root, config, disk, clock, intent.start)
        ledger.end()
        return None
    torn = _torn_frame(root, config, intent)
    if torn is not None:
        logger.warning(
            "%s: a power cut tore the frame at %d of an interrupted load: the log is truncated "
            "there, and the load continues",
            *(root, torn),
        )
        _truncate(root, config, disk, clock, torn)
    return Pending(intent, config, is_whole=False)


def _runs(layout: StoreLayout, position: int, *, resync: bool = False) -> Iterator[Run]:
    """Yield the frames from a physical offset on, up to damage or the log's end."""
    for event in LogReader(layout).events(position, resync=resync):
        if isinstance(event, Run):
            yield event
        elif not isinstance(event, BlankSpan):
            break


def _torn_frame(root: Path, config: StoreConfig, intent: Intent) -> int | None:
    """Return the physical offset of the load's first torn frame; None if there is none."""
    layout = StoreLayout.open(root, config)
    durable = read_durable(layout.filesystem)
    if durable is None:
        # Another program, such as a broker, may have written to the store after the load. In this
        # case, that program has kept the torn frame, and consumers may already have received the
        # messages after this frame.
        return None
    least = max(intent.start, durable.end)
    # Compare the log with the load only if a frame of the log looks torn.
    if not any(map(_has_suspects, _runs(layout, least, resync=True))):
        return None
    return _find(root, config, intent, durable=least).torn


def _why_not_rolled_back(root: Path, config: StoreConfig, intent: Intent) -> str | None:
    """Return why the log cannot be truncated to the load's start; None if it can be."""
    layout = StoreLayout.open(root, config)
    if intent.start < layout.commit_log.start:
        return f"the log begins at {layout.commit_log.start}"
    rows = sum(len(run.rows) for run in _runs(layout, intent.start))
    if rows > intent.rows:
        return "the log has other messages after the load's start"
    if read_durable(layout.filesystem) is None:
        # There is no valid durable offset, for example because a broker has written to the store.
        return "another program may have added messages to the log since then"
    return None


def _is_whole(root: Path, config: StoreConfig, intent: Intent) -> bool:
    """Whether the log has all frames of a load, judged by their number and total size.

    The result is right only if neither damage nor other messages are between the frames.
    """
    rows, size = intent.rows, intent.bytes
    layout = StoreLayout.open(root, config)
    durable = _durable(layout)
    for run in _runs(layout, intent.start):
        found = run.rows[:rows]
        if run.end > durable and _has_suspects(replace(run, rows=found)):
            break
        rows -= len(found)
        size -= int(found[:, SIZE].sum())
        if not rows:
            break
    return not rows and not size


def _has_suspects(run: Run) -> bool:
    return bool(suspect_rows(run.window, run.rows))


def _durable(layout: StoreLayout) -> int:
    found = read_durable(layout.filesystem)
    return 0 if found is None else found.end


def _truncate(root: Path, config: StoreConfig, disk: Disk, clock: Clock, offset: int) -> None:
    """Recover the store, and end its log at an offset; the removed bytes go to quarantine."""
    layout = StoreLayout.open(root, config)
    AbortFile(disk, root).make()
    if _durable(layout) > offset:
        # Lower the durable offset, because the recovery keeps all bytes before the durable offset.
        checkpoint = CheckpointFile(disk, root / CHECKPOINT)
        try:
            DurableFile(disk, root / DURABLE, offset, checkpoint.times).close()
        finally:
            checkpoint.close()
    apply_safe(plan_safe(root, config, end=offset), disk, clock)


# --------------------------------------------------------------------- the load's frames in the log
# A load appends its frames in order. Other messages can be between these frames, because the open
# store also delivers delayed messages, and other threads may put messages. A part of the log can
# also be damaged later. After damage, the search compares the following frames of the log with the
# rest of the load. If one of these frames is in the load, the log once had all earlier frames of
# the load too.
class _Search:
    """Finds which frames of a load are in the log.

    Attributes:
        place: place of the first frame that the log lacks (:class:`StagedLoad`).
        torn: physical offset of this frame, if a power cut left zeros in the frame's topic or
            properties, which no CRC covers. None if the log has no part of this frame.
        lost: number of bytes that the log has lost after the last frame that the search found;
            _UNKNOWN if the number is unknown, and None if no bytes are lost. If ``lost`` is not
            None, the log may once have had further frames of the load.
    """

    def __init__(self, load: StagedLoad, durable: int) -> None:
        self.load = load
        self.durable = durable
        self.place = 0
        self.torn: int | None = None
        self.lost: int | None = None
        self._behind_damage: int | None = None

    def lose(self, size: int) -> None:
        """Record that the log lost ``size`` bytes at this point of the search (or _UNKNOWN).

        If the search has found no frame since the previous loss, the total number of lost bytes
        becomes _UNKNOWN.
        """
        self.lost = size if self.lost is None else _UNKNOWN
        is_known = self.lost != _UNKNOWN
        self._behind_damage = self.load.after(self.place, self.lost) if is_known else None

    def take(self, run: Run) -> bool:
        """Compare a run of the log with the load; return whether the search must continue."""
        first = run.window.base
        there = run.window.data.data[: run.end - first]
        starts, sizes = run.rows[:, POSITION].astype(np.int64), run.rows[:, SIZE]
        row = 0
        while row < len(starts) and self.place < self.load.end:
            at = int(starts[row])
            other = there[at : at + int(sizes[row])]
            if self.lost is not None:
                row += 1
                self._resume(other)
                continue
            frames, start = self.load.frames(self.place)
            done, behind = same_frames(frames, start, there, at)
            if done > start:
                self.place += done - start
                row = int(np.searchsorted(starts, behind))
                continue
            frame = self.load.frame(self.place)
            row += 1
            if other[: put_frames.BODY_CRC_END] != frame[: put_frames.BODY_CRC_END]:
                row += _others(run, row, frame)
            elif not put_frames.is_torn(frame, other):
                # ``other`` is either another message with an equal body, or the wanted frame with
                # damage that no CRC covers. The next frame of the load shows which of the two it
                # is.
                self.lose(len(other) if put_frames.same_head(frame, other) else _UNKNOWN)
            elif first + at >= self.durable:
                self.torn = first + at
                return False
            else:
                self.place += len(other)
        return self.place < self.load.end

    def _resume(self, other: memoryview) -> None:
        """Search the rest of the load for ``other``, a frame that follows damage in the log."""
        # Several frames of the load can be equal to ``other``. In this case, only the size of the
        # damage shows which of these frames ``other`` is.
        place = self._behind_damage
        if place is None or not put_frames.same(self.load.frame(place), other):
            place = self.load.find(other, self.place)
        if place is not None:
            self.place = place + len(other)
            self.lost = self._behind_damage = None


def _others(run: Run, row: int, wanted: memoryview) -> int:
    """Count the frames from ``row`` on that are before the first that may be the wanted frame.

    A frame may be the wanted frame if both have the same size and body CRC.
    """
    starts, sizes = run.rows[row:, POSITION].astype(np.int64), run.rows[row:, SIZE]
    numbers = np.flatnonzero(sizes == len(wanted))
    fields = np.frombuffer(wanted[: put_frames.BODY_CRC_END], np.uint8)
    heads = run.window.data[starts[numbers][:, None] + np.arange(len(fields))]
    likely = numbers[(heads == fields).all(axis=1)]
    return int(likely[0]) if len(likely) else len(sizes)


def _find(
    root: Path, config: StoreConfig, intent: Intent, *, stop: int | None = None, durable: int
) -> _Search:
    """Find the first frame of a load that the log lacks.

    Args:
        stop: physical offset at which the log ends; by default, it ends after its last message.
        durable: the durable offset. A frame before this offset that looks torn is treated as
            present: the whole frame was once on the disk, so its zeros are later damage.
    """
    layout = StoreLayout.open(root, config)
    log = layout.commit_log
    with closing(StagedLoad(intent.folder(root), intent.segments)) as load:
        search = _Search(load, durable)
        if log.start > intent.start:
            search.lose(_UNKNOWN)
        for event in LogReader(layout).events(intent.start, stop):
            if isinstance(event, LogEnd) or search.place >= load.end:
                break
            if isinstance(event, ExpiredSpan):
                search.lose(_UNKNOWN)
            elif isinstance(event, DamagedSpan):
                search.lose(event.length)
            elif isinstance(event, BlankSpan):
                file = log.at(event.offset)
                # A recovery puts a blank in place of a lost file.
                if search.lost is not None or (file is not None and file.base == event.offset):
                    search.lose(_UNKNOWN)
            elif not search.take(event):
                break
    return search
