"""Retry and dead-letter topics, and the messages that a consumer sends back."""

from __future__ import annotations

from typing import Final

from logquarry import arguments
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.stored_message import StoredMessage

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"

MAX_RECONSUME_TIMES: Final = 16
"""The default of RocketMQ's ``SubscriptionGroupConfig.retryMaxTimes``."""

_FIRST_LEVEL: Final = 3
_FALSE: Final = "false"


def retry_topic(group: str) -> str:
    """Return the topic of messages that a group sent back (``MixAll.getRetryTopic``)."""
    return RETRY_PREFIX + group


def dead_topic(group: str) -> str:
    """Return the topic of messages that a group sent back too often (``MixAll.getDLQTopic``)."""
    return DEAD_PREFIX + group


def sent_back(
    message: StoredMessage, group: str, delay_level: int | None, max_reconsume_times: int
) -> Message:
    """Return the message to put if a consumer sends back ``message`` (``consumerSendMsgBack``).

    The new message is a delayed copy for the group's retry topic. If the message was sent back
    ``max_reconsume_times`` times before, the copy is for the dead-letter topic.

    Args:
        delay_level: None or 0 means level 3 (10 s) for the first retry, and one level higher for
            each further retry. A level below 0 means the dead-letter topic.
    """
    arguments.instance(message, "message", StoredMessage, "a StoredMessage of this consumer")
    delay_level = arguments.optional(arguments.int32, delay_level, "delay_level")
    properties = dict(message.properties)
    properties.setdefault(props.RETRY_TOPIC, message.topic)
    properties[props.WAIT] = _FALSE
    level = delay_level or java.to_int(_FIRST_LEVEL + message.reconsume_times)
    frame = message.frame
    topic = retry_topic(group)
    if (delay_level or 0) < 0 or message.reconsume_times >= max_reconsume_times:
        topic, level = dead_topic(group), 0
    properties[props.DELAY] = str(level)
    if not properties.get(props.ORIGIN_MESSAGE_ID, "").strip():
        properties[props.ORIGIN_MESSAGE_ID] = message.message_id
    # Insert the properties in the order of the message, as RocketMQ does: the order in Java's
    # HashMap depends on the order of insertion.
    order = java.hash_map_order(properties)
    return Message(
        topic,
        frame.body,
        properties_string=props.encode({name: properties[name] for name in order}),
        flag=frame.flag,
        sys_flag=frame.sys_flag,
        born_timestamp=frame.born_timestamp,
        born_host=frame.born_host,
        store_host=frame.store_host,
        reconsume_times=java.to_int(frame.reconsume_times + 1),
    )
