"""The kernel that reads the log for the dispatcher. It checks and decodes each frame in one pass.

The kernel cannot decode a frame whose text is not UTF-8, or, in the schedule topic, whose DELAY is
not one to nine digits. It only counts such frames, and the caller decodes them with the pure-Python
version (the reference). To do the same as RocketMQ's recovery (``as_java``), the kernel stops at a
sound frame that Java might not accept as a message.
"""

from __future__ import annotations

import numpy as np

from logquarry.format import index, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import (
    ASK_JAVA,
    FRAME_SIZE,
    HAS_KEY,
    PHYSICAL_OFFSET,
    PROPS_AT,
    PROPS_LENGTH,
    QUEUE,
    QUEUE_ID,
    QUEUE_OFFSET,
    REACHED_STOP,
    SIZE,
    STORE_TIMESTAMP,
    SYS_FLAG,
    TABLE_FULL,
    TAGS_CODE,
    TOPIC_AT,
    TOPIC_ID,
    TOPIC_LENGTH,
)
from logquarry.format.kernels.bytes import (
    AT_MAGIC,
    AT_PHYSICAL_OFFSET,
    AT_SYS_FLAG,
    BORN_V6,
    HEAD_SIZE,
    HOST_EXTRA,
    HOST_V4,
    MAGIC_V1,
    TRANSACTION_MASK,
    Array,
    hash_bytes,
    hash_number,
    is_ascii,
    is_utf8,
    java_hash,
    java_hash_on,
    kernel,
    load_i32,
    load_i64,
    load_u8,
    prefetch,
    same_bytes,
)
from logquarry.format.kernels.encode import AT_QUEUE_ID, AT_QUEUE_OFFSET
from logquarry.format.kernels.entries import SPACE, positive
from logquarry.format.kernels.properties import name_table, next_separator, which_name
from logquarry.format.kernels.walk import (
    CACHE_LINE,
    ENTRY_HEAD_SIZE,
    PREFETCH_AHEAD,
    check_frame,
    has_head,
)

_NAMES = (props.TAGS, props.KEYS, props.UNIQ_KEY, props.DELAY)
_TAGS, _KEYS, _UNIQ_KEY, _DELAY = range(4)
_NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS = name_table(_NAMES)
_NAME_VALUE = ord(props.NAME_VALUE_SEPARATOR)
_SCHEDULE_TOPIC = np.frombuffer(props.SCHEDULE_TOPIC.encode(), np.uint8).copy()
_NOT, _COMMIT = sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_COMMIT
_ROLLBACK = sys_flag.TRANSACTION_ROLLBACK
_MOST_DIGITS = 9
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
    slot = np.int64(hash_bytes(start, length) & np.uint64(mask))
    while True:
        number = table[slot]
        if number < 0:
            if known == topics.shape[0]:
                return -1
            table[slot] = known
            topics[known, TOPIC_START] = start
            topics[known, TOPIC_SIZE] = length
            topics[known, TOPIC_HASH] = np.int64(
                np.int32(np.uint32(java_hash(start, length)) * np.uint32(31) + np.uint32(_KEY_GLUE))
            )
            scheduled = length == _SCHEDULE_TOPIC.shape[0] and same_bytes(
                start, _SCHEDULE_TOPIC.ctypes.data, length
            )
            topics[known, IS_SCHEDULE] = 1 if scheduled else 0
            return known
        if topics[number, TOPIC_SIZE] == length and same_bytes(
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
    slot = np.int64(hash_number(both) & mask)
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
def _plain_number(address: int, digits: int) -> int:
    """Return the number that one to nine ASCII digits represent; -1 for other text."""
    if digits > _MOST_DIGITS:
        return -1
    value = 0
    for k in range(digits):
        digit = np.int64(load_u8(address + k)) - 48
        if digit < 0 or digit > 9:
            return -1
        value = value * 10 + digit
    return value


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

    See :func:`logquarry.format.kernels.walk.walk` for the first arguments. Returns the number of
    frames, the position after them, a code, the number of topics, of queues and of keys, and the
    number of frames that the pure-Python version must decode.

    Args:
        as_java: whether to stop with ASK_JAVA at frames that RocketMQ 4.9.3 may reject.
        rows, requests: int64; the kernel fills one column for each frame.
        topic_table, queue_table: int32 hash tables, filled with -1; their lengths are powers of
            two.
        topics, queues: int64 (n, 4) and (n, 2); get one row for each distinct topic or queue.
        hashes, numbers: get the hash of each key, and the index of the key's frame. They must have
            room at least for all keys of one frame.
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
            return count, position, TABLE_FULL, topic_count, queue_count, key_count, odd
        ahead = min(position + PREFETCH_AHEAD, window)
        asked = max(asked, position)
        while asked < ahead:
            prefetch(address + asked)
            asked += CACHE_LINE
        row = rows[count]
        place = position
        if has_heads and has_head(address, position, window, end, base):
            place += ENTRY_HEAD_SIZE
            if place >= stop:
                position = place
                break
        code = check_frame(address, place, window, end, base, crc_function, check_crc, row)
        if code != REACHED_STOP:
            return count, position, code, topic_count, queue_count, key_count, odd
        at = address + place
        if as_java and load_i32(at + AT_MAGIC) != MAGIC_V1:
            return count, position, ASK_JAVA, topic_count, queue_count, key_count, odd
        props, props_length = at + row[PROPS_AT], row[PROPS_LENGTH]
        # A frame has at most this many keys, because each key has at least one byte and a
        # separator.
        if key_count + (props_length >> 1) + 2 > hashes.shape[0]:
            return count, position, TABLE_FULL, topic_count, queue_count, key_count, odd
        topic_at, topic_length = at + row[TOPIC_AT], row[TOPIC_LENGTH]
        is_text = True
        topic = last_topic
        if (
            topic < 0
            or topics[topic, TOPIC_SIZE] != topic_length
            or not same_bytes(topics[topic, TOPIC_START], topic_at, topic_length)
        ):
            if is_utf8(topic_at, topic_length):
                topic = _topic_number(topic_at, topic_length, topic_table, topics, topic_count)
                if topic < 0:
                    return count, position, TABLE_FULL, topic_count, queue_count, key_count, odd
                topic_count = max(topic_count, topic + 1)
            else:
                odd += 1
                is_text = False
                topic = 0
                topic_count = max(topic_count, 1)
        queue_id = np.int64(load_i32(at + AT_QUEUE_ID))
        flags = load_i32(at + AT_SYS_FLAG)
        kind = flags & TRANSACTION_MASK
        queue = np.int64(-1)
        if kind == _NOT or kind == _COMMIT:
            queue = last_queue
            if queue < 0 or queues[queue, 0] != topic or queues[queue, 1] != queue_id:
                queue = _queue_number(topic, queue_id, queue_table, queues, queue_count)
                if queue < 0:
                    return count, position, TABLE_FULL, topic_count, queue_count, key_count, odd
                queue_count = max(queue_count, queue + 1)
            last_queue = queue
        # A topic that is not valid UTF-8 gets the index 0. The next frame must not be compared with
        # topic 0: the bytes of topic 0 may be from an earlier call, and may be released.
        last_topic = topic if is_text else -1
        hosts = HEAD_SIZE + HOST_V4
        if flags & BORN_V6:
            hosts += HOST_EXTRA
        store_time = load_i64(at + hosts)
        if not is_ascii(props, props_length) and not is_utf8(props, props_length):
            odd += 1
        tags_at = keys_at = uniq_at = delay_at = props
        tags = keys = uniq = digits = np.int64(0)
        segment = np.int64(0)
        while segment < props_length:
            middle = next_separator(props, segment, props_length)
            stop_at = middle
            while stop_at < props_length and load_u8(props + stop_at) == _NAME_VALUE:
                stop_at = next_separator(props, stop_at + 1, props_length)
            length = stop_at - middle - 1
            if middle > segment and length > 0:
                name = which_name(
                    props + segment, middle - segment, _NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS
                )
                if name == _TAGS:
                    tags_at, tags = props + middle + 1, length
                elif name == _KEYS:
                    keys_at, keys = props + middle + 1, length
                elif name == _UNIQ_KEY:
                    uniq_at, uniq = props + middle + 1, length
                elif name == _DELAY:
                    delay_at, digits = props + middle + 1, length
            segment = stop_at + 1
        tags_code = np.int64(0)
        if tags > 0:
            if tags != tag_length or not same_bytes(tag_at, tags_at, tags):
                tag_at, tag_length = tags_at, tags
                tag_code = java_hash(tags_at, tags)
            tags_code = tag_code
        if digits > 0 and topics[topic, IS_SCHEDULE] != 0:
            level = _plain_number(delay_at, digits)
            if level < 0:
                if as_java:
                    return count, position, ASK_JAVA, topic_count, queue_count, key_count, odd
                odd += 1
            else:
                level = min(level, levels.shape[0])
                if level > 0:
                    tags_code = store_time + levels[level - 1]
        has_key = (keys > 0 or uniq > 0) and kind != _ROLLBACK
        if has_key:
            prefix = topics[topic, TOPIC_HASH]
            if uniq > 0:
                hashes[key_count] = positive(java_hash_on(prefix, uniq_at, uniq))
                numbers[key_count] = count
                key_count += 1
            begin = np.int64(0)
            for k in range(keys + 1):
                if k == keys or load_u8(keys_at + k) == SPACE:
                    if k > begin:
                        hashes[key_count] = positive(
                            java_hash_on(prefix, keys_at + begin, k - begin)
                        )
                        numbers[key_count] = count
                        key_count += 1
                    begin = np.int64(k + 1)
        requests[TOPIC_ID, count] = topic
        requests[QUEUE_ID, count] = queue_id
        requests[QUEUE_OFFSET, count] = load_i64(at + AT_QUEUE_OFFSET)
        requests[PHYSICAL_OFFSET, count] = load_i64(at + AT_PHYSICAL_OFFSET)
        requests[FRAME_SIZE, count] = row[SIZE]
        requests[SYS_FLAG, count] = flags
        requests[STORE_TIMESTAMP, count] = store_time
        requests[TAGS_CODE, count] = tags_code
        requests[HAS_KEY, count] = 1 if has_key else 0
        requests[QUEUE, count] = queue
        position = place + row[SIZE]
        count += 1
    return count, position, REACHED_STOP, topic_count, queue_count, key_count, odd
