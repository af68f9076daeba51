from __future__ import annotations

from pathlib import Path

import pytest

from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.write_buffers import TransientStorePool
from logquarry.errors import CorruptFile, StoreUnavailable, UsageError
from tests.helpers.failing_disk import EIO, ENOSPC, FaultyDisk

SIZE = 4096


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def make(disk: FaultyDisk, folder: Path, aside: Path | None = None) -> MappedFileQueue:
    queue = MappedFileQueue(disk, folder / "log", SIZE, aside=aside)
    queue.load()
    return queue


def writable(queue: MappedFileQueue, start_offset: int = 0) -> MappedFile:
    return queue.writable(start_offset)


def fill(queue: MappedFileQueue, count: int, data: bytes = b"\x01") -> None:
    while count:
        file = writable(queue)
        some = min(count, file.room)
        file.append(data * some)
        count -= some


def names(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "log").iterdir())


def test_an_empty_queue_touches_nothing(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    assert queue.last is None
    assert (queue.min_offset, queue.max_offset, queue.wrote_offset) == (-1, 0, 0)
    assert queue.find(0) is None and queue.select(0) is None
    assert queue.flush() == queue.commit() == 0
    assert list(tmp_path.iterdir()) == []


def test_files_roll_when_the_last_is_full(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    first = writable(queue)
    assert first.path == tmp_path / "log" / ("0" * 20)
    first.append(bytes(SIZE - 1))
    assert writable(queue) is first
    first.append(b"x")
    assert queue.last is first, "full, and not rolled without being asked"
    second = writable(queue)
    assert second.base == SIZE and queue.last is second
    second.append(b"abc")
    assert (queue.min_offset, queue.max_offset) == (0, SIZE + 3)
    assert queue.find(SIZE - 1) is first and queue.find(SIZE) is second
    assert queue.find(2 * SIZE) is None and queue.find(-1) is None
    data = queue.select(SIZE + 1, 2)
    assert data is not None and bytes(data) == b"bc"
    assert queue.select(SIZE - 1, 2) is None, "nothing spans files"
    queue.close()


def test_the_first_file_holds_the_start_offset(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    assert writable(queue, 5 * SIZE + 17).base == 5 * SIZE
    assert queue.flushed_offset == queue.committed_offset == queue.min_offset == 5 * SIZE
    queue.close()


def test_loading_finds_the_files(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    fill(queue, 3 * SIZE + 100)
    queue.close()
    (tmp_path / "log" / "notes.txt").write_text("not ours")
    before = dict.fromkeys(disk.counts, 0) | disk.counts
    queue = make(disk, tmp_path)
    assert disk.counts["open"] == before["open"] + 1, "files are opened when they are asked for"
    assert queue.bases == (0, SIZE, 2 * SIZE, 3 * SIZE)
    assert queue.max_offset == queue.flushed_offset == 4 * SIZE
    assert len(queue.open_files) == 1
    for offset in (0, SIZE, 2 * SIZE - 1):
        assert bytes(queue.select(offset, 1) or b"") == b"\x01"
    assert len(queue.open_files) == 3
    queue.close()


def test_an_empty_last_file_is_extended(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    fill(queue, SIZE)
    queue.close()
    (tmp_path / "log" / f"{SIZE:020d}").touch()
    queue = make(disk, tmp_path)
    assert queue.truncate_to(SIZE) == []
    assert names(tmp_path) == [0]
    queue.close()


@pytest.mark.parametrize(
    ("base", "size"), [(0, SIZE - 1), (0, SIZE + 1), (SIZE, SIZE + 1), (3 * SIZE, SIZE)]
)
def test_files_that_do_not_fit_are_refused(
    disk: FaultyDisk, tmp_path: Path, base: int, size: int
) -> None:
    queue = make(disk, tmp_path)
    fill(queue, 2 * SIZE)
    queue.close()
    (tmp_path / "log" / f"{base:020d}").write_bytes(bytes(size))
    with pytest.raises(CorruptFile):
        make(disk, tmp_path)


def test_flush_covers_all_files(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    fill(queue, 2 * SIZE + 10)
    writable(queue).store_timestamp = 42
    assert queue.flush(1) == 2 * SIZE, "full files at once, the last when a page is due"
    assert queue.store_timestamp == 0
    assert disk.counts["fdatasync"] == 2
    assert queue.flush() == queue.flushed_offset == 2 * SIZE + 10
    assert queue.store_timestamp == 42
    assert queue.flush() == 2 * SIZE + 10
    assert disk.counts["fdatasync"] == 3
    queue.close()


def test_a_failed_sync_poisons_and_reads_go_on(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    fill(queue, SIZE + 10)
    disk.failing["fdatasync"] = EIO
    with pytest.raises(StoreUnavailable, match="sync failed"):
        queue.flush()
    disk.failing.clear()
    for step in (queue.flush, queue.commit, lambda: writable(queue), lambda: queue.truncate_to(0)):
        with pytest.raises(StoreUnavailable, match="sync failed"):
            step()
    assert queue.flushed_offset == 0
    assert disk.counts["fdatasync"] == 1
    assert bytes(queue.select(SIZE, 10) or b"") == b"\x01" * 10
    queue.close()


def test_a_full_disk_leaves_the_queue_as_it_was(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    fill(queue, SIZE)
    disk.failing["allocate"] = ENOSPC
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="no room"):
            queue.writable()
    assert queue.max_offset == SIZE and names(tmp_path) == [0]
    assert queue.flush() == SIZE
    del disk.failing["allocate"]
    assert writable(queue).base == SIZE
    queue.close()


def test_truncating_makes_zeros_durably(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    fill(queue, 2 * SIZE)
    queue.close()
    queue = make(disk, tmp_path)
    syncs = disk.counts["fdatasync"]
    assert queue.truncate_to(SIZE + 100) == []
    assert disk.counts["fdatasync"] == syncs + 1
    assert queue.max_offset == queue.flushed_offset == queue.committed_offset == SIZE + 100
    assert (tmp_path / "log" / f"{SIZE:020d}").read_bytes() == b"\x01" * 100 + bytes(SIZE - 100)
    assert writable(queue).append(b"next") == 100
    queue.close()


def test_truncating_sets_files_aside_and_deletes_empty_ones(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    queue = make(disk, tmp_path)
    fill(queue, 3 * SIZE)
    writable(queue)
    queue.close()
    queue = make(disk, tmp_path)
    with pytest.raises(UsageError, match="no quarantine folder"):
        queue.truncate_to(SIZE)
    assert names(tmp_path) == [0, SIZE, 2 * SIZE, 3 * SIZE]
    queue.close()
    queue = make(disk, tmp_path, tmp_path / "quarantine")
    moved = queue.truncate_to(SIZE)
    assert names(tmp_path) == [0]
    assert sorted(moved) == sorted((tmp_path / "quarantine").iterdir())
    assert [path.read_bytes() for path in moved] == [b"\x01" * SIZE] * 2
    assert queue.max_offset == SIZE
    assert writable(queue).base == SIZE
    queue.close()


def test_a_file_that_another_program_made_moves_to_quarantine(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    queue = make(disk, tmp_path, tmp_path / "quarantine")
    fill(queue, SIZE)
    name = f"{SIZE:020d}"
    (tmp_path / "log" / name).write_bytes(b"theirs")
    assert writable(queue).base == SIZE
    assert (tmp_path / "quarantine" / name).read_bytes() == b"theirs"
    queue.close()


def test_truncating_to_the_first_offset_keeps_the_first_file(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    queue = make(disk, tmp_path)
    writable(queue, 2 * SIZE).append(b"abc")
    for offset in (2 * SIZE - 1, 3 * SIZE + 1):
        with pytest.raises(UsageError):
            queue.truncate_to(offset)
    queue.truncate_to(2 * SIZE)
    assert (queue.min_offset, queue.max_offset) == (2 * SIZE, 2 * SIZE)
    assert names(tmp_path) == [2 * SIZE]
    queue.close()


def test_append_data_at_its_offset(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    assert not queue.append_data(2 * SIZE + 1, b"x"), "a file begins with its first byte"
    data = bytes(range(256)) * 20
    assert queue.append_data(2 * SIZE, data[:100])
    assert not queue.append_data(2 * SIZE + 99, b"x")
    assert not queue.append_data(2 * SIZE + 101, b"x")
    assert queue.append_data(2 * SIZE + 100, data[100:])
    assert (queue.min_offset, queue.max_offset) == (2 * SIZE, 2 * SIZE + len(data))
    read = bytes(queue.select(2 * SIZE) or b"") + bytes(queue.select(3 * SIZE) or b"")
    assert read == data
    queue.close()


def test_retention_removes_the_first_and_never_the_last(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    fill(queue, 2 * SIZE)
    held = queue.select(0)
    with pytest.raises(UsageError, match="not flushed"):
        queue.remove_first()
    queue.flush()
    queue.remove_first()
    assert queue.min_offset == SIZE and names(tmp_path) == [SIZE]
    assert queue.find(0) is None and queue.select(0) is None
    assert held is not None and held[0] == 1
    with pytest.raises(UsageError, match="only file"):
        queue.remove_first()
    assert queue.flush() == 2 * SIZE
    queue.close()


# ------------------------------------------------------------------------------------ multi-path
def test_files_are_spread_over_the_folders(disk: FaultyDisk, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("b", "a", "c")]
    full: set[Path] = set()
    queue = MappedFileQueue(disk, folders, SIZE, full_folders=lambda: full)
    queue.load()
    fill(queue, 3 * SIZE)
    assert [queue.find(base).path.parent.name for base in queue.bases] == ["a", "b", "c"]  # type: ignore[union-attr]
    full.add(tmp_path / "a")
    fill(queue, SIZE)
    # File 3 of the folders b and c.
    assert writable(queue).base == 4 * SIZE
    assert queue.find(3 * SIZE).path.parent.name == "c"  # type: ignore[union-attr]
    assert queue.find(4 * SIZE).path.parent.name == "b"  # type: ignore[union-attr]
    full.update(folders)
    fill(queue, SIZE)
    assert writable(queue).path.parent.name == "c", "all are full: as if none was"
    queue.close()

    read_only = [tmp_path / "a"]
    queue = MappedFileQueue(disk, folders, SIZE, read_only=read_only)
    queue.load()
    assert queue.bases == tuple(SIZE * number for number in range(6))
    assert writable(queue).path.parent.name == "b"
    queue.close()


# ------------------------------------------------------------------------------ transient, ahead
class Ahead:
    """Gives files that were made ahead, by the pool if one is given."""

    def __init__(self, disk: FaultyDisk, pool: TransientStorePool | None = None) -> None:
        self.disk = disk
        self.pool = pool
        self.ready: dict[Path, MappedFile] = {}

    def take(self, path: Path, following: Path | None, size: int) -> MappedFile:
        for each in (path, following):
            if each is not None and each not in self.ready:
                self.ready[each] = MappedFile(
                    self.disk, each, int(each.name), size, pool=self.pool, exclusive=True
                )
        return self.ready.pop(path)

    def discard(self) -> None:
        while self.ready:
            self.ready.popitem()[1].delete()


def test_what_is_not_committed_counts_for_nothing(disk: FaultyDisk, tmp_path: Path) -> None:
    pool = TransientStorePool(3, SIZE)
    queue = MappedFileQueue(disk, tmp_path / "log", SIZE, allocator=Ahead(disk, pool))
    queue.load()
    fill(queue, SIZE + 10)
    assert (queue.max_offset, queue.wrote_offset) == (0, SIZE + 10)
    assert queue.flush() == 0
    assert queue.commit(1) == SIZE
    assert queue.max_offset == SIZE
    assert queue.flush() == SIZE
    assert queue.commit() == queue.max_offset == SIZE + 10
    assert queue.flush() == SIZE + 10
    queue.close()


def test_an_uncommitted_file_holds_up_those_behind_it(disk: FaultyDisk, tmp_path: Path) -> None:
    pool = TransientStorePool(1, SIZE)
    queue = MappedFileQueue(disk, tmp_path / "log", SIZE, allocator=Ahead(disk, pool))
    queue.load()
    fill(queue, 2 * SIZE + 10)
    # The second and third are written through the map, and the first is not there yet.
    assert queue.max_offset == 0
    assert queue.flush() == 0
    assert queue.commit() == queue.max_offset == 2 * SIZE + 10
    queue.close()


def test_a_file_that_lost_its_name_is_made_anew(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = MappedFileQueue(disk, tmp_path / "log", SIZE, allocator=Ahead(disk))
    queue.load()
    fill(queue, SIZE)
    ahead = tmp_path / "log" / f"{SIZE:020d}"
    ahead.unlink()
    file = writable(queue)
    file.append(b"acked")
    queue.flush()
    assert ahead.read_bytes().startswith(b"acked")
    queue.close()


def test_a_warm_file_is_unlocked_some_time_after_it_is_full(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("logquarry.disk.mapped_file_queue.time.monotonic", lambda: now)
    queue = make(disk, tmp_path)
    first = writable(queue)
    first.warm()
    if not first.is_locked_in_memory:
        pytest.skip("this machine locks no memory")
    fill(queue, SIZE + 1)
    is_locked = []
    for seconds in (0, 5, 1):
        now += seconds
        queue.flush()
        is_locked.append(first.is_locked_in_memory)
    assert is_locked == [True, True, False]
    queue.close()
