"""How far groups are: where one begins in a queue, and what of that is only estimated."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logquarry.errors import UsageError
from logquarry.store.consumer.lost_offsets import BEFORE_MS, LostOffsets, OffsetEstimate
from logquarry.store.consumer.reading import QueueReader
from logquarry.store.consumer.subscription import retry_topic
from logquarry.store.disk.consumer_offsets import ConsumerOffsets

logger = logging.getLogger(__name__)

STARTS: Final = ("earliest", "latest", "timestamp")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a group without offsets begins. Made by :meth:`of`.

    Attributes:
        at: earliest, latest or timestamp.
        timestamp_ms: of the last.
    """

    at: str
    timestamp_ms: int = 0

    @classmethod
    def of(cls, start: str | int, timestamp: int | None) -> Start:
        """The start that a user means: a word, or a store time in milliseconds.

        Raises:
            UsageError: if it is none.
        """
        if isinstance(start, int) and not isinstance(start, bool) and timestamp is None:
            return cls("timestamp", start)
        if start not in STARTS:
            raise UsageError(
                f"start is earliest, latest, timestamp or a store time in ms, not {start!r}"
            )
        if (start == "timestamp") != (timestamp is not None):
            raise UsageError('start="timestamp" and timestamp= (milliseconds) belong together')
        return cls(str(start), timestamp or 0)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """How a group begins in the queues of one topic for which it has no offset.

    Attributes:
        queue_ids: the queues that there were then. What comes later it takes from the first
            message on: none of those has passed by before the group was there.
        start: where it begins in them; None for their first messages.
        saved_at: or about when its lost offsets were written, and by which file that is known.
    """

    queue_ids: frozenset[int]
    start: Start | None = None
    saved_at: tuple[int, Path] | None = None


class Progress:
    """The offsets of all groups of one store, with what is known of those that were lost.

    Args:
        offsets: as they were found, and are committed to.
        reader: the store's queues.
        lost: what is left of those that were lost; None where that is not looked for.
    """

    def __init__(
        self, offsets: ConsumerOffsets, reader: QueueReader, lost: LostOffsets | None
    ) -> None:
        self.offsets = offsets
        self._reader = reader
        self._lost = lost
        self._lock = threading.Lock()
        self._beginnings: dict[tuple[str, str], _Beginning] = {}
        self._estimates: dict[tuple[str, str, int], OffsetEstimate] = {}
        if lost is not None:
            self._take_torn(lost)

    def _take_torn(self, lost: LostOffsets) -> None:
        for topic, group, queue_id, offset, path in lost.entries():
            if queue_id not in self.offsets.of(topic, group):
                self._take(group, topic, queue_id, offset, f"so it stands in {path}, which is torn")

    def _take(self, group: str, topic: str, queue_id: int, offset: int, reason: str) -> None:
        self.offsets.commit(topic, group, queue_id, offset)
        estimate = OffsetEstimate(topic, queue_id, offset, reason)
        self._estimates[group, topic, queue_id] = estimate
        logger.warning(
            "group %s, queue %d of %s: its offset was lost; %d is taken for it: %s",
            *(group, queue_id, topic, offset, reason),
        )

    def estimates(self, group: str, topics: Sequence[str]) -> tuple[OffsetEstimate, ...]:
        """Which of a group's offsets were lost and are estimated, since the store was opened."""
        with self._lock:
            return tuple(
                estimate
                for (name, topic, _), estimate in self._estimates.items()
                if name == group and topic in topics
            )

    def begin(self, group: str, topics: Sequence[str], start: Start) -> None:
        """Settle where a group begins in what it has no offsets of; only the first call counts."""
        with self._lock:
            for topic in topics:
                if (group, topic) not in self._beginnings:
                    self._beginnings[group, topic] = self._beginning(group, topic, start)

    def _beginning(self, group: str, topic: str, start: Start) -> _Beginning:
        queue_ids = frozenset(self._reader.queue_ids(topic))
        of_group = {name for name, other in self.offsets.groups() if other == group}
        if topic in of_group:
            return _Beginning(queue_ids)
        lost = self._lost
        if lost is not None and lost.is_lost(group, topic, has_others=bool(of_group)):
            saved_at = lost.saved_at
            if saved_at is not None:
                return _Beginning(queue_ids, saved_at=saved_at)
            logger.warning(
                "group %s: its offsets in %s are lost, and nothing tells when they were written: "
                "it begins at %s",
                *(group, topic, start.at),
            )
        if topic == retry_topic(group):
            # What was sent back is the group's own, whenever that was.
            return _Beginning(queue_ids)
        return _Beginning(queue_ids, start)

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """The queue offset at which a group goes on; one that is settled now is committed."""
        with self._lock:
            known = self.offsets.of(topic, group).get(queue_id)
            if known is not None:
                return known
            beginning = self._beginnings[group, topic]
            offset = self._reader.bounds(topic, queue_id)[0]
            if queue_id in beginning.queue_ids and beginning.saved_at is not None:
                saved_at, path = beginning.saved_at
                offset = self._reader.first_since(topic, queue_id, saved_at - BEFORE_MS)
                reason = f"what came {BEFORE_MS // 1000} s before {path} was last written"
                self._take(group, topic, queue_id, offset, reason)
            elif queue_id in beginning.queue_ids and beginning.start is not None:
                offset = self._first(topic, queue_id, beginning.start)
            self.offsets.commit(topic, group, queue_id, offset)
            return offset

    def _first(self, topic: str, queue_id: int, start: Start) -> int:
        low, high = self._reader.bounds(topic, queue_id)
        if start.at == "latest":
            return high
        if start.at == "timestamp":
            return self._reader.first_since(topic, queue_id, start.timestamp_ms)
        return low
