"""Makes frames of the parts of a message, as ``MessageExtEncoder`` of 4.9.3 lays them out.

Guarantees: a frame that comes out can be read again. Lengths are checked in bytes, in RocketMQ's
order: the properties, then the whole.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple, NoReturn

from logquarry.config import StoreConfig
from logquarry.errors import StoreError, UsageError
from logquarry.format import frame, java, message_id, sys_flag
from logquarry.format.java import crc32
from logquarry.message import Message
from logquarry.write.put_result import PutStatus, refusal

Bytes = bytes | bytearray | memoryview

LONGEST_PROPERTIES: Final = java.INT_MAX >> 16
"""Bytes, and for ``checkMessage`` UTF-16 characters: the length is a signed short."""

_CACHED: Final = 4_096
_TOPIC_LENGTH: Final = frame.TOPIC_LENGTH_V1.struct.pack
_PROPERTIES_LENGTH: Final = frame.PROPERTIES_LENGTH.struct.pack


class HostFields(NamedTuple):
    """What the hosts and SYSFLAG of a frame fix.

    Attributes:
        born_host: as in the frame.
        store_host: as in the frame.
        flags: SYSFLAG with the families of the hosts.
        fixed_size: bytes of the frame without body, topic and properties.
        time_at: where STORETIMESTAMP stands.
        head: the frame up to its body.
    """

    born_host: bytes
    store_host: bytes
    flags: int
    fixed_size: int
    time_at: int
    head: struct.Struct


class FrameMaker:
    """Makes frames of what is the same for all messages of a put.

    Args:
        message: gives all but topic, queue, body, properties and flag.
        config: the store's settings.
        born_timestamp: of the message.
    """

    __slots__ = ("_born_timestamp", "_hosts", "_most", "_pack", "_reconsume_times")

    def __init__(self, message: Message, config: StoreConfig, born_timestamp: int) -> None:
        store_host = message.store_host
        hosts = host_fields(
            message.born_host,
            config.store_host if store_host is None else store_host,
            message.sys_flag,
        )
        self._hosts = hosts
        self._pack = hosts.head.pack
        self._most = config.max_message_size
        self._born_timestamp = born_timestamp
        self._reconsume_times = message.reconsume_times

    @property
    def hosts(self) -> HostFields:
        """What the hosts fix."""
        return self._hosts

    def head(self, queue_id: int) -> bytes | None:
        """A frame up to its body, all 0 that differs from message to message.

        None where a number does not fit its field.
        """
        hosts = self._hosts
        try:
            return self._pack(
                *(0, frame.MAGIC_V1, 0, queue_id, 0, 0, 0, hosts.flags, self._born_timestamp),
                *(hosts.born_host, 0, hosts.store_host, self._reconsume_times, 0, 0),
            )
        except struct.error:
            return None

    def frame(
        self,
        topic: bytes,
        queue_id: int,
        body: Bytes,
        properties: bytes,
        *,
        flag: int,
        queue_offset: int = 0,
        prepared_offset: int = 0,
    ) -> bytearray:
        """One frame, without what the lock tells.

        Raises:
            MessageRejected: if the properties or the whole are too large.
            UsageError: if a number does not fit its field.
        """
        if type(body) is not bytes:
            # A view may be of things that are larger than bytes.
            body = bytes(body)
        body_length, properties_length = len(body), len(properties)
        if properties_length > LONGEST_PROPERTIES:
            raise refusal(
                PutStatus.PROPERTIES_SIZE_EXCEEDED,
                f"the properties take {properties_length} bytes, and {LONGEST_PROPERTIES} are the "
                "most",
                reason="properties",
            )
        hosts = self._hosts
        size = hosts.fixed_size + body_length + len(topic) + properties_length
        if size > self._most:
            raise too_large(size, self._most)
        try:
            head = self._pack(
                size,
                frame.MAGIC_V1,
                crc32(body) & java.INT_MAX,
                queue_id,
                flag,
                queue_offset,
                0,
                hosts.flags,
                self._born_timestamp,
                hosts.born_host,
                0,
                hosts.store_host,
                self._reconsume_times,
                prepared_offset,
                body_length,
            )
        except struct.error as error:
            raise UsageError(f"a field does not fit its width: {error}") from error
        return bytearray().join(
            (
                head,
                body,
                _TOPIC_LENGTH(len(topic)),
                topic,
                _PROPERTIES_LENGTH(properties_length),
                properties,
            )
        )


def too_large(size: int, most: int) -> StoreError:
    """What a message or batch of too many bytes is answered with."""
    return refusal(
        PutStatus.MESSAGE_ILLEGAL,
        f"the message takes {size} bytes in the log, and maxMessageSize is {most}",
        reason="too_large",
    )


@lru_cache(_CACHED)
def host_fields(born_host: str | bytes, store_host: str | bytes, flags: int) -> HostFields:
    """What hosts and SYSFLAG fix.

    Raises:
        MessageRejected: if one is no host, or SYSFLAG says another family of it.
    """
    born, store = _host(born_host), _host(store_host)
    flags = _with_families(flags, born, store)
    head = struct.Struct(
        f"{frame.HEAD.struct.format}{len(born)}s{frame.STORE_TIME.struct.format[1:]}"
        f"{len(store)}s{frame.TAIL.struct.format[1:]}"
    )
    fixed = frame.fixed_size(frame.MAGIC_V1, flags)
    return HostFields(born, store, flags, fixed, frame.HEAD.size + len(born), head)


def _host(host: str | bytes) -> bytes:
    if isinstance(host, bytes):
        if len(host) in (frame.HOST_SIZE_V4, frame.HOST_SIZE_V6):
            return host
        _reject_host(f"a host has 8 or 20 bytes, not {len(host)}")
    try:
        return message_id.host_bytes(host)
    except UsageError as error:
        _reject_host(str(error))


def _with_families(flags: int, born_host: bytes, store_host: bytes) -> int:
    """SYSFLAG with the families of the hosts; where it says otherwise the message is refused."""
    families = 0
    if len(born_host) == frame.HOST_SIZE_V6:
        families |= sys_flag.BORN_HOST_V6
    if len(store_host) == frame.HOST_SIZE_V6:
        families |= sys_flag.STORE_HOST_V6
    stated = flags & (sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6)
    if stated & ~families:
        # QUIRK: RocketMQ reckons the length from the flag and writes a frame that cannot be read
        # (test_append_vectors: vector 34).
        _reject_host(f"SYSFLAG {flags:#x} says IPv6 of a host that is IPv4")
    return flags | families


def _reject_host(why: str) -> NoReturn:
    raise refusal(PutStatus.MESSAGE_ILLEGAL, why, reason="hosts")
