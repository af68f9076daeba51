"""A message as users meet it: :class:`Message` to put, :class:`StoredMessage` to read.

The latter wraps the frame as it stands in the log and decodes the rest (text, properties, hosts,
ids) when asked. Attributes carry the names of the columns of DataFrames and of the JSON lines.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

from logquarry.format import compression, delay, java, message_id, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame

DEFAULT_BORN_HOST: Final = "127.0.0.1:0"

_DEFAULT_LEVELS_MS = delay.parse_levels(delay.DEFAULT_LEVELS)
_FALSE: Final = "false"
_new = tuple.__new__


class _Fields(NamedTuple):
    """The fields of :class:`Message` in their order."""

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
    """A message to put. What its fields may hold is checked by the store that takes it.

    Attributes:
        topic: its topic.
        body: the body, as it is to be stored.
        queue_id: queue of the topic. RocketMQ takes a negative one too.
        tags: the TAGS property.
        keys: the KEYS property: keys with spaces between them.
        properties: further properties; ``None`` for none.
        properties_string: the property string, written as given. ``properties`` (or else what the
            string says) then only serves where the store has to make the string anew: for a
            delay, and for multi-dispatch.
        delay_level: the DELAY property, 0 for none.
        wait_store_ok: whether the put waits for flush and replica; WAIT is only written if not.
        flag: the application's own bits.
        sys_flag: RocketMQ's bits (:mod:`logquarry.format.sys_flag`); those of the hosts' families
            are set by the store.
        queue_offset: of a 3.1 rollback its number in the state table. Others get theirs.
        born_timestamp: in milliseconds; ``None`` for the store's clock.
        born_host: the producer, ``ip:port`` or ``[ip]:port``, or 8 or 20 bytes as in a frame.
        store_host: the broker, likewise; ``None`` for ``StoreConfig.store_host``.
        reconsume_times: how often consumers sent it back.
        prepared_transaction_offset: of a COMMIT or ROLLBACK: where its half message stands.
    """

    # A tuple: it cannot be changed, it is made in a third of the time that a frozen dataclass
    # takes, and many of them are turned into columns at once.
    __slots__ = ()

    def __new__(
        cls,
        topic: str,
        body: bytes | bytearray | memoryview = b"",
        *,
        queue_id: int = 0,
        tags: str | None = None,
        keys: str | None = None,
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
    ) -> Self:
        """A message of some fields, the others by default."""
        return _new(
            cls,
            (
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
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Message._make, (tuple(self),)

    def all_properties(self) -> dict[str, str]:
        """Every property in the order of the string that is made of them.

        That is the order of ``properties`` (else of the string), then KEYS, TAGS, WAIT, DELAY.
        """
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


class StoredMessage:
    """One message of a store. Immutable; equal if the frames are.

    Attributes:
        broker: name of the store it comes from.
    """

    def __init__(
        self,
        frame: Frame,
        *,
        broker: str = "",
        delay_levels_ms: tuple[int, ...] = _DEFAULT_LEVELS_MS,
    ) -> None:
        self._frame = frame
        self.broker = broker
        self._delay_levels_ms = delay_levels_ms

    @property
    def frame(self) -> Frame:
        """The message as it stands in the log."""
        return self._frame

    @cached_property
    def topic(self) -> str:
        """Topic; bytes that are not UTF-8 become U+FFFD."""
        return self.frame.topic.decode("utf-8", java.UTF8_ERRORS)

    @property
    def queue_id(self) -> int:
        """Queue of the topic."""
        return self.frame.queue_id

    @property
    def queue_offset(self) -> int:
        """Index in the consume queue."""
        return self.frame.queue_offset

    @property
    def physical_offset(self) -> int:
        """Where the frame starts in the commit log."""
        return self.frame.physical_offset

    @property
    def size(self) -> int:
        """Bytes of the frame."""
        return self.frame.size

    @cached_property
    def message_id(self) -> str:
        """Upper-case hex of store host and physical offset."""
        return message_id.encode(self.frame.store_host, self.frame.physical_offset)

    @property
    def store_timestamp(self) -> int:
        """When the store took it, in milliseconds since 1970."""
        return self.frame.store_timestamp

    @property
    def born_timestamp(self) -> int:
        """When the producer made it, in milliseconds since 1970."""
        return self.frame.born_timestamp

    @cached_property
    def born_host(self) -> str:
        """The producer, ``ip:port`` or ``[ip]:port``."""
        return message_id.host_text(self.frame.born_host)

    @cached_property
    def store_host(self) -> str:
        """The broker, ``ip:port`` or ``[ip]:port``."""
        return message_id.host_text(self.frame.store_host)

    @property
    def sys_flag(self) -> int:
        """RocketMQ's own bits (:mod:`logquarry.format.sys_flag`)."""
        return self.frame.sys_flag

    @property
    def flag(self) -> int:
        """The application's own bits."""
        return self.frame.flag

    @property
    def body_crc(self) -> int:
        """CRC-32 of the body as stored, sign bit cleared."""
        return self.frame.body_crc

    @property
    def reconsume_times(self) -> int:
        """How often consumers sent it back."""
        return self.frame.reconsume_times

    @property
    def prepared_transaction_offset(self) -> int:
        """Of a committed or rolled back message: where its half message stands."""
        return self.frame.prepared_transaction_offset

    @property
    def body(self) -> bytes:
        """The body as stored, compressed or not."""
        return self.frame.body

    @cached_property
    def properties_string(self) -> str:
        """The property string as stored; bytes that are not UTF-8 become U+FFFD."""
        return self.frame.properties.decode("utf-8", java.UTF8_ERRORS)

    @cached_property
    def properties(self) -> Mapping[str, str]:
        """The properties as RocketMQ's parser reads them."""
        return props.decode(self.properties_string)

    @property
    def tags(self) -> str | None:
        """The TAGS property."""
        return self.properties.get(props.TAGS)

    @property
    def keys(self) -> str | None:
        """The KEYS property: keys with spaces between them."""
        return self.properties.get(props.KEYS)

    @property
    def uniq_key(self) -> str | None:
        """The UNIQ_KEY property: the id the client gave it."""
        return self.properties.get(props.UNIQ_KEY)

    @cached_property
    def tags_code(self) -> int:
        """What the dispatcher puts in the consume queue unit."""
        return delay.tags_code(
            self.topic, self.properties, self.frame.store_timestamp, self._delay_levels_ms
        )

    @property
    def is_dispatched(self) -> bool:
        """Whether the message takes a place in a consume queue (not PREPARED, not ROLLBACK)."""
        return sys_flag.advances_queue(self.frame.sys_flag)

    def content(self, *, limit: int = compression.DEFAULT_LIMIT) -> bytes:
        """The body, decompressed where SYSFLAG says so.

        Raises:
            DecompressionError: if it does not decompress, or to more than ``limit`` bytes.
        """
        return compression.decompress(self.frame.body, self.frame.sys_flag, limit=limit)

    def to_json(self, *, body: bytes | None = None) -> dict[str, Any]:
        """The message as the object of one JSON line.

        Args:
            body: what to put in the place of the stored body (its content, say).
        """
        document: dict[str, Any] = {name: getattr(self, name) for name in JSON_NAMES}
        document["properties"] = dict(self.properties)
        document["body"] = base64.b64encode(self.body if body is None else body).decode("ascii")
        if "\ufffd" in self.properties_string:
            document["properties_base64"] = base64.b64encode(self.frame.properties).decode("ascii")
        return document

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StoredMessage):
            return NotImplemented
        return self.frame == other.frame

    def __hash__(self) -> int:
        return hash((self.frame.physical_offset, self.frame.store_timestamp))

    def __repr__(self) -> str:
        return (
            f"StoredMessage({self.topic!r}, queue {self.queue_id}, offset {self.queue_offset}, "
            f"at {self.physical_offset}, {len(self.body)} bytes of body)"
        )


JSON_NAMES = (
    "broker",
    "topic",
    "queue_id",
    "queue_offset",
    "physical_offset",
    "size",
    "message_id",
    "store_timestamp",
    "born_timestamp",
    "born_host",
    "store_host",
    "sys_flag",
    "flag",
    "body_crc",
    "reconsume_times",
    "prepared_transaction_offset",
    "properties",
    "properties_string",
    "tags_code",
    "tags",
    "keys",
    "uniq_key",
    "body",
)
"""Names of a JSON line, in order."""
