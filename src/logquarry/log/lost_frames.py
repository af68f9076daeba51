"""Decodes frames from maps, and finds out afterwards whether pages were lost meanwhile.

The walk checks frames, and their bytes are read a second time when they are decoded. In between
the disk may fail, or another program may truncate the file. A lost page then holds ``FILL``
(:mod:`logquarry.log.readable`), so what was decoded from it must not reach the caller:
:func:`decoded` decodes the sound rest again, from a copy, and reports the lost frames as damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from logquarry.errors import CorruptFrame
from logquarry.format.frame import DamageKind
from logquarry.format.rows import SIZE
from logquarry.log.codec import Rows
from logquarry.log.readable import first_unreadable
from logquarry.log.walk import DamagedSpan, Run

T = TypeVar("T")

_KIND = DamageKind.UNREADABLE.label


def is_lost(run: Run) -> bool:
    """Whether bytes of the run's frames were lost since the walk. Ask it after you decode them."""
    view = run.view
    if view is None or not len(run.rows):
        return False
    start, length = run.start - run.base, run.end - run.start
    if view.reaches(start + length) and not view.unreadable:
        return False
    # Taking a window records which pages are lost.
    view.window(start, 1)
    if first_unreadable(view.unreadable, start, length) is None:
        return False
    return next(_lost_spans(run), None) is not None


def require_whole(run: Run) -> None:
    """Fail if a frame of the run was lost since the walk.

    Raises:
        CorruptFrame: for the first lost frame.
    """
    if is_lost(run):
        raise _error(next(_lost_spans(run))[1])


def _error(span: DamagedSpan) -> CorruptFrame:
    return CorruptFrame(span.path, span.offset, f"{_KIND}: {span.reason}", kind=_KIND)


def _lost_spans(run: Run) -> Iterator[tuple[int, DamagedSpan]]:
    """The number of each lost frame of a run, and the damage."""
    view = run.view
    assert view is not None, "a copy loses nothing"
    view.window(run.start - run.base, 1)
    ranges = view.unreadable
    for number, (position, size) in enumerate(run.rows[:, (0, SIZE)].tolist()):
        offset = run.window.base + position
        fault = first_unreadable(ranges, offset - run.base, size)
        if fault is not None:
            yield number, DamagedSpan(offset, size, _KIND, fault.words, run.path)


def copied(run: Run, start: int = 0) -> Run | None:
    """A copy of the frames from a physical offset on that are not lost; None if there is none.

    Raises:
        CorruptFrame: if a frame is lost and the read must not go on without it.
    """
    # Copy first: a page that is lost later does no harm.
    window = replace(run.window, data=run.window.data.copy())
    kept = run.rows[:, 0].astype(np.int64) + run.window.base >= start
    for number, span in _lost_spans(run):
        if kept[number] and not run.on_lost(span):
            raise _error(span)
        kept[number] = False
    return Run(window, run.rows[kept], run.path) if kept.any() else None


def decoded(runs: Iterable[Run], decode: Callable[[Run], Iterable[tuple[Rows, T]]]) -> Iterator[T]:
    """Decode runs of frames; lost frames are damage.

    Args:
        runs: from :func:`logquarry.log.batches.sound_runs`.
        decode: yields parts of the run's rows, in their order, each with its decoded form.

    Raises:
        CorruptFrame: if a frame is lost and the read must not go on without it.
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
                    done = left.window.base + int(rows[-1, 0]) + int(rows[-1, SIZE])
            except Exception:
                # Lost bytes are not sound frames: no decoder takes them.
                if not is_lost(left):
                    raise
            left = copied(left, done) if is_lost(left) else None
