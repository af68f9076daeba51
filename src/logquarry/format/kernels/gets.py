"""The two kernels of a ``get``. The first kernel reads queue entries, and checks and copies their
frames. The second kernel finds the fields of these frames.

The pure-Python version (the reference) is the loop in :mod:`logquarry.read.get_message`. For sound
frames, the first kernel has the same result. For other bytes, the kernel returns a code, and the
caller runs the pure-Python version.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from numba import cfunc, types

from logquarry.format import arrays as r
from logquarry.format import batch, java, properties, queue_entry
from logquarry.format.kernels import bytes as mem
from logquarry.format.kernels.bytes import HEAD, kernel
from logquarry.format.kernels.properties import name_table, next_separator, which_name
from logquarry.format.kernels.walk import CACHE_LINE, check_frame
from logquarry.systems import held

_UNIT = queue_entry.LAYOUT.at
_UNIT_SIZE = queue_entry.UNIT_SIZE
_FILLER_SIZE = queue_entry.FILLER_SIZE
_NAME_VALUE = ord(properties.NAME_VALUE_SEPARATOR)
_NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS = name_table((properties.TAGS,))
_INT_MIN = java.INT_MIN
_INNER_BATCH = batch.INNER_BATCH
_UNITS_AHEAD = 16
_MOST_LINES = 64


@kernel
def _tags_span(start: int, length: int) -> tuple[int, int]:
    """Return the address and the length of the value of TAGS; (0, 0) without TAGS. The properties
    must be valid UTF-8.
    """
    found = size = 0
    at, stop = start, start + length
    while at < stop:
        middle = -1
        end = next_separator(0, at, stop)
        while end < stop and mem.load_u8(end) == _NAME_VALUE:
            if middle < 0:
                middle = end
            end = next_separator(0, end + 1, stop)
        if (
            middle > at
            and end - middle > 1
            and which_name(at, middle - at, _NAME_BYTES, _NAME_LENGTHS, _NAME_STARTS) == 0
        ):
            # If there are several TAGS properties, the value of the last one is used.
            found, size = middle + 1, end - middle - 1
        at = end + 1
    return found, size


@kernel
def _is_text(start: int, length: int) -> bool:
    return mem.is_ascii(start, length) or mem.is_utf8(start, length)


@kernel
def _prefetch_frame(unit: int, log: int, start: int, end: int) -> None:
    place, size = mem.load_i64(unit), np.int64(mem.load_i32(unit + _UNIT.size))
    if place < start or place >= end:
        return
    at = log + (place - start)
    for line in range(_least(size // CACHE_LINE + 1, _MOST_LINES)):
        mem.prefetch(at + line * CACHE_LINE)


@kernel
def _has_code(tags: int, code: int) -> bool:
    for number in range(np.int64(mem.load_raw64(tags))):
        tag = tags + 8 * (1 + number * r.TAG_WIDTH)
        if np.int64(mem.load_raw64(tag + 8 * r.TAG_CODE)) == code:
            return True
    return False


@kernel
def _is_wanted(tags: int, text: int, length: int) -> bool:
    for number in range(np.int64(mem.load_raw64(tags))):
        tag = tags + 8 * (1 + number * r.TAG_WIDTH)
        if np.int64(mem.load_raw64(tag + 8 * r.TAG_LENGTH)) == length and mem.same_bytes(
            text, np.int64(mem.load_raw64(tag + 8 * r.TAG_AT)), length
        ):
            return True
    return False


@kernel
def _least(a: int, b: int) -> int:
    return a if a < b else b


# The kernel runs only for microseconds, so it does not release the GIL. If the kernel released the
# GIL, another thread could take the GIL, and the kernel might wait for the GIL for milliseconds.
@partial(kernel, nogil=False)
def get_frames(
    units: int,
    count: int,
    max_count: int,
    memory_start: int,
    wanted: int,
    state: int,
    scratch: int,
    room: int,
) -> int:
    """Copy the frames of queue entries to ``scratch``, one after the other.

    Returns NOT_SOUND, NOT_AT_HAND, or three numbers in one integer; see COUNT_SHIFT.

    Args:
        units: address of ``count`` queue entries; ``count`` must be at least 1.
        memory_start: messages at or after this physical offset count as messages in memory, all
            others as messages on disk. The two kinds have different limits.
        wanted: address of the tags that the consumer requests; 0 for all tags.
        room: number of bytes that ``scratch`` can hold.
    """
    log = np.int64(mem.load_raw64(state + 8 * r.STATE_LOG))
    start = np.int64(mem.load_raw64(state + 8 * r.STATE_START))
    end = np.int64(mem.load_raw64(state + 8 * r.STATE_END))
    crc_function = np.int64(mem.load_raw64(state + 8 * r.STATE_CRC))
    in_memory = _least(np.int64(mem.load_raw64(state + 8 * r.STATE_MEMORY_COUNT)), max_count)
    in_memory_size = np.int64(mem.load_raw64(state + 8 * r.STATE_MEMORY_SIZE))
    on_disk = _least(np.int64(mem.load_raw64(state + 8 * r.STATE_DISK_COUNT)), max_count)
    on_disk_size = np.int64(mem.load_raw64(state + 8 * r.STATE_DISK_SIZE))
    row = np.empty(r.ROW_WIDTH, np.int64)
    size = taken = done = 0
    for ahead in range(min(_UNITS_AHEAD, count)):
        _prefetch_frame(units + ahead * _UNIT_SIZE, log, start, end)
    while done < count:
        unit = units + done * _UNIT_SIZE
        place = mem.load_i64(unit)
        unit_size = np.int64(mem.load_i32(unit + _UNIT.size))
        most, most_size = in_memory, in_memory_size
        if place < memory_start:
            most, most_size = on_disk, on_disk_size
        if taken > 0 and taken >= most:
            break
        if unit_size == _FILLER_SIZE or unit_size <= 0 or place < 0:
            # The entry is a filler for a lost message, or was never written. The pure-Python
            # version handles such entries.
            return r.NOT_SOUND
        if taken > 0 and size + unit_size > most_size:
            break
        if done + _UNITS_AHEAD < count:
            _prefetch_frame(unit + _UNITS_AHEAD * _UNIT_SIZE, log, start, end)
        done += 1
        if wanted != 0:
            tags_code = mem.load_i64(unit + _UNIT.tags_code)
            if tags_code >= _INT_MIN and not _has_code(wanted, np.int64(np.int32(tags_code))):
                continue
        if place < start or place > end - unit_size:
            return r.NOT_AT_HAND
        if size + unit_size > room:
            return r.NOT_SOUND
        frame = log + (place - start)
        verdict = check_frame(frame, 0, unit_size, unit_size, place, crc_function, True, row)
        if verdict != r.REACHED_STOP or row[r.SIZE] != unit_size:
            return r.NOT_SOUND
        if mem.load_i32(frame + HEAD.sys_flag) & _INNER_BATCH == _INNER_BATCH:
            # The frame is an inner batch. The pure-Python version finds the message with the
            # requested queue offset in the batch.
            return r.NOT_SOUND
        if wanted != 0:
            props, props_length = frame + row[r.PROPS_AT], row[r.PROPS_LENGTH]
            if not _is_text(props, props_length):
                return r.NOT_SOUND
            tags, length = _tags_span(props, props_length)
            if tags == 0 or not _is_wanted(wanted, tags, length):
                continue
        mem.copy_bytes(scratch + size, frame, unit_size)
        size += unit_size
        taken += 1
    return ((done << r.COUNT_SHIFT) | taken) << r.COUNT_SHIFT | size


@partial(kernel, nogil=False)
def frame_rows(frames: int, count: int, out: int) -> None:
    """Write one row (:mod:`logquarry.format.arrays`) for each frame that a get returned. ``frames``
    is the address of ``count`` frames, and ``out`` is the address of the table.
    """
    row = np.empty(r.ROW_WIDTH, np.int64)
    at = last_tags = last_length = 0
    for _ in range(count):
        frame = frames + at
        size = np.int64(mem.load_i32(frame))
        place = mem.load_i64(frame + HEAD.physical_offset)
        # The frame was already checked. This call only finds the positions of the frame's parts.
        check_frame(frame, 0, size, size, place, 0, False, row)
        store_time = frame + mem.store_time_at(mem.load_i32(frame + HEAD.sys_flag))
        body_at = at + row[r.BODY_AT]
        mem.store_raw64(out, mem.load_i64(frame + HEAD.queue_offset))
        mem.store_raw64(out + 8, mem.load_i64(store_time))
        mem.store_raw64(out + 16, place)
        mem.store_raw32(out + 24, at)
        mem.store_raw32(out + 28, size)
        mem.store_raw32(out + 32, body_at)
        mem.store_raw32(out + 36, body_at + row[r.BODY_LENGTH])
        tags_at, length = r.ASK_TAGS, 0
        tags = 0
        if _is_text(frame + row[r.PROPS_AT], row[r.PROPS_LENGTH]):
            tags, length = _tags_span(frame + row[r.PROPS_AT], row[r.PROPS_LENGTH])
            tags_at = r.NO_TAGS
            if tags != 0:
                tags_at = tags - frames
                if length == last_length and mem.same_bytes(tags, last_tags, length):
                    tags_at = r.SAME_TAGS
        mem.store_raw32(out + 40, tags_at)
        mem.store_raw32(out + 44, tags_at + length)
        last_tags, last_length = tags, length
        at += size
        out += r.ROW_SIZE


@cache
@held()
def get_frames_address() -> int:
    """Return the address of :func:`get_frames` as a C function that takes eight int64 and returns
    one int64.
    """

    @cfunc(types.int64(*[types.int64] * 8), cache=True)
    def called(
        units: int, count: int, most: int, memory: int, wanted: int, state: int, to: int, room: int
    ) -> Any:
        return get_frames(units, count, most, memory, wanted, state, to, room)

    return int(called.address)


@cache
@held()
def frame_rows_address() -> int:
    """Return the address of :func:`frame_rows` as a C function that takes three int64."""

    @cfunc(types.void(*[types.int64] * 3), cache=True)
    def called(frames: int, count: int, out: int) -> None:
        frame_rows(frames, count, out)

    return int(called.address)
