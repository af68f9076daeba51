"""The table that a ``get`` fills: one row per message with its most used fields.

The rows come first, in a space for the maximum number of rows; the frames follow after that space.
Positions count from the table's first byte.

==  ===============  ==================================================
 #  name             content
==  ===============  ==================================================
 0  queue offset     of the frame
 1  store timestamp  in milliseconds
 2  physical offset  of the frame
 3  frame at         start of the frame's copy
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
of table and frames, messages, and entries."""

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
"""Further arguments of the kernel, 64 bits each: the address of the mapped bytes of the log, their
physical offsets, the CRC function's address, and the limits of an answer."""

TAG_CODE, TAG_AT, TAG_LENGTH = range(3)
"""Arguments for a wanted tag: its hash, the address of its text, and its length in bytes."""
TAG_WIDTH: Final = 3
"""Numbers per tag. The count of tags precedes the first one."""
