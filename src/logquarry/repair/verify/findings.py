"""What a check can find, and what each kind means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from logquarry.format.frame import DamageKind
from logquarry.log.walk import MISSING_FILE, TORN_TAIL

Severity = Literal["damage", "note"]

KINDS: Final[Mapping[str, tuple[Severity, str]]] = {
    **{
        kind.label: ("damage", meaning)
        for kind, meaning in {
            DamageKind.ZEROED: "zeros where a frame or a blank must stand",
            DamageKind.TRUNCATED: "the file ends within the log",
            DamageKind.BAD_MAGIC: "no frame's magic code",
            DamageKind.BAD_SIZE: "TOTALSIZE cannot be",
            DamageKind.BAD_PHYSICAL_OFFSET: "the frame names another place than its own",
            DamageKind.BAD_BODY_LENGTH: "BODYLEN cannot be",
            DamageKind.BAD_TOPIC_LENGTH: "TOPICLEN cannot be",
            DamageKind.BAD_PROPERTIES_LENGTH: "PROPERTIESLEN cannot be",
            DamageKind.BAD_LENGTH_SUM: "the parts of the frame do not add up",
            DamageKind.BAD_BODY_CRC: "the body is not what its CRC says",
            DamageKind.BAD_BLANK: "a blank that does not fill its file",
        }.items()
    },
    MISSING_FILE: ("damage", "a part of the log has no file"),
    TORN_TAIL: ("damage", "bytes after the log's last frame that are neither a frame nor zeros"),
    "wrong_file_size": ("damage", "a file of another size than its neighbours"),
    "suspect_text": ("damage", "NUL bytes or invalid UTF-8 in a topic or in properties"),
    "queue_missing": ("damage", "messages of a queue that has no files"),
    "queue_behind": ("damage", "the queue ends before the log does"),
    "queue_ahead": ("damage", "units for messages beyond the log's end"),
    "queue_hole": ("damage", "a unit that was never written, and later ones that were"),
    "queue_entry_wrong": ("damage", "a unit that does not say what its message says"),
    "queue_entry_dangling": ("damage", "a unit that points at no frame"),
    "queue_head_missing": ("damage", "the log has messages from before the queue's first unit"),
    "queue_misplaced": ("damage", "units whose place is not their messages' queue offset"),
    "queue_file_missing": ("damage", "a file is missing between two of a queue"),
    "queue_filler": (
        "note",
        "a unit that stands for a lost message, so that later ones keep theirs",
    ),
    "queue_in_damage": ("note", "units of messages that stood in a damaged part of the log"),
    "index_header": ("damage", "an index header that cannot be"),
    "index_chain": ("damage", "a chain of the index that does not lead back through its entries"),
    "index_entry": ("damage", "an index entry that points at no frame"),
    "index_entry_wrong": ("damage", "an index entry whose hash is of no key of its message"),
    "index_ahead": ("damage", "index entries for messages beyond the log's end"),
    "index_shape": ("note", "slots and entries of an index file cannot be told from it"),
    "index_missing": ("note", "messages have keys, and there is no index"),
    "index_gap": ("note", "keys between an index file's first message and its last are not in it"),
    "index_behind": ("note", "the last keys are not in the index"),
    "state_table_wrong": (
        "damage",
        "the state table of 3.x does not say which transactions are open",
    ),
    "state_table_stale": (
        "note",
        "what RocketMQ leaves of a state table: no unit without a group, ends missed, numbers anew",
    ),
    "redo_log_wrong": ("damage", "the redo log of 3.x does not have what the log has"),
    "bad_config": ("damage", "a file in config/ that is not what it should be"),
    "checkpoint_missing": ("note", "there is no checkpoint"),
    "checkpoint_zero": ("note", "the checkpoint is all zeros"),
    "checkpoint_ahead": ("note", "the checkpoint is later than the last message"),
    "checkpoint_short": ("damage", "the checkpoint is too short to be one"),
    "abort_file": ("note", "the store was not closed in order"),
    "live": ("note", "a process has the store open"),
    "stale_frames": ("note", "sound frames beyond the log's end, left over: they are no messages"),
    "oversized": ("note", "a frame that is larger than maxMessageSize: no broker would take it"),
    "durable_mark_invalid": ("note", "the durable mark is torn, or no such file"),
    "durable_mark_foreign": ("note", "another program has opened the store since the durable mark"),
    "durable_mark_ahead": ("note", "the durable mark lies behind the last frame"),
    "leftover": ("note", "files of work that was interrupted"),
    "unfinished_load": ("note", "rows that a Spark job was bringing into the log when it ended"),
    "new_epoch": ("note", "a queue's offsets start again: its topic was deleted and made anew"),
    "unknown_file": ("note", "a name that is no store file's"),
    "empty_file": (
        "note",
        "a file of no bytes at the end of the log, from a crash while it was made",
    ),
}
"""Each kind with its severity and meaning."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    Attributes:
        kind: one of :data:`KINDS`.
        severity: ``damage``, or ``note`` for what is worth knowing and no damage.
        file: path below the store's root.
        offset: in the commit log a physical offset, elsewhere a position in the file.
        length: bytes it is about, 0 where that says nothing.
        reason: in words.
    """

    kind: str
    severity: Severity
    file: str
    offset: int
    length: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The finding as it stands in ``verify --json``."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class VerifyReport:
    """All that was found in a store, and what was looked at.

    Attributes:
        store: path or URL of the store.
        findings: in the order of the log, then queues, index and the rest.
        counts: numbers by name: messages, bytes, blanks, files, queue entries, index entries.
    """

    store: str
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def has_damage(self) -> bool:
        """Whether anything but notes was found."""
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
        """Add a finding; its severity is the kind's, or a note where a crash explains it."""
        severity, _ = KINDS[kind]
        severity = "note" if is_explained else severity
        self.findings.append(Finding(kind, severity, file, offset, length, reason))

    def downgrade(self, kinds: frozenset[str]) -> None:
        """Turn findings of some kinds into notes: beside a live writer they come and go."""
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
    lines = ["| kind | severity | meaning |", "|---|---|---|"]
    lines += [f"| {kind} | {severity} | {text} |" for kind, (severity, text) in KINDS.items()]
    return "\n".join(lines)
