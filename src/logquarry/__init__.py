"""logquarry: the message store of Apache RocketMQ, in Python.

::

    import logquarry as lq

    with lq.MessageStore.open("/data/rocketmq/store") as store:
        for message in store.scan("orders"):
            print(message.queue_offset, message.keys, message.body)

- `MessageStore.open` opens a store; it returns a `StoreReader`, or with ``mode="rw"`` a
  `StoreWriter`.
- `Message` is a message to put, `StoredMessage` is a message that a store returned, and
  `StoreConfig` holds the settings of a store.
- `verify`, `recover`, `rebuild`, `salvage`, `diff` and `retain` do the work of the commands with
  the same names. Their results have a method `to_json()`, which returns the document that the
  command prints with ``--json``.
- The module `errors` defines all exceptions. A wrong argument raises `errors.UsageError`, a
  ValueError. An argument of a wrong type raises `errors.WrongType`, a UsageError that is also a
  TypeError.

Import these three packages separately: `logquarry.replication`, `logquarry.spark` and
`logquarry.testing`. `logquarry.testing` contains a disk that injects faults, and a model of a
store, for your own tests. ``import logquarry`` is fast, because the package imports each of its
names only when you first use the name.
"""

import os

# Type checkers treat a variable named TYPE_CHECKING as true. An import of TYPE_CHECKING from typing
# would take longer than the rest of this module. Import little here: until the import of this
# package has ended, the command line cannot handle Ctrl-C.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from logquarry import errors
    from logquarry.config import StoreConfig
    from logquarry.dialect31.prepared import PreparedTransaction, TransactionEnd
    from logquarry.log.batches import DamageLog
    from logquarry.message import Message
    from logquarry.read.features import StoreFeatures
    from logquarry.read.get_message import GetMessageStatus, GetResult
    from logquarry.repair.findings import Finding, VerifyReport
    from logquarry.repair.rebuild.build import RebuildReport
    from logquarry.repair.rebuild.rebuild import rebuild
    from logquarry.repair.recover.plan import RecoveryPlan
    from logquarry.repair.recover.recover import recover
    from logquarry.repair.salvage.salvage import Salvaged, salvage
    from logquarry.repair.store_diff import StoreDiff, diff
    from logquarry.repair.verification import verify
    from logquarry.store.consumer.consumer import Consumer
    from logquarry.store.consumer.offsets import OffsetEstimate
    from logquarry.store.message_store import MessageStore, StoreReader, StoreWriter
    from logquarry.store.reads import QueueOffsets
    from logquarry.store.retention.plan import RetentionPlan
    from logquarry.store.retention.retain import retain
    from logquarry.store.retention.rules import RetentionRules
    from logquarry.store.state import StoreState
    from logquarry.store.stats import StoreStats
    from logquarry.store.transaction.checks import CheckReport, OpenTransaction
    from logquarry.store.transaction.transaction import Transaction, TransactionState
    from logquarry.stored_message import StoredMessage
    from logquarry.write.dispatcher import MessageArrival
    from logquarry.write.put_many import PutManyResult
    from logquarry.write.put_result import AppendStatus, PutResult, PutStatus
    from logquarry.write.settling import PutFuture

__version__ = "0.1.0"

if os.environ.get("LOGQUARRY_COMPILED"):
    from logquarry import compiled

    compiled.obey_switch()

__all__ = [
    "AppendStatus",
    "CheckReport",
    "Consumer",
    "DamageLog",
    "Finding",
    "GetMessageStatus",
    "GetResult",
    "Message",
    "MessageArrival",
    "MessageStore",
    "OffsetEstimate",
    "OpenTransaction",
    "PreparedTransaction",
    "PutFuture",
    "PutManyResult",
    "PutResult",
    "PutStatus",
    "QueueOffsets",
    "RebuildReport",
    "RecoveryPlan",
    "RetentionPlan",
    "RetentionRules",
    "Salvaged",
    "StoreConfig",
    "StoreDiff",
    "StoreFeatures",
    "StoreReader",
    "StoreState",
    "StoreStats",
    "StoreWriter",
    "StoredMessage",
    "Transaction",
    "TransactionEnd",
    "TransactionState",
    "VerifyReport",
    "__version__",
    "diff",
    "errors",
    "rebuild",
    "recover",
    "retain",
    "salvage",
    "verify",
]

_MODULES = {
    "config": "StoreConfig",
    "dialect31.prepared": "PreparedTransaction TransactionEnd",
    "log.batches": "DamageLog",
    "message": "Message",
    "read.features": "StoreFeatures",
    "read.get_message": "GetMessageStatus GetResult",
    "repair.findings": "Finding VerifyReport",
    "repair.rebuild.build": "RebuildReport",
    "repair.rebuild.rebuild": "rebuild",
    "repair.recover.plan": "RecoveryPlan",
    "repair.recover.recover": "recover",
    "repair.salvage.salvage": "Salvaged salvage",
    "repair.store_diff": "StoreDiff diff",
    "repair.verification": "verify",
    "store.consumer.consumer": "Consumer",
    "store.consumer.offsets": "OffsetEstimate",
    "store.message_store": "MessageStore StoreReader StoreWriter",
    "store.reads": "QueueOffsets",
    "store.retention.plan": "RetentionPlan",
    "store.retention.retain": "retain",
    "store.retention.rules": "RetentionRules",
    "store.state": "StoreState",
    "store.stats": "StoreStats",
    "store.transaction.checks": "CheckReport OpenTransaction",
    "store.transaction.transaction": "Transaction TransactionState",
    "stored_message": "StoredMessage",
    "write.dispatcher": "MessageArrival",
    "write.put_many": "PutManyResult",
    "write.put_result": "AppendStatus PutResult PutStatus",
    "write.settling": "PutFuture",
}
_HOMES = {
    name: f"logquarry.{module}" for module, names in _MODULES.items() for name in names.split()
}


def __getattr__(name: str) -> "Any":
    import importlib

    if name == "errors":
        return importlib.import_module("logquarry.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    # Store the name as a global, so that its later uses do not call __getattr__. Such a call would
    # take longer than a put.
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
