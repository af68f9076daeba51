"""What a comparison of two stores found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Side = Literal["a", "b"]


@dataclass(frozen=True, slots=True)
class Place:
    """What stands at a place of one log.

    Attributes:
        what: ``message``, ``blank``, ``damage`` or ``nothing`` (no file).
        file: the file it is in.
        offset: physical offset at which it begins.
        size: its bytes.
        reason: what is wrong with it; None where nothing is.
        topic: of a message, as are all others from here on.
        queue_id: its queue,
        queue_offset: and its place there.
        store_timestamp: in milliseconds.
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
    """The first byte at which two logs differ, and what it belongs to in each."""

    offset: int
    a: Place
    b: Place


@dataclass(frozen=True, slots=True)
class LogPart:
    """A stretch of the log that is one file in each store, as far as both go.

    Attributes:
        file: its name in the first store that has it.
        offset: physical offset of its first byte.
        length: bytes that were compared, or that one store has no file for.
        different_bytes: how many of them differ; rests of blanks do not count.
        first_difference: physical offset of the first; None without one.
        missing_in: the store that has no file for it.
    """

    file: str
    offset: int
    length: int
    different_bytes: int
    first_difference: int | None
    missing_in: Side | None


@dataclass(frozen=True, slots=True)
class LogBounds:
    """Where one log begins and ends."""

    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class UnitPair:
    """The first units that differ: physical offset, size and tags code, None where one is not."""

    queue_offset: int
    a: tuple[int, int, int] | None
    b: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class QueueDiff:
    """One queue in both stores. Offsets are queue offsets, None where there is no such queue.

    Attributes:
        topic: its topic.
        queue_id: its number.
        state: ``equal``; ``behind``: one goes on further, as its log does; ``differs``.
        a: where it begins and ends in the first store,
        b: and in the second.
        difference: the first units that differ.
        reason: in words, empty for equal ones.
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
    """Two stores, compared.

    Attributes:
        a: the first store's folder,
        b: and the second one's.
        log_a: its log,
        log_b: and the other.
        start: from here on both have a log,
        end: and up to here; not beyond ``start`` where they have nothing in common.
        parts: the stretches that were compared.
        divergence: where the logs part, None if they do not.
        queues: all queues that either has.
        config: files of config/: ``equal``, ``different``, ``only_a`` or ``only_b``. They change
            with every consumer, and decide nothing.
        notes: what is worth knowing and no divergence.
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

    @property
    def is_disjoint(self) -> bool:
        """Whether both have a log, and no byte of it in common, so that nothing can be told."""
        return all(log.max_offset > log.min_offset for log in (self.log_a, self.log_b)) and (
            self.start >= self.end
        )

    @property
    def verdict(self) -> str:
        """``equal``, ``prefix`` (one goes on further), ``diverged`` or ``disjoint``."""
        if self.divergence is not None or any(q.state == "differs" for q in self.queues):
            return "diverged"
        if self.is_disjoint:
            return "disjoint"
        return "equal" if self.log_a == self.log_b else "prefix"

    @property
    def has_diverged(self) -> bool:
        """Whether one cannot stand for the other."""
        return self.verdict in ("diverged", "disjoint")

    def to_json(self) -> dict[str, Any]:
        """The document that docs/json.md describes."""
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
