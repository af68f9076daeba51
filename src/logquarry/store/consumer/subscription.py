"""What a consumer wants: a group's name, topics, and which of their messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from logquarry.errors import UsageError
from logquarry.format import tags as tag_expressions
from logquarry.store.consumer.sql_filter import SqlFilter
from logquarry.store.consumer.sql_parser import parse
from logquarry.store.put.topic_names import BROKER_CHECK, LONGEST_TOPIC, name_fault

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"

_LONGEST_GROUP: Final = LONGEST_TOPIC - len(RETRY_PREFIX)


def retry_topic(group: str) -> str:
    """Where messages that a group sent back come again (``MixAll.getRetryTopic``)."""
    return RETRY_PREFIX + group


def dead_topic(group: str) -> str:
    """Where those are kept that it sent back too often (``MixAll.getDLQTopic``)."""
    return DEAD_PREFIX + group


@dataclass(frozen=True)
class Subscription:
    """What one consumer wants. Made by :meth:`of`.

    Attributes:
        group: the group's name.
        topics: the topics that were named, sorted.
        tags: the tags that a message of those must have one of; None for any.
        sql: or the filter that its properties must pass; None for any.
    """

    group: str
    topics: tuple[str, ...]
    tags: frozenset[str] | None
    sql: SqlFilter | None

    @classmethod
    def of(
        cls, group: str, topics: str | Iterable[str], tags: str | None, sql: str | None
    ) -> Subscription:
        """The subscription that some words say.

        Raises:
            UsageError: if a name is none that RocketMQ's broker takes, or no topic is named, or
                tags and a filter both are.
            BadFilter: if the filter cannot be understood.
        """
        fault = name_fault(group, BROKER_CHECK, longest=_LONGEST_GROUP)
        if fault is not None:
            raise UsageError(f"{group!r} is no consumer group: {fault}")
        names = tuple(sorted({topics} if isinstance(topics, str) else set(topics)))
        if not names:
            raise UsageError("a consumer wants at least one topic")
        for name in names:
            if not isinstance(name, str):
                raise UsageError(f"a topic is a text, not {name!r}")
            fault = name_fault(name, BROKER_CHECK)
            if fault is not None:
                raise UsageError(f"{name!r} is no topic to consume: {fault}")
        if tags is not None and sql is not None:
            raise UsageError("tags and an SQL92 filter exclude each other")
        return cls(group, names, tag_expressions.parse(tags), None if sql is None else parse(sql))

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The topics, and the one in which what was sent back comes again."""
        return tuple(dict.fromkeys((*self.topics, retry_topic(self.group))))

    def tags_of(self, topic: str) -> frozenset[str] | None:
        """The tags for messages of one topic: what was sent back was wanted already."""
        return None if self._is_retry(topic) else self.tags

    def filter_of(self, topic: str) -> SqlFilter | None:
        """The filter for messages of one topic, likewise."""
        return None if self._is_retry(topic) else self.sql

    def _is_retry(self, topic: str) -> bool:
        return topic == retry_topic(self.group)
