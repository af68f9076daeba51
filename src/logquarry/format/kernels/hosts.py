"""Message ids and hosts as text."""

from __future__ import annotations

import numpy as np

from logquarry.format.kernels.base import (
    AT_PHYSICAL_OFFSET,
    AT_SYS_FLAG,
    BORN_V6,
    HEAD_SIZE,
    HOST_EXTRA,
    HOST_V4,
    STORE_TIME_SIZE,
    STORE_V6,
    Array,
    kernel,
)
from logquarry.format.kernels.text import same_bytes
from logquarry.format.native import copy16, copy_bytes, load_i32, load_raw64, load_u8
from logquarry.format.rows import POSITION

_HEX_PAIRS = np.frombuffer(bytes(range(256)).hex().upper().encode(), np.uint8).copy()
_LOWER_HEX = np.frombuffer(b"0123456789abcdef", np.uint8).copy()


@kernel
def message_ids(address: int, rows: Array, count: int, offsets: Array, out: Array) -> int:
    """Message ids as text: store host and physical offset in upper-case hex.

    ``out`` holds 56 bytes a frame. Returns the bytes written.
    """
    at = 0
    offsets[0] = 0
    last_host = address
    last_size = 0
    target = out.ctypes.data
    pairs = _HEX_PAIRS.ctypes.data
    for i in range(count):
        place = address + rows[i, POSITION]
        flags = load_i32(place + AT_SYS_FLAG)
        born = HOST_V4 + (HOST_EXTRA if flags & BORN_V6 else 0)
        store = HOST_V4 + (HOST_EXTRA if flags & STORE_V6 else 0)
        host = place + HEAD_SIZE + born + STORE_TIME_SIZE
        done = 0
        if store == last_size and same_bytes(host, last_host, store):
            # One broker writes a log: its host is the one before.
            copy_bytes(target + at, target + offsets[i - 1], 2 * store)
            at += 2 * store
            done = store
        last_host, last_size = host, store
        for k in range(done, store + 8):
            if k < store:
                byte = load_u8(host + k)
            else:
                byte = load_u8(place + AT_PHYSICAL_OFFSET + k - store)
            copy16(target + at, pairs + 2 * byte)
            at += 2
        offsets[i + 1] = at
    return at


@kernel
def _decimal(value: int, out: Array, at: int) -> int:
    if value < 0:
        out[at] = 45
        at += 1
        value = -value
    digits = 1
    power = np.int64(1)
    while value // power >= 10:
        power *= 10
        digits += 1
    for _ in range(digits):
        out[at] = 48 + (value // power) % 10
        power //= 10
        at += 1
    return at


HOST_TEXT_SIZE = 56
"""Most bytes of a host as text: eight groups of four digits, brackets and a port."""


@kernel
def host_texts(
    address: int, rows: Array, count: int, store_host: bool, offsets: Array, out: Array
) -> int:
    """Born or store hosts as ``message_id.host_text`` writes them.

    ``out`` holds HOST_TEXT_SIZE bytes a frame. Returns the bytes written.
    """
    at = 0
    offsets[0] = 0
    last_host = address
    last_size = 0
    for i in range(count):
        place = address + rows[i, POSITION]
        flags = load_i32(place + AT_SYS_FLAG)
        host = place + HEAD_SIZE
        wide = flags & BORN_V6 != 0
        if store_host:
            host += HOST_V4 + (HOST_EXTRA if wide else 0) + STORE_TIME_SIZE
            wide = flags & STORE_V6 != 0
        size = HOST_V4 + (HOST_EXTRA if wide else 0)
        if size == last_size and same_bytes(host, last_host, size):
            # The same as the one before, as hosts mostly are.
            length = offsets[i] - offsets[i - 1]
            target = out.ctypes.data
            copy_bytes(target + at, target + offsets[i - 1], length)
            at += length
            offsets[i + 1] = at
            continue
        last_host, last_size = host, size
        port = np.int64(load_i32(host + (HOST_V4 - 4 + (HOST_EXTRA if wide else 0))))
        if wide:
            mapped = load_raw64(host) == 0 and load_i32(host + 8) == 0xFFFF
            if mapped:
                host += 12
                wide = False
        if wide:
            out[at] = 91
            at += 1
            for group in range(8):
                if group > 0:
                    out[at] = 58
                    at += 1
                value = (np.int64(load_u8(host + 2 * group)) << 8) | np.int64(
                    load_u8(host + 2 * group + 1)
                )
                started = False
                for shift in (12, 8, 4, 0):
                    nibble = (value >> shift) & 15
                    if nibble != 0 or started or shift == 0:
                        out[at] = _LOWER_HEX[nibble]
                        at += 1
                        started = True
            out[at] = 93
            at += 1
        else:
            for k in range(4):
                if k > 0:
                    out[at] = 46
                    at += 1
                at = _decimal(np.int64(load_u8(host + k)), out, at)
        out[at] = 58
        at += 1
        at = _decimal(port, out, at)
        offsets[i + 1] = at
    return at
