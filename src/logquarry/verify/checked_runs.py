"""The log as verify wants it: what each run of frames means, made by threads beside their use.

A sound log is cut into stretches that are followed apart from each other, each by the thread that
is free: a frame names its place, so that a stretch finds its first frame by itself. That is only
guessed: a stretch counts if the walk comes to where its first frame begins. Where it does not,
and wherever a stretch meets what is no frame, the walk (:class:`LogReader`) goes on alone, and
says what is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from logquarry.files.layout import StoreLayout
from logquarry.format.rows import POSITION, SIZE
from logquarry.scan import columns
from logquarry.scan.codec import Window
from logquarry.scan.follow import Followed, Follower, follow_run
from logquarry.scan.walk import (
    BlankSpan,
    DamagedSpan,
    ExpiredSpan,
    LogEnd,
    LogReader,
    Run,
)

STRETCH_BYTES: Final = 8 << 20
_THREADS: Final = 2
_MOST_AHEAD: Final = 4


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Sound frames one after the other.

    Attributes:
        start: physical offset of the first,
        end: and behind the last.
        count: how many.
        parts: what they mean.
        oversized: physical offset and size of each that is larger than maxMessageSize,
        suspects: and of each whose topic or properties are no text.
    """

    start: int
    end: int
    count: int
    parts: tuple[Followed, ...]
    oversized: tuple[tuple[int, int], ...]
    suspects: tuple[tuple[int, int], ...]


Checked = CheckedRun | BlankSpan | DamagedSpan | ExpiredSpan | LogEnd


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What was found between two offsets.

    Attributes:
        start: where its first frame begins; None where none does.
        run: the frames from there on, as far as they go.
    """

    start: int | None
    run: CheckedRun | None


class CheckedRuns:
    """Walks the log of a store, with its CRCs. For one walk.

    Args:
        layout: the store's files.
        bound: see :class:`LogReader`.
        live: whether a writer is at work.
        stretch_bytes: what is followed in one go.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        bound: int | None,
        live: bool,
        stretch_bytes: int = STRETCH_BYTES,
    ) -> None:
        self._layout = layout
        self._reader = LogReader(layout, bound=bound, live=live)
        self._bytes = stretch_bytes
        self._live = live
        self._is_small = layout.commit_log.end - layout.commit_log.start <= stretch_bytes
        self._judge = _Judge(layout)

    def events(self) -> Iterator[Checked]:
        """Everything from the log's start to its end, in order; see :meth:`LogReader.events`."""
        position = self._layout.commit_log.start
        # A writer's files come and go.
        if not self._live and not self._is_small:
            guesses = _Guesses(self._layout, self._bytes)
            try:
                while (stretch := guesses.next()) is not None:
                    if stretch.start is None:
                        break
                    if stretch.start < position:
                        continue
                    if stretch.start > position:
                        may_guess = True
                        for event in self._plain(position):
                            yield event
                            if isinstance(event, LogEnd):
                                return
                            position = _behind(event)
                            may_guess &= self._may_guess_behind(event)
                            if may_guess and position >= stretch.start:
                                break
                    if stretch.start == position and stretch.run is not None:
                        yield stretch.run
                        position = stretch.run.end
            finally:
                guesses.end()
        yield from self._plain(position)

    def _may_guess_behind(self, event: Checked) -> bool:
        """Whether a walk that begins behind an event says the same as one that came there."""
        if isinstance(event, DamagedSpan):
            return self._reader.forgets_damage and not event.is_tail
        return not isinstance(event, ExpiredSpan)

    def _plain(self, position: int) -> Iterator[Checked]:
        for event in self._reader.events(position):
            yield self._judge.run(event) if isinstance(event, Run) else event


def _behind(event: CheckedRun | BlankSpan | DamagedSpan | ExpiredSpan) -> int:
    if isinstance(event, CheckedRun | BlankSpan):
        return event.end
    return event.offset + event.length


class _Judge:
    """Says what frames mean. For one thread."""

    def __init__(self, layout: StoreLayout) -> None:
        self._most = layout.config.max_message_size
        self._follower = Follower(layout.delay_levels_ms)

    def run(self, run: Run) -> CheckedRun:
        """A run of the walk, which has looked at the CRCs."""
        parts, oversized, suspects = [], [], []
        for window, followed in follow_run(self._follower, run):
            parts.append(_kept(followed))
            oversized += self.oversized(window, followed)
            suspects += self.suspects(window, followed)
        return CheckedRun(
            run.start, run.end, len(run.rows), tuple(parts), tuple(oversized), tuple(suspects)
        )

    def oversized(self, window: Window, followed: Followed) -> list[tuple[int, int]]:
        rows = followed.rows
        return _places(window, followed, np.flatnonzero(rows[:, SIZE] > self._most).tolist())

    def suspects(self, window: Window, followed: Followed) -> list[tuple[int, int]]:
        return _places(window, followed, columns.suspect_rows(window, followed.rows))


def _places(window: Window, followed: Followed, which: list[int]) -> list[tuple[int, int]]:
    rows = followed.rows
    return [(window.base + int(rows[row, POSITION]), int(rows[row, SIZE])) for row in which]


def _kept(followed: Followed) -> Followed:
    """What a follower gives is good until its next call."""
    return replace(
        followed,
        rows=followed.rows[:0],
        key_hashes=followed.key_hashes.copy(),
        key_numbers=followed.key_numbers.copy(),
    )


class _Guesses:
    """Follows the stretches of a log, a few ahead of who asks."""

    def __init__(self, layout: StoreLayout, stretch_bytes: int) -> None:
        self._layout = layout
        self._stretches = _cut(layout, stretch_bytes)
        self._coming: deque[Future[_Stretch]] = deque()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="verify")
        # A thread needs a reader and a follower of its own, and any of them will do.
        self._idle: deque[_StretchReader] = deque()

    def next(self) -> _Stretch | None:
        """The next stretch, None behind the last."""
        while len(self._coming) < _MOST_AHEAD:
            stretch = next(self._stretches, None)
            if stretch is None:
                break
            self._coming.append(self._pool.submit(self._read, *stretch))
        return self._coming.popleft().result() if self._coming else None

    def end(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, start: int, stop: int) -> _Stretch:
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = _StretchReader(self._layout)
        try:
            return reader.read(start, stop)
        finally:
            self._idle.append(reader)


def _cut(layout: StoreLayout, size: int) -> Iterator[tuple[int, int]]:
    """Stretches that tile the log; none goes on beyond the end of its file."""
    room = layout.commit_log.file_size
    for file in layout.commit_log.files:
        for start in range(file.base, file.base + room, size):
            yield start, min(start + size, file.base + room)


class _StretchReader:
    """Follows stretches. For one thread at a time."""

    def __init__(self, layout: StoreLayout) -> None:
        self._log = layout.commit_log
        self._reader = LogReader(layout)
        self._follower = Follower(layout.delay_levels_ms, check_crc=True)
        self._judge = _Judge(layout)
        # Room for the last frame of a stretch, which goes on beyond it.
        self._more = layout.config.max_message_size

    def read(self, start: int, stop: int) -> _Stretch:
        file = self._log.at(start)
        if file is None or not file.size:
            return _Stretch(start, None)
        at: int | None = start
        if start != file.base:
            at = self._reader.find(start, stop)
            if at is None:
                # A frame may be larger than a stretch, and what is no frame is the walk's.
                return _Stretch(None if self._is_empty(start) else stop, None)
        assert at is not None
        first, count = at, 0
        parts: list[Followed] = []
        oversized: list[tuple[int, int]] = []
        suspects: list[tuple[int, int]] = []
        window = self._reader.window(at, stop - at + self._more)
        while at < stop:
            done = at - window.base
            rest = Window(window.data[done:], at, window.end - done)
            followed, after, _ = self._follower.follow(rest, stop - at)
            if followed is None:
                break
            parts.append(_kept(followed))
            oversized += self._judge.oversized(rest, followed)
            suspects += self._judge.suspects(rest, followed)
            count += len(followed.rows)
            at += after
        if not count:
            return _Stretch(first, None)
        run = CheckedRun(first, at, count, tuple(parts), tuple(oversized), tuple(suspects))
        return _Stretch(first, run)

    def _is_empty(self, start: int) -> bool:
        """Whether nothing at all follows: the rest of the log is for the walk to look at."""
        return self._reader.data_end(start) <= start
