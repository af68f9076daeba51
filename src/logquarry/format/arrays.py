"""Types of NumPy arrays, and the three tables that kernels fill: in a walk, for the dispatcher, and
for the messages of a get.

A walk over the log fills a table with one row of int32 per frame. The walk's codes are below.

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

The kernel and the reference fill this table with the same values.

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
 8  HAS_KEY             whether there are KEYS or a UNIQ_KEY, and it is not a ROLLBACK
 9  QUEUE               index of the queue; -1 if the frame takes no queue offset
==  ==================  ==============================================================

The table of the messages of a ``get``: one row per message with its most used fields. Positions
count from the first byte of the frames, which follow each other without gaps.

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
"""The parts of a frame. Positions of fields count from the start of the part, because a host before
the part takes 8 bytes (IPv4) or 20 (IPv6)."""

REACHED_STOP = 0
"""The walk has reached the position ``stop``. Codes 1..99 are ``DamageKind``."""
BLANK = 100
"""A blank starts here."""
NEED_MORE = 101
"""A frame continues beyond the window, but not beyond the file."""
TABLE_FULL = 102
"""The table has no room for another row."""
ASK_JAVA = 103
""":mod:`logquarry.repair.recover.java_dispatch` decides whether RocketMQ accepts the frame."""


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
"""There is no TAGS property."""
SAME_TAGS: Final = -1
"""The tags are the same as in the row before."""
ASK_TAGS: Final = -2
"""The properties are not UTF-8: the reference decodes the tags."""

NOT_SOUND: Final = -1
"""The kernel's result in uncommon cases: the reference gives the answer."""
NOT_AT_HAND: Final = -2
"""The kernel's result if a frame is not within the mapped bytes that it was given."""
COUNT_SHIFT: Final = 24
"""Any other result packs three numbers, each shifted by this many bits from the previous one: bytes
of frames, messages, and entries."""

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
"""Further arguments of the kernel, 64 bits each: the address and the physical offsets of the mapped
bytes of the log, the address of the CRC function, and the limits of an answer."""

TAG_CODE, TAG_AT, TAG_LENGTH = range(3)
"""Arguments for a wanted tag: its hash, the address of its text, and its length in bytes."""
TAG_WIDTH: Final = 3
"""Numbers per tag. The count of tags precedes the first tag."""
