"""Which queue offsets of frames of a batch queue are right (``audit.right_offsets``)."""

from __future__ import annotations

import numpy as np
import pytest

from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries
from logquarry.repair.audit.right_offsets import NO_PLACE, RightBases


def entries(bases: list[int]) -> BatchEntries:
    """Entries of frames with three messages each; the frame's number is its physical offset."""
    made = np.zeros(len(bases), BATCH_DTYPE)
    made["base"], made["count"] = bases, 3
    made["physical_offset"] = np.arange(len(bases))
    return made


@pytest.mark.parametrize(
    ("bases", "right", "moved"),
    [
        ([0, 3, 6, 9], [0, 3, 6, 9], {}),
        ([9, 12, 18, 21], [9, 12, 18, 21], {}),
        ([0, 3, 0, 3, 6], [0, 3, 0, 3, 6], {}),
        ([0, 3, 900, 9, 12], [0, 3, 6, 9, 12], {2: 6}),
        ([0, 3, 1, 9, 12], [0, 3, 6, 9, 12], {2: 6}),
        ([0, 3, 0, 9, 12], [0, 3, 6, 9, 12], {2: 6}),
        ([0, 3, -5, 9, 12], [0, 3, 6, 9, 12], {2: 6}),
        ([0, 3, 1, 15, 18], [0, 3, 6, 15, 18], {2: 6}),
        ([0, 3, 900, 15, 18], [0, 3, 6, 15, 18], {2: 6}),
        ([77, 6, 9], [3, 6, 9], {0: 3}),
        ([0, 3, 6, 2], [0, 3, 6, 9], {3: 9}),
        ([0, 3, 6, 0], [0, 3, 6, 0], {}),
        ([0, 3, 6, 1 << 40], [0, 3, 6, 9], {3: 9}),
        ([0, 3, 40, 6, 9], [0, 3, 6, 9], {2: NO_PLACE}),
        # The first frames of a topic that was created again are lost.
        ([0, 3, 6, 9, 3, 9, 12], [0, 3, 6, 9, 3, 9, 12], {}),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_right_bases(
    bases: list[int], right: list[int], moved: dict[int, int], at_once: int
) -> None:
    audit, log = RightBases(), entries(bases)
    parts = [audit.take(log[at : at + at_once]) for at in range(0, len(log), at_once)]
    found = np.concatenate([*parts, audit.settle()])
    assert found["base"].tolist() == right
    assert audit.moved == moved
    assert audit.following == right[-1] + 3


def test_entries_keep_their_byte_order() -> None:
    """A rebuild writes their bytes."""
    found = RightBases()
    parts = [found.take(entries([0])), found.take(entries([900])), found.take(entries([6, 9]))]
    assert [part.dtype for part in [*parts, found.settle()]] == [BATCH_DTYPE] * 4
