"""Kernels that write frames. The pure-Python version is
:meth:`logquarry.write.encode.MessageEncoder.frame`.

The caller makes two parts of a frame that are equal in many frames: the head with hosts and
SYSFLAG, and TOPICLEN with the topic.
"""

from __future__ import annotations

import numpy as np

from logquarry.format import batch, frame, java, properties
from logquarry.format import put_frames as r
from logquarry.format.kernels import bytes as mem
from logquarry.format.kernels.bytes import HEAD, TAIL, Array, kernel
from logquarry.format.sys_flag import TRANSACTION_COMMIT, TRANSACTION_NOT

_LENGTH_SIZE = frame.PROPERTIES_LENGTH.size
_BLANK = frame.BLANK.size


@kernel
def _write_start(
    to: int,
    head: int,
    head_size: int,
    body: int,
    body_length: int,
    size: int,
    flag: int,
    crc_function: int,
) -> int:
    """Write the head and the body of a frame, without offsets and times. Return the address after
    the body.
    """
    mem.copy_bytes(to, head, head_size)
    body_to = to + head_size
    mem.copy_bytes(body_to, body, body_length)
    mem.store_i32(to + HEAD.size, size)
    # Compute the CRC from the copy of the body, because the copy is already in the processor's
    # cache.
    mem.store_i32(
        to + HEAD.body_crc, np.int32(mem.crc32(crc_function, body_to, body_length) & mem.CRC_MASK)
    )
    mem.store_i32(to + HEAD.flag, flag)
    mem.store_i32(body_to - mem.TAIL_SIZE + TAIL.body_length, body_length)
    return body_to + body_length


@kernel
def encode_frames(
    rows: Array,
    start: int,
    stop: int,
    heads: Array,
    head_facts: Array,
    topics: Array,
    topic_ends: Array,
    address: int,
    position: int,
    end: int,
    base: int,
    now: int,
    crc_function: int,
    next_offsets: Array,
    physical_offsets: Array,
    queue_offsets: Array,
    store_times: Array,
) -> tuple[int, int]:
    """Write the frames of the messages from index ``start`` on. Stop before the first frame that
    does not fit into the file.

    Returns the index of the first message that was not written, and the position after the last
    frame. The kernel writes each message's values to ``physical_offsets``, ``queue_offsets`` and
    ``store_times``.

    Args:
        rows, head_facts: tables of :mod:`logquarry.format.put_frames`.
        heads: uint8 (heads, n).
        topics: uint8; each topic follows its length. Topic i ends at ``topic_ends[i + 1]``.
        address, end, base: address of the file's first byte in memory, end of the file, and
            physical offset of the file's first byte.
        now: store time of the messages in ms. If the earliest allowed store time of a message
            (STORE_TIMESTAMP) is later than ``now``, this message and all following messages get
            that later time.
        next_offsets: next queue offset of each queue; the kernel adds 1 to the offset for each
            message that takes a new queue offset.
    """
    heads_at, widest, topics_at = heads.ctypes.data, heads.shape[1], topics.ctypes.data
    for i in range(start, stop):
        size = rows[r.SIZE, i]
        if position + size + _BLANK > end:
            return i, position
        at = address + position
        head = rows[r.HEAD, i]
        head_size = head_facts[head, r.HEAD_SIZE]
        body_length = rows[r.BODY_LENGTH, i]
        to = _write_start(
            at,
            heads_at + head * widest,
            head_size,
            rows[r.BODY_AT, i],
            body_length,
            size,
            rows[r.FLAG, i],
            crc_function,
        )
        queue_offset = rows[r.QUEUE_OFFSET, i]
        queue = rows[r.QUEUE, i]
        now = max(now, rows[r.STORE_TIMESTAMP, i])
        if head_facts[head, r.ADVANCES] != 0:
            queue_offset = next_offsets[queue]
            next_offsets[queue] = queue_offset + 1
        mem.store_i32(at + HEAD.queue_id, rows[r.QUEUE_ID, i])
        mem.store_i64(at + HEAD.queue_offset, queue_offset)
        mem.store_i64(at + HEAD.physical_offset, base + position)
        mem.store_i64(at + HEAD.born_timestamp, rows[r.BORN_TIMESTAMP, i])
        mem.store_i64(at + head_facts[head, r.TIME_AT], now)
        tail = at + head_size - mem.TAIL_SIZE
        mem.store_i32(tail + TAIL.reconsume_times, rows[r.RECONSUME_TIMES, i])
        mem.store_i64(tail + TAIL.prepared_transaction_offset, rows[r.PREPARED_OFFSET, i])
        topic = rows[r.TOPIC, i]
        topic_length = topic_ends[topic + 1] - topic_ends[topic]
        mem.copy_short(to, topics_at + topic_ends[topic], topic_length)
        to += topic_length
        properties_length = rows[r.PROPS_LENGTH, i]
        mem.store_i16(to, properties_length)
        mem.copy_short(to + _LENGTH_SIZE, rows[r.PROPS_AT, i], properties_length)
        physical_offsets[i] = base + position
        queue_offsets[i] = queue_offset
        store_times[i] = now
        position += size
    return stop, position


@kernel
def first_wrong_crc(at: Array, lengths: Array, crcs: Array, crc_function: int) -> int:
    """Compare the CRC-32 of byte ranges with expected CRCs. Return the index of the first range
    with a wrong CRC; -1 if there is none.

    A range with a negative length or an expected CRC below 0 is not checked.
    """
    for i in range(at.shape[0]):
        if crcs[i] >= 0 and lengths[i] >= 0:
            crc = np.uint32(mem.crc32(crc_function, at[i], lengths[i])) & mem.CRC_MASK
            if np.int64(crc) != crcs[i]:
                return i
    return -1


@kernel
def intern_numbers(values: Array, table: Array, found: Array, ids: Array) -> int:
    """Number the distinct values (int64) in the order in which they first appear. Return how many
    distinct values there are.

    ``table`` (int32) is the hash table. ``table`` must be longer than ``found``, its length must be
    a power of two, and it must be filled with -1. ``found`` (int64) holds the distinct values;
    ``ids`` holds the number of each value. Returns -1 if ``found`` is too short for all distinct
    values.
    """
    mask = np.uint64(table.shape[0] - 1)
    known = 0
    last = -1
    for i in range(values.shape[0]):
        value = values[i]
        if last >= 0 and found[last] == value:
            ids[i] = last
            continue
        slot = np.int64(mem.hash_number(np.uint64(value)) & mask)
        while True:
            number = table[slot]
            if number < 0:
                if known == found.shape[0]:
                    return -1
                table[slot] = known
                found[known] = value
                number = known
                known += 1
                break
            if found[number] == value:
                break
            slot = (slot + 1) & np.int64(mask)
        ids[i] = number
        last = number
    return known


@kernel
def intern_spans(at: Array, lengths: Array, table: Array, found: Array, ids: Array) -> int:
    """Give each distinct byte string a number, like :func:`intern_numbers`. The length -1 means
    that there is no string. All elements without a string get the same number.

    ``found`` (int64) gets the index at which each distinct byte string occurs first.
    """
    mask = np.uint64(table.shape[0] - 1)
    known = 0
    last = -1
    for i in range(at.shape[0]):
        start, length = at[i], lengths[i]
        if last >= 0:
            before = found[last]
            if lengths[before] == length and mem.same_bytes(at[before], start, length):
                ids[i] = last
                continue
        slot = np.int64(mem.hash_bytes(start, length) & mask)
        while True:
            number = table[slot]
            if number < 0:
                if known == found.shape[0]:
                    return -1
                table[slot] = known
                found[known] = i
                number = known
                known += 1
                break
            before = found[number]
            if lengths[before] == length and mem.same_bytes(at[before], start, length):
                break
            slot = (slot + 1) & np.int64(mask)
        ids[i] = number
        last = number
    return known


# --------------------------------------------------------------------------------------------------
# The frames of a batch in wire form. The pure-Python version is
# logquarry.write.encode_batch._frames_reference.

_ITEM = batch.HEAD.at
_ITEM_HEAD = batch.HEAD.size
_ITEM_FIXED = batch.FIXED_SIZE
_SEPARATOR = ord(properties.PROPERTY_SEPARATOR)
_LONGEST = java.INT_MAX >> 16


@kernel
def batch_frames(
    wire: Array,
    head: Array,
    topic: Array,
    shared: Array,
    crc_function: int,
    target: int,
    room: int,
    starts: Array,
    time_at: int,
    queue_offset: int,
    physical_offset: int,
    now: int,
) -> tuple[int, int, int]:
    """Write the frames of the messages in a wire form, or only compute their sizes.

    Returns the number of frames, the total size of the frames in bytes, and the total size of their
    bodies in bytes. The number of frames is -1 if the pure-Python version would refuse the batch.

    Args:
        topic, shared: uint8; TOPICLEN with the topic, and the properties of the batch.
        target, room: address to which the kernel writes the frames, and maximum bytes of all
            frames. If the address is 0, the kernel only computes the sizes.
        starts: int64; gets the start of each frame.
        time_at: position of STORETIMESTAMP in a frame.
        queue_offset, physical_offset: values of the first frame.
        now: store time of all frames.
    """
    at, end = np.int64(0), np.int64(wire.shape[0])
    source = wire.ctypes.data
    head_size, topic_size, shared_size = head.shape[0], topic.shape[0], shared.shape[0]
    count = size = bodies = np.int64(0)
    while at < end:
        item = source + at
        if end - at < _ITEM_FIXED or count == starts.shape[0]:
            return -1, size, bodies
        body_length = np.int64(mem.load_i32(item + _ITEM.body_length))
        if body_length < 0 or body_length > end - at - _ITEM_FIXED:
            return -1, size, bodies
        body = item + _ITEM_HEAD
        length_at = body + body_length
        own_size = np.int64(mem.load_i16(length_at))
        own = length_at + _LENGTH_SIZE
        if own_size < 0 or own + own_size > source + end:
            return -1, size, bodies
        at = own + own_size - source
        glued = own_size > 0 and shared_size > 0 and mem.load_u8(own + own_size - 1) != _SEPARATOR
        props = own_size + shared_size + (1 if glued else 0)
        whole = head_size + body_length + topic_size + _LENGTH_SIZE + props
        if props > _LONGEST or size + whole > room:
            return -1, size, bodies
        if target != 0:
            place = target + size
            to = _write_start(
                place,
                head.ctypes.data,
                head_size,
                body,
                body_length,
                whole,
                mem.load_i32(item + _ITEM.flag),
                crc_function,
            )
            mem.store_i64(place + HEAD.queue_offset, queue_offset + count)
            mem.store_i64(place + HEAD.physical_offset, physical_offset + size)
            mem.store_i64(place + time_at, now)
            mem.copy_short(to, topic.ctypes.data, topic_size)
            to += topic_size
            mem.store_i16(to, props)
            to += _LENGTH_SIZE
            mem.copy_short(to, own, own_size)
            to += own_size
            if glued:
                mem.store_u8(to, _SEPARATOR)
                to += 1
            mem.copy_short(to, shared.ctypes.data, shared_size)
        starts[count] = size
        count += 1
        size += whole
        bodies += body_length
    return count, size, bodies


_TIME_SIZE = frame.STORE_TIME.size
_AFTER_OFFSETS = HEAD.physical_offset + 8
_SPACE = 32


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
    """Copy staged frames (:mod:`logquarry.format.put_frames`) into a file of the log, and set the
    fields that depend on a frame's place: offsets and store time.

    ``source`` is the address of the staged frames. When the kernel has copied ``most`` or more
    bytes, it stops. ``next_offsets`` has the next queue offset of each queue. The kernel adds the
    number of a queue's copied frames to row 0 of ``placed``, and their size to row 1; each column
    is a queue.

    Returns four numbers: the end of the copied frames among the staged frames, the end of their
    copies in the file, the number of copied frames, and the reason why the copy ended.
    """
    count = 0
    first = position
    while start < stop and position - first < most:
        if stop - start < mem.FIXED_V1:
            return start, position, count, r.NO_FRAME
        at = source + start
        size = np.int64(mem.load_i32(at))
        queue = mem.load_i64(at + HEAD.queue_offset)
        if size < mem.FIXED_V1 or size > stop - start:
            return start, position, count, r.NO_FRAME
        if queue < 0 or queue >= next_offsets.shape[0]:
            return start, position, count, r.NO_FRAME
        if position + size + _BLANK > end:
            return start, position, count, r.NO_ROOM
        to = address + position
        mem.copy_bytes(to, at, size)
        flags = mem.load_i32(at + HEAD.sys_flag)
        kind = flags & mem.TRANSACTION_MASK
        queue_offset = np.int64(0)
        if kind == TRANSACTION_NOT or kind == TRANSACTION_COMMIT:
            queue_offset = next_offsets[queue]
            next_offsets[queue] = queue_offset + 1
        mem.store_i64(to + HEAD.queue_offset, queue_offset)
        mem.store_i64(to + HEAD.physical_offset, base + position)
        mem.store_i64(to + mem.store_time_at(flags), now)
        placed[0, queue] += 1
        placed[1, queue] += size
        start += size
        position += size
        count += 1
    return start, position, count, r.PLACED


@kernel
def same_staged(
    source: int, start: int, stop: int, address: int, position: int, end: int
) -> tuple[int, int, int]:
    """Compare staged frames with the frames in a file of the log, and count the equal frames before
    the first difference. The staged frames begin at ``start``; the frames of the file begin at
    ``position``.

    Returns three numbers: the position after the last equal staged frame, the position after the
    last equal frame in the file, and the number of equal frames. ``end`` is the
    position after the last written byte of the file.
    """
    count = 0
    while stop - start >= mem.FIXED_V1 and end - position >= mem.FIXED_V1:
        at, to = source + start, address + position
        size = np.int64(mem.load_i32(at))
        if size < mem.FIXED_V1 or size > stop - start or size > end - position:
            break
        time_at = mem.store_time_at(mem.load_i32(at + HEAD.sys_flag))
        rest = time_at + _TIME_SIZE
        if not mem.same_bytes(at, to, HEAD.queue_offset):
            break
        if not mem.same_bytes(at + _AFTER_OFFSETS, to + _AFTER_OFFSETS, time_at - _AFTER_OFFSETS):
            break
        if not mem.same_bytes(at + rest, to + rest, size - rest):
            break
        start += size
        position += size
        count += 1
    return start, position, count


@kernel
def first_word_hashes(at: Array, lengths: Array, hashes: Array) -> None:
    """Write ``String.hashCode`` of the first word of each text, or -1 << 32 if there is no word.

    The texts must be valid UTF-8. All arrays are int64.
    """
    for i in range(at.shape[0]):
        begin, end = at[i], at[i] + max(lengths[i], 0)
        while begin < end and mem.load_u8(begin) == _SPACE:
            begin += 1
        to = begin
        while to < end and mem.load_u8(to) != _SPACE:
            to += 1
        hashes[i] = mem.java_hash(begin, to - begin) if to > begin else -(1 << 32)
