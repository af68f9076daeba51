"""The names of the files and folders of a store, and the two forms of queue files.

::

    STORE/commitlog/00000000000000000000      names: physical offset of the first byte
    STORE/consumequeue/TOPIC/QUEUE/0000...    names: byte offset in the queue
    STORE/batchconsumequeue/TOPIC/QUEUE/0000...
    STORE/index/yyyyMMddHHmmssSSS
    STORE/transaction/statetable/0000...      names: byte offset in the table (3.x)
    STORE/config/*.json  checkpoint  abort  lock
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.format import batch, java, queue_entry

COMMIT_LOG = "commitlog"
CONSUME_QUEUE = "consumequeue"
BATCH_QUEUE = "batchconsumequeue"
COMPACTED_LOG = "compaction/compactionLog"
COMPACTED_QUEUE = "compaction/compactionCq"
INDEX = "index"
TRANSACTION = "transaction"
"""Folder of 3.x with its state table and redo log."""
STATE_TABLE = f"{TRANSACTION}/statetable"
REDO_LOG = f"{TRANSACTION}/redolog/TRANSACTION_REDOLOG_TOPIC_XXXX/0"
CONFIG = "config"
CHECKPOINT = "checkpoint"
ABORT = "abort"
LOCK = "lock"
SIDECAR = ".logquarry"
"""Our own folder in a store. RocketMQ does not know it."""
DURABLE = f"{SIDECAR}/durable"
LOADS = f"{SIDECAR}/loads"
INTENT = "intent.json"
DAMAGE = f"{SIDECAR}/damage.json"
SETTINGS = f"{SIDECAR}/settings.json"
"""The settings with which a writer of this library made or continued the store."""
REBUILD = f"{SIDECAR}/rebuild"
"""Folder in which a rebuild makes queues and index."""
SALVAGE = ".salvage"
"""Folder in which a salvage builds a store; the salvage removes it at its end."""

NAME_DIGITS = 20
LARGEST_BASE = java.LONG_MAX // 2
"""Files with larger names are skipped, so that offset arithmetic stays within 64 bits."""


def quarantine(root: Path, *parts: str) -> Path:
    """The folder for quarantined files of a store; ``parts`` name the part of the store."""
    return root.joinpath(SIDECAR, "quarantine", *parts)


@dataclass(frozen=True, slots=True)
class QueueForm:
    """The folder of a topic's queues, and the sizes of their files and entries.

    Attributes:
        root: folder below the store's folder, with TOPIC/QUEUE/FILE.
        entry_size: bytes of an entry.
        file_size: bytes of a file.
    """

    root: str
    entry_size: int
    file_size: int

    def file_at(self, folder: Path, position: int) -> Path:
        """The file of a queue's folder that has, or would have, a position in the queue."""
        return folder / f"{position - position % self.file_size:0{NAME_DIGITS}d}"


def queue_form(config: StoreConfig, topic: str) -> QueueForm:
    """The form of a topic's queues.

    Args:
        config: settings of the store, with all sizes.
        topic: the topic.
    """
    if topic in config.batch_topics:
        assert config.batch_queue_file_size is not None
        return QueueForm(BATCH_QUEUE, batch.ENTRY_SIZE, config.batch_queue_file_size)
    assert config.queue_file_size is not None
    return QueueForm(CONSUME_QUEUE, queue_entry.UNIT_SIZE, config.queue_file_size)
