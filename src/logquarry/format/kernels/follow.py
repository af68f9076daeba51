"""The kernels of the dispatcher. The kernel :func:`follow` reads the log. Other kernels write the
entries of queues and of the index. :func:`check_chains` checks the chains of an index file; a chain
links the entries of one slot.

:func:`follow` checks and decodes each frame in one pass. The kernel cannot decode two kinds of
frames: frames whose text is not UTF-8, and frames of the schedule topic whose DELAY is not one to
nine digits. The kernel only counts such frames, and the caller decodes them with the pure-Python
version (the reference). If ``as_java`` is true, :func:`follow` must accept the same frames as
RocketMQ's recovery. So it also stops at a sound frame that Java may reject.
"""

from __future__ import annotations

import numpy as np

from logquarry.format import arrays as r
from logquarry.format import index, java, queue_entry, sys_flag
from logquarry.format import properties as props
from logquarry.format.kernels import bytes as mem
from logquarry.format.kernels.bytes import HEAD, Array, kernel
from logquarry.format.kernels.properties import (
    DELAY,
    KEYS,
    NAME_BYTES,
    NAME_LENGTHS,
    NAME_STARTS,
    SCHEDULE_TOPIC,
    TAGS,
    UNIQ_KEY,
    hash_keys,
    next_separator,
    plain_number,
    which_name,
)
from logquarry.format.kernels.walk import (
    CACHE_LINE,
    ENTRY_HEAD_SIZE,
    PREFETCH_AHEAD,
    check_frame,
    has_head,
)

_NAME_VALUE = ord(props.NAME_VALUE_SEPARATOR)
_NOT, _COMMIT = sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_COMMIT
_ROLLBACK = sys_flag.TRANSACTION_ROLLBACK
_KEY_GLUE = ord(index.key_text("", ""))

TOPIC_START, TOPIC_SIZE, TOPIC_HASH, IS_SCHEDULE = range(4)
"""The columns of the table of topics: address of the name, its bytes, the hash of ``topic#``, and
whether the topic is the schedule topic.
"""


@kernel
def _topic_number(start: int, length: int, table: Array, topics: Array, known: int) -> int:
    """Return the index of a topic, and add a new topic to the table. Return -1 if the table is
    full.
    """
    mask = table.shape[0] - 1
    slot = np.int64(mem.hash_bytes(start, length) & np.uint64(mask))
    while True:
        number = table[slot]
        if number < 0:
            if known == topics.shape[0]:
                return -1
            table[slot] = known
            topics[known, TOPIC_START] = start
            topics[known, TOPIC_SIZE] = length
            topics[known, TOPIC_HASH] = np.int64(
                np.int32(
                    np.uint32(mem.java_hash(start, length)) * np.uint32(31) + np.uint32(_KEY_GLUE)
                )
            )
            scheduled = length == SCHEDULE_TOPIC.shape[0] and mem.same_bytes(
                start, SCHEDULE_TOPIC.ctypes.data, length
            )
            topics[known, IS_SCHEDULE] = 1 if scheduled else 0
            return known
        if topics[number, TOPIC_SIZE] == length and mem.same_bytes(
            topics[number, TOPIC_START], start, length
        ):
            return np.int64(number)
        slot = (slot + 1) & mask


@kernel
def _queue_number(topic: int, queue_id: int, table: Array, queues: Array, known: int) -> int:
    """Return the index of a queue, and add a new queue to the table. Return -1 if the table is
    full.
    """
    mask = np.uint64(table.shape[0] - 1)
    both = np.uint64(topic) << np.uint64(32) ^ np.uint64(np.uint32(queue_id))
    slot = np.int64(mem.hash_number(both) & mask)
    while True:
        number = table[slot]
        if number < 0:
            if known == queues.shape[0]:
                return -1
            table[slot] = known
            queues[known, 0] = topic
            queues[known, 1] = queue_id
            return known
        if queues[number, 0] == topic and queues[number, 1] == queue_id:
            return np.int64(number)
        slot = (slot + 1) & np.int64(mask)


@kernel
def follow(
    address: int,
    position: int,
    stop: int,
    window: int,
    end: int,
    base: int,
    crc_function: int,
    check_crc: bool,
    has_heads: bool,
    as_java: bool,
    levels: Array,
    rows: Array,
    requests: Array,
    topic_table: Array,
    topics: Array,
    queue_table: Array,
    queues: Array,
    hashes: Array,
    numbers: Array,
) -> tuple[int, int, int, int, int, int, int]:
    """Read frame after frame from ``position``, and collect the fields of each frame for the
    dispatcher.

    See :func:`logquarry.format.kernels.walk.walk` for the first arguments. Returns seven numbers:
    the number of frames, the position after the last frame, a return code, the numbers of topics,
    queues and keys, and the number of frames that the pure-Python version must decode.

    Args:
        as_java: whether to stop with ASK_JAVA at frames that RocketMQ 4.9.3 may reject.
        rows, requests: int32 and int64; tables of :mod:`logquarry.format.arrays`. The kernel fills
            one row of ``rows`` and one column of ``requests`` for each frame.
        topic_table, queue_table: int32 hash tables, filled with -1; their lengths are powers of
            two.
        topics, queues: int64 (n, 4) and (n, 2); get one row for each distinct topic or queue.
        hashes, numbers: get the hash of each key, and the index of the key's frame. Both arrays
            must have room for all keys of at least one frame.
    """
    count = 0
    topic_count = queue_count = key_count = odd = 0
    asked = position
    last_topic = last_queue = -1
    tag_at = address
    tag_length = -1
    tag_code = np.int64(0)
    while position < stop:
        if count == rows.shape[0]:
            return count, position, r.TABLE_FULL, topic_count, queue_count, key_count, odd
        ahead = min(position + PREFETCH_AHEAD, window)
        asked = max(asked, position)
        while asked < ahead:
            mem.prefetch(address + asked)
            asked += CACHE_LINE
        row = rows[count]
        place = position
        if has_heads and has_head(address, position, window, end, base):
            place += ENTRY_HEAD_SIZE
            if place >= stop:
                position = place
                break
        code = check_frame(address, place, window, end, base, crc_function, check_crc, row)
        if code != r.REACHED_STOP:
            return count, position, code, topic_count, queue_count, key_count, odd
        at = address + place
        if as_java and mem.load_i32(at + HEAD.magic) != mem.MAGIC_V1:
            return count, position, r.ASK_JAVA, topic_count, queue_count, key_count, odd
        props, props_length = at + row[r.PROPS_AT], row[r.PROPS_LENGTH]
        # A frame has at most this many keys, because each key has at least one byte and a
        # separator.
        if key_count + (props_length >> 1) + 2 > hashes.shape[0]:
            return count, position, r.TABLE_FULL, topic_count, queue_count, key_count, odd
        topic_at, topic_length = at + row[r.TOPIC_AT], row[r.TOPIC_LENGTH]
        is_text = True
        topic = last_topic
        if (
            topic < 0
            or topics[topic, TOPIC_SIZE] != topic_length
            or not mem.same_bytes(topics[topic, TOPIC_START], topic_at, topic_length)
        ):
            if mem.is_utf8(topic_at, topic_length):
                topic = _topic_number(topic_at, topic_length, topic_table, topics, topic_count)
                if topic < 0:
                    return count, position, r.TABLE_FULL, topic_count, queue_count, key_count, odd
                topic_count = max(topic_count, topic + 1)
            else:
                odd += 1
                is_text = False
                topic = 0
                topic_count = max(topic_count, 1)
        queue_id = np.int64(mem.load_i32(at + HEAD.queue_id))
        flags = mem.load_i32(at + HEAD.sys_flag)
        kind = flags & mem.TRANSACTION_MASK
        queue = np.int64(-1)
        if kind == _NOT or kind == _COMMIT:
            queue = last_queue
            if queue < 0 or queues[queue, 0] != topic or queues[queue, 1] != queue_id:
                queue = _queue_number(topic, queue_id, queue_table, queues, queue_count)
                if queue < 0:
                    return count, position, r.TABLE_FULL, topic_count, queue_count, key_count, odd
                queue_count = max(queue_count, queue + 1)
            last_queue = queue
        # A topic that is not valid UTF-8 gets the index 0. So do not compare the next frame's topic
        # with row 0 of ``topics``: the address in this row may be from an earlier call, and may
        # point to freed memory.
        last_topic = topic if is_text else -1
        store_time = mem.load_i64(at + mem.store_time_at(flags))
        if not mem.is_ascii(props, props_length) and not mem.is_utf8(props, props_length):
            odd += 1
        tags_at = keys_at = uniq_at = delay_at = props
        tags = keys = uniq = digits = np.int64(0)
        segment = np.int64(0)
        while segment < props_length:
            middle = next_separator(props, segment, props_length)
            stop_at = middle
            while stop_at < props_length and mem.load_u8(props + stop_at) == _NAME_VALUE:
                stop_at = next_separator(props, stop_at + 1, props_length)
            length = stop_at - middle - 1
            if middle > segment and length > 0:
                name = which_name(
                    props + segment, middle - segment, NAME_BYTES, NAME_LENGTHS, NAME_STARTS
                )
                if name == TAGS:
                    tags_at, tags = props + middle + 1, length
                elif name == KEYS:
                    keys_at, keys = props + middle + 1, length
                elif name == UNIQ_KEY:
                    uniq_at, uniq = props + middle + 1, length
                elif name == DELAY:
                    delay_at, digits = props + middle + 1, length
            segment = stop_at + 1
        tags_code = np.int64(0)
        if tags > 0:
            if tags != tag_length or not mem.same_bytes(tag_at, tags_at, tags):
                tag_at, tag_length = tags_at, tags
                tag_code = mem.java_hash(tags_at, tags)
            tags_code = tag_code
        if digits > 0 and topics[topic, IS_SCHEDULE] != 0:
            level = min(plain_number(delay_at, digits), levels.shape[0])
            if level < 0:
                if as_java:
                    return count, position, r.ASK_JAVA, topic_count, queue_count, key_count, odd
                odd += 1
            elif level > 0:
                tags_code = store_time + levels[level - 1]
        has_key = (keys > 0 or uniq > 0) and kind != _ROLLBACK
        if has_key:
            prefix = topics[topic, TOPIC_HASH]
            key_count = hash_keys(
                prefix, uniq_at, uniq, keys_at, keys, False, count, hashes, numbers, key_count
            )
        requests[r.TOPIC_ID, count] = topic
        requests[r.QUEUE_ID, count] = queue_id
        requests[r.QUEUE_OFFSET, count] = mem.load_i64(at + HEAD.queue_offset)
        requests[r.PHYSICAL_OFFSET, count] = mem.load_i64(at + HEAD.physical_offset)
        requests[r.FRAME_SIZE, count] = row[r.SIZE]
        requests[r.SYS_FLAG, count] = flags
        requests[r.STORE_TIMESTAMP, count] = store_time
        requests[r.TAGS_CODE, count] = tags_code
        requests[r.HAS_KEY, count] = 1 if has_key else 0
        requests[r.QUEUE, count] = queue
        position = place + row[r.SIZE]
        count += 1
    return count, position, r.REACHED_STOP, topic_count, queue_count, key_count, odd


# --------------------------------------------------------------------------------------------------
# Make and check the entries of queues and index.

_UNIT, _ENTRY = queue_entry.LAYOUT.at, index.ENTRY.at
_UNIT_SIZE = queue_entry.UNIT_SIZE
_ENTRY_SIZE = index.ENTRY.size
_SLOT_SIZE = index.SLOT.size
_AHEAD = 16
_MOST_SECONDS = java.INT_MAX


@kernel
def check_chains(
    entries: int, count: int, table: int, slots: int, newest: Array
) -> tuple[int, int, int, int, int]:
    """Check the chains of an index file: each entry must point to the previous entry of its slot,
    and each slot must point to its newest entry.

    ``entries`` and ``table`` are the addresses of the first entry and of the first slot. ``newest``
    (int32, one element per slot, filled with 0) gets the number of each slot's newest entry. The
    kernel finds this number in the entries, not in the slots. Entries have numbers from 1 on; 0
    means no entry.

    Returns five numbers. The first three are the number of entries with a wrong pointer, the index
    of the first such entry (from 0), and the number of the entry to which its pointer should point.
    The last two are the number of slots with a wrong pointer, and the index of the first such slot.
    If no entry has a wrong pointer, the second and the third number are -1. If no slot has a wrong
    pointer, the last number is -1.
    """
    wrong = wrong_slots = 0
    first = expected = first_slot = -1
    for number in range(count):
        at = entries + number * _ENTRY_SIZE
        slot = abs(np.int64(mem.load_i32(at + _ENTRY.key_hash))) % slots
        if mem.load_i32(at + _ENTRY.previous) != newest[slot]:
            if wrong == 0:
                first, expected = number, np.int64(newest[slot])
            wrong += 1
        newest[slot] = number + 1
    for slot in range(slots):
        if mem.load_i32(table + slot * _SLOT_SIZE) != newest[slot]:
            if wrong_slots == 0:
                first_slot = slot
            wrong_slots += 1
    return wrong, first, expected, wrong_slots, first_slot


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

    In the output arrays, all entries of a queue follow each other. The first item of ``ends``
    (int64, queues + 1) becomes 0. Item q + 1 becomes the end of queue q's entries in the other
    three arrays. For each entry, ``which`` gets the index of the frame, ``offsets`` gets the queue
    offset, and ``units`` (uint8) gets the 20 bytes of the entry.
    """
    for queue in range(queue_count + 1):
        ends[queue] = 0
    for i in range(count):
        queue = requests[r.QUEUE, i]
        if queue >= 0:
            ends[queue + 1] += 1
    # Each queue's item of ``ends`` is now the number of the queue's entries. Replace this number by
    # the position of the queue's first entry. Then the next loop adds 1 for each entry, so the item
    # becomes the end of the queue's entries.
    total = np.int64(0)
    for queue in range(queue_count):
        size = ends[queue + 1]
        ends[queue + 1] = total
        total += size
    out = units.ctypes.data
    for i in range(count):
        queue = requests[r.QUEUE, i]
        if queue < 0:
            continue
        at = ends[queue + 1]
        ends[queue + 1] = at + 1
        which[at] = i
        offsets[at] = requests[r.QUEUE_OFFSET, i]
        unit = out + at * _UNIT_SIZE
        mem.store_i64(unit + _UNIT.physical_offset, requests[r.PHYSICAL_OFFSET, i])
        mem.store_i32(unit + _UNIT.size, requests[r.FRAME_SIZE, i])
        mem.store_i64(unit + _UNIT.tags_code, requests[r.TAGS_CODE, i])


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
    """Put keys into an index file (``IndexFile.putKey``). Return how many slots were empty before
    the call and now have an entry.

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
            mem.prefetch(slots_at + ahead * _SLOT_SIZE)
        # A hash can be negative, because RocketMQ 3.x stored hashes with their sign.
        slot = slots_at + np.int64(np.uint32(abs(hashes[i])) % slots) * _SLOT_SIZE
        previous = np.int64(mem.load_i32(slot))
        # Treat a slot as empty if it does not hold the number of an earlier entry.
        if previous <= 0 or previous > number + i:
            previous = np.int64(0)
        if previous == 0:
            begun += 1
        entry = entry_at + i * _ENTRY_SIZE
        mem.store_i32(entry + _ENTRY.key_hash, hashes[i])
        mem.store_i64(entry + _ENTRY.physical_offset, offsets[i])
        mem.store_i32(entry + _ENTRY.seconds, _seconds(times[i], begin))
        mem.store_i32(entry + _ENTRY.previous, previous)
        mem.store_i32(slot, number + i)
    return begun
