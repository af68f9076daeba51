"""Kernels that make Arrow columns from frames: they split inner batches, and copy fields, text and
bodies.

The pure-Python version of the kernels for inner batches is in ``logquarry.log.frames``.
"""

from __future__ import annotations

import numpy as np

from logquarry.format import arrays as r
from logquarry.format import batch, frame, java, sys_flag
from logquarry.format.kernels import bytes as mem
from logquarry.format.kernels.bytes import HEAD, TAIL, Array, kernel

_INNER = batch.INNER_BATCH
_KEPT_FLAGS = ~batch.OF_BATCH
_COMPRESSED = sys_flag.COMPRESSED
_ITEM = batch.HEAD.at
_ITEM_HEAD, _ITEM_FIXED = batch.HEAD.size, batch.FIXED_SIZE
_LENGTH_SIZE = frame.PROPERTIES_LENGTH.size
_LONG_MAX = java.LONG_MAX


@kernel
def _items(body: int, length: int) -> tuple[int, int]:
    """Return the number of messages in a wire form, and the total bytes of their bodies and
    properties.

    The number is -1 if the wire form is damaged.
    """
    count = room = at = np.int64(0)
    while at < length:
        if length - at < _ITEM_FIXED:
            return np.int64(-1), room
        item = body + at
        body_length = np.int64(mem.load_i32(item + _ITEM.body_length))
        if body_length < 0 or body_length > length - at - _ITEM_FIXED:
            return np.int64(-1), room
        props_length = np.int64(mem.load_i16(item + _ITEM_HEAD + body_length))
        size = _ITEM_FIXED + body_length + props_length
        if (
            props_length < 0
            or size > length - at
            or np.int64(mem.load_i32(item + _ITEM.size)) != size
        ):
            return np.int64(-1), room
        at += size
        count += 1
        room += body_length + props_length
    return count, room


@kernel
def measure_inner(
    address: int, rows: Array, count: int, limit: int, numbers: Array
) -> tuple[int, int, int]:
    """Write to ``numbers`` (int64) how many messages each frame is split into.

    The number is 0 for a frame that stays unchanged. A frame stays unchanged if it is no inner
    batch, if its wire form is damaged, or if its messages would take more than ``limit`` bytes.

    Returns the number of inner batches, the number of frames after the split, and the bytes of
    these frames. The number of inner batches is -1 if an inner batch is compressed, because only
    the pure-Python version can read such a batch. If there is no inner batch, all three returned
    numbers are 0, and the kernel does not change ``numbers``.
    """
    any_inner = False
    for i in range(count):
        flags = mem.load_i32(address + np.int64(rows[i, r.POSITION]) + HEAD.sys_flag)
        if flags & _INNER == _INNER:
            any_inner = True
            break
    found = frames = size = np.int64(0)
    if not any_inner:
        return found, frames, size
    for i in range(count):
        numbers[i] = 0
        at = address + np.int64(rows[i, r.POSITION])
        flags = mem.load_i32(at + HEAD.sys_flag)
        whole = np.int64(rows[i, r.SIZE])
        if flags & _INNER == _INNER:
            if flags & _COMPRESSED:
                return np.int64(-1), frames, size
            found += 1
            length = np.int64(rows[i, r.BODY_LENGTH])
            items, room = _items(at + np.int64(rows[i, r.BODY_AT]), length)
            fixed = whole - length - np.int64(rows[i, r.PROPS_LENGTH])
            room += items * fixed
            fits = room <= limit and mem.load_i64(at + HEAD.queue_offset) <= _LONG_MAX - items
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
    """Write all frames to ``out`` (uint8), and their rows to ``out_rows``. Each inner batch is
    split into one frame per message. ``numbers`` is from :func:`measure_inner`.
    """
    target = out.ctypes.data
    to = np.int64(0)
    made = 0
    for i in range(rows.shape[0]):
        at = address + np.int64(rows[i, r.POSITION])
        size = np.int64(rows[i, r.SIZE])
        if numbers[i] == 0:
            mem.copy_bytes(target + to, at, size)
            for column in range(rows.shape[1]):
                out_rows[made, column] = rows[i, column]
            out_rows[made, r.POSITION] = to
            made += 1
            to += size
            continue
        head = np.int64(rows[i, r.BODY_AT])
        body_length = np.int64(rows[i, r.BODY_LENGTH])
        topic_length = np.int64(rows[i, r.TOPIC_LENGTH])
        topic_start = head + body_length
        topic_size = np.int64(rows[i, r.TOPIC_AT]) - topic_start + topic_length
        flags = mem.load_i32(at + HEAD.sys_flag) & _KEPT_FLAGS
        queue_offset = mem.load_i64(at + HEAD.queue_offset)
        item = at + head
        for number in range(numbers[i]):
            own = np.int64(mem.load_i32(item + _ITEM.body_length))
            source = item + _ITEM_HEAD
            props_length = np.int64(mem.load_i16(source + own))
            whole = head + own + topic_size + _LENGTH_SIZE + props_length
            start = target + to
            mem.copy_bytes(start, at, head)
            mem.copy_bytes(start + head, source, own)
            mem.copy_short(start + head + own, at + topic_start, topic_size)
            # In the wire form and in the frame, the length of the properties precedes the
            # properties. So copy the length and the properties at once.
            mem.copy_short(
                start + head + own + topic_size, source + own, _LENGTH_SIZE + props_length
            )
            mem.store_i32(start + HEAD.size, whole)
            mem.store_i32(
                start + HEAD.body_crc,
                np.int32(mem.crc32(crc_function, start + head, own) & mem.CRC_MASK),
            )
            mem.store_i32(start + HEAD.flag, mem.load_i32(item + _ITEM.flag))
            mem.store_i32(start + HEAD.sys_flag, flags)
            mem.store_i64(start + HEAD.queue_offset, queue_offset + number)
            mem.store_i32(start + head - mem.TAIL_SIZE + TAIL.body_length, own)
            out_rows[made, r.POSITION] = to
            out_rows[made, r.SIZE] = whole
            out_rows[made, r.BODY_AT] = head
            out_rows[made, r.BODY_LENGTH] = own
            out_rows[made, r.TOPIC_AT] = head + own + topic_size - topic_length
            out_rows[made, r.TOPIC_LENGTH] = topic_length
            out_rows[made, r.PROPS_AT] = head + own + topic_size + _LENGTH_SIZE
            out_rows[made, r.PROPS_LENGTH] = props_length
            made += 1
            to += whole
            item = source + own + _LENGTH_SIZE + props_length


_HEX_PAIRS = np.frombuffer(bytes(range(256)).hex().upper().encode(), np.uint8).copy()
_LOWER_HEX = np.frombuffer(b"0123456789abcdef", np.uint8).copy()


@kernel
def message_ids(address: int, rows: Array, count: int, offsets: Array, out: Array) -> int:
    """Write message ids as text, and return the number of bytes written.

    ``out`` has room for 56 bytes per frame.
    """
    at = 0
    offsets[0] = 0
    last_host = address
    last_size = 0
    target = out.ctypes.data
    pairs = _HEX_PAIRS.ctypes.data
    for i in range(count):
        place = address + rows[i, r.POSITION]
        flags = mem.load_i32(place + HEAD.sys_flag)
        born = mem.HOST_V4 + (mem.HOST_EXTRA if flags & mem.BORN_V6 else 0)
        store = mem.HOST_V4 + (mem.HOST_EXTRA if flags & mem.STORE_V6 else 0)
        host = place + mem.HEAD_SIZE + born + mem.STORE_TIME_SIZE
        done = 0
        if store == last_size and mem.same_bytes(host, last_host, store):
            # Usually a single broker writes the log, so most frames have the same host as the
            # previous frame.
            mem.copy_bytes(target + at, target + offsets[i - 1], 2 * store)
            at += 2 * store
            done = store
        last_host, last_size = host, store
        for k in range(done, store + 8):
            if k < store:
                byte = mem.load_u8(host + k)
            else:
                byte = mem.load_u8(place + HEAD.physical_offset + k - store)
            mem.copy16(target + at, pairs + 2 * byte)
            at += 2
        offsets[i + 1] = at
    return at


@kernel
def _decimal(value: int, out: Array, at: int) -> int:
    if value < 0:
        out[at] = 45
        at += 1
        value = -value
    digits = 1
    power = np.int64(1)
    while value // power >= 10:
        power *= 10
        digits += 1
    for _ in range(digits):
        out[at] = 48 + (value // power) % 10
        power //= 10
        at += 1
    return at


HOST_TEXT_SIZE = 56
"""Maximum bytes of the text of a host: eight groups of four digits, brackets and a port (IPv6)."""


@kernel
def host_texts(
    address: int, rows: Array, count: int, store_host: bool, offsets: Array, out: Array
) -> int:
    """Write hosts in the form of ``frame.host_text``, and return the number of bytes written.

    ``out`` has room for HOST_TEXT_SIZE bytes per frame.
    """
    at = 0
    offsets[0] = 0
    last_host = address
    last_size = 0
    for i in range(count):
        place = address + rows[i, r.POSITION]
        flags = mem.load_i32(place + HEAD.sys_flag)
        host = place + mem.HEAD_SIZE
        wide = flags & mem.BORN_V6 != 0
        if store_host:
            host += mem.HOST_V4 + (mem.HOST_EXTRA if wide else 0) + mem.STORE_TIME_SIZE
            wide = flags & mem.STORE_V6 != 0
        size = mem.HOST_V4 + (mem.HOST_EXTRA if wide else 0)
        if size == last_size and mem.same_bytes(host, last_host, size):
            length = offsets[i] - offsets[i - 1]
            target = out.ctypes.data
            mem.copy_bytes(target + at, target + offsets[i - 1], length)
            at += length
            offsets[i + 1] = at
            continue
        last_host, last_size = host, size
        port = np.int64(mem.load_i32(host + (mem.HOST_V4 - 4 + (mem.HOST_EXTRA if wide else 0))))
        if wide:
            mapped = mem.load_raw64(host) == 0 and mem.load_i32(host + 8) == 0xFFFF
            if mapped:
                host += 12
                wide = False
        if wide:
            out[at] = 91
            at += 1
            for group in range(8):
                if group > 0:
                    out[at] = 58
                    at += 1
                value = (np.int64(mem.load_u8(host + 2 * group)) << 8) | np.int64(
                    mem.load_u8(host + 2 * group + 1)
                )
                started = False
                for shift in (12, 8, 4, 0):
                    nibble = (value >> shift) & 15
                    if nibble != 0 or started or shift == 0:
                        out[at] = _LOWER_HEX[nibble]
                        at += 1
                        started = True
            out[at] = 93
            at += 1
        else:
            for k in range(4):
                if k > 0:
                    out[at] = 46
                    at += 1
                at = _decimal(np.int64(mem.load_u8(host + k)), out, at)
        out[at] = 58
        at += 1
        at = _decimal(port, out, at)
        offsets[i + 1] = at
    return at


# --------------------------------------------------------------------------------------------------
# Copy parts of frames to Arrow buffers: fields of fixed size, text, and bodies. A span is a range
# of bytes: a start and a length.


@kernel
def gather(
    address: int,
    rows: Array,
    count: int,
    from32: Array,
    at32: Array,
    out32: Array,
    from64: Array,
    at64: Array,
    factors: Array,
    most: Array,
    out64: Array,
) -> None:
    """Copy 32-bit fields to ``out32`` (fields, n). Multiply 64-bit fields by a factor, and copy
    them to ``out64``. If the factor is not 1, each value is first limited to the range from
    ``-limit`` to ``limit``, so that no product exceeds 64 bits. ``most`` contains the limit of each
    64-bit field.

    One call copies all fields of a frame, because the processor then fetches the frame's head from
    memory only once.
    """
    for i in range(count):
        place = address + rows[i, r.POSITION]
        store_time = place + mem.store_time_at(mem.load_i32(place + HEAD.sys_flag))
        body = place + rows[i, r.BODY_AT]
        for f in range(from32.shape[0]):
            start = place
            if from32[f] == r.FROM_BODY:
                start = body
            out32[f, i] = mem.load_i32(start + at32[f])
        for f in range(from64.shape[0]):
            start = place
            if from64[f] == r.FROM_BODY:
                start = body
            elif from64[f] == r.FROM_STORE_TIME:
                start = store_time
            value = mem.load_i64(start + at64[f])
            if factors[f] != 1:
                value = min(max(value, -most[f]), most[f]) * factors[f]
            out64[f, i] = value


@kernel
def spans_of(
    rows: Array, count: int, at_column: int, length_column: int, starts: Array, lengths: Array
) -> None:
    """For each frame, write the start (counted from the window's start) and the length of one part
    of the frame.
    """
    for i in range(count):
        starts[i] = rows[i, r.POSITION] + rows[i, at_column]
        lengths[i] = rows[i, length_column]


@kernel
def topic_spans(address: int, rows: Array, count: int, starts: Array, lengths: Array) -> bool:
    """For each frame, write the start of the topic (counted from the window's start) and its
    length. Return whether all topics are ASCII.
    """
    ascii_only = True
    for i in range(count):
        start = rows[i, r.POSITION] + rows[i, r.TOPIC_AT]
        length = rows[i, r.TOPIC_LENGTH]
        starts[i] = start
        lengths[i] = length
        ascii_only &= mem.is_ascii(address + start, length)
    return ascii_only


@kernel
def offsets_of(lengths: Array, count: int, offsets: Array, validity: Array) -> tuple[int, int]:
    """Write the offsets and validity bits of an Arrow column from the lengths of its values. A
    negative length means null.

    ``validity`` must be filled with 0. Returns the total bytes of the values, and the number of
    nulls. The total is -1 if it is too large for 32-bit offsets.
    """
    total = np.int64(0)
    nulls = 0
    offsets[0] = 0
    for i in range(count):
        length = lengths[i]
        if length >= 0:
            total += length
            validity[i >> 3] |= np.uint8(1 << (i & 7))
        else:
            nulls += 1
        if total > 0x7FFFFFFF:
            return -1, nulls
        offsets[i + 1] = total
    return total, nulls


@kernel
def copy_spans(address: int, starts: Array, count: int, offsets: Array, target: int) -> None:
    """Copy the bytes of spans to ``target``, without gaps between them."""
    for i in range(count):
        mem.copy_short(target + offsets[i], address + starts[i], offsets[i + 1] - offsets[i])
