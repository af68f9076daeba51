"""Entries of batch queues: without gaps, and appended in the log's order."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import CorruptFile
from logquarry.format.batch import ENTRY_SIZE, MOST_MESSAGES
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, Spans
from logquarry.write.queue_writer import BatchQueueWriter, Mending, without_gaps


def entries(*ranges: tuple[int, int], place: int = 0) -> BatchEntries:
    """Entries with (first queue offset, messages), one frame of 100 bytes after the other."""
    made = np.zeros(len(ranges), BATCH_DTYPE)
    made["physical_offset"] = place + 100 * np.arange(len(ranges))
    made["size"] = 100
    made["base"], made["count"] = zip(*ranges, strict=True)
    return made


def numbers(found: BatchEntries) -> list[tuple[int, int, int]]:
    return [(int(e["base"]), int(e["count"]), int(e["reserved"])) for e in found]


def test_entries_without_a_gap_stay_as_they_are() -> None:
    made = entries((5, 1), (6, 4), (10, 2))
    assert without_gaps(made, 5) is made


def test_the_entry_after_a_gap_takes_its_queue_offsets() -> None:
    made = without_gaps(entries((5, 1), (9, 4), (13, 2)), 3)
    assert numbers(made) == [(3, 3, 2), (6, 7, 3), (13, 2, 0)]
    spans = Spans.of(made)
    assert (spans.starts.tolist(), spans.stops.tolist()) == ([5, 9, 13], [6, 13, 15])


@pytest.mark.parametrize("gap", [MOST_MESSAGES - 4, MOST_MESSAGES, 3 * MOST_MESSAGES + 7])
def test_a_large_gap_takes_several_entries_of_one_frame(gap: int) -> None:
    made = without_gaps(entries((0, 2), (2 + gap, 4), (6 + gap, 1)), 0)
    stops = (made["base"] + made["count"]).tolist()
    assert made["base"].tolist() == [0, *stops[:-1]]
    assert (made["count"] > 0).all()
    assert set(made["physical_offset"].tolist()) == {0, 100, 200}
    spans = Spans.of(made)
    assert spans.starts.tolist() == [0, 2 + gap, 6 + gap]
    assert spans.stops.tolist() == [2, 6 + gap, 7 + gap]


@pytest.fixture
def files(tmp_path: Path) -> MappedFileQueue:
    found = MappedFileQueue(Disk(), tmp_path / "queue", 4 * ENTRY_SIZE)
    found.load()
    return found


def _append(writer: BatchQueueWriter, found: BatchEntries) -> int:
    return writer.append(found["base"].astype(np.int64), found)


def _written(files: MappedFileQueue) -> list[tuple[int, int, int]]:
    data = b"".join(bytes(files.select(base) or b"") for base in files.bases)
    return numbers(np.frombuffer(data, BATCH_DTYPE))


def test_entries_are_appended_once(files: MappedFileQueue) -> None:
    writer = BatchQueueWriter(files, "queue")
    assert writer.next_offset is None
    made = entries((7, 2), (9, 1), (10, 3), (13, 1), (14, 1))
    assert _append(writer, made) == 5
    assert _append(writer, made) == 0
    assert (writer.next_offset, writer.physical_end) == (15, 500)
    assert _written(files) == numbers(made)
    again = BatchQueueWriter(files, "queue")
    assert (again.next_offset, again.physical_end) == (15, 500)


def test_a_writer_refuses_a_gap_that_a_recovery_fills(files: MappedFileQueue) -> None:
    writer = BatchQueueWriter(files, "queue")
    _append(writer, entries((0, 2)))
    after = entries((5, 1), place=100)
    with pytest.raises(CorruptFile, match="recover"):
        _append(writer, after)
    mender = BatchQueueWriter(files, "queue", Mending(100, {}))
    assert _append(mender, after) == 1
    assert _written(files) == [(0, 2, 0), (2, 4, 3)]


def test_a_recovery_starts_again_with_a_recreated_topic(files: MappedFileQueue) -> None:
    mender = BatchQueueWriter(files, "queue", Mending(0, {}))
    _append(mender, entries((0, 2), (2, 5), (0, 1), (1, 3)))
    assert _written(files) == [(0, 1, 0), (1, 3, 0)]


@pytest.mark.parametrize("calls", [[(0, 8)], [(0, 5), (5, 8)]])
def test_a_recreated_topic_continues_after_the_known_entries(
    calls: list[tuple[int, int]], files: MappedFileQueue
) -> None:
    writer = BatchQueueWriter(files, "queue")
    _append(writer, entries(*((at, 1) for at in range(5))))
    again = entries(*((at, 1) for at in range(9)), place=500)
    assert sum(_append(writer, again[start:stop]) for start, stop in calls) == 3
    assert _append(writer, again[8:]) == 1
    assert _written(files) == [(at, 1, 0) for at in range(9)]


@pytest.mark.parametrize("cuts", [[0, 4], [0, 1, 2, 3, 4], [0, 3, 4]])
def test_an_entry_with_known_and_new_queue_offsets_keeps_the_new_ones(
    cuts: list[int], files: MappedFileQueue
) -> None:
    writer = BatchQueueWriter(files, "queue")
    _append(writer, entries((0, 13), (13, 2)))
    again = entries((0, 7), (7, 7), (14, 4), (18, 2), place=200)
    kept = again.copy()
    assert sum(_append(writer, again[at:stop]) for at, stop in pairwise(cuts)) == 2
    assert (again == kept).all()
    assert _written(files) == [(0, 13, 0), (13, 2, 0), (15, 3, 0), (18, 2, 0)]
    assert (writer.next_offset, writer.physical_end) == (20, 600)
    with pytest.raises(CorruptFile, match="recover"):
        _append(writer, entries((25, 1), place=600))
