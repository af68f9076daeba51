"""Salvage: saves every sound message of a damaged store in a new store.

The new store is made in a folder within the target (``DIR/.salvage``) and is moved out when it is
complete, so that no program opens a part of it. A safe recovery of the new log builds queues and
index.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from logquarry.disk.disk import Disk, LocalDisk
from logquarry.disk.keep_settings import keep_settings
from logquarry.disk.locks import AbortFile, alone_in, lock_folder
from logquarry.errors import StoreNotFound, StoreUnavailable, UnreadableFile, UsageError
from logquarry.format import broker_config, fastjson, queue_entry
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE, QueueEntry
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import (
    BATCH_QUEUE,
    CHECKPOINT,
    COMMIT_LOG,
    CONFIG,
    CONSUME_QUEUE,
    INDEX,
    NAME_DIGITS,
    SALVAGE,
    SIDECAR,
    StoreLayout,
    quarantine,
)
from logquarry.log.rocksdb_config import tables_in_rocksdb
from logquarry.log.store_names import absolute
from logquarry.read.fence import Action, require
from logquarry.read.log_end import all_queues, consume_queues
from logquarry.read.log_queues import QueueKey
from logquarry.read.timers import CHECK as TIMER_CHECK
from logquarry.repair.recover.apply import apply_safe, disk_json
from logquarry.repair.recover.folder_check import check_file_size
from logquarry.repair.recover.safe import plan_safe
from logquarry.repair.salvage.other_files import (
    LeftBehind,
    carried_names,
    carry,
    other_files,
    unreadable_files,
)
from logquarry.repair.salvage.plan import SalvagePlan, plan_salvage
from logquarry.repair.salvage.timer_files import count_timers, make_timer_files
from logquarry.repair.salvage.write import LogWriter
from logquarry.signals import held
from logquarry.units import Bars, Progress, now_ms
from logquarry.write.topic_table import topics_of

REPORT: Final = "salvage.json"
ORIGINALS: Final = "salvage"
"""Folder in the sidecar of the new store for original files that salvage had to change."""

Pause = Callable[[], None]


@dataclass(slots=True)
class MovedProgress:
    """A consumer group whose progress lies after the end of a queue that lost its last messages.

    Attributes:
        topic: topic of the queue.
        queue_id: number of the queue.
        group: the consumer group.
        was: its progress, a queue offset.
        now: the queue's end, from which it continues.
    """

    topic: str
    queue_id: int
    group: str
    was: int
    now: int

    def to_json(self) -> dict[str, Any]:
        """As an object of docs/json.md."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Salvaged:
    """The result of a salvage, or of its plan.

    Attributes:
        plan: the plan.
        into: the new store's folder, None if nothing was written.
        progress: consumer groups whose progress had to move.
        files: paths of the copied configuration files.
        carried: other files and folders that were copied unchanged.
        left_behind: parts of the store that are not in the new one, and the loss.
        timers: number of messages that wait for their time; the new store's wheel has them.
        seconds: duration.
    """

    plan: SalvagePlan
    into: str | None = None
    progress: list[MovedProgress] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    left_behind: list[LeftBehind] = field(default_factory=list)
    timers: int = 0
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the log is lost, and no file whose absence means a loss is left
        out."""
        return self.plan.is_whole and not self.left_behind

    def to_json(self) -> dict[str, Any]:
        """The document that docs/json.md describes."""
        plan, stale = self.plan, self.plan.stale
        # Each message of a DLedger log moves: a list would be as long as the log.
        moved = [p for p in plan.pieces if p.to != p.start and not plan.has_heads]
        return {
            "store": plan.store,
            "into": self.into,
            "looked_at": plan.looked_at,
            "messages": plan.messages,
            "bytes": plan.bytes,
            "topics": [
                {"topic": name, "messages": one.messages, "bytes": one.bytes, "lost": one.lost}
                for name, one in sorted(plan.topics.items())
            ],
            "lost": [span.to_json() for span in plan.lost],
            "lost_bytes": sum(span.length for span in plan.lost),
            "gaps": [
                {"topic": topic, "queue_id": queue_id, "queue_offset": start, "count": stop - start}
                for (topic, queue_id), story in sorted(plan.queues.items())
                for start, stop in story.gaps
            ],
            "moved": [
                {"offset": piece.start, "length": piece.stop - piece.start, "to": piece.to}
                for piece in moved
            ],
            "raised_times": plan.raised_times,
            "rotten_queue_offsets": plan.rotten_offsets,
            "ends_without_half": plan.ends,
            "wrong_property_crcs": plan.wrong_crcs,
            "stale": {
                "messages": stale.messages,
                "bytes": stale.bytes,
                "included": stale.included,
                "moved_queue_offsets": stale.moved,
                "spans": [{"offset": start, "length": end - start} for start, end in stale.spans],
            },
            "consumers": [one.to_json() for one in self.progress],
            "config_files": self.files,
            "carried": self.carried,
            "left_behind": [one.to_json() for one in self.left_behind],
            "timers": self.timers,
            "seconds": round(self.seconds, 3),
        }


def salvage(
    layout: StoreLayout,
    into: Path | None = None,
    *,
    include_stale: bool = False,
    disk: Disk | None = None,
    bars: Bars | None = None,
    pause: Pause = lambda: None,
) -> Salvaged:
    """Save every sound message of a store.

    Args:
        layout: the store's files; they are not changed.
        into: the folder of the new store, empty or missing; None to write nothing.
        include_stale: whether to save sound frames behind the log's end, after all others.
        disk: disk of the new store.
        bars: makes progress bars.
        pause: called at safe points; raise to cancel.

    Raises:
        UsageError: if the folder is not empty, or lies within the store.
        UnsupportedStore: if a plain store cannot hold the store's queues.
        StoreUnavailable: if a process has the store open, or the disk fails or is full.
        CorruptStore: if queue offsets are invalid, or the store is changed meanwhile.
    """
    began = time.monotonic()
    bars = bars or (lambda _: nullcontext())
    if layout.is_live():
        raise StoreUnavailable(f"{layout.root}: a process has the store open and may be writing")
    layout = layout.by_content()
    require(layout, Action.SALVAGE)
    check_file_size(layout)
    if into is not None:
        check_target(layout, into)
    with bars("reading") as progress:
        plan = plan_salvage(layout, include_stale=include_stale, progress=progress, pause=pause)
    found = Salvaged(plan)
    others = other_files(layout)
    found.carried, found.left_behind = list(others.carried), list(others.left)
    found.progress, documents = _config(layout, plan)
    found.left_behind += unreadable_files(layout, documents)
    # It belongs to the wheel, which salvage writes again.
    documents.pop(TIMER_CHECK, None)
    found.files = sorted(path for path in documents if path.startswith(f"{CONFIG}/"))
    if into is None:
        found.timers = count_timers(layout)
    else:
        found.into = str(into)
        target = _Target(into, disk or LocalDisk())
        try:
            target.begin()
            with bars("copying") as progress:
                LogWriter(layout, plan, target.disk, target.work).write(progress, pause)
            with bars("building queues and index") as progress:
                target.build(plan, progress)
            for path, data in documents.items():
                pause()
                target.disk.replace(target.work / path, data)
            for path in others.carried:
                pause()
                carry(layout, path, target.disk, target.work)
            found.timers = make_timer_files(layout, target.disk, target.work, now_ms())
            known = {one.paths for one in found.left_behind}
            found.left_behind += [
                one for one in unreadable_files(layout, others.carried) if one.paths not in known
            ]
            found.seconds = time.monotonic() - began
            target.finish(found)
        except BaseException:
            target.discard()
            raise
        finally:
            target.close()
    found.seconds = time.monotonic() - began
    return found


def check_target(layout: StoreLayout, into: Path) -> None:
    """Check that a new store can be made in a folder.

    Raises:
        UsageError: if not.
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
    """Undo or finish an interrupted salvage; return whether the folder has the complete new store.

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
    """Remove what an interrupted salvage has made; return False if it was not complete."""
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
    # Written before the first of them is moved out.
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
    # Last, since it shows that the other files are ours.
    shutil.rmtree(work)


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


class _Target:
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
        """Remove what this salvage has made, and nothing else. A first Ctrl-C waits for it."""
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
        message of the queue. Readers skip no message, since no entry follows in the queue file.
        """
        size, log_size = plan.config.queue_file_size, plan.config.mapped_file_size_commit_log
        assert size is not None and log_size is not None
        layout = StoreLayout.open(self.work, plan.config)
        queues = {(queue.topic, queue.queue_id): queue for queue in consume_queues(layout)}
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

    def finish(self, found: Salvaged) -> None:
        """Move the store out of the folder in which it was made, the log last."""
        disk_json(self.disk, self.work / SIDECAR / REPORT, found.to_json())
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


# ----------------------------------------------------------------------------------------- config
def _config(layout: StoreLayout, plan: SalvagePlan) -> tuple[list[MovedProgress], dict[str, bytes]]:
    """Consumer groups whose progress had to move, and the new files of ``config/`` by path."""
    documents: dict[str, bytes] = {}
    for entry in layout.filesystem.list(CONFIG):
        if not entry.is_dir:
            path = f"{CONFIG}/{entry.name}"
            with suppress(UnreadableFile):
                documents[path] = layout.filesystem.read(path)
    for file, document in (tables_in_rocksdb(layout.filesystem) or {}).items():
        documents[f"{CONFIG}/{file}"] = document
    topics = f"{CONFIG}/{broker_config.TOPICS_FILE}"
    if topics not in documents:
        # Without it a broker serves no topic of the new store to clients.
        documents[topics] = broker_config.encode_topics(
            topics_of(plan.queues), batch_topics=plan.config.batch_topics
        ).encode()
    path = f"{CONFIG}/{broker_config.CONSUMER_OFFSET_FILE}"
    if path not in documents:
        return [], documents
    try:
        offsets = broker_config.decode_consumer_offsets(documents[path])
    except (ValueError, TypeError, RecursionError):
        # A damaged file is copied as it is.
        return [], documents
    moved = _moved_progress(layout, plan, offsets)
    if moved:
        documents[f"{SIDECAR}/{ORIGINALS}/{broker_config.CONSUMER_OFFSET_FILE}"] = documents[path]
        for one in moved:
            offsets[one.topic, one.group][one.queue_id] = one.now
        text = fastjson.replace_member(
            documents[path].decode(),
            broker_config.OFFSET_TABLE,
            broker_config.encode_consumer_offsets(offsets),
        )
        documents[path] = text.encode()
    return moved, documents


def _moved_progress(
    layout: StoreLayout,
    plan: SalvagePlan,
    offsets: dict[tuple[str, str], dict[int, int]],
) -> list[MovedProgress]:
    """Consumer groups whose progress lies after the end of their queue.

    A broker would send them back to the queue's beginning, or let them skip new messages.
    """
    had = {(queue.topic, queue.queue_id): queue.max_offset for queue in all_queues(layout)}
    found: list[MovedProgress] = []
    for (topic, group), progress in offsets.items():
        for queue_id, was in progress.items():
            key = topic, queue_id
            story = plan.queues.get(key)
            end = 0 if story is None else story.next
            if end < was <= had.get(key, 0):
                found.append(MovedProgress(topic, queue_id, group, was, end))
    return found
