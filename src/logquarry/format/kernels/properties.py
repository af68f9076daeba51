"""Property strings: their parts, the tags code, and bytes that cannot be meant."""

from __future__ import annotations

import numpy as np

from logquarry.format import delay, properties
from logquarry.format.kernels.base import Array, kernel
from logquarry.format.kernels.names import name_table, which_name
from logquarry.format.kernels.text import (
    has_zero,
    hash_bytes,
    is_ascii,
    is_plain,
    is_utf8,
    java_hash,
    same_bytes,
)
from logquarry.format.native import load_raw64, load_u8, trailing_zeros
from logquarry.format.rows import POSITION, PROPS_AT, PROPS_LENGTH, TOPIC_AT, TOPIC_LENGTH

_NAME_VALUE = ord(properties.NAME_VALUE_SEPARATOR)
_PROPERTY = ord(properties.PROPERTY_SEPARATOR)
_NAMES = (properties.TAGS, properties.KEYS, properties.UNIQ_KEY, properties.DELAY)
TAGS, KEYS, UNIQ_KEY, DELAY = range(len(_NAMES))
_NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS = name_table(_NAMES)


@kernel
def bad_utf8(address: int, rows: Array, count: int) -> int:
    """How many frames have properties that are not UTF-8."""
    bad = 0
    for i in range(count):
        start = address + rows[i, POSITION] + rows[i, PROPS_AT]
        length = rows[i, PROPS_LENGTH]
        if not is_ascii(start, length) and not is_utf8(start, length):
            bad += 1
    return bad


@kernel
def mark_suspects(address: int, rows: Array, count: int, marks: Array) -> None:
    """Mark the frames whose topic or properties hold NUL bytes or are not UTF-8."""
    for i in range(count):
        place = address + rows[i, POSITION]
        topic, topic_length = place + rows[i, TOPIC_AT], rows[i, TOPIC_LENGTH]
        props, props_length = place + rows[i, PROPS_AT], rows[i, PROPS_LENGTH]
        if is_plain(topic, topic_length) and is_plain(props, props_length):
            continue
        if (
            has_zero(topic, topic_length)
            or has_zero(props, props_length)
            or not is_utf8(topic, topic_length)
            or not is_utf8(props, props_length)
        ):
            marks[i] = 1


@kernel
def next_separator(address: int, at: int, stop: int) -> int:
    """The first place in ``[at, stop)`` that holds a separator, or ``stop``."""
    while at < stop:
        if at + 8 <= stop:
            word = load_raw64(address + at)
            # A byte below 3 borrows into its high bit: none there means no separator in eight.
            low = (word - np.uint64(0x0303030303030303)) & ~word & np.uint64(0x8080808080808080)
            if low == 0:
                at += 8
                continue
            at += trailing_zeros(low) >> 3
        byte = load_u8(address + at)
        if byte == _NAME_VALUE or byte == _PROPERTY:
            return at
        at += 1
    return stop


@kernel
def parse_properties(
    address: int,
    rows: Array,
    count: int,
    want_pairs: bool,
    starts: Array,
    lengths: Array,
    pairs: Array,
    pair_offsets: Array,
    table: Array,
    stamps: Array,
) -> int:
    """Split the property strings.

    Args: ``starts`` and ``lengths`` int32 (4, n) get the values of TAGS, KEYS, UNIQ_KEY and DELAY
    (length -1: absent). With ``want_pairs``, ``pairs`` int32 (4, m) gets key start, key length,
    value start and value length of each property, keys in order of first appearance and the last
    value of each, and ``pair_offsets`` where each frame's pairs begin. ``table`` and ``stamps``
    int32, a power of two of at least twice the pairs of a frame, are scratch; stamps zeroed.
    """
    used = 0
    mask = table.shape[0] - 1
    if want_pairs:
        pair_offsets[0] = 0
    for i in range(count):
        for name in range(4):
            lengths[name, i] = -1
            starts[name, i] = 0
        position = rows[i, POSITION] + rows[i, PROPS_AT]
        stop = position + rows[i, PROPS_LENGTH]
        while position < stop:
            middle = -1
            at = next_separator(address, position, stop)
            while at < stop and load_u8(address + at) == _NAME_VALUE:
                if middle < 0:
                    middle = at
                at = next_separator(address, at + 1, stop)
            key_length = middle - position
            value_length = at - middle - 1
            if middle > position and value_length > 0:
                name = which_name(
                    address + position, key_length, _NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS
                )
                if name >= 0:
                    starts[name, i] = middle + 1
                    lengths[name, i] = value_length
                if want_pairs:
                    slot = np.int64(hash_bytes(address + position, key_length) & np.uint64(mask))
                    while True:
                        if stamps[slot] != i + 1:
                            stamps[slot] = i + 1
                            table[slot] = used
                            pairs[0, used] = position
                            pairs[1, used] = key_length
                            pairs[2, used] = middle + 1
                            pairs[3, used] = value_length
                            used += 1
                            break
                        other = table[slot]
                        if pairs[1, other] == key_length and same_bytes(
                            address + pairs[0, other], address + position, key_length
                        ):
                            pairs[2, other] = middle + 1
                            pairs[3, other] = value_length
                            break
                        slot = (slot + 1) & mask
            position = at + 1
        if want_pairs:
            pair_offsets[i + 1] = used
    return used


_SCHEDULE_TOPIC = np.frombuffer(delay.SCHEDULE_TOPIC.encode(), np.uint8).copy()


@kernel
def tags_codes(
    address: int,
    rows: Array,
    count: int,
    starts: Array,
    lengths: Array,
    store_times: Array,
    levels: Array,
    out: Array,
    odd: Array,
) -> int:
    """The dispatcher's tags code (``delay.tags_code``) over valid UTF-8.

    ``store_times`` in milliseconds; ``levels`` the delays. Frames whose DELAY is not one to nine
    ASCII digits are left to the reference: their numbers go to ``odd``, how many is returned.
    """
    left_over = 0
    for i in range(count):
        length = lengths[TAGS, i]
        code = np.int64(0)
        if length > 0:
            code = java_hash(address + starts[TAGS, i], length)
        digits = lengths[DELAY, i]
        if digits > 0 and rows[i, TOPIC_LENGTH] == _SCHEDULE_TOPIC.shape[0]:
            topic = address + rows[i, POSITION] + rows[i, TOPIC_AT]
            scheduled = True
            for k in range(_SCHEDULE_TOPIC.shape[0]):
                if load_u8(topic + k) != _SCHEDULE_TOPIC[k]:
                    scheduled = False
                    break
            if scheduled:
                level = 0
                plain = digits <= 9
                if plain:
                    for k in range(digits):
                        digit = np.int64(load_u8(address + starts[DELAY, i] + k)) - 48
                        if digit < 0 or digit > 9:
                            plain = False
                            break
                        level = level * 10 + digit
                if not plain:
                    odd[left_over] = i
                    left_over += 1
                elif level > 0:
                    level = min(level, levels.shape[0])
                    if level > 0:
                        code = store_times[i] + levels[level - 1]
        out[i] = code
    return left_over
