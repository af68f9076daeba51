"""The table that a ``get`` fills: what is asked of a message most, a row a message.

Before the rows there is nothing; behind the last that may come the frames stand, one after
another. Places count from the table's first byte.

==  ===============  ==================================================
 #  name             says
==  ===============  ==================================================
 0  queue offset     of the frame
 1  store timestamp  in milliseconds
 2  physical offset  where the frame stands in the log
 3  frame at         where its copy starts
 4  size             TOTALSIZE
 5  body at          where the body starts
 6  body end         and ends
 7  tags at          where the TAGS property starts; or one of the below
 8  tags end         and where it ends
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
"""The tags are those of the row before."""
ASK_TAGS: Final = -2
"""The properties are no UTF-8, so that only the reference can tell."""

NOT_SOUND: Final = -1
"""What the kernel says where something is not as it mostly is: the reference is to be asked."""
NOT_AT_HAND: Final = -2
"""And where a frame is not within the bytes of the log that it was given."""
COUNT_SHIFT: Final = 24
"""Else it says: bytes of the frames, shifted by this the messages, and once more the units."""

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
"""What the kernel is told besides, as numbers of 64 bits: the address of the bytes of the log that
are at hand, their physical offsets, the CRC function's address, and the limits of an answer."""

TAG_CODE, TAG_AT, TAG_LENGTH = range(3)
"""What it is told of a tag that is wanted: its hash, the address of its text, and its bytes."""
TAG_WIDTH: Final = 3
"""Numbers of a tag. How many tags there are stands before the first."""
