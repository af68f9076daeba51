"""Computes and packs the fields of a frame that depend on hosts (IPv4, IPv6) and SYSFLAG."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NoReturn

from logquarry import arguments
from logquarry.errors import StoreError, UsageError
from logquarry.format import frame, message_id, sys_flag
from logquarry.write.put_result import PutStatus, refusal

_CACHED: Final = 4_096


@dataclass(frozen=True, slots=True)
class HostFields:
    """Hosts and SYSFLAG as they are in a frame.

    Attributes:
        flags: SYSFLAG, including the bits for the address families of the hosts.
        fixed_size: bytes of the frame without body, TOPICLEN, topic and properties.
        pack: packs the fields before the body, ``prefix_size`` bytes.
        store_time_at: where STORETIMESTAMP starts in the frame.
    """

    born_host: bytes
    store_host: bytes
    flags: int
    fixed_size: int
    advances: bool
    pack: Callable[..., bytes]
    prefix_size: int
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
        prefix.size,
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
        return message_id.host_bytes(host)
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
        # QUIRK: RocketMQ computes the length from the flag and writes an unreadable frame
        # (test_append_vectors: vector 34).
        _reject_host(f"SYSFLAG {flags:#x} marks a host as IPv6, but the host is IPv4")
    return flags | families


def _reject_host(why: str) -> NoReturn:
    raise refusal(PutStatus.MESSAGE_ILLEGAL, why, reason="hosts")
