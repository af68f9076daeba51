"""The log as verify wants it: what each run of frames means, made beside their use.

A sound log is cut into stretches that are followed apart from each other, by threads
(:func:`followed_ahead`) or by tasks of Spark (:mod:`.sound_runs`). These are guesses, which the
walk takes or does not (:mod:`logquarry.scan.guided`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, Generic

import numpy as np

from logquarry.files.layout import StoreLayout
from logquarry.format.rows import POSITION, SIZE
from logquarry.scan import columns
from logquarry.scan.codec import Window
from logquarry.scan.follow import Followed, Follower, follow_run
from logquarry.scan.guided import G, guided
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


class CheckedRuns(Generic[G]):
    """Walks the log of a store, with its CRCs. For one walk.

    Args:
        layout: the store's files.
        bound: see :class:`LogReader`.
        live: whether a writer is at work.
        guesses: what was found apart from the walk, in the log's order.
        accept: whether a guess that begins where the walk is can be taken as it is.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        bound: int | None,
        live: bool,
        guesses: Iterable[G],
        accept: Callable[[G], bool],
    ) -> None:
        reader = LogReader(layout, bound=bound, live=live)
        self._events = guided(reader, () if live else guesses, accept)
        self._judge = _Judge(layout)

    def events(self) -> Iterator[G | Checked]:
        """Everything from the log's start to its end, in order; see :meth:`LogReader.events`."""
        for event in self._events:
            yield self._judge.run(event) if isinstance(event, Run) else event


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


def followed_ahead(layout: StoreLayout, stretch_bytes: int = STRETCH_BYTES) -> Iterator[CheckedRun]:
    """The stretches of a log as threads find them, a few ahead of who asks.

    None of a log of one stretch, which is not worth a thread. Whoever stops early closes it.
    """
    log = layout.commit_log
    if log.end - log.start <= stretch_bytes:
        return
    stretches = tiles(layout, stretch_bytes)
    coming: deque[tuple[int, Future[CheckedRun | None]]] = deque()
    # A thread needs a reader of its own, and any of them will do.
    idle: deque[StretchReader] = deque(StretchReader(layout) for _ in range(_THREADS))

    def read(start: int, stop: int) -> CheckedRun | None:
        reader = idle.pop()
        try:
            return reader.read(start, stop, resync=True)
        finally:
            idle.append(reader)

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="verify")
    rest = LogReader(layout)
    try:
        while True:
            for start, stop in islice(stretches, _MOST_AHEAD - len(coming)):
                coming.append((start, pool.submit(read, start, stop)))
            if not coming:
                return
            start, future = coming.popleft()
            run = future.result()
            if run is not None:
                yield run
            elif rest.data_end(start) <= start:
                # Nothing at all follows.
                return
    finally:
        pool.shutdown(cancel_futures=True)


def tiles(layout: StoreLayout, size: int) -> Iterator[tuple[int, int]]:
    """Stretches that tile the log: (from, to). None goes on beyond the end of its file."""
    room = layout.commit_log.file_size
    for file in layout.commit_log.files:
        for start in range(file.base, file.base + room, size):
            yield start, min(start + size, file.base + room)


class StretchReader:
    """Follows stretches of a log. For one thread at a time."""

    def __init__(self, layout: StoreLayout) -> None:
        self._log = layout.commit_log
        self._reader = LogReader(layout)
        self._follower = Follower(layout.delay_levels_ms, check_crc=True)
        self._judge = _Judge(layout)
        # Room for the last frame of a stretch, which goes on beyond it.
        self._more = layout.config.max_message_size

    def read(self, start: int, stop: int, *, resync: bool) -> CheckedRun | None:
        """The frames that start in a stretch, up to the first place where there is none.

        Args:
            start: where the stretch begins,
            stop: and ends, in the same file.
            resync: whether ``start`` may lie within a frame, unless a file begins there.

        Returns:
            None where no frame is found.
        """
        file = self._log.at(start)
        if file is None or not file.size:
            return None
        at: int | None = start
        if resync and start != file.base:
            at = self._reader.find(start, stop)
        if at is None:
            return None
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
            return None
        return CheckedRun(first, at, count, tuple(parts), tuple(oversized), tuple(suspects))
