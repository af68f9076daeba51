"""The findings of verify: their kinds, each with severity, meaning and next step, and the report
that lists findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Literal, NamedTuple

from logquarry.format.frame import DamageKind
from logquarry.log.store_files import CONFIG, INDEX
from logquarry.log.walk import MISSING_FILE, TORN_TAIL
from logquarry.text import document


class Action(Enum):
    """The user's next step for a finding."""

    RECOVER = "`recover`"
    QUEUES = "`rebuild --queues`"
    INDEX = "`rebuild --index`"
    RESTORE = "put the file back from a backup or from its `.bak` file"
    RENAME = "rename or move the file as the reason says"
    MOVE = "move it out of the store; a broken link: mount the target's disk, or correct the link"
    SALVAGE = "`salvage --into DIR`, which corrects the offset"
    READ = "read the message with `messages --offset`; the changed bytes cannot be restored"
    NOTHING = "nothing"


_LOG_DAMAGE: Final = "`recover`; after a recovery: `salvage`"

Severity = Literal["damage", "note"]


class Kind(NamedTuple):
    """One kind of finding, with the texts that verify and the docs show for it.

    Attributes:
        severity: ``damage``, or ``note`` for a fact that is not damage.
        meaning: what a finding of this kind means, as text for the docs.
        words: the next step, as text for the docs. If ``words`` is empty, the docs show
            ``action.value``.
    """

    severity: Severity
    meaning: str
    action: Action
    words: str = ""

    @property
    def step(self) -> str:
        """The next step, as text for the docs."""
        return self.words or self.action.value


def _damage(action: Action, meaning: str, words: str = "") -> Kind:
    return Kind("damage", meaning, action, words)


def _note(meaning: str, words: str = "", *, action: Action = Action.NOTHING) -> Kind:
    return Kind("note", meaning, action, words)


KINDS: Final[Mapping[str, Kind]] = {
    **{
        kind.label: _damage(Action.RECOVER, meaning, _LOG_DAMAGE)
        for kind, meaning in {
            DamageKind.ZEROED: "zeros instead of a frame or a blank",
            DamageKind.TRUNCATED: "the file is too short, and the log continues after it",
            DamageKind.BAD_MAGIC: "MAGICCODE is neither that of a frame nor that of a blank",
            DamageKind.BAD_SIZE: "TOTALSIZE is impossible",
            DamageKind.BAD_PHYSICAL_OFFSET: "PHYSICALOFFSET is not the frame's own physical offset",
            DamageKind.BAD_BODY_LENGTH: "BODYLEN is impossible",
            DamageKind.BAD_TOPIC_LENGTH: "TOPICLEN is impossible",
            DamageKind.BAD_PROPERTIES_LENGTH: "PROPERTIESLEN is impossible",
            DamageKind.BAD_LENGTH_SUM: "the lengths of the parts do not add up to TOTALSIZE",
            DamageKind.BAD_BODY_CRC: "the body does not match BODYCRC",
            DamageKind.BAD_BLANK: "a blank that does not reach the end of its file",
            DamageKind.UNREADABLE: "the disk returns an error for these bytes",
        }.items()
    },
    MISSING_FILE: _damage(
        Action.RECOVER,
        "a file of the log is missing",
        "put the file back from a backup, else `recover`; after a recovery: `salvage`",
    ),
    TORN_TAIL: _damage(
        Action.RECOVER, "bytes after the log's last frame that are neither a frame nor zeros"
    ),
    "misnamed_file": _damage(
        Action.RECOVER, "the frames in a log file show that its name is wrong"
    ),
    "misnamed_entries": _damage(
        Action.RENAME, "the first entry of a file of a DLedger log shows that its name is wrong"
    ),
    "wrong_file_size": _damage(
        Action.RECOVER,
        "a log file or queue file does not have the size that such files have in this store",
    ),
    "bad_property_crc": _damage(
        Action.READ,
        "the frame does not match its property CRC (enabledAppendPropCRC), but its body is intact",
    ),
    "harmed_queue_offset": _damage(
        Action.SALVAGE,
        "the queue offset in a frame has changed. The message has its right place in the queue, so"
        " consumers get it. But if a client commits this wrong offset, the client "
        "repeats or skips messages. A `get` from a batch queue raises an error at this frame",
    ),
    "harmed_queue_id": _damage(
        Action.READ,
        "the topic or the queue id in a frame has changed. If the right queue is known, the "
        "message is in this queue, so consumers get it. Otherwise the message is in no queue. The "
        "column REASON shows whether the message is in a queue",
        "nothing: `recover` and `rebuild` keep the message in its right queue, and `salvage` "
        "corrects the frame. If the message is in no queue, read it with `messages --offset`",
    ),
    "harmed_transaction_type": _damage(
        Action.SALVAGE,
        "the transaction type in a frame has changed to PREPARED or ROLLBACK (bits of SYSFLAG, "
        "which no CRC covers). The message is in its queue, so consumers get it. But if RocketMQ "
        "makes the queue again from the log, the message is in no queue",
        "`salvage --into DIR`, which corrects the frame. `recover` and `rebuild` do not correct "
        "the frame, and keep the message in its queue. `rebuild --index` leaves out the keys of a "
        "message that has become a ROLLBACK",
    ),
    "suspect_text": _damage(Action.READ, "NUL bytes or invalid UTF-8 in a topic or in properties"),
    "queue_missing": _damage(
        Action.QUEUES,
        "the log has messages of this queue, but the queue has no files. If the topic was deleted, "
        "the finding is only a note",
    ),
    "bad_rocksdb": _damage(Action.QUEUES, "RocksDB cannot read the queues"),
    "queue_behind": _damage(
        Action.QUEUES, "the queue lacks entries for its last messages in the log"
    ),
    "queue_ahead": _damage(Action.RECOVER, "queue entries for messages beyond the log's end"),
    "queue_end_wrong": _damage(
        Action.QUEUES,
        "the recorded end of a queue in RocksDB is after the queue's last entry, so new messages "
        "get wrong offsets",
    ),
    "queue_hole": _damage(
        Action.QUEUES, "an entry was never written, although later entries were written"
    ),
    "queue_entry_wrong": _damage(Action.QUEUES, "an entry does not match its message"),
    "queue_entry_dangling": _damage(Action.QUEUES, "an entry points to no frame"),
    "queue_head_missing": _damage(
        Action.QUEUES,
        "the log has messages of the queue that are older than the queue's first entry",
    ),
    "queue_misplaced": _damage(
        Action.QUEUES, "entries are not at the queue offsets of their messages"
    ),
    "queue_file_missing": _damage(Action.QUEUES, "a file is missing between two files of a queue"),
    "misnamed_queue_file": _note(
        "the name of a queue file is wrong: its entries belong to another queue or position. If "
        "`verify` has other findings for this file, the wrong name is their cause",
        "the next step of the other findings for this file",
    ),
    "queue_filler": _note(
        "a filler entry replaces a lost message, so that later queue offsets stay unchanged",
        "nothing: consumers skip it",
    ),
    "queue_ends_in_filler": _note(
        "the last entry of a queue is a filler: RocketMQ delivers no new messages of any queue "
        "before the log has reached 2 GiB",
        "`salvage`, if you want to open the store with RocketMQ",
    ),
    "queue_in_damage": _note(
        "entries of messages in a damaged part of the log",
        "the next step of the finding for the damaged part of the log",
    ),
    "index_header": _damage(
        Action.INDEX,
        "the header of an index file has impossible values, or does not match the file's entries "
        "and messages",
    ),
    "index_chain": _damage(
        Action.INDEX,
        "the index entries of one slot, which form a linked list, are not linked from newer to "
        "older entries",
    ),
    "index_entry": _damage(Action.INDEX, "an index entry points to no frame"),
    "index_entry_wrong": _damage(
        Action.INDEX, "the hash of an index entry matches no key of its message"
    ),
    "index_ahead": _damage(Action.INDEX, "index entries for messages beyond the log's end"),
    "index_shape": _note(
        "the index file does not show how many slots and entries it can hold",
        "pass `--config broker.conf` to commands that ask for it",
    ),
    "index_missing": _note(
        "messages have keys, but there is no index",
        "`rebuild --index`, so that queries by key find the messages",
    ),
    "index_gap": _note(
        "the index lacks keys of messages that are older than the last message in the index",
        "`rebuild --index`, so that queries by key find all messages",
    ),
    "index_behind": _note(
        "the index lacks the keys of the last messages", "nothing: the next writer adds the keys"
    ),
    "state_table_wrong": _damage(
        Action.RECOVER, "the state table of 3.x does not match the open transactions in the log"
    ),
    "state_table_stale": _note(
        "the state table has errors that RocketMQ 3.x makes: it lacks entries; or it shows ended "
        "transactions as open, or with another outcome; or it is a new table whose entries are "
        "numbered from 0"
    ),
    "redo_log_wrong": _damage(Action.RECOVER, "the redo log of 3.x does not match the log"),
    "timer_check_wrong": _damage(
        Action.QUEUES, "config/timercheck is too short, or its values are impossible"
    ),
    "timer_check_ahead": _note(
        "the queue offset in config/timercheck is after the end of rmq_sys_wheel_timer's queue",
        "nothing: the broker continues at the queue's end",
    ),
    "timer_entry_wrong": _damage(
        Action.QUEUES, "a slot of the timer wheel does not lead to a timer message"
    ),
    "timer_missing": _damage(
        Action.QUEUES, "the timer wheel lacks a message that the broker must still deliver"
    ),
    "compaction_wrong": _damage(
        Action.READ,
        "a damaged or missing message in the compacted log of a compaction topic",
        "read the topic with `messages`: the log may still have the message",
    ),
    "wrong_entry": _damage(
        Action.MOVE,
        "a file of the store must be at this path. But the path is a folder, a pipe, a broken link,"
        " a link to another file of the store, or a file that cannot be opened",
        "move this folder, pipe, link or file out of the store. If it is a broken link, you can "
        "instead mount the disk of the link's target, or correct the link",
    ),
    "bad_config": _damage(Action.RESTORE, "an invalid file in config/"),
    "bad_epochs": _damage(
        Action.RESTORE,
        "the list of the controller's epochs (epochFileCheckpoint) is invalid. A broker reads "
        "epochFileCheckpoint.bak instead. If epochFileCheckpoint.bak is invalid too, the broker "
        "cannot find where its log begins to differ from the master's log",
        "put the file back from a backup. Or make the member again: start the broker with an empty "
        "store as a slave, which then copies the log of the master",
    ),
    "bad_rocksdb_store": _damage(
        Action.RESTORE,
        "RocksDB cannot read index, timers and transactions (rocksdbstore/) or pop records "
        "(kvStore/). A broker of RocketMQ does not start",
        "put the folder back from a backup",
    ),
    "bad_settings": _note(
        "the record of the store's settings cannot be read", "nothing: the next writer replaces it"
    ),
    "checkpoint_missing": _note("there is no checkpoint", "nothing: the next writer makes one"),
    "checkpoint_zero": _note("the checkpoint is all zeros", "nothing: the next writer fills it"),
    "checkpoint_ahead": _damage(
        Action.RECOVER,
        "the checkpoint covers messages after the last message of the log",
        "put the last files of the log back from a backup, else `recover`",
    ),
    "checkpoint_offset": _damage(
        Action.RECOVER,
        "the checkpoint has an offset that only RocketMQ 5.5 writes. But this offset is impossible,"
        " or other files are of an earlier RocketMQ. A broker of 5.5 would skip messages",
    ),
    "checkpoint_short": _damage(Action.RECOVER, "the checkpoint file is too short"),
    "abort_file": _note(
        "the file abort exists: the store is open, or was not shut down cleanly",
        "`recover`, if no broker has the store open",
        action=Action.RECOVER,
    ),
    "log_start": _note(
        "the log does not start at 0, and logquarry has no record of a deletion by retention",
        "nothing, if retention deleted the first files; else put these files back from a backup",
    ),
    "live": _note("a process has the store open", "stop the process before a repair"),
    "stale_frames": _note(
        "valid frames after the log's end. An earlier recovery ended the log before these frames, "
        "so they do not belong to the log",
        "nothing; if you need their content: `salvage --include-stale`",
    ),
    "stale_bytes": _note(
        "bytes of older messages after the log's end, left by a broker with writeWithoutMmap",
        "nothing: the next writer overwrites them",
    ),
    "oversized": _note(
        "a frame is larger than maxMessageSize. RocketMQ 4.9.3 and earlier versions would reject "
        "it; RocketMQ 5 compares only the body with maxMessageSize"
    ),
    "durable_mark_invalid": _note(
        "the file of the durable offset is torn, invalid or cannot be opened, or the checkpoint "
        "cannot be opened",
        "nothing: the next writer replaces an invalid file. If a file cannot be opened, correct "
        "its permissions, or repair the disk",
    ),
    "durable_mark_foreign": _note(
        "the recorded durable offset does not fit the checkpoint. Another program has written to "
        "the store since logquarry recorded this offset, or the checkpoint is missing or "
        "unreadable",
        "nothing: the next writer replaces the recorded offset",
    ),
    "durable_mark_ahead": _note(
        "the durable offset is beyond the last frame",
        "`recover`, if another finding is damage; else nothing",
    ),
    "leftover": _note(
        "files that an interrupted command left behind",
        "nothing: the same command removes the files when it runs again",
    ),
    "unfinished_load": _note(
        "a Spark load ended before all its rows were in the log",
        "run the load again (the next writer completes or removes the unfinished load)",
    ),
    "new_epoch": _note("the topic was deleted and recreated, so its queue offsets start again"),
    "unknown_file": _note(
        "a file with a name that RocketMQ and logquarry do not use",
        "move the file out of the store",
    ),
    "empty_file": _note(
        "a file of 0 bytes at the log's end, left by a crash while the file was created",
        "`recover`, if RocketMQ must open the store",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding of verify.

    Attributes:
        kind: a name in :data:`KINDS`.
        file: path below the store's folder.
        offset: a physical offset for the commit log; for other files a position in the file.
        length: number of bytes to which the finding applies, 0 if unknown.
    """

    kind: str
    severity: Severity
    file: str
    offset: int
    length: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the finding as an object of ``verify --json``."""
        return document(self)


def finding(
    kind: str, file: str, offset: int, reason: str, length: int = 0, *, is_explained: bool = False
) -> Finding:
    """Return a finding with the kind's severity. If a crash or a deletion explains the
    finding (``is_explained``), the severity is ``note``.
    """
    severity: Severity = "note" if is_explained else KINDS[kind].severity
    return Finding(kind, severity, file, offset, length, reason)


@dataclass(slots=True)
class VerifyReport:
    """The findings of one store.

    Attributes:
        store: path or URL of the store.
        counts: name -> number of checked things: messages, bytes, blanks, files, queue entries,
            index entries.
        recorded: physical offsets of the damage that an earlier recovery found, and recorded in the
            store.
    """

    store: str
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)

    @property
    def damage_count(self) -> int:
        """Number of findings that are damage."""
        return sum(finding.severity == "damage" for finding in self.findings)

    @property
    def has_damage(self) -> bool:
        """Whether any finding is damage."""
        return self.damage_count > 0

    @property
    def by_kind(self) -> Counter[str]:
        """Number of findings of each kind."""
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
        """Add a finding; see :func:`finding`."""
        found = finding(kind, file, offset, reason, length, is_explained=is_explained)
        self.findings.append(found)

    def downgrade(self, kinds: frozenset[str]) -> None:
        """Give all findings of these kinds the severity ``note``."""
        self.findings = [
            replace(one, severity="note") if one.kind in kinds else one for one in self.findings
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``verify --json``."""
        return document(self, ("store", "findings", "counts"))


def markdown() -> str:
    """Return the table of all kinds that the documentation contains."""
    lines = ["| kind | severity | meaning | next step |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {kind.severity} | {kind.meaning} | {kind.step} |"
        for name, kind in KINDS.items()
    ]
    return "\n".join(lines)


class Next(NamedTuple):
    """The next step for a store.

    Attributes:
        words: the words of the command line: the command first, then its options. The caller puts
            the store's path after the command.
        before: the step that the user must do before the command, as text.
    """

    words: tuple[str, ...]
    before: str = ""


def next_step(report: VerifyReport) -> Next | None:
    """Return the next step after a verification; None if there is nothing to do."""
    damage = [finding for finding in report.findings if finding.severity == "damage"]
    kinds = {finding.kind for finding in report.findings}
    if not damage and ("abort_file" not in kinds or "live" in kinds):
        return _index_step(report, kinds)
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
        # Every repair needs a local folder, but a salvage can read the store through its URL.
        return Next(("salvage", "--into", "DIR"), before)
    if Action.RENAME in actions:
        return Next(("verify",), "rename or move the files as the findings misnamed_entries say")
    if Action.MOVE in actions:
        return Next(("verify",), "do what the finding wrong_entry says")
    if Action.RECOVER in actions:
        return Next(("recover",), before)
    if Action.SALVAGE in actions and (Action.QUEUES in actions or not is_built):
        # Only a salvage corrects the harmed queue offsets in the frames.
        return Next(("salvage", "--into", "DIR"), before)
    if is_built:
        only = [] if len(is_built) > 1 else ["--queues" if Action.QUEUES in actions else "--index"]
        return Next(("rebuild", "--in-place", *only), before)
    if recorded:
        return Next(("salvage", "--into", "DIR"), before)
    if Action.RESTORE in actions:
        file = next(f.file for f in damage if _action(f) is Action.RESTORE)
        other = f" or from {file}.bak" if file.startswith(f"{CONFIG}/") else ""
        return Next(("verify",), f"put {file} back from a backup{other}")
    place = str(next(f.offset for f in damage if _action(f) is Action.READ))
    return Next(("messages", "--offset", place))


def _index_step(report: VerifyReport, kinds: set[str]) -> Next | None:
    """Return the next step if a file has the name of an index file, but is not one; else None."""
    strange = [f.file for f in report.findings if f.kind == "unknown_file"]
    inside = (file for file in strange if file.startswith(f"{INDEX}/"))
    file = next((file for file in inside if file.removeprefix(f"{INDEX}/").isdigit()), None)
    if file is None or "live" in kinds:
        return None
    return Next(("rebuild", "--in-place", "--index"), f"move {file} out of the store")


def _action(finding: Finding) -> Action:
    action = KINDS[finding.kind].action
    # Recovery and rebuild repair no file of ``config/`` except ``timercheck``.
    if finding.file.startswith(f"{CONFIG}/") and action not in (Action.QUEUES, Action.MOVE):
        return Action.RESTORE
    return action
