"""Summaries of reads: messages and bytes by topic, their time range, and damage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from logquarry.log.walk import DamagedSpan

if TYPE_CHECKING:
    import pyarrow as pa

TALLY_COLUMNS = ("topic", "size", "store_timestamp")
"""Columns that :meth:`Summary.add_rows` needs."""


@dataclass(slots=True)
class TopicSummary:
    """Counts of one topic, or of all topics; `bytes` is the size of the frames in the log.

    `first_ms` and `last_ms` are the smallest and largest store timestamp in milliseconds.
    """

    messages: int = 0
    bytes: int = 0
    first_ms: int | None = None
    last_ms: int | None = None

    def add(self, other: TopicSummary) -> None:
        """Add the counts of `other`."""
        self.messages += other.messages
        self.bytes += other.bytes
        firsts = [ms for ms in (self.first_ms, other.first_ms) if ms is not None]
        lasts = [ms for ms in (self.last_ms, other.last_ms) if ms is not None]
        self.first_ms, self.last_ms = min(firsts, default=None), max(lasts, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "messages": self.messages,
            "bytes": self.bytes,
            "first_store_timestamp": self.first_ms,
            "last_store_timestamp": self.last_ms,
        }


@dataclass(slots=True)
class Summary:
    """Counts by topic, and the damage that the read skipped.

    The damage is sorted only in a result of :meth:`of`.
    """

    topics: dict[str, TopicSummary] = field(default_factory=dict)
    damage: list[DamagedSpan] = field(default_factory=list)

    @property
    def total(self) -> TopicSummary:
        """Counts of all topics together."""
        total = TopicSummary()
        for topic in self.topics.values():
            total.add(topic)
        return total

    def add_rows(self, rows: pa.Table) -> None:
        """Count the rows of a table that has the TALLY_COLUMNS."""
        if not rows.num_rows:
            return
        found = (
            rows.select(list(TALLY_COLUMNS))
            .group_by("topic")
            .aggregate(
                [
                    ("size", "count"),
                    ("size", "sum"),
                    ("store_timestamp", "min"),
                    ("store_timestamp", "max"),
                ]
            )
        )
        columns = [
            found.column("topic"),
            found.column("size_count"),
            found.column("size_sum"),
            *(found.column(f"store_timestamp_{which}").cast("int64") for which in ("min", "max")),
        ]
        for topic, count, size, first, last in zip(*(c.to_pylist() for c in columns), strict=True):
            self._topic(topic).add(TopicSummary(count, size, first // 1000, last // 1000))

    def add(self, other: Summary) -> None:
        """Add the counts and the damage of `other`."""
        for name, topic in other.topics.items():
            self._topic(name).add(topic)
        self.damage += other.damage

    def _topic(self, name: str) -> TopicSummary:
        return self.topics.setdefault(name, TopicSummary())

    @classmethod
    def of(cls, parts: Iterable[Summary]) -> Summary:
        """Merge summaries; sort topics by name, and damage by file and offset.

        Entries of two queues can point to the same damaged bytes, so two tasks can report the same
        damage. The result lists it once.
        """
        whole = cls()
        for part in parts:
            whole.add(part)
        whole.topics = dict(sorted(whole.topics.items()))
        spans = {(span.path, span.offset): span for span in whole.damage}
        whole.damage = [spans[place] for place in sorted(spans)]
        return whole


def damage_as_dict(span: DamagedSpan) -> dict[str, Any]:
    """Return the JSON form of a damaged span."""
    return {
        "file": span.path,
        "offset": span.offset,
        "length": span.length,
        "kind": span.kind,
        "reason": span.reason,
    }
