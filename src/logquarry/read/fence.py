"""Refuses calls that would harm a store, because these calls do not support a feature of the store.

Each call that changes a store first calls :func:`require` or :func:`refusal`, before it writes even
the lock file or ``abort``. :data:`_REFUSED` lists the refused combinations of feature and action.
Multi-dispatch is refused only if the configuration switches it off. Every other combination was
tested: after the call, a real broker served every message of the store (docs/rocketmq-5.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final

from logquarry.config import StoreConfig
from logquarry.errors import UnsupportedStore
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import CURRENT, is_installed, needs_package
from logquarry.read import features as names
from logquarry.read.features import Feature, OtherQueues, StoreFeatures
from logquarry.read.log_queues import LMQ_PREFIX
from logquarry.read.store_sizes import require_log


class Action(Enum):
    """An action on a store; the value completes the sentence "cannot ..."."""

    WRITE = "be opened to write"
    LOAD = "get the rows of a Spark job"
    RECOVER = "be recovered"
    REBUILD_QUEUES = "get new queues"
    REBUILD_INDEX = "get a new index"
    RETAIN = "have expired files deleted"
    SALVAGE = "be salvaged"


_EACH: Final = frozenset(Action) - {Action.SALVAGE}
_IMPLIED: Final = {
    Action.WRITE: (Action.RECOVER,),
    Action.LOAD: (Action.WRITE, Action.RECOVER),
}
_QUEUES: Final = frozenset({Action.WRITE, Action.RECOVER, Action.REBUILD_QUEUES})
_LOG: Final = frozenset({Action.WRITE, Action.RECOVER, Action.RETAIN})

_REFUSED: Final = {
    names.ROCKSDB_QUEUES: _QUEUES,
    names.ROCKSDB_CONFIG: frozenset({Action.WRITE}),
    names.ROCKSDB_STORE: _EACH,
    names.COMPACTION: _LOG,
    names.TIERED: _EACH,
    names.PROPERTY_CRC: frozenset({Action.LOAD}),
    names.QUEUE_EXT: _QUEUES,
    names.CONTROLLER: _LOG,
    names.LOG_PATH: _EACH,
    names.DLEDGER: _EACH,
}
"""Feature -> the forbidden actions. If logquarry does not find some part of the log, all actions
except SALVAGE are forbidden (:mod:`logquarry.log.log_place`).
"""

_HARM: Final = {
    names.ROCKSDB_QUEUES: "The queues in RocksDB would not change, so the broker would not "
    "serve the new messages, nor all old ones",
    names.ROCKSDB_CONFIG: "The broker keeps consumer offsets in RocksDB, which would not change",
    names.ROCKSDB_STORE: "Index, timers and transactions in RocksDB would not follow the log",
    names.COMPACTION: "A broker copies each message of such a topic to compaction/ when it "
    "dispatches it, and serves consumers from there: it would not serve what is dispatched here",
    names.TIERED: "The tiered storage would no longer agree with the log",
    names.PROPERTY_CRC: "Frames would be written without the CRC that the broker checks",
    names.QUEUE_EXT: "Entries would lose the addresses of their extension units",
    names.MULTI_DISPATCH: "With enableMultiDispatch=false in the configuration, these queues would "
    "lose their messages",
    names.CONTROLLER: "The log would no longer agree with the controller's epochs",
    names.LOG_PATH: "The log in commitlog/ may be an old one",
    names.DLEDGER: "The other members of the DLedger group would no longer agree with this log",
}

_OUT = {
    # If the broker was killed, its restart may restore only some of the lost entries.
    names.ROCKSDB_QUEUES: "`logquarry recover` and `rebuild` make new queues in RocksDB if no "
    "queue is in files, and no topic has batch queues (queue.type=BatchCQ); or copy the messages "
    "with `logquarry salvage --into`, which makes a store with queues in files; or start the "
    "broker on the store",
    # A salvage copies the compacted log and the topics, so the new store has the same feature.
    names.COMPACTION: "start the broker on the store: the broker recovers it. Or copy the messages "
    "with `logquarry salvage --into`, which makes an undamaged store with the same compaction "
    "topics: start the broker on it. To get a store without compaction topics, use `logquarry "
    "export` and `logquarry import`",
    names.MULTI_DISPATCH: "leave enableMultiDispatch out of the configuration: the files show it",
    names.DLEDGER: "make a plain store with `logquarry convert STORE --into DIR`",
    names.LOG_PATH: "if commitlog/ holds the whole log, leave storePathCommitLog out of --config",
    names.QUEUE_EXT: "start the broker on the store: the broker recovers it",
    names.PROPERTY_CRC: "write the rows with `logquarry import`, or with put() in Python",
}
_COPY: Final = (
    "copy the messages: `logquarry export`, or `logquarry salvage --into`, which makes a plain "
    "store and lists the parts it omits"
)
_USUAL_OUT: Final = f"start the broker on the store: the broker recovers it; or {_COPY}"
_OUT[names.CONTROLLER] = (
    f"{_USUAL_OUT}; or, for a store without the controller, copy the store without "
    "epochFileCheckpoint and change the copy"
)
_LOST_FILES_OUT: Final = (
    f"put the missing files back from a backup: without them, the broker does not start; or {_COPY}"
)
_ROCKETMQ_MODE: Final = "recovery_mode"
_NOT_AS_ROCKETMQ: Final = frozenset(
    {
        *(names.BATCH_QUEUES, names.INNER_BATCHES, names.ROCKSDB_QUEUES, names.ROCKSDB_STORE),
        *(names.QUEUE_EXT, names.CONTROLLER, names.TIERED, names.LOG_PATH, names.DLEDGER),
        *(names.SEVERAL_LOG_PATHS, names.LOG_ELSEWHERE),
    }
)
"""The recovery mode ``rocketmq`` refuses a store with one of these features."""


def require(layout: StoreLayout, action: Action, *, mode: str = "safe") -> None:
    """Raise UnsupportedStore if a feature of a store forbids an action. The store is only read."""
    error = refusal(layout, action, mode=mode)
    if error is not None:
        raise error


def refusal(
    layout: StoreLayout,
    action: Action,
    *,
    mode: str = "safe",
    may_lack_log: bool = False,
    found: StoreFeatures | None = None,
) -> UnsupportedStore | None:
    """Return the error that :func:`require` raises; None if the store allows the action.

    If ``may_lack_log`` is set, a store without any log file is allowed too. Raises MisnamedFile if
    a log file has a wrong name and the action is not SALVAGE.
    """
    try:
        if may_lack_log:
            # Reading this property raises an error if some log files are in folders that logquarry
            # does not read.
            _ = layout.commit_log
        elif action is not Action.SALVAGE:
            require_log(layout)
        if action is not Action.SALVAGE:
            layout.require_right_names()
    except UnsupportedStore as error:
        return error
    if found is None:
        # Do not look for tags in the index: the writer does this later, when it determines the
        # settings.
        found = names.find_features(layout, index=False)
    for feature in _forbidding(found, layout.config, action):
        return _error(layout.root, feature, action)
    # If a store was not shut down cleanly, a writer recovers it first.
    if mode == "rocketmq" and action in (Action.WRITE, Action.LOAD, Action.RECOVER):
        # If no folder has log files, the log is lost. Allow the recovery, because it reports the
        # loss.
        fits = {names.LOG_ELSEWHERE} if layout.log_folders.feature is None else set()
        unfit = _NOT_AS_ROCKETMQ - fits
        other = next((one for one in found.features if one.name in unfit), None)
        if other is not None:
            return UnsupportedStore(
                f"{layout.root}: it cannot {action.value}: {other.name} "
                f"({', '.join(other.evidence)}): {other.detail}. Recovery mode rocketmq supports "
                "only a log in commitlog/ and queue files. Nothing was changed. Use mode safe",
                feature=_ROCKETMQ_MODE,
                evidence=other.evidence,
            )
    return None


def require_queue(layout: StoreLayout, others: OtherQueues, topic: str) -> None:
    """Refuse a queue of multi-dispatch in RocksDB if multi-dispatch is switched off in the
    configuration.

    Raises UnsupportedStore, because a read of the queue would return wrong messages or miss some.
    """
    is_off = layout.config.enable_multi_dispatch is False
    if topic.startswith(LMQ_PREFIX) and others.has_rocksdb and is_off:
        raise UnsupportedStore(
            f"{layout.root}: the queues of {topic} are in RocksDB. {_OUT[names.MULTI_DISPATCH]}",
            feature=names.ROCKSDB_QUEUES,
        )


def require_consumable(layout: StoreLayout, others: OtherQueues, topics: Iterable[str]) -> None:
    """Refuse to consume topics if their queues or consumer offsets cannot be read.

    Raises:
        UnsupportedStore: if :func:`require_queue` refuses the queues of a topic.
        UsageError: if consumer offsets are in RocksDB, and the package ``rocksdict`` is missing.
    """
    for topic in topics:
        require_queue(layout, others, topic)
    # A group whose stored offset cannot be read would begin to consume at a wrong offset.
    if names.rocksdb_config(layout) is not None and not is_installed():
        raise needs_package(f"{layout.root}: the offsets of its consumer groups are")


def _forbidding(found: StoreFeatures, config: StoreConfig, action: Action) -> Iterator[Feature]:
    # If a store was not shut down cleanly, a writer recovers it first.
    actions = {action, *_IMPLIED.get(action, ())}
    for feature in found.features:
        refused = _REFUSED.get(feature.name, frozenset())
        if feature.name == names.MULTI_DISPATCH and config.enable_multi_dispatch is False:
            refused = _QUEUES
        if feature.name == names.ROCKSDB_QUEUES and _are_all_in_rocksdb(found, feature):
            refused -= {Action.REBUILD_QUEUES, Action.RECOVER}
        if actions & refused:
            yield feature


def _are_all_in_rocksdb(found: StoreFeatures, feature: Feature) -> bool:
    kinds = {*found.queue_kinds.values()} - {"rocksdb"}
    return not kinds and len(feature.evidence) == 1 and feature.evidence[0].endswith(CURRENT)


def _error(root: str, feature: Feature, action: Action) -> UnsupportedStore:
    shown = ", ".join(feature.evidence)
    harm = _HARM.get(feature.name)
    what = f"{root}: it cannot {action.value}: {feature.name} ({shown}): {feature.detail}"
    why = "" if harm is None else f". {harm}"
    out = _OUT.get(feature.name, _USUAL_OUT)
    if feature.name == names.ROCKSDB_STORE and names.lacks_files(feature):
        out = _LOST_FILES_OUT
    return UnsupportedStore(
        f"{what}{why}. Nothing was changed; reading and export work. Way out: {out}",
        feature=feature.name,
        evidence=feature.evidence,
    )
