"""The table that a walk over the log fills: one row of int32 a frame, and the walk's codes.

====  =============  ===============================================
 col  name           counts from
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

Both twins (numba and plain Python) fill it the same.
"""

from __future__ import annotations

POSITION, SIZE, BODY_AT, BODY_LENGTH, TOPIC_AT, TOPIC_LENGTH, PROPS_AT, PROPS_LENGTH = range(8)
ROW_WIDTH = 8

FROM_FRAME, FROM_STORE_TIME, FROM_BODY = range(3)
"""What the place of a fixed field counts from: the hosts before it are 8 or 20 bytes long."""

REACHED_STOP = 0
"""The walk came to where it was told to stop. Codes 1..99 are ``DamageKind``."""
BLANK = 100
"""A blank stands here."""
NEED_MORE = 101
"""A frame goes on beyond the window, though not beyond the file."""
TABLE_FULL = 102
"""There is no room for another row."""
ASK_JAVA = 103
"""Only :mod:`logquarry.format.java_frame` tells whether RocketMQ takes this frame for one."""
