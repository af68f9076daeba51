"""Reads frames at given offsets, and merges runs of frames from other threads into a walk.

A frame has its physical offset, so other threads or machines can read any part of a log. But only
the walk (:class:`LogReader`) decides whether a frame belongs to the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import numpy as np

from logquarry.format.arrays import Int32, Int64
from logquarry.format.frame import BLANK, FIXED_SIZE_V1, DamageKind
from logquarry.format.rows import NEED_MORE, REACHED_STOP, SIZE
from logquarry.log import codec, walk
from logquarry.log.codec import Rows, Window
from logquarry.log.filesystem import REMOTE_RANGE, FileView
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import UNREADABLE, Unreadable, first_unreadable
from logquarry.log.store_files import StoreFile
from logquarry.log.walk import DamagedSpan, Event, LogReader, Run


class Guess(Protocol):
    """A run of frames that another thread or machine found."""

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
    """Walk the whole log in order, and take a guess instead of walking if it begins at the
    position.

    ``guesses`` are in the order of the log. ``accept`` may reject a guess. No writer has the store
    open.
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
                position = _behind(event)
                may_guess &= _may_guess_behind(reader, event)
                if may_guess and position >= guess.start:
                    break
        if guess.start == position and accept(guess):
            yield guess
            position = guess.end
    yield from reader.events(position)


def _may_guess_behind(reader: LogReader, event: Event) -> bool:
    """Whether a new walk from the event's end would report the same events as the current walk."""
    if isinstance(event, DamagedSpan):
        return reader.forgets_damage and not event.is_tail
    return not isinstance(event, walk.ExpiredSpan)


def _behind(event: Run | walk.BlankSpan | DamagedSpan | walk.ExpiredSpan) -> int:
    if isinstance(event, Run | walk.BlankSpan):
        return event.end
    return event.offset + event.length


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
    """Read the frames at ascending physical offsets. A missing frame gives a :class:`DamagedSpan`.

    A frame must have its size in ``sizes``, unless this size is 0 or ``any_size`` is set.
    """
    files = layout.commit_log
    start = 0
    while start < len(offsets):
        file = files.at(int(offsets[start]))
        if file is None:
            yield DamagedSpan(
                int(offsets[start]),
                int(sizes[start]),
                walk.MISSING_FILE,
                "there is no file for this part of the log",
                layout.log_path(int(offsets[start])),
            )
            start += 1
            continue
        stop = int(np.searchsorted(offsets, file.base + files.file_size))
        yield from _in_file(
            layout, file, offsets[start:stop], sizes[start:stop], check_crc, batch_bytes, any_size
        )
        start = stop


def _in_file(
    layout: StoreLayout,
    file: StoreFile,
    offsets: Offsets,
    sizes: Sizes,
    check_crc: bool,
    batch_bytes: int,
    any_size: bool,
) -> Iterator[Run | DamagedSpan]:
    path = layout.filesystem.full_path(file.path)
    try:
        view = layout.open_file(file.path)
    except FileNotFoundError:
        # A live broker may delete the file after the listing.
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            yield DamagedSpan(offset, size, walk.MISSING_FILE, "the file was deleted", path)
        return
    room = layout.commit_log.file_size
    filled = np.cumsum(sizes, dtype=np.int64)
    start = 0
    while start < len(offsets):
        before = int(filled[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(filled, before + batch_bytes, "right")))
        first = int(offsets[start]) - file.base
        if not view.is_mapped:
            # One fetch reads the frames of the batch and the bytes between the frames.
            near = int(np.searchsorted(offsets, int(offsets[start]) + REMOTE_RANGE))
            stop = max(start + 1, min(stop, near))
        last = int(offsets[stop - 1]) - file.base + max(int(sizes[stop - 1]), FIXED_SIZE_V1)
        window = _window(view, file, first, last - first, room)
        if window.length < min(room, view.size) - first:
            stop, window = _whole_frames(view, file, window, offsets[start:stop], start, room)
        places = offsets[start:stop] - window.base
        wanted = np.zeros_like(sizes[start:stop]) if any_size else sizes[start:stop]
        rows, codes = codec.check_places(window, places, wanted, check_crc=check_crc)
        hidden = _hidden(view, file, window, places, rows, codes)
        for i, fault in hidden.items():
            offset = window.base + int(places[i])
            yield DamagedSpan(offset, int(sizes[start + i]), UNREADABLE, fault.words, path)
        if hidden:
            sound = np.flatnonzero(codes == REACHED_STOP)
            rows = rows[[number for number, i in enumerate(sound.tolist()) if i not in hidden]]
        bad = np.flatnonzero(codes != REACHED_STOP)
        for i in bad.tolist():
            if i in hidden:
                continue
            yield _span(window, int(places[i]), int(sizes[start + i]), int(codes[i]), path)
        if len(rows):
            yield Run(window, rows, path, view if view.is_mapped else None, file.base)
        start = stop


def _window(view: FileView, file: StoreFile, at: int, length: int, room: int) -> Window:
    data = view.window(at, length)[: max(0, room - at)]
    return Window.of(data, file.base + at, room - at)


def _whole_frames(
    view: FileView, file: StoreFile, window: Window, offsets: Offsets, start: int, room: int
) -> tuple[int, Window]:
    """Return the number of the first frame after the window, and the window.

    If even the first frame is not entirely in the window, the window is enlarged.
    """
    none = np.zeros(len(offsets), np.int32)
    _, codes = codec.check_places(window, offsets - window.base, none, check_crc=False)
    cut = np.flatnonzero(codes == NEED_MORE)
    if not len(cut):
        return start + len(offsets), window
    if cut[0] > 0:
        return start + int(cut[0]), window
    size = BLANK.size
    if window.length >= BLANK.size:
        size, _ = BLANK.struct.unpack_from(window.data.data, 0)
    at = window.base - file.base
    return start + 1, _window(view, file, at, min(max(size, FIXED_SIZE_V1), room - at), room)


def _hidden(
    view: FileView,
    file: StoreFile,
    window: Window,
    places: Offsets,
    rows: Rows,
    codes: Int32,
) -> dict[int, Unreadable]:
    """Return place number -> unreadable range that overlaps the frame at this place."""
    if not view.unreadable:
        return {}
    lengths = np.full(len(places), FIXED_SIZE_V1, np.int64)
    lengths[codes == REACHED_STOP] = rows[:, SIZE]
    found: dict[int, Unreadable] = {}
    for i, place in enumerate(places.tolist()):
        at, length = window.base - file.base + place, int(lengths[i])
        if codes[i] != REACHED_STOP:
            head = bytes(view.window(at, BLANK.size)[: BLANK.size]).ljust(BLANK.size, b"\0")
            size, _ = BLANK.struct.unpack(head)
            if FIXED_SIZE_V1 <= size <= window.end - place:
                length = size
        fault = first_unreadable(view.unreadable, at, length)
        if fault is not None:
            found[i] = fault
    return found


def _span(window: Window, place: int, size: int, code: int, path: str) -> DamagedSpan:
    if code in (int(kind) for kind in DamageKind):
        kind = DamageKind(code).label
        reason = codec.damage_reason(window, place, check_crc=True)
    else:
        kind = DamageKind.TRUNCATED.label
        reason = "a blank, or the end of a short file, in place of the queue's message"
    return DamagedSpan(window.base + place, size, kind, reason, path)
