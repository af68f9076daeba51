"""Messages that a retention deletes before they are read, delivered or ended.

Lists the consumer groups, the delivery of delayed messages and the open transactions that still
need expiring messages. The retention does not wait for them, as in RocketMQ; the plan only reports
them. If the offset of a group is unknown, all of its expiring messages count as unread.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from logquarry.dialect31.open_transactions import open_in, read_table
from logquarry.disk.config_file import consumer_offsets, delay_offsets
from logquarry.format import java, timer
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.log.layout import StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.read.timers import QUEUE_ID, timers_of
from logquarry.store.consumer.subscription import RETRY_PREFIX
from logquarry.store.transaction.half import GROUP, HALF_TOPIC, OP_TOPIC, ended_by
from logquarry.text import document

DELAYED: Final = "(delayed messages that are not delivered)"
"""Replaces the consumer group if the delivery of delayed messages has not read the messages."""
OPEN: Final = "(transactions that are open)"
"""Replaces the consumer group for half or PREPARED messages of open transactions."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Messages that are deleted before a consumer group has read them.

    Attributes:
        topic: their topic.
        queue_id: their queue.
        group: the consumer group, or DELAYED, or OPEN.
        offset: the next queue offset of the group. For open transactions the queue offset of the
            first one; for PREPARED messages of 3.x its number in the state table.
        messages: number of messages.
    """

    topic: str
    queue_id: int
    group: str
    offset: int
    messages: int

    def to_json(self) -> dict[str, Any]:
        """The finding as a JSON document."""
        return document(self)


def unread(
    layout: StoreLayout,
    log: CommitLog,
    queues: Sequence[Queue],
    firsts: Mapping[QueueKey, tuple[int, int]],
    start: int,
    cut: int,
) -> tuple[Unread, ...]:
    """List the groups that have not read expiring messages.

    Args:
        layout: the store's files.
        log: reads its log.
        queues: all its queues.
        firsts: for each queue that loses messages, its first queue offset before and after.
        start: the log's start.
        cut: the log's start after the retention.
    """
    # At debug level: the retention of a running store calls this every ten seconds.
    consumed = consumer_offsets(layout, logging.DEBUG)
    levels = delay_offsets(layout, logging.DEBUG) or {}
    delivered = {level - 1: offset for level, offset in levels.items()}
    groups = {group for _, group in consumed} - {GROUP}
    readers = {name: offsets for name, offsets in consumed.items() if name[1] in groups}
    # Each consumer group also consumes its retry topic.
    readers = {(RETRY_PREFIX + group, group): {} for group in groups} | readers
    readers[props.SCHEDULE_TOPIC, DELAYED] = delivered
    by_topic: dict[str, list[int]] = defaultdict(list)
    for topic, queue_id in firsts:
        by_topic[topic].append(queue_id)
    found = []
    for (topic, group), offsets in sorted(readers.items()):
        for queue_id in sorted(by_topic[topic]):
            before, after = firsts[topic, queue_id]
            # In a queue without an offset the group starts at the first message.
            offset = offsets.get(queue_id, 0)
            lost = after - max(offset, before)
            if lost > 0:
                found.append(Unread(topic, queue_id, group, offset, lost))
    found += _timers(layout, firsts)
    found += _halves(log, queues, firsts, consumed)
    if layout.has_state_table and cut > start:
        found += _prepared(layout, log, start, cut)
    return tuple(found)


def _timers(layout: StoreLayout, firsts: Mapping[QueueKey, tuple[int, int]]) -> Iterator[Unread]:
    """Expiring timer messages that wait for their time."""
    key = timer.TOPIC, QUEUE_ID
    if key in firsts:
        before, after = firsts[key]
        waiting = sorted(at for at in timers_of(layout).waiting if before <= at < after)
        if waiting:
            yield Unread(*key, DELAYED, waiting[0], len(waiting))


def _halves(
    log: CommitLog,
    queues: Sequence[Queue],
    firsts: Mapping[QueueKey, tuple[int, int]],
    consumed: Mapping[tuple[str, str], Mapping[int, int]],
) -> Iterator[Unread]:
    """Expiring half messages of open transactions."""
    passed = consumed.get((HALF_TOPIC, GROUP), {})
    passed_ops = consumed.get((OP_TOPIC, GROUP), {})
    for (topic, queue_id), (before, after) in sorted(firsts.items()):
        first = max(before, passed.get(queue_id, 0))
        if topic != HALF_TOPIC or first >= after:
            continue
        ops = next(
            (queue for queue in queues if (queue.topic, queue.queue_id) == (OP_TOPIC, queue_id)),
            None,
        )
        ended = ended_by(ops, lambda at: _frame(log, at), passed_ops.get(queue_id, 0))
        still = [at for at in range(first, after) if at not in ended]
        if still:
            yield Unread(topic, queue_id, OPEN, still[0], len(still))


def _prepared(layout: StoreLayout, log: CommitLog, start: int, cut: int) -> Iterator[Unread]:
    """Expiring PREPARED messages (3.x) of open transactions."""
    numbers: dict[QueueKey, list[int]] = defaultdict(list)
    for offset, transaction in open_in(read_table(layout)).items():
        frame = _frame(log, offset) if start <= offset < cut else None
        if frame is not None:
            topic = frame.topic.decode("utf-8", java.UTF8_ERRORS)
            numbers[topic, frame.queue_id].append(transaction.number)
    for (topic, queue_id), found in sorted(numbers.items()):
        yield Unread(topic, queue_id, OPEN, min(found), len(found))


def _frame(log: CommitLog, offset: int) -> Frame | None:
    outcome = log.outcome_at(offset)
    return outcome if isinstance(outcome, Frame) else None
