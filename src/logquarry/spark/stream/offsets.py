"""How far a stream has read: what Spark writes into its checkpoint.

::

    {"broker-a": 1073741824, "broker-b": 52800}

Each is a physical offset at which a frame, a blank or damage ends. What the options said about the
start of a new query, and still matters, travels along under ``/start`` (no broker has that name):
a query that is started again keeps it, whatever its options say then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from logquarry.errors import UsageError

START: Final = "/start"
_TIME, _QUEUES, _FIRST = "timestamp", "queueOffsets", "offsets"

Queue = tuple[str, int]
"""A topic and one of its queues."""


@dataclass(frozen=True, kw_only=True)
class StreamOffset:
    """How far a stream has read.

    Attributes:
        brokers: physical offset by broker. One that is not named has not been read at all.
        since_ms: least store time that the query wants; None for any.
        queues: by broker the first queue offsets that the query wants, where it says so.
        first: where the query's first batch begins; None in all later ones. Spark asks a query
            that failed in its first batch for a start once more, and ``latest`` may have moved on.
    """

    brokers: Mapping[str, int] = field(default_factory=dict)
    since_ms: int | None = None
    queues: Mapping[str, Mapping[Queue, int]] = field(default_factory=dict)
    first: Mapping[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """As a document for Spark, the same for the same offset."""
        start: dict[str, Any] = {}
        if self.since_ms is not None:
            start[_TIME] = self.since_ms
        if self.queues:
            start[_QUEUES] = {
                broker: _nested(queues) for broker, queues in sorted(self.queues.items())
            }
        if self.first is not None:
            start[_FIRST] = dict(sorted(self.first.items()))
        return dict(sorted(self.brokers.items())) | ({START: start} if start else {})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StreamOffset:
        """The offset that a document stands for.

        Raises:
            UsageError: if it is none of ours, as with the checkpoint of another source.
        """
        try:
            start = document.get(START, {})
            time, first = start.get(_TIME), start.get(_FIRST)
            return cls(
                brokers=_offsets({k: v for k, v in document.items() if k != START}),
                since_ms=None if time is None else int(time),
                queues={
                    broker: {
                        (topic, int(queue)): int(offset)
                        for topic, by_queue in topics.items()
                        for queue, offset in by_queue.items()
                    }
                    for broker, topics in start.get(_QUEUES, {}).items()
                },
                first=None if first is None else _offsets(first),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the checkpoint holds no offsets of this source: {document!r}: {error}"
            ) from error

    def moved(self, brokers: Mapping[str, int]) -> StreamOffset:
        """This offset with other places in some stores' logs."""
        return replace(self, brokers={**self.brokers, **brokers})


def _offsets(document: Mapping[str, Any]) -> dict[str, int]:
    for value in document.values():
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no physical offset")
    return dict(document)


def _nested(queues: Mapping[Queue, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in sorted(queues.items()):
        found.setdefault(topic, {})[str(queue_id)] = offset
    return found
