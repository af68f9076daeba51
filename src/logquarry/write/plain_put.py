"""The short way of a single put: a message with a property string in which nothing is looked up.

That is what clients send. What topic, queue, hosts and SYSFLAG fix is kept from one message to
the next; the rest is packed once, with the log held, when all of it is known.

Guarantees: a message that goes this way gives the frame that :mod:`logquarry.write.encode`
makes. Any other one, and any that is refused, is left to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from logquarry.config import StoreConfig
from logquarry.errors import LogquarryError
from logquarry.format import frame, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.java import crc32
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.write.encode import check_topic
from logquarry.write.frame_maker import LONGEST_PROPERTIES, host_fields

_MOST_TARGETS: Final = 4_096
_DELAY, _WAIT = props.DELAY, props.WAIT
_COPIES: Final = props.INNER_MULTI_DISPATCH
_LENGTH: Final = frame.PROPERTIES_LENGTH.struct.pack
_CRC_MASK: Final = java.INT_MAX


class Target(NamedTuple):
    """What is the same for many messages.

    Attributes:
        key: topic and queue.
        pack: makes a frame's head of all its fields.
        flags: SYSFLAG.
        born_host: as in the frame.
        store_host: as in the frame.
        topic: its bytes, behind their length.
        fixed_size: bytes of a frame without body and properties.
        advances: whether the frames take places in their queue.
    """

    key: QueueKey
    pack: Callable[..., bytes]
    flags: int
    born_host: bytes
    store_host: bytes
    topic: bytes
    fixed_size: int
    advances: bool


Parts = tuple[Target, int, int, int, int, int, int, int, int, bytes, bytes]
"""Target, size, CRC, queue id, flag, born time, reconsume times, prepared transaction's offset,
length of the body, the body, and what stands behind it."""


class PlainEncoder:
    """Prepares messages that can go the short way.

    Args:
        config: the store's settings.
        clock: gives the born time of messages that have none.
        largest: bytes of the largest frame that a file can hold.
    """

    def __init__(self, config: StoreConfig, clock: Callable[[], int], largest: int) -> None:
        self._config = config
        self._clock = clock
        self._most = min(config.max_message_size, largest)
        self._targets: dict[Any, Target] = {}

    def parts(self, message: Message) -> Parts | None:
        """What of the frame is known outside the log's lock; None for any other message."""
        (
            topic,
            body,
            queue_id,
            tags,
            keys,
            properties,
            string,
            delay_level,
            wait,
            flag,
            flags,
            _,
            born,
            born_host,
            store_host,
            reconsume_times,
            prepared_offset,
        ) = message
        if (
            type(string) is not str
            or type(body) is not bytes
            or tags is not None
            or keys is not None
            or properties is not None
            or delay_level
            or not wait
            or _DELAY in string
            or _WAIT in string
            or _COPIES in string
        ):
            return None
        try:
            data = string.encode()
            target = self._targets.get((topic, queue_id, flags, born_host, store_host))
            if target is None:
                target = self._target(message)
        except (LogquarryError, TypeError, ValueError):
            return None
        _, _, _, _, _, topic_data, fixed_size, _ = target
        length, body_length = len(data), len(body)
        size = fixed_size + body_length + length
        if size > self._most or length > LONGEST_PROPERTIES:
            return None
        return (
            target,
            size,
            crc32(body) & _CRC_MASK,
            queue_id,
            flag,
            self._clock() if born is None else born,
            reconsume_times,
            prepared_offset,
            body_length,
            body,
            topic_data + _LENGTH(length) + data,
        )

    def _target(self, message: Message) -> Target:
        topic, store_host = message.topic, message.store_host
        data = check_topic(topic, self._config)
        hosts = host_fields(
            message.born_host,
            self._config.store_host if store_host is None else store_host,
            message.sys_flag,
        )
        target = Target(
            (topic, message.queue_id),
            hosts.head.pack,
            hosts.flags,
            hosts.born_host,
            hosts.store_host,
            frame.TOPIC_LENGTH_V1.struct.pack(len(data)) + data,
            hosts.fixed_size + len(data),
            sys_flag.advances_queue(hosts.flags),
        )
        if len(self._targets) >= _MOST_TARGETS:
            self._targets = {}
        told = topic, message.queue_id, message.sys_flag, message.born_host, store_host
        self._targets[told] = target
        return target
