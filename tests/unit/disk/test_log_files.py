from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from logquarry.disk.log_files import AllocateMappedFileService
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.write_buffers import TransientStorePool
from logquarry.errors import StoreUnavailable
from tests.helpers.failing_disk import EIO, ENOSPC, FaultyDisk

SIZE = 4096


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def service(disk: FaultyDisk) -> Iterator[AllocateMappedFileService]:
    service = AllocateMappedFileService(disk)
    service.start()
    yield service
    assert service.stop()


def until_there(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.001)


def test_the_next_file_is_made_ahead_and_deleted_at_the_end(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    service = AllocateMappedFileService(disk, warm=True)
    service.start()
    queue = MappedFileQueue(disk, tmp_path, SIZE, allocator=service)
    for number in range(3):
        file = queue.last_file(create=True)
        assert file is not None and file.base == number * SIZE
        until_there(tmp_path / f"{(number + 1) * SIZE:020d}")
        file.append(bytes(SIZE))
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, SIZE, 2 * SIZE, 3 * SIZE]
    assert service.stop()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, SIZE, 2 * SIZE]
    with pytest.raises(StoreUnavailable, match="closed"):
        queue.last_file(create=True)
    queue.close()


def test_a_deleted_file_ahead_is_made_anew(
    disk: FaultyDisk, service: AllocateMappedFileService, tmp_path: Path
) -> None:
    queue = MappedFileQueue(disk, tmp_path, SIZE, allocator=service)
    first = queue.last_file(create=True)
    assert first is not None
    until_there(tmp_path / f"{SIZE:020d}")
    first.append(bytes(SIZE))
    # A later call takes the file when it is complete.
    ahead = service.take(tmp_path / f"{SIZE:020d}", None, SIZE)
    assert ahead is not None
    (tmp_path / f"{SIZE:020d}").unlink()
    assert not ahead.is_named()
    ahead.close()
    second = queue.last_file(create=True)
    assert second is not None and second.is_named()
    queue.close()


def test_truncating_takes_the_file_ahead_away(
    disk: FaultyDisk, service: AllocateMappedFileService, tmp_path: Path
) -> None:
    queue = MappedFileQueue(disk, tmp_path, SIZE, allocator=service)
    for _ in range(3):
        file = queue.last_file(create=True)
        assert file is not None
        file.append(b"x" * SIZE)
    queue.truncate_to(SIZE + 7, aside=tmp_path / "aside")
    left = sorted(int(path.name) for path in tmp_path.iterdir() if path.is_file())
    assert left == [0, SIZE], "no file lies behind a gap"
    file = queue.last_file(create=True)
    assert file is not None and file.base == SIZE and file.wrote == 7
    file.append(b"y" * file.room)
    again = queue.last_file(create=True)
    assert again is not None and again.base == 2 * SIZE and not again.holds_data()
    queue.close()


def test_failures_reach_who_waits_and_are_tried_again(
    disk: FaultyDisk, service: AllocateMappedFileService, tmp_path: Path
) -> None:
    disk.failing["allocate"] = ENOSPC
    with pytest.raises(StoreUnavailable, match="no room"):
        service.take(tmp_path / "0", tmp_path / "1", SIZE)
    end = time.monotonic() + 60
    while service._requests[tmp_path / "1"].error is None and time.monotonic() < end:
        time.sleep(0.001)
    disk.failing.clear()
    # The file ahead failed, too; the disk has room now.
    for name in ("1", "0"):
        file = service.take(tmp_path / name, None, SIZE)
        assert file is not None
        file.close()


def test_a_full_disk_is_logged_once(
    disk: FaultyDisk,
    service: AllocateMappedFileService,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for times in (1, 2):
        disk.failing["allocate"] = ENOSPC
        for _ in range(5):
            with pytest.raises(StoreUnavailable, match="no room"):
                service.take(tmp_path / "0", None, SIZE)
        assert len([text for text in caplog.messages if "no room" in text]) == times
        disk.failing.clear()
        file = service.take(tmp_path / str(times), None, SIZE)
        assert file is not None
        file.close()


def test_a_failed_sync_ends_it(
    disk: FaultyDisk, service: AllocateMappedFileService, tmp_path: Path
) -> None:
    disk.failing["sync_folder"] = EIO
    with pytest.raises(StoreUnavailable, match="sync failed"):
        service.take(tmp_path / "0", None, SIZE)
    disk.failing.clear()
    with pytest.raises(StoreUnavailable, match="sync failed"):
        service.take(tmp_path / "0", None, SIZE)


def test_a_file_that_takes_too_long_comes_later(disk: FaultyDisk, tmp_path: Path) -> None:
    service = AllocateMappedFileService(disk, timeout_ms=20)
    # The service is not started: no file is made.
    queue = MappedFileQueue(disk, tmp_path, SIZE, allocator=service)
    assert queue.last_file(create=True) is None
    assert queue.last_file() is None
    service.run_once()
    assert queue.last_file(create=True) is not None
    service.run_last()
    queue.close()


def test_fast_fail_without_a_buffer(disk: FaultyDisk, tmp_path: Path) -> None:
    pool = TransientStorePool(1, SIZE)
    service = AllocateMappedFileService(disk, pool=pool, fast_fail=True)
    service.start()
    file = service.take(tmp_path / "0", tmp_path / "1", SIZE)
    assert file is not None and file.is_transient
    assert service.take(tmp_path / "1", None, SIZE) is None
    file.append(bytes(SIZE))
    file.commit()
    second = service.take(tmp_path / "1", None, SIZE)
    assert second is not None and second.is_transient
    assert service.stop()
    file.close()
    second.close()


def test_a_bug_in_the_service_poisons_instead_of_hanging_others(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    service = AllocateMappedFileService(disk, timeout_ms=500)
    service.start()
    # A name that is not a number is not that of a queue file.
    for name in ("x", "0"):
        with pytest.raises(StoreUnavailable, match="ValueError"):
            service.take(tmp_path / name, None, SIZE)
    assert service.stop()
