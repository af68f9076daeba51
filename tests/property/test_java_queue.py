"""A queue gets the same bytes from many entries at once as from Java's single entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.disk.disk import Disk
from logquarry.format import java, queue_entry
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.repair.recover.java_queues import Applied, JavaFile, JavaQueue, Noted, Target
from logquarry.write.queue_writer import units_of

UNITS = 4
FILE_SIZE = UNITS * UNIT_SIZE


class Put(NamedTuple):
    queue_offset: int
    physical_offset: int
    size: int


class Model:
    """``putMessagePositionInfo`` line by line, over a dict of files."""

    def __init__(self, files: dict[int, bytes], max_physical: int) -> None:
        self.files = {base: bytearray(data) for base, data in files.items()}
        self.wrote = FILE_SIZE if files else 0
        self.max_physical = max_physical

    def put(self, put: Put) -> None:
        offset, size = put.physical_offset, put.size
        if offset + size <= self.max_physical:
            return
        expected = put.queue_offset * UNIT_SIZE
        created_first = False
        if not self.files:
            created_first = True
            self.files[expected - expected % FILE_SIZE] = bytearray(FILE_SIZE)
            self.wrote = 0
        elif self.wrote == FILE_SIZE:
            self.files[max(self.files) + FILE_SIZE] = bytearray(FILE_SIZE)
            self.wrote = 0
        base = max(self.files)
        if created_first and put.queue_offset != 0:
            while self.wrote < expected % FILE_SIZE:
                self._append(base, queue_entry.encode(queue_entry.FILLER))
        if put.queue_offset != 0 and expected < base + self.wrote:
            return
        self.max_physical = offset + size
        self._append(base, queue_entry.encode(queue_entry.QueueEntry(offset, size, 7)))

    def _append(self, base: int, data: bytes) -> None:
        self.files[base][self.wrote : self.wrote + UNIT_SIZE] = data
        self.wrote += UNIT_SIZE


@st.composite
def runs(draw: st.DrawFn) -> list[list[Put]]:
    """Entries of consecutive messages, in runs; most queue offsets are consecutive."""
    physical, queue_offset = draw(st.integers(0, 50)), draw(st.integers(0, 12))
    found = []
    for length in draw(st.lists(st.integers(1, 8), min_size=1, max_size=5)):
        run = []
        for _ in range(length):
            step = draw(st.sampled_from((1,) * 9 + (0, 2, -3, None)))
            size = draw(st.integers(1, 30))
            run.append(Put(queue_offset, physical, size))
            physical += size + draw(st.integers(0, 3))
            queue_offset = 0 if step is None else max(0, queue_offset + step)
        found.append(run)
    return found


def arrays(puts: Sequence[Put]) -> tuple[np.ndarray, np.ndarray]:
    offsets, physical, sizes = np.array(puts, np.int64).T
    return offsets, units_of(physical, sizes, np.full(len(puts), 7, np.int64))


def state(queue: JavaQueue, target: Target) -> tuple[dict[int, bytes], int, int]:
    files = {file.base: bytes(target.view(file.path)) for file in queue.files}
    return files, queue.files[-1].wrote if queue.files else 0, queue.max_physical


@given(runs(), st.booleans(), st.booleans(), st.integers(-1, 60))
def test_many_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    puts: list[list[Put]],
    has_file: bool,
    really: bool,
    max_physical: int,
) -> None:
    root = tmp_path_factory.mktemp("queue")
    folder = root / "consumequeue" / "t" / "3"
    folder.mkdir(parents=True)
    before: dict[int, bytes] = {}
    files = []
    if has_file:
        before[FILE_SIZE] = bytes(range(FILE_SIZE))
        name = f"{FILE_SIZE:020d}"
        (folder / name).write_bytes(before[FILE_SIZE])
        files = [JavaFile(FILE_SIZE, f"consumequeue/t/3/{name}", FILE_SIZE)]
    target = Applied(root, Disk()) if really else Noted(root)
    queue = JavaQueue(("t", 3), files, FILE_SIZE, target)
    model = Model(before, max_physical)
    queue.max_physical = max_physical
    expected = before
    for run in puts:
        queue.put(*arrays(run))
        for put in run:
            model.put(put)
        found = state(queue, target)
        expected = {base: bytes(data) for base, data in model.files.items()}
        assert found == (expected, model.wrote, model.max_physical)
    if isinstance(target, Applied):
        target.close()
    on_disk = {int(path.name): path.read_bytes() for path in folder.iterdir()}
    assert on_disk == (expected if really else before)


@given(
    st.lists(
        st.tuples(
            st.sampled_from((-1, 0, 10, 20, 30, 40)),
            st.sampled_from((0, 5, -5, java.INT_MAX)),
        ),
        max_size=14,
    ),
    st.integers(-1, 45),
)
def test_where_a_queue_ends(
    tmp_path_factory: pytest.TempPathFactory, units: list[tuple[int, int]], physical: int
) -> None:
    root = tmp_path_factory.mktemp("queue")
    data = b"".join(
        queue_entry.encode(queue_entry.QueueEntry(offset, size, 0)) for offset, size in units
    )
    data = data.ljust(-(-max(1, len(units)) // UNITS) * FILE_SIZE, b"\0")
    folder = root / "consumequeue" / "t" / "3"
    folder.mkdir(parents=True)
    files = []
    for base in range(0, len(data), FILE_SIZE):
        path = f"consumequeue/t/3/{base:020d}"
        (root / path).write_bytes(data[base : base + FILE_SIZE])
        files.append(JavaFile(base, path, FILE_SIZE))
    queue = JavaQueue(("t", 3), list(files), FILE_SIZE, Noted(root))
    queue.recover()
    # From the third-last file up to the first invalid entry.
    first = max(0, len(files) - 3) * UNITS
    padded = [*units, *[(0, 0)] * (len(data) // UNIT_SIZE - len(units))]
    end = first
    while end < len(padded) and padded[end][0] >= 0 and padded[end][1] > 0:
        end += 1
    assert queue.wrote_offset == end * UNIT_SIZE
    assert queue.max_physical == (sum(padded[end - 1]) if end > first else -1)

    queue.truncate_dirty(physical)
    kept = sum(file.base <= end * UNIT_SIZE for file in files)
    while kept and padded[(kept - 1) * UNITS][0] >= physical:
        kept -= 1
    if not kept:
        assert (queue.wrote_offset, queue.max_physical) == (0, physical)
        return
    at = (kept - 1) * UNITS + 1
    while at < kept * UNITS and 0 <= padded[at][0] < physical and padded[at][1] > 0:
        at += 1
    assert queue.wrote_offset == at * UNIT_SIZE
    assert queue.max_physical == sum(padded[at - 1])
