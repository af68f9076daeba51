"""The names of the files and folders of a store.

::

    STORE/commitlog/00000000000000000000      names: physical offset of the first byte
    STORE/consumequeue/TOPIC/QUEUE/0000...    names: byte offset in the queue
    STORE/batchconsumequeue/TOPIC/QUEUE/0000...
    STORE/index/yyyyMMddHHmmssSSS
    STORE/transaction/statetable/0000...      names: byte offset in the table (3.x)
    STORE/config/*.json  checkpoint  abort  lock
"""

from __future__ import annotations

from pathlib import Path

from logquarry.format import java

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
