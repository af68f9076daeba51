"""A consumer group: its retry and dead-letter topics, its subscription, and the queues of each
consumer in this process.

The assignment of queues follows RocketMQ's ``AllocateMessageQueueAveragely``.

A member claims only free queues, and the previous owner releases a queue between two messages. So
no two consumers handle the same message, and the next owner starts after the last handled
message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from logquarry import arguments
from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.store.consumer.sql_filter import SqlFilter, parse
from logquarry.stored_message import StoredMessage
from logquarry.write.message_rules import BROKER_CHECK, LONGEST_TOPIC, name_fault

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"

MAX_RECONSUME_TIMES: Final = 16
"""The default of RocketMQ's ``SubscriptionGroupConfig.retryMaxTimes``."""

_FIRST_LEVEL: Final = 3
_FALSE: Final = "false"
_LONGEST_GROUP: Final = LONGEST_TOPIC - len(RETRY_PREFIX)


def retry_topic(group: str) -> str:
    """Return the topic of messages that a group sent back (``MixAll.getRetryTopic``)."""
    return RETRY_PREFIX + group


def dead_topic(group: str) -> str:
    """Return the topic of messages that a group sent back too often (``MixAll.getDLQTopic``)."""
    return DEAD_PREFIX + group


def lag_of(low: int, high: int, offset: int) -> int:
    """Count the messages that a group with a committed ``offset`` gets from a queue.

    The first queue offset of the queue is ``low``, and the last one is ``high - 1``. If the offset
    is outside of the queue, count from the offset to which the consumer moves, as in RocketMQ. If
    the queue begins at 0 and ends before the offset, the consumer moves to 0, because the queue may
    be a new queue of the same name.
    """
    if offset > high:
        return 0 if low else high
    return high - max(low, offset)


def sent_back(
    message: StoredMessage, group: str, delay_level: int | None, max_reconsume_times: int
) -> Message:
    """Return the message to put if a consumer sends back ``message`` (``consumerSendMsgBack``).

    The new message is a delayed copy for the group's retry topic. If the message was already sent
    back ``max_reconsume_times`` times, the copy is for the dead-letter topic.

    Args:
        delay_level: None or 0 means level 3 (10 s) for the first retry, and one level higher for
            each further retry. A level below 0 means the dead-letter topic.
    """
    arguments.instance(message, "message", StoredMessage, "a StoredMessage of this consumer")
    delay_level = arguments.optional(arguments.int32, delay_level, "delay_level")
    properties = dict(message.properties)
    properties.setdefault(props.RETRY_TOPIC, message.topic)
    properties[props.WAIT] = _FALSE
    level = delay_level or java.to_int(_FIRST_LEVEL + message.reconsume_times)
    frame = message.frame
    topic = retry_topic(group)
    if (delay_level or 0) < 0 or message.reconsume_times >= max_reconsume_times:
        topic, level = dead_topic(group), 0
    properties[props.DELAY] = str(level)
    if not properties.get(props.ORIGIN_MESSAGE_ID, "").strip():
        properties[props.ORIGIN_MESSAGE_ID] = message.message_id
    # Insert the properties in the order of the message, as RocketMQ does: the order in Java's
    # HashMap depends on the order of insertion.
    order = java.hash_map_order(properties)
    return Message(
        topic,
        frame.body,
        properties_string=props.encode({name: properties[name] for name in order}),
        flag=frame.flag,
        sys_flag=frame.sys_flag,
        born_timestamp=frame.born_timestamp,
        born_host=frame.born_host,
        store_host=frame.store_host,
        reconsume_times=java.to_int(frame.reconsume_times + 1),
    )


@dataclass(frozen=True)
class Subscription:
    """A group, its topics, and its filter (tags or SQL92); :meth:`of` makes a subscription."""

    group: str
    topics: tuple[str, ...]
    tags: frozenset[str] | None
    sql: SqlFilter | None

    @classmethod
    def of(
        cls, group: str, topics: str | Iterable[str], tags: str | None, sql: str | None
    ) -> Subscription:
        """Check and parse a subscription.

        Raises:
            UsageError: if a broker would reject a name, if there is no topic, or if both ``tags``
                and ``sql`` are given.
            BadFilter: if the filter is invalid.
        """
        group = arguments.text(group, "group", takes="the name of a consumer group")
        tags = arguments.optional(arguments.text, tags, "tags")
        sql = arguments.optional(arguments.text, sql, "sql")
        fault = name_fault(group, BROKER_CHECK, longest=_LONGEST_GROUP)
        if fault is not None:
            raise UsageError(f"{group!r} is not a valid consumer group: {fault}")
        names = tuple(sorted(set(arguments.names(topics, "topics"))))
        if not names:
            raise UsageError("a consumer needs at least one topic")
        for name in names:
            fault = name_fault(name, BROKER_CHECK)
            if fault is not None:
                raise UsageError(f"{name!r} is not a topic that can be consumed: {fault}")
        if tags is not None and sql is not None:
            raise UsageError("give either tags or an SQL92 filter, not both")
        return cls(group, names, props.parse_tags(tags), None if sql is None else parse(sql))

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The topics, and the group's retry topic."""
        return tuple(dict.fromkeys((*self.topics, retry_topic(self.group))))

    def filter_of(self, topic: str) -> tuple[frozenset[str] | None, SqlFilter | None]:
        """Return the tags to match, and the SQL92 filter. All messages of the retry topic match."""
        return (None, None) if topic == retry_topic(self.group) else (self.tags, self.sql)


def allocate(queue_ids: Sequence[int], count: int, number: int) -> Sequence[int]:
    """Return the queues of one member. Some members can have one queue more than the others.

    Args:
        count: number of members.
        number: the member's index, from 0 on.
    """
    each, rest = divmod(len(queue_ids), count)
    start = number * each + min(number, rest)
    return queue_ids[start : start + each + (number < rest)]


class Member(Protocol):
    """The interface that a group requires of a consumer."""

    @property
    def topics(self) -> Sequence[str]:
        """The topics that the member consumes."""

    def disturb(self) -> None:
        """Make the consumer check its assigned queues after the current message. Thread-safe."""


class ConsumerGroup:
    """The members of one group. Thread-safe.

    ``version`` increases if a member joins or leaves, and if a member releases queues.
    """

    def __init__(
        self, name: str, queue_ids: Callable[[str], Sequence[int]], wake: Callable[[], None]
    ) -> None:
        self.name = name
        self.version = 0
        self._queue_ids = queue_ids
        self._wake = wake
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._owners: dict[QueueKey, Member] = {}

    def join(self, member: Member) -> None:
        """Add a member."""
        with self._lock:
            self._members = [*self._members, member]
        self.share_out()

    def leave(self, member: Member) -> None:
        """Remove a member, and release the member's queues."""
        with self._lock:
            self._members = [other for other in self._members if other is not member]
            self._owners = {key: who for key, who in self._owners.items() if who is not member}
        self.share_out()

    def share_out(self) -> None:
        """Make all members check which queues are assigned to them."""
        with self._lock:
            self.version += 1
            members = self._members
        for member in members:
            member.disturb()
        self._wake()

    def share_of(self, member: Member) -> set[QueueKey]:
        """Return the queues assigned to a member, even if other members still own some of them."""
        members = self._members
        share: set[QueueKey] = set()
        for topic in member.topics:
            others = [other for other in members if topic in other.topics]
            if member in others:
                ids = allocate(self._queue_ids(topic), len(others), others.index(member))
                share |= {(topic, queue_id) for queue_id in ids}
        return share

    def release(self, member: Member, keys: set[QueueKey]) -> None:
        """Release queues, so that other members can claim them. The caller must commit the handled
        messages before the call.
        """
        with self._lock:
            for key in keys:
                if self._owners.get(key) is member:
                    del self._owners[key]
            self.version += 1
        self._wake()

    def claim(self, member: Member, keys: set[QueueKey]) -> set[QueueKey]:
        """Claim queues that are free or that the member already owns; return these queues."""
        with self._lock:
            if member not in self._members:
                return set()
            free = {key for key in keys if self._owners.get(key, member) is member}
            self._owners |= dict.fromkeys(free, member)
            return free
