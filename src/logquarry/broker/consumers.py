"""Answers the requests of consumer groups: heartbeats, offsets, locks of queues, and progress.

The rules follow RocketMQ's ``ClientManageProcessor``, ``ConsumerManageProcessor`` and
``RebalanceLockManager``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Set
from functools import partial
from typing import Any, Final

from logquarry.broker.clients import Client, objects, parse_expression
from logquarry.broker.connection import Request
from logquarry.broker.core import Core, Part, answers
from logquarry.broker.statistics import Statistics
from logquarry.broker.tables import ANY
from logquarry.format import broker_json
from logquarry.format.broker_json import TopicConfig
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode, parse_body
from logquarry.read.get_message import TransferLimits
from logquarry.store.consumer.group import retry_topic

_MOST_LOCKS: Final = 100_000
_LONGEST_NAMES: Final = 512
"""Maximum length in characters of a lock's group, topic and client id together."""
_LOCK_SECONDS: Final = 60.0
"""Time in seconds after which a lock ends if the client has not renewed it
(``REBALANCE_LOCK_MAX_LIVE_TIME``).
"""


class Consuming(Part):
    """Answers heartbeats, and requests for lists of consumers, for offsets and for locks."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._locks: dict[tuple[str, str, int], tuple[str, float]] = {}

    # ---------------------------------------------------------------------------------- heartbeats
    @answers(RequestCode.HEART_BEAT)
    def heartbeat(self, request: Request) -> None:
        """Register a client in its groups. Create groups that are missing, and their retry topics.

        If one of the groups is refused, the client still joins its other groups.
        """
        core, document = self._core, parse_body(request.command.body)
        client_id = str(document.get("clientID") or "")
        producers = [str(one.get("groupName")) for one in objects(document, "producerDataSet")]
        consumers = []
        refused: Refused | None = None
        for one in objects(document, "consumerDataSet"):
            try:
                self._ensure_group(str(one.get("groupName") or ""))
                consumers.append(one)
            except Refused as error:
                refused = error
        command = request.command
        core.clients.heartbeat(
            Client(
                *(client_id, request.connection, command.language, command.version),
                *(time.monotonic(), request.account),
            ),
            producers,
            consumers,
        )
        if refused is not None:
            raise refused
        request.reply()

    def _ensure_group(self, name: str) -> None:
        core = self._core
        core.require_group(name)
        if core.writer is not None and core.tables.topic(retry_topic(name)) is None:
            core.create_topic(retry_topic(name), 1)

    @answers(RequestCode.UNREGISTER_CLIENT)
    def unregister(self, request: Request) -> None:
        """Remove a client that is shutting down."""
        fields = request.fields
        self._core.clients.unregister(
            request.connection, fields["producerGroup"], fields["consumerGroup"]
        )
        request.reply()

    @answers(RequestCode.CHECK_CLIENT_CONFIG)
    def check_config(self, request: Request) -> None:
        """Check the filter of a subscription; raise Refused if the filter is invalid.

        Consumers send this request before they start.
        """
        document = parse_body(request.command.body).get("subscriptionData")
        if isinstance(document, dict):
            parse_expression(str(document.get("subString") or ""), document.get("expressionType"))
        request.reply()

    @answers(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
    def consumer_list(self, request: Request) -> None:
        """Answer with the client ids of the connected consumers of a group."""
        group = request.fields["consumerGroup"]
        ids = self._core.clients.consumer_ids(group)
        if not ids:
            raise Refused(f"no consumer for this group, {group[:200]}")
        request.reply_json({"consumerIdList": ids})

    # ------------------------------------------------------------------------------------- offsets
    @answers(RequestCode.QUERY_CONSUMER_OFFSET)
    async def query_offset(self, request: Request) -> None:
        """Answer with the offset that a group has committed in a queue."""
        core, fields = self._core, request.fields
        topic, queue_id = fields["topic"], fields["queueId"]
        offset = core.tables.offsets.of(topic, fields["consumerGroup"]).get(queue_id)
        if offset is None:
            offset = await core.slow(partial(self._start_of, topic, queue_id))
        if offset is None:
            raise Refused(
                "Not found, maybe this group consumer boot first", ResponseCode.QUERY_NOT_FOUND
            )
        request.reply(fields={"offset": str(offset)})

    def _start_of(self, topic: str, queue_id: int) -> int | None:
        # RocketMQ's checkInDiskByConsumeOffset has the same rule. A new group starts at 0 under two
        # conditions: the queue still has its first message, and the distance of this message from
        # the log's end is so small that RocketMQ expects the message in memory. In all other cases,
        # the client's ConsumeFromWhere determines the start.
        store = self._core.store
        queue = store.queue(topic, queue_id)
        if queue is None:
            return 0
        if queue.min_offset > 0:
            return None
        memory = TransferLimits.of(store.config).memory_bytes
        first = next(queue.entries(0, 1), None)
        is_young = first is None or store.max_offset - first[1].physical_offset <= memory
        return 0 if is_young else None

    @answers(RequestCode.UPDATE_CONSUMER_OFFSET)
    def update_offset(self, request: Request) -> None:
        """Commit the offset of a group in a queue, in memory. Tables.save_offsets writes it."""
        core, fields = self._core, request.fields
        group, queue_id = fields["consumerGroup"], fields["queueId"]
        core.require_group(group)
        topic = core.require_queue(fields["topic"], queue_id, ANY)
        if fields["commitOffset"] >= 0:
            core.tables.commit_offset(topic.name, group, queue_id, fields["commitOffset"])
        request.reply()

    # --------------------------------------------------------------------------------------- locks
    @answers(RequestCode.LOCK_BATCH_MQ)
    def lock(self, request: Request) -> None:
        """Lock queues for a client of a group.

        Answer with the queues that are now locked for the client.
        """
        client, keys = self._queues_of(request)
        now = time.monotonic()
        had: list[Mapping[str, Any]] = []
        for key in keys:
            owner, until = self._locks.get(key, (client, 0.0))
            if owner == client or until < now:
                if key not in self._locks and len(self._locks) >= _MOST_LOCKS:
                    break
                self._locks[key] = client, now + _LOCK_SECONDS
                had.append(self._core.queue_key(key[1], key[2]))
        request.reply_json({"lockOKMQSet": had})

    @answers(RequestCode.UNLOCK_BATCH_MQ)
    def unlock(self, request: Request) -> None:
        """Release the locks that a client has on queues."""
        client, keys = self._queues_of(request)
        for key in keys:
            if self._locks.get(key, ("", 0.0))[0] == client:
                del self._locks[key]
        request.reply()

    def _queues_of(self, request: Request) -> tuple[str, list[tuple[str, str, int]]]:
        document = parse_body(request.command.body)
        group, client = str(document.get("consumerGroup")), str(document.get("clientId"))
        self._core.clients.require_owner(client, request.account)
        keys = []
        longest = _LONGEST_NAMES - len(group) - len(client)
        for queue in objects(document, "mqSet"):
            topic, queue_id = str(queue.get("topic")), queue.get("queueId", 0)
            if isinstance(queue_id, int) and len(topic) <= longest:
                keys.append((group, topic, queue_id))
        return client, keys

    def expire_locks(self) -> None:
        """Remove locks that were not renewed in time."""
        now = time.monotonic()
        self._locks = {key: value for key, value in self._locks.items() if value[1] >= now}


QueueStats = list[tuple[dict[str, Any], dict[str, int]]]
"""For each queue, RocketMQ's documents ``MessageQueue`` and ``OffsetWrapper``."""


class Progress(Part):
    """Answers requests about the progress of consumer groups."""

    def __init__(self, core: Core, statistics: Statistics) -> None:
        super().__init__(core)
        self._statistics = statistics

    def _topics(self, group: str, topics: Set[str]) -> list[TopicConfig]:
        # Leave out topics to which the connected consumers of the group no longer subscribe.
        core = self._core
        online = core.clients.consumers.get(group)
        if online is not None and online.filters:
            topics = topics & online.filters.keys()
        return [topic for name in sorted(topics) if (topic := core.tables.topic(name)) is not None]

    def _consumed(self, group: str) -> set[str]:
        return {name for name, other in self._core.tables.offsets.groups() if other == group}

    def _rate(self, group: str, topics: list[TopicConfig]) -> float:
        return sum(self._statistics.rate("GROUP_GET_NUMS", (topic.name, group)) for topic in topics)

    @answers(RequestCode.GET_CONSUME_STATS)
    async def of_group(self, request: Request) -> None:
        """Answer with the end of each queue, and a group's offset in it (``ConsumeStats``)."""
        core, fields = self._core, request.fields
        group = fields["consumerGroup"]
        wanted = fields["topic"]
        topics = self._topics(group, {wanted} if wanted else self._consumed(group))
        pairs = await core.slow(partial(_stats, core, group, topics))
        document = _consume_stats(pairs, self._rate(group, topics))
        request.reply_json(document)

    @answers(RequestCode.GET_BROKER_CONSUME_STATS)
    async def of_all_groups(self, request: Request) -> None:
        """Answer with the progress of each group in each topic (``ConsumeStatsList``)."""
        core = self._core
        # Read the offsets only once: groups() copies them, and there may be 20,000 groups.
        consumed: dict[str, set[str]] = {}
        for name, group in core.tables.offsets.groups():
            consumed.setdefault(group, set()).add(name)
        groups = []
        lag = 0
        for group in sorted(core.tables.groups):
            found = []
            for topic in self._topics(group, consumed.get(group, set())):
                pairs = await core.slow(partial(_stats, core, group, [topic]))
                lag += sum(stats["brokerOffset"] - stats["consumerOffset"] for _, stats in pairs)
                found.append(_consume_stats(pairs, self._rate(group, [topic])))
            groups.append({group: found})
        document = {"brokerAddr": core.address, "consumeStatsList": groups, "totalDiff": lag}
        request.reply_json(document)

    @answers(RequestCode.QUERY_TOPICS_BY_CONSUMER)
    def topics_of_group(self, request: Request) -> None:
        """Answer with the topics for which a group has offsets."""
        request.reply_json({"topicList": sorted(self._consumed(request.fields["group"]))})

    @answers(RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
    def subscription(self, request: Request) -> None:
        """Answer with a group's subscription to a topic, if the group has connected consumers."""
        group, topic = request.fields["group"], request.fields["topic"]
        document: dict[str, Any] = {"group": group, "topic": topic}
        online = self._core.clients.consumers.get(group)
        if online is not None and topic in online.filters:
            document["subscriptionData"] = dict(online.filters[topic].document)
        request.reply_json(document)

    @answers(RequestCode.CLONE_GROUP_OFFSET)
    def clone(self, request: Request) -> None:
        """Copy the offsets of one group to another group: for one topic, or for all topics."""
        core, fields = self._core, request.fields
        source, target = fields["srcGroup"], fields["destGroup"]
        if core.writer is not None:
            core.require_group(target)
        for name, group in list(core.tables.offsets.groups()):
            if group == source and name == (fields["topic"] or name):
                for queue_id, offset in core.tables.offsets.of(name, source).items():
                    core.tables.commit_offset(name, target, queue_id, offset)
        request.reply()


def _consume_stats(pairs: QueueStats, rate: float) -> dict[str, Any]:
    return {"consumeTps": rate, "offsetTable": broker_json.ObjectKeys(pairs)}


def _stats(core: Core, group: str, topics: list[TopicConfig]) -> QueueStats:
    found = []
    for topic in topics:
        offsets = core.tables.offsets.of(topic.name, group)
        for queue_id in range(topic.read_queues):
            first, end = core.store.queue_offsets(topic.name, queue_id)
            offset = offsets.get(queue_id, 0)
            time_ms = store_time(core, topic.name, queue_id, offset - 1, first)
            stats = {
                "brokerOffset": end,
                "consumerOffset": offset,
                "lastTimestamp": time_ms,
                # mqadmin 5 shows pullOffset minus consumerOffset as the number of messages in
                # flight. The broker does not count these messages, so both offsets are equal.
                "pullOffset": offset,
            }
            found.append((core.queue_key(topic.name, queue_id), stats))
    return found


def store_time(core: Core, topic: str, queue_id: int, offset: int, first: int) -> int:
    """Return the store time of the message at a queue offset; 0 if there is no such message."""
    if offset < first:
        return 0
    messages = core.store.get(topic, queue_id, offset, 1).messages
    return messages[0].store_timestamp if messages else 0
