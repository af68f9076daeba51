"""What a recovery will do, and why, before anything is touched.

A plan is found by reading alone. It can be printed, compared and applied; applying it twice, or
once more after being interrupted, comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from logquarry.log.walk import DamagedSpan

RecoveryMode = Literal["safe", "rocketmq"]


class StepKind(Enum):
    """What one step does."""

    CUT = "cut"
    """Let a file sequence end earlier: the log, or a queue."""
    ZERO = "zero"
    """Make what stands behind an end zeros; the bytes are kept in quarantine."""
    SET_ASIDE = "set_aside"
    """Move a file out of the way, into quarantine."""
    EXTEND = "extend"
    """Give a file the bytes that it lacks, all zeros."""
    PUT_BLANK = "put_blank"
    """Fill the place of a lost file of the log with a blank, so that one can step over it."""
    BUILD_QUEUE = "build_queue"
    """Append units to a queue that the log says are missing."""
    BUILD_TRANSACTIONS = "build_transactions"
    """Make the state table of 3.x, or its redo log, anew from the log."""
    BUILD_INDEX = "build_index"
    """Put keys into the index that it lacks."""
    NOTE_DAMAGE = "note_damage"
    """Write down what of the log is damaged, for readers to pass it over."""
    REMOVE = "remove"
    """Take a file away: ``abort``, and then the store is closed in order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do.

    Attributes:
        kind: what.
        file: path below the store's folder: a file, or the folder of a queue or of the index.
        offset: where in the log (``commitlog/``) or in the file; None for all of it.
        length: of how many bytes, None where that says nothing.
        reason: why, in words.
    """

    kind: StepKind
    file: str
    offset: int | None
    length: int | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As an object of docs/json.md."""
        return {
            "kind": self.kind.value,
            "file": self.file,
            "offset": self.offset,
            "length": self.length,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        place = self.file if self.offset is None else f"{self.file} at {self.offset}"
        size = "" if self.length is None else f", {self.length} bytes"
        return f"{self.kind.value.replace('_', ' ')}: {place}{size}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """What is to be done to a store.

    Attributes:
        root: the store's folder.
        mode: whose rules.
        looked_at: what the plan was found from, in words.
        log_start: physical offset of the log's first byte.
        log_end: where the log will end.
        dispatch_from: from here on messages are told to queues or index again.
        damage: bytes within the log that are no messages, and stay.
        steps: what to do, in this order.
        refused: why the store cannot be opened this way, None if it can.
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

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.steps)

    def to_json(self) -> dict[str, Any]:
        """The document that docs/json.md describes."""
        return {
            "store": self.root,
            "mode": self.mode,
            "looked_at": list(self.looked_at),
            "log_start": self.log_start,
            "log_end": self.log_end,
            "dispatch_from": self.dispatch_from,
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
            "steps": [step.to_json() for step in self.steps],
            "refused": self.refused,
        }

    def summary(self, most: int = 12) -> Iterator[str]:
        """The plan in a few words: no more than ``most`` steps are told one by one."""
        yield from self.looked_at
        yield f"the log begins at {self.log_start} and will end at {self.log_end}"
        if self.damage:
            lost = sum(span.length for span in self.damage)
            first = self.damage[0].reason
            yield f"{len(self.damage)} damaged spans stay, {lost} bytes, the first: {first}"
        yield from map(str, self.steps[:most])
        rest = Counter(step.kind.value.replace("_", " ") for step in self.steps[most:])
        for name, count in sorted(rest.items()):
            yield f"and {count} more times: {name}"

    def lines(self) -> Iterator[str]:
        """The plan in words."""
        yield from self.looked_at
        yield f"the log begins at {self.log_start} and will end at {self.log_end}"
        for span in self.damage:
            yield f"damage stays: {span.path} at {span.offset}, {span.length} bytes: {span.reason}"
        yield from map(str, self.steps)
        if self.refused is not None:
            yield f"refused: {self.refused}"
        elif not self.steps:
            yield "there is nothing to do"
