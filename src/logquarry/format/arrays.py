"""Types of NumPy arrays, functions for arrays of records and of queue offsets, and three tables.
The compiled functions (kernels) fill one table for a walk over the log, one for the dispatcher, and
one for the messages of a ``get``.

A walk reads a part of the log (the window) frame by frame, and fills a table with one row of int32
per frame. The return codes of a walk are constants below.

====  =============  ===============================================
 col  name           relative to
====  =============  ===============================================
  0   POSITION       start of the window
  1   SIZE           (TOTALSIZE)
  2   BODY_AT        start of the frame
  3   BODY_LENGTH
  4   TOPIC_AT       start of the frame
  5   TOPIC_LENGTH
  6   PROPS_AT       start of the frame
  7   PROPS_LENGTH
====  =============  ===============================================

The kernel and the pure-Python version (the reference) fill this table with the same values.

The table for the dispatcher: one column of int64 per frame.

==  ==================  ==============================================================
 #  name                content
==  ==================  ==============================================================
 0  TOPIC_ID            index of the topic
 1  QUEUE_ID
 2  QUEUE_OFFSET        index in the consume queue
 3  PHYSICAL_OFFSET     physical offset of the frame
 4  FRAME_SIZE          TOTALSIZE
 5  SYS_FLAG
 6  STORE_TIMESTAMP     in milliseconds
 7  TAGS_CODE           for the queue's entry
 8  HAS_KEY             1 if the frame has KEYS or a UNIQ_KEY, and is no ROLLBACK; else 0
 9  QUEUE               index of the queue; -1 if the frame takes no queue offset
==  ==================  ==============================================================

The table of the messages of a ``get``: one row per message, with the message's most used fields.
Positions are counted from the first byte of the frames, which follow each other without gaps.

==  ===============  ==================================================
 #  name             content
==  ===============  ==================================================
 0  queue offset     of the frame
 1  store timestamp  in milliseconds
 2  physical offset  of the frame
 3  frame at         start of the frame
 4  size             TOTALSIZE
 5  body at          start of the body
 6  body end         end of the body
 7  tags at          start of the TAGS property, or a constant below
 8  tags end         end of the TAGS property
==  ===============  ==================================================
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]


POSITION, SIZE, BODY_AT, BODY_LENGTH, TOPIC_AT, TOPIC_LENGTH, PROPS_AT, PROPS_LENGTH = range(8)
ROW_WIDTH = 8

FROM_FRAME, FROM_STORE_TIME, FROM_BODY = range(3)
"""The three parts of a frame. The second part and the third part each follow a host, which has 8
bytes (IPv4) or 20 bytes (IPv6). So a field's position is relative to the start of the part that
contains the field.
"""

REACHED_STOP = 0
"""The walk has reached the position ``stop``, without damage. Codes 1 to 99 are values of
``DamageKind``.
"""
BLANK = 100
"""The walk ended at the start of a blank."""
NEED_MORE = 101
"""A frame continues beyond the window, but not beyond the file."""
TABLE_FULL = 102
"""The walk ended because the table has no room for another row."""
ASK_JAVA = 103
"""RocketMQ may reject the next frame. The caller decides this with
:mod:`logquarry.repair.recover.java_dispatch`.
"""


(
    TOPIC_ID,
    QUEUE_ID,
    QUEUE_OFFSET,
    PHYSICAL_OFFSET,
    FRAME_SIZE,
    SYS_FLAG,
    STORE_TIMESTAMP,
    TAGS_CODE,
    HAS_KEY,
    QUEUE,
) = range(10)
FIELD_COUNT = 10


ROW: Final = struct.Struct("=3q6i")
ROW_SIZE: Final = ROW.size

NO_TAGS: Final = 0
"""The message has no TAGS property."""
SAME_TAGS: Final = -1
"""The message has the same tags as the message of the previous row."""
ASK_TAGS: Final = -2
"""The message's properties are not valid UTF-8, so the pure-Python version must decode the tags."""

NOT_SOUND: Final = -1
"""Result of the ``get`` kernel in an uncommon case: the pure-Python version must answer the get."""
NOT_AT_HAND: Final = -2
"""Result of the ``get`` kernel if a frame is outside the mapped part of the log. The caller passes
this part to the kernel.
"""
COUNT_SHIFT: Final = 24
"""Any other result of the ``get`` kernel is one 64-bit integer that contains three numbers. The
lowest 24 bits are the size of the copied frames in bytes, the next 24 bits are the number of
messages, and the other bits are the number of entries that were read.
"""

(
    STATE_LOG,
    STATE_START,
    STATE_END,
    STATE_CRC,
    STATE_MEMORY_COUNT,
    STATE_MEMORY_SIZE,
    STATE_DISK_COUNT,
    STATE_DISK_SIZE,
) = range(8)
"""Positions of further arguments of the ``get`` kernel in an array of 64-bit numbers.

The first three are the address, the first and the end physical offset of the mapped part of the
log. The fourth is the address of the CRC function. The last four are the limits of an answer:
maximum messages and bytes, first for messages in memory, then for messages on disk.
"""

TAG_CODE, TAG_AT, TAG_LENGTH = range(3)
"""Positions of the three numbers that describe a requested tag: its hash, the address of its text,
and the text's length in bytes.
"""
TAG_WIDTH: Final = 3
"""Number of 64-bit numbers per requested tag. The number of tags comes before the first tag."""


def joined_records(*parts: Records) -> Records:
    """Join arrays that have the same structured dtype. The result has this dtype, with the same
    byte order.

    ``np.concatenate`` returns fields in the machine's byte order.
    """
    joined = np.empty(sum(map(len, parts)), parts[-1].dtype)
    at = 0
    for part in parts:
        joined[at : at + len(part)] = part
        at += len(part)
    return joined


def consecutive(offsets: Int64) -> Iterator[tuple[int, int]]:
    """Yield the array indices (start, stop) of each run of consecutive offsets."""
    cuts = np.flatnonzero(np.diff(offsets) != 1) + 1
    for start, stop in pairwise([0, *cuts.tolist(), len(offsets)]):
        if start < stop:
            yield start, stop
