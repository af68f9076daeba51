"""Whose queues and index stand in a folder, so that nobody takes another store's for them.

A note beside the folder says it of each of the two: the store, and the settings that its files
depend on. It is written before the first of them is in place, by whoever has the folder locked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import UsageError
from logquarry.log.batches import ahead
from logquarry.log.follow import Follower, follow_run
from logquarry.log.layout import CONSUME_QUEUE, INDEX, StoreLayout
from logquarry.log.walk import DamagedSpan
from logquarry.repair.rebuild.queue_files import IndexFiles, LeftOut, QueueFiles
from logquarry.repair.recover.look import LogLook
from logquarry.units import Progress
from logquarry.write.queue_writer import parts_with_copies

_WRITTEN_BY: Final = "logquarry"


def made_of(store: str, names: Iterable[str], config: StoreConfig) -> dict[str, Any]:
    """What is to be said of the folders that a rebuild makes.

    Args:
        store: absolute.
        names: of the folders.
        config: its settings, with all sizes.
    """
    shape = config.index_shape
    settings: dict[str, dict[str, Any]] = {
        CONSUME_QUEUE: {
            "file_size": config.queue_file_size,
            "message_delay_level": config.message_delay_level,
            "enable_multi_dispatch": config.enable_multi_dispatch,
            "enable_lmq": config.enable_lmq,
        },
        INDEX: {
            "slots": None if shape is None else shape.slots,
            "entries": None if shape is None else shape.entries,
        },
    }
    return {
        name: {"store": store, "settings": {"dialect": config.dialect, **settings[name]}}
        for name in names
    }


def read_note(note: Path) -> dict[str, Any]:
    """What a note says, folder by folder; nothing if it is not there, or a power cut emptied it.

    Raises:
        UsageError: if no rebuild wrote it.
    """
    try:
        document = json.loads(note.read_bytes() or b"{}")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{note}: not the note of a rebuild: {error}") from error
    folders = document.get("folders", {}) if isinstance(document, dict) else None
    if not isinstance(folders, dict) or document.get("written_by", _WRITTEN_BY) != _WRITTEN_BY:
        raise UsageError(f"{note}: not the note of a rebuild")
    return folders


def write_note(note: Path, folders: dict[str, Any], disk: Disk) -> None:
    """Say it of these folders, besides what is said of others; durable.

    Raises:
        StoreUnavailable: if it cannot be written.
        UsageError: if something else stands there.
    """
    document = {"written_by": _WRITTEN_BY, "folders": {**read_note(note), **folders}}
    disk.make_folders(note.parent)
    text = json.dumps(document, indent=1)
    disk.replace(note, text.encode(errors="backslashreplace") + b"\n")


def check_made_of(target: Path, note: Path, wanted: dict[str, Any]) -> None:
    """That the folders which are there are those that are wanted.

    Args:
        target: holds them.
        note: what is known of them.
        wanted: what :func:`made_of` says.

    Raises:
        UsageError: if not; nothing is changed.
    """
    known = read_note(note)
    # As a note has it: what JSON makes of it.
    wanted = json.loads(json.dumps(wanted))
    for name, told in wanted.items():
        place = target / name
        if not place.exists() or known.get(name) == told:
            continue
        found = known.get(name)
        if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
            why = "nothing tells which store it is of"
        elif found.get("store") != told["store"]:
            why = f"it is of the store {found.get('store')}, not of {told['store']}"
        else:
            differs = [
                f"{key} {found['settings'].get(key)!r}, not {value!r}"
                for key, value in told["settings"].items()
                if found["settings"].get(key) != value
            ]
            why = f"it was made with other settings: {'; '.join(differs)}"
        raise UsageError(f"{place}: {why}: say another folder, or remove it")


# --------------------------------------------------------------------------------------------------
# What a rebuild did, or would do.


@dataclass(frozen=True, slots=True)
class FileCount:
    """Files of one folder of the store."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class QueueReport:
    """One queue. Offsets are queue offsets.

    Attributes:
        topic: its topic.
        queue_id: its number.
        min_offset: of its first message in the log; where it ends if it has none there.
        max_offset: one past that of its last message.
        fillers: units that stand for messages which the log has lost.
        restarts: how often its offsets fell back: the topic was made anew.
        is_taken_over: whether it has no message in the log any more, and its files were copied, so
            that it goes on where it ended.
    """

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    fillers: int
    restarts: int
    is_taken_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """What was done; without ``is_applied``, what would be done.

    Attributes:
        store: the store's folder.
        into: where the new files are, None for the store itself.
        is_applied: whether anything was done.
        is_live: whether a process has the store open.
        has_abort: whether the store was not closed in order (and is not open).
        old: the files that there are, by the folders that are (to be) made anew.
        quarantine: where these were moved to, None if they were not.
        log_start: physical offset of the log's first byte.
        log_end: where the log ends; None if it was not read.
        messages: how many stand whole in it; None likewise.
        queues: the new queues; None where none were made.
        index: the new index: files and bytes of it; None where none was made.
        keys: keys in the index; None likewise.
        damage: bytes within the log that are no messages.
        left_out: messages that got no place in a queue.
    """

    store: str
    into: str | None
    is_applied: bool
    is_live: bool
    has_abort: bool
    old: dict[str, FileCount]
    log_start: int
    quarantine: str | None = None
    log_end: int | None = None
    messages: int | None = None
    queues: tuple[QueueReport, ...] | None = None
    index: FileCount | None = None
    keys: int | None = None
    damage: tuple[DamagedSpan, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document that docs/json.md describes."""
        return {
            "store": self.store,
            "into": self.into,
            "applied": self.is_applied,
            "live": self.is_live,
            "abort": self.has_abort,
            "old": {name: _count(found) for name, found in self.old.items()},
            "quarantine": self.quarantine,
            "log_start": self.log_start,
            "log_end": self.log_end,
            "messages": self.messages,
            "queues": None if self.queues is None else [_queue(queue) for queue in self.queues],
            "index": None if self.index is None else _count(self.index) | {"keys": self.keys},
            "damage": [
                {
                    "kind": span.kind,
                    "file": span.path,
                    "offset": span.offset,
                    "length": span.length,
                    "reason": span.reason,
                }
                for span in self.damage
            ],
            "left_out": [
                {
                    "topic": message.topic,
                    "queue_id": message.queue_id,
                    "queue_offset": message.queue_offset,
                    "physical_offset": message.physical_offset,
                    "reason": message.reason,
                }
                for message in self.left_out
            ],
        }


def _count(found: FileCount) -> dict[str, int | None]:
    return {"files": found.files, "bytes": found.bytes}


def _queue(queue: QueueReport) -> dict[str, Any]:
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "min_offset": queue.min_offset,
        "max_offset": queue.max_offset,
        "fillers": queue.fillers,
        "restarts": queue.restarts,
        "taken_over": queue.is_taken_over,
    }


# --------------------------------------------------------------------------------------------------
# Builds consume queues and index in a folder that nobody else knows: here, in one walk.


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """What is to be built.

    Attributes:
        layout: the store's files.
        config: its settings, with all sizes.
        disk: what the folder is on.
        clock: names index files, in milliseconds.
        folder: gets ``consumequeue/`` and ``index/``.
        names: which of them.
        look: walks the log; through once it is built.
        likely_end: about where the log ends.
        is_live: whether somebody writes the store meanwhile.
    """

    layout: StoreLayout
    config: StoreConfig
    disk: Disk
    clock: Callable[[], int]
    folder: Path
    names: tuple[str, ...]
    look: LogLook
    likely_end: int
    is_live: bool

    def queue_files(self) -> QueueFiles | None:
        """The queues to be; None where none are made."""
        if CONSUME_QUEUE not in self.names:
            return None
        assert self.config.queue_file_size is not None
        return QueueFiles(self.disk, self.folder / CONSUME_QUEUE, self.config.queue_file_size)


@dataclass(frozen=True, slots=True)
class Built:
    """What was built, all of it on the disk.

    Attributes:
        queues: the queues; None where none were to be made.
        index_files: files of the index,
        keys: and keys in them.
    """

    queues: QueueFiles | None
    index_files: int = 0
    keys: int = 0


Builder = Callable[[BuildJob, "Progress | None"], Built]


def build_here(job: BuildJob, progress: Progress | None) -> Built:
    """Build all of it in one walk over the log.

    Raises:
        StoreUnavailable: if the disk fails, or is full.
    """
    look, shape = job.look, job.config.index_shape
    assert shape is not None
    queues, index = job.queue_files(), None
    if INDEX in job.names:
        is_3_1 = job.config.is_3_1
        index = IndexFiles(job.disk, job.folder / INDEX, shape, job.clock, counts_keys=is_3_1)
    follower = Follower(job.config.delay_levels_ms, keys=job.config.index_keys)
    try:
        for run in ahead(look.runs()):
            for window, found in follow_run(follower, run):
                if index is not None:
                    index.add(found)
                if queues is not None:
                    queues.add(parts_with_copies(window, found, job.config))
            if progress is not None:
                progress(run.end - look.start, max(run.end, job.likely_end) - look.start)
        if queues is not None:
            queues.finish()
        if index is not None:
            index.finish()
    finally:
        if index is not None:
            index.close()
    return Built(queues) if index is None else Built(queues, index.files, index.keys)
