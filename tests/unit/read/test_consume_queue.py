"""One queue over right and over wrong files."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.format import queue_entry
from logquarry.format.queue_entry import FILLER, QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.read.queue import MOST_HOLES, ConsumeQueue, has_message, is_written

UNITS = 5
FOLDER = "consumequeue/orders/0"


def unit(number: int) -> QueueEntry:
    return QueueEntry(1000 + 100 * number, 100, number)


def write(root: Path, name: int, entries: list[QueueEntry], size: int | None = None) -> Path:
    path = root / FOLDER / f"{name:020d}"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(map(queue_entry.encode, entries))
    path.write_bytes(data.ljust(UNITS * 20, b"\0") if size is None else data[:size])
    return path


def queue(root: Path, *, log_min_offset: int = 0, queue_id: int = 0) -> ConsumeQueue:
    config = StoreConfig(mapped_file_size_consume_queue=UNITS * 20)
    layout = StoreLayout.open(root, config)
    return ConsumeQueue(layout, "orders", queue_id, log_min_offset=log_min_offset)


@pytest.fixture
def thirteen(tmp_path: Path) -> Path:
    """13 units in three files."""
    for start in (0, 5, 10):
        write(tmp_path, 20 * start, [unit(n) for n in range(start, min(start + UNITS, 13))])
    return tmp_path


def test_units_over_file_ends(thirteen: Path) -> None:
    found = queue(thirteen)
    assert (found.min_offset, found.max_offset) == (0, 13)
    assert found.last_entry == unit(12)
    assert found.last_physical_end == 2300
    for start in range(14):
        for stop in range(start, 16):
            units = found.units(start, stop)
            expected = [unit(n) for n in range(start, min(stop, 13))]
            assert [QueueEntry(*u) for u in units.tolist()] == expected
            assert list(found.entries(start, stop)) == [(e.tags_code, e) for e in expected]


def test_one_file_is_not_copied(thirteen: Path) -> None:
    assert not queue(thirteen).units(5, 10).flags.owndata


def test_a_negative_offset_is_an_error(thirteen: Path) -> None:
    with pytest.raises(UsageError, match="no queue offset -1"):
        queue(thirteen).units(-1, 3)


def test_a_missing_middle_file_is_a_gap(thirteen: Path) -> None:
    (thirteen / FOLDER / f"{100:020d}").unlink()
    found = queue(thirteen)
    assert found.max_offset == 13
    units = found.units(3, 12)
    assert is_written(units).tolist() == [True] * 2 + [False] * 5 + [True] * 2
    assert [offset for offset, _ in found.entries()] == [0, 1, 2, 3, 4, 10, 11, 12]
    assert [(start, len(run)) for start, run in found.runs(0, 13)] == [(0, 5), (10, 3)]
    assert list(found.runs(5, 10)) == []


def test_the_end_is_looked_for_in_the_last_file_with_a_unit(thirteen: Path) -> None:
    write(thirteen, 300, [])
    write(thirteen, 400, [])
    assert queue(thirteen).max_offset == 13
    # No entry after the first unwritten one counts.
    write(thirteen, 200, [unit(10), QueueEntry(0, 0, 0), unit(12)])
    assert queue(thirteen).max_offset == 11
    # In earlier files, a gap stays a gap.
    write(thirteen, 100, [unit(5), QueueEntry(0, 0, 0), unit(7), unit(8), unit(9)])
    assert [offset for offset, _ in queue(thirteen).entries()] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "wrong", [QueueEntry(-1, 100, 0), QueueEntry(5000, 0, 0), QueueEntry(5000, -7, 0)]
)
def test_units_that_java_counts_as_not_written(thirteen: Path, wrong: QueueEntry) -> None:
    write(thirteen, 200, [unit(10), wrong, unit(12)])
    assert queue(thirteen).max_offset == 11
    assert not wrong.is_written


@pytest.mark.parametrize("size", [0, 1, 19, 20, 39, 61])
def test_a_short_last_file(thirteen: Path, size: int) -> None:
    write(thirteen, 200, [unit(n) for n in range(10, 15)], size)
    assert queue(thirteen).max_offset == 10 + size // 20


def test_a_file_that_is_too_long_is_cut_at_the_next(thirteen: Path) -> None:
    write(thirteen, 0, [unit(n) for n in range(9)])
    assert [entry for _, entry in queue(thirteen).entries()] == [unit(n) for n in range(13)]


def test_without_any_file_or_unit(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    empty = queue(tmp_path)
    assert (empty.min_offset, empty.max_offset, empty.last_entry) == (0, 0, None)
    assert len(empty.units(0, 10)) == 0
    assert list(empty.entries()) == []
    assert list(empty.segments()) == []
    assert empty.offset_by_time(5, lambda offset, size: 1) == 0
    for base in (0, 100, 200, 300, 400):
        write(tmp_path, base, [])
    # ConsumeQueue.recover() starts at the third-last file.
    assert (queue(tmp_path).min_offset, queue(tmp_path).max_offset) == (0, 10)
    assert queue(tmp_path).last_physical_end is None


def test_the_min_is_looked_for_in_the_first_file_only(thirteen: Path) -> None:
    assert queue(thirteen, log_min_offset=1000).min_offset == 0
    assert queue(thirteen, log_min_offset=1001).min_offset == 1
    assert queue(thirteen, log_min_offset=1400).min_offset == 4
    # QUIRK: Java does not check the other files, and the min stays 0.
    assert queue(thirteen, log_min_offset=1401).min_offset == 0
    (thirteen / FOLDER / f"{0:020d}").unlink()
    assert queue(thirteen).min_offset == 5
    assert queue(thirteen, log_min_offset=1601).min_offset == 7
    assert queue(thirteen, log_min_offset=5000).min_offset == 0


def test_the_min_of_an_expired_queue_of_rocketmq_5_is_the_max(
    thirteen: Path,
) -> None:
    (thirteen / "timerwheel").touch()
    assert queue(thirteen, log_min_offset=1400).min_offset == 4
    # The first file has expired, and a later file has not.
    assert queue(thirteen, log_min_offset=2200).min_offset == 0
    assert queue(thirteen, log_min_offset=2201).min_offset == 13
    # An entry that damage moved behind does not hide the entries before it.
    write(thirteen, 200, [unit(10), unit(11), QueueEntry(5, 100, 0)])
    assert queue(thirteen, log_min_offset=2100).min_offset == 0


def test_a_first_file_with_padding(tmp_path: Path) -> None:
    write(tmp_path, 100, [FILLER, FILLER, unit(7), unit(8)])
    found = queue(tmp_path, log_min_offset=1000)
    assert (found.min_offset, found.max_offset) == (7, 9)
    assert has_message(found.units(5, 9)).tolist() == [False, False, True, True]
    write(tmp_path, 100, [FILLER, FILLER])
    assert queue(tmp_path).last_entry is None


def test_a_negative_queue_id(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [unit(0)])
    shutil.move(path.parent, path.parent.parent / "-3")
    layout = StoreLayout.open(tmp_path)
    assert list(layout.queue_names) == [("orders", -3)]
    assert queue(tmp_path, queue_id=-3).max_offset == 1


def test_addresses_into_the_extension_are_kept(tmp_path: Path) -> None:
    address = -(1 << 31) - 5
    write(tmp_path, 0, [QueueEntry(0, 100, address), QueueEntry(100, 100, -(1 << 31))])
    entries = [entry for _, entry in queue(tmp_path).entries()]
    assert [entry.tags_code for entry in entries] == [address, -(1 << 31)]


def test_a_live_writer_appends(tmp_path: Path) -> None:
    path = write(tmp_path, 0, [unit(n) for n in range(3)])
    found = queue(tmp_path)
    assert found.max_offset == 3
    with path.open("r+b") as file:
        file.seek(60)
        file.write(queue_entry.encode(unit(3)) + queue_entry.encode(unit(4)))
    assert found.max_offset == 3
    found.refresh()
    assert found.max_offset == 5
    write(tmp_path, 100, [unit(5)])
    found.refresh()
    assert found.max_offset == 6
    assert [entry for _, entry in found.entries()] == [unit(n) for n in range(6)]
    # Retention deletes the first file.
    path.unlink()
    found.log_min_offset = 1500
    found.refresh()
    assert (found.min_offset, found.max_offset) == (5, 6)


def test_a_file_that_goes_while_it_is_read(thirteen: Path) -> None:
    found = queue(thirteen)
    (thirteen / FOLDER / f"{0:020d}").unlink()
    assert (found.min_offset, found.max_offset) == (0, 13)
    assert [offset for offset, _ in found.entries()] == list(range(5, 13))


def test_a_stray_name_far_away_costs_no_memory(thirteen: Path) -> None:
    write(thirteen, (1 << 61) // 100 * 100, [unit(1)])
    found = queue(thirteen)
    assert found.max_offset > 1 << 55
    assert len(list(found.entries())) == 14
    with pytest.raises(UsageError, match="have no file"):
        found.units(0, found.max_offset)
    assert len(found.units(0, MOST_HOLES)) == MOST_HOLES
    # Names that are not offsets of entries, or do not fit into 64 bits, are ignored.
    write(thirteen, 207, [unit(1)])
    write(thirteen, 99_999_999_999_999_999_999, [unit(1)])
    assert len(queue(thirteen).files) == 4


def test_long_files_are_read_in_parts(tmp_path: Path) -> None:
    count = 100_000
    path = tmp_path / FOLDER / f"{0:020d}"
    path.parent.mkdir(parents=True)
    data = np.zeros(count, queue_entry.LAYOUT.dtype())
    data["physical_offset"] = np.arange(count) * 100
    data["size"] = 100
    for written in (0, 1, 511, 512, 513, 2560, 2561, 65_000, 99_999, count):
        some = data.copy()
        some[written:] = np.zeros((), data.dtype)
        path.write_bytes(some.tobytes())
        layout = StoreLayout.open(tmp_path)
        found = ConsumeQueue(layout, "orders", 0, log_min_offset=100 * max(0, written - 1))
        assert (found.min_offset, found.max_offset) == (max(0, written - 1), written)


@pytest.mark.parametrize("seed", range(30))
def test_random_bytes(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for base in rng.sample(range(0, 2000, 20), 4):
        path = write(tmp_path, base, [])
        path.write_bytes(rng.randbytes(rng.choice([0, 1, 20, 99, 100, 140])))
    found = queue(tmp_path, log_min_offset=rng.choice([0, 1 << 40, 1 << 62]))
    assert 0 <= found.max_offset <= 105
    entries = list(found.entries(0))
    assert all(entry.is_written for _, entry in entries)
    assert len(found.units(0, 200)) == found.max_offset
    assert found.last_physical_end is None or found.last_physical_end > 0
    for time in (0, 1 << 40, 1 << 62):
        assert found.offset_by_time(time, lambda offset, size: offset % 1000 - 100) >= 0
