"""The hashes of the keys of messages, as the index takes them."""

from __future__ import annotations

import numpy as np

from logquarry.format import java, properties
from logquarry.format.kernels.base import Array, kernel
from logquarry.format.kernels.properties import KEYS, UNIQ_KEY
from logquarry.format.kernels.text import java_hash_on
from logquarry.format.native import load_u8

SPACE = ord(properties.KEY_SEPARATOR)
_LARGEST = java.INT_MAX


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
