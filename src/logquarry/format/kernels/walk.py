"""The kernels of a walk and of a resync. A walk reads the log frame by frame. A resync searches for
the next sound frame after damage.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np

from logquarry.format import arrays as r
from logquarry.format import frame
from logquarry.format.kernels import bytes as mem
from logquarry.format.kernels.bytes import HEAD, TAIL, Array, kernel

ENTRY_HEAD_SIZE = frame.ENTRY_HEAD.size
_ENTRY_HEAD = frame.ENTRY_HEAD.at
ENTRY_MAGIC = np.int32(frame.ENTRY_MAGIC)
ENTRY_BLANK = np.int32(frame.ENTRY_BLANK_MAGIC)

CACHE_LINE = 64
PREFETCH_AHEAD = 8192

_KINDS = {kind.name: int(kind) for kind in frame.DamageKind}
DAMAGE: Any = namedtuple("Damage", _KINDS)(**_KINDS)
"""The numbers of :class:`~logquarry.format.frame.DamageKind`."""


@kernel
def check_frame(
    address: int,
    position: int,
    window: int,
    end: int,
    base: int,
    crc_function: int,
    check_crc: bool,
    row: Array,
) -> int:
    """Check the bytes at one position, as ``frame.decode_at`` does. If a frame starts there, write
    its row to ``row``.

    ``address`` is the address of the window, the part of the log that can be read; ``window`` is
    its length. ``base`` is the physical offset of the window's first byte. ``end`` is the distance
    from the window's start to the end of the log file, at least ``window``. Returns REACHED_STOP
    for a sound frame, else another code.
    """
    left = end - position
    here = window - position
    if left < mem.BLANK_SIZE:
        return DAMAGE.TRUNCATED
    if here < mem.BLANK_SIZE:
        return r.NEED_MORE
    at = address + position
    size = mem.load_i32(at)
    magic = mem.load_i32(at + HEAD.magic)
    if magic == mem.MAGIC_BLANK:
        return r.BLANK if size == left else DAMAGE.BAD_BLANK
    if magic != mem.MAGIC_V1 and magic != mem.MAGIC_V2:
        return DAMAGE.ZEROED if size == 0 and magic == 0 else DAMAGE.BAD_MAGIC
    topic_length_size = 1 if magic == mem.MAGIC_V1 else 2
    fixed = mem.FIXED_V1 - 1 + topic_length_size
    if size < fixed or size > left:
        return DAMAGE.BAD_SIZE
    if here < mem.HEAD_SIZE:
        return r.NEED_MORE
    flags = mem.load_i32(at + HEAD.sys_flag)
    hosts = 0
    if flags & mem.BORN_V6:
        hosts += mem.HOST_EXTRA
    if flags & mem.STORE_V6:
        hosts += mem.HOST_EXTRA
    fixed += hosts
    if size < fixed:
        return DAMAGE.BAD_SIZE
    if mem.load_i64(at + HEAD.physical_offset) != base + position:
        return DAMAGE.BAD_PHYSICAL_OFFSET
    if size > here:
        return r.NEED_MORE
    room = size - fixed
    body_at = mem.BODY_AT_V4 + hosts
    body_length = mem.load_i32(at + body_at - mem.TAIL_SIZE + TAIL.body_length)
    if body_length < 0 or body_length > room:
        return DAMAGE.BAD_BODY_LENGTH
    length_at = body_at + body_length
    topic_length = np.int64(np.int8(mem.load_u8(at + length_at)))
    if topic_length_size == 2:
        topic_length = np.int64(mem.load_i16(at + length_at))
    if topic_length < 0 or topic_length > room - body_length:
        return DAMAGE.BAD_TOPIC_LENGTH
    topic_at = length_at + topic_length_size
    length_at = topic_at + topic_length
    props_length = np.int64(mem.load_i16(at + length_at))
    if props_length < 0:
        return DAMAGE.BAD_PROPERTIES_LENGTH
    if body_length + topic_length + props_length != room:
        return DAMAGE.BAD_LENGTH_SUM
    if check_crc:
        crc = mem.crc32(crc_function, at + body_at, body_length) & mem.CRC_MASK
        if np.int64(crc) != np.int64(mem.load_i32(at + HEAD.body_crc)):
            return DAMAGE.BAD_BODY_CRC
    row[r.POSITION] = position
    row[r.SIZE] = size
    row[r.BODY_AT] = body_at
    row[r.BODY_LENGTH] = body_length
    row[r.TOPIC_AT] = topic_at
    row[r.TOPIC_LENGTH] = topic_length
    row[r.PROPS_AT] = length_at + 2
    row[r.PROPS_LENGTH] = props_length
    return r.REACHED_STOP


@kernel
def has_head(address: int, position: int, window: int, end: int, base: int) -> bool:
    """Whether a DLedger entry's head is at a position; see ``frame.has_entry_head_reference``."""
    if window - position < ENTRY_HEAD_SIZE:
        return False
    at = address + position
    size = np.int64(mem.load_i32(at + _ENTRY_HEAD.size))
    return (
        mem.load_i32(at) == ENTRY_MAGIC
        and ENTRY_HEAD_SIZE < size <= end - position
        and mem.load_i64(at + _ENTRY_HEAD.position) == base + position
        and np.int64(mem.load_i32(at + _ENTRY_HEAD.body_size)) == size - ENTRY_HEAD_SIZE
    )


@kernel
def walk(
    address: int,
    position: int,
    stop: int,
    window: int,
    end: int,
    base: int,
    crc_function: int,
    check_crc: bool,
    has_heads: bool,
    rows: Array,
) -> tuple[int, int, int]:
    """Read frame after frame from ``position``, and write the row of each to ``rows``. See
    :func:`check_frame` for the first arguments.

    The walk ends when it reaches ``stop``, when it finds bytes that are not a sound frame, or when
    ``rows`` is full. A frame that starts before ``stop`` may end after it. If ``has_heads`` is
    true, the head of a DLedger entry may precede a frame. Returns the number of frames, the
    position after them, and a code.
    """
    count = 0
    asked = position
    while position < stop:
        if count == rows.shape[0]:
            return count, position, r.TABLE_FULL
        # The position of a frame is known only when the previous frame has been read. So without
        # prefetching, the walk would wait for the memory at each frame.
        ahead = min(position + PREFETCH_AHEAD, window)
        asked = max(asked, position)
        while asked < ahead:
            mem.prefetch(address + asked)
            asked += CACHE_LINE
        place = position
        if has_heads:
            if has_head(address, position, window, end, base):
                place += ENTRY_HEAD_SIZE
                if place >= stop:
                    position = place
                    break
            elif (
                window - position >= mem.BLANK_SIZE
                and mem.load_i32(address + position) == ENTRY_BLANK
            ):
                if np.int64(mem.load_i32(address + position + _ENTRY_HEAD.size)) == end - position:
                    return count, position, r.BLANK
            elif window - position < ENTRY_HEAD_SIZE and window < end:
                return count, position, r.NEED_MORE
        code = check_frame(address, place, window, end, base, crc_function, check_crc, rows[count])
        if code != r.REACHED_STOP:
            return count, position, code
        position = place + rows[count, r.SIZE]
        count += 1
    return count, position, r.REACHED_STOP


@kernel
def check_places(
    address: int,
    window: int,
    end: int,
    base: int,
    crc_function: int,
    check_crc: bool,
    places: Array,
    sizes: Array,
    rows: Array,
    codes: Array,
) -> int:
    """Check each position in ``places``. Write the result to ``codes``, and, if the frame is sound,
    its row to ``rows``.

    ``sizes`` has the expected size of each frame; 0 allows every size. If a sound frame has another
    size, its code is BAD_SIZE. Returns the number of sound frames.
    """
    count = 0
    for i in range(places.shape[0]):
        place = places[i]
        if place < 0 or place >= end:
            codes[i] = DAMAGE.TRUNCATED
            continue
        code = check_frame(address, place, window, end, base, crc_function, check_crc, rows[count])
        if code == r.REACHED_STOP and sizes[i] != 0 and rows[count, r.SIZE] != sizes[i]:
            code = DAMAGE.BAD_SIZE
        codes[i] = code
        if code == r.REACHED_STOP:
            count += 1
    return count


@kernel
def find_frame(
    address: int,
    start: int,
    stop: int,
    window: int,
    end: int,
    base: int,
    crc_function: int,
    check_crc: bool,
    row: Array,
) -> tuple[int, int]:
    """Find the first position in ``[start, stop)`` at which a sound frame starts (resync). Return
    the position and REACHED_STOP.

    If the window ends before a position can be checked, the code is NEED_MORE. If there is no sound
    frame, return (stop, TRUNCATED).
    """
    position = start
    last = min(stop, window - HEAD.magic)
    while position < last:
        if mem.load_u8(address + position + HEAD.magic) == mem.MAGIC_FIRST:
            if window - position < mem.BLANK_SIZE:
                if window < end:
                    return position, r.NEED_MORE
                position += 1
                continue
            magic = mem.load_i32(address + position + HEAD.magic)
            if magic == mem.MAGIC_V1 or magic == mem.MAGIC_V2:
                code = check_frame(
                    address, position, window, end, base, crc_function, check_crc, row
                )
                if code == r.REACHED_STOP or code == r.NEED_MORE:
                    return position, code
        elif position + 16 < last and mem.load_raw64(address + position + HEAD.magic) == 0:
            # Preallocated files are full of zeros, so compare eight bytes at a time.
            position += 8
            continue
        position += 1
    if position < stop and window < end:
        return position, r.NEED_MORE
    return stop, DAMAGE.TRUNCATED


@kernel
def last_nonzero(address: int, start: int, stop: int) -> int:
    """Return the position after the last non-zero byte in ``[start, stop)``, or ``start``."""
    position = stop
    while position - 8 >= start and mem.load_raw64(address + position - 8) == 0:
        position -= 8
    while position > start and mem.load_u8(address + position - 1) == 0:
        position -= 1
    return position
