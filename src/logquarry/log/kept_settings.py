"""Reads the settings and offsets in a store's folder ``.logquarry/``, and infers delay levels.

A recorded setting is used only if its value cannot be inferred from the store's other files. For
example, an index file without keys does not show its numbers of slots and entries
(:mod:`logquarry.read.store_sizes`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from logquarry.config import StoreConfig
from logquarry.errors import StoreNotFound, UsageError
from logquarry.format import checkpoint, frame, queue_entry
from logquarry.format import properties as props
from logquarry.log.filesystem import FileSystem, FileView
from logquarry.log.store_files import CHECKPOINT, DURABLE, NAME_DIGITS, FileSequence, StoreFile
from logquarry.log.warn_once import warn_once

_NAMES: Final = (
    "dialect",
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "mapper_file_size_batch_consume_queue",
    "max_hash_slot_num",
    "max_index_num",
    "tran_state_table_mapped_file_size",
    "tran_redo_log_mapped_file_size",
    "index_tags",
    "message_index_enable",
    "enable_multi_dispatch",
    "enable_lmq",
    "message_delay_level",
)
_VERSION: Final = 1


def encode(config: StoreConfig) -> bytes:
    """Encode the settings of an open store. ``config`` must have all sizes."""
    settings = {name: getattr(config, name) for name in _NAMES}
    return json.dumps({"version": _VERSION, "settings": settings}, indent=1).encode() + b"\n"


# The result is cached, because one command opens a store several times.
@lru_cache(maxsize=16)
def decode(data: bytes) -> Mapping[str, Any]:
    """Decode the settings by name. Raises ValueError if the bytes are not a record of settings."""
    document = json.loads(data)
    settings = document.get("settings") if isinstance(document, dict) else None
    if not isinstance(settings, dict) or document.get("version") != _VERSION:
        raise ValueError(f"no settings of version {_VERSION}")
    found = {name: settings[name] for name in _NAMES if settings.get(name) is not None}
    try:
        config = StoreConfig.from_mapping(found)
        has_levels = bool(config.delay_levels_ms)
    except UsageError as error:
        raise ValueError(str(error)) from error
    if not has_levels:
        raise ValueError("no delay levels")
    return {name: getattr(config, name) for name in found}


class Durable(NamedTuple):
    """Durable offset of a log, and the log's start (None if unknown)."""

    end: int
    start: int | None


class LostHead(NamedTuple):
    """A log that has lost its first files: its recorded start, and the start of its first existing
    file.
    """

    start: int
    stop: int

    def __str__(self) -> str:
        return (
            f"the log began at {self.start} when it was last written, and its first file begins "
            f"at {self.stop} now"
        )

    def as_file(self, folder: str) -> StoreFile:
        """Return the first missing file as a file of size 0, because readers report a file of this
        size as missing.
        """
        return StoreFile(self.start, 0, f"{folder}/{self.start:0{NAME_DIGITS}d}")


def read_durable(filesystem: FileSystem) -> Durable | None:
    """Read the durable offset and the start of the log; None if there is no valid record.

    If a file cannot be opened, for example because this user may not read it, the result is None
    too, and a warning names the file.
    """
    try:
        return require_durable(filesystem)
    except (FileNotFoundError, ValueError):
        # The file system has already logged a warning if the disk cannot read a block.
        return None
    except (OSError, StoreNotFound) as error:
        warn_once(f"{filesystem.root}: the durable offset is unknown: {error}")
        return None


def require_durable(filesystem: FileSystem) -> Durable | None:
    """Read the durable offset and the start of the log; None if the record is invalid.

    A record is invalid if another program has written the store
    (:class:`logquarry.format.checkpoint.DurableMark`).

    Raises:
        FileNotFoundError: if the record or the checkpoint is missing.
        ValueError: if the checkpoint is too short, or the disk cannot read a block.
        StoreNotFound: if a file cannot be opened.
    """
    data = filesystem.read(DURABLE)
    mark = checkpoint.decode_mark(data)
    found = checkpoint.decode(filesystem.read(CHECKPOINT))
    if mark is None or not mark.speaks_of(found):
        return None
    return Durable(mark.offset, checkpoint.decode_start(data))


def find_lost_head(filesystem: FileSystem, files: tuple[StoreFile, ...]) -> LostHead | None:
    """Find the missing start of the log; None if there is no sign that files are missing.

    Before retention deletes files, it records the log's new start. So if the first existing file
    begins after the recorded start, the files between the two offsets are lost, not expired.
    """
    found = read_durable(filesystem) if files and files[0].base else None
    if found is None or found.start is None or found.start >= files[0].base:
        return None
    return LostHead(found.start, files[0].base)


def unproved_start(filesystem: FileSystem, files: tuple[StoreFile, ...]) -> str | None:
    """Explain why the log's first files may be missing; None if the log's start is recorded or 0.

    RocketMQ's retention does not record the log's start. So if this retention has deleted the first
    files, they look like lost files.
    """
    if not files or not files[0].base:
        return None
    found = read_durable(filesystem)
    if found is not None and found.start is not None:
        return None
    return (
        f"the log begins at {files[0].base}: earlier messages have expired, or their files are "
        "missing"
    )


class Schedule(Protocol):
    """The parts of a store that delay levels are inferred from: the log and the queues of delayed
    messages (schedule queues).
    """

    config: StoreConfig

    @property
    def kept_settings(self) -> Mapping[str, Any]:
        """The settings that are recorded in the store."""

    @property
    def queue_names(self) -> Collection[tuple[str, int]]:
        """(topic, queue id) of each consume queue."""

    @property
    def commit_log(self) -> FileSequence:
        """Files of the commit log."""

    def queue(self, topic: str, queue_id: int) -> FileSequence:
        """Files of a consume queue."""

    def open_file(self, path: str) -> FileView:
        """Open a file below the root."""


_LONGEST_MS = 400 * 86_400_000
_SECOND_MS = 1_000
_MOST_LOOKED_AT = 9
_MOST_OPEN = 8


def levels_of(layout: Schedule) -> tuple[int, ...]:
    """Return the delay of each level in milliseconds, level 1 first.

    If the configured levels are RocketMQ's defaults, a level's delay is inferred from the first
    entries of its schedule queue: the delay is the delivery time in an entry minus the store time
    of its message. A level without entries has the recorded or default delay.
    """
    stated = layout.config.delay_levels_ms
    if stated not in map(props.parse_levels, (props.DEFAULT_LEVELS, props.LEVELS_3)):
        return stated
    kept = layout.kept_settings.get("message_delay_level")
    levels = list(stated if kept is None else props.parse_levels(kept))
    # Keep a file open, because the next message may be in the same file, and opening a remote file
    # takes several requests. Keep only a few files open, because the number of a process's open
    # files is limited.
    open_file = lru_cache(_MOST_OPEN)(layout.open_file)
    for topic, queue_id in layout.queue_names:
        if topic != props.SCHEDULE_TOPIC or not 0 <= queue_id < len(levels):
            continue
        # Use the most frequent delay, because a single entry may be damaged.
        told = Counter(islice(_delays(layout, open_file, queue_id), _MOST_LOOKED_AT)).most_common(1)
        if told:
            levels[queue_id] = told[0][0]
    return tuple(levels)


def levels_text(levels_ms: tuple[int, ...]) -> str:
    """Format the delays of levels as a value of the setting ``messageDelayLevel``. Delays are
    rounded to seconds, because RocketMQ 3.x adds some milliseconds.
    """
    return " ".join(f"{round(ms / _SECOND_MS)}s" for ms in levels_ms)


def _delays(layout: Schedule, open_file: Callable[[str], FileView], queue_id: int) -> Iterator[int]:
    log = layout.commit_log
    for file in layout.queue(props.SCHEDULE_TOPIC, queue_id).files:
        try:
            view = open_file(file.path)
        except FileNotFoundError:
            continue
        data, start = memoryview(b""), 0
        for position in range(0, view.size - queue_entry.UNIT_SIZE + 1, queue_entry.UNIT_SIZE):
            if position - start + queue_entry.UNIT_SIZE > len(data):
                data, start = view.window(position, queue_entry.UNIT_SIZE), position
            entry = queue_entry.decode_at(data, position - start)
            if not entry.is_written:
                break
            at = log.at(entry.physical_offset)
            if entry.is_filler or at is None:
                continue
            try:
                window = open_file(at.path).window(entry.physical_offset - at.base, entry.size)
            except FileNotFoundError:
                continue
            message = bytes(window[: entry.size])
            outcome = frame.decode_at(message, 0, base=entry.physical_offset, check_crc=False)
            found = outcome.store_timestamp if isinstance(outcome, frame.Frame) else None
            if found is not None and 0 < entry.tags_code - found <= _LONGEST_MS:
                yield entry.tags_code - found
