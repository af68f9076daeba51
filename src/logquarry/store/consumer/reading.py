"""What consumers ask of a store's queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from logquarry.format import java
from logquarry.message import StoredMessage
from logquarry.store.queue.consume_queue import Queue
from logquarry.store.read.get_message import GetMessageStatus, GetResult, TransferLimits

MOST_AT_ONCE: Final = 256
"""Messages of one read."""
AT_ONCE: Final = TransferLimits(
    memory_bytes=java.LONG_MAX,
    count=MOST_AT_ONCE,
    size=1 << 18,
    disk_count=MOST_AT_ONCE,
    disk_size=1 << 18,
)
"""How much one read gives: more than a ``get``, whose caps are for answers over a network."""

_MOVED: Final = (GetMessageStatus.OFFSET_TOO_SMALL, GetMessageStatus.OFFSET_OVERFLOW_BADLY)


class QueueBatch(NamedTuple):
    """Messages of one queue.

    Attributes:
        messages: the messages.
        positions: the queue offset of each. Where a message was put into further queues, its own
            ``queue_offset`` is that of its first one.
        next_offset: the queue offset to read from next.
        is_moved: whether the queue has nothing at the offset that was asked for, which expired or
            never was; then there are no messages, and ``next_offset`` is where to go on.
    """

    messages: Sequence[StoredMessage]
    positions: Sequence[int]
    next_offset: int
    is_moved: bool = False


class QueueReader(Protocol):
    """The queues of one store. Any thread may ask."""

    def queue_ids(self, topic: str) -> Sequence[int]:
        """The queues of a topic, sorted."""

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """First queue offset, and one past the last; (0, 0) for a queue that is not there."""

    def read(
        self, topic: str, queue_id: int, offset: int, max_count: int, tags: frozenset[str] | None
    ) -> QueueBatch:
        """Messages from a queue offset on.

        Raises:
            CorruptFrame: if the first of them is damaged.
        """

    def first_since(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The queue offset of the first message that was stored at a time or later."""


def batch_of(queue: Queue, offset: int, result: GetResult) -> QueueBatch:
    """What a ``get`` gave, with the place in the queue of each message."""
    if result.status in _MOVED:
        return QueueBatch((), (), result.next_offset, is_moved=True)
    if result.status is GetMessageStatus.NO_MESSAGE_IN_QUEUE:
        return QueueBatch((), (), offset)
    after, messages = result.next_offset, result.messages
    if len(messages) == after - offset:
        return QueueBatch(messages, range(offset, after), after)
    return QueueBatch(messages, _positions(queue, offset, after, messages), after)


def _positions(
    queue: Queue, offset: int, after: int, messages: Sequence[StoredMessage]
) -> Sequence[int]:
    if not messages:
        return ()
    places = np.asarray(queue.units(offset, after)["physical_offset"], np.int64).tolist()
    found: list[int] = []
    at = -1
    for message in messages:
        at = places.index(message.physical_offset, at + 1)
        found.append(offset + at)
    return found
