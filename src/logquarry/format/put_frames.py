"""Two formats for bulk puts: the table from which kernels make frames, and the frames that a load
stages in files.

The table has one column of int64 per message:

- SIZE is TOTALSIZE, and PREPARED_OFFSET is PREPAREDTRANSACTIONOFFSET.
- TOPIC, HEAD and QUEUE are indexes. The topic to which TOPIC points consists of TOPICLEN and the
  bytes of the name. The head to which HEAD points is the start of a frame; it contains the SYSFLAG
  and the hosts. The message gets the next queue offset of the queue to which QUEUE points.
- BODY_AT and PROPS_AT are addresses of the body and of the property string.
- QUEUE_OFFSET is only for a message that takes no new queue offset: it is 0, or the message's
  previous queue offset.
- STORE_TIMESTAMP is the earliest allowed store time. Only a message that keeps its store time from
  another store has such a limit.

In a staged frame, only three fields lack their final values: QUEUEOFFSET, PHYSICALOFFSET and
STORETIMESTAMP. The writer sets them (:func:`place`) while it holds the log's lock. Until then,
QUEUEOFFSET is an index into a table of queues, which the caller stores with the frames; the other
two fields have no meaning.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from logquarry.format import frame, sys_flag
from logquarry.format.arrays import Int64

(
    SIZE,
    TOPIC,
    HEAD,
    QUEUE,
    QUEUE_ID,
    FLAG,
    BORN_TIMESTAMP,
    RECONSUME_TIMES,
    PREPARED_OFFSET,
    BODY_AT,
    BODY_LENGTH,
    PROPS_AT,
    PROPS_LENGTH,
    QUEUE_OFFSET,
    STORE_TIMESTAMP,
) = range(15)
FIELD_COUNT = 15

ANY_TIME = np.iinfo(np.int64).min
"""The value of STORE_TIMESTAMP for a message that may have any store time."""

HEAD_SIZE, TIME_AT, ADVANCES, HEAD_FACTS = range(4)
"""Columns of a table that describes heads: the size of the head, the position of STORETIMESTAMP in
the head, and whether messages with this head take a new queue offset. HEAD_FACTS is the number of
columns.
"""

PutRows = Int64


def empty_put_rows(count: int) -> PutRows:
    """Make an uninitialised table for ``count`` messages."""
    return np.empty((FIELD_COUNT, count), np.int64)


PLACED, NO_ROOM, NO_FRAME = range(3)
"""Why the kernel stopped placing frames: all frames were placed, the next frame does not fit into
the file, or the next bytes are not a frame.
"""

_SIZE: Final = struct.Struct(">i")
_NUMBER: Final = struct.Struct(">q")
_OFFSETS: Final = struct.Struct(">qq")
_AT_NUMBER: Final = frame.HEAD.offsets["queue_offset"]
_BEHIND_OFFSETS: Final = _AT_NUMBER + _OFFSETS.size
_AT_FLAGS: Final = frame.HEAD.offsets["sys_flag"]

BODY_CRC_END: Final = frame.HEAD.offsets["body_crc"] + _SIZE.size
"""The bytes of a frame before this position contain its size and the CRC of its body."""


def sizes_of(data: memoryview, start: int = 0) -> list[int]:
    """Return the sizes of the staged frames after a position. The list ends before the first bytes
    that are not a staged frame.
    """
    found = []
    while (size := size_at(data, start)) is not None:
        found.append(size)
        start += size
    return found


def size_at(data: memoryview, start: int) -> int | None:
    """Return the size of the staged frame at a position; None if no staged frame is there."""
    if len(data) - start < frame.FIXED_SIZE_V1:
        return None
    (size,) = _SIZE.unpack_from(data, start)
    return size if frame.FIXED_SIZE_V1 <= size <= len(data) - start else None


def queue_number(data: memoryview, start: int) -> int:
    """Return the index of a staged frame's queue, from the frame's field QUEUEOFFSET."""
    return int(_NUMBER.unpack_from(data, start + _AT_NUMBER)[0])


def advances_queue(data: memoryview, start: int) -> bool:
    """Whether the frame at a position takes a new queue offset when it is appended."""
    return sys_flag.advances_queue(_flags(data, start))


def place(data: memoryview, queue_offset: int, physical_offset: int, now: int) -> None:
    """Fill in the fields of a single frame that are known only under the log's lock."""
    _OFFSETS.pack_into(data, _AT_NUMBER, queue_offset, physical_offset)
    frame.STORE_TIME.struct.pack_into(data, _time_at(data), now)


def same(one: memoryview, other: memoryview) -> bool:
    """Whether two frames are the same message. The fields that :func:`place` sets are ignored."""
    return len(one) == len(other) and same_head(one, other) and text_of(one) == text_of(other)


def text_of(data: memoryview) -> memoryview:
    """Return the part of a frame after STORETIMESTAMP. This part does not depend on the place of
    the frame in the log.
    """
    return data[_time_at(data) + frame.STORE_TIME.size :]


def same_head(one: memoryview, other: memoryview) -> bool:
    """Whether the fields before STORETIMESTAMP are equal. The fields that :func:`place` sets are
    ignored.
    """
    parts = (slice(0, _AT_NUMBER), slice(_BEHIND_OFFSETS, _time_at(one)))
    return all(one[part] == other[part] for part in parts)


def is_torn(staged: memoryview, other: memoryview) -> bool:
    """Whether ``other`` is the first frame of ``staged``, but with zeros in place of some bytes.

    New files of the log contain only zeros. So a power cut leaves such a frame if one of the
    frame's pages was not yet written to the disk. The fields that :func:`place` sets are not
    compared.
    """
    if size_at(staged, 0) != len(other):
        return False
    one, two = (np.array(data[: len(other)], np.uint8) for data in (staged, other))
    at = _time_at(staged)
    for part in (slice(_AT_NUMBER, _BEHIND_OFFSETS), slice(at, at + frame.STORE_TIME.size)):
        two[part] = one[part]
    differs = one != two
    return bool(differs.any()) and not bool(two[differs].any())


def _flags(data: memoryview, start: int) -> int:
    return int(_SIZE.unpack_from(data, start + _AT_FLAGS)[0])


def _time_at(data: memoryview) -> int:
    is_v6 = _flags(data, 0) & sys_flag.BORN_HOST_V6
    return frame.HEAD.size + (frame.HOST_SIZE_V6 if is_v6 else frame.HOST_SIZE_V4)
