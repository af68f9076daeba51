"""Detects that a log is no longer the log that a stream or an export has read.

A log can be replaced by an older backup, or truncated by a power cut, and then grow past the offset
up to which it was read. The offset alone does not show that the log has changed, and the next batch
would miss the new messages before the offset. So the reader records the last frame before the
offset, and the next batch checks that the log still has this frame.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

import numpy as np

from logquarry.format import arrays as r
from logquarry.log.codec import Rows, Window
from logquarry.log.columns import fixed_fields
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import frame_start
from logquarry.log.walk import BlankSpan, LogReader, Run

_FIELDS: Final = ("body_crc", "physical_offset", "born_timestamp", "store_timestamp")
"""Fields that the check sum covers. A broker writes them once, with the frame. Queue id and queue
offset are left out, because a salvage corrects them if damage has changed them.
"""
_NEAR: Final = 64 << 10
_FARTHEST: Final = 64 << 20


class LastFrame(NamedTuple):
    """A frame that was read: its physical offset, and a CRC of its size and of `_FIELDS`."""

    offset: int
    check_sum: int


def last_frame(layout: StoreLayout, stop: int) -> LastFrame | None:
    """Return the last frame that ends at or before ``stop``.

    Return None if no sound frame is in the 64 MiB before ``stop``.
    """
    reader = LogReader(layout)
    back = _NEAR
    while stop > reader.files.start:
        start = max(reader.files.start, stop - back)
        found: LastFrame | None = None
        for event in reader.events(start, stop, resync=True):
            if not isinstance(event, Run):
                continue
            ends = event.rows[:, r.POSITION].astype(np.int64) + event.rows[:, r.SIZE]
            if len(rows := event.rows[event.window.base + ends <= stop]):
                place = event.window.base + int(rows[-1, r.POSITION])
                found = LastFrame(place, _check_sum(event.window, rows[-1:]))
        if found is not None:
            return found
        if start == reader.files.start or back >= _FARTHEST:
            return None
        back *= 4
    return None


def is_other_log(layout: StoreLayout, known: LastFrame) -> bool:
    """Return whether a log certainly does not have the frame ``known``.

    The result is False if the log no longer has the bytes, or if they are damaged.
    """
    return _has_frame(layout, known) is False


def is_same_log(layout: StoreLayout, known: LastFrame) -> bool:
    """Return whether a log certainly has the frame ``known``."""
    return _has_frame(layout, known) is True


def _has_frame(layout: StoreLayout, known: LastFrame) -> bool | None:
    """Return whether a log has the frame ``known``; None if its bytes are missing or damaged."""
    reader = LogReader(layout)
    place = known.offset
    if reader.files.at(place) is None:
        return None
    for event in reader.events(place, place + 1):
        if isinstance(event, Run):
            return _check_sum(event.window, event.rows[:1]) == known.check_sum
        if isinstance(event, BlankSpan):
            return False
        break
    # If another frame or a blank contains the offset, frame_start returns the start of this frame
    # or blank. In damage, frame_start returns the offset unchanged.
    return None if frame_start(layout, place) == place else False


def _check_sum(window: Window, rows: Rows) -> int:
    fields = fixed_fields(window, rows, _FIELDS)
    values = [int(rows[0, r.SIZE]), *(int(fields[name][0]) for name in _FIELDS)]
    return zlib.crc32(np.array(values, "<i8").tobytes())
