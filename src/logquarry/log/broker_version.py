"""Infers the version of the broker that wrote a store, from names of files, the checkpoint and
``config/topics.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from logquarry.errors import CorruptFile, StoreNotFound, UnreadableFile
from logquarry.format import broker_json, checkpoint, frame
from logquarry.log.filesystem import FileSystem
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CHECKPOINT,
    COMMIT_LOG,
    CONFIG,
    NAME_DIGITS,
    SIDECAR,
)

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
    """Return the damaged value at :data:`OFFSET_AT`; None if the value is 0 or can be right."""
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
