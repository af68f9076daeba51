"""Takes inner batches of RocketMQ 5 apart: every bulk read gets one row per message.

A run of frames with an inner batch becomes a run of frames that stand alone
(:mod:`logquarry.format.batch`), in a window of their own; filters and columns read them as
they read the log. A run without an inner batch stays as it is, at the cost of reading its flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.format import frame
from logquarry.format import rows as r
from logquarry.format.batch import is_inner_batch, queue_count, unwrap
from logquarry.format.compression import DEFAULT_LIMIT
from logquarry.log import codec
from logquarry.log.codec import Rows, Window
from logquarry.log.lost_frames import decoded
from logquarry.log.walk import Run

Int64 = npt.NDArray[np.int64]

_COMPRESSED: Final = -1
_AT_SYS_FLAG: Final = frame.HEAD.offsets["sys_flag"]


def unwrapped(runs: Iterable[Run], *, limit: int = DEFAULT_LIMIT) -> Iterator[Run]:
    """The runs, with the messages of each inner batch in its place.

    Args:
        runs: runs of frames of the log.
        limit: maximum bytes of the messages of one batch; a larger batch stays one row.
    """

    def decode(run: Run) -> Iterator[tuple[Rows, Run]]:
        found = unwrap_rows(run.window, run.rows, limit)
        yield run.rows, run if found is None else Run(*found, run.path)

    return decoded(runs, decode)


def unwrap_rows(window: Window, rows: Rows, limit: int) -> tuple[Window, Rows] | None:
    """The frames of a window with inner batches taken apart; None if no frame is one."""
    kernels = codec.kernels()
    if kernels is None:
        return _unwrap_reference(window, rows, limit)
    rows = np.ascontiguousarray(rows)
    numbers = np.empty(len(rows), np.int64)
    inner, count, size = kernels.measure_inner(window.address, rows, len(rows), limit, numbers)
    if not inner:
        return None
    if inner == _COMPRESSED:
        return _unwrap_reference(window, rows, limit)
    data, made = np.empty(size, np.uint8), codec.empty_rows(count)
    crc32 = codec.crc32_address()
    kernels.unwrap_frames(window.address, rows, numbers, crc32, data, made)
    return Window(data, window.base, size, is_unwrapped=True), made


def message_counts(window: Window, rows: Rows, limit: int = DEFAULT_LIMIT) -> Int64 | None:
    """The number of messages in each frame; None if no frame is an inner batch."""
    kernels = codec.kernels()
    if kernels is not None:
        rows = np.ascontiguousarray(rows)
        numbers = np.empty(len(rows), np.int64)
        inner, *_ = kernels.measure_inner(window.address, rows, len(rows), limit, numbers)
        if inner != _COMPRESSED:
            return np.maximum(numbers, 1) if inner else None
    starts = rows[:, r.POSITION].tolist()
    if not any(is_inner_batch(_flag_at(window, start)) for start in starts):
        return None
    return np.array([len(unwrap(_frame_at(window, start), limit=limit)) for start in starts])


def queue_counts(window: Window, rows: Rows) -> Int64 | None:
    """The number of queue offsets that each frame takes (INNER_NUM); None if each takes one."""
    if message_counts(window, rows) is None:
        return None
    starts = rows[:, r.POSITION].tolist()
    return np.array(
        [
            queue_count(_frame_at(window, start)) if is_inner_batch(_flag_at(window, start)) else 1
            for start in starts
        ],
        np.int64,
    )


def _unwrap_reference(window: Window, rows: Rows, limit: int) -> tuple[Window, Rows] | None:
    starts = rows[:, r.POSITION].tolist()
    if not any(is_inner_batch(_flag_at(window, start)) for start in starts):
        return None
    data = bytearray()
    made: list[tuple[int, ...]] = []
    for start in starts:
        for message in unwrap(_frame_at(window, start), limit=limit):
            made.append(codec.row_of(len(data), message))
            data += frame.encode(message)
    whole = np.frombuffer(data, np.uint8)
    return Window(whole, window.base, len(data), is_unwrapped=True), np.array(made, np.int32)


def _frame_at(window: Window, start: int) -> frame.Frame:
    found = window.decode(start, check_crc=False)
    if not isinstance(found, frame.Frame):
        raise AssertionError("the walk found a sound frame here, the reference does not")
    return found


def _flag_at(window: Window, start: int) -> int:
    at = start + _AT_SYS_FLAG
    return int.from_bytes(window.data[at : at + 4].tobytes(), "big", signed=True)
