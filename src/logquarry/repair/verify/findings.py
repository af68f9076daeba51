"""Findings of verify: their kinds with severity, meaning and next step, and the report.

A report may have many findings, but the user types one command at a time (:func:`next_step`). A
recovery comes first, because queues and index are built from the log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal, NamedTuple

from logquarry.format.frame import DamageKind
from logquarry.log.store_files import CONFIG
from logquarry.log.walk import MISSING_FILE, TORN_TAIL
from logquarry.repair.audit.differences import Difference


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


Severity = Literal["damage", "note"]

KINDS: Final[Mapping[str, tuple[Severity, str]]] = {
    **{
        kind.label: ("damage", meaning)
        for kind, meaning in {
            DamageKind.ZEROED: "zeros instead of a frame or a blank",
            DamageKind.TRUNCATED: "the file is too short: the log continues behind its end",
            DamageKind.BAD_MAGIC: "MAGICCODE is not that of a frame or a blank",
            DamageKind.BAD_SIZE: "TOTALSIZE is impossible",
            DamageKind.BAD_PHYSICAL_OFFSET: "PHYSICALOFFSET is not the frame's own physical offset",
            DamageKind.BAD_BODY_LENGTH: "BODYLEN is impossible",
            DamageKind.BAD_TOPIC_LENGTH: "TOPICLEN is impossible",
            DamageKind.BAD_PROPERTIES_LENGTH: "PROPERTIESLEN is impossible",
            DamageKind.BAD_LENGTH_SUM: "the lengths of its parts do not add up to TOTALSIZE",
            DamageKind.BAD_BODY_CRC: "the body does not match BODYCRC",
            DamageKind.UNREADABLE: "the disk does not deliver these bytes",
            DamageKind.BAD_BLANK: "a blank that does not reach the end of its file",
        }.items()
    },
    MISSING_FILE: ("damage", "a file of the log is missing"),
    TORN_TAIL: ("damage", "bytes after the log's last frame that are neither a frame nor zeros"),
    "misnamed_file": ("damage", "a log file whose frames show that its name is wrong"),
    "wrong_file_size": ("damage", "a file whose size differs from that of its neighbours"),
    "bad_property_crc": (
        "damage",
        "the frame does not match its property CRC (enabledAppendPropCRC), but its body is right",
    ),
    "suspect_text": ("damage", "NUL bytes or invalid UTF-8 in a topic or in properties"),
    "queue_missing": ("damage", "the log has messages of a queue that has no files"),
    "bad_rocksdb": ("damage", "RocksDB cannot read the queues"),
    "queue_behind": ("damage", "the queue lacks the last messages of the log"),
    "queue_ahead": ("damage", "queue entries for messages beyond the log's end"),
    "queue_hole": ("damage", "an empty entry before entries that were written"),
    "queue_entry_wrong": ("damage", "an entry that does not match its message"),
    "queue_entry_dangling": ("damage", "an entry that points to no frame"),
    "queue_head_missing": ("damage", "the log has messages from before the queue's first entry"),
    "queue_misplaced": (
        "damage",
        "entries whose position is not the queue offset of their messages",
    ),
    "queue_file_missing": ("damage", "a file is missing between two files of a queue"),
    "misnamed_queue_file": (
        "note",
        "a queue file whose entries belong to another queue or position; explains its findings",
    ),
    "queue_filler": (
        "note",
        "a filler entry for a lost message, so that later queue offsets stay the same",
    ),
    "queue_in_damage": ("note", "entries of messages in a damaged part of the log"),
    "index_header": ("damage", "an impossible index header"),
    "index_chain": ("damage", "an index chain that does not lead from newer to older entries"),
    "index_entry": ("damage", "an index entry that points to no frame"),
    "index_entry_wrong": ("damage", "an index entry whose hash matches no key of its message"),
    "index_ahead": ("damage", "index entries for messages beyond the log's end"),
    "index_shape": (
        "note",
        "the numbers of slots and entries cannot be inferred from the index file",
    ),
    "index_missing": ("note", "messages have keys, but there is no index"),
    "index_gap": (
        "note",
        "an index file lacks keys of messages between its first and its last message",
    ),
    "index_behind": ("note", "the index lacks the keys of the last messages"),
    "state_table_wrong": (
        "damage",
        "the state table of 3.x does not match the open transactions in the log",
    ),
    "state_table_stale": (
        "note",
        "state table with RocketMQ's own errors: missing entries, missed ends, restarted numbers",
    ),
    "redo_log_wrong": ("damage", "the redo log of 3.x does not match the log"),
    "timer_check_wrong": (
        "damage",
        "config/timercheck is too short, or its numbers are impossible",
    ),
    "timer_check_ahead": (
        "note",
        "config/timercheck names an offset after the end of the queue of rmq_sys_wheel_timer",
    ),
    "timer_entry_wrong": ("damage", "a slot of the timer wheel leads to no timer message"),
    "timer_missing": ("damage", "the timer wheel lacks a message that waits for its time"),
    "compaction_wrong": (
        "damage",
        "a damaged or missing message in the compacted log of a compaction topic",
    ),
    "bad_config": ("damage", "an invalid file in config/"),
    "bad_settings": ("note", "the record of the settings cannot be read"),
    "checkpoint_missing": ("note", "there is no checkpoint"),
    "checkpoint_zero": ("note", "the checkpoint is all zeros"),
    "checkpoint_ahead": ("note", "the checkpoint is later than the last message"),
    "checkpoint_short": ("damage", "the checkpoint file is too short"),
    "abort_file": ("note", "the file abort exists: the store had no clean shutdown"),
    "live": ("note", "a process has the store open"),
    "stale_frames": (
        "note",
        "sound frames beyond the log's end, left by an earlier truncation: not messages",
    ),
    "stale_bytes": (
        "note",
        "bytes of earlier messages after the log's end, from a broker with writeWithoutMmap",
    ),
    "oversized": ("note", "a frame larger than maxMessageSize: no broker would accept it"),
    "durable_mark_invalid": ("note", "the file of the durable offset is torn or invalid"),
    "durable_mark_foreign": (
        "note",
        "another program has written the store since the durable offset",
    ),
    "durable_mark_ahead": ("note", "the durable offset is beyond the last frame"),
    "leftover": ("note", "files that an interrupted command left"),
    "unfinished_load": ("note", "a Spark load ended before all its rows were in the log"),
    "new_epoch": ("note", "queue offsets restart: the topic was deleted and created again"),
    "unknown_file": ("note", "a file name that a store does not use"),
    "empty_file": (
        "note",
        "a file of 0 bytes at the log's end: a crash during its creation",
    ),
}
"""Each kind with its severity and meaning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of verify.

    Attributes:
        kind: one of :data:`KINDS`.
        severity: ``damage``, or ``note`` for a fact that is no damage.
        file: path below the store's folder.
        offset: in the commit log a physical offset, elsewhere a position in the file.
        length: bytes concerned, 0 if unknown.
        reason: the finding in words.
    """

    kind: str
    severity: Severity
    file: str
    offset: int
    length: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The finding as an object of ``verify --json``."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class VerifyReport:
    """The findings of one store.

    Attributes:
        store: path or URL of the store.
        findings: those of the log in its order, then of queues, index and the rest.
        counts: numbers by name: messages, bytes, blanks, files, queue entries, index entries.
        recorded: physical offsets of the damage that a recovery has recorded.
    """

    store: str
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)

    @property
    def has_damage(self) -> bool:
        """Whether any finding is damage."""
        return any(finding.severity == "damage" for finding in self.findings)

    @property
    def by_kind(self) -> Counter[str]:
        """How many findings there are of each kind."""
        return Counter(finding.kind for finding in self.findings)

    def add(
        self,
        kind: str,
        file: str,
        offset: int,
        reason: str,
        length: int = 0,
        *,
        is_explained: bool = False,
    ) -> None:
        """Add a finding. It is a note if a crash explains it, else it has its kind's severity."""
        severity, _ = KINDS[kind]
        severity = "note" if is_explained else severity
        self.findings.append(Finding(kind, severity, file, offset, length, reason))

    def add_all(self, differences: Iterable[Difference]) -> None:
        """Add a finding for each difference between log, queues and index."""
        for found in differences:
            self.add(
                *(found.kind, found.file, found.offset, found.reason, found.length),
                is_explained=found.is_explained,
            )

    def downgrade(self, kinds: frozenset[str]) -> None:
        """Turn findings of some kinds into notes."""
        self.findings = [
            Finding(f.kind, "note", f.file, f.offset, f.length, f.reason) if f.kind in kinds else f
            for f in self.findings
        ]

    def to_json(self) -> dict[str, Any]:
        """The document of ``verify --json``."""
        return {
            "store": self.store,
            "findings": [finding.to_json() for finding in self.findings],
            "counts": self.counts,
        }


def markdown() -> str:
    """The kinds as a table for the documentation."""
    lines = ["| kind | severity | meaning | next step |", "|---|---|---|---|"]
    lines += [
        f"| {kind} | {severity} | {text} | {step_words(kind)} |"
        for kind, (severity, text) in KINDS.items()
    ]
    return "\n".join(lines)


class Next(NamedTuple):
    """The next step for a store.

    Attributes:
        words: command and options to put around the store's path, the command first.
        before: what the user does before typing the command; empty if nothing.
    """

    words: tuple[str, ...]
    before: str = ""


def next_step(report: VerifyReport) -> Next | None:
    """The next step after a verification; None if there is nothing to do."""
    damage = [finding for finding in report.findings if finding.severity == "damage"]
    kinds = {finding.kind for finding in report.findings}
    if not damage and ("abort_file" not in kinds or "live" in kinds):
        return None
    harmed = {kind.label for kind in DamageKind} | {MISSING_FILE}
    recorded = [f for f in damage if f.kind in harmed and f.offset in report.recorded]
    actions = {_action(found) for found in damage if found not in recorded}
    is_built = actions & {Action.QUEUES, Action.INDEX}
    if "abort_file" in kinds and (is_built or not damage):
        actions.add(Action.RECOVER)
    if not report.counts.get("log_files") and damage:
        return Next(("verify",), "mount the disk of commitlog/, or put its files back")
    before = "stop the process that has the store open" if "live" in kinds else ""
    if "://" in report.store and not report.store.startswith("file:"):
        # Every repair needs a local folder; a salvage reads the store where it is.
        return Next(("salvage", "--into", "DIR"), before)
    if Action.RECOVER in actions:
        return Next(("recover",), before)
    if is_built:
        only = [] if len(is_built) > 1 else ["--queues" if Action.QUEUES in actions else "--index"]
        return Next(("rebuild", "--in-place", *only), before)
    if recorded:
        return Next(("salvage", "--into", "DIR"), before)
    if Action.RESTORE in actions:
        file = next(f.file for f in damage if _action(f) is Action.RESTORE)
        return Next(("verify",), f"put {file} back from a backup or from {file}.bak")
    place = str(next(f.offset for f in damage if _action(f) is Action.READ))
    return Next(("messages", "--offset", place))


def _action(finding: Finding) -> Action:
    action = STEPS[finding.kind][0]
    # A recovery does not replace the files of a broker's configuration; a rebuild makes timercheck.
    if finding.file.startswith(f"{CONFIG}/") and action is not Action.QUEUES:
        return Action.RESTORE
    return action
