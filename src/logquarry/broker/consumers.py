"""Heartbeats, consumer lists, offsets, and locks for ordered consumption.

Follows ``ClientManageProcessor``, ``ConsumerManageProcessor`` and ``RebalanceLockManager``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from logquarry.broker.clients import Client, objects, parse_expression
from logquarry.broker.connection import Handler, Request
from logquarry.broker.core import Core
from logquarry.broker.tables import ANY
from logquarry.format import fastjson
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode, parse_body
from logquarry.read.get_message import TransferLimits
from logquarry.store.consumer.subscription import retry_topic

_MOST_LOCKS: Final = 100_000
_LONGEST_NAMES: Final = 512
"""Most characters of the group, the topic and the client of a lock."""
_LOCK_SECONDS: Final = 60.0
"""How long a queue stays locked without a renewal (``REBALANCE_LOCK_MAX_LIVE_TIME``)."""


class Consuming:
    """Answers heartbeats and the requests for consumer lists, offsets and locks.

    Args:
        core: the broker's parts.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._locks: dict[tuple[str, str, int], tuple[str, float]] = {}

    def handlers(self) -> Mapping[int, Handler]:
        """The requests that this part answers."""
        code = RequestCode
        return {
            code.HEART_BEAT: self.heartbeat,
            code.UNREGISTER_CLIENT: self.unregister,
            code.CHECK_CLIENT_CONFIG: self.check_config,
            code.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            code.QUERY_CONSUMER_OFFSET: self.query_offset,
            code.UPDATE_CONSUMER_OFFSET: self.update_offset,
            code.LOCK_BATCH_MQ: self.lock,
            code.UNLOCK_BATCH_MQ: self.unlock,
        }

    # ---------------------------------------------------------------------------------- heartbeats
    def heartbeat(self, request: Request) -> None:
        """Register a client, and create its groups and their retry topics.

        Raises:
            Refused: if the broker does not create a group (the client joins its other groups), or
                if a client of another account has the id.
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
                client_id,
                request.connection,
                command.language,
                command.version,
                time.monotonic(),
                request.account,
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

    def unregister(self, request: Request) -> None:
        """Remove a client that is shutting down."""
        fields = request.fields
        self._core.clients.unregister(
            request.connection, fields["producerGroup"], fields["consumerGroup"]
        )
        request.reply()

    def check_config(self, request: Request) -> None:
        """Check the filter of a consumer before it starts."""
        document = parse_body(request.command.body).get("subscriptionData")
        if isinstance(document, dict):
            parse_expression(str(document.get("subString") or ""), document.get("expressionType"))
        request.reply()

    def consumer_list(self, request: Request) -> None:
        """The ids of the consumers of a group."""
        group = request.fields["consumerGroup"]
        ids = self._core.clients.consumer_ids(group)
        if not ids:
            raise Refused(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {group[:200]}")
        body = fastjson.compact({"consumerIdList": ids})
        # As Java encodes it: otherwise an id with half of a surrogate pair would raise here, and
        # the group would get no list.
        request.reply(body=body.encode("utf-8", "replace"))

    # ------------------------------------------------------------------------------------- offsets
    async def query_offset(self, request: Request) -> None:
        """The committed offset of a group in a queue."""
        core, fields = self._core, request.fields
        topic, queue_id = fields["topic"], fields["queueId"]
        offset = core.tables.offsets.of(topic, fields["consumerGroup"]).get(queue_id)
        if offset is None:
            offset = await core.slow(partial(self._start_of, topic, queue_id))
        if offset is None:
            raise Refused(
                ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first"
            )
        request.reply(fields={"offset": str(offset)})

    def _start_of(self, topic: str, queue_id: int) -> int | None:
        """The start of a new group if the broker decides: 0 if the queue is young.

        It is young if it has its first message, and that message counts as in memory
        (``checkInDiskByConsumeOffset``). Otherwise the client decides, by its ConsumeFromWhere.
        """
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

    def update_offset(self, request: Request) -> None:
        """Commit the offset of a group in a queue, in memory.

        Raises:
            Refused: if there is no such queue, or the group is not created.
        """
        core, fields = self._core, request.fields
        group, queue_id = fields["consumerGroup"], fields["queueId"]
        core.require_group(group)
        topic = core.require_queue(fields["topic"], queue_id, ANY)
        if fields["commitOffset"] >= 0:
            core.tables.offsets.commit(topic.name, group, queue_id, fields["commitOffset"])
        request.reply()

    # --------------------------------------------------------------------------------------- locks
    def lock(self, request: Request) -> None:
        """Lock queues for one client of a group; answer with the queues that it has locked."""
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
        body = fastjson.compact({"lockOKMQSet": had})
        request.reply(body=body.encode("utf-8", "replace"))

    def unlock(self, request: Request) -> None:
        """Release the locks of a client."""
        client, keys = self._queues_of(request)
        for key in keys:
            if self._locks.get(key, ("", 0.0))[0] == client:
                del self._locks[key]
        request.reply()

    def _queues_of(self, request: Request) -> tuple[str, list[tuple[str, str, int]]]:
        """The client and the queues of a request for locks."""
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
        """Forget locks that were not renewed."""
        now = time.monotonic()
        self._locks = {key: value for key, value in self._locks.items() if value[1] >= now}
