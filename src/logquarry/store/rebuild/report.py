"""What a rebuild did, or would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from logquarry.scan.walk import DamagedSpan
from logquarry.store.rebuild.queue_files import LeftOut


@dataclass(frozen=True, slots=True)
class FileCount:
    """Files of one folder of the store."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class QueueReport:
    """One queue. Offsets are queue offsets.

    Attributes:
        topic: its topic.
        queue_id: its number.
        min_offset: of its first message in the log; where it ends if it has none there.
        max_offset: one past that of its last message.
        fillers: units that stand for messages which the log has lost.
        restarts: how often its offsets fell back: the topic was made anew.
        is_taken_over: whether it has no message in the log any more, and its files were copied, so
            that it goes on where it ended.
    """

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    fillers: int
    restarts: int
    is_taken_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildReport:
    """What was done; without ``is_applied``, what would be done.

    Attributes:
        store: the store's folder.
        into: where the new files are, None for the store itself.
        is_applied: whether anything was done.
        is_live: whether a process has the store open.
        has_abort: whether the store was not closed in order (and is not open).
        old: the files that there are, by the folders that are (to be) made anew.
        quarantine: where these were moved to, None if they were not.
        log_start: physical offset of the log's first byte.
        log_end: where the log ends; None if it was not read.
        messages: how many stand whole in it; None likewise.
        queues: the new queues; None where none were made.
        index: the new index: files and bytes of it; None where none was made.
        keys: keys in the index; None likewise.
        damage: bytes within the log that are no messages.
        left_out: messages that got no place in a queue.
    """

    store: str
    into: str | None
    is_applied: bool
    is_live: bool
    has_abort: bool
    old: dict[str, FileCount]
    log_start: int
    quarantine: str | None = None
    log_end: int | None = None
    messages: int | None = None
    queues: tuple[QueueReport, ...] | None = None
    index: FileCount | None = None
    keys: int | None = None
    damage: tuple[DamagedSpan, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The document that docs/json.md describes."""
        return {
            "store": self.store,
            "into": self.into,
            "applied": self.is_applied,
            "live": self.is_live,
            "abort": self.has_abort,
            "old": {name: _count(found) for name, found in self.old.items()},
            "quarantine": self.quarantine,
            "log_start": self.log_start,
            "log_end": self.log_end,
            "messages": self.messages,
            "queues": None if self.queues is None else [_queue(queue) for queue in self.queues],
            "index": None if self.index is None else _count(self.index) | {"keys": self.keys},
            "damage": [
                {
                    "kind": span.kind,
                    "file": span.path,
                    "offset": span.offset,
                    "length": span.length,
                    "reason": span.reason,
                }
                for span in self.damage
            ],
            "left_out": [
                {
                    "topic": message.topic,
                    "queue_id": message.queue_id,
                    "queue_offset": message.queue_offset,
                    "physical_offset": message.physical_offset,
                    "reason": message.reason,
                }
                for message in self.left_out
            ],
        }


def _count(found: FileCount) -> dict[str, int | None]:
    return {"files": found.files, "bytes": found.bytes}


def _queue(queue: QueueReport) -> dict[str, Any]:
    return {
        "topic": queue.topic,
        "queue_id": queue.queue_id,
        "min_offset": queue.min_offset,
        "max_offset": queue.max_offset,
        "fillers": queue.fillers,
        "restarts": queue.restarts,
        "taken_over": queue.is_taken_over,
    }
