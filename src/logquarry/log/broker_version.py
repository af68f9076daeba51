"""Infers the version of the broker that wrote a store, from names of files, the checkpoint and
``config/topics.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from logquarry.errors import CorruptFile, StoreNotFound, UnreadableFile
from logquarry.format import broker_json
from logquarry.log.filesystem import FileSystem
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import BATCH_QUEUE, CHECKPOINT, CONFIG, SIDECAR

ROCKSDB_STORE: Final = "rocksdbstore"
"""A folder that every broker since version 5.4.0 creates."""
_FOLDERS_OF_5: Final = ("timerwheel", BATCH_QUEUE, "compaction")
_FILES_OF_5: Final = ("timercheck", "timermetrics")


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
    root = {entry.name for entry in filesystem.list("")}
    config = {entry.name for entry in filesystem.list(CONFIG)}
    try:
        page = filesystem.read(CHECKPOINT)
    except (FileNotFoundError, StoreNotFound, UnreadableFile):
        page = b""
    if page[40:48].strip(b"\0"):
        return Writer("5.5.0", None, (f"{CHECKPOINT} at 40",))
    if ROCKSDB_STORE in root:
        return Writer("5.4.0", None, (f"{ROCKSDB_STORE}/",))
    signs = [name for name in _FOLDERS_OF_5 if name in root]
    signs += [f"{CONFIG}/{name}" for name in _FILES_OF_5 if name in config]
    if any(topic_attributes(filesystem).values()):
        signs.append(f"{CONFIG}/{broker_json.TOPICS_FILE}")
    if signs:
        return Writer("5.0.0", "5.4.0", tuple(signs))
    if broker_json.TOPICS_FILE in config and SIDECAR not in root:
        # RocketMQ 5.x would have written "attributes" for each topic, and by default a file
        # ``timerwheel``, so an earlier version wrote the store. But a store with a ``.logquarry``
        # folder has a topics.json that logquarry may have written, which proves nothing.
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
