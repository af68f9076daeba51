"""The salvage as a whole: look, write the log, build what is derived, and say what was lost.

The new store is made in a folder of its own within the target (``DIR/.salvage``), and comes out of
there when it is whole: whoever opens the target before finds no store. Queues and index are what a
safe recovery of the new log makes of it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from logquarry.disk.disk import Disk, LocalDisk
from logquarry.disk.locks import AbortFile, alone_in, lock_folder
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.format import broker_config, fastjson, queue_entry
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE, QueueEntry
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import (
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
from logquarry.log.store_names import absolute
from logquarry.read.fence import Action, require
from logquarry.read.log_end import consume_queues
from logquarry.read.log_queues import QueueKey
from logquarry.repair.recover.apply import apply_safe, disk_json
from logquarry.repair.recover.safe import plan_safe
from logquarry.repair.salvage.look import SalvagePlan, plan_salvage
from logquarry.repair.salvage.other_files import LeftBehind, carried_names, carry, other_files
from logquarry.repair.salvage.write import LogWriter
from logquarry.signals import held
from logquarry.units import Progress, now_ms

REPORT: Final = "salvage.json"
ORIGINALS: Final = "salvage"
"""Folder in the sidecar of the new store, for files that it has otherwise."""

Bars = Callable[[str], Any]
"""Gives a context with the progress of a part of the work."""
Pause = Callable[[], None]


@dataclass(slots=True)
class MovedProgress:
    """A consumer group that was further than the queue now is.

    Attributes:
        topic: of the queue.
        queue_id: of it.
        group: the consumers.
        was: the offset that they had come to.
        now: the queue's end, where they go on.
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
    """What a salvage has done, or would do.

    Attributes:
        plan: what was found.
        into: the new store's folder; None where nothing was written.
        progress: consumers that were further than their queue now is.
        files: paths of the configuration files that were copied.
        carried: other files and folders that were copied as they are.
        left_behind: parts of the store that are not in the new one, and what is lost with them.
        seconds: how long it took.
    """

    plan: SalvagePlan
    into: str | None = None
    progress: list[MovedProgress] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    left_behind: list[LeftBehind] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the log is lost, and nothing that means a loss is left behind."""
        return self.plan.is_whole and not self.left_behind

    def to_json(self) -> dict[str, Any]:
        """The document that docs/json.md describes."""
        plan, stale = self.plan, self.plan.stale
        moved = [piece for piece in plan.pieces if piece.to != piece.start]
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
            "seconds": round(self.seconds, 3),
        }


@contextmanager
def _no_bar(what: str) -> Iterator[Progress | None]:
    yield None


def salvage(
    layout: StoreLayout,
    into: Path | None = None,
    *,
    include_stale: bool = False,
    disk: Disk | None = None,
    bars: Bars = _no_bar,
    pause: Pause = lambda: None,
) -> Salvaged:
    """Save every sound message of a store.

    Args:
        layout: the store's files, of which nothing is changed.
        into: the folder of the new store, empty or not there; None to write nothing.
        include_stale: whether sound frames behind the log's end are saved too, behind all others.
        disk: what the new store is on.
        bars: shows how far each part of the work is.
        pause: called where the work may be ended: by what it raises.

    Raises:
        UsageError: if the folder is not empty, or within the store.
        UnsupportedStore: if the store has queues that a plain store has not.
        StoreUnavailable: if a process has the store open, or the disk does not take the new one.
        CorruptStore: if queue offsets make no sense, or the store is changed meanwhile.
    """
    began = time.monotonic()
    if layout.is_live():
        raise StoreUnavailable(f"{layout.root}: a process has the store open and may be writing")
    require(layout, Action.SALVAGE)
    if into is not None:
        check_target(layout, into)
    with bars("reading") as progress:
        plan = plan_salvage(layout, include_stale=include_stale, progress=progress, pause=pause)
    found = Salvaged(plan)
    others = other_files(layout, plan)
    found.carried, found.left_behind = list(others.carried), list(others.left)
    found.progress, documents = _config(layout, plan)
    for path in others.left_config:
        documents.pop(path, None)
    found.files = sorted(path for path in documents if path.startswith(f"{CONFIG}/"))
    if into is not None:
        found.into = str(into)
        target = _Target(into, disk or LocalDisk())
        try:
            target.begin()
            with bars("copying") as progress:
                LogWriter(layout, plan, target.disk, target.work).write(progress, pause)
            with bars("building queues and index"):
                target.build(plan)
            for path, data in documents.items():
                pause()
                target.disk.replace(target.work / path, data)
            for path in others.carried:
                pause()
                carry(layout, path, target.disk, target.work)
            found.seconds = time.monotonic() - began
            target.finish(found)
        finally:
            target.close()
    found.seconds = time.monotonic() - began
    return found


def check_target(layout: StoreLayout, into: Path) -> None:
    """Refuse a folder that a new store cannot be made in.

    Raises:
        UsageError: if it is one.
    """
    if isinstance(layout.filesystem, LocalFileSystem):
        store = Path(layout.root).resolve()
        if store == into.resolve() or store in into.resolve().parents:
            raise UsageError(f"{into}: within the store that is to be saved: nothing of it changes")
    try:
        names = sorted(path.name for path in into.iterdir()) if into.exists() else []
    except OSError as error:
        raise StoreNotFound(f"{into}: cannot be read: {error.strerror}") from error
    if SALVAGE in names:
        _unlock(lock_folder(into))
        raise UsageError(
            f"{into}: a salvage into it is not finished: remove {into / SALVAGE} to begin anew"
        )
    if names:
        raise UsageError(f"{into}: it holds {names[0]}: the new store needs an empty folder")


def settle(location: str, into: Path) -> bool:
    """Undo a salvage that was cut off, or end it; whether a folder has all of what it made.

    Args:
        location: the store that is saved, absolute.
        into: the folder of the new store.

    Raises:
        StoreUnavailable: if it is at work still.
        UsageError: if another store was saved there, or somebody else has put something there
            since; nothing is removed then.
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
    work, report = into / SALVAGE, into / SIDECAR / REPORT
    if work.is_dir():
        if any(work.iterdir()) or not report.is_file():
            _remove_unfinished(into)
            return False
        # The log comes out of there at last: a broker may be at home in the store by now.
        work.rmdir()
    if not report.is_file():
        return False
    try:
        saved = str(json.loads(report.read_bytes())["store"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{report}: not the report of a salvage: {error!r}") from error
    if absolute(saved) != location:
        raise UsageError(f"{into}: {saved} was saved there, not {location}: say another folder")
    return True


def _remove_unfinished(into: Path) -> None:
    work = into / SALVAGE
    report = Path(SIDECAR, REPORT)
    # Written before the first of them comes out.
    comes_out = (into / report).is_file() or (work / report).is_file()
    made = [COMMIT_LOG, CONSUME_QUEUE, INDEX, CONFIG, SIDECAR, CHECKPOINT]
    made += carried_names(into)
    there = [name for name in made if os.path.lexists(into / name)]
    for name in there:
        if not comes_out or (work / name).exists():
            raise UsageError(
                f"{into / name}: the salvage that was not finished did not make it: nothing is "
                f"removed; {work} can be"
            )
    for name in there:
        if (into / name).is_dir():
            shutil.rmtree(into / name, ignore_errors=True)
        else:
            (into / name).unlink()
    # It says that the others are ours: it goes last.
    shutil.rmtree(work)


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


class _Target:
    """The folder of the new store.

    Args:
        into: the folder.
        disk: what it is on.

    Attributes:
        disk: likewise.
        work: the folder in it where the store is made.
    """

    def __init__(self, into: Path, disk: Disk) -> None:
        self.disk = disk
        self.work = into / SALVAGE
        self._into = into
        self._held = ExitStack()

    def begin(self) -> None:
        """Make the folders: who comes second finds the one for the work."""
        self._held.enter_context(alone_in(self.disk, self._into))
        try:
            self.disk.make_folder(self.work)
        except OSError as error:
            raise self.disk.refused(self.work, error) from error
        others = sorted(path.name for path in self._into.iterdir() if path != self.work)
        if others:
            # Somebody has put it there while the store was looked through.
            self.work.rmdir()
            raise UsageError(
                f"{self._into}: it holds {others[0]}: the new store needs an empty folder"
            )
        for name in (COMMIT_LOG, CONSUME_QUEUE, INDEX):
            self.disk.make_folders(self.work / name)

    def close(self) -> None:
        """Let go of the folder: whoever comes next may see what is there."""
        self._held.close()

    def build(self, plan: SalvagePlan) -> None:
        """Make queues, index, checkpoint and durable mark of the log.

        Raises:
            StoreUnavailable: if the disk does not take them.
        """
        recovery = plan_safe(self.work, plan.config)
        if recovery.message_count != plan.messages or recovery.damage:
            raise StoreUnavailable(
                f"{self.work}: {recovery.message_count} messages stand there, and "
                f"{plan.messages} were written: the disk does not keep what it is given"
            )
        apply_safe(recovery, self.disk, now_ms)
        AbortFile(self.disk, self.work).remove()
        self._keep_queue_files(plan)
        # What a recovery notes is of the way here; nobody has to look at it.
        shutil.rmtree(quarantine(self.work), ignore_errors=True)

    def _keep_queue_files(self, plan: SalvagePlan) -> None:
        """See that RocketMQ's clean-up takes away no queue file that ends in a unit for nothing.

        QUIRK: it deletes a file whose last unit names a place before the log's start, and a unit
        for no message names 0. There it names the start of the log file that the next message of
        the queue is in: nothing follows in the queue file that a reader could pass over for it.
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
        """Bring the store out of the folder that it was made in, the log at last."""
        disk_json(self.disk, self.work / SIDECAR / REPORT, found.to_json())
        names = [path.name for path in self.work.iterdir()]
        last = [CHECKPOINT, CONSUME_QUEUE, COMMIT_LOG]
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
    """The files of ``config/`` as they are to be, and consumers whose progress had to move."""
    documents: dict[str, bytes] = {}
    for entry in layout.filesystem.list(CONFIG):
        if not entry.is_dir:
            path = f"{CONFIG}/{entry.name}"
            documents[path] = layout.filesystem.read(path)
    path = f"{CONFIG}/{broker_config.CONSUMER_OFFSET_FILE}"
    if path not in documents:
        return [], documents
    try:
        offsets = broker_config.decode_consumer_offsets(documents[path])
    except (ValueError, TypeError, RecursionError):
        # It is copied as it is, as damaged as it is.
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
    """Consumers that are further than a queue that has lost its last messages.

    A broker would send them back to the queue's beginning, or let them pass over what comes next.
    """
    had = {(queue.topic, queue.queue_id): queue.max_offset for queue in consume_queues(layout)}
    found: list[MovedProgress] = []
    for (topic, group), progress in offsets.items():
        for queue_id, was in progress.items():
            key = topic, queue_id
            story = plan.queues.get(key)
            end = 0 if story is None else story.next
            if end < was <= had.get(key, 0):
                found.append(MovedProgress(topic, queue_id, group, was, end))
    return found
