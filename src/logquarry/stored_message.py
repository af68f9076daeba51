"""``StoredMessage``: a message read from a store, decoded on demand.

The attributes have the names of the DataFrame columns and JSON members.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from logquarry.format import batch, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame, encode_id, host_text
from logquarry.format.sys_flag import DEFAULT_LIMIT, decompress
from logquarry.text import counted

_DEFAULT_LEVELS_MS = props.parse_levels(props.DEFAULT_LEVELS)


class StoredMessage:
    """An immutable message that was read from a store.

    Two messages are equal if their frames are equal.
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
        """The message's bytes in the log, decoded into their fields."""
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
        """The queue offset: the message's ordinal number in its consume queue, from 0."""
        return self.frame.queue_offset

    @property
    def physical_offset(self) -> int:
        """Physical offset of the frame in the commit log."""
        return self.frame.physical_offset

    @property
    def size(self) -> int:
        """Size of the frame in bytes."""
        return self.frame.size

    @cached_property
    def message_id(self) -> str:
        """Store host and physical offset in upper-case hex."""
        return encode_id(self.frame.store_host, self.frame.physical_offset)

    @property
    def store_timestamp(self) -> int:
        """Time at which the store stored the message, in milliseconds since 1970."""
        return self.frame.store_timestamp

    @property
    def born_timestamp(self) -> int:
        """Time at which the producer created the message, in milliseconds since 1970."""
        return self.frame.born_timestamp

    @cached_property
    def born_host(self) -> str:
        """The producer, ``ip:port`` or ``[ip]:port``."""
        return host_text(self.frame.born_host)

    @cached_property
    def store_host(self) -> str:
        """The broker, ``ip:port`` or ``[ip]:port``."""
        return host_text(self.frame.store_host)

    @property
    def sys_flag(self) -> int:
        """The field SYSFLAG, whose bits RocketMQ defines (:mod:`logquarry.format.sys_flag`)."""
        return self.frame.sys_flag

    @property
    def flag(self) -> int:
        """The field FLAG, whose bits the application defines."""
        return self.frame.flag

    @property
    def body_crc(self) -> int:
        """CRC-32 of the stored body, with the sign bit cleared."""
        return self.frame.body_crc

    @property
    def reconsume_times(self) -> int:
        """How often consumers sent the message back."""
        return self.frame.reconsume_times

    @property
    def prepared_transaction_offset(self) -> int:
        """For a COMMIT or ROLLBACK message, the physical offset of its half message."""
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
        """The properties, parsed as RocketMQ parses the property string."""
        return props.decode(self.properties_string)

    @property
    def tags(self) -> str | None:
        """The TAGS property."""
        return self.properties.get(props.TAGS)

    @property
    def keys(self) -> str | None:
        """The KEYS property: keys separated by spaces."""
        return self.properties.get(props.KEYS)

    @property
    def uniq_key(self) -> str | None:
        """The UNIQ_KEY property: the id that the client gave the message."""
        return self.properties.get(props.UNIQ_KEY)

    @cached_property
    def tags_code(self) -> int:
        """The tags code in the message's queue entry."""
        return props.tags_code(
            self.topic, self.properties, self.frame.store_timestamp, self._delay_levels_ms
        )

    @property
    def is_dispatched(self) -> bool:
        """Whether the message gets a queue entry. PREPARED and ROLLBACK messages get no entry."""
        return sys_flag.advances_queue(self.frame.sys_flag)

    def unwrap(self) -> tuple[StoredMessage, ...]:
        """Return the messages of an inner batch of RocketMQ 5; for other frames, this message."""
        if not batch.is_inner_batch(self.frame.sys_flag):
            return (self,)
        return tuple(
            StoredMessage(found, broker=self.broker, delay_levels_ms=self._delay_levels_ms)
            for found in batch.unwrap(self.frame)
        )

    def content(self, *, limit: int = DEFAULT_LIMIT) -> bytes:
        """Return the body, decompressed if SYSFLAG marks the body as compressed.

        Raises:
            DecompressionError: if the body does not decompress, or its content exceeds ``limit``
                bytes.
        """
        return decompress(self.frame.body, self.frame.sys_flag, limit=limit)

    def to_json(self, *, body: bytes | None = None) -> dict[str, Any]:
        """Return a dict, to be written as one line of JSON.

        If `body` is given, it is used instead of the stored body.
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
            f"at {self.physical_offset}, {counted(len(self.body), 'byte')} of body)"
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
"""The members of a JSON line, in order."""
