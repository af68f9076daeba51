"""The hashes of the keys of messages, as the index takes them."""

from __future__ import annotations

import numpy as np

from logquarry.format import index, java, properties
from logquarry.format.kernels.base import Array, kernel
from logquarry.format.kernels.properties import KEYS, UNIQ_KEY
from logquarry.format.kernels.text import java_hash_on
from logquarry.format.native import load_i32, load_u8

SPACE = ord(properties.KEY_SEPARATOR)
_LARGEST = java.INT_MAX
_ENTRY, _SLOT = index.ENTRY.size, index.SLOT.size
_HASH_AT, _PREVIOUS_AT = index.ENTRY.offsets["key_hash"], index.ENTRY.offsets["previous"]


@kernel
def positive(value: int) -> int:
    """``java.positive_hash_code`` of a hash."""
    value = abs(value)
    return 0 if value > _LARGEST else value


@kernel
def index_keys(
    address: int,
    count: int,
    starts: Array,
    lengths: Array,
    prefixes: Array,
    hashes: Array,
    numbers: Array,
    raw: bool,
) -> int:
    """Hash the keys of some frames over valid UTF-8: UNIQ_KEY, then KEYS split at spaces.

    ``starts`` and ``lengths`` int32 (4, n) are what :func:`parse_properties` found; ``prefixes``
    int64 the hash of each frame's ``topic#``. ``hashes`` and ``numbers`` int64 get the hash of
    each key (with its sign if ``raw``) and the number of its frame; how many is returned.
    """
    used = 0
    for i in range(count):
        length = lengths[UNIQ_KEY, i]
        if length > 0:
            value = java_hash_on(prefixes[i], address + starts[UNIQ_KEY, i], length)
            hashes[used] = value if raw else positive(value)
            numbers[used] = i
            used += 1
        stop = lengths[KEYS, i]
        base = address + starts[KEYS, i]
        begin = np.int64(0)
        for at in range(stop + 1):
            if at == stop or load_u8(base + at) == SPACE:
                if at > begin:
                    value = java_hash_on(prefixes[i], base + begin, at - begin)
                    hashes[used] = value if raw else positive(value)
                    numbers[used] = i
                    used += 1
                begin = np.int64(at + 1)
    return used


@kernel
def check_chains(
    entries: int, count: int, table: int, slots: int, newest: Array
) -> tuple[int, int, int, int, int]:
    """Follow the entries of an index file, and the newest one of each slot.

    Args: addresses of the first entry and of the first slot, and how many there are; ``newest``
    int32, of zeros, gets the number of each slot's newest entry.
    Returns (entries that lead elsewhere, index of the first, where it should lead, slots that lead
    elsewhere, the first).
    """
    wrong = wrong_slots = 0
    first = expected = first_slot = -1
    for number in range(count):
        at = entries + number * _ENTRY
        slot = abs(np.int64(load_i32(at + _HASH_AT))) % slots
        if load_i32(at + _PREVIOUS_AT) != newest[slot]:
            if wrong == 0:
                first, expected = number, np.int64(newest[slot])
            wrong += 1
        newest[slot] = number + 1
    for slot in range(slots):
        if load_i32(table + slot * _SLOT) != newest[slot]:
            if wrong_slots == 0:
                first_slot = slot
            wrong_slots += 1
    return wrong, first, expected, wrong_slots, first_slot
