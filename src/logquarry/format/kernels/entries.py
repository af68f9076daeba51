"""Kernels for queue entries and index entries: they hash keys, check the chains of an index file,
and group queue entries by queue.
"""

from __future__ import annotations

import numpy as np

from logquarry.format import index, java, properties, queue_entry
from logquarry.format.arrays import FRAME_SIZE, PHYSICAL_OFFSET, QUEUE, QUEUE_OFFSET, TAGS_CODE
from logquarry.format.kernels.bytes import (
    Array,
    java_hash_on,
    kernel,
    load_i32,
    load_u8,
    prefetch,
    store_i32,
    store_i64,
)
from logquarry.format.kernels.properties import KEYS, TAGS, UNIQ_KEY

SPACE = ord(properties.KEY_SEPARATOR)
_LARGEST = java.INT_MAX
_ENTRY, _SLOT = index.ENTRY.size, index.SLOT.size
_HASH_AT, _PREVIOUS_AT = index.ENTRY.offsets["key_hash"], index.ENTRY.offsets["previous"]


@kernel
def positive(value: int) -> int:
    """Return ``java.positive_hash_code`` of a hash."""
    value = abs(value)
    return 0 if value > _LARGEST else value


@kernel
def index_keys(
    address: int,
    count: int,
    starts: Array,
    lengths: Array,
    prefixes: Array,
    tag_prefixes: Array,
    hashes: Array,
    numbers: Array,
    raw: bool,
) -> int:
    """Hash the UNIQ_KEY, each word in KEYS, and TAGS of frames. Return the number of hashes.

    All text must be valid UTF-8. ``hashes`` (int64) gets the hash of each key; with ``raw``, a hash
    may be negative. ``numbers`` (int64) gets the index of the key's frame.

    Args:
        starts, lengths: int32 (4, n), filled by :func:`parse_properties`.
        prefixes, tag_prefixes: int64; for each frame, the hash of the text ``<topic>#``, and of
            ``<topic>#T#``. If ``tag_prefixes`` is empty, tags are not hashed.
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
        length = lengths[TAGS, i]
        if length > 0 and len(tag_prefixes) > 0:
            value = java_hash_on(tag_prefixes[i], address + starts[TAGS, i], length)
            hashes[used] = value if raw else positive(value)
            numbers[used] = i
            used += 1
    return used


@kernel
def check_chains(
    entries: int, count: int, table: int, slots: int, newest: Array
) -> tuple[int, int, int, int, int]:
    """Check the chains of an index file: the pointer of each entry to the previous entry, and the
    pointer of each slot to its newest entry.

    ``entries`` and ``table`` are the addresses of the first entry and of the first slot. ``newest``
    (int32, one element per slot, filled with 0) gets the number of each slot's newest entry, as the
    entries show it. Returns the number of entries with a wrong pointer, the index of the first such
    entry, the number to which its pointer should point, the number of slots with a wrong pointer,
    and the index of the first such slot. An index is -1 if all pointers are right.
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


# --------------------------------------------------------------------------------------------------
# Make the queue entries and index entries of many frames.

_U = queue_entry.LAYOUT.offsets
_UNIT_SIZE = queue_entry.UNIT_SIZE
_UNIT_PHYSICAL_OFFSET = _U["physical_offset"]
_UNIT_FRAME_SIZE = _U["size"]
_UNIT_TAGS_CODE = _U["tags_code"]
_E = index.ENTRY.offsets
_ENTRY_SIZE = index.ENTRY.size
_ENTRY_HASH = _E["key_hash"]
_ENTRY_PHYSICAL_OFFSET = _E["physical_offset"]
_ENTRY_SECONDS = _E["seconds"]
_ENTRY_PREVIOUS = _E["previous"]
_SLOT_SIZE = index.SLOT.size
_AHEAD = 16
_MOST_SECONDS = java.INT_MAX


@kernel
def group_units(
    requests: Array,
    count: int,
    queue_count: int,
    ends: Array,
    which: Array,
    offsets: Array,
    units: Array,
) -> None:
    """Group the entries of some frames by queue.

    The kernel writes the entries of one queue after the other. ``ends`` (int64, queues + 1) gets 0,
    and then for each queue the end of its entries in the other three arrays. For each entry,
    ``which`` gets the index of the frame, ``offsets`` gets the queue offset, and ``units`` (uint8)
    gets the 20 bytes.
    """
    for queue in range(queue_count + 1):
        ends[queue] = 0
    for i in range(count):
        queue = requests[QUEUE, i]
        if queue >= 0:
            ends[queue + 1] += 1
    # Replace the number of each queue's entries by the start of its part. The next loop advances
    # each start until it is the part's end.
    total = np.int64(0)
    for queue in range(queue_count):
        size = ends[queue + 1]
        ends[queue + 1] = total
        total += size
    out = units.ctypes.data
    for i in range(count):
        queue = requests[QUEUE, i]
        if queue < 0:
            continue
        at = ends[queue + 1]
        ends[queue + 1] = at + 1
        which[at] = i
        offsets[at] = requests[QUEUE_OFFSET, i]
        unit = out + at * _UNIT_SIZE
        store_i64(unit + _UNIT_PHYSICAL_OFFSET, requests[PHYSICAL_OFFSET, i])
        store_i32(unit + _UNIT_FRAME_SIZE, requests[FRAME_SIZE, i])
        store_i64(unit + _UNIT_TAGS_CODE, requests[TAGS_CODE, i])


@kernel
def _seconds(time: int, begin: int) -> int:
    if begin <= 0:
        return 0
    return min(max((time - begin) // 1000, 0), _MOST_SECONDS)


@kernel
def put_index_keys(
    slots_at: int,
    slot_count: int,
    entry_at: int,
    number: int,
    begin: int,
    hashes: Array,
    offsets: Array,
    times: Array,
) -> int:
    """Put keys into an index file (``IndexFile.putKey``). Return the number of chains that did not
    exist before.

    ``slots_at`` is the address of the first slot. ``entry_at`` is the address of the first new
    entry, and ``number`` is the number of this entry. The time in an entry is in seconds since
    ``begin``, which is in ms.
    """
    begun = 0
    count = hashes.shape[0]
    slots = np.uint32(slot_count)
    for i in range(count):
        if i + _AHEAD < count:
            # Slots are spread over megabytes, so prefetch them.
            ahead = np.int64(np.uint32(abs(hashes[i + _AHEAD])) % slots)
            prefetch(slots_at + ahead * _SLOT_SIZE)
        # A hash can be negative, because RocketMQ 3.x stored hashes with their sign.
        slot = slots_at + np.int64(np.uint32(abs(hashes[i])) % slots) * _SLOT_SIZE
        previous = np.int64(load_i32(slot))
        # A slot counts as empty if it does not hold the number of an earlier entry.
        if previous <= 0 or previous > number + i:
            previous = np.int64(0)
        if previous == 0:
            begun += 1
        entry = entry_at + i * _ENTRY_SIZE
        store_i32(entry + _ENTRY_HASH, hashes[i])
        store_i64(entry + _ENTRY_PHYSICAL_OFFSET, offsets[i])
        store_i32(entry + _ENTRY_SECONDS, _seconds(times[i], begin))
        store_i32(entry + _ENTRY_PREVIOUS, previous)
        store_i32(slot, number + i)
    return begun
