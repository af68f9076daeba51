"""The table that a walk over the log fills: one row of int32 per frame; and the walk's codes.

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

Kernel and reference fill it alike.
"""

from __future__ import annotations

POSITION, SIZE, BODY_AT, BODY_LENGTH, TOPIC_AT, TOPIC_LENGTH, PROPS_AT, PROPS_LENGTH = range(8)
ROW_WIDTH = 8

FROM_FRAME, FROM_STORE_TIME, FROM_BODY = range(3)
"""The base that a fixed field's position counts from: the hosts before it have 8 or 20 bytes."""

REACHED_STOP = 0
"""The walk has reached its stop. Codes 1..99 are ``DamageKind``."""
BLANK = 100
"""There is a blank."""
NEED_MORE = 101
"""A frame continues beyond the window, but not beyond the file."""
TABLE_FULL = 102
"""The table has no room for another row."""
ASK_JAVA = 103
"""Only :mod:`logquarry.format.java_frame` decides whether RocketMQ accepts this frame."""
