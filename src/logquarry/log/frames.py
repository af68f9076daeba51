"""Reads frames at given offsets, removes lost frames from runs, and splits inner batches in runs.

Each frame contains its own physical offset, so any thread or machine can read any part of a log.
But only a walk (:class:`LogReader`) determines whether a frame belongs to the log. A page of a
mapped file is lost if the disk fails after the walk has checked the page and before the decoder
reads it. The decoder then reads ``FILL`` bytes (:mod:`logquarry.log.readable`) in place of the
page. A frame with such bytes is a lost frame, and must not reach the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import numpy as np

from logquarry.errors import CorruptFrame
from logquarry.format import arrays as r
from logquarry.format import frame
from logquarry.format.arrays import NEED_MORE, REACHED_STOP, Int32, Int64
from logquarry.format.batch import is_inner_batch, queue_count, unwrap
from logquarry.format.frame import FIXED_SIZE_V1, DamageKind
from logquarry.format.sys_flag import DEFAULT_LIMIT
from logquarry.log import codec, walk
from logquarry.log.codec import Rows, Window
from logquarry.log.filesystem import REMOTE_RANGE, GoneFile
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import LogBytes
from logquarry.log.readable import UNREADABLE, first_unreadable
from logquarry.log.store_files import StoreFile
from logquarry.log.walk import DamagedSpan, Event, LogReader, Run


class Guess(Protocol):
    """A run of frames that another thread or machine found without a walk from the log's start."""

    @property
    def start(self) -> int:
        """Physical offset of the first frame."""

    @property
    def end(self) -> int:
        """Physical offset after the last frame."""


G = TypeVar("G", bound=Guess)


def guided(
    reader: LogReader, guesses: Iterable[G], accept: Callable[[G], bool] = lambda _: True
) -> Iterator[Event | G]:
    """Walk the whole log in order. If the walk reaches the start of a guess, yield the guess, and
    skip the frames in it.

    ``guesses`` must be in the order of the log. If ``accept`` returns False for a guess, the walk
    reads the frames of the guess itself. No writer may have the store open.
    """
    position = reader.files.start
    for guess in guesses:
        if guess.start < position:
            continue
        if guess.start > position:
            may_guess = True
            for event in reader.events(position):
                yield event
                if isinstance(event, walk.LogEnd):
                    return
                position = event.end
                may_guess &= _may_guess_behind(event)
                if may_guess and position >= guess.start:
                    break
        if guess.start == position and accept(guess):
            yield guess
            position = guess.end
    yield from reader.events(position)


def _may_guess_behind(event: Event) -> bool:
    """Whether a new walk from the event's end would report the same events as the current walk.

    If the events would differ, the walk must not use a guess after this event.
    """
    if isinstance(event, DamagedSpan):
        return not (event.ends_log or event.is_tail)
    return not isinstance(event, walk.ExpiredSpan)


# --------------------------------------------------------------------------------------------------
# Frames at given offsets

Offsets = Int64
Sizes = Int32


def runs_at(
    layout: StoreLayout,
    offsets: Offsets,
    sizes: Sizes,
    *,
    check_crc: bool = True,
    batch_bytes: int = walk.DEFAULT_BATCH_BYTES,
    any_size: bool = False,
) -> Iterator[Run | DamagedSpan]:
    """Read the frames at ascending physical offsets. If an offset has no sound frame, the function
    yields a :class:`DamagedSpan`.

    A frame must be as long as ``sizes`` states, unless the stated size is 0 or ``any_size`` is set.
    """
    log = LogBytes(layout, check_crc=check_crc, batch_bytes=batch_bytes)
    start = 0
    while start < len(offsets):
        offset = int(offsets[start])
        file = log.files.at(offset)
        if file is None:
            reason = layout.why_no_log_file(layout.log_file(offset)) or walk.NO_FILE
            path = layout.log_path(offset)
            yield DamagedSpan(offset, int(sizes[start]), walk.MISSING_FILE, reason, path)
            start += 1
            continue
        stop = int(np.searchsorted(offsets, file.base + log.files.file_size))
        yield from _in_file(log, file, offsets[start:stop], sizes[start:stop], any_size)
        start = stop


def _in_file(
    log: LogBytes, file: StoreFile, offsets: Offsets, sizes: Sizes, any_size: bool
) -> Iterator[Run | DamagedSpan]:
    path = log.layout.filesystem.full_path(file.path)
    view = log.view(file)
    if isinstance(view, GoneFile):
        # A live broker may delete the file after the listing.
        reason = log.layout.why_no_log_file(file.path) or "the file was deleted"
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            yield DamagedSpan(offset, size, walk.MISSING_FILE, reason, path)
        return
    filled = np.cumsum(sizes, dtype=np.int64)
    start = 0
    while start < len(offsets):
        before = int(filled[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(filled, before + log.batch_bytes, "right")))
        first = int(offsets[start]) - file.base
        if not view.is_mapped:
            # Read all frames of the batch with one request, including the bytes between them.
            near = int(np.searchsorted(offsets, int(offsets[start]) + REMOTE_RANGE))
            stop = max(start + 1, min(stop, near))
        last = int(offsets[stop - 1]) - file.base + max(int(sizes[stop - 1]), FIXED_SIZE_V1)
        window = log.window_of(file, first, last - first)
        if window.length < min(log.files.file_size, view.size) - first:
            count, window = _whole_frames(log, file, window, offsets[start:stop])
            stop = start + count
        places = offsets[start:stop] - window.base
        wanted = np.zeros_like(sizes[start:stop]) if any_size else sizes[start:stop]
        rows, codes = codec.check_places(window, places, wanted, check_crc=log.check_crc)
        is_sound, is_readable = codes == REACHED_STOP, np.ones(len(codes), np.bool_)
        # Frames can have unreadable bytes only if the file has some.
        for i, offset in enumerate(offsets[start:stop].tolist() if view.unreadable else ()):
            fault = log.frame_fault(file, offset - file.base)
            if fault is not None:
                is_readable[i] = False
                yield DamagedSpan(offset, int(sizes[start + i]), UNREADABLE, fault.words, path)
        for i in np.flatnonzero(is_readable & ~is_sound).tolist():
            yield _span(window, int(places[i]), int(sizes[start + i]), int(codes[i]), path)
        if not is_readable.all():
            rows = rows[is_readable[is_sound]]
        if len(rows):
            yield Run(window, rows, path, view if view.is_mapped else None, file.base)
        start = stop


def _whole_frames(
    log: LogBytes, file: StoreFile, window: Window, offsets: Offsets
) -> tuple[int, Window]:
    """Return how many of the frames at ``offsets`` the window contains completely, and the window.

    If even the first frame is not completely in the window, return a larger window that contains
    this frame.
    """
    none = np.zeros(len(offsets), np.int32)
    _, codes = codec.check_places(window, offsets - window.base, none, check_crc=False)
    cut = np.flatnonzero(codes == NEED_MORE)
    if not len(cut):
        return len(offsets), window
    if cut[0] > 0:
        return int(cut[0]), window
    return 1, log.whole_frame(file, window.base - file.base)[0]


def _span(window: Window, place: int, size: int, code: int, path: str) -> DamagedSpan:
    if code in (int(kind) for kind in DamageKind):
        kind = DamageKind(code).label
        reason = codec.damage_reason(window, place, check_crc=True)
    else:
        kind = DamageKind.TRUNCATED.label
        reason = "a blank, or the end of a short file, in place of the queue's message"
    return DamagedSpan(window.base + place, size, kind, reason, path)


T = TypeVar("T")


def is_lost(run: Run) -> bool:
    """Whether frames of the run were lost after the walk. Call this after decoding the frames,
    because a page can be lost during the decoding too.
    """
    view = run.view
    if view is None or not len(run.rows):
        return False
    start, length = run.start - run.base, run.end - run.start
    if view.reaches(start + length) and not view.unreadable:
        return False
    # This call of window() adds lost pages to view.unreadable. Its result is not needed.
    view.window(start, 1)
    if first_unreadable(view.unreadable, start, length) is None:
        return False
    return next(_lost_spans(run), None) is not None


def require_whole(run: Run) -> None:
    """Raise CorruptFrame for the run's first lost frame if frames were lost after the walk."""
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
    """Copy a run's frames, beginning at physical offset ``start``. Leave out lost frames.

    Return None if all are lost.

    Raises CorruptFrame if a frame is lost and the run's ``on_lost`` does not allow the read to
    continue without the frame.
    """
    # Copy first, then check, because the check must also find a page that is lost during the copy.
    window = replace(run.window, data=run.window.data.copy())
    kept = run.rows[:, 0].astype(np.int64) + run.window.base >= start
    for number, span in _lost_spans(run):
        if kept[number] and not run.on_lost(span):
            raise _error(span)
        kept[number] = False
    return Run(window, run.rows[kept], run.path) if kept.any() else None


def decoded(runs: Iterable[Run], decode: Callable[[Run], Iterable[tuple[Rows, T]]]) -> Iterator[T]:
    """Decode runs of frames.

    If frames were lost after the walk, report the loss, and decode the other frames from a copy.
    ``decode`` divides the run's rows into parts, in order, and yields the rows and the messages of
    each part.
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
                # The decoder can raise an error at FILL bytes of lost pages.
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
    kernels = codec.kernels_if_worth(len(rows))
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
    kernels = codec.kernels_if_worth(len(rows))
    if kernels is not None:
        rows = np.ascontiguousarray(rows)
        numbers = np.empty(len(rows), np.int64)
        inner, *_ = kernels.measure_inner(window.address, rows, len(rows), limit, numbers)
        if inner != _COMPRESSED:
            return np.maximum(numbers, 1) if inner else None
    starts = rows[:, r.POSITION].tolist()
    if not _has_inner_batch(window, starts):
        return None
    return np.array([len(unwrap(window.frame_at(start), limit=limit)) for start in starts])


def queue_counts(window: Window, rows: Rows) -> Int64 | None:
    """Return how many queue offsets each frame takes: INNER_NUM for an inner batch, else one. None
    if there is no inner batch.
    """
    if message_counts(window, rows) is None:
        return None
    starts = rows[:, r.POSITION].tolist()
    return np.array(
        [
            queue_count(window.frame_at(start)) if is_inner_batch(_flag_at(window, start)) else 1
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
        for message in unwrap(window.frame_at(start), limit=limit):
            made.append(codec.row_of(len(data), message))
            data += frame.encode(message)
    whole = np.frombuffer(data, np.uint8)
    return Window(whole, window.base, len(data), is_unwrapped=True), np.array(made, np.int32)


def _has_inner_batch(window: Window, starts: list[int]) -> bool:
    return any(is_inner_batch(_flag_at(window, start)) for start in starts)


def _flag_at(window: Window, start: int) -> int:
    at = start + _AT_SYS_FLAG
    return int.from_bytes(window.data[at : at + 4].tobytes(), "big", signed=True)
