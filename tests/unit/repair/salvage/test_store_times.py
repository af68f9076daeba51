"""Store times that go back: a single wrong one, and a clock that was set back."""

from __future__ import annotations

import numpy as np
import pytest

from logquarry.repair.salvage.losses import StoreTimes


@pytest.mark.parametrize(
    ("times", "lowered", "raised"),
    [
        ([1, 2, 2, 3], {}, 0),
        ([1, 99, 3, 4], {1: 3}, 0),
        ([99, 2, 3], {0: 2}, 0),
        ([1, 2, 99], {}, 0),
        ([1, 2, 99, 2, 98, 3], {2: 2, 4: 3}, 0),
        ([10, 11, 5, 6, 12], {}, 2),
        ([10, 3, 11], {0: 3}, 0),
        ([9, 10, 3, 11], {}, 1),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 3, 9])
def test_which_times_are_corrected(
    times: list[int], lowered: dict[int, int], raised: int, step: int
) -> None:
    found = StoreTimes()
    for at in range(0, len(times), step):
        part = np.array(times[at : at + step], np.int64)
        found.take(np.arange(at, at + len(part)), part)
    found.finish()
    assert (found.lowered, found.raised) == (lowered, raised)


def test_no_message_has_no_time() -> None:
    found = StoreTimes()
    found.finish()
    assert (found.lowered, found.raised) == ({}, 0)
