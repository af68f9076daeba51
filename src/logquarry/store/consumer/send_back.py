"""A message that a consumer could not handle, as it is put to come again.

As ``SendMessageProcessor.consumerSendMsgBack`` of 4.9.3 does it: the same message in the group's
retry topic, delayed, with where it came from among its properties. The delay grows with each time;
after too many times the message goes to the group's dead letters, where nobody takes it from.
"""

from __future__ import annotations

from typing import Final

from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.message import Message, StoredMessage
from logquarry.store.consumer.sql_parser import dead_topic, retry_topic

MAX_RECONSUME_TIMES: Final = 16
"""``SubscriptionGroupConfig.retryMaxTimes``."""

_FIRST_LEVEL: Final = 3
_FALSE: Final = "false"


def sent_back(
    message: StoredMessage, group: str, delay_level: int | None, max_reconsume_times: int
) -> Message:
    """The message to put for one that is sent back.

    Args:
        message: as it was consumed.
        group: who sends it back.
        delay_level: when it is to come again; None or 0 for 10 s the first time (level 3), and a
            level more each further time; below 0 for the dead letters at once.
        max_reconsume_times: how often it may come again.

    Raises:
        UsageError: if that is no delay level.
    """
    frame = message.frame
    properties = dict(message.properties)
    properties.setdefault(props.RETRY_TOPIC, message.topic)
    properties[props.WAIT] = _FALSE
    if delay_level is not None and not isinstance(delay_level, int):
        raise UsageError(f"a delay level is a whole number, not {delay_level!r}")
    level = delay_level or java.to_int(_FIRST_LEVEL + message.reconsume_times)
    if not java.INT_MIN <= level <= java.INT_MAX:
        raise UsageError(f"there is no delay level {level}")
    topic = retry_topic(group)
    if (delay_level or 0) < 0 or message.reconsume_times >= max_reconsume_times:
        topic, level = dead_topic(group), 0
    properties[props.DELAY] = str(level)
    if not properties.get(props.ORIGIN_MESSAGE_ID, "").strip():
        properties[props.ORIGIN_MESSAGE_ID] = message.message_id
    # As a string: the order of Java's map depends on how it came to be, and this one was parsed.
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
