"""What earlier writers left in a store: settings and offsets in ``.logquarry/``, delay levels, and
signs of the broker's version.

A recorded setting is used only if its value cannot be inferred from the store's other files. For
example, an index file without keys does not show its numbers of slots and entries
(:mod:`logquarry.read.store_sizes`). Names of files, the checkpoint and ``config/topics.json`` show
the version of the broker.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

from logquarry.config import StoreConfig
from logquarry.errors import CorruptFile, StoreNotFound, UnreadableFile, UsageError
from logquarry.format import broker_json, checkpoint, frame, queue_entry
from logquarry.format import properties as props
from logquarry.log.filesystem import FileSystem, FileView
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CHECKPOINT,
    COMMIT_LOG,
    CONFIG,
    DURABLE,
    NAME_DIGITS,
    SIDECAR,
    FileSequence,
    StoreFile,
    warn_once,
)

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
    """Decode name -> value of the settings. Raises ValueError if the bytes are not a record of
    settings.
    """
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
    """The range of lost first files: from the log's recorded start to the first existing file."""

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
    """The parts of a store from which delay levels are inferred. They are the log and the schedule
    queues, which contain delayed messages.
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
    entries of its schedule queue. An entry contains the delivery time. The delay is this time minus
    the store time of the message. A level without entries has the recorded or default delay.
    """
    stated = layout.config.delay_levels_ms
    if stated not in map(props.parse_levels, (props.DEFAULT_LEVELS, props.LEVELS_3)):
        return stated
    kept = layout.kept_settings.get("message_delay_level")
    levels = list(stated if kept is None else props.parse_levels(kept))
    # Keep the last files open: the next message may be in the same file, and opening a remote file
    # takes several requests. Keep only a few, because a process can open only a limited number of
    # files.
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


ROCKSDB_STORE: Final = "rocksdbstore"
"""A folder that every broker since version 5.4.0 creates."""
_FOLDERS_OF_5: Final = ("timerwheel", BATCH_QUEUE, "compaction")
_FILES_OF_5: Final = ("timercheck", "timermetrics")
_FIELD: Final = "logics_physical"
OFFSET_AT: Final = checkpoint.LAYOUT.size + checkpoint.OFFSETS.offsets[_FIELD]
"""Position in the checkpoint of the offset that only brokers since version 5.5 write."""


@dataclass(frozen=True, slots=True)
class Writer:
    """The range of versions of RocketMQ that may have written a store: ``at_least`` or later, and
    earlier than ``before``. None means unknown.
    """

    at_least: str | None = None
    before: str | None = None
    evidence: tuple[str, ...] = ()

    @property
    def is_5(self) -> bool:
        """Whether RocketMQ 5 wrote the store."""
        return self.at_least is not None and self.at_least.startswith("5")

    def __str__(self) -> str:
        if self.at_least is None:
            return "unknown" if self.before is None else f"before {self.before}"
        if self.before is None:
            return f"{self.at_least} or later"
        return f"{self.at_least} or later, before {self.before}"


def find_writer(filesystem: FileSystem) -> Writer:
    """Infer the version without reading log, queues or index.

    :func:`logquarry.read.features.find_features` also uses the signs in frames and in the index.
    """
    return _find(filesystem)[0]


def harmed_offset(filesystem: FileSystem) -> int | None:
    """Return the value at :data:`OFFSET_AT` if it is certainly damaged; None if it is 0 or can be
    right.
    """
    writer, offset = _find(filesystem)
    return None if not offset or _SIGN in writer.evidence else offset


_SIGN: Final = f"{CHECKPOINT} at {OFFSET_AT}"


def _find(filesystem: FileSystem) -> tuple[Writer, int]:
    """Return the range of versions that may have written the store, and the value at
    :data:`OFFSET_AT` (0 without a checkpoint).
    """
    root = {entry.name for entry in filesystem.list("")}
    try:
        offset = checkpoint.decode_offsets(filesystem.read(CHECKPOINT)).logics_physical
    except (FileNotFoundError, StoreNotFound, UnreadableFile):
        offset = 0
    if ROCKSDB_STORE in root:
        sign = _SIGN if offset > 0 else f"{ROCKSDB_STORE}/"
        return Writer("5.5.0" if offset > 0 else "5.4.0", None, (sign,)), offset
    found = _by_names(filesystem, root)
    # A broker of 5.5 makes the folder ROCKSDB_STORE, but a copy of the store can lack this folder.
    # No CRC covers the checkpoint, so believe the offset only if a message begins there.
    if found.before != "5.0.0" and offset > 0 and _has_frame(filesystem, offset):
        found = Writer("5.5.0", None, (_SIGN,))
    return found, offset


def _has_frame(filesystem: FileSystem, offset: int) -> bool:
    for entry in filesystem.list(COMMIT_LOG):
        if not entry.name.isdecimal() or len(entry.name) != NAME_DIGITS or entry.is_dir:
            continue
        position = offset - int(entry.name)
        if 0 <= position < entry.size:
            try:
                view = filesystem.open(f"{COMMIT_LOG}/{entry.name}")
            except (FileNotFoundError, StoreNotFound):
                return False
            head = bytes(view.window(position, frame.BLANK.size)[: frame.BLANK.size])
            if len(head) < frame.BLANK.size:
                return False
            size, magic = frame.BLANK.struct.unpack(head)
            return magic in frame.MAGICS and size >= frame.FIXED_SIZE_V1
    return False


def _by_names(filesystem: FileSystem, root: set[str]) -> Writer:
    config = {entry.name for entry in filesystem.list(CONFIG)}
    signs = [name for name in _FOLDERS_OF_5 if name in root]
    signs += [f"{CONFIG}/{name}" for name in _FILES_OF_5 if name in config]
    if any(topic_attributes(filesystem).values()):
        signs.append(f"{CONFIG}/{broker_json.TOPICS_FILE}")
    if signs:
        return Writer("5.0.0", "5.4.0", tuple(signs))
    if broker_json.TOPICS_FILE in config and SIDECAR not in root:
        # RocketMQ 5.x would have written "attributes" for each topic, and by default a file
        # ``timerwheel``, so an earlier version wrote the store. If the store has a ``.logquarry``
        # folder, logquarry may have written topics.json. Then this file proves nothing.
        return Writer(None, "5.0.0", (f"{CONFIG}/{broker_json.TOPICS_FILE}",))
    return Writer()


def topic_attributes(filesystem: FileSystem) -> Mapping[str, Mapping[str, Any]]:
    """Topic -> attributes, from ``config/topics.json`` or RocksDB; empty if unreadable."""
    try:
        stored = read_config(filesystem, broker_json.TOPICS_FILE)
        table = broker_json.decode(stored)["topicConfigTable"]
        return {
            str(name): found if isinstance(found := topic.get("attributes"), dict) else {}
            for name, topic in table.items()
        }
    except (OSError, CorruptFile, ValueError, TypeError, LookupError, AttributeError):
        # verify reports a file that cannot be read.
        return {}
