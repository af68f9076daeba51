"""Puts messages that consumers send back for a retry, and forwards replies to producers."""

from __future__ import annotations

from functools import partial
from typing import Final

from logquarry.broker.acl import SUB
from logquarry.broker.connection import Request
from logquarry.broker.core import BUSY, Core, Part, answers
from logquarry.broker.send import most_retries, refusal_of
from logquarry.errors import CorruptStore, LogquarryError, MessageNotFound
from logquarry.format import properties as props
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from logquarry.store.consumer.subscription import sent_back


class Retrying(Part):
    """Puts messages that consumers send back (``asyncConsumerSendMsgBack``)."""

    @answers(RequestCode.CONSUMER_SEND_MSG_BACK)
    async def send_back(self, request: Request) -> None:
        """Put the message at a physical offset into the group's retry topic, with a delay."""
        core, fields = self._core, request.fields
        writer = core.tables.require_writer()
        group = fields["group"]
        settings = core.require_group(group)
        if int(settings.get("retryQueueNums", 1)) <= 0:
            # Like RocketMQ, drop the message of a group without retry queues.
            request.reply()
            return
        most = most_retries(request, settings)
        try:
            message = await core.slow(partial(core.store.message_at, fields["offset"]))
        except (MessageNotFound, CorruptStore) as error:
            # A wrong offset is the client's fault, and the answer must not contain a path.
            what = fields["offset"] if isinstance(error, MessageNotFound) else error
            raise Refused(f"look message by offset failed, {what}") from error
        # Check the message's own topic: originTopic of the request may be false.
        request.require(message.topic, SUB)
        back = sent_back(message, group, fields["delayLevel"], most)
        if core.tables.topic(back.topic) is None:
            core.create_topic(back.topic, 1)
        future = await core.lanes.puts.run(partial(writer.put_async, back))
        try:
            await future
        except LogquarryError as error:
            raise refusal_of(error) from error
        # RETRY_TOPIC is the topic of the message's first delivery.
        topic = message.properties.get(props.RETRY_TOPIC, message.topic)
        core.counts.sent_back[topic, group] += 1
        request.reply()


_TO_CLIENT: Final = "REPLY_TO_CLIENT"
_PATIENCE_SECONDS: Final = 3.0


class Replies(Part):
    """Forwards replies of consumers to waiting producers (``ReplyMessageProcessor``)."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._waiting_bytes = 0

    @answers(RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2)
    async def reply(self, request: Request) -> None:
        """Forward a reply to the waiting producer, and answer after the producer's answer."""
        core, fields = self._core, request.fields
        size = len(request.command.body)
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
