"""The rules that a put applies to messages: which topics and hosts are valid, and which properties
make the store change the message.

:class:`HostFields` has the fields of a frame that depend on hosts (IPv4, IPv6) and SYSFLAG.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NoReturn

from logquarry import arguments
from logquarry.errors import StoreError, UsageError
from logquarry.format import frame, java, sys_flag, timer
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.write.put_result import PutStatus, refusal

LONGEST_PROPERTIES: Final = java.INT_MAX >> 16
"""Maximum bytes of a property string, because its length in a frame is a signed short. RocketMQ's
``checkMessage`` compares the number of UTF-16 characters with this limit.
"""

# --------------------------------------------------------------------------------------------------
# Topics. RocketMQ's store accepts any name. For the name ``../../../x``, RocketMQ created folders
# outside of the store (CVE-2019-17572). RocketMQ's broker accepts only the characters of
# _BROKER_NAME. logquarry refuses names with _UNSAFE characters. With ``topic_check``, logquarry
# follows the broker's rule.

LONGEST_TOPIC: Final = 127
"""Maximum bytes of a topic, because its length in a frame is one signed byte. RocketMQ compares the
number of UTF-16 units with this limit.
"""
LONGEST_NAME: Final = 255
"""Maximum bytes of the name of a further queue, because the name becomes the name of a folder."""
BROKER_CHECK: Final = "rocketmq-broker"

_UNSAFE: Final = re.compile("[/\x00-\x1f\x7f-\x9f]")
_BROKER_NAME: Final = re.compile("[%|a-zA-Z0-9_-]+")
_CACHED: Final = 4_096


def name_fault(name: str, check: str, *, longest: int = LONGEST_TOPIC) -> str | None:
    """Return why a name is not a valid topic, or None. ``longest`` is the maximum number of UTF-8
    bytes.
    """
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "it has half a surrogate pair, which UTF-8 cannot encode"
    if not size:
        return "it is empty"
    if size > longest:
        return f"it takes {size} bytes; the maximum is {longest}"
    if name in (".", ".."):
        return "it would mean an existing folder"
    if _UNSAFE.search(name):
        return "it holds a slash or a control character"
    if check == BROKER_CHECK and not _BROKER_NAME.fullmatch(name):
        return "the broker's rule allows letters, digits, %, |, - and _"
    return None


def queue_name_fault(topic: str) -> str | None:
    """Return why a topic is not permitted as a folder name; None if the topic is permitted."""
    return name_fault(topic, "store", longest=LONGEST_NAME)


@lru_cache(_CACHED)
def topic_bytes(topic: str, check: str) -> bytes:
    """Return TOPICLEN and TOPIC of a frame."""
    # QUIRK: RocketMQ counts characters: a topic of 100 characters and 200 bytes gets PUT_OK and a
    # frame whose TOPICLEN is negative (test_append_vectors: vector 35).
    fault = name_fault(topic, check, longest=LONGEST_TOPIC)
    if fault is not None:
        reject_topic(topic, fault)
    data = topic.encode("utf-8")
    return frame.TOPIC_LENGTH_V1.struct.pack(len(data)) + data


def reject_topic(name: str, fault: str) -> NoReturn:
    """Raise MessageRejected for a name that is not a valid topic."""
    shown = name if len(name) <= LONGEST_TOPIC else f"{name[:LONGEST_TOPIC]}..."
    raise refusal(
        PutStatus.MESSAGE_ILLEGAL, f"not a topic to write to: {shown!r}: {fault}", reason="topic"
    )


# --------------------------------------------------------------------------------------------------
# Properties. In RocketMQ, a message has its properties twice: as a string, which is usually written
# unchanged, and as a HashMap. If the store adds a property, it builds a new string in the iteration
# order of the map. This order depends on the number of buckets. If the map is a copy of another
# map, it has as many buckets as its entries need. If the map is parsed from a string, it starts
# with 16 buckets, and grows.

# TIMER_DELAY_MS and TIMER_DELAY_SEC are not listed: the search for DELAY finds them.
_ACTS_ON: Final = "|".join(
    (props.DELAY, props.WAIT, props.INNER_MULTI_DISPATCH, props.TIMER_DELIVER_MS)
)
_ACTS_ON_TEXT: Final = re.compile(_ACTS_ON).search
_ACTS_ON_BYTES: Final = re.compile(_ACTS_ON.encode()).search
_TRUE: Final = "true"
_MS: Final = 1_000
_TIMED: Final = {
    props.TIMER_DELAY_SEC: _MS,
    props.TIMER_DELAY_MS: 1,
    props.TIMER_DELIVER_MS: 1,
}
"""The properties that request a delivery by the timer wheel -> the unit of the property's value in
ms.

If a message has several of these properties, RocketMQ uses the first in this order.
"""
_FRESH_TABLE: Final = 16
NO_PROPERTIES: Final[Mapping[str, str]] = {}


class PropertyMap:
    """The property map of one message, with the iteration order of Java's map."""

    __slots__ = ("_table_size", "values")

    def __init__(self, message: Message) -> None:
        self.values = message.all_properties()
        parsed = message.properties is None and message.properties_string is not None
        # The copy of an empty map has no buckets yet. The first entry gives the copy as many
        # buckets as a new map has.
        self._table_size = (
            _FRESH_TABLE if parsed or not self.values else java.table_size_for(len(self.values))
        )

    def text(self, *, without: str | None = None, is_closed: bool = False) -> str:
        """Return the property string, in the map's order (``messageProperties2String``)."""
        if not self.values:
            return ""
        order = java.hash_map_order(self.values, self._table_size)
        kept = {name: self.values[name] for name in order if name != without}
        return props.encode(kept, is_closed=is_closed)


def looked_at(message: Message) -> Mapping[str, str]:
    """Return the properties that show whether the store must change a message.

    A property string is first searched for properties that make the store change the message. If
    the string has no such property, it is not parsed, and the result is empty.
    """
    if message.properties is None and not message.delay_level and message.wait_store_ok:
        string = message.properties_string
        if string is None:
            return NO_PROPERTIES
        if not (_ACTS_ON_TEXT(string) if isinstance(string, str) else _ACTS_ON_BYTES(string)):
            return NO_PROPERTIES
    return message.all_properties()


def given_properties(message: Message, *, is_closed: bool = False) -> bytes:
    """Return the property string of a message for a frame, if the store changes no property.

    If this function builds the string and ``is_closed`` is true, the string ends with a separator.
    A string in the message is returned unchanged.

    Raises:
        MessageRejected: if the string has too many characters. The encoder of the frame later
            checks the number of bytes.
        UsageError: if the message has tags or keys in addition to a property string.
    """
    string = message.properties_string
    if string is None:
        string = props.encode(message.all_properties(), is_closed=is_closed)
    elif message.tags is not None or message.keys is not None:
        raise UsageError("put tags and keys into the given properties_string")
    data = utf8(string) if isinstance(string, str) else bytes(string)
    if len(data) > LONGEST_PROPERTIES:
        # QUIRK: two checks have different results. checkMessage counts characters and returns
        # MESSAGE_ILLEGAL; the encoder counts bytes and returns PROPERTIES_SIZE_EXCEEDED
        # (test_append_vectors: vectors 9 and 10).
        text = data.decode("utf-8", java.UTF8_ERRORS)
        # String.length() counts UTF-16 code units.
        count = len(text) + sum(character > "\uffff" for character in text)
        if count > LONGEST_PROPERTIES:
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL,
                f"the properties have {count} characters; the maximum is {LONGEST_PROPERTIES}",
                reason="properties",
            )
    return data


def delay_level(text: str | None) -> int:
    """Return the level in the property DELAY; 0 without the property (``getDelayTimeLevel``).

    Raise MessageRejected if the text is not a number. For such a text, RocketMQ's ``putMessage``
    throws an exception.
    """
    if text is None:
        return 0
    level = props.parse_int(text)
    if level is None:
        raise refusal(PutStatus.MESSAGE_ILLEGAL, f"DELAY is not a number: {text!r}", reason="delay")
    return level


def is_timed(values: Mapping[str, str]) -> bool:
    """Whether properties request a delivery by the timer wheel (``checkIfTimerMessage``).

    A message with TIMER_OUT_MS has already left the wheel, so the store puts it unchanged. A
    message with a delay level does not use the wheel, because RocketMQ removes the timer's
    properties from the message.
    """
    asks = not values.keys().isdisjoint(_TIMED)
    return asks and props.TIMER_OUT_MS not in values and delay_level(values.get(props.DELAY)) <= 0


def timer_slot(
    values: Mapping[str, str], now: int, *, longest_s: int, precision_ms: int
) -> int | None:
    """Return the slot of the timer wheel for a message, as a time in ms; None if the delivery time
    has already passed.

    Follows ``transformTimerMessage``. ``values`` must have a TIMER property; ``longest_s`` is
    ``timerMaxDelaySec``. Raise MessageRejected if the delivery time is not a number, or is too far
    in the future.
    """
    name = next(name for name in _TIMED if name in values)
    text = values[name]
    number = java.digits(text)
    if number == java.NO_NUMBER:
        why = f"{name} takes a number of at most 18 digits and without a sign: {text!r}"
        raise refusal(PutStatus.MESSAGE_ILLEGAL, why, reason="delay")
    at = number if name == props.TIMER_DELIVER_MS else now + number * _TIMED[name]
    if at <= now:
        if props.TIMER_DELETE_UNIQ_KEY in values:
            why = "the message that it deletes was due before"
            raise refusal(PutStatus.MESSAGE_ILLEGAL, why, reason="delay")
        return None
    if at - now > longest_s * _MS:
        why = f"{name} is {text}: {(at - now) // _MS} s from now, and timerMaxDelaySec {longest_s}"
        raise refusal(PutStatus.MESSAGE_ILLEGAL, why, reason="delay")
    return timer.slot_time(at, precision_ms)


def waits(values: Mapping[str, str]) -> bool:
    """Whether the properties request that the put waits for flush and replica
    (``isWaitStoreMsgOK``).
    """
    wait = values.get(props.WAIT)
    return wait is None or wait.lower() == _TRUE


def utf8(text: str) -> bytes:
    """Encode text as Java's ``String.getBytes(UTF_8)`` does: a question mark replaces a lone
    surrogate.
    """
    return text.encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class HostFields:
    """The hosts and SYSFLAG of a message, in the form in which a frame contains them.

    Attributes:
        flags: SYSFLAG, including the bits for the address families of the hosts.
        fixed_size: bytes of the frame without body, TOPICLEN, topic and properties.
        pack: a function that packs the fields before the body.
        template: the fields before the body, with 0 in each field that hosts and SYSFLAG do not
            determine.
        store_time_at: where STORETIMESTAMP starts in the frame.
    """

    born_host: bytes
    store_host: bytes
    flags: int
    fixed_size: int
    advances: bool
    pack: Callable[..., bytes]
    template: bytes
    store_time_at: int


@lru_cache(_CACHED)
def host_fields(born_host: str | bytes, store_host: str | bytes, flags: int) -> HostFields:
    """Return the fields of a frame that depend on hosts and SYSFLAG.

    Raises:
        MessageRejected: if a host cannot be parsed, or SYSFLAG marks an IPv4 host as IPv6.
        UsageError: if SYSFLAG has more than 32 bits.
    """
    arguments.int32(flags, "sys_flag")
    born, store = _host(born_host), _host(store_host)
    flags = _with_families(flags, born, store)
    prefix = frame.prefix(len(born), len(store))
    return HostFields(
        born,
        store,
        flags,
        frame.fixed_size(frame.MAGIC_V1, flags) - frame.TOPIC_LENGTH_V1.size,
        sys_flag.advances_queue(flags),
        prefix.pack,
        prefix.pack(0, frame.MAGIC_V1, 0, 0, 0, 0, 0, flags, 0, born, 0, store, 0, 0, 0),
        frame.HEAD.size + len(born),
    )


def too_large(size: int, most: int) -> StoreError:
    """Return the error for a message or batch that is too large."""
    return refusal(
        PutStatus.MESSAGE_ILLEGAL,
        f"the message takes {size} bytes in the log, and maxMessageSize is {most}",
        reason="too_large",
    )


def _host(host: str | bytes) -> bytes:
    if isinstance(host, bytes):
        if len(host) in (frame.HOST_SIZE_V4, frame.HOST_SIZE_V6):
            return host
        _reject_host(f"a host has 8 or 20 bytes, not {len(host)}")
    try:
        return frame.valid_host_bytes(host)
    except UsageError as error:
        _reject_host(str(error))


def _with_families(flags: int, born_host: bytes, store_host: bytes) -> int:
    families = 0
    if len(born_host) == frame.HOST_SIZE_V6:
        families |= sys_flag.BORN_HOST_V6
    if len(store_host) == frame.HOST_SIZE_V6:
        families |= sys_flag.STORE_HOST_V6
    stated = flags & (sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6)
    if stated & ~families:
        # QUIRK: RocketMQ computes the length of the host from SYSFLAG alone, and so writes a frame
        # that cannot be read (test_append_vectors: vector 34).
        _reject_host(f"SYSFLAG {flags:#x} marks a host as IPv6, but the host is IPv4")
    return flags | families


def _reject_host(why: str) -> NoReturn:
    raise refusal(PutStatus.MESSAGE_ILLEGAL, why, reason="hosts")
