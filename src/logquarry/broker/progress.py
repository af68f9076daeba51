"""The progress of consumer groups: their offsets beside the ends of the queues."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from logquarry.broker.connection import Handler, Request
from logquarry.broker.core import Core
from logquarry.broker.statistics import Statistics
from logquarry.format import fastjson
from logquarry.format.broker_config import TopicConfig
from logquarry.protocol.remoting_codes import RequestCode

QueueStats = list[tuple[dict[str, Any], dict[str, int]]]
"""``MessageQueue`` and ``OffsetWrapper`` of each queue, as documents."""


class Progress:
    """Answers the requests for the progress of groups.

    Args:
        core: the broker's parts.
        statistics: the broker's counts.
    """

    def __init__(self, core: Core, statistics: Statistics) -> None:
        self._core = core
        self._statistics = statistics

    def handlers(self) -> Mapping[int, Handler]:
        """The requests that this part answers."""
        return {
            RequestCode.GET_CONSUME_STATS: self.of_group,
            RequestCode.GET_BROKER_CONSUME_STATS: self.of_all_groups,
            RequestCode.CLONE_GROUP_OFFSET: self.clone,
            RequestCode.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
        }

    def _topics(self, group: str, wanted: str = "") -> list[TopicConfig]:
        """The topics of a group, or one of them, to which its consumers still subscribe."""
        core, offsets = self._core, self._core.tables.offsets.groups()
        topics = {wanted} if wanted else {name for name, other in offsets if other == group}
        online = core.clients.consumers.get(group)
        if online is not None and online.filters:
            topics &= online.filters.keys()
        return [topic for name in sorted(topics) if (topic := core.tables.topic(name)) is not None]

    def _rate(self, group: str, topics: list[TopicConfig]) -> float:
        return sum(self._statistics.rate("GROUP_GET_NUMS", (topic.name, group)) for topic in topics)

    async def of_group(self, request: Request) -> None:
        """For each queue of a group its end and the group's offset (``ConsumeStats``)."""
        core, fields = self._core, request.fields
        group = fields["consumerGroup"]
        topics = self._topics(group, fields["topic"])
        pairs = await core.slow(partial(_stats, core, group, topics))
        document = _consume_stats(pairs, self._rate(group, topics))
        request.reply(body=fastjson.compact(document).encode("utf-8", "replace"))

    async def of_all_groups(self, request: Request) -> None:
        """The same for each topic of each group (``ConsumeStatsList``)."""
        core = self._core
        groups = []
        lag = 0
        for group in sorted(core.tables.groups):
            found = []
            for topic in self._topics(group):
                pairs = await core.slow(partial(_stats, core, group, [topic]))
                lag += sum(stats["brokerOffset"] - stats["consumerOffset"] for _, stats in pairs)
                found.append(_consume_stats(pairs, self._rate(group, [topic])))
            groups.append({group: found})
        document = {"brokerAddr": core.address, "consumeStatsList": groups, "totalDiff": lag}
        request.reply(body=fastjson.compact(document).encode("utf-8", "replace"))

    def topics_of_group(self, request: Request) -> None:
        """The topics in which a group has offsets."""
        group = request.fields["group"]
        topics = {name for name, other in self._core.tables.offsets.groups() if other == group}
        body = fastjson.compact({"topicList": sorted(topics)})
        request.reply(body=body.encode("utf-8", "replace"))

    def subscription(self, request: Request) -> None:
        """The subscription of the connected consumers of a group to a topic, if they have one."""
        group, topic = request.fields["group"], request.fields["topic"]
        document: dict[str, Any] = {"group": group, "topic": topic}
        online = self._core.clients.consumers.get(group)
        if online is not None and topic in online.filters:
            document["subscriptionData"] = dict(online.filters[topic].document)
        request.reply(body=fastjson.compact(document).encode("utf-8", "replace"))

    def clone(self, request: Request) -> None:
        """Copy the offsets of a group to another group, in one topic or in all its topics."""
        core, fields = self._core, request.fields
        source, target = fields["srcGroup"], fields["destGroup"]
        if core.writer is not None:
            core.require_group(target)
        for name, group in list(core.tables.offsets.groups()):
            if group == source and name == (fields["topic"] or name):
                for queue_id, offset in core.tables.offsets.of(name, source).items():
                    core.tables.offsets.commit(name, target, queue_id, offset)
        request.reply()


def _consume_stats(pairs: QueueStats, rate: float) -> dict[str, Any]:
    return {"consumeTps": rate, "offsetTable": fastjson.ObjectKeys(pairs)}


def _stats(core: Core, group: str, topics: list[TopicConfig]) -> QueueStats:
    found = []
    for topic in topics:
        offsets = core.tables.offsets.of(topic.name, group)
        for queue_id in range(topic.read_queues):
            first, end = core.store.queue_offsets(topic.name, queue_id)
            offset = offsets.get(queue_id, 0)
            time_ms = store_time(core, topic.name, queue_id, offset - 1, first)
            stats = {"brokerOffset": end, "consumerOffset": offset, "lastTimestamp": time_ms}
            found.append((core.queue_key(topic.name, queue_id), stats))
    return found


def store_time(core: Core, topic: str, queue_id: int, offset: int, first: int) -> int:
    """The store time of the message at a queue offset; 0 if the queue has none there.

    Args:
        core: the broker's parts.
        topic: the topic.
        queue_id: the queue.
        offset: the queue offset.
        first: the first queue offset of the queue.
    """
    if offset < first:
        return 0
    messages = core.store.get(topic, queue_id, offset, 1).messages
    return messages[0].store_timestamp if messages else 0
