"""The result of a comparison of two stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Side = Literal["a", "b"]


@dataclass(frozen=True, slots=True)
class Place:
    """What one log has at a physical offset: a message, a blank, damage, or nothing.

    Attributes:
        what: ``message``, ``blank``, ``damage`` or ``nothing`` (no file, or only zeros).
        offset: physical offset of the first byte.
        topic: topic of the message. Only messages have this and the following attributes.
        store_timestamp: store time in milliseconds.
        message_id: upper-case hex.
    """

    what: str
    file: str
    offset: int
    size: int
    reason: str | None = None
    topic: str | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    store_timestamp: int | None = None
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class Divergence:
    """The physical offset of the first byte at which two logs differ, and what each
    log has there.
    """

    offset: int
    a: Place
    b: Place


@dataclass(frozen=True, slots=True)
class LogPart:
    """The result for one part of the logs, which lies within one file of each store.

    Attributes:
        offset: physical offset of the first byte.
        length: number of bytes of this part.
        different_bytes: number of bytes that differ. Different padding of blanks counts only after
            the divergence.
        first_difference: physical offset of the first difference, None if there is none.
        missing_in: the store that lacks the file, None if both stores have the file.
    """

    file: str
    offset: int
    length: int
    different_bytes: int
    first_difference: int | None
    missing_in: Side | None


@dataclass(frozen=True, slots=True)
class LogBounds:
    """Where a log or a queue begins and ends: the first offset, and one past the last. The offsets
    of a log are physical offsets, those of a queue are queue offsets.
    """

    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class UnitPair:
    """The first entries that differ, as (physical offset, size, tags code). None if a store has no
    entry at this queue offset.
    """

    queue_offset: int
    a: tuple[int, int, int] | None
    b: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class QueueDiff:
    """One queue in both stores; ``a`` and ``b`` are None if the store lacks the queue.

    Attributes:
        state: ``equal``, ``behind`` (one queue ends earlier, because its store has fewer messages)
            or ``differs``.
    """

    topic: str
    queue_id: int
    state: str
    a: LogBounds | None
    b: LogBounds | None
    difference: UnitPair | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDiff:
    """The result of the comparison of two stores.

    Attributes:
        start: physical offset of the common part's start.
        end: physical offset of the common part's end. If the logs have no common part, it is not
            greater than ``start``.
        divergence: the first difference of the logs, None if there is none.
        config: name of a file in config/ -> ``equal``, ``different``, ``only_a`` or ``only_b``.
            Consumers change these files, so they do not affect the verdict.
        notes: further facts about the comparison that are no divergence, as text.
        lost: the stores whose last log files are missing.
        unread: the stores whose queues in RocksDB could not be read, and were not compared.
    """

    a: str
    b: str
    log_a: LogBounds
    log_b: LogBounds
    start: int
    end: int
    parts: tuple[LogPart, ...]
    divergence: Divergence | None
    queues: tuple[QueueDiff, ...]
    config: dict[str, str]
    notes: tuple[str, ...]
    lost: tuple[Side, ...] = ()
    unread: tuple[Side, ...] = ()

    @property
    def is_disjoint(self) -> bool:
        """Whether both logs have messages, but no physical offset is in both logs."""
        return all(log.max_offset > log.min_offset for log in (self.log_a, self.log_b)) and (
            self.start >= self.end
        )

    @property
    def verdict(self) -> str:
        """One of ``equal``, ``prefix`` (the logs begin or end at different offsets, and their
        common part is equal), ``diverged``, ``disjoint`` (no common part) and ``incomplete``.

        ``incomplete``: no difference was found, but not all queues were compared.
        """
        if self.divergence is not None or any(q.state == "differs" for q in self.queues):
            return "diverged"
        if self.is_disjoint:
            return "disjoint"
        if self.unread:
            return "incomplete"
        return "equal" if self.log_a == self.log_b else "prefix"

    @property
    def has_diverged(self) -> bool:
        """Whether the verdict is ``diverged`` or ``disjoint``, so that neither store can replace
        the other.
        """
        return self.verdict in ("diverged", "disjoint")

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``diff --json`` (docs/json.md)."""
        return {
            "a": self.a,
            "b": self.b,
            "verdict": self.verdict,
            "log": {
                "a": asdict(self.log_a),
                "b": asdict(self.log_b),
                "compared": [self.start, self.end] if self.start < self.end else None,
                "parts": [asdict(part) for part in self.parts],
            },
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "queues": [_queue(queue) for queue in self.queues],
            "config": self.config,
            "notes": list(self.notes),
            "lost": list(self.lost),
            "unread": list(self.unread),
        }


def _queue(queue: QueueDiff) -> dict[str, Any]:
    document = asdict(queue)
    found = queue.difference
    if found is not None:
        names = ("physical_offset", "size", "tags_code")
        document["difference"] = {
            "queue_offset": found.queue_offset,
            "a": None if found.a is None else dict(zip(names, found.a, strict=True)),
            "b": None if found.b is None else dict(zip(names, found.b, strict=True)),
        }
    return document
