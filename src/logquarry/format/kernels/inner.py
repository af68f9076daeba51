"""Kernels that take inner batches apart: the twins of ``logquarry.log.frames``.

:func:`measure_inner` decides which frames are taken apart and how much room their messages take;
:func:`unwrap_frames` writes the messages, and copies all other frames.
"""

from __future__ import annotations

import numpy as np

from logquarry.format import batch, frame, java, sys_flag
from logquarry.format.kernels.bytes import (
    AT_BODY_LENGTH,
    AT_CRC,
    AT_SYS_FLAG,
    TAIL_SIZE,
    Array,
    copy_bytes,
    copy_short,
    crc32,
    kernel,
    load_i32,
    load_i64,
    load_u8,
    store_i32,
    store_i64,
)
from logquarry.format.rows import (
    BODY_AT,
    BODY_LENGTH,
    POSITION,
    PROPS_AT,
    PROPS_LENGTH,
    SIZE,
    TOPIC_AT,
    TOPIC_LENGTH,
)

_H = frame.HEAD.offsets
_AT_SIZE, _AT_FLAG, _AT_QUEUE_OFFSET = _H["size"], _H["flag"], _H["queue_offset"]
_INNER = batch.INNER_BATCH
_KEPT_FLAGS = ~batch.OF_BATCH
_COMPRESSED = sys_flag.COMPRESSED
_ITEM = batch.HEAD.offsets
_ITEM_SIZE, _ITEM_FLAG = _ITEM["size"], _ITEM["flag"]
_ITEM_BODY_LENGTH = _ITEM["body_length"]
_ITEM_HEAD, _ITEM_FIXED = batch.HEAD.size, batch.FIXED_SIZE
_LENGTH_SIZE = frame.PROPERTIES_LENGTH.size
_CRC_MASK = np.uint32(java.INT_MAX)
_LONG_MAX = java.LONG_MAX


@kernel
def _load_i16(address: int) -> int:
    return (np.int64(np.int8(load_u8(address))) << 8) | np.int64(load_u8(address + 1))


@kernel
def _items(body: int, length: int) -> tuple[int, int]:
    """The number of messages in a wire form, and the bytes of their bodies and properties.

    -1 messages if it is damaged.
    """
    count = room = at = np.int64(0)
    while at < length:
        if length - at < _ITEM_FIXED:
            return np.int64(-1), room
        item = body + at
        body_length = np.int64(load_i32(item + _ITEM_BODY_LENGTH))
        if body_length < 0 or body_length > length - at - _ITEM_FIXED:
            return np.int64(-1), room
        props_length = _load_i16(item + _ITEM_HEAD + body_length)
        size = _ITEM_FIXED + body_length + props_length
        if props_length < 0 or size > length - at or np.int64(load_i32(item + _ITEM_SIZE)) != size:
            return np.int64(-1), room
        at += size
        count += 1
        room += body_length + props_length
    return count, room


@kernel
def measure_inner(
    address: int, rows: Array, count: int, limit: int, numbers: Array
) -> tuple[int, int, int]:
    """Count the messages of each frame that is taken apart, in ``numbers`` (int64); 0 for others.

    Returns (inner batches, frames after taking apart, their bytes); -1 inner batches if one is
    compressed, which only the reference reads. Without an inner batch, ``numbers`` is not written.
    """
    any_inner = False
    for i in range(count):
        flags = load_i32(address + np.int64(rows[i, POSITION]) + AT_SYS_FLAG)
        if flags & _INNER == _INNER:
            any_inner = True
            break
    found = frames = size = np.int64(0)
    if not any_inner:
        return found, frames, size
    for i in range(count):
        numbers[i] = 0
        at = address + np.int64(rows[i, POSITION])
        flags = load_i32(at + AT_SYS_FLAG)
        whole = np.int64(rows[i, SIZE])
        if flags & _INNER == _INNER:
            if flags & _COMPRESSED:
                return np.int64(-1), frames, size
            found += 1
            length = np.int64(rows[i, BODY_LENGTH])
            items, room = _items(at + np.int64(rows[i, BODY_AT]), length)
            fixed = whole - length - np.int64(rows[i, PROPS_LENGTH])
            room += items * fixed
            fits = room <= limit and load_i64(at + _AT_QUEUE_OFFSET) <= _LONG_MAX - items
            if items > 0 and fits:
                numbers[i] = items
                frames += items
                size += room
                continue
        frames += 1
        size += whole
    return found, frames, size


@kernel
def unwrap_frames(
    address: int,
    rows: Array,
    numbers: Array,
    crc_function: int,
    out: Array,
    out_rows: Array,
) -> None:
    """Write the frames that :func:`measure_inner` counted to ``out`` (uint8), and their rows."""
    target = out.ctypes.data
    to = np.int64(0)
    made = 0
    for i in range(rows.shape[0]):
        at = address + np.int64(rows[i, POSITION])
        size = np.int64(rows[i, SIZE])
        if numbers[i] == 0:
            copy_bytes(target + to, at, size)
            for column in range(rows.shape[1]):
                out_rows[made, column] = rows[i, column]
            out_rows[made, POSITION] = to
            made += 1
            to += size
            continue
        head = np.int64(rows[i, BODY_AT])
        body_length = np.int64(rows[i, BODY_LENGTH])
        topic_length = np.int64(rows[i, TOPIC_LENGTH])
        topic_start = head + body_length
        topic_size = np.int64(rows[i, TOPIC_AT]) - topic_start + topic_length
        flags = load_i32(at + AT_SYS_FLAG) & _KEPT_FLAGS
        queue_offset = load_i64(at + _AT_QUEUE_OFFSET)
        item = at + head
        for number in range(numbers[i]):
            own = np.int64(load_i32(item + _ITEM_BODY_LENGTH))
            source = item + _ITEM_HEAD
            props_length = _load_i16(source + own)
            whole = head + own + topic_size + _LENGTH_SIZE + props_length
            start = target + to
            copy_bytes(start, at, head)
            copy_bytes(start + head, source, own)
            copy_short(start + head + own, at + topic_start, topic_size)
            # One copy: as in a frame, the length of the properties is followed by the properties.
            copy_short(start + head + own + topic_size, source + own, _LENGTH_SIZE + props_length)
            store_i32(start + _AT_SIZE, whole)
            store_i32(start + AT_CRC, np.int32(crc32(crc_function, start + head, own) & _CRC_MASK))
            store_i32(start + _AT_FLAG, load_i32(item + _ITEM_FLAG))
            store_i32(start + AT_SYS_FLAG, flags)
            store_i64(start + _AT_QUEUE_OFFSET, queue_offset + number)
            store_i32(start + head - TAIL_SIZE + AT_BODY_LENGTH, own)
            out_rows[made, POSITION] = to
            out_rows[made, SIZE] = whole
            out_rows[made, BODY_AT] = head
            out_rows[made, BODY_LENGTH] = own
            out_rows[made, TOPIC_AT] = head + own + topic_size - topic_length
            out_rows[made, TOPIC_LENGTH] = topic_length
            out_rows[made, PROPS_AT] = head + own + topic_size + _LENGTH_SIZE
            out_rows[made, PROPS_LENGTH] = props_length
            made += 1
            to += whole
            item = source + own + _LENGTH_SIZE + props_length
