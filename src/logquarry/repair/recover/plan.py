"""The plan of a recovery: its steps, and the changes to each queue and to the index."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from logquarry.disk.disk import Disk
from logquarry.format import index, queue_entry
from logquarry.format.index import IndexHeader, IndexShape
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import INDEX
from logquarry.log.walk import DamagedSpan
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.repair.audit.differences import AuditedQueue
from logquarry.repair.audit.index import entries_of_last, file_fault, sequence_fault
from logquarry.repair.recover.loss import Loss
from logquarry.systems import read_file
from logquarry.text import counted, document, plural

logger = logging.getLogger(__name__)

RecoveryMode = Literal["safe", "rocketmq"]


class StepKind(Enum):
    """The kind of a step."""

    RESTORE = "restore"
    """Restore the name of a file that has only its hard link, or move a folder of an interrupted
    rebuild into place. Only plans that are not applied have this step. In mode ``rocketmq``, such a
    plan lacks the steps that follow.
    """
    RENAME = "rename"
    """Rename a log file: its frames show the right name. The step's ``offset`` is this name."""
    CUT = "cut"
    """Cut off the end of the log or of a queue."""
    ZERO = "zero"
    """Overwrite bytes after an end with zeros, after a copy to quarantine."""
    SET_ASIDE = "set_aside"
    """Move a file to quarantine."""
    EXTEND = "extend"
    """Append zeros to a file that is too short."""
    PUT_BLANK = "put_blank"
    """In place of a lost log file, create a file that is one blank. Readers skip a blank."""
    BUILD_QUEUE = "build_queue"
    """Write the entries that a queue lacks."""
    BUILD_TRANSACTIONS = "build_transactions"
    """Rebuild the state table or the redo log of 3.x from the log."""
    BUILD_INDEX = "build_index"
    """Add the missing keys to the index."""
    WRITE_CHECKPOINT = "write_checkpoint"
    """Write a new checkpoint: the old one is missing, cannot be read, covers lost messages, or has
    a harmed offset.
    """
    NOTE_DAMAGE = "note_damage"
    """Record the places of the log's damage in a file, so that readers skip them."""
    REMOVE = "remove"
    """Delete the file ``abort``: later readers then treat the store as shut down cleanly. Or delete
    a wrong name of a log file, if the name is a hard link: the file keeps its right name.
    """


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan.

    ``file`` is the path of a file or folder below the store's folder. ``offset`` is a physical
    offset for the log, a byte position for any other file, and None for a whole file. ``length`` is
    in bytes, None if unknown.
    """

    kind: StepKind
    file: str
    offset: int | None
    length: int | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON object (docs/json.md)."""
        return asdict(self) | {"kind": self.kind.value}

    def __str__(self) -> str:
        place = self.file if self.offset is None else f"{self.file} at {self.offset}"
        size = "" if self.length is None else f", {plural(self.length, 'byte')}"
        return f"{self.kind.value.replace('_', ' ')}: {place}{size}: {self.reason}"


class Steps(list[Step]):
    """Collects the steps of a plan."""

    def add(
        self,
        kind: StepKind,
        file: str,
        reason: str,
        *,
        offset: int | None = None,
        length: int | None = None,
    ) -> None:
        """Append a step."""
        self.append(Step(kind, file, offset, length, reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """The plan of a recovery. Making the plan does not change the store.

    A plan can be applied again, for example after an interruption, and the result is then the same.

    Attributes:
        looked_at: the facts in the store on which the plan is based, as text.
        log_end: physical offset of the log's end after the recovery.
        dispatch_from: physical offset of the first message that the recovery dispatches.
        damage: damaged parts before the log's end, which stay.
        refused: the reason why this mode cannot recover the store, or None.
        loss: the messages that the recovery would lose, or None.
    """

    root: str
    mode: RecoveryMode
    looked_at: tuple[str, ...]
    log_start: int
    log_end: int
    dispatch_from: int
    damage: tuple[DamagedSpan, ...] = ()
    steps: tuple[Step, ...] = ()
    refused: str | None = None
    applied: bool = field(default=False, compare=False)
    loss: Loss | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the plan has any step."""
        return bool(self.steps)

    def to_json(self) -> dict[str, Any]:
        """Return the document that docs/json.md describes."""
        return {
            "store": self.root,
            **document(self, ("mode", "looked_at", "log_start", "log_end", "dispatch_from")),
            **document(self, ("damage", "steps", "refused")),
            "needed": self.is_needed,
            **document(self, ("applied", "loss")),
        }

    def summary(self, most: int = 12) -> Iterator[str]:
        """Yield lines of text: the loss, the facts, one line about the damage, at most ``most``
        steps, then the number of further steps of each kind.
        """
        yield from self._facts()
        if self.damage:
            lost = sum(span.length for span in self.damage)
            first = self.damage[0].reason
            spans = counted(len(self.damage), "damaged span stays", "damaged spans stay")
            yield f"{spans}, {counted(lost, 'byte')}, the first: {first}"
        yield from map(str, self.steps[:most])
        rest = Counter(step.kind.value.replace("_", " ") for step in self.steps[most:])
        for name, count in sorted(rest.items()):
            yield f"and {counted(count, 'more time')}: {name}"

    def _facts(self) -> Iterator[str]:
        if self.loss is not None:
            yield str(self.loss)
        yield from self.looked_at
        yield f"the log begins at {self.log_start} and will end at {self.log_end}"

    def lines(self) -> Iterator[str]:
        """Yield the plan as lines of text. The loss, if there is one, comes first."""
        yield from self._facts()
        for span in self.damage:
            length = counted(span.length, "byte")
            yield f"damage stays: {span.path} at {span.offset}, {length}: {span.reason}"
        yield from map(str, self.steps)
        if self.refused is not None:
            yield f"refused: {self.refused}"
        elif not self.steps:
            yield "there is nothing to do"


# ------------------------------------------------------------------------------------------ queues
class QueueAction(Enum):
    """What a recovery does with the entries that a queue already has."""

    KEEP = "keep"
    CUT = "cut"
    """Cut off the entries from ``keep_until`` on. Then append the entries of the log's messages."""
    REBUILD = "rebuild"
    """Move all files of the queue to quarantine, and build the queue from the log."""


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """The plan for one queue. The positions in the plan are queue offsets, or, for a batch queue,
    entry numbers.

    Attributes:
        keep_until: the entries before this position stay, and all others are cut off.
        had_until: the queue's end before the recovery. ``end`` is the queue's end after the
            recovery.
        resume_at: physical offset of the first message that needs a new entry, or None.
        moved: the same as in :class:`AuditedQueue`.
        bridges: the same as in :class:`AuditedQueue`.
    """

    key: QueueKey
    action: QueueAction
    keep_until: int
    had_until: int
    end: int
    resume_at: int | None
    reason: str
    moved: Mapping[int, int] = field(default_factory=dict)
    largest_gap: int = 0
    bridges: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Whether the queue needs no change."""
        return self.action is QueueAction.KEEP and self.resume_at is None


def plan_queue(found: AuditedQueue) -> QueuePlan:
    """Return the plan for one queue, from the result of its comparison with the log."""
    had, difference = found.had_until, found.difference
    if found.end is None or difference is None:
        end, resume_at = found.kept_until, None
        reason = f"entries from {end} on belong to no message of the log"
        if end >= had:
            action, reason = QueueAction.KEEP, ""
            if found.ends_empty:
                # The last file is empty, and RocketMQ would treat the zeros at its start as an
                # entry.
                action, reason = QueueAction.CUT, "its last file is empty"
            return QueuePlan(found.key, action, end, had, end, None, reason, bridges=found.bridges)
        keep = end
    else:
        end, resume_at, reason = found.end, difference.resume_at, difference.reason
        keep = min(difference.offset, had)
    first = found.first_entry
    if first is None or keep < first or (had and keep <= first):
        action, keep = QueueAction.REBUILD, 0
    else:
        action = QueueAction.CUT if keep < had else QueueAction.KEEP
    if resume_at is None:
        bridges = {number: entry for number, entry in found.bridges.items() if number < keep}
        return QueuePlan(found.key, action, keep, had, keep, None, reason, bridges=bridges)
    moved, gap = found.moved, found.largest_gap
    return QueuePlan(found.key, action, keep, had, end, resume_at, reason, moved, gap)


# If a message is lost, or if the queue id in its frame is harmed, only the queue entry shows to
# which queue the message belongs. So a recovery saves such entries before it cuts the queue. If the
# recovery is interrupted, the next recovery uses the saved entries instead of fillers.
def load_kept(path: Path) -> dict[QueueKey, dict[int, QueueEntry]]:
    """Return the entries that an interrupted recovery saved; {} if the file is missing or bad."""
    found: dict[QueueKey, dict[int, QueueEntry]] = {}
    try:
        for queue in json.loads(read_file(path)):
            entries = found.setdefault((str(queue["topic"]), int(queue["queue_id"])), {})
            for offset, data in queue["units"]:
                entries[int(offset)] = queue_entry.decode_at(bytes.fromhex(data)[:UNIT_SIZE], 0)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        logger.warning("%s: %s", path, error)
        return {}
    return found


def save_kept(disk: Disk, path: Path, kept: Mapping[QueueKey, Mapping[int, bytes]]) -> None:
    """Save entries for the next recovery, and sync the file. Without entries, delete the file."""
    document = [
        {
            "topic": topic,
            "queue_id": queue_id,
            "units": [[offset, entry.hex()] for offset, entry in sorted(entries.items())],
        }
        for (topic, queue_id), entries in sorted(kept.items())
        if entries
    ]
    if document:
        disk.replace(path, json.dumps(document).encode())
    else:
        disk.remove(path)


# ------------------------------------------------------------------------------------------- index
@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The plan for the index. ``set_aside`` contains (name, reason) of each file to move to
    quarantine.

    Attributes:
        built_from: physical offset of the first message whose keys may be missing in the index.
        keys_there: how many keys of this message the index already has.
        kept_timestamp: store time in milliseconds of the last message whose keys stay in the index;
            0 if no keys stay.
    """

    set_aside: tuple[tuple[str, str], ...]
    built_from: int
    keys_there: int = 0
    kept_timestamp: int = 0


def plan_index(
    layout: StoreLayout,
    shape: IndexShape,
    *,
    log_start: int,
    log_end: int,
    is_closed: bool,
    synced_timestamp: int,
    replaced_from: int | None = None,
) -> IndexPlan:
    """Return the plan for the index of a store.

    After a crash, the plan keeps only full index files whose last message is not newer than the
    checkpoint. RocketMQ also removes newer files, but indexes only some of their messages again
    (RocketMQ issue #8007). ``replaced_from`` is the physical offset of the first message that was
    replaced, as the queues show. Index files that contain messages from this offset on are rebuilt.
    """
    aside: list[tuple[str, str]] = []
    last: IndexHeader | None = None
    keys_there = 0
    log = CommitLog(layout)
    for entry in layout.index_files:
        file = layout.open_file(f"{INDEX}/{entry.name}")
        data = file.window(0, entry.size)
        fault: str | None = "a file before it is set aside"
        if not aside:
            unreadable = file.fault(0, entry.size)
            fault = file_fault(file, entry.size, shape, log_end)
            fault = fault if unreadable is None else unreadable.words
        if fault is None:
            header = index.decode_header(data)
            if not is_closed and (
                header.entry_count < shape.entries or header.end_timestamp > synced_timestamp
            ):
                fault = "the checkpoint does not cover all of it"
            elif replaced_from is not None and header.end_offset >= replaced_from:
                fault = f"the log has other messages from {replaced_from} on"
            else:
                fault = sequence_fault(log, log_start, header, last)
            if fault is None:
                last = header
                keys_there = entries_of_last(data, shape, header)
        if fault is not None:
            aside.append((entry.name, fault))
    if last is not None and last.entry_count > 1:
        return IndexPlan(tuple(aside), last.end_offset, keys_there, last.end_timestamp)
    return IndexPlan(tuple(aside), log_start)
