"""Units go to their places in a queue, once and without gaps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import CorruptFile
from logquarry.format import queue_entry
from logquarry.format.queue_entry import FILLER, UNIT_SIZE, QueueEntry
from logquarry.write.queue_writer import ConsumeQueueWriter, units_of

UNITS_PER_FILE = 4


@pytest.fixture
def files(tmp_path: Path) -> MappedFileQueue:
    return MappedFileQueue(Disk(), tmp_path / "0", UNITS_PER_FILE * UNIT_SIZE)


def append(writer: ConsumeQueueWriter, offsets: list[int], first_physical: int = 0) -> int:
    places = np.array(offsets, np.int64)
    physical = first_physical + 100 * np.arange(len(offsets), dtype=np.int64)
    return writer.append(places, units_of(physical, np.full_like(places, 100), places + 7))


def units(files: MappedFileQueue) -> dict[int, QueueEntry]:
    found = {}
    for base in files.bases:
        data = files.select(base)
        assert data is not None
        for at in range(0, len(data), UNIT_SIZE):
            found[(base + at) // UNIT_SIZE] = queue_entry.decode_at(data, at)
    return found


def test_files_are_rolled(files: MappedFileQueue) -> None:
    assert ConsumeQueueWriter(files).next_offset is None
    writer = ConsumeQueueWriter(files)
    assert append(writer, list(range(10))) == 10
    assert files.bases == (0, 80, 160)
    assert units(files) == {n: QueueEntry(100 * n, 100, n + 7) for n in range(10)}
    assert writer.next_offset == 10
    assert writer.physical_end == 1000


@pytest.mark.parametrize("first", [1, 3, 4, 9])
def test_a_first_file_is_padded(files: MappedFileQueue, first: int) -> None:
    append(ConsumeQueueWriter(files), [first, first + 1])
    base = first // UNITS_PER_FILE * UNITS_PER_FILE
    padding = dict.fromkeys(range(base, first), FILLER)
    written = {first: QueueEntry(0, 100, first + 7), first + 1: QueueEntry(100, 100, first + 8)}
    assert units(files) == padding | written


def test_what_is_there_already_is_passed_over(files: MappedFileQueue) -> None:
    writer = ConsumeQueueWriter(files)
    append(writer, [0, 1, 2])
    assert append(writer, [0, 1, 2, 3, 4]) == 2
    assert append(writer, [1]) == 0
    # The writer knows the message by its physical offset, whatever queue offset it has.
    assert append(writer, [5], first_physical=400) == 0
    assert len(units(files)) == 5


def test_a_gap_is_refused(files: MappedFileQueue) -> None:
    writer = ConsumeQueueWriter(files)
    append(writer, [0, 1])
    with pytest.raises(CorruptFile, match=r"queue offset 3, .* from 2 on are missing") as error:
        append(writer, [3], first_physical=500)
    assert error.value.kind == "queue_gap"
    assert len(units(files)) == 2


def test_a_gap_within_a_run_is_refused(files: MappedFileQueue) -> None:
    writer = ConsumeQueueWriter(files)
    with pytest.raises(CorruptFile, match=r"queue offset 5, .* from 2 on are missing"):
        append(writer, [0, 1, 5])
    assert len(units(files)) == 2


def test_a_new_epoch_is_passed_over(files: MappedFileQueue) -> None:
    # The topic was created again, and its queue was not deleted. Java appends the 0 after the 2.
    writer = ConsumeQueueWriter(files)
    append(writer, [0, 1, 2])
    assert append(writer, [0, 1], first_physical=300) == 0
    assert append(writer, [0, 1, 2, 3], first_physical=300) == 1
    assert units(files)[3] == QueueEntry(600, 100, 10)


def test_a_queue_that_is_there_is_gone_on_with(files: MappedFileQueue, tmp_path: Path) -> None:
    append(ConsumeQueueWriter(files), [2, 3, 4])
    files.close()
    again = MappedFileQueue(Disk(), tmp_path / "0", files.file_size)
    again.load()
    again.truncate_to(5 * UNIT_SIZE)
    writer = ConsumeQueueWriter(again)
    assert (writer.next_offset, writer.physical_end) == (5, 300)
    assert append(writer, [4, 5], first_physical=200) == 1
    assert sorted(units(again)) == [0, 1, 2, 3, 4, 5]


def test_fillers_say_nothing_of_the_log(files: MappedFileQueue, tmp_path: Path) -> None:
    append(ConsumeQueueWriter(files), [2])
    files.close()
    again = MappedFileQueue(Disk(), tmp_path / "0", files.file_size)
    again.load()
    again.truncate_to(2 * UNIT_SIZE)
    assert ConsumeQueueWriter(again).physical_end == 0
