"""The next step for each kind of finding."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from logquarry.format.frame import DamageKind
from logquarry.log.walk import MISSING_FILE, TORN_TAIL


class Action(Enum):
    """What the user does about a finding; the most urgent first."""

    RECOVER = "`recover`"
    QUEUES = "`rebuild --queues`"
    INDEX = "`rebuild --index`"
    RESTORE = "put the file back from a backup or from its `.bak` file"
    READ = "read the message with `messages --offset`; its text cannot be restored"
    NOTHING = "nothing"


_LOG_DAMAGE: Final = "`recover`; if a recovery has recorded it: `salvage`"

STEPS: Final[Mapping[str, tuple[Action, str]]] = {
    **{kind.label: (Action.RECOVER, _LOG_DAMAGE) for kind in DamageKind},
    MISSING_FILE: (
        Action.RECOVER,
        "put the file back from a backup, else `recover`; if a recovery has recorded it: `salvage`",
    ),
    TORN_TAIL: (Action.RECOVER, ""),
    "misnamed_file": (Action.RECOVER, ""),
    "misnamed_queue_file": (Action.NOTHING, "the next step of the damage"),
    "wrong_file_size": (Action.RECOVER, ""),
    "bad_property_crc": (Action.READ, ""),
    "suspect_text": (Action.READ, ""),
    "compaction_wrong": (
        Action.READ,
        "read the topic with `messages`: the log may still have the message",
    ),
    "queue_missing": (Action.QUEUES, ""),
    "bad_rocksdb": (Action.QUEUES, ""),
    "queue_behind": (Action.QUEUES, ""),
    "queue_ahead": (Action.RECOVER, ""),
    "queue_hole": (Action.QUEUES, ""),
    "queue_entry_wrong": (Action.QUEUES, ""),
    "queue_entry_dangling": (Action.QUEUES, ""),
    "queue_head_missing": (Action.QUEUES, ""),
    "queue_misplaced": (Action.QUEUES, ""),
    "queue_file_missing": (Action.QUEUES, ""),
    "queue_filler": (Action.NOTHING, "nothing: consumers skip it"),
    "queue_in_damage": (Action.NOTHING, "the next step of the damage"),
    "index_header": (Action.INDEX, ""),
    "index_chain": (Action.INDEX, ""),
    "index_entry": (Action.INDEX, ""),
    "index_entry_wrong": (Action.INDEX, ""),
    "index_ahead": (Action.INDEX, ""),
    "index_shape": (Action.NOTHING, "pass `--config broker.conf` to commands that ask for it"),
    "index_missing": (Action.NOTHING, "`rebuild --index`, if queries by key must find messages"),
    "index_gap": (Action.NOTHING, "`rebuild --index`, if queries by key must find all messages"),
    "index_behind": (Action.NOTHING, "nothing: the next writer adds the keys"),
    "state_table_wrong": (Action.RECOVER, ""),
    "state_table_stale": (Action.NOTHING, ""),
    "redo_log_wrong": (Action.RECOVER, ""),
    "timer_check_wrong": (Action.QUEUES, ""),
    "timer_check_ahead": (Action.NOTHING, "nothing: the broker continues at the queue's end"),
    "timer_entry_wrong": (Action.QUEUES, ""),
    "timer_missing": (Action.QUEUES, ""),
    "bad_config": (Action.RESTORE, ""),
    "bad_settings": (Action.NOTHING, "nothing: the next writer replaces them"),
    "checkpoint_missing": (Action.NOTHING, "nothing: the next writer makes one"),
    "checkpoint_zero": (Action.NOTHING, "nothing: the next writer fills it"),
    "checkpoint_ahead": (Action.NOTHING, ""),
    "checkpoint_short": (Action.RECOVER, ""),
    "abort_file": (Action.RECOVER, "`recover`, if no broker has the store open"),
    "live": (Action.NOTHING, "stop the process before a repair"),
    "stale_frames": (
        Action.NOTHING,
        "nothing; `salvage --include-stale` if you need these messages",
    ),
    "stale_bytes": (Action.NOTHING, "nothing: the next writer overwrites them"),
    "oversized": (Action.NOTHING, ""),
    "durable_mark_invalid": (Action.NOTHING, "nothing: the next writer replaces it"),
    "durable_mark_foreign": (Action.NOTHING, "nothing: the next writer replaces it"),
    "durable_mark_ahead": (Action.NOTHING, "`recover`, if other findings are damage"),
    "leftover": (Action.NOTHING, "nothing: the next run of that command removes them"),
    "unfinished_load": (Action.NOTHING, "run the load again"),
    "new_epoch": (Action.NOTHING, ""),
    "unknown_file": (Action.NOTHING, "move the file out of the store"),
    "empty_file": (Action.NOTHING, "`recover`, if RocketMQ must start with the store"),
}
"""Kind of finding -> its action, and the words of the docs (empty: those of the action)."""


def step_words(kind: str) -> str:
    """The next step for a kind of finding, as the docs have it."""
    action, words = STEPS[kind]
    return words or action.value
