"""Answers the requests that put messages: sends, batches, ends of transactions, messages that a
consumer sends back, and replies to producers.

The event loop makes the messages. One thread appends them to the log in the order of the requests.
The broker answers a request when the put no longer waits for the flush or for a replica. If too
many sends wait for the disk, the broker answers the next one with SYSTEM_BUSY.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from logquarry.broker.acl import HIDDEN, PUB, SUB
from logquarry.broker.connection import Request
from logquarry.broker.core import BUSY, Core, Mailbox, Part, answers
from logquarry.broker.limits import SparingLog
from logquarry.broker.tables import INHERIT, WRITE
from logquarry.errors import (
    CorruptStore,
    LogquarryError,
    MessageNotFound,
    MessageRejected,
    StoreUnavailable,
)
from logquarry.format import frame, sys_flag
from logquarry.format import properties as props
from logquarry.format.broker_json import TopicConfig
from logquarry.message import Message
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from logquarry.store.consumer.group import (
    DEAD_PREFIX,
    MAX_RECONSUME_TIMES,
    RETRY_PREFIX,
    dead_topic,
    sent_back,
)
from logquarry.store.transaction.checks import OpenTransaction
from logquarry.write.put_result import PutResult, PutStatus
from logquarry.write.settling import PutFuture

_CODES: Final = {
    PutStatus.PUT_OK: ResponseCode.SUCCESS,
    PutStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    PutStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    PutStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
}
# Comparing with a constant is faster than looking up the member of the enum each time.
_PUT_OK: Final = PutStatus.PUT_OK
_SUCCESS: Final = int(ResponseCode.SUCCESS)
_WAITS: Final = f"{props.WAIT}{props.NAME_VALUE_SEPARATOR}true"
_WAITS_PROPERTY: Final = re.compile(
    f"{props.PROPERTY_SEPARATOR}{_WAITS}(?={props.PROPERTY_SEPARATOR}|$)"
    f"|^{_WAITS}(?:{props.PROPERTY_SEPARATOR}|$)"
)
_SEPARATOR: Final = props.PROPERTY_SEPARATOR
_WAITS_AMID: Final = f"{_SEPARATOR}{_WAITS}{_SEPARATOR}"
_HALF: Final = f"{props.TRANSACTION_PREPARED}{props.NAME_VALUE_SEPARATOR}true"
_CLUSTER: Final = "CLUSTER"
_NO_TRANSACTION: Final = ~sys_flag.TRANSACTION_MASK
_BATCH: Final = int(RequestCode.SEND_BATCH_MESSAGE)
_CHOOSES_RETRIES: Final = 121
"""The number of version V3_4_9 in RocketMQ's ``MQVersion``.

Clients of this version or a later one send the field maxReconsumeTimes.
"""

Put = Callable[[Message], PutFuture]
_Put = tuple[Request, Message, Put]


class Sending(Part):
    """Puts the messages that clients send (``SendMessageProcessor``)."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._waiting = 0
        self._waiting_bytes = 0
        self._new: list[_Put] = []
        self._settled: Mailbox[tuple[Request, Message, PutFuture]] = Mailbox(
            core.loop, lambda item: self._answer(*item)
        )
        region = {"MSG_REGION": "DefaultRegion"}
        self._added = props.encode({_CLUSTER: core.options.cluster} | region)
        self._extra = region | {"TRACE_ON": "true"}

    @answers(RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE)
    def send(self, request: Request) -> None:
        """Put the message or the batch of a request into the store."""
        core, fields = self._core, request.fields
        writer = core.tables.require_writer()
        is_batch = fields["batch"] or request.command.code == _BATCH
        topic = self.topic_of(fields)
        queue_id = _queue_id(topic, fields["queueId"])
        text = self.properties_of(fields["properties"])
        name = topic.name
        if name.startswith(RETRY_PREFIX) and not is_batch:
            name, queue_id = self._retry_topic(request, name, queue_id)
        message = self.message_of(request, name, queue_id, b"" if is_batch else None, text)
        if is_batch:
            wire = request.command.body
            self.append(
                request, message, lambda shared: writer.put_batch_async(wire=wire, message=shared)
            )
        elif _HALF in text and props.decode(text).get(props.TRANSACTION_PREPARED) == "true":
            group = fields["producerGroup"]
            self.append(request, message, lambda half: writer.put_half(half, group))
        else:
            self.append(request, message, writer.put_async)

    def append(self, request: Request, message: Message, put: Put) -> None:
        """Let the thread for puts call ``put``, and answer the request with its result."""
        core, options = self._core, self._core.options
        size = self._waiting_bytes + len(request.command.body)
        if self._waiting >= options.most_waiting or size > options.most_waiting_bytes:
            core.counts.refused += 1
            raise Refused(BUSY, ResponseCode.SYSTEM_BUSY)
        core.new_queues.require_room(message.topic, message.queue_id)
        self._waiting += 1
        self._waiting_bytes = size
        if not self._new:
            core.loop.call_soon(self._push)
        self._new.append((request, message, put))

    def _push(self) -> None:
        # The thread gets all puts of one iteration of the event loop as one job.
        puts, self._new = self._new, []
        # append() has limited the number of waiting puts, so submit() never refuses a job here.
        self._core.lanes.puts.submit(partial(_put_all, puts), partial(self._appended, puts))

    def _appended(self, puts: list[_Put], results: Any, error: BaseException | None) -> None:
        for (request, message, _), result in zip(puts, results or (), strict=False):
            if isinstance(result, BaseException):
                self._failed(request, message, result)
            elif result.done():
                self._answer(request, message, result)
            else:
                # One flush ends the waits of many puts. The callbacks of these puts use a mailbox,
                # which wakes the event loop only once.
                result.add_done_callback(partial(self._settle, request, message))
        if error is not None:
            for request, message, _ in puts:
                self._failed(request, message, error)

    def _settle(self, request: Request, message: Message, future: PutFuture) -> None:
        self._settled.post((request, message, future))

    def _answer(self, request: Request, message: Message, future: PutFuture) -> None:
        try:
            result = future.result()
        except LogquarryError as error:
            self._failed(request, message, error)
        else:
            self._done(request)
            self._succeeded(request, message, result)

    def _failed(self, request: Request, message: Message, error: BaseException) -> None:
        self._core.new_queues.failed(message.topic, message.queue_id)
        self._done(request)
        request.fail(refusal_of(error))

    def _done(self, request: Request) -> None:
        self._waiting -= 1
        self._waiting_bytes -= len(request.command.body)

    def _succeeded(self, request: Request, message: Message, result: PutResult) -> None:
        self._core.counts.add_put(message.topic, result.message_count, result.size)
        fields = {
            "msgId": result.message_id,
            "queueId": str(message.queue_id),
            "queueOffset": str(result.queue_offset),
            **self._extra,
        }
        text = message.properties_string
        if isinstance(text, str) and _HALF in text:
            unique = props.decode(text).get(props.UNIQ_KEY)
            if unique is not None:
                fields["transactionId"] = unique
        status = result.status
        request.reply(_SUCCESS if status is _PUT_OK else _CODES[status], fields=fields)

    # --------------------------------------------------------------------------------- the message
    def topic_of(self, fields: Mapping[str, Any]) -> TopicConfig:
        """Return the topic of a message to put.

        Create a missing topic if the options allow it. A retry or dead letter topic is always
        created. Raise Refused if the topic cannot be created, or if clients must not use it.
        """
        core = self._core
        name: str = fields["topic"]
        if name in HIDDEN:
            raise Refused(
                f"Sending message to topic[{name}] is forbidden.", ResponseCode.NO_PERMISSION
            )
        topic = core.tables.topic(name)
        if topic is None:
            self._create(name, fields["defaultTopic"], fields["defaultTopicQueueNums"])
        elif topic.perm & WRITE:
            return topic
        return core.require_topic(name, WRITE)

    def _create(self, name: str, default: str, queues: int) -> None:
        # The rules are those of RocketMQ's createTopicInSendMessageMethod.
        tables = self._core.tables
        if name.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            self._core.create_topic(name, 1)
            return
        model = tables.topic(default)
        if self._core.options.create_topics and model is not None and model.perm & INHERIT:
            self._core.create_topic(name, max(1, min(queues, model.write_queues)))

    def _retry_topic(self, request: Request, name: str, queue_id: int) -> tuple[str, int]:
        # As in RocketMQ's handleRetryAndDLQ, a message that was retried too often goes to the
        # dead-letter topic.
        group = name.removeprefix(RETRY_PREFIX)
        settings = self._core.require_group(group)
        if request.fields["reconsumeTimes"] < most_retries(request, settings):
            return name, queue_id
        dead = dead_topic(group)
        if self._core.tables.topic(dead) is None:
            self._core.create_topic(dead, 1)
        return dead, 0

    def properties_of(self, text: str) -> str:
        """Return a client's property string as a RocketMQ broker would store it."""
        # Remove WAIT=true: all clients send it, although it is the default. Add the cluster
        # for replies. Add the region: without it, Java consumers of 5.3 and later send no trace.
        text = text.removesuffix(_SEPARATOR)
        if _WAITS in text:
            # RocketMQ's clients write WAIT=true once, between two properties. The fast replacement
            # handles this form. For other strings, use the slower regular expression.
            text = text.replace(_WAITS_AMID, _SEPARATOR, 1)
            if _WAITS in text:
                text = _WAITS_PROPERTY.sub("", text)
        return f"{text}{_SEPARATOR}{self._added}" if text else self._added

    def message_of(
        self, request: Request, topic: str, queue_id: int, body: bytes | None, text: str
    ) -> Message:
        """Make a message from a request.

        If ``body`` is None, the message gets the request's body. For a batch, ``body`` is empty.
        """
        fields = request.fields
        # The tuple has the order of Message's fields. The decoder has already checked the types of
        # the values.
        return Message.of_checked(
            (
                topic,
                request.command.body if body is None else body,
                queue_id,
                None,
                None,
                None,
                text,
                0,
                True,
                fields["flag"],
                fields["sysFlag"] & _NO_TRANSACTION,
                0,
                fields["bornTimestamp"],
                request.connection.host,
                self._core.host,
                fields["reconsumeTimes"],
                0,
            )
        )


def _put_all(puts: list[_Put]) -> list[PutFuture | BaseException]:
    results: list[PutFuture | BaseException] = []
    for _, message, put in puts:
        try:
            results.append(put(message))
        except Exception as error:
            results.append(error)
    return results


def _queue_id(topic: TopicConfig, queue_id: int) -> int:
    count = max(topic.write_queues, topic.read_queues)
    if queue_id < 0:
        return random.randrange(max(1, topic.write_queues))
    if queue_id >= count:
        raise Refused(f"request queueId[{queue_id}] is illegal, queues of {topic.name}: {count}")
    return queue_id


def most_retries(request: Request, settings: Mapping[str, Any]) -> int:
    """Return the number of retries (0 or more) after which a message becomes a dead letter."""
    # Only clients of RocketMQ 3.4.9 or later send this number. For others, use the setting of the
    # group.
    wanted: int | None = request.fields["maxReconsumeTimes"]
    if wanted is None or request.command.version < _CHOOSES_RETRIES:
        return int(settings.get("retryMaxTimes", MAX_RECONSUME_TIMES))
    return wanted


def refusal_of(error: BaseException) -> BaseException:
    """Return the error that the client gets, for an error that a put raised."""
    if isinstance(error, MessageRejected):
        return Refused(str(error), ResponseCode.MESSAGE_ILLEGAL)
    if isinstance(error, StoreUnavailable):
        if error.status == "OS_PAGECACHE_BUSY":
            return Refused(f"[PC_SYNCHRONIZED]broker busy: {error}", ResponseCode.SYSTEM_BUSY)
        return Refused(str(error), ResponseCode.SERVICE_NOT_AVAILABLE)
    return error


# ----------------------------------------------------------------------------- transactions
_lonely = SparingLog(logging.getLogger(__name__))

_STATES: Final = {8: "commit", 12: "rollback"}
"""The values that commit and roll back (``MessageSysFlag``).

Any other value leaves the transaction open.
"""


class Transactions(Part):
    """Ends and checks the transactions of producers (``EndTransactionProcessor``).

    To check a transaction, the broker sends the half message to a producer of the group. The
    producer later ends the transaction.
    """

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._checks: Mailbox[OpenTransaction] = Mailbox(core.loop, self._ask)
        if core.writer is not None:
            core.writer.start_transaction_checks(self.check)

    @answers(RequestCode.END_TRANSACTION)
    async def end(self, request: Request) -> None:
        """Commit a transaction or roll it back.

        If the producer does not know the outcome, leave the transaction open.
        """
        core, fields = self._core, request.fields
        writer = core.tables.require_writer()
        state = _STATES.get(fields["commitOrRollback"])
        at, entry = fields["commitLogOffset"], fields["tranStateTableOffset"]
        read = partial(core.store.message_at, at)
        if request.account is not None:
            half = await core.slow(read)
            request.require(half.properties.get(props.REAL_TOPIC, ""), PUB)
        if state is not None:
            job = partial(
                writer.end_transaction, at, state, group=fields["producerGroup"], queue_offset=entry
            )
            future = await core.lanes.puts.run(job)
            if future is not None:
                try:
                    await future
                except LogquarryError as error:
                    raise refusal_of(error) from error
                if state == "rollback" and core.new_queues.awaits_any():
                    core.new_queues.rolled_back((await core.slow(read)).properties)
        request.reply()

    def check(self, transaction: OpenTransaction) -> str:
        """Let the event loop send a check to a producer. The producer ends the transaction later.

        The store's thread that checks open transactions calls this method.
        """
        self._checks.post(transaction)
        return "unknown"

    def _ask(self, transaction: OpenTransaction) -> None:
        message = transaction.message
        group = message.properties.get(props.PRODUCER_GROUP, "")
        producer = self._core.clients.producer_of(group, transaction.topic)
        if producer is None:
            _lonely.warning(
                "the transaction at %d stays open: no producer of group %r is connected",
                *(message.physical_offset, group),
            )
            return
        # Send the message as a commit would put it: with its own topic and queue.
        shown = dataclasses.replace(
            message.frame, topic=transaction.topic.encode(), queue_id=transaction.queue_id
        )
        unique = message.uniq_key or ""
        producer.connection.tell(
            RequestCode.CHECK_TRANSACTION_STATE,
            {
                "tranStateTableOffset": str(message.queue_offset),
                "commitLogOffset": str(message.physical_offset),
                "msgId": unique,
                "transactionId": unique,
                "offsetMsgId": message.message_id,
            },
            frame.encode(shown),
        )


class Retrying(Part):
    """Puts a message again if a consumer sends it back (``asyncConsumerSendMsgBack``)."""

    @answers(RequestCode.CONSUMER_SEND_MSG_BACK)
    async def send_back(self, request: Request) -> None:
        """Put a copy of a message into the group's retry topic, or into its dead letter topic."""
        core, fields = self._core, request.fields
        writer = core.tables.require_writer()
        group = fields["group"]
        settings = core.require_group(group)
        if int(settings.get("retryQueueNums", 1)) <= 0:
            # If the group has no retry queues, drop the message, as RocketMQ does.
            request.reply()
            return
        most = most_retries(request, settings)
        try:
            message = await core.slow(partial(core.store.message_at, fields["offset"]))
        except (MessageNotFound, CorruptStore) as error:
            # Like RocketMQ, answer only with the offset: clients must not see the error's path.
            what = fields["offset"]
            if isinstance(error, CorruptStore):
                _lonely.warning("a consumer cannot send a message back: %s", error)
            raise Refused(f"look message by offset failed, {what}") from error
        # Check the permission for the message's own topic: the request may name a false
        # originTopic.
        request.require(message.topic, SUB)
        back = sent_back(message, group, fields["delayLevel"], most)
        if core.tables.topic(back.topic) is None:
            core.create_topic(back.topic, 1)
        core.new_queues.require_room(back.topic, back.queue_id)
        try:
            await (await core.lanes.puts.run(partial(writer.put_async, back)))
        except LogquarryError as error:
            core.new_queues.failed(back.topic, back.queue_id)
            raise refusal_of(error) from error
        # RETRY_TOPIC is the topic from which the message was first delivered. Count only topics
        # that exist: a producer can set the property to any text, and the counts are never deleted.
        topic = message.properties.get(props.RETRY_TOPIC, message.topic)
        if core.tables.topic(topic) is not None:
            core.counts.add_sent_back(topic, group)
        request.reply()


_TO_CLIENT: Final = "REPLY_TO_CLIENT"
_PATIENCE_SECONDS: Final = 3.0


class Replies(Part):
    """Forwards consumers' replies to the producers that wait (``ReplyMessageProcessor``)."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._waiting_bytes = 0

    @answers(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
    async def reply(self, request: Request) -> None:
        """Forward a reply to a waiting producer, and answer after this producer has answered."""
        core, fields = self._core, request.fields
        size = len(request.command.body) + len(fields["properties"])
        if self._waiting_bytes + size > core.options.most_waiting_bytes:
            raise Refused(BUSY, ResponseCode.SYSTEM_BUSY)
        client_id = props.decode(fields["properties"]).get(_TO_CLIENT, "")
        client = core.clients.client(client_id)
        if client is None:
            raise Refused(f"push reply message fail, channel of <{client_id[:200]}> not found.")
        self._waiting_bytes += size
        try:
            answer = await client.connection.ask(
                RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT,
                {
                    "bornHost": request.connection.address,
                    "storeHost": core.address,
                    "storeTimestamp": str(core.clock()),
                    "producerGroup": fields["producerGroup"],
                    "topic": fields["topic"],
                    "defaultTopic": fields["defaultTopic"],
                    "defaultTopicQueueNums": str(fields["defaultTopicQueueNums"]),
                    "queueId": str(fields["queueId"]),
                    "sysFlag": str(fields["sysFlag"]),
                    "bornTimestamp": str(fields["bornTimestamp"]),
                    "flag": str(fields["flag"]),
                    "properties": fields["properties"],
                    "reconsumeTimes": str(fields["reconsumeTimes"]),
                    "unitMode": str(fields["unitMode"]).lower(),
                },
                request.command.body,
                timeout_s=_PATIENCE_SECONDS,
            )
        except (TimeoutError, ConnectionError) as error:
            raise Refused(
                f"push reply message to {client_id[:200]} fail: {str(error) or 'no answer'}"
            ) from error
        finally:
            self._waiting_bytes -= size
        if answer.code != ResponseCode.SUCCESS:
            raise Refused(f"push reply message to {client_id[:200]} fail: {answer.remark}")
        request.reply(
            fields={"msgId": "0", "queueId": str(max(0, fields["queueId"])), "queueOffset": "0"}
        )
