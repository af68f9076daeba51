"""Refuses a call that would change files of a store that this library does not understand.

Each call that writes calls :func:`require` before its first byte: before the lock file, before
``abort``. A refusal names the feature, the files that show it, the harm that the call would do, the
calls that still work, and the way out (docs/rocketmq-5.md has the table). All combinations that
:data:`_REFUSED` does not list are allowed: real brokers have served every message of such a store
afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from logquarry.config import StoreConfig
from logquarry.errors import UnsupportedStore
from logquarry.log.layout import StoreLayout
from logquarry.read import features as names
from logquarry.read.features import (
    Feature,
    StoreFeatures,
    find_features,
    find_queue_kinds,
    rocksdb_config,
)
from logquarry.read.missing_log import require_log


class Action(Enum):
    """What a call would do to a store; the value completes "cannot ..."."""

    WRITE = "be opened to write"
    RECOVER = "be recovered"
    REBUILD_QUEUES = "get new queues"
    REBUILD_INDEX = "get a new index"
    RETAIN = "have expired files deleted"
    SALVAGE = "be salvaged"


_EACH: Final = frozenset(Action) - {Action.SALVAGE}
_QUEUES: Final = frozenset({Action.WRITE, Action.RECOVER, Action.REBUILD_QUEUES})
_LOG: Final = frozenset({Action.WRITE, Action.RECOVER, Action.RETAIN})

_REFUSED: Final = {
    names.ROCKSDB_QUEUES: _QUEUES | {Action.RETAIN},
    names.ROCKSDB_CONFIG: frozenset({Action.WRITE, Action.RETAIN}),
    names.ROCKSDB_STORE: _EACH,
    names.COMPACTION: _LOG,
    names.TIERED: _EACH,
    names.PROPERTY_CRC: frozenset({Action.WRITE}),
    names.QUEUE_EXT: _QUEUES,
    names.CONTROLLER: _LOG,
    names.LOG_PATH: _EACH,
    names.DLEDGER: _EACH,
}
"""Feature -> the actions that it forbids. A log that is not found as a whole forbids every action
(:mod:`logquarry.log.log_place`)."""

UNPROVEN: frozenset[str] = frozenset({names.SEVERAL_LOG_PATHS, names.LOG_ELSEWHERE})
"""Places of a log that logquarry can write, but with which no broker has been started afterwards.
They forbid every action but salvage."""

_HARM: Final = {
    names.ROCKSDB_QUEUES: "The broker would serve neither new messages nor all old ones: the "
    "queues in RocksDB would not change",
    names.ROCKSDB_CONFIG: "The broker keeps consumer offsets in RocksDB, which would not change",
    names.ROCKSDB_STORE: "Index, timers and transactions in RocksDB would not follow the log",
    names.COMPACTION: "The broker's compacted logs would miss what is put into their queues here",
    names.TIERED: "The tiered storage would no longer agree with the log",
    names.PROPERTY_CRC: "Frames would be written without the CRC that the broker checks",
    names.QUEUE_EXT: "Entries would lose the addresses of their extension units",
    names.MULTI_DISPATCH: "With enableMultiDispatch=false in the configuration, these queues would "
    "lose their messages",
    names.CONTROLLER: "The log would no longer agree with the controller's epochs",
    names.LOG_PATH: "The log in commitlog/ may be an old one",
    names.DLEDGER: "The other members of the DLedger group would no longer agree with this log",
}
"""Feature -> the harm that the refused calls would do to the store."""

_OUT = {
    names.MULTI_DISPATCH: "leave enableMultiDispatch out of the configuration: the files show it",
    names.DLEDGER: "make a plain store with `logquarry convert STORE --into DIR`",
    names.LOG_PATH: "if commitlog/ holds the whole log, leave storePathCommitLog out of --config",
    names.CONTROLLER: "copy the store without epochFileCheckpoint and change the copy",
    names.QUEUE_EXT: "start the broker over the store; it recovers it",
}
"""Feature -> the way out."""
_OUT |= dict.fromkeys(
    (names.SEVERAL_LOG_PATHS, names.LOG_ELSEWHERE),
    "make a plain store with `logquarry convert STORE --into DIR`, or start the broker on the "
    "store: the broker recovers it",
)
_USUAL_OUT: Final = (
    "start the broker over the store, it recovers it; or copy the messages: `logquarry export`, or "
    "`logquarry salvage --into`, which makes a plain store and lists what it leaves behind"
)
_ROCKETMQ_MODE: Final = "recovery_mode"


def require(layout: StoreLayout, action: Action, *, mode: str = "safe") -> None:
    """Refuse an action on a store that has a feature which forbids it. Changes nothing.

    Args:
        layout: the store's files.
        action: the action of the caller.
        mode: ``rocketmq`` if the recovery is to be that of RocketMQ 4.9.3.

    Raises:
        UnsupportedStore: if a feature forbids the action.
    """
    error = refusal(layout, action, mode=mode)
    if error is not None:
        raise error


def refusal(
    layout: StoreLayout, action: Action, *, mode: str = "safe", may_lack_log: bool = False
) -> UnsupportedStore | None:
    """The error of :func:`require`, None if the store allows the action.

    Args:
        layout: the store's files.
        action: the action of the caller.
        mode: ``rocketmq`` if the recovery is to be that of RocketMQ 4.9.3.
        may_lack_log: whether the action is allowed if all files of the log are missing.

    Raises:
        MisnamedFile: if a file of the log has a wrong name, and the caller relies on names.
    """
    try:
        if may_lack_log:
            # This raises if files of the log are in other folders.
            _ = layout.commit_log
        elif action is not Action.SALVAGE:
            require_log(layout)
        if action is not Action.SALVAGE:
            layout.require_right_names()
    except UnsupportedStore as error:
        return error
    # Only the version of the writer depends on the index, which is read again for the settings.
    found = find_features(layout, index=mode == "rocketmq")
    for feature in _forbidding(found, layout.config, action):
        return _error(layout.root, feature, action)
    place = layout.log_folders.feature
    if place in UNPROVEN and action in _EACH and (feature_of := found.get(place)) is not None:
        return _error(layout.root, feature_of, action)
    # Opening a store for writing recovers it if it was not shut down cleanly.
    if mode == "rocketmq" and action in (Action.WRITE, Action.RECOVER) and found.writer.is_5:
        shown = ", ".join(found.writer.evidence)
        return UnsupportedStore(
            f"{layout.root}: RocketMQ {found.writer} wrote it ({shown}); recovery mode rocketmq is "
            "that of 4.9.3, which cuts the log at the first frame of a kind that it does not know. "
            "Nothing was changed. Use mode safe",
            feature=_ROCKETMQ_MODE,
            evidence=found.writer.evidence,
        )
    if mode == "rocketmq" and layout.log_folders.feature is not None:
        return UnsupportedStore(
            f"{layout.root}: its log is in {', '.join(layout.log_folders.paths)}; recovery mode "
            "rocketmq reads only commitlog/. Nothing was changed. Use mode safe",
            feature=_ROCKETMQ_MODE,
            evidence=layout.log_folders.paths,
        )
    return None


@dataclass(frozen=True, slots=True)
class OtherQueues:
    """The queues of a store that are no files of 20-byte entries.

    Attributes:
        batch: topics with batch queues.
        has_rocksdb: whether queues are in RocksDB; which topics have any is not known then.
    """

    batch: frozenset[str]
    has_rocksdb: bool

    def __bool__(self) -> bool:
        return self.has_rocksdb or bool(self.batch)


def other_queues(layout: StoreLayout) -> OtherQueues:
    """The queues of a store that are no files of 20-byte entries. Reads names and topics.json."""
    kinds, has_rocksdb = find_queue_kinds(layout)
    return OtherQueues(
        frozenset(topic for topic, kind in kinds.items() if kind == "batch"), has_rocksdb
    )


def require_queue(layout: StoreLayout, others: OtherQueues, topic: str) -> None:
    """Refuse to read a queue whose messages would be wrong or missing.

    Args:
        layout: the store's files.
        others: see :func:`other_queues`.
        topic: the queue's topic.

    Raises:
        UnsupportedStore: for a queue of multi-dispatch in RocksDB, if the configuration switches it
            off.
    """
    is_off = layout.config.enable_multi_dispatch is False
    if topic.startswith("%LMQ%") and others.has_rocksdb and is_off:
        raise UnsupportedStore(
            f"{layout.root}: the queues of {topic} are in RocksDB. {_OUT[names.MULTI_DISPATCH]}",
            feature=names.ROCKSDB_QUEUES,
        )


def require_consumable(layout: StoreLayout, others: OtherQueues, topics: Iterable[str]) -> None:
    """Refuse to consume topics whose queues or offsets are not read.

    Args:
        layout: the store's files.
        others: see :func:`other_queues`.
        topics: the topics that are to be consumed.

    Raises:
        UnsupportedStore: if one has queues that :func:`require_queue` refuses, or if the offsets
            of the groups are in RocksDB: each group would begin at a wrong offset.
    """
    for topic in topics:
        require_queue(layout, others, topic)
    found = rocksdb_config(layout)
    if found is not None:
        raise UnsupportedStore(
            f"{layout.root}: the offsets of its consumer groups are in RocksDB "
            f"({', '.join(found.evidence)}), which is not read: a group would begin anywhere. Read "
            "queues with get(), or the log with scan()",
            feature=found.name,
            evidence=found.evidence,
        )


def _forbidding(found: StoreFeatures, config: StoreConfig, action: Action) -> Iterator[Feature]:
    # A store that is opened to write may have to be recovered first.
    actions = {action, Action.RECOVER} if action is Action.WRITE else {action}
    for feature in found.features:
        refused = _REFUSED.get(feature.name, frozenset())
        if feature.name == names.MULTI_DISPATCH and config.enable_multi_dispatch is False:
            refused = _QUEUES
        if actions & refused:
            yield feature


def _error(root: str, feature: Feature, action: Action) -> UnsupportedStore:
    shown = ", ".join(feature.evidence)
    harm = _HARM.get(feature.name)
    what = f"{root}: it cannot {action.value}: {feature.name} ({shown}): {feature.detail}"
    why = "" if harm is None else f". {harm}"
    out = _OUT.get(feature.name, _USUAL_OUT)
    return UnsupportedStore(
        f"{what}{why}. Nothing was changed; reading and export work. Way out: {out}",
        feature=feature.name,
        evidence=feature.evidence,
    )
