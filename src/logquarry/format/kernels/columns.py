"""Frames to Arrow buffers: fixed fields and spans of text and bodies."""

from __future__ import annotations

import numpy as np

from logquarry.format.kernels.base import (
    AT_SYS_FLAG,
    BORN_V6,
    HEAD_SIZE,
    HOST_EXTRA,
    HOST_V4,
    Array,
    kernel,
)
from logquarry.format.kernels.text import copy_short, hash_bytes, is_ascii, same_bytes
from logquarry.format.native import load_i32, load_i64
from logquarry.format.rows import (
    BODY_AT,
    FROM_BODY,
    FROM_STORE_TIME,
    POSITION,
    TOPIC_AT,
    TOPIC_LENGTH,
)


@kernel
def gather(
    address: int,
    rows: Array,
    count: int,
    from32: Array,
    at32: Array,
    out32: Array,
    from64: Array,
    at64: Array,
    factors: Array,
    out64: Array,
) -> None:
    """Fixed fields of each frame: 32-bit ones into ``out32`` (fields, n), 64-bit ones times their
    factor into ``out64``.

    All at once, as each frame's head is fetched from memory once then.
    """
    for i in range(count):
        place = address + rows[i, POSITION]
        store_time = place + HEAD_SIZE + HOST_V4
        if load_i32(place + AT_SYS_FLAG) & BORN_V6:
            store_time += HOST_EXTRA
        body = place + rows[i, BODY_AT]
        for f in range(from32.shape[0]):
            start = place
            if from32[f] == FROM_BODY:
                start = body
            out32[f, i] = load_i32(start + at32[f])
        for f in range(from64.shape[0]):
            start = place
            if from64[f] == FROM_BODY:
                start = body
            elif from64[f] == FROM_STORE_TIME:
                start = store_time
            out64[f, i] = load_i64(start + at64[f]) * factors[f]


@kernel
def spans_of(
    rows: Array, count: int, at_column: int, length_column: int, starts: Array, lengths: Array
) -> None:
    """Start in the window and length of a part of each frame."""
    for i in range(count):
        starts[i] = rows[i, POSITION] + rows[i, at_column]
        lengths[i] = rows[i, length_column]


@kernel
def topic_spans(address: int, rows: Array, count: int, starts: Array, lengths: Array) -> bool:
    """Start in the window and length of each topic; whether all are ASCII."""
    ascii_only = True
    for i in range(count):
        start = rows[i, POSITION] + rows[i, TOPIC_AT]
        length = rows[i, TOPIC_LENGTH]
        starts[i] = start
        lengths[i] = length
        ascii_only &= is_ascii(address + start, length)
    return ascii_only


@kernel
def offsets_of(lengths: Array, count: int, offsets: Array, validity: Array) -> tuple[int, int]:
    """Arrow offsets and validity bits of spans; a negative length is null.

    ``validity`` must be zeroed. Returns (bytes in all, nulls); the bytes are -1 where they
    exceed what 32-bit offsets can say.
    """
    total = np.int64(0)
    nulls = 0
    offsets[0] = 0
    for i in range(count):
        length = lengths[i]
        if length >= 0:
            total += length
            validity[i >> 3] |= np.uint8(1 << (i & 7))
        else:
            nulls += 1
        if total > 0x7FFFFFFF:
            return -1, nulls
        offsets[i + 1] = total
    return total, nulls


@kernel
def copy_spans(address: int, starts: Array, count: int, offsets: Array, target: int) -> None:
    """The bytes of spans one after the other."""
    for i in range(count):
        copy_short(target + offsets[i], address + starts[i], offsets[i + 1] - offsets[i])


@kernel
def intern_topics(
    address: int, rows: Array, count: int, table: Array, found: Array, ids: Array
) -> int:
    """A number for each distinct topic, in order of first appearance.

    Args: ``table`` int32, a power of two long, filled with -1; ``found`` int32 (n, 2) gets start
    and length of each distinct topic; ``ids`` gets the number of each frame's.
    Returns how many there are, or -1 where they are more than ``found`` can hold.
    """
    mask = table.shape[0] - 1
    known = 0
    for i in range(count):
        start = rows[i, POSITION] + rows[i, TOPIC_AT]
        length = rows[i, TOPIC_LENGTH]
        slot = np.int64(hash_bytes(address + start, length) & np.uint64(mask))
        while True:
            number = table[slot]
            if number < 0:
                if known == found.shape[0]:
                    return -1
                table[slot] = known
                found[known, 0] = start
                found[known, 1] = length
                ids[i] = known
                known += 1
                break
            if found[number, 1] == length and same_bytes(
                address + found[number, 0], address + start, length
            ):
                ids[i] = number
                break
            slot = (slot + 1) & mask
    return known
