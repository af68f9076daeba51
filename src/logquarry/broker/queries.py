"""Answers queries by key, message id or time, and for queues' ends (``QueryMessageProcessor``)."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from logquarry.broker.acl import SUB
from logquarry.broker.connection import Request
from logquarry.broker.core import Core, Part, answers
from logquarry.errors import MessageNotFound
from logquarry.format.properties import ANY_TAG
from logquarry.format.queue_entry import QueueEntry
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from logquarry.read.messages import frames_of

_MOST_ENTRIES: Final = 1_024


class Queries(Part):
    """Answers queries in the thread for slow calls of the store."""

    @answers(RequestCode.QUERY_MESSAGE)
    async def by_key(self, request: Request) -> None:
        """Answer with the messages of a key; with ``_UNIQUE_KEY_QUERY``, the key is a UNIQ_KEY."""
        fields, store = request.fields, self._core.store
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
        """Answer with the message at a physical offset, which clients take from a message id."""
        offset = request.fields["offset"]
        try:
            message = await self._core.slow(partial(self._core.store.message_at, offset))
        except MessageNotFound as error:
            raise Refused(f"can not find message by the offset, {offset}") from error
        request.require(message.topic, SUB)
        request.reply(body=frames_of((message,)))

    @answers(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP)
    async def by_time(self, request: Request) -> None:
        """Answer with the queue offset of the message stored nearest to a time."""
        fields, store = request.fields, self._core.store
        job = partial(store.offset_by_time, fields["topic"], fields["queueId"], fields["timestamp"])
        request.reply(fields={"offset": str(await self._core.slow(job))})

    @answers(RequestCode.GET_MAX_OFFSET, RequestCode.GET_MIN_OFFSET)
    async def end_of_queue(self, request: Request) -> None:
        """Answer with the first offset of a queue, or with its end (the last offset plus 1)."""
        fields, store = request.fields, self._core.store
        job = partial(store.queue_offsets, fields["topic"], fields["queueId"])
        first, end = await self._core.slow(job)
        is_max = request.command.code == RequestCode.GET_MAX_OFFSET
        request.reply(fields={"offset": str(end if is_max else first)})

    @answers(RequestCode.GET_EARLIEST_MSG_STORETIME)
    async def earliest_time(self, request: Request) -> None:
        """Answer with the store time of a queue's first message, or -1."""
        fields = request.fields
        job = partial(_earliest, self._core, fields["topic"], fields["queueId"])
        request.reply(fields={"timestamp": str(await self._core.slow(job))})

    @answers(RequestCode.QUERY_CONSUME_QUEUE)
    async def queue_entries(self, request: Request) -> None:
        """Answer with entries of a queue, and whether a group's subscription selects their tags."""
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
