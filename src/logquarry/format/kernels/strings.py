"""Property strings of many messages: made of their parts, and looked into."""

from __future__ import annotations

import numpy as np

from logquarry.format import properties
from logquarry.format.kernels.base import Array, kernel
from logquarry.format.kernels.names import name_table, which_name
from logquarry.format.kernels.properties import next_separator
from logquarry.format.kernels.text import copy_short, same_bytes
from logquarry.format.native import load_u8, store_u8

_NAME_VALUE = ord(properties.NAME_VALUE_SEPARATOR)
_PROPERTY = ord(properties.PROPERTY_SEPARATOR)
_KEYS, _TAGS, _WAIT, _OTHERS = range(4)
"""The others (DELAY, INNER_MULTI_DISPATCH) make a message one for the reference."""
_NAMES = (
    properties.KEYS,
    properties.TAGS,
    properties.WAIT,
    properties.DELAY,
    properties.INNER_MULTI_DISPATCH,
)
_NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS = name_table(_NAMES)
_TRUE = np.frombuffer(b"true", np.uint8).copy()
_MOST_PAIRS = 64


@kernel
def _is_true(address: int, length: int) -> bool:
    return length == _TRUE.shape[0] and same_bytes(address, _TRUE.ctypes.data, length)


@kernel
def _put_pair(out: int, key: int, key_length: int, value: int, value_length: int) -> int:
    """Write ``key \\x01 value`` to an address: the address behind it."""
    copy_short(out, key, key_length)
    store_u8(out + key_length, _NAME_VALUE)
    copy_short(out + key_length + 1, value, value_length)
    return out + key_length + 1 + value_length


@kernel
def property_strings(
    count: int,
    pair_first: Array,
    pair_stop: Array,
    pair_spans: Array,
    keys_at: Array,
    keys_length: Array,
    tags_at: Array,
    tags_length: Array,
    out: int,
    out_at: Array,
    out_length: Array,
    odd: Array,
) -> None:
    """The property strings of messages, as ``Message.all_properties`` orders them.

    Args: the pairs of message i are those from ``pair_first[i]`` to ``pair_stop[i]``, in
    ``pair_spans`` int64 (4, pairs): address and length of name and value. ``keys_*`` and
    ``tags_*`` are KEYS and TAGS, of length -1 where there are none. ``out`` is the address of room
    for all; ``out_at`` and ``out_length`` get where each string is. ``odd`` is set for messages
    that the reference has to look at: DELAY and the like, a name that comes twice, no value.
    """
    for i in range(count):
        start = out
        keys, tags = keys_length[i], tags_length[i]
        first, stop = pair_first[i], pair_stop[i]
        if stop - first > _MOST_PAIRS:
            odd[i] = 1
            continue
        for pair in range(first, stop):
            name_at, name_length = pair_spans[0, pair], pair_spans[1, pair]
            value_at, value_length = pair_spans[2, pair], pair_spans[3, pair]
            if name_length < 0 or value_length < 0:
                odd[i] = 1
                break
            for other in range(first, pair):
                if pair_spans[1, other] == name_length and same_bytes(
                    pair_spans[0, other], name_at, name_length
                ):
                    odd[i] = 1
            name = which_name(name_at, name_length, _NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS)
            if name >= _OTHERS or (name == _WAIT and not _is_true(value_at, value_length)):
                odd[i] = 1
            # The column's word stands where the map has the name.
            elif name == _KEYS and keys >= 0:
                value_at, value_length = keys_at[i], keys
                keys = -1
            elif name == _TAGS and tags >= 0:
                value_at, value_length = tags_at[i], tags
                tags = -1
            if out > start:
                store_u8(out, _PROPERTY)
                out += 1
            out = _put_pair(out, name_at, name_length, value_at, value_length)
        if keys >= 0:
            if out > start:
                store_u8(out, _PROPERTY)
                out += 1
            name_at = _NAME_BYTES.ctypes.data + _NAME_STARTS[_KEYS]
            out = _put_pair(out, name_at, _NAME_LENGTHS[_KEYS], keys_at[i], keys)
        if tags >= 0:
            if out > start:
                store_u8(out, _PROPERTY)
                out += 1
            name_at = _NAME_BYTES.ctypes.data + _NAME_STARTS[_TAGS]
            out = _put_pair(out, name_at, _NAME_LENGTHS[_TAGS], tags_at[i], tags)
        out_at[i] = start
        out_length[i] = out - start


@kernel
def look_into(count: int, at: Array, lengths: Array, odd: Array) -> None:
    """Mark the strings that name what the store acts on: ``property_map.looked_at``.

    A WAIT that says true is nothing to act on.
    """
    for i in range(count):
        start = at[i]
        length = lengths[i]
        position = np.int64(0)
        while position < length:
            middle = next_separator(start, position, length)
            stop = middle
            while stop < length and load_u8(start + stop) == _NAME_VALUE:
                stop = next_separator(start, stop + 1, length)
            name = which_name(
                start + position, middle - position, _NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS
            )
            if name >= _OTHERS or (
                name == _WAIT and not _is_true(start + middle + 1, stop - middle - 1)
            ):
                odd[i] = 1
                break
            position = stop + 1
