"""Walks, checks and finds frames in bytes of the log.

The kernels (:mod:`logquarry.format.kernels`) are functions that numba compiles; one call checks
many frames. Without numba, or with ``LOGQUARRY_KERNELS=off``, the slower reference codec
(:mod:`logquarry.format.frame`), which is pure Python, decodes each frame. The reference codec also
decodes the first frames that a process reads, because the import of numba takes longer than that.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logquarry.compiled import is_switched_off
from logquarry.format import frame, java
from logquarry.format.arrays import (
    BLANK,
    NEED_MORE,
    REACHED_STOP,
    ROW_WIDTH,
    SIZE,
    TABLE_FULL,
    Bytes,
    Int32,
    Int64,
)
from logquarry.format.batch import is_inner_batch
from logquarry.log.filesystem import FileView

if TYPE_CHECKING:
    from types import ModuleType

logger = logging.getLogger(__name__)

SWITCH = "LOGQUARRY_KERNELS"

crc32_address = java.crc32_address

_PIECE: Final = 1 << 20

_KERNELS: Final = "logquarry.format.kernels"
_WORTH: Final = 4_000
"""Number of frames for which the reference codec takes about as long as the import of numba."""
_BYTES_PER_UNIT: Final = 512
"""This number of bytes counts as the work of one frame. It applies to bytes that are searched,
bytes of properties, and bytes of an inner batch's messages.
"""
_COPIED: Final = 512
"""This number of body bytes counts as one of these bytes, because a body is only copied."""


@dataclass(slots=True)
class _Work:
    """Counts the frames that this process has checked with the reference codec. A frame with long
    properties, a huge body or an inner batch counts as several frames, because it takes as long to
    decode as several frames.
    """

    frames: int = 0


_done: Final = _Work()

_AT_MAGIC: Final = frame.HEAD.offsets["magic"]
MAGIC: Final = re.compile(b"|".join(re.escape(magic.to_bytes(4, "big")) for magic in frame.MAGICS))

Rows = Int32


@cache
def kernels() -> ModuleType | None:
    """Return the kernel module; None if kernels are switched off or numba is missing."""
    if is_switched_off(SWITCH):
        return None
    try:
        from logquarry.format import kernels as module
    except (ImportError, OSError) as error:  # The system cannot load a library of numba.
        reason = str(error).partition("\n")[0]
        logger.warning(
            "no compiled kernels (%s): the slower Python reference is used. For speed: "
            "pip install 'logquarry[fast]'",
            reason,
        )
        return None
    return module


def kernels_if_worth(work: int = 0) -> ModuleType | None:
    """Return the kernel module if it is imported, or if the import saves time; else None.

    The import saves time if this process has already checked many frames with the reference codec,
    or if the caller still has to process many. ``work`` is the work that the caller still has, in
    frames: ``_BYTES_PER_UNIT`` bytes count as one frame.
    """
    return None if work < _left() else kernels()


def _left() -> int:
    """Return how many more frames this process checks with the reference codec before it imports
    the kernels. If the result is 0 or less, the process uses the kernels.
    """
    return 0 if _KERNELS in sys.modules else _WORTH - _done.frames


def kernels_enabled() -> bool:
    """Import the kernels, and return whether this process can use them."""
    return kernels() is not None


def require_kernels() -> ModuleType:
    """Return the kernel module. Call this only if kernels are enabled."""
    module = kernels()
    assert module is not None, "only called if kernels_enabled()"
    return module


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of one log file and their place in the log.

    Attributes:
        base: physical offset of the first byte.
        end: index in ``data`` at which the file would end; larger than ``len(data)`` if the file
            continues after the data.
        has_heads: whether the log is a DLedger log, in which heads precede frames.
        is_unwrapped: whether the data contains frames that were made from the messages of inner
            batches. The physical offset of such a frame is its field PHYSICALOFFSET, not ``base``
            plus its position in the data.
    """

    data: Bytes
    base: int
    end: int
    has_heads: bool = False
    is_unwrapped: bool = False

    @classmethod
    def of(
        cls,
        data: bytes | memoryview,
        base: int,
        end: int | None = None,
        *,
        has_heads: bool = False,
    ) -> Window:
        """Make a window over ``data``. If ``end`` is None, the window's file ends where the data
        ends.
        """
        array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        return cls(array, base, len(array) if end is None else end, has_heads)

    @classmethod
    def with_zeros(cls, data: bytes | memoryview, base: int, size: int) -> Window:
        """Make a window over ``data`` and the zeros after it, ``size`` bytes in total. Large ranges
        of zeros take no memory.
        """
        array = np.zeros(size, np.uint8)
        given = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        for at in range(0, len(given), _PIECE):
            piece = given[at : at + _PIECE]
            # Do not write zeros: the array already has them, and a write would take memory.
            if piece.any():
                array[at : at + len(piece)] = piece
        return cls(array, base, size)

    def after(self, position: int) -> Window:
        """Return a window over the data from a position on."""
        return Window(
            self.data[position:], self.base + position, self.end - position, self.has_heads
        )

    @property
    def address(self) -> int:
        """Memory address of the first byte, valid while the window exists."""
        return int(self.data.ctypes.data)

    @property
    def length(self) -> int:
        """Number of bytes in the window."""
        return len(self.data)

    def offset_at(self, position: int) -> int:
        """Return the physical offset of the frame at a position."""
        if not self.is_unwrapped:
            return self.base + position
        return int(frame.HEAD.struct.unpack_from(self.data.data, position)[6])

    def decode(self, position: int, *, check_crc: bool = True) -> frame.Outcome:
        """Decode the frame at a position with the reference codec."""
        base = self.offset_at(position) - position if self.is_unwrapped else self.base
        return frame.decode_at(
            self.data.data, position, base=base, end=self.end, check_crc=check_crc
        )

    def frame_at(self, position: int) -> frame.Frame:
        """Decode the frame that a walk found at a position. The CRC of the frame is not checked
        again.
        """
        found = self.decode(position, check_crc=False)
        assert isinstance(found, frame.Frame), "the walk found a sound frame here"
        return found


def empty_rows(count: int) -> Rows:
    """Make a table of ``count`` rows with uninitialized values."""
    return np.empty((count, ROW_WIDTH), np.int32)


def walk(
    window: Window, position: int, stop: int, rows: Rows, *, check_crc: bool
) -> tuple[int, int, int]:
    """Check frame after frame, beginning with the frame at ``position``. The last frame is the last
    one that starts before ``stop``.

    Returns (number of frames, position after the last frame, code). The code tells why the walk
    ended there: REACHED_STOP, BLANK, NEED_MORE (the window ends inside a frame), TABLE_FULL or a
    :class:`~logquarry.format.frame.DamageKind`.
    """
    fast = kernels_if_worth()
    if fast is not None:
        count, position, code = fast.walk(
            window.address,
            position,
            stop,
            window.length,
            window.end,
            window.base,
            crc32_address(),
            check_crc,
            window.has_heads,
            rows,
        )
        return int(count), int(position), int(code)
    count = 0
    is_before = _left() > 0
    while position < stop:
        if count == len(rows):
            return count, position, TABLE_FULL
        if is_before and _left() <= 0:
            # The kernels check the other frames of the window. Do not return here: callers expect
            # that a walk ends before ``stop`` only if the table is full or the next frame is not
            # sound.
            more, position, code = walk(window, position, stop, rows[count:], check_crc=check_crc)
            return count + more, position, code
        place, code = position, REACHED_STOP
        if window.has_heads:
            place, code = _after_head(window, position)
            if place >= stop:
                position = place
                break
        if code == REACHED_STOP:
            code = check(window, place, rows[count], check_crc=check_crc)
        if code != REACHED_STOP:
            return count, position, code
        position = place + int(rows[count, SIZE])
        count += 1
    return count, position, REACHED_STOP


def _after_head(window: Window, position: int) -> tuple[int, int]:
    data, left = window.data.data, window.end - position
    if frame.has_entry_head_reference(data, position, base=window.base, left=left):
        return position + frame.ENTRY_HEAD.size, REACHED_STOP
    here = window.length - position
    if here >= frame.ENTRY_BLANK_SIZE and frame.starts_entry_blank(data, position):
        is_blank = frame.is_entry_blank_reference(data, position, left=left)
        return position, BLANK if is_blank else REACHED_STOP
    if here < frame.ENTRY_HEAD.size and here < left:
        return position, NEED_MORE
    return position, REACHED_STOP


def check(window: Window, position: int, row: Rows, *, check_crc: bool) -> int:
    """Check the frame at a position with the reference codec, and write the frame's row into
    ``row``. Returns a code of :func:`walk`; REACHED_STOP means that the frame is sound.
    """
    _done.frames += 1
    left, here = window.end - position, window.length - position
    if left < frame.BLANK.size:
        return int(frame.DamageKind.TRUNCATED)
    if here < frame.BLANK.size:
        return NEED_MORE
    if here < left:
        # The file continues after the window. decode_at reads no bytes after the frame, so it can
        # check the frame if the window contains the whole frame.
        needed = _bytes_needed(window, position)
        if needed > here:
            return NEED_MORE
    outcome = window.decode(position, check_crc=check_crc)
    if isinstance(outcome, frame.Damage):
        return int(outcome.kind)
    if isinstance(outcome, frame.Blank):
        return BLANK
    row[:] = row_of(position, outcome)
    body = len(outcome.body)
    read = body if is_inner_batch(outcome.sys_flag) else body // _COPIED
    _done.frames += (len(outcome.properties) + read) // _BYTES_PER_UNIT
    return REACHED_STOP


def row_of(position: int, found: frame.Frame) -> tuple[int, ...]:
    """Return the row of the table of frames that describes the frame at a position."""
    born, store = frame.host_sizes(found.sys_flag)
    body_at = frame.BODY_POSITION + born + store - 2 * frame.HOST_SIZE_V4
    topic_at = body_at + len(found.body) + (1 if found.magic == frame.MAGIC_V1 else 2)
    props_at = topic_at + len(found.topic) + frame.PROPERTIES_LENGTH.size
    return (
        *(position, found.size, body_at, len(found.body)),
        *(topic_at, len(found.topic), props_at, len(found.properties)),
    )


def _bytes_needed(window: Window, position: int) -> int:
    # A sound head states the size of the frame, and the check needs the whole frame. If the head is
    # damaged, the check fails at the head, so the check needs only the head.
    view = window.data.data
    size, magic = frame.BLANK.struct.unpack_from(view, position)
    if magic not in frame.MAGICS:
        return frame.BLANK.size
    if not frame.fixed_size(magic, 0) <= size <= window.end - position:
        return frame.BLANK.size
    if window.length - position < frame.HEAD.size:
        return frame.HEAD.size
    head = frame.HEAD.struct.unpack_from(view, position)
    sound = size >= frame.fixed_size(magic, head[7]) and head[6] == window.base + position
    return size if sound else frame.HEAD.size


def check_places(
    window: Window,
    places: Int64,
    sizes: Int32,
    *,
    check_crc: bool,
) -> tuple[Rows, Int32]:
    """Check the frames at given positions. Each frame must have the size that ``sizes`` states; the
    size 0 matches any frame. Returns the rows of the sound frames, and for each position a code of
    :func:`walk` (REACHED_STOP: sound).
    """
    rows = empty_rows(len(places) + 1)
    codes = np.empty(len(places), np.int32)
    fast = kernels_if_worth(len(places))
    if fast is not None:
        count = fast.check_places(
            window.address,
            window.length,
            window.end,
            window.base,
            crc32_address(),
            check_crc,
            places,
            sizes,
            rows,
            codes,
        )
        return rows[:count], codes
    count = 0
    for i, (place, size) in enumerate(zip(places.tolist(), sizes.tolist(), strict=True)):
        if not 0 <= place < window.end:
            codes[i] = frame.DamageKind.TRUNCATED
            continue
        code = check(window, place, rows[count], check_crc=check_crc)
        if code == REACHED_STOP and size not in (0, rows[count, SIZE]):
            code = frame.DamageKind.BAD_SIZE
        codes[i] = code
        count += code == REACHED_STOP
    return rows[:count], codes


def find_frame(window: Window, start: int, stop: int, *, check_crc: bool) -> tuple[int, int]:
    """Find the first sound frame that starts in ``[start, stop)`` (resync).

    Returns (position, REACHED_STOP). If the window is too short to check a position, returns
    (position, NEED_MORE). If there is no frame, returns (stop, TRUNCATED).
    """
    fast = kernels_if_worth((stop - start) // _BYTES_PER_UNIT)
    row = empty_rows(1)[0]
    if fast is not None:
        place, code = fast.find_frame(
            window.address,
            start,
            stop,
            window.length,
            window.end,
            window.base,
            crc32_address(),
            check_crc,
            row,
        )
        return int(place), int(code)
    for match in MAGIC.finditer(window.data.data, start + _AT_MAGIC, stop + _AT_MAGIC + 3):
        position = match.start() - _AT_MAGIC
        code = check(window, position, row, check_crc=check_crc)
        if code in (REACHED_STOP, NEED_MORE):
            return position, code
    if window.length < window.end:
        # The window may end inside a magic number. Then compare only the number's first byte, and
        # report NEED_MORE if this byte is right.
        last = min(stop, window.length - _AT_MAGIC)
        for unsure in range(max(start, window.length - frame.BLANK.size + 1), last):
            if window.data[unsure + _AT_MAGIC] == frame.MAGIC_V1 >> 24:
                return unsure, NEED_MORE
        if max(start, last) < stop:
            return max(start, last), NEED_MORE
    return stop, int(frame.DamageKind.TRUNCATED)


def last_nonzero(window: Window, start: int, stop: int) -> int:
    """Return the position after the last byte in ``[start, stop)`` that is not 0, or ``start``."""
    fast = kernels_if_worth((stop - start) // _BYTES_PER_UNIT)
    if fast is not None:
        return int(fast.last_nonzero(window.address, start, stop))
    # Search the new array that the comparison makes. The bytes of a live log can change during the
    # search, but this array cannot.
    found = np.flatnonzero(window.data[start:stop] != 0)
    return start + int(found[-1]) + 1 if len(found) else start


def damage_reason(window: Window, position: int, *, check_crc: bool) -> str:
    """Describe the damage at a position in words."""
    if window.has_heads:
        position, _ = _after_head(window, position)
    outcome: Any = window.decode(position, check_crc=check_crc)
    return outcome.reason if isinstance(outcome, frame.Damage) else "no frame"


_MOST_FRAMES: Final = 32
"""Maximum number of frames that :func:`first_frames` reads."""
_SEARCHED: Final = 64 << 20
"""Number of bytes that :func:`first_frames` searches at the start of a file."""


def head_offset(view: FileView) -> int | None:
    """Return the physical offset in a file's first frame; -1 if no frame is at the start.

    Return None if the file is too short, or begins with zeros or a blank.
    """
    size = frame.HEAD.size
    if view.size < size:
        return None
    head = bytes(view.head(size))
    if len(head) < size:
        return None
    fields = frame.HEAD.struct.unpack(head)
    if fields[1] in frame.MAGICS:
        return int(fields[6])
    return None if fields[1] == frame.MAGIC_BLANK or not any(head) else -1


def first_frames(
    view: FileView, start: int = 0, length: int = _SEARCHED
) -> Iterable[tuple[int, frame.Frame]]:
    """Yield the positions and frames of the first frames in a part of a file. The function
    does not compare a frame's PHYSICALOFFSET with the file's name, so it also works if the name is
    wrong.
    """
    stop = min(view.size - start, length, java.INT_MAX)
    data = view.window(start, stop)[:stop]
    position, count = 0, 0
    while count < _MOST_FRAMES and (match := MAGIC.search(data, position + _AT_MAGIC)):
        position = match.start() - _AT_MAGIC
        if position + frame.HEAD.size > len(data):
            return
        told = frame.HEAD.struct.unpack_from(data, position)[6]
        found = frame.decode_at(data, position, base=told - position)
        if isinstance(found, frame.Frame):
            yield start + position, found
            count += 1
            position += found.size
        else:
            position += 1
