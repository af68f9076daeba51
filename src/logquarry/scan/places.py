"""Frames at given places, as consume queues and index name them, instead of a walk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from logquarry.files.filesystem import REMOTE_RANGE, FileView
from logquarry.files.layout import StoreFile, StoreLayout
from logquarry.format.frame import BLANK, FIXED_SIZE_V1, DamageKind
from logquarry.format.rows import NEED_MORE, REACHED_STOP
from logquarry.scan import codec
from logquarry.scan.codec import Window
from logquarry.scan.walk import DEFAULT_BATCH_BYTES, MISSING_FILE, DamagedSpan, Run

Offsets = npt.NDArray[np.int64]
Sizes = npt.NDArray[np.int32]


def runs_at(
    layout: StoreLayout,
    offsets: Offsets,
    sizes: Sizes,
    *,
    check_crc: bool = True,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
    any_size: bool = False,
) -> Iterator[Run | DamagedSpan]:
    """The frames at some physical offsets, in the order of the offsets.

    Args:
        layout: the store's files.
        offsets: physical offsets, ascending.
        sizes: the size that each frame must have; 0 for any.
        check_crc: whether bodies are compared with their CRC.
        batch_bytes: bytes of frames in one run, about.
        any_size: take sound frames also where ``sizes`` is wrong about them.

    A place where no such frame stands comes as a :class:`DamagedSpan`.
    """
    files = layout.commit_log
    start = 0
    while start < len(offsets):
        file = files.at(int(offsets[start]))
        if file is None:
            yield DamagedSpan(
                int(offsets[start]),
                int(sizes[start]),
                MISSING_FILE,
                "there is no file for this part of the log",
                layout.filesystem.full_path("commitlog"),
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
        # A live broker deletes what expired, also between a listing and a look.
        for offset, size in zip(offsets.tolist(), sizes.tolist(), strict=True):
            yield DamagedSpan(offset, size, MISSING_FILE, "the file was deleted", path)
        return
    room = layout.commit_log.file_size
    filled = np.cumsum(sizes, dtype=np.int64)
    start = 0
    while start < len(offsets):
        before = int(filled[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(filled, before + batch_bytes, "right")))
        first = int(offsets[start]) - file.base
        if not view.is_mapped:
            # One range is fetched for a batch: what lies between the frames comes with it.
            near = int(np.searchsorted(offsets, int(offsets[start]) + REMOTE_RANGE))
            stop = max(start + 1, min(stop, near))
        last = int(offsets[stop - 1]) - file.base + max(int(sizes[stop - 1]), FIXED_SIZE_V1)
        window = _window(view, file, first, last - first, room)
        if window.length < min(room, view.size) - first:
            stop, window = _whole_frames(view, file, window, offsets[start:stop], start, room)
        places = offsets[start:stop] - window.base
        wanted = np.zeros_like(sizes[start:stop]) if any_size else sizes[start:stop]
        rows, codes = codec.check_places(window, places, wanted, check_crc=check_crc)
        bad = np.flatnonzero(codes != REACHED_STOP)
        for i in bad.tolist():
            yield _span(window, int(places[i]), int(sizes[start + i]), int(codes[i]), path)
        if len(rows):
            yield Run(window, rows, path)
        start = stop


def _window(view: FileView, file: StoreFile, at: int, length: int, room: int) -> Window:
    data = view.window(at, length)[: max(0, room - at)]
    return Window.of(data, file.base + at, room - at)


def _whole_frames(
    view: FileView, file: StoreFile, window: Window, offsets: Offsets, start: int, room: int
) -> tuple[int, Window]:
    """How far the frames at some places lie in a window as a whole; at least the first one does.

    Returns the number of the first place that is left for the next window, and the window, which
    is made larger where the very first frame needs it.
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


def _span(window: Window, place: int, size: int, code: int, path: str) -> DamagedSpan:
    if code in (int(kind) for kind in DamageKind):
        kind = DamageKind(code).label
        reason = codec.damage_reason(window, place, check_crc=True)
    else:
        kind = DamageKind.TRUNCATED.label
        reason = "a blank, or a file that ends early, where the queue has a message"
    return DamagedSpan(window.base + place, size, kind, reason, path)
