"""Lost messages of a queue: which queue offsets are missing, and which are wrong."""

from __future__ import annotations

import numpy as np
import pytest

from logquarry.repair.salvage.losses import QueueNotes, merged, ranges_of


def notes(*offsets: int) -> QueueNotes:
    made = QueueNotes(offsets[0])
    for at in range(0, len(offsets), 3):
        part = np.array(offsets[at : at + 3], np.int64)
        made.take(np.arange(at, at + len(part)) * 100, part)
    return made


@pytest.mark.parametrize(
    ("offsets", "first", "end", "gaps", "lives", "mended"),
    [
        ((0, 1, 2, 3), 0, 4, (), 1, {}),
        ((5, 6, 9, 10), 5, 11, ((7, 9),), 1, {}),
        ((5, 6, 0, 1), 0, 2, (), 2, {}),
        ((0, 1, 900, 3, 4), 0, 5, (), 1, {200: 2}),
        ((0, 1, 900, 5, 6), 0, 7, ((3, 5),), 1, {200: 2}),
        ((6, 7, 0, 9, 10), 6, 11, (), 1, {200: 8}),
        ((0, 1, 1 << 60), 0, 3, (), 1, {200: 2}),
        ((-5, 1, 2), 0, 3, (), 1, {0: 0}),
        ((1 << 48, 1, 2), 0, 3, (), 1, {0: 0}),
        ((900, 6, 7, 9), 5, 10, ((8, 9),), 1, {0: 5}),
        ((900, 6, 900, 8), 5, 9, (), 1, {0: 5, 200: 7}),
        ((900, 0, 1), 0, 2, (), 2, {}),
        ((0, 1, 2, -(1 << 62), 4), 0, 5, (), 1, {300: 3}),
    ],
)
def test_the_story_of_a_queue(
    offsets: tuple[int, ...],
    first: int,
    end: int,
    gaps: tuple[tuple[int, int], ...],
    lives: int,
    mended: dict[int, int],
) -> None:
    story = notes(*offsets).story()
    assert (story.first, story.next, story.gaps, story.lives, story.mended) == (
        first,
        end,
        gaps,
        lives,
        mended,
    )


def test_more_missing_than_anybody_can_pad_is_refused() -> None:
    with pytest.raises(ValueError, match="one of them is invalid"):
        notes(0, 1, 1 << 40, (1 << 40) + 1).story()


def test_ranges() -> None:
    assert ranges_of(np.array([4, 1, 2, 2, 9])) == [(1, 3), (4, 5), (9, 10)]
    assert ranges_of(np.array([], np.int64)) == []
    assert merged([(3, 5), (0, 2), (2, 4), (9, 10)]) == [(0, 5), (9, 10)]
