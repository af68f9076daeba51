"""Prepares the frames of a walk for readers: removes lost frames, and splits inner batches.

A page that the walk has checked can be lost before the decoder reads the page. A lost page holds
``FILL`` (:mod:`logquarry.log.readable`). Data from lost pages must not reach the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np

from logquarry.errors import CorruptFrame
from logquarry.format import frame
from logquarry.format import rows as r
from logquarry.format.arrays import Int64
from logquarry.format.batch import is_inner_batch, queue_count, unwrap
from logquarry.format.sys_flag import DEFAULT_LIMIT
from logquarry.log import codec
from logquarry.log.codec import Rows, Window
from logquarry.log.readable import UNREADABLE, first_unreadable
from logquarry.log.walk import DamagedSpan, Run

T = TypeVar("T")


def is_lost(run: Run) -> bool:
    """Whether frames of the run were lost after the walk. Call this after decoding the frames."""
    view = run.view
    if view is None or not len(run.rows):
        return False
    start, length = run.start - run.base, run.end - run.start
    if view.reaches(start + length) and not view.unreadable:
        return False
    # A call of window() records which pages are lost.
    view.window(start, 1)
    if first_unreadable(view.unreadable, start, length) is None:
        return False
    return next(_lost_spans(run), None) is not None


def require_whole(run: Run) -> None:
    """Raise CorruptFrame for the first frame of the run that was lost after the walk."""
    if is_lost(run):
        raise _error(next(_lost_spans(run))[1])


def _error(span: DamagedSpan) -> CorruptFrame:
    return CorruptFrame(span.path, span.offset, f"{UNREADABLE}: {span.reason}", kind=UNREADABLE)


def _lost_spans(run: Run) -> Iterator[tuple[int, DamagedSpan]]:
    view = run.view
    assert view is not None, "a copy loses nothing"
    view.window(run.start - run.base, 1)
    ranges = view.unreadable
    for number, (position, size) in enumerate(run.rows[:, (0, r.SIZE)].tolist()):
        offset = run.window.base + position
        fault = first_unreadable(ranges, offset - run.base, size)
        if fault is not None:
            yield number, DamagedSpan(offset, size, UNREADABLE, fault.words, run.path)


def copied(run: Run, start: int = 0) -> Run | None:
    """Copy the sound frames of a run from ``start`` on; None if there are none.

    Raises CorruptFrame if a frame is lost and the read must not continue without it.
    """
    # Copy before the check: later losses of pages do not affect the copy.
    window = replace(run.window, data=run.window.data.copy())
    kept = run.rows[:, 0].astype(np.int64) + run.window.base >= start
    for number, span in _lost_spans(run):
        if kept[number] and not run.on_lost(span):
            raise _error(span)
        kept[number] = False
    return Run(window, run.rows[kept], run.path) if kept.any() else None


def decoded(runs: Iterable[Run], decode: Callable[[Run], Iterable[tuple[Rows, T]]]) -> Iterator[T]:
    """Decode runs of frames. If frames are lost, report the loss and decode the rest from a copy.

    ``decode`` yields parts of the run's rows, in their order, each with its decoded form.
    """
    for run in runs:
        left: Run | None = run
        while left is not None:
            done = 0
            try:
                for rows, item in decode(left):
                    if is_lost(left):
                        break
                    yield item
                    done = left.window.base + int(rows[-1, 0]) + int(rows[-1, r.SIZE])
            except Exception:
                # The decoder can fail at bytes that were lost after the walk.
                if not is_lost(left):
                    raise
            left = copied(left, done) if is_lost(left) else None


_COMPRESSED: Final = -1
_AT_SYS_FLAG: Final = frame.HEAD.offsets["sys_flag"]


def unwrapped(runs: Iterable[Run], *, limit: int = DEFAULT_LIMIT) -> Iterator[Run]:
    """Replace each inner batch of at most ``limit`` bytes by its messages, one row per message."""

    def decode(run: Run) -> Iterator[tuple[Rows, Run]]:
        found = unwrap_rows(run.window, run.rows, limit)
        yield run.rows, run if found is None else Run(*found, run.path)

    return decoded(runs, decode)


def unwrap_rows(window: Window, rows: Rows, limit: int) -> tuple[Window, Rows] | None:
    """Return the frames with inner batches split; None if there is no inner batch."""
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
    """Return the number of messages in each frame; None if no frame is an inner batch."""
    kernels = codec.kernels()
    if kernels is not None:
        rows = np.ascontiguousarray(rows)
        numbers = np.empty(len(rows), np.int64)
        inner, *_ = kernels.measure_inner(window.address, rows, len(rows), limit, numbers)
        if inner != _COMPRESSED:
            return np.maximum(numbers, 1) if inner else None
    starts = rows[:, r.POSITION].tolist()
    if not _has_inner_batch(window, starts):
        return None
    return np.array([len(unwrap(_frame_at(window, start), limit=limit)) for start in starts])


def queue_counts(window: Window, rows: Rows) -> Int64 | None:
    """Return how many queue offsets each frame uses (INNER_NUM); None if each frame uses one."""
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
    if not _has_inner_batch(window, starts):
        return None
    data = bytearray()
    made: list[tuple[int, ...]] = []
    for start in starts:
        for message in unwrap(_frame_at(window, start), limit=limit):
            made.append(codec.row_of(len(data), message))
            data += frame.encode(message)
    whole = np.frombuffer(data, np.uint8)
    return Window(whole, window.base, len(data), is_unwrapped=True), np.array(made, np.int32)


def _has_inner_batch(window: Window, starts: list[int]) -> bool:
    return any(is_inner_batch(_flag_at(window, start)) for start in starts)


def _frame_at(window: Window, start: int) -> frame.Frame:
    found = window.decode(start, check_crc=False)
    if not isinstance(found, frame.Frame):
        raise AssertionError("the walk found a sound frame here, the reference does not")
    return found


def _flag_at(window: Window, start: int) -> int:
    at = start + _AT_SYS_FLAG
    return int.from_bytes(window.data[at : at + 4].tobytes(), "big", signed=True)
