"""From a message to its frame, as far as that goes outside the log's lock.

Follows ``DefaultMessageStore.checkMessage``, the first half of ``CommitLog.asyncPutMessage`` and
``MessageExtEncoder`` of 4.9.3, in their order: the first check that fails gives the status.

Guarantees: a frame that comes out can be read again. Where RocketMQ would write one that cannot
(the topic's length wraps, a flag contradicts a host), the message is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Final, NoReturn

from logquarry.config import StoreConfig
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import delay, java, sys_flag
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.store.put.encoded import Copies, Encoded
from logquarry.store.put.frame_maker import LONGEST_PROPERTIES, FrameMaker
from logquarry.store.put.property_map import PropertyMap, looked_at
from logquarry.store.put.put_result import PutStatus, refusal
from logquarry.store.put.topic_names import LONGEST_NAME, LONGEST_TOPIC, name_fault
from logquarry.store.queue.log_queues import (
    MULTI_SEPARATOR,
    QueueKey,
    copy_key,
    named_copies,
)

_TRUE: Final = "true"
_CACHED: Final = 4_096
_V6: Final = sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6


class MessageEncoder:
    """Checks messages and makes frames of them.

    Args:
        config: the store's settings.
        clock: gives the born time of messages that have none, in milliseconds.
    """

    def __init__(self, config: StoreConfig, clock: Callable[[], int]) -> None:
        self._config = config
        self._clock = clock
        self._levels = len(config.delay_levels_ms)
        self._topic_check = config.topic_check
        self._copies_messages = config.enable_multi_dispatch
        self._is_3_1 = config.is_3_1

    def encode(self, message: Message) -> Encoded:
        """The frame of a message.

        Raises:
            MessageRejected: if the store does not take it.
            UsageError: if a number does not fit its field, or tags or keys come with a string.
        """
        topic, queue_id = message.topic, message.queue_id
        topic_data = _checked_topic(topic, self._topic_check)
        properties = given_properties(message, is_closed=self._is_3_1)
        values = looked_at(message)
        changed: PropertyMap | None = None
        advances = sys_flag.advances_queue(message.sys_flag)
        if values and advances:
            stated = delay_level(values.get(props.DELAY))
            level = min(stated, self._levels)
            if level > 0:
                changed = PropertyMap(message)
                if level < stated:
                    changed.values[props.DELAY] = str(level)
                changed.values[props.REAL_TOPIC] = topic
                changed.values[props.REAL_QUEUE_ID] = str(queue_id)
                topic, queue_id = delay.SCHEDULE_TOPIC, level - 1
                topic_data = topic.encode()
                properties = utf8(changed.text(is_closed=self._is_3_1))
        maker = self.maker(message)
        make = partial(
            maker.frame,
            topic_data,
            queue_id,
            message.body,
            flag=message.flag,
            prepared_offset=message.prepared_transaction_offset,
        )
        copies = None
        if self._copies_messages and values.get(props.INNER_MULTI_DISPATCH, "").strip():
            # Without its offsets the frame is not complete, and no check is made of it here.
            copies = self._copies(changed or PropertyMap(message), queue_id, make)
            data = bytearray()
        else:
            data = make(properties)
        return Encoded(
            data,
            topic,
            queue_id,
            maker.hosts,
            advances=advances,
            wait=waits(values) if values else True,
            body_size=len(message.body),
            copies=copies,
            own_offset=message.queue_offset if self._is_3_1 else 0,
        )

    def encode_stored(self, message: Message) -> Encoded:
        """The frame of a message that a store has had: nothing that a put does is done again.

        Its delay and its further queues are in its topic and its string already. Where further
        queues are kept, the offsets that the string names for it have to be the next ones.

        Raises:
            MessageRejected: if the store does not take it.
            UsageError: if a number does not fit its field, or tags or keys come with a string.
        """
        topic, queue_id = message.topic, message.queue_id
        topic_data = _checked_topic(topic, self._topic_check)
        properties = given_properties(message, is_closed=self._is_3_1)
        maker = self.maker(message)
        advances = sys_flag.advances_queue(message.sys_flag)
        data = maker.frame(
            topic_data,
            queue_id,
            message.body,
            properties,
            flag=message.flag,
            prepared_offset=message.prepared_transaction_offset,
        )
        copies = None
        if self._copies_messages and advances:
            values = props.decode_bytes(properties)
            named = dict(named_copies(values, queue_id, self._config))
            if named:
                copies = _stored_copies(named, data)
        return Encoded(
            data,
            topic,
            queue_id,
            maker.hosts,
            advances=advances,
            body_size=len(message.body),
            copies=copies,
            own_offset=message.queue_offset,
        )

    def maker(self, message: Message) -> FrameMaker:
        """What makes the frames of a message or batch."""
        born = message.born_timestamp
        maker = FrameMaker(message, self._config, self._clock() if born is None else born)
        if self._is_3_1 and maker.hosts.flags & _V6:
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL, "dialect 3.1 knows no hosts of IPv6", reason="hosts"
            )
        return maker

    def _copies(
        self, changed: PropertyMap, queue_id: int, make: Callable[[bytes], bytearray]
    ) -> Copies:
        # String.split drops what is empty at the end, and nothing else.
        names = (
            changed.values[props.INNER_MULTI_DISPATCH]
            .rstrip(MULTI_SEPARATOR)
            .split(MULTI_SEPARATOR)
        )
        for name in names:
            fault = name_fault(name, "store", longest=LONGEST_NAME)
            if fault is not None:
                _reject_topic(name, fault)

        def encode(offsets: str) -> bytearray:
            changed.values[props.INNER_MULTI_QUEUE_OFFSET] = offsets
            properties = utf8(changed.text(without=props.WAIT))
            try:
                return make(properties)
            except MessageRejected as error:
                raise refusal(PutStatus.UNKNOWN_ERROR, str(error), reason=error.reason) from error

        keys = tuple(copy_key(name, queue_id, self._config) for name in names)
        return Copies(keys, encode)


def _stored_copies(named: Mapping[QueueKey, int], data: bytearray) -> Copies:
    """The further queues of a message whose string is as it was."""

    def encode(offsets: str) -> bytearray:
        stated = MULTI_SEPARATOR.join(map(str, named.values()))
        if offsets != stated:
            names = ", ".join(name for name, _ in named)
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL,
                f"its properties say offset {stated} in the further queues {names}, and the next "
                f"ones there are {offsets}",
                reason="properties",
            )
        return data

    return Copies(tuple(named), encode)


def given_properties(message: Message, *, is_closed: bool = False) -> bytes:
    """The property string of a message as it is written.

    Args:
        message: the message.
        is_closed: whether a string that is made ends with a separator.

    Raises:
        MessageRejected: if it has too many characters; bytes are for the frame maker to count.
        UsageError: if tags or keys come with a string that is given.
    """
    string = message.properties_string
    if string is None:
        string = props.encode(message.all_properties(), is_closed=is_closed)
    elif message.tags is not None or message.keys is not None:
        raise UsageError("tags and keys belong into the properties_string that is given")
    data = utf8(string) if isinstance(string, str) else bytes(string)
    if len(data) > LONGEST_PROPERTIES:
        # QUIRK: checkMessage counts characters and says MESSAGE_ILLEGAL, the encoder counts
        # bytes and says PROPERTIES_SIZE_EXCEEDED (test_append_vectors: vectors 9 and 10).
        count = _characters(data.decode("utf-8", java.UTF8_ERRORS))
        if count > LONGEST_PROPERTIES:
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL,
                f"the properties are {count} characters, and {LONGEST_PROPERTIES} are the most",
                reason="properties",
            )
    return data


def check_topic(topic: str, config: StoreConfig) -> bytes:
    """The bytes of a topic.

    Raises:
        MessageRejected: if it cannot be one.
    """
    return _checked_topic(topic, config.topic_check)


@lru_cache(_CACHED)
def _checked_topic(topic: str, check: str) -> bytes:
    # QUIRK: RocketMQ counts characters: a topic of 100 characters and 200 bytes gets PUT_OK and a
    # frame whose TOPICLEN is negative (test_append_vectors: vector 35).
    fault = name_fault(topic, check, longest=LONGEST_TOPIC)
    if fault is not None:
        _reject_topic(topic, fault)
    return topic.encode("utf-8")


def delay_level(text: str | None) -> int:
    """The level that a DELAY property names, 0 without one (``getDelayTimeLevel``).

    Raises:
        MessageRejected: if it is no number: putMessage throws there.
    """
    if text is None:
        return 0
    level = delay.parse_int(text)
    if level is None:
        raise refusal(PutStatus.MESSAGE_ILLEGAL, f"DELAY is no number: {text!r}", reason="delay")
    return level


def waits(values: Mapping[str, str]) -> bool:
    """Whether the put waits for flush and replica (``isWaitStoreMsgOK``)."""
    wait = values.get(props.WAIT)
    return wait is None or wait.lower() == _TRUE


def utf8(text: str) -> bytes:
    """``String.getBytes(UTF_8)``."""
    # Java writes a question mark for half a surrogate pair.
    return text.encode("utf-8", "replace")


def _characters(text: str) -> int:
    """``String.length()``: UTF-16 code units."""
    return len(text) + sum(character > "\uffff" for character in text)


def _reject_topic(name: str, fault: str) -> NoReturn:
    shown = name if len(name) <= LONGEST_TOPIC else f"{name[:LONGEST_TOPIC]}..."
    raise refusal(
        PutStatus.MESSAGE_ILLEGAL, f"not a topic to write to: {shown!r}: {fault}", reason="topic"
    )
