"""Makes the new store of a salvage: its folder, its log and its other files.

:class:`LogWriter` copies the frames. If necessary, it changes PHYSICALOFFSET, QUEUEOFFSET, QUEUEID,
the topic, SYSFLAG, STORETIMESTAMP, PREPAREDTRANSACTIONOFFSET and the property CRC, but nothing
else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np

from logquarry.arguments import Progress, now_ms
from logquarry.disk.config_file import keep_settings
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile, alone_in, lock_folder
from logquarry.errors import CorruptStore, StoreNotFound, StoreUnavailable, UsageError, reason_of
from logquarry.format import frame, queue_entry, sys_flag, timer
from logquarry.format import properties as props
from logquarry.format.arrays import BODY_AT, POSITION, SIZE, TOPIC_AT, Bytes, Int64
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE, QueueEntry
from logquarry.log import columns
from logquarry.log.filesystem import LocalFileSystem, below
from logquarry.log.layout import StoreLayout
from logquarry.log.location import absolute, lies_in_store
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CHECKPOINT,
    COMMIT_LOG,
    COMPACTED,
    CONFIG,
    CONSUME_QUEUE,
    INDEX,
    NAME_DIGITS,
    SALVAGE,
    SIDECAR,
    quarantine,
)
from logquarry.log.walk import LogReader, Run
from logquarry.paths import exists, is_file, is_folder
from logquarry.read.log_queues import QueueKey
from logquarry.read.pops import KV_STORE
from logquarry.read.queue import ConsumeQueue
from logquarry.repair.recover.apply import apply_safe, disk_json
from logquarry.repair.recover.safe import plan_safe
from logquarry.repair.salvage.losses import raised_from
from logquarry.repair.salvage.places import NewPlaces, Piece, in_place
from logquarry.repair.salvage.plan import SalvagePlan, right_flags
from logquarry.systems import held, read_file
from logquarry.text import counted

REPORT: Final = "salvage.json"
_MADE: Final = (COMMIT_LOG, CONSUME_QUEUE, BATCH_QUEUE, INDEX, CONFIG, SIDECAR, CHECKPOINT)
_CHUNK: Final = 4 << 20
_ALIGNED: Final = 4096


def check_target(layout: StoreLayout, into: Path) -> None:
    """Raise UsageError if the new store's folder is not empty, or lies within the old store."""
    is_local = isinstance(layout.filesystem, LocalFileSystem)
    if is_local and lies_in_store(into, layout.root, layout.config):
        raise UsageError(f"{into}: lies within the damaged store: give another folder")
    reason = why_not_empty(into)
    if reason is not None:
        raise UsageError(reason)


class SalvageTarget:
    """The new store's folder. The salvage makes the store in the subfolder ``work``. When the store
    is complete, the salvage moves its files from there to the new store's folder.
    """

    def __init__(self, into: Path, disk: Disk) -> None:
        self.disk = disk
        self.work = into / SALVAGE
        self._into = into
        self._is_new = not exists(into)

    @contextlib.contextmanager
    def begun(self) -> Iterator[None]:
        """Lock the folder, and create the folders of the new store. If the ``with`` block raises an
        error, remove the files that this salvage has made.
        """
        with alone_in(self.disk, self._into):
            with self.disk.refusing(self.work):
                self.disk.make_folder(self.work)
            others = sorted(path.name for path in self._into.iterdir() if path != self.work)
            if others:
                # Another program has put these files there since the check.
                self.work.rmdir()
                raise UsageError(
                    f"{self._into}: it holds {others[0]}: the new store needs an empty folder"
                )
            try:
                for name in (COMMIT_LOG, CONSUME_QUEUE, INDEX):
                    self.disk.make_folders(self.work / name)
                yield
            except BaseException:
                self.discard()
                raise

    def discard(self) -> None:
        """Remove the files that this salvage has made. The first Ctrl-C takes effect after the
        removal.
        """
        # If a file cannot be removed, the folder .salvage stays and marks the store as incomplete.
        with held(), contextlib.suppress(OSError, UsageError):
            if not undo_or_finish(self._into) and self._is_new:
                self._into.rmdir()

    def build(self, plan: SalvagePlan, progress: Progress | None = None) -> None:
        """Make queues, index, checkpoint and durable offset of the new store from its log."""
        # The salvage has already corrected the queue offsets in the log. Only frames without a
        # place in their queues still have a wrong queue offset.
        mends = any(story.strays for story in plan.queues.values())
        recovery = plan_safe(self.work, plan.config, progress=progress, mends=mends)
        if recovery.message_count != plan.messages or recovery.damage:
            were = counted(plan.messages, "message was", "messages were")
            raise StoreUnavailable(
                f"{self.work}: {were} written, but "
                f"{recovery.message_count} can be read: check the disk"
            )
        apply_safe(recovery, self.disk, now_ms, progress=progress)
        AbortFile(self.disk, self.work).remove()
        self._keep_queue_files(plan)
        keep_settings(self.disk, self.work, plan.config)
        shutil.rmtree(quarantine(self.work), ignore_errors=True)

    def _keep_queue_files(self, plan: SalvagePlan) -> None:
        """Change the fillers at the ends of queue files, so that RocketMQ's clean-up keeps the
        files.

        QUIRK: the clean-up deletes a queue file if its last entry points before the log's start. A
        filler has physical offset 0. So if a file ends in a filler, this filler gets another
        physical offset: the start of the log file that contains the queue's next message. If a
        reader skips from this filler to the next queue file, it misses no entry.
        """
        size, log_size = plan.config.queue_file_size, plan.config.mapped_file_size_commit_log
        assert size is not None and log_size is not None
        layout = StoreLayout.open(self.work, plan.config)
        queues = {queue.key: queue for queue in ConsumeQueue.all_of(layout)}
        room = size // UNIT_SIZE
        for key, story in plan.queues.items():
            for start, stop in story.gaps:
                last = start // room * room + room - 1
                if last >= stop or key not in queues:
                    continue
                following = int(queues[key].units(stop, stop + 1)["physical_offset"][0])
                unit = QueueEntry(following - following % log_size, FILLER_SIZE, 0)
                for at in range(last, stop, room):
                    self._write_unit(key, at * UNIT_SIZE, size, unit)

    def _write_unit(self, key: QueueKey, place: int, size: int, unit: QueueEntry) -> None:
        base = place - place % size
        path = self.work.joinpath(CONSUME_QUEUE, key[0], str(key[1]), f"{base:0{NAME_DIGITS}d}")
        with self.disk.writing(path) as descriptor:
            self.disk.write_all(descriptor, queue_entry.encode(unit), place - base)

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the report, and move the files out of ``.salvage``, the log last."""
        disk_json(self.disk, self.work / SIDECAR / REPORT, report)
        names = [path.name for path in self.work.iterdir()]
        last = [CHECKPOINT, BATCH_QUEUE, CONSUME_QUEUE, COMMIT_LOG]
        order = [name for name in names if name not in last] + last
        with held():
            for name in order:
                if name in names:
                    self.disk.rename(self.work / name, self._into / name)
            self.disk.sync_names(self._into)
            self.work.rmdir()
            self.disk.sync_names(self._into)


# -------------------------------------------------------------------------- interrupted salvages
# A salvage moves the files out of ``.salvage``: first the report's folder, last the log.
def why_not_empty(into: Path) -> str | None:
    """Explain why a folder cannot take a new store, and what to do; None if it is empty or missing.

    Raises:
        StoreNotFound: if the folder cannot be read.
        StoreUnavailable: if a salvage into the folder is running.
    """
    work = into / SALVAGE
    try:
        names = sorted(path.name for path in into.iterdir()) if exists(into) else []
        waiting = {path.name for path in work.iterdir()} if SALVAGE in names else set()
    except OSError as error:
        raise StoreNotFound(f"{into}: cannot be read: {reason_of(error)}") from error
    if not names:
        return None
    store = _saved_store(into)
    made = sorted({SALVAGE, *_MADE, *_carried_names(into)}.intersection(names) - waiting)
    removed = ", ".join(str(into / name) for name in made)
    if SALVAGE in names:
        _unlock(lock_folder(into))
        if store is not None and not waiting:
            return (
                f"{into}: it holds the complete store that a salvage of {store} made; the salvage "
                f"was interrupted after its last step. Remove the empty folder {work}, and check "
                f"the store: `logquarry verify {into}`"
            )
        if store is None and _saved_store(work) is None:
            removed = str(work)
        return (
            f"{into}: a salvage into it was interrupted, and the new store is incomplete: remove "
            f"{removed} to start again"
        )
    if store is not None and COMMIT_LOG in names:
        return (
            f"{into}: it holds the complete store that an earlier salvage of {store} made. Check "
            f"that store: `logquarry verify {into}`. To salvage again, give another folder"
        )
    if store is not None:
        return (
            f"{into}: it holds only a part of the store that an interrupted salvage of {store} "
            f"made: remove {removed} to start again"
        )
    return f"{into}: it holds {names[0]}: the new store needs an empty folder"


def _saved_store(into: Path) -> str | None:
    """Return the store that a salvage copied into a folder; None if the folder has no report."""
    try:
        return str(json.loads(read_file(into / SIDECAR / REPORT))["store"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def settle(location: str, into: Path) -> bool:
    """Finish or undo an interrupted salvage; return whether the new store is complete.

    Raises:
        StoreUnavailable: if the salvage is still running.
        UsageError: if the folder contains files of a salvage of another store, or files of other
            programs.
    """
    try:
        held_by_us = lock_folder(into)
    except (FileNotFoundError, NotADirectoryError):
        return False
    report = into / SIDECAR / REPORT
    try:
        if not undo_or_finish(into) or not is_file(report):
            return False
        try:
            saved = str(json.loads(read_file(report))["store"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{report}: not the report of a salvage: {error!r}") from error
    finally:
        _unlock(held_by_us)
    if absolute(saved) != location:
        raise UsageError(f"{into}: {saved} was saved there, not {location}: give another folder")
    return True


def undo_or_finish(into: Path) -> bool:
    """If a salvage has copied everything, finish it and return True. Otherwise, remove the files
    that it has made, and return False.
    """
    work = into / SALVAGE
    if is_folder(work):
        if any(work.iterdir()) or not is_file(into / SIDECAR / REPORT):
            _remove_unfinished(into)
            return False
        # The log was moved last, so the store is complete, and a broker may use it.
        work.rmdir()
    return True


def _carried_names(folder: Path) -> list[str]:
    """Return the names in ``folder`` that a salvage may have copied from the old store."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name in (KV_STORE, COMPACTED, timer.LOG) or path.name.startswith(timer.WHEEL)
    )


def _remove_unfinished(into: Path) -> None:
    work = into / SALVAGE
    report = Path(SIDECAR, REPORT)
    # The report is written before any folder is moved. So without a report, the salvage has not
    # moved any folder to the target yet.
    comes_out = is_file(into / report) or is_file(work / report)
    there = [name for name in (*_MADE, *_carried_names(into)) if os.path.lexists(into / name)]
    for name in there:
        if not comes_out or exists(work / name):
            raise UsageError(
                f"{into / name}: the interrupted salvage did not make it: nothing was removed; "
                f"remove {work} to start again"
            )
    for name in there:
        if is_folder(into / name):
            shutil.rmtree(into / name, ignore_errors=True)
        else:
            (into / name).unlink()
    # Remove .salvage last: only this folder shows that a salvage has made the other files.
    shutil.rmtree(work)


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------- the log
_LONG, _INT = np.arange(8), np.arange(4)
_QUEUE_ID_AT = frame.HEAD.offsets["queue_id"]
_QUEUE_OFFSET_AT = frame.HEAD.offsets["queue_offset"]
_SYS_FLAG_AT = frame.HEAD.offsets["sys_flag"]
_PHYSICAL_OFFSET_AT = frame.HEAD.offsets["physical_offset"]
_FIELDS = ("sys_flag", "store_timestamp", "prepared_transaction_offset")
_BODY_LENGTH_SIZE = 4
_V6_MORE = frame.HOST_SIZE_V6 - frame.HOST_SIZE_V4


class LogWriter:
    """Writes the log of the new store."""

    def __init__(self, layout: StoreLayout, plan: SalvagePlan, disk: Disk, root: Path) -> None:
        self._layout = layout = in_place(layout, plan.displaced)
        self._plan = plan
        self._disk = disk
        self._root = root
        # Check no CRCs: the planner has already checked them.
        self._reader = LogReader(layout, check_crc=False)
        self._places = NewPlaces(plan.pieces)
        size = plan.config.mapped_file_size_commit_log
        assert size is not None
        self._size = size
        self._last_time = 0

    def write(self, progress: Progress | None = None) -> None:
        """Write and sync the whole log. Raises CorruptStore if the old store has changed."""
        done, pieces = 0, self._plan.pieces
        # A store without messages needs a log folder too.
        self._disk.make_folders(self._root / COMMIT_LOG)
        last = self._base(pieces[-1].to + pieces[-1].stop - pieces[-1].start - 1) if pieces else 0
        moved = ((run, piece.to - piece.start) for piece in pieces for run in self._runs(piece))
        for base, runs in groupby(moved, lambda one: self._base(one[0].start + one[1])):
            path, end = self._root / COMMIT_LOG / f"{base:0{NAME_DIGITS}d}", 0
            with self._disk.writing(path, self._size) as descriptor:
                for run, move in runs:
                    data = self._patched(run, move)
                    end = run.end + move - base
                    self._disk.write_all(descriptor, data.data.cast("B"), end - len(data))
                    done += len(data)
                    if progress is not None:
                        progress(done, self._plan.bytes)
                if base != last and self._size - end >= frame.BLANK.size:
                    self._disk.write_all(descriptor, frame.encode_blank(self._size - end), end)

    def _base(self, place: int) -> int:
        """Return the physical offset of the file of the new log that contains ``place``."""
        return place - (place - self._plan.start) % self._size

    def _runs(self, piece: Piece) -> Iterator[Run]:
        position = piece.start
        for event in self._reader.events(piece.start, piece.stop):
            if position >= piece.stop or not isinstance(event, Run) or event.start != position:
                break
            yield event
            position = event.end
        if position != piece.stop:
            path = self._layout.log_path(position)
            raise CorruptStore(
                path, position, "the log was changed while it was read", kind="changed"
            )

    def _patched(self, run: Run, move: int) -> Bytes:
        """Return the bytes of some frames, with their new values in the fields that change."""
        first = int(run.rows[0, POSITION])
        data = run.window.data[first : first + run.end - run.start]
        rows = run.rows
        at = rows[:, POSITION].astype(np.int64) - int(rows[0, POSITION])
        fields = columns.fixed_fields(run.window, rows, _FIELDS)
        patches: list[tuple[Int64, Int64]] = []
        places = rows[:, POSITION].astype(np.int64) + run.window.base
        if move:
            patches.append((at + _PHYSICAL_OFFSET_AT, places + move))
        times = fields["store_timestamp"].astype(np.int64)
        wanted = times.copy()
        lowered, values = _replaced(places, self._plan.lowered_times)
        wanted[lowered] = values
        raised = raised_from(self._last_time, wanted)
        self._last_time = int(raised[-1])
        late = np.flatnonzero(raised != times)
        flags = right_flags(fields["sys_flag"], places, self._plan.right_types)
        typed = np.flatnonzero(flags != fields["sys_flag"])
        # RECONSUMETIMES, PREPAREDTRANSACTIONOFFSET, BODYLEN and the body follow the hosts.
        prepared_at = at + rows[:, BODY_AT] - _BODY_LENGTH_SIZE - len(_LONG)
        if len(late):
            v6 = (flags[late] & sys_flag.BORN_HOST_V6) != 0
            time_at = at[late] + frame.HEAD.size + frame.HOST_SIZE_V4 + v6 * _V6_MORE
            patches.append((time_at, raised[late]))
        kinds = flags & sys_flag.TRANSACTION_MASK
        is_end = (kinds == sys_flag.TRANSACTION_COMMIT) | (kinds == sys_flag.TRANSACTION_ROLLBACK)
        ends = np.flatnonzero(is_end)
        if len(ends):
            halves = self._places.of(fields["prepared_transaction_offset"][ends].astype(np.int64))
            known = halves >= 0
            patches.append((prepared_at[ends[known]], halves[known]))
        changed, offsets = _replaced(places, self._plan.queue_offsets)
        if len(changed):
            patches.append((at[changed] + _QUEUE_OFFSET_AT, offsets))
        harmed = np.flatnonzero(np.isin(places, list(self._plan.right_queues))).tolist()
        if not patches and not harmed and not len(typed):
            return data
        copy = data.copy()
        for where, values in patches:
            copy[where[:, None] + _LONG] = values.astype(">i8").view(np.uint8).reshape(-1, 8)
        where = at[typed] + _SYS_FLAG_AT
        copy[where[:, None] + _INT] = flags[typed].astype(">i4").view(np.uint8).reshape(-1, 4)
        for row in harmed:
            topic, queue_id = self._plan.right_queues[int(places[row])]
            start = int(at[row])
            for to, right in (
                (start + _QUEUE_ID_AT, queue_id.to_bytes(4, "big", signed=True)),
                (start + int(rows[row, TOPIC_AT]), topic.encode()),
            ):
                copy[to : to + len(right)] = np.frombuffer(right, np.uint8)
        sizes = rows[:, SIZE].astype(np.int64)
        _renew_crcs(copy, at, sizes, columns.wrong_property_crcs(run.window, rows))
        return copy


def _replaced(places: Int64, values: Mapping[int, int]) -> tuple[Int64, Int64]:
    """Return two arrays: the row numbers of the frames that get a new value, and these values."""
    found = np.flatnonzero(np.isin(places, list(values)))
    return found, np.array([values[place] for place in places[found].tolist()], np.int64)


def _renew_crcs(data: Bytes, starts: Int64, sizes: Int64, wrong: list[int]) -> None:
    """Write the new property CRC of each changed frame. A CRC that was wrong before stays wrong: a
    right CRC would hide the damage from verify and brokers.
    """
    carriers = columns.crc_carriers(data, starts, sizes)
    for number in np.setdiff1d(carriers, np.array(wrong, np.int64)).tolist():
        start = int(starts[number])
        tail = start + int(sizes[number]) - props.CRC_SIZE
        crc = props.encode_crc(data[start:tail].tobytes())
        data[tail : tail + props.CRC_SIZE] = np.frombuffer(crc, np.uint8)


def carry(layout: StoreLayout, path: str, disk: Disk, root: Path) -> None:
    """Copy a folder, with all its files and folders, into a new store."""
    disk.make_folders(root / path)
    for one in below(layout.filesystem, path):
        if one.wrong is not None:
            # Skip pipes and broken links: the plan has reported them as left out.
            continue
        if one.is_dir:
            disk.make_folders(root / one.path)
            continue
        with contextlib.suppress(FileNotFoundError):
            _copy(layout, one.path, disk, root / one.path)


def _copy(layout: StoreLayout, path: str, disk: Disk, target: Path) -> None:
    view = layout.open_file(path)
    with disk.writing(target, view.size) as descriptor:
        position = 0
        while (position := view.next_data(position)) < view.size:
            position -= position % _ALIGNED
            length = min(_CHUNK, view.size - position)
            data = view.window(position, length)[:length]
            if any(data):
                disk.write_all(descriptor, data, position)
            position += length
