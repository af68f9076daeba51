"""The bulk operations over log bytes, in two twins with one signature.

:func:`kernels_enabled` picks numba's (:mod:`logquarry.format.kernels`) or plain Python's, which
is the reference (:mod:`logquarry.format.frame`) in a loop. ``LOGQUARRY_KERNELS=off`` switches the
kernels off; without numba they are off by themselves.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from logquarry.format import frame
from logquarry.format.rows import BLANK, NEED_MORE, REACHED_STOP, ROW_WIDTH, SIZE, TABLE_FULL

if TYPE_CHECKING:
    from types import ModuleType


logger = logging.getLogger(__name__)

SWITCH = "LOGQUARRY_KERNELS"

Rows = npt.NDArray[np.int32]


@cache
def kernels() -> ModuleType | None:
    """The kernel module, or None where it is switched off or cannot be had."""
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        return None
    try:
        from logquarry.format import kernels as module
    except ImportError as error:
        logger.warning("numba is not there (%s): reading with plain Python, slowly", error)
        return None
    return module


def kernels_enabled() -> bool:
    """Whether the kernels are in use."""
    return kernels() is not None


def require_kernels() -> ModuleType:
    """The kernel module, for code that only runs with kernels."""
    module = kernels()
    assert module is not None, "only called if kernels_enabled()"
    return module


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of one log file, and where they stand.

    Attributes:
        data: the bytes.
        base: physical offset of the first one.
        end: index at which the file ends; beyond ``len(data)`` where there is more of it.
    """

    data: npt.NDArray[np.uint8]
    base: int
    end: int

    @classmethod
    def of(cls, data: bytes | memoryview, base: int, end: int | None = None) -> Window:
        """A window over some bytes; without ``end`` the file ends with them."""
        array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
        return cls(array, base, len(array) if end is None else end)

    @property
    def address(self) -> int:
        """Address of the first byte, good for as long as the window is alive."""
        return int(self.data.ctypes.data)

    @property
    def length(self) -> int:
        """Bytes that are there."""
        return len(self.data)

    def decode(self, position: int, *, check_crc: bool = True) -> frame.Outcome:
        """The reference's verdict on one place."""
        return frame.decode_at(
            self.data.data, position, base=self.base, end=self.end, check_crc=check_crc
        )


def empty_rows(count: int) -> Rows:
    """A table for ``count`` frames, not initialised."""
    return np.empty((count, ROW_WIDTH), np.int32)


def walk(
    window: Window, position: int, stop: int, rows: Rows, *, check_crc: bool
) -> tuple[int, int, int]:
    """Follow the chain from ``position``, taking frames that start before ``stop``.

    Returns (frames taken, position behind them, code): REACHED_STOP, BLANK, NEED_MORE,
    TABLE_FULL or a :class:`~logquarry.format.frame.DamageKind`.
    """
    fast = kernels()
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
            rows,
        )
        return int(count), int(position), int(code)
    count = 0
    while position < stop:
        if count == len(rows):
            return count, position, TABLE_FULL
        code = check(window, position, rows[count], check_crc=check_crc)
        if code != REACHED_STOP:
            return count, position, code
        position += int(rows[count, SIZE])
        count += 1
    return count, position, REACHED_STOP


def check(window: Window, position: int, row: Rows, *, check_crc: bool) -> int:
    """The verdict on one place as a code, in plain Python; fills ``row`` if it is a frame."""
    left, here = window.end - position, window.length - position
    if left < frame.BLANK.size:
        return int(frame.DamageKind.TRUNCATED)
    if here < frame.BLANK.size:
        return NEED_MORE
    if here < left:
        # decode_at looks at no more than a frame, so that it can be told that the file ends where
        # it does as soon as the window holds all that it will look at.
        needed = _bytes_needed(window, position)
        if needed > here:
            return NEED_MORE
    outcome = window.decode(position, check_crc=check_crc)
    if isinstance(outcome, frame.Damage):
        return int(outcome.kind)
    if isinstance(outcome, frame.Blank):
        return BLANK
    born, store = frame.host_sizes(outcome.sys_flag)
    body_at = frame.BODY_POSITION + born + store - 2 * frame.HOST_SIZE_V4
    topic_size = 1 if outcome.magic == frame.MAGIC_V1 else 2
    topic_at = body_at + len(outcome.body) + topic_size
    row[:] = (
        position,
        outcome.size,
        body_at,
        len(outcome.body),
        topic_at,
        len(outcome.topic),
        topic_at + len(outcome.topic) + frame.PROPERTIES_LENGTH.size,
        len(outcome.properties),
    )
    return REACHED_STOP


def _bytes_needed(window: Window, position: int) -> int:
    """How many bytes a verdict takes: the whole frame once its head is sound."""
    view = window.data.data
    size, magic = frame.BLANK.struct.unpack_from(view, position)
    if magic not in (frame.MAGIC_V1, frame.MAGIC_V2):
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
    places: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    *,
    check_crc: bool,
) -> tuple[Rows, npt.NDArray[np.int32]]:
    """The verdict on each of some places, as queue entries name them.

    Args:
        places: positions in the window.
        sizes: the size that the frame there must have; 0 for any.

    Returns:
        The rows of the sound frames, and a code for each place.
    """
    rows = empty_rows(len(places) + 1)
    codes = np.empty(len(places), np.int32)
    fast = kernels()
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
    """The first sound frame that starts in ``[start, stop)`` (resync).

    Returns:
        (place, REACHED_STOP) if there is one; (place, NEED_MORE) where the window ends before
        one can tell; else (stop, TRUNCATED).
    """
    fast = kernels()
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
    haystack = bytes(window.data[start : stop + frame.BLANK.size])
    magics = [magic.to_bytes(4, "big") for magic in (frame.MAGIC_V1, frame.MAGIC_V2)]
    at_magic = frame.HEAD.offsets["magic"]
    position = start
    while position < stop:
        hits = [haystack.find(magic, position - start + at_magic) for magic in magics]
        found = [hit - at_magic + start for hit in hits if hit >= 0]
        if not found or min(found) >= stop:
            break
        position = min(found)
        code = check(window, position, row, check_crc=check_crc)
        if code in (REACHED_STOP, NEED_MORE):
            return position, code
        position += 1
    if window.length < window.end:
        # In the last bytes of a window a place is told by what there is of its magic.
        last = min(stop, window.length - at_magic)
        for unsure in range(max(start, window.length - frame.BLANK.size + 1), last):
            if window.data[unsure + at_magic] == magics[0][0]:
                return unsure, NEED_MORE
        if max(start, last) < stop:
            return max(start, last), NEED_MORE
    return stop, int(frame.DamageKind.TRUNCATED)


def first_nonzero(window: Window, start: int, stop: int) -> int:
    """The first place in ``[start, stop)`` whose byte is not zero, or ``stop``."""
    fast = kernels()
    if fast is not None:
        return int(fast.first_nonzero(window.address, start, stop))
    found = np.flatnonzero(window.data[start:stop] != 0)  # a copy: a live log may change
    return start + int(found[0]) if len(found) else stop


def last_nonzero(window: Window, start: int, stop: int) -> int:
    """One past the last place in ``[start, stop)`` whose byte is not zero, or ``start``."""
    fast = kernels()
    if fast is not None:
        return int(fast.last_nonzero(window.address, start, stop))
    found = np.flatnonzero(window.data[start:stop] != 0)  # a copy: a live log may change
    return start + int(found[-1]) + 1 if len(found) else start


@cache
def crc32_address() -> int:
    """What the kernels take for the function that reckons a CRC."""
    from logquarry.format import native

    return native.crc32_address()


def damage_reason(window: Window, position: int, *, check_crc: bool) -> str:
    """What is wrong at a place, in words."""
    outcome: Any = window.decode(position, check_crc=check_crc)
    return outcome.reason if isinstance(outcome, frame.Damage) else "no frame"
