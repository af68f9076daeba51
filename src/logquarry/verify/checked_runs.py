"""The log as verify wants it: what each run of frames means, made beside their use.

A sound log is cut into stretches that are followed apart from each other, by threads
(:func:`followed_ahead`) or by tasks of Spark (:mod:`.sound_runs`). These are guesses, which the
walk takes or does not (:mod:`logquarry.scan.guided`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from logquarry.files.layout import StoreLayout
from logquarry.format.rows import POSITION, SIZE
from logquarry.scan import columns
from logquarry.scan.codec import Window
from logquarry.scan.follow import Followed, Follower, follow_run
from logquarry.scan.guided import G, guided
from logquarry.scan.stretches import STRETCH_BYTES, Stretch, stretches_ahead
from logquarry.scan.walk import (
    BlankSpan,
    DamagedSpan,
    ExpiredSpan,
    LogEnd,
    LogReader,
    Run,
)


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
        self._most = layout.config.max_message_size
        self._follower = Follower(layout.delay_levels_ms)

    def events(self) -> Iterator[G | Checked]:
        """Everything from the log's start to its end, in order; see :meth:`LogReader.events`."""
        for event in self._events:
            yield self._checked(event) if isinstance(event, Run) else event

    def _checked(self, run: Run) -> CheckedRun:
        """A run of the walk, which has looked at the CRCs."""
        findings = Findings(self._most)
        for window, followed in follow_run(self._follower, run):
            findings(window, followed)
        return findings.run(Stretch(run.start, run.end, len(run.rows)))


class Findings:
    """Collects what frames mean, and what is odd about them. For one run.

    Args:
        most: bytes of the largest frame that is not odd.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[Followed] = []
        self._oversized: list[tuple[int, int]] = []
        self._suspects: list[tuple[int, int]] = []

    def __call__(self, window: Window, followed: Followed) -> None:
        """Some more frames."""
        large = np.flatnonzero(followed.rows[:, SIZE] > self._most).tolist()
        self._oversized += _places(window, followed, large)
        self._suspects += _places(window, followed, columns.suspect_rows(window, followed.rows))
        self._parts.append(_kept(followed))

    def run(self, found: Stretch) -> CheckedRun:
        """All of it."""
        return CheckedRun(
            start=found.start,
            end=found.end,
            count=found.count,
            parts=tuple(self._parts),
            oversized=tuple(self._oversized),
            suspects=tuple(self._suspects),
        )


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
    """The sound stretches of a log as threads find them; see :func:`stretches_ahead`."""
    most = layout.config.max_message_size

    def make() -> Findings:
        return Findings(most)

    for found, findings in stretches_ahead(layout, stretch_bytes, make):
        yield findings.run(found)
