"""``Message``: a message to put, the checks of its fields, and copies of stored messages.

:func:`put_again` makes a new message from a frame of the log, to deliver a delayed message, to
commit a half message, or to send a message back. RocketMQ parses the property string into a
``HashMap``, and builds a new string in the map's order. The parts of the old string that the parser
skips are therefore missing in the new string.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, Self

from logquarry import arguments
from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.message_call import speed_up
from logquarry.stored_message import StoredMessage

DEFAULT_BORN_HOST: Final = "127.0.0.1:0"

_FALSE: Final = "false"
_ZERO: Final = 0
_new = tuple.__new__


class _Fields(NamedTuple):
    topic: str
    body: bytes | bytearray | memoryview
    queue_id: int
    tags: str | None
    keys: str | None
    properties: Mapping[str, str] | None
    properties_string: str | bytes | None
    delay_level: int
    wait_store_ok: bool
    flag: int
    sys_flag: int
    queue_offset: int
    born_timestamp: int | None
    born_host: str | bytes
    store_host: str | bytes | None
    reconsume_times: int
    prepared_transaction_offset: int


class Message(_Fields):
    """A message to put. The constructor checks the types of the fields; the put checks the values.

    Raises:
        WrongType: if a field has a wrong type.
        UsageError: if a word of ``keys`` contains a space.

    Attributes:
        topic: the topic.
        body: the body, stored as given. A bytearray or memoryview is not copied: the put stores the
            bytes that it contains at the time of the put.
        queue_id: queue of the topic. As in RocketMQ, the id may be negative.
        tags: the TAGS property.
        keys: the KEYS property: keys separated by spaces, or a sequence of keys. A key cannot
            contain a space.
        properties: further properties; ``None`` if there are none.
        properties_string: the property string, stored as given. If the message has a delay or uses
            multi-dispatch, the store must change properties. The store then encodes a new string
            from ``properties``; if ``properties`` is None, the store first parses the given string.
        delay_level: the DELAY property; 0 for no delay.
        wait_store_ok: whether the put waits for flush and replica. False adds the property WAIT.
        flag: the field FLAG, whose bits the application defines.
        sys_flag: the field SYSFLAG, whose bits RocketMQ defines (:mod:`logquarry.format.sys_flag`).
            The store sets the bits for IPv4 and IPv6 hosts.
        queue_offset: for a ROLLBACK of 3.1, the index of its transaction's entry in the state
            table. For all other messages the store sets the queue offset.
        born_timestamp: born time in milliseconds; ``None`` for the time of the store's clock at the
            put.
        born_host: the producer: text ``ip:port`` or ``[ip]:port`` with a port from 0 to 65535, or
            the 8 or 20 bytes of a frame. The put does not check the bytes of a host.
        store_host: the broker's address, in the same forms as ``born_host``; ``None`` for
            ``StoreConfig.store_host``.
        reconsume_times: how often consumers sent the message back.
        prepared_transaction_offset: for a COMMIT or ROLLBACK, the physical offset of its half
            message.
    """

    # A message is a tuple, because the creation of a frozen dataclass takes three times as long as
    # the creation of a tuple. Arrow columns can also be made from tuples quickly.
    __slots__ = ()

    def __new__(
        cls,
        topic: str,
        body: bytes | bytearray | memoryview = b"",
        *,
        queue_id: int = 0,
        tags: str | None = None,
        keys: str | Sequence[str] | None = None,
        properties: Mapping[str, str] | None = None,
        properties_string: str | bytes | None = None,
        delay_level: int = 0,
        wait_store_ok: bool = True,
        flag: int = 0,
        sys_flag: int = 0,
        queue_offset: int = 0,
        born_timestamp: int | None = None,
        born_host: str | bytes = DEFAULT_BORN_HOST,
        store_host: str | bytes | None = None,
        reconsume_times: int = 0,
        prepared_transaction_offset: int = 0,
        deliver_at: int | str | date | None = None,
        delay_ms: int | None = None,
    ) -> Self:
        """Make a message; omitted fields get their defaults.

        Args:
            deliver_at: delivery time for the timer wheel of RocketMQ 5: milliseconds, a datetime or
                ISO 8601. Sets the property TIMER_DELIVER_MS.
            delay_ms: delay after the put, in milliseconds. Sets the property TIMER_DELAY_MS.
        """
        if deliver_at is not None or delay_ms is not None:
            properties = _timed(properties, properties_string, deliver_at, delay_ms)
        fields = (
            topic,
            body,
            queue_id,
            tags,
            keys,
            properties,
            properties_string,
            delay_level,
            wait_store_ok,
            flag,
            sys_flag,
            queue_offset,
            born_timestamp,
            born_host,
            store_host,
            reconsume_times,
            prepared_transaction_offset,
        )
        # Values of exactly these types are the usual case, and need no further checks. For rare
        # fields, the cheapest check is whether the value is the default object (measured with
        # logquarry bench put).
        if (
            type(topic) is str
            and type(body) is bytes
            and type(queue_id) is int
            and (properties_string is None or type(properties_string) is str)
            and (tags is None or type(tags) is str)
            and (keys is None or type(keys) is str)
            and (born_timestamp is None or type(born_timestamp) is int)
            and type(born_host) is str
            and wait_store_ok is True
            and properties is None
            and store_host is None
            and _ZERO
            is delay_level
            is flag
            is sys_flag
            is queue_offset
            is reconsume_times
            is prepared_transaction_offset
        ):
            return _new(cls, fields)
        return _new(cls, _checked(fields))

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Self:  # type: ignore[override]
        """Make a message from all fields in order, with the checks of the constructor."""
        return _new(cls, _checked(iterable))

    def _replace(self, **changes: Any) -> Self:
        """Return a copy with other values, which are checked as in the constructor."""
        given = dict(zip(self._fields, self, strict=True))
        unknown = changes.keys() - given.keys()
        if unknown:
            raise TypeError(f"a message has no field {', '.join(sorted(unknown))}")
        return self._make((given | changes).values())

    @classmethod
    def of_checked(cls, fields: Iterable[Any]) -> Self:
        """Make a message from the checked fields of another message, without checks."""
        return _new(cls, fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return Message.of_checked, (tuple(self),)

    def all_properties(self) -> dict[str, str]:
        """Return all properties in the order in which the store encodes them."""
        if self.properties is not None:
            found = dict(self.properties)
        elif self.properties_string is not None:
            text = self.properties_string
            found = props.decode(text) if isinstance(text, str) else props.decode_bytes(text)
        else:
            found = {}
        if self.keys is not None:
            found[props.KEYS] = self.keys
        if self.tags is not None:
            found[props.TAGS] = self.tags
        if not self.wait_store_ok:
            found[props.WAIT] = _FALSE
        if self.delay_level:
            found[props.DELAY] = str(self.delay_level)
        return found


def _timed(
    given: Mapping[str, str] | None,
    string: str | bytes | None,
    deliver_at: int | str | date | None,
    delay_ms: int | None,
) -> Mapping[str, str]:
    # Set the properties that Java's methods setDeliverTimeMs and setDelayTimeMs set.
    if string is not None or (deliver_at is not None and delay_ms is not None):
        raise UsageError(
            "pass one of deliver_at and delay_ms, and no properties_string beside it: the string "
            f"can have {props.TIMER_DELIVER_MS} or {props.TIMER_DELAY_MS} itself"
        )
    added = {} if given is None else dict(_properties(given, "properties"))
    if deliver_at is not None:
        added[props.TIMER_DELIVER_MS] = str(arguments.time_ms(deliver_at, "deliver_at"))
    if delay_ms is not None:
        added[props.TIMER_DELAY_MS] = str(arguments.integer(delay_ms, "delay_ms"))
    return added


_DEFAULTS: Final = {"topic": object(), "body": b"", **(Message.__new__.__kwdefaults__ or {})}
# The conditions in ``Message.__new__`` name the same types: change both places together.
_USUAL_TYPES: Final = {
    **{"topic": str, "body": bytes, "queue_id": int, "tags": str, "keys": str},
    **{"properties_string": str, "born_timestamp": int, "born_host": str},
}
speed_up(Message, {name: (_DEFAULTS[name], _USUAL_TYPES.get(name)) for name in Message._fields})


def _properties(value: object, field: str) -> Mapping[str, str]:
    given = arguments.mapping(value, field, "a mapping of text to text")
    found = {}
    is_exact = True
    for name, text in given.items():
        own_name = arguments.text(name, f"each name of {field}")
        found[own_name] = arguments.text(text, f"the property {name!r}")
        is_exact = is_exact and own_name is name and found[own_name] is text
    return given if is_exact else found


def _text_or_bytes(value: object, field: str, takes: str = "text or bytes") -> str | bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return arguments.text(value, field)
    arguments.refuse_type(value, field, takes)


_host: Final = partial(_text_or_bytes, takes="ip:port, or 8 or 20 bytes")
_CHECKS: Final[Mapping[str, Any]] = {
    "topic": arguments.topic,
    "body": arguments.data,
    "queue_id": arguments.integer,
    "tags": arguments.text,
    "keys": arguments.keys,
    "properties": _properties,
    "properties_string": _text_or_bytes,
    "delay_level": arguments.integer,
    "wait_store_ok": arguments.flag,
    "flag": arguments.integer,
    "sys_flag": arguments.integer,
    "queue_offset": arguments.integer,
    "born_timestamp": arguments.integer,
    "born_host": _host,
    "store_host": _host,
    "reconsume_times": arguments.integer,
    "prepared_transaction_offset": arguments.integer,
}
"""The check of each field. A field whose default is None also accepts None."""


def _checked(fields: Iterable[Any]) -> Iterable[Any]:
    return [
        value if value is None and _DEFAULTS[name] is None else check(value, name)
        for (name, check), value in zip(_CHECKS.items(), fields, strict=True)
    ]


def require_message(message: object, field: str = "put") -> Message:
    """Raise WrongType if an argument is not a message to put."""
    if not isinstance(message, Message):
        takes = "a Message"
        if isinstance(message, StoredMessage):
            takes += "; to copy stored messages, pass a batch of to_arrow() to put_many"
        arguments.refuse_type(message, field, takes)
    return message


def require_messages(messages: object, field: str) -> Sequence[Message]:
    """Return the messages of an iterable; raise WrongType for any other object or item."""
    found = require_iterable(messages, field)
    if not isinstance(found, (list, tuple)):
        return list(_checked_messages(found, field))
    if not set(map(type, found)) <= {Message}:
        for number, message in enumerate(found):
            require_message(message, f"{field}, message {number},")
    return found


def require_iterable(messages: object, field: str) -> Iterable[object]:
    """Raise WrongType if an argument is not an iterable of messages. The items are not checked."""
    takes = "several messages, as Message objects or Arrow columns"
    is_other = isinstance(messages, (Message, str, bytes, memoryview, Mapping))
    if is_other or not arguments.is_iterable(messages):
        arguments.refuse_type(messages, field, f"{takes} (put takes one Message)")
    if hasattr(messages, "columns"):
        arguments.refuse_type(
            messages, field, f"{takes}: objects with __arrow_c_stream__, as of pandas 2.2 or later"
        )
    return messages


def _checked_messages(messages: Iterable[object], field: str) -> Iterator[Message]:
    for number, message in enumerate(messages):
        if type(message) is not Message:
            require_message(message, f"{field}, message {number},")
        yield message  # type: ignore[misc]


_CACHED: Final = 4_096


def remade(values: Mapping[str, str]) -> str:
    """Encode properties in the order in which a Java ``HashMap`` with these names iterates."""
    return props.encode({name: values[name] for name in _order(tuple(values))})


@lru_cache(_CACHED)
def _order(names: tuple[str, ...]) -> tuple[str, ...]:
    # The cache helps because most messages have the same property names.
    return tuple(java.hash_map_order(names))


def put_again(
    frame: Frame,
    topic: str,
    queue_id: int,
    values: Mapping[str, str],
    *,
    sys_flag: int | None = None,
    prepared_transaction_offset: int = 0,
    delays: bool = True,
    waits: bool = True,
) -> Message:
    """Make a message with the body, flags, born time and hosts of a frame.

    Args:
        values: the properties in the order in which the parser found them, then the added
            properties.
        prepared_transaction_offset: for a COMMIT, the physical offset of its half message.
        delays: whether the put obeys the property DELAY and the properties of the timer wheel.
        waits: if False, the put waits neither for the flush nor for a replica.
    """
    acts_on = dict(values)
    if not delays:
        for name in props.DELAYS:
            acts_on.pop(name, None)
    if not waits:
        acts_on[props.WAIT] = _FALSE
    return Message(
        topic,
        frame.body,
        queue_id=queue_id,
        properties=acts_on,
        properties_string=remade(values),
        flag=frame.flag,
        sys_flag=frame.sys_flag if sys_flag is None else sys_flag,
        born_timestamp=frame.born_timestamp,
        born_host=frame.born_host,
        store_host=frame.store_host,
        reconsume_times=frame.reconsume_times,
        prepared_transaction_offset=prepared_transaction_offset,
    )
