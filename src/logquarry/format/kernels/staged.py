"""Kernels for staged frames (:mod:`logquarry.format.staged`): number, place and compare them."""

from __future__ import annotations

import numpy as np

from logquarry.format import frame
from logquarry.format.kernels.bytes import (
    AT_PHYSICAL_OFFSET,
    AT_SYS_FLAG,
    BORN_V6,
    FIXED_V1,
    HOST_EXTRA,
    TRANSACTION_MASK,
    Array,
    java_hash,
    kernel,
    same_bytes,
)
from logquarry.format.kernels.encode import AT_QUEUE_OFFSET
from logquarry.format.native import copy_bytes, load_i32, load_i64, load_u8, store_i64
from logquarry.format.staged import NO_FRAME, NO_ROOM, PLACED
from logquarry.format.sys_flag import TRANSACTION_COMMIT, TRANSACTION_NOT

_BLANK = frame.BLANK.size
_TIME_AT_V4 = frame.HEAD.size + frame.HOST_SIZE_V4
_TIME_SIZE = frame.STORE_TIME.size
_AFTER_OFFSETS = AT_PHYSICAL_OFFSET + 8
_SPACE = 32


@kernel
def number_frames(address: int, positions: Array, numbers: Array) -> None:
    """Write the queue index into each of some frames. Both arrays are int64."""
    for i in range(positions.shape[0]):
        store_i64(address + positions[i] + AT_QUEUE_OFFSET, numbers[i])


@kernel
def place_staged(
    source: int,
    start: int,
    stop: int,
    most: int,
    address: int,
    position: int,
    end: int,
    base: int,
    now: int,
    next_offsets: Array,
    placed: Array,
) -> tuple[int, int, int, int]:
    """Copy staged frames into a file of the log, and fill in the fields that are known only under
    the lock.

    Args: ``source`` address of a segment with frames from byte ``start`` to ``stop``; about
    ``most`` bytes are copied, and at least one frame; ``address``, ``position``, ``end``, ``base``
    and ``now`` as for ``encode_frames``; ``next_offsets`` of each queue, which are raised;
    ``placed`` counts messages (row 0) and bytes (row 1) of each queue.
    Returns (position in the segment after the last frame, position in the file after it, number of
    frames, reason of the end).
    """
    count = 0
    first = position
    while start < stop and position - first < most:
        if stop - start < FIXED_V1:
            return start, position, count, NO_FRAME
        at = source + start
        size = np.int64(load_i32(at))
        queue = load_i64(at + AT_QUEUE_OFFSET)
        if size < FIXED_V1 or size > stop - start:
            return start, position, count, NO_FRAME
        if queue < 0 or queue >= next_offsets.shape[0]:
            return start, position, count, NO_FRAME
        if position + size + _BLANK > end:
            return start, position, count, NO_ROOM
        to = address + position
        copy_bytes(to, at, size)
        flags = load_i32(at + AT_SYS_FLAG)
        kind = flags & TRANSACTION_MASK
        queue_offset = np.int64(0)
        if kind == TRANSACTION_NOT or kind == TRANSACTION_COMMIT:
            queue_offset = next_offsets[queue]
            next_offsets[queue] = queue_offset + 1
        store_i64(to + AT_QUEUE_OFFSET, queue_offset)
        store_i64(to + AT_PHYSICAL_OFFSET, base + position)
        time_at = _TIME_AT_V4
        if flags & BORN_V6:
            time_at += HOST_EXTRA
        store_i64(to + time_at, now)
        placed[0, queue] += 1
        placed[1, queue] += size
        start += size
        position += size
        count += 1
    return start, position, count, PLACED


@kernel
def same_staged(
    source: int, start: int, stop: int, address: int, position: int, end: int
) -> tuple[int, int, int]:
    """Count the frames of a segment that are in a file of the log from a position on.

    Args: as for :func:`place_staged`; ``end`` is the end of the bytes in the file.
    Returns (position in the segment after the last of these frames, position in the file after it,
    their number).
    """
    count = 0
    while stop - start >= FIXED_V1 and end - position >= FIXED_V1:
        at, to = source + start, address + position
        size = np.int64(load_i32(at))
        if size < FIXED_V1 or size > stop - start or size > end - position:
            break
        time_at = _TIME_AT_V4
        if load_i32(at + AT_SYS_FLAG) & BORN_V6:
            time_at += HOST_EXTRA
        rest = time_at + _TIME_SIZE
        if not same_bytes(at, to, AT_QUEUE_OFFSET):
            break
        if not same_bytes(at + _AFTER_OFFSETS, to + _AFTER_OFFSETS, time_at - _AFTER_OFFSETS):
            break
        if not same_bytes(at + rest, to + rest, size - rest):
            break
        start += size
        position += size
        count += 1
    return start, position, count


@kernel
def first_word_hashes(at: Array, lengths: Array, hashes: Array) -> None:
    """``String.hashCode`` of the first word of each text, -1 << 32 if there is none.

    Args: ``at`` and ``lengths`` of valid UTF-8, and ``hashes``, all int64.
    """
    for i in range(at.shape[0]):
        begin, end = at[i], at[i] + max(lengths[i], 0)
        while begin < end and load_u8(begin) == _SPACE:
            begin += 1
        to = begin
        while to < end and load_u8(to) != _SPACE:
            to += 1
        hashes[i] = java_hash(begin, to - begin) if to > begin else -(1 << 32)
