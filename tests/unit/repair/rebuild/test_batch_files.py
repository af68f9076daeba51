"""Rebuilt batch queues of topics that were deleted and created again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logquarry.disk.disk import Disk
from logquarry.format.batch import ENTRY_SIZE
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries
from logquarry.repair.rebuild.other_queues import BatchFiles

KEY = "batches", 0


def entries(places: range, first: int, count: int) -> BatchEntries:
    """Entries of ``count`` messages each, at some physical offsets."""
    made = np.zeros(len(places), BATCH_DTYPE)
    made["physical_offset"] = places
    made["size"] = places.step
    made["base"] = first + np.arange(len(places)) * count
    made["count"] = count
    return made


@pytest.mark.parametrize("restart", [0, 1, 6, 17])
def test_only_the_newest_epoch_counts(tmp_path: Path, restart: int) -> None:
    """The lower offset can lie within the older epoch."""
    files = BatchFiles(Disk(), tmp_path, 10 * ENTRY_SIZE)
    files.add(KEY, entries(range(0, 600, 100), 0, 3))
    newest = entries(range(600, 900, 100), restart, 2)
    files.add(KEY, newest)
    files.finish()
    queue = files.queues[KEY]
    assert (queue.first, queue.stop, queue.restarts) == (restart, restart + 6, 1)
    (path,) = (tmp_path / KEY[0] / str(KEY[1])).iterdir()
    written = np.frombuffer(path.read_bytes(), BATCH_DTYPE)
    assert written[: len(newest)].tobytes() == newest.tobytes()
    assert not written[len(newest) :]["count"].any()
