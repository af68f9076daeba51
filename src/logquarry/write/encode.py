"""Which names a topic may have before a folder is made of it (CVE-2019-17572).

RocketMQ's store takes any name (``../../../x`` made folders); its broker only the letters of
:data:`_BROKER_NAME`. Here the store has a rule of its own, and the broker's on request.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Final, NoReturn

from logquarry.config import StoreConfig
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import delay, frame, java, sys_flag
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.read.log_queues import MULTI_SEPARATOR, QueueKey, copy_key, named_copies
from logquarry.write.frame_maker import LONGEST_PROPERTIES, FrameMaker, HostFields
from logquarry.write.put_result import PutStatus, refusal

LONGEST_TOPIC: Final = 127
"""Bytes, and for RocketMQ UTF-16 characters: the length is one signed byte of the frame."""
LONGEST_NAME: Final = 255
"""Bytes of a folder's name, which bound the further queues of multi-dispatch."""
BROKER_CHECK: Final = "rocketmq-broker"

_UNSAFE: Final = re.compile("[/\x00-\x1f\x7f-\x9f]")
_BROKER_NAME: Final = re.compile("[%|a-zA-Z0-9_-]+")


def name_fault(name: str, check: str, *, longest: int = LONGEST_TOPIC) -> str | None:
    """What is wrong with a name, None if it may be a topic's.

    Args:
        name: the topic, or the name of a further queue.
        check: ``StoreConfig.topic_check``.
        longest: bytes that it may take.
    """
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "it holds half a surrogate pair, which UTF-8 has no bytes for"
    if not size:
        return "it is empty"
    if size > longest:
        return f"it takes {size} bytes, and {longest} are the most"
    if name in (".", ".."):
        return "it is the name of a folder that is there already"
    if _UNSAFE.search(name):
        return "it holds a slash or a control character"
    if check == BROKER_CHECK and not _BROKER_NAME.fullmatch(name):
        return "the broker's rule allows letters, digits, %, |, - and _"
    return None


# --------------------------------------------------------------------------------------------------
# The properties of a message to be put: what the store looks up in them, and writes anew.
#
# RocketMQ keeps a string, which is written as it came, and a ``HashMap``. Where the store adds a
# property it makes the string anew, in the iteration order of that map. Which order that is depends
# on how the map came to be: a copy of another map is sized by it, one parsed from a string starts
# with 16 buckets and grows.

_FRESH_TABLE: Final = 16
_LOOKED_AT: Final = "|".join((props.DELAY, props.WAIT, props.INNER_MULTI_DISPATCH))
_LOOKED_AT_TEXT: Final = re.compile(_LOOKED_AT).search
_LOOKED_AT_BYTES: Final = re.compile(_LOOKED_AT.encode()).search
_NOTHING: Final[Mapping[str, str]] = {}


class PropertyMap:
    """The map of one message, with the order that Java's would have.

    Attributes:
        values: the properties, in insertion order.
    """

    __slots__ = ("_table_size", "values")

    def __init__(self, message: Message) -> None:
        self.values = message.all_properties()
        parsed = message.properties is None and message.properties_string is not None
        # An empty copy has no table yet, and starts as a fresh map does.
        self._table_size = (
            _FRESH_TABLE if parsed or not self.values else java.table_size_for(len(self.values))
        )

    def text(self, *, without: str | None = None, is_closed: bool = False) -> str:
        """The string, in the map's order (``messageProperties2String``)."""
        if not self.values:
            return ""
        order = java.hash_map_order(self.values, self._table_size)
        kept = {name: self.values[name] for name in order if name != without}
        return props.encode(kept, is_closed=is_closed)


def looked_at(message: Message) -> Mapping[str, str]:
    """The properties of a message that the store looks at; none where it need not look.

    Most messages have none of them, and none of those has its string parsed.
    """
    if message.properties is None and not message.delay_level and message.wait_store_ok:
        string = message.properties_string
        if string is None:
            return _NOTHING
        if not acts_on(string):
            return _NOTHING
    return message.all_properties()


def acts_on(string: str | bytes) -> bool:
    """Whether a property string may hold one of the properties that the store looks at."""
    if isinstance(string, str):
        return _LOOKED_AT_TEXT(string) is not None
    return _LOOKED_AT_BYTES(string) is not None


# --------------------------------------------------------------------------------------------------
# Frames that are ready for the log but for what only its lock can tell.
#
# QUEUEOFFSET, PHYSICALOFFSET and STORETIMESTAMP are filled in by :meth:`Encoded.place`.

_PLACES: Final = struct.Struct(">qq")
_PLACES_AT: Final = frame.HEAD.offsets["queue_offset"]
assert frame.HEAD.offsets["physical_offset"] == _PLACES_AT + 8
_TIME: Final = frame.STORE_TIME.struct


class Encoded:
    """A frame, or a batch's frames, ready for the log.

    Attributes:
        data: the bytes, with places for what the lock tells.
        key: topic and queue of the frames: of a delayed message the schedule topic's.
        store_host: the broker, as in the frame.
        starts: where each frame starts in ``data``.
        advances: whether the frames take places in their queue (NOT and COMMIT).
        wait: whether the put waits for flush and replica.
        body_size: bytes of body, for messages.
        copies: further queues that the message goes to.
        own_offset: QUEUEOFFSET of frames that take no places.
    """

    __slots__ = (
        "_time_at",
        "advances",
        "body_size",
        "copies",
        "data",
        "key",
        "own_offset",
        "starts",
        "store_host",
        "wait",
    )

    def __init__(
        self,
        data: bytearray,
        topic: str,
        queue_id: int,
        hosts: HostFields,
        *,
        starts: tuple[int, ...] = (0,),
        advances: bool = True,
        wait: bool = True,
        body_size: int = 0,
        copies: Copies | None = None,
        own_offset: int = 0,
    ) -> None:
        self.data = data
        self.key = (topic, queue_id)
        self.store_host = hosts.store_host
        self.starts = starts
        self.advances = advances
        self.wait = wait
        self.body_size = body_size
        self.copies = copies
        self.own_offset = own_offset
        self._time_at = hosts.time_at

    def place(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> None:
        """Fill in what the lock told. Can be done again, for another file."""
        data, time_at = self.data, self._time_at
        for number, start in enumerate(self.starts):
            _PLACES.pack_into(
                data, start + _PLACES_AT, queue_offset + number, physical_offset + start
            )
            _TIME.pack_into(data, start + time_at, store_timestamp)


class Copies:
    """The further queues of a message (``MultiDispatch``), whose offsets its properties tell.

    So its frame can only be made inside the lock.

    Attributes:
        keys: the queues.
    """

    __slots__ = ("_encode", "keys")

    def __init__(self, keys: tuple[QueueKey, ...], encode: Callable[[str], bytearray]) -> None:
        self.keys = keys
        self._encode = encode

    def frame(self, offsets: list[int]) -> bytearray:
        """The frame for an offset in each of the queues.

        Raises:
            MessageRejected: if that makes the message too large: UNKNOWN_ERROR, as in RocketMQ.
        """
        return self._encode(MULTI_SEPARATOR.join(map(str, offsets)))


# --------------------------------------------------------------------------------------------------
# From a message to its frame, as far as that goes outside the log's lock.
#
# Follows ``DefaultMessageStore.checkMessage``, the first half of ``CommitLog.asyncPutMessage`` and
# ``MessageExtEncoder`` of 4.9.3, in their order: the first check that fails gives the status.
#
# Guarantees: a frame that comes out can be read again. Where RocketMQ would write one that cannot
# (the topic's length wraps, a flag contradicts a host), the message is refused.

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
