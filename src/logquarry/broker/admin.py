"""Answers the requests of administration tools (``AdminBrokerProcessor``), and queries for messages
and queue offsets (``QueryMessageProcessor``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from logquarry.broker.acl import CREDENTIALS, SUB
from logquarry.broker.connection import Request
from logquarry.broker.consumers import store_time
from logquarry.broker.core import BUSY, Core, Part, answers
from logquarry.broker.pull import Pulling
from logquarry.broker.tables import ANY
from logquarry.disk.config_file import delay_offsets
from logquarry.errors import MessageNotFound
from logquarry.format import broker_json
from logquarry.format.broker_json import TopicConfig, as_flag
from logquarry.format.properties import ANY_TAG
from logquarry.format.queue_entry import QueueEntry
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode, parse_body
from logquarry.read.get_message import frames_of

_MOST_ENTRIES: Final = 1_024


class Queries(Part):
    """Answers queries; calls the store in the thread for slow calls."""

    @answers(RequestCode.QUERY_MESSAGE)
    async def by_key(self, request: Request) -> None:
        """Answer with the messages that have a key, at most 64.

        With ``_UNIQUE_KEY_QUERY``, the key is a UNIQ_KEY, and the limit is 32.
        """
        fields, store = request.fields, self._core.store
        if fields["indexType"] == _TAGS:
            raise Refused("the broker's index has no tags: search by key, or consume with a filter")
        count = 32 if fields["_UNIQUE_KEY_QUERY"] else min(fields["maxNum"], 64)
        job = partial(
            store.query,
            fields["topic"],
            fields["key"],
            max(0, fields["beginTimestamp"]),
            max(0, fields["endTimestamp"]),
            count,
        )
        found = await self._core.slow(job) if count > 0 else ()
        if not found:
            raise Refused(
                "can not find message, maybe time range not correct", ResponseCode.QUERY_NOT_FOUND
            )
        request.reply(
            fields={
                "indexLastUpdateTimestamp": str(found[-1].store_timestamp),
                "indexLastUpdatePhyoffset": str(found[-1].physical_offset),
            },
            body=frames_of(found),
        )

    @answers(RequestCode.VIEW_MESSAGE_BY_ID)
    async def by_offset(self, request: Request) -> None:
        """Answer with the message at a physical offset. A message's id contains this offset."""
        offset = request.fields["offset"]
        try:
            message = await self._core.slow(partial(self._core.store.message_at, offset))
        except MessageNotFound as error:
            raise Refused(f"can not find message by the offset, {offset}") from error
        request.require(message.topic, SUB)
        request.reply(body=frames_of((message,)))

    @answers(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    async def by_time(self, request: Request) -> None:
        """Answer with the queue offset of the message that is nearest to a given store time."""
        fields, store = request.fields, self._core.store
        job = partial(store.offset_by_time, fields["topic"], fields["queueId"], fields["timestamp"])
        request.reply(fields={"offset": str(await self._core.slow(job))})

    @answers(RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET)
    async def end_of_queue(self, request: Request) -> None:
        """Answer with a queue's first queue offset, or with its end (last queue offset plus 1)."""
        fields, store = request.fields, self._core.store
        job = partial(store.queue_offsets, fields["topic"], fields["queueId"])
        first, end = await self._core.slow(job)
        is_max = request.command.code == RequestCode.GET_MAX_OFFSET
        request.reply(fields={"offset": str(end if is_max else first)})

    @answers(RequestCode.GET_EARLIEST_MSG_STORETIME)
    async def earliest_time(self, request: Request) -> None:
        """Answer with the store time of a queue's first message, or with -1."""
        fields = request.fields
        job = partial(_earliest, self._core, fields["topic"], fields["queueId"])
        request.reply(fields={"timestamp": str(await self._core.slow(job))})

    @answers(RequestCode.QUERY_CONSUME_QUEUE)
    async def queue_entries(self, request: Request) -> None:
        """Answer with entries of a queue, and whether a group's subscription matches the tags of
        each entry.
        """
        core, fields = self._core, request.fields
        topic, queue_id = fields["topic"], fields["queueId"]
        first, end, entries = await core.slow(
            partial(_entries, core, topic, queue_id, fields["index"], fields["count"])
        )
        document: dict[str, Any] = {"maxQueueIndex": end, "minQueueIndex": first}
        name = fields["consumerGroup"]
        group = core.clients.consumers.get(name)
        found = None if group is None else group.filters.get(topic)
        codes: list[Any] = []
        selects_all = False
        if found is not None:
            document["subscriptionData"] = dict(found.document)
            listed = found.document.get("codeSet")
            codes = listed if isinstance(listed, list) else []
            selects_all = found.document.get("subString") == ANY_TAG
        elif name:
            document["filterData"] = f"{name}@{topic} is not online!"
        document["queueData"] = [
            {
                "eval": selects_all or entry.tags_code in codes,
                "physicOffset": entry.physical_offset,
                "physicSize": entry.size,
                "tagsCode": entry.tags_code,
            }
            for entry in entries
        ]
        request.reply_json(document)


def _entries(
    core: Core, topic: str, queue_id: int, index: int, count: int
) -> tuple[int, int, list[QueueEntry]]:
    queue = core.store.queue(topic, queue_id)
    if queue is None:
        raise Refused(f"{queue_id}@{topic[:200]} is not exist!")
    index = max(index, queue.min_offset)
    entries = queue.entries(index, index + min(max(1, count), _MOST_ENTRIES))
    found = [entry for _, entry in entries]
    if not found:
        raise Refused(f"Index {index} of {queue_id}@{topic[:200]} is not exist!")
    return queue.min_offset, queue.max_offset, found


def _earliest(core: Core, topic: str, queue_id: int) -> int:
    first = core.store.queue_offsets(topic, queue_id).min
    messages = core.store.get(topic, queue_id, first, 1).messages
    return messages[0].store_timestamp if messages else -1


_ASK_SECONDS: Final = 10.0
_MOST_QUEUES: Final = 1_024
_MESSAGE_TYPE: Final = "message.type"
_TAGS: Final = "T"
"""Type of the index entries for tags. Only RocketMQ 5 writes them (``INDEX_TAG_TYPE``)."""


class Admin(Part):
    """Answers mqadmin's requests for topics, groups, clients and resets of offsets."""

    def __init__(self, core: Core, pulling: Pulling) -> None:
        super().__init__(core)
        self._pulling = pulling
        self._forwarded_bytes = 0

    # -------------------------------------------------------------------------------------- topics
    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC)
    async def update_topic(self, request: Request) -> None:
        """Create a topic, or change its queues and permissions."""
        await self._set_topics([request.fields])
        request.reply()

    @answers(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST)
    async def update_topics(self, request: Request) -> None:
        """Create or change the topics of a list (``CreateTopicListRequestBody``)."""
        found = parse_body(request.command.body).get("topicConfigList")
        entries = found if isinstance(found, list) else []
        try:
            topics = [
                {
                    "topic": str(one["topicName"]),
                    **{
                        name: int(one[name]) for name in ("readQueueNums", "writeQueueNums", "perm")
                    },
                    "topicSysFlag": int(one.get("topicSysFlag", 0)),
                    "order": as_flag(one.get("order"), "order"),
                    "attributes": ",".join(one.get("attributes") or ()),
                }
                for one in entries
            ]
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            raise Refused("a topic of the list lacks a field, or a field is invalid") from error
        await self._set_topics(topics)
        request.reply()

    async def _set_topics(self, topics: list[dict[str, Any]]) -> None:
        core = self._core
        try:
            for fields in topics:
                core.tables.set_topic(_topic_of(fields))
        finally:
            # If a topic in the list is illegal, the topics before this topic are already created,
            # so save them.
            await core.slow(core.tables.save)

    @answers(RequestCode.DELETE_TOPIC_IN_BROKER)
    async def delete_topic(self, request: Request) -> None:
        """Remove a topic from the table. The topic's messages stay until their files expire."""
        core, name = self._core, request.fields["topic"]
        if name in core.tables.system_topics:
            raise Refused(f"{name[:200]} is a system topic")
        core.tables.remove_topic(name)
        self._pulling.forget(name)
        await core.slow(core.tables.save)
        request.reply()

    @answers(RequestCode.GET_ALL_TOPIC_CONFIG)
    async def all_topics(self, request: Request) -> None:
        """Answer with all topics and their settings."""
        # The property ``topics`` makes a copy, which another thread can read.
        table, now = self._core.tables.topics, self._core.clock()

        def make() -> str:
            topics = {name: broker_json.topic_entry(topic) for name, topic in table.items()}
            version = {"counter": 0, "timestamp": now}
            return broker_json.compact({"dataVersion": version, "topicConfigTable": topics})

        await self._core.reply_large(request, make)

    @answers(RequestCode.GET_TOPIC_CONFIG)
    def topic_config(self, request: Request) -> None:
        """Answer with a topic's settings.

        mqadmin 5 sends this request before it requests the topic's statistics.
        """
        topic = self._core.require_topic(request.fields["topic"], 7)
        request.reply_json(broker_json.topic_entry(topic))

    @answers(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
    def system_topics(self, request: Request) -> None:
        """Answer with the system topics, which every broker has."""
        request.reply_json({"topicList": sorted(self._core.tables.system_topics)})

    @answers(RequestCode.GET_TOPIC_STATS_INFO)
    async def topic_stats(self, request: Request) -> None:
        """Answer with the min offset, max offset and last store time of each queue of a topic."""
        core, name = self._core, request.fields["topic"]
        topic = core.require_topic(name, 7)
        pairs = await core.slow(partial(_queue_stats, core, topic))
        request.reply_json({"offsetTable": broker_json.ObjectKeys(pairs)})

    @answers(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO)
    def groups_of_topic(self, request: Request) -> None:
        """Answer with the groups that subscribe to a topic, or have committed offsets in it."""
        core, topic = self._core, request.fields["topic"]
        groups = set(core.clients.groups_of(topic))
        groups |= {group for name, group in core.tables.offsets.groups() if name == topic}
        request.reply_json({"groupList": sorted(groups)})

    # -------------------------------------------------------------------------------------- groups
    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    async def update_group(self, request: Request) -> None:
        """Create a subscription group, or change its settings."""
        await self._set_groups([parse_body(request.command.body)])
        request.reply()

    @answers(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST)
    async def update_groups(self, request: Request) -> None:
        """Create or change the groups of a list (``SubscriptionGroupList``)."""
        found = parse_body(request.command.body).get("groupConfigList")
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise Refused("the body has no list of groups")
        await self._set_groups(found)
        request.reply()

    async def _set_groups(self, groups: list[dict[str, Any]]) -> None:
        core = self._core
        core.tables.require_writer()
        try:
            for settings in groups:
                core.tables.set_group(settings)
        finally:
            await core.slow(core.tables.save)

    @answers(RequestCode.DELETE_SUBSCRIPTIONGROUP)
    async def delete_group(self, request: Request) -> None:
        """Remove a subscription group. With ``removeOffset``, also remove the group's offsets."""
        core, fields = self._core, request.fields
        # RocketMQ 5 has renamed the field to cleanOffset.
        with_offsets = fields["removeOffset"] or fields["cleanOffset"]
        core.tables.remove_group(fields["groupName"], with_offsets=with_offsets)
        await core.slow(core.tables.save)
        request.reply()

    @answers(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG)
    async def all_groups(self, request: Request) -> None:
        """Answer with the table of subscription groups."""
        tables = self._core.tables
        await self._core.reply_large(request, lambda: broker_json.compact(tables.group_document()))

    @answers(RequestCode.GET_ALL_CONSUMER_OFFSET)
    async def all_offsets(self, request: Request) -> None:
        """Answer with all consumer offsets."""
        offsets = self._core.tables.offsets
        await self._core.reply_large(
            request, lambda: broker_json.encode_consumer_offsets(offsets.groups())
        )

    @answers(RequestCode.GET_ALL_DELAY_OFFSET)
    def delay_offsets(self, request: Request) -> None:
        """Answer with the queue offset up to which each delay level is delivered."""
        found = delay_offsets(self._core.store.layout) or {}
        request.reply(body=broker_json.encode_delay_offsets(found).encode())

    @answers(RequestCode.GET_CONSUMER_CONNECTION_LIST)
    def consumer_connections(self, request: Request) -> None:
        """Answer with the connected consumers of a group, and their subscriptions."""
        name = request.fields["consumerGroup"]
        group = self._core.clients.consumers.get(name)
        if group is None:
            raise Refused(
                f"the consumer group[{name[:200]}] not online", ResponseCode.CONSUMER_NOT_ONLINE
            )
        document = {
            "connectionSet": [client.document() for client in group.clients.values()],
            "consumeFromWhere": group.start,
            "consumeType": group.consume_type,
            "messageModel": group.model,
            "subscriptionTable": {
                topic: dict(found.document) for topic, found in group.filters.items()
            },
        }
        request.reply_json(document)

    @answers(RequestCode.GET_PRODUCER_CONNECTION_LIST)
    def producer_connections(self, request: Request) -> None:
        """Answer with the connected producers of a group."""
        name = request.fields["producerGroup"]
        members = self._core.clients.producers.get(name)
        if members is None:
            raise Refused(f"the producer group[{name[:200]}] not exist")
        request.reply_json({"connectionSet": [client.document() for client in members.values()]})

    @answers(RequestCode.GET_ALL_PRODUCER_INFO)
    def all_producers(self, request: Request) -> None:
        """Answer with the connected producers of all groups (``ProducerTableInfo``)."""
        core = self._core
        # ``seen`` is a time of the monotonic clock; the answer needs times of the broker's clock.
        shift = core.clock() - round(time.monotonic() * 1_000)
        data = {
            group: [
                {
                    "clientId": client.client_id,
                    "language": client.language,
                    "lastUpdateTimestamp": shift + round(client.seen * 1_000),
                    "remoteIP": client.connection.address,
                    "version": client.version,
                }
                for client in members.values()
            ]
            for group, members in core.clients.producers.items()
        }
        request.reply_json({"data": data})

    @answers(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
    async def reset_offset(self, request: Request) -> None:
        """Make the consumers of a group continue at the messages nearest to a store time.

        If the request names a queue, reset only this queue. If the request also has an offset,
        reset the queue to this offset. If the request names no queue, offsets move forward only
        with ``isForce``.
        """
        core, fields = self._core, request.fields
        group, name = fields["group"], fields["topic"]
        topic = core.require_topic(name, ANY)
        is_of_one = fields["queueId"] is not None and fields["queueId"] >= 0
        if is_of_one:
            core.require_queue(name, fields["queueId"], ANY)
        online = core.clients.consumers.get(group)
        if online is None and not is_of_one:
            raise Refused(
                "Consumer not online, so can not reset the offset of its clients",
                ResponseCode.CONSUMER_NOT_ONLINE,
            )
        wanted = await core.slow(partial(_offsets_to_reset, core, topic, fields))
        current = core.tables.offsets.of(name, group)
        table: list[tuple[dict[str, Any], int]] = []
        for queue_id, offset in wanted.items():
            is_later = offset > current.get(queue_id, -1) >= 0
            is_kept = is_later and not (is_of_one or fields["isForce"])
            table.append((core.queue_key(name, queue_id), current[queue_id] if is_kept else offset))
        body = broker_json.compact({"offsetTable": broker_json.ObjectKeys(table)}).encode()
        if online is None:
            for queue_id, offset in wanted.items():
                core.tables.commit_offset(name, group, queue_id, offset)
            request.reply(body=body)
            return
        header = {"topic": name, "group": group, "timestamp": str(fields["timestamp"])}
        clients = list(online.clients.values())
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                for client in clients:
                    await client.connection.until_writable()
        except TimeoutError:
            raise Refused(
                f"a consumer of <{group}> does not read the bytes sent to it; no offset was reset",
                ResponseCode.CONSUME_MSG_TIMEOUT,
            ) from None
        for client in clients:
            client.connection.tell(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, header, body)
        request.reply(body=body)

    @answers(RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY)
    async def forward(self, request: Request) -> None:
        """Forward to a consumer a request for its state, or a request to consume one message."""
        fields = request.fields
        group, client_id = fields["consumerGroup"], fields["clientId"]
        client = self._core.clients.consumer(group, client_id)
        if client is None:
            raise Refused(f"The Consumer <{group}> <{client_id}> not online")
        given = request.command.ext_fields
        header = {name: value for name, value in given.items() if name not in CREDENTIALS}
        body = request.command.body
        if request.command.code == RequestCode.CONSUME_MESSAGE_DIRECTLY:
            job = partial(self._core.store.message_by_id, fields["msgId"])
            body = frames_of((await self._core.slow(job),))
        # Limit the requests that a consumer has not answered, so that they do not fill the memory.
        size = len(body) + sum(map(len, header.values()))
        if self._forwarded_bytes + size > self._core.options.most_waiting_bytes:
            raise Refused(BUSY, ResponseCode.SYSTEM_BUSY)
        self._forwarded_bytes += size
        try:
            answer = await client.connection.ask(
                RequestCode(request.command.code),
                header,
                body,
                timeout_s=_ASK_SECONDS,
            )
        except (TimeoutError, ConnectionError) as error:
            raise Refused(
                f"consumer <{group}> <{client_id}> does not answer: {error}",
                ResponseCode.CONSUME_MSG_TIMEOUT,
            ) from error
        finally:
            self._forwarded_bytes -= size
        request.reply(answer.code, answer.remark, fields=answer.ext_fields, body=answer.body)


def _topic_of(fields: Mapping[str, Any]) -> TopicConfig:
    for attribute in fields["attributes"].split(","):
        name = attribute.strip().partition("=")[0].lstrip("+-")
        # RocketMQ's dashboard gives each topic a message type. Ignore the type, because only
        # RocketMQ's proxy uses it.
        if name not in ("", _MESSAGE_TYPE):
            raise Refused(
                f"the broker does not support the attribute {name[:80]!r}: "
                "create the topic without it"
            )
    counts = fields["readQueueNums"], fields["writeQueueNums"]
    if not all(1 <= count <= _MOST_QUEUES for count in counts):
        raise Refused(f"a topic has 1 to {_MOST_QUEUES} queues, not {counts}")
    return TopicConfig(
        fields["topic"], *counts, fields["perm"] & 7, fields["topicSysFlag"], fields["order"]
    )


def _queue_stats(core: Core, topic: TopicConfig) -> list[tuple[dict[str, Any], dict[str, int]]]:
    found = []
    for queue_id in range(max(topic.read_queues, topic.write_queues)):
        first, end = core.store.queue_offsets(topic.name, queue_id)
        time_ms = store_time(core, topic.name, queue_id, end - 1, first)
        stats = {"lastUpdateTimestamp": time_ms, "maxOffset": end, "minOffset": first}
        found.append((core.queue_key(topic.name, queue_id), stats))
    return found


def _offsets_to_reset(core: Core, topic: TopicConfig, fields: Mapping[str, Any]) -> dict[int, int]:
    """Return the new offset by queue id, for the queue that the request names or for all queues."""
    queue_id, offset, timestamp = fields["queueId"], fields["offset"], fields["timestamp"]
    if queue_id is None or queue_id < 0:
        return {one: _offset_at(core, topic, one, timestamp) for one in range(topic.read_queues)}
    if offset is None or offset == -1:
        return {queue_id: _offset_at(core, topic, queue_id, timestamp)}
    first, end = core.store.queue_offsets(topic.name, queue_id)
    if not first <= offset <= end:
        raise Refused(f"Target offset {offset} not in consume queue range [{first}-{end}]")
    return {queue_id: offset}


def _offset_at(core: Core, topic: TopicConfig, queue_id: int, timestamp: int) -> int:
    """Return a queue's offset for a store time; the time -1 means the queue's end."""
    if timestamp == -1:
        return core.store.queue_offsets(topic.name, queue_id).max
    return core.store.offset_by_time(topic.name, queue_id, timestamp)
