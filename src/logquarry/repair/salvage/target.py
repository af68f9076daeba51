"""The folder in which a salvage makes its new store: checked, locked, finished or undone.

The store is made in ``DIR/.salvage`` and is moved out when it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from logquarry.disk.config_file import keep_settings
from logquarry.disk.disk import Disk
from logquarry.disk.locks import AbortFile, alone_in, lock_folder
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.format import queue_entry
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE, QueueEntry
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CHECKPOINT,
    COMMIT_LOG,
    CONFIG,
    CONSUME_QUEUE,
    INDEX,
    NAME_DIGITS,
    SALVAGE,
    SIDECAR,
    quarantine,
)
from logquarry.log.store_names import absolute
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.log_queues import QueueKey
from logquarry.repair.recover.apply import apply_safe, disk_json
from logquarry.repair.recover.safe import plan_safe
from logquarry.repair.salvage.other_files import carried_names
from logquarry.repair.salvage.plan import SalvagePlan
from logquarry.systems import held
from logquarry.units import Progress, now_ms

REPORT: Final = "salvage.json"


def check_target(layout: StoreLayout, into: Path) -> None:
    """Check that a new store can be made in a folder.

    Raises:
        UsageError: if it cannot be made there.
    """
    if isinstance(layout.filesystem, LocalFileSystem):
        store = Path(layout.root).resolve()
        if store == into.resolve() or store in into.resolve().parents:
            raise UsageError(f"{into}: lies within the damaged store: give another folder")
    try:
        names = sorted(path.name for path in into.iterdir()) if into.exists() else []
    except OSError as error:
        raise StoreNotFound(f"{into}: cannot be read: {error.strerror}") from error
    if SALVAGE in names:
        _unlock(lock_folder(into))
        raise UsageError(
            f"{into}: a salvage into it was interrupted: remove {into / SALVAGE} to start again"
        )
    if names:
        raise UsageError(f"{into}: it holds {names[0]}: the new store needs an empty folder")


def settle(location: str, into: Path) -> bool:
    """Undo or finish an interrupted salvage; return whether the new store is complete.

    Args:
        location: absolute path or URL of the damaged store.
        into: the folder of the new store.

    Raises:
        StoreUnavailable: if the salvage is still running.
        UsageError: if another store was saved there, or the folder holds other files; nothing is
            removed then.
    """
    try:
        held_by_us = lock_folder(into)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return _settle(location, into)
    finally:
        _unlock(held_by_us)


def _settle(location: str, into: Path) -> bool:
    report = into / SIDECAR / REPORT
    if not _undo_or_finish(into) or not report.is_file():
        return False
    try:
        saved = str(json.loads(report.read_bytes())["store"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{report}: not the report of a salvage: {error!r}") from error
    if absolute(saved) != location:
        raise UsageError(f"{into}: {saved} was saved there, not {location}: give another folder")
    return True


def _undo_or_finish(into: Path) -> bool:
    """Finish an interrupted salvage and return True, or remove its incomplete files."""
    work = into / SALVAGE
    if work.is_dir():
        if any(work.iterdir()) or not (into / SIDECAR / REPORT).is_file():
            _remove_unfinished(into)
            return False
        # The log was moved out last: a broker may use the store already.
        work.rmdir()
    return True


def _remove_unfinished(into: Path) -> None:
    work = into / SALVAGE
    report = Path(SIDECAR, REPORT)
    # The report is written before the first part is moved out.
    comes_out = (into / report).is_file() or (work / report).is_file()
    made = [COMMIT_LOG, CONSUME_QUEUE, BATCH_QUEUE, INDEX, CONFIG, SIDECAR, CHECKPOINT]
    made += carried_names(into)
    there = [name for name in made if os.path.lexists(into / name)]
    for name in there:
        if not comes_out or (work / name).exists():
            raise UsageError(
                f"{into / name}: the interrupted salvage did not make it: nothing was removed; "
                f"remove {work} to start again"
            )
    for name in there:
        if (into / name).is_dir():
            shutil.rmtree(into / name, ignore_errors=True)
        else:
            (into / name).unlink()
    # Remove this folder last: it shows that the other files are ours.
    shutil.rmtree(work)


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


class SalvageTarget:
    """The folder of the new store.

    Args:
        into: the folder.
        disk: its disk.

    Attributes:
        disk: its disk.
        work: the folder within it where the store is made.
    """

    def __init__(self, into: Path, disk: Disk) -> None:
        self.disk = disk
        self.work = into / SALVAGE
        self._into = into
        self._is_new = not into.exists()
        self._has_begun = False
        self._held = ExitStack()

    def begin(self) -> None:
        """Lock the folder and create the folders of the new store."""
        self._held.enter_context(alone_in(self.disk, self._into))
        try:
            self.disk.make_folder(self.work)
        except OSError as error:
            raise self.disk.refused(self.work, error) from error
        self._has_begun = True
        others = sorted(path.name for path in self._into.iterdir() if path != self.work)
        if others:
            # Another program put it there while the damaged store was read.
            self.work.rmdir()
            self._has_begun = False
            raise UsageError(
                f"{self._into}: it holds {others[0]}: the new store needs an empty folder"
            )
        for name in (COMMIT_LOG, CONSUME_QUEUE, INDEX):
            self.disk.make_folders(self.work / name)

    def discard(self) -> None:
        """Remove only the files that this salvage has made. A first Ctrl-C does not stop this."""
        if not self._has_begun:
            return
        # If something cannot be removed, the folder .salvage stays and shows that it is incomplete.
        with held(), contextlib.suppress(OSError, UsageError):
            if not _undo_or_finish(self._into) and self._is_new:
                self._into.rmdir()

    def close(self) -> None:
        """Release the lock."""
        self._held.close()

    def build(self, plan: SalvagePlan, progress: Progress | None = None) -> None:
        """Build queues, index, checkpoint and durable offset from the log.

        Raises:
            StoreUnavailable: if the disk fails or is full.
        """
        recovery = plan_safe(self.work, plan.config, progress=progress)
        if recovery.message_count != plan.messages or recovery.damage:
            raise StoreUnavailable(
                f"{self.work}: {plan.messages} messages were written, but "
                f"{recovery.message_count} can be read: check the disk"
            )
        apply_safe(recovery, self.disk, now_ms, progress=progress)
        AbortFile(self.disk, self.work).remove()
        self._keep_queue_files(plan)
        keep_settings(self.disk, self.work, plan.config)
        # The report of this recovery is of no use for the new store.
        shutil.rmtree(quarantine(self.work), ignore_errors=True)

    def _keep_queue_files(self, plan: SalvagePlan) -> None:
        """Keep RocketMQ's clean-up from deleting queue files that end in a filler.

        QUIRK: the clean-up deletes a file whose last entry points before the log's start, and a
        filler points to 0. Such a last entry gets the start of the log file that has the next
        message of the queue. Readers skip no message, because no entry follows in the queue file.
        """
        size, log_size = plan.config.queue_file_size, plan.config.mapped_file_size_commit_log
        assert size is not None and log_size is not None
        layout = StoreLayout.open(self.work, plan.config)
        queues = {(queue.topic, queue.queue_id): queue for queue in ConsumeQueue.all_of(layout)}
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
        try:
            descriptor = self.disk.open(path)
            try:
                self.disk.write_all(descriptor, queue_entry.encode(unit), place - base)
                self.disk.sync(descriptor, path)
            finally:
                self.disk.close(descriptor)
        except OSError as error:
            raise self.disk.refused(path, error) from error

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the report, and move the store out of ``.salvage``, the log last."""
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
