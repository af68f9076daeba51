"""Reads the first frames of a log file without knowing where in the log the file begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from logquarry.format import frame, java
from logquarry.format.frame import Frame
from logquarry.log.filesystem import FileView

_MAGICS: Final = (frame.MAGIC_V1, frame.MAGIC_V2)
_MOST_FRAMES: Final = 32
"""Frames that are read from one file."""
_SEARCHED: Final = 64 << 20
"""Bytes of a file in which frames are searched."""
_CHUNK: Final = 1 << 20


def head_offset(view: FileView) -> int | None:
    """The physical offset in the first frame of a file; -1 if its first bytes are not a frame.

    None if the file is too short, or begins with zeros or a blank: then it shows nothing.
    """
    size = frame.HEAD.size
    if view.size < size:
        return None
    head = bytes(view.head(size))
    if len(head) < size:
        return None
    fields = frame.HEAD.struct.unpack(head)
    if fields[1] in _MAGICS:
        return int(fields[6])
    return None if fields[1] == frame.MAGIC_BLANK or not any(head) else -1


def first_frames(view: FileView) -> Iterable[tuple[int, Frame]]:
    """The first whole frames of a file, with their positions in the file."""
    stop = min(view.size, _SEARCHED, java.INT_MAX)
    data = view.window(0, stop)[:stop]
    position, count = 0, 0
    while count < _MOST_FRAMES:
        position = _next_magic(data, position)
        if position < 0 or position + frame.HEAD.size > len(data):
            return
        told = frame.HEAD.struct.unpack_from(data, position)[6]
        found = frame.decode_at(data, position, base=told - position)
        if isinstance(found, Frame):
            yield position, found
            count += 1
            position += found.size
        else:
            position += 1


def _next_magic(data: memoryview, position: int) -> int:
    """The next position at which a frame may start, -1 if there is none."""
    at_magic = frame.HEAD.offsets["magic"]
    magics = [magic.to_bytes(4, "big") for magic in _MAGICS]
    while position + at_magic < len(data):
        start = position + at_magic
        chunk = bytes(data[start : start + _CHUNK])
        hits = [hit for magic in magics if (hit := chunk.find(magic)) >= 0]
        if hits:
            return position + min(hits)
        if len(chunk) < _CHUNK:
            return -1
        position += _CHUNK - len(magics[0]) + 1
    return -1
