"""The frames of a batch, made of its wire form: the twin of ``encode_batch``'s loop."""

from __future__ import annotations

import numpy as np

from logquarry.format import batch, frame, java, properties
from logquarry.format.kernels.base import (
    AT_BODY_LENGTH,
    AT_CRC,
    AT_PHYSICAL_OFFSET,
    TAIL_SIZE,
    Array,
    kernel,
)
from logquarry.format.kernels.encode import (
    AT_FLAG,
    AT_QUEUE_OFFSET,
    AT_SIZE,
    CRC_MASK,
)
from logquarry.format.kernels.text import copy_short, crc32
from logquarry.format.native import (
    copy_bytes,
    load_i32,
    load_u8,
    store_i16,
    store_i32,
    store_i64,
    store_u8,
)

_ITEM = batch.HEAD.offsets
_ITEM_FLAG = _ITEM["flag"]
_ITEM_BODY_LENGTH = _ITEM["body_length"]
_ITEM_HEAD = batch.HEAD.size
_ITEM_FIXED = batch.FIXED_SIZE
_LENGTH_SIZE = frame.PROPERTIES_LENGTH.size
_SEPARATOR = ord(properties.PROPERTY_SEPARATOR)
_LONGEST = java.INT_MAX >> 16


@kernel
def batch_frames(
    wire: Array,
    head: Array,
    topic: Array,
    shared: Array,
    crc_function: int,
    out: Array,
    starts: Array,
) -> tuple[int, int, int]:
    """The frames of a wire form, without what the lock tells.

    Args: all uint8: ``wire``; ``head`` of every frame; ``topic`` with its length before it;
    ``shared``, the batch's own properties; ``out`` with room for as many bytes as are allowed.
    ``starts`` int64 gets where each frame starts.
    Returns (frames, bytes, bytes of body); -1 frames where the reference would refuse the batch.
    """
    at, end = np.int64(0), np.int64(wire.shape[0])
    source, target = wire.ctypes.data, out.ctypes.data
    head_size, topic_size, shared_size = head.shape[0], topic.shape[0], shared.shape[0]
    count = size = bodies = np.int64(0)
    while at < end:
        item = source + at
        if end - at < _ITEM_FIXED or count == starts.shape[0]:
            return -1, size, bodies
        body_length = np.int64(load_i32(item + _ITEM_BODY_LENGTH))
        if body_length < 0 or body_length > end - at - _ITEM_FIXED:
            return -1, size, bodies
        body = item + _ITEM_HEAD
        length_at = body + body_length
        own_size = (np.int64(np.int8(load_u8(length_at))) << 8) | np.int64(load_u8(length_at + 1))
        own = length_at + _LENGTH_SIZE
        if own_size < 0 or own + own_size > source + end:
            return -1, size, bodies
        at = own + own_size - source
        glued = own_size > 0 and shared_size > 0 and load_u8(own + own_size - 1) != _SEPARATOR
        props = own_size + shared_size + (1 if glued else 0)
        whole = head_size + body_length + topic_size + _LENGTH_SIZE + props
        if props > _LONGEST or size + whole > out.shape[0]:
            return -1, size, bodies
        to = target + size
        copy_bytes(to, head.ctypes.data, head_size)
        copy_bytes(to + head_size, body, body_length)
        store_i32(to + AT_SIZE, whole)
        store_i32(
            to + AT_CRC, np.int32(crc32(crc_function, to + head_size, body_length) & CRC_MASK)
        )
        store_i32(to + AT_FLAG, load_i32(item + _ITEM_FLAG))
        store_i32(to + head_size - TAIL_SIZE + AT_BODY_LENGTH, body_length)
        to += head_size + body_length
        copy_short(to, topic.ctypes.data, topic_size)
        to += topic_size
        store_i16(to, props)
        to += _LENGTH_SIZE
        copy_short(to, own, own_size)
        to += own_size
        if glued:
            store_u8(to, _SEPARATOR)
            to += 1
        copy_short(to, shared.ctypes.data, shared_size)
        starts[count] = size
        count += 1
        size += whole
        bodies += body_length
    return count, size, bodies


@kernel
def place_frames(
    data: Array, starts: Array, time_at: int, queue_offset: int, physical_offset: int, now: int
) -> None:
    """Fill in what the lock told: the twin of ``Encoded.place``."""
    for i in range(starts.shape[0]):
        at = data.ctypes.data + starts[i]
        store_i64(at + AT_QUEUE_OFFSET, queue_offset + i)
        store_i64(at + AT_PHYSICAL_OFFSET, physical_offset + starts[i])
        store_i64(at + time_at, now)
