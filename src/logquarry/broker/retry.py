"""Messages that a consumer sends back (``asyncConsumerSendMsgBack``): a retry, or a dead letter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from logquarry.broker.acl import SUB
from logquarry.broker.connection import Handler, Request
from logquarry.broker.core import Core
from logquarry.broker.send import most_retries, refusal_of
from logquarry.errors import CorruptStore, LogquarryError, MessageNotFound
from logquarry.format import properties as props
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from logquarry.store.consumer.subscription import sent_back


class Retrying:
    """Puts messages that were sent back.

    Args:
        core: the broker's parts.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def handlers(self) -> Mapping[int, Handler]:
        """The requests that this part answers."""
        return {RequestCode.CONSUMER_SEND_MSG_BACK: self.send_back}

    async def send_back(self, request: Request) -> None:
        """Put the message at a physical offset into the group's retry topic, delayed.

        Raises:
            Refused: if the group or the message does not exist, the account has no permission for
                the message's topic, or the store is read-only.
        """
        core, fields = self._core, request.fields
        writer = core.tables.require_writer()
        group = fields["group"]
        settings = core.require_group(group)
        if int(settings.get("retryQueueNums", 1)) <= 0:
            # The group wants no retries: RocketMQ drops the message too.
            request.reply()
            return
        most = most_retries(request, settings)
        try:
            message = await core.slow(partial(core.store.message_at, fields["offset"]))
        except (MessageNotFound, CorruptStore) as error:
            # An offset without a message is the client's error: no path of the store in the answer.
            what = fields["offset"] if isinstance(error, MessageNotFound) else error
            raise Refused(
                ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {what}"
            ) from error
        # The message's own topic needs the permission: originTopic of the request may be false.
        request.require(message.topic, SUB)
        back = sent_back(message, group, fields["delayLevel"], most)
        if core.tables.topic(back.topic) is None:
            core.create_topic(back.topic, 1)
        future = await core.lanes.puts.run(partial(writer.put_async, back))
        try:
            await future
        except LogquarryError as error:
            raise refusal_of(error) from error
        # A message that was retried before names the topic of its first delivery.
        topic = message.properties.get(props.RETRY_TOPIC, message.topic)
        core.counts.sent_back[topic, group] += 1
        request.reply()
