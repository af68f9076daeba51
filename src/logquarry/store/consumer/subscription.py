"""The subscription of a consumer: its group, its topics and its filter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from logquarry import arguments
from logquarry.errors import UsageError
from logquarry.format import properties as props
from logquarry.store.consumer.retry import RETRY_PREFIX, retry_topic
from logquarry.store.consumer.sql_filter import SqlFilter
from logquarry.store.consumer.sql_parser import parse
from logquarry.write.message_rules import BROKER_CHECK, LONGEST_TOPIC, name_fault

_LONGEST_GROUP: Final = LONGEST_TOPIC - len(RETRY_PREFIX)


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
            UsageError: if a broker rejects a name, if there is no topic, or if both ``tags`` and
                ``sql`` are given.
            BadFilter: if the filter is invalid.
        """
        arguments.text(group, "group", takes="the name of a consumer group")
        arguments.optional(arguments.text, tags, "tags")
        arguments.optional(arguments.text, sql, "sql")
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

    def tags_of(self, topic: str) -> frozenset[str] | None:
        """Return the tags to match; None for the retry topic, whose messages all match."""
        return None if self._is_retry(topic) else self.tags

    def filter_of(self, topic: str) -> SqlFilter | None:
        """Return the SQL92 filter for messages of a topic; None for the retry topic."""
        return None if self._is_retry(topic) else self.sql

    def _is_retry(self, topic: str) -> bool:
        return topic == retry_topic(self.group)
