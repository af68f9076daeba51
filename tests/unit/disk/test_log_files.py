"""Do files keep their sizes and bytes while their unwritten blocks are freed?

Pages after the log's end are loaded before puts write them; a few, and no more than puts use.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from mmap import PAGESIZE
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk import disk as disk_module
from logquarry.disk import log_files
from logquarry.disk.disk import Disk
from logquarry.disk.log_files import AllocateMappedFileService, PagesAhead, free_room
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.write_buffers import TransientStorePool
from logquarry.errors import StoreUnavailable
from logquarry.store import writer_files
from logquarry.store.message_store import StoreWriter
from tests.helpers.failing_disk import EIO, ENOSPC, FaultyDisk
from tests.helpers.small_store import bodies, opened
from tests.helpers.waiting import eventually

SIZE = 4096
PATIENCE_MS = 60_000
"""A busy machine may need seconds for a file: with the default, a call would not wait for it."""


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def service(disk: FaultyDisk) -> Iterator[AllocateMappedFileService]:
    service = AllocateMappedFileService(disk, timeout_ms=PATIENCE_MS)
    service.start()
    yield service
    assert service.stop()


def test_the_next_file_is_made_ahead_and_deleted_at_the_end(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    service = AllocateMappedFileService(disk, warm=True, timeout_ms=PATIENCE_MS)
    service.start()
    queue = MappedFileQueue(disk, tmp_path, SIZE, allocator=service)
    for number in range(3):
        file = queue.writable()
        assert file.base == number * SIZE
        eventually((tmp_path / f"{(number + 1) * SIZE:020d}").exists)
        file.append(bytes(SIZE))
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, SIZE, 2 * SIZE, 3 * SIZE]
    assert service.stop()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [0, SIZE, 2 * SIZE]
    with pytest.raises(StoreUnavailable, match="closed"):
        queue.writable()
    queue.close()


def test_a_deleted_file_ahead_is_made_anew(
    disk: FaultyDisk, service: AllocateMappedFileService, tmp_path: Path
) -> None:
    queue = MappedFileQueue(disk, tmp_path, SIZE, allocator=service)
    first = queue.writable()
    eventually((tmp_path / f"{SIZE:020d}").exists)
    first.append(bytes(SIZE))
    # A later call takes the file when it is complete.
    ahead = service.take(tmp_path / f"{SIZE:020d}", None, SIZE)
    (tmp_path / f"{SIZE:020d}").unlink()
    assert not ahead.is_named()
    ahead.close()
    second = queue.writable()
    assert second.is_named()
    queue.close()


def test_a_folder_that_is_full_after_a_file_was_made_ahead(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    service = AllocateMappedFileService(disk, timeout_ms=0)
    folders, full = [tmp_path / "a", tmp_path / "b"], list[Path]()
    queue = MappedFileQueue(
        disk, folders, SIZE, allocator=service, full_folders=lambda: full, guard_names=True
    )
    for number in range(3):
        # The service is not started: it makes files here.
        with contextlib.suppress(StoreUnavailable):
            queue.writable()
        service.run_once()
        file = queue.writable()
        assert file.base == number * SIZE
        file.append(bytes(SIZE))
        full = folders[1:]
    service.run_last()
    queue.close()
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("[ab]/*")}
    assert found == {f"{folder}/{number * SIZE:020d}" for number, folder in enumerate("aba")}


def test_a_folder_that_is_full_before_a_requested_file_is_made(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    service = AllocateMappedFileService(disk, timeout_ms=0)
    with pytest.raises(StoreUnavailable, match="not created"):
        service.take(tmp_path / "a" / "0", tmp_path / "b" / "1", SIZE)
    with pytest.raises(StoreUnavailable, match="not created"):
        service.take(tmp_path / "a" / "1", None, SIZE)
    service.run_once()
    file = service.take(tmp_path / "a" / "1", None, SIZE)
    assert file.path == tmp_path / "a" / "1"
    file.close()
    service.run_last()
    assert not (tmp_path / "b").exists()


def test_truncating_takes_the_file_ahead_away(
    disk: FaultyDisk, service: AllocateMappedFileService, tmp_path: Path
) -> None:
    queue = MappedFileQueue(disk, tmp_path, SIZE, allocator=service, aside=tmp_path / "aside")
    for _ in range(3):
        file = queue.writable()
        file.append(b"x" * SIZE)
    queue.truncate_to(SIZE + 7)
    left = sorted(int(path.name) for path in tmp_path.iterdir() if path.is_file())
    assert left == [0, SIZE], "no file lies behind a gap"
    file = queue.writable()
    assert file.base == SIZE and file.wrote == 7
    file.append(b"y" * file.room)
    again = queue.writable()
    assert again.base == 2 * SIZE and not again.holds_data()
    queue.close()


def test_failures_reach_who_waits_and_are_tried_again(
    disk: FaultyDisk, service: AllocateMappedFileService, tmp_path: Path
) -> None:
    disk.failing["allocate"] = ENOSPC
    with pytest.raises(StoreUnavailable, match="no room"):
        service.take(tmp_path / "0", tmp_path / "1", SIZE)
    eventually(lambda: service._requests["1"].error is not None)
    disk.failing.clear()
    # The file ahead failed, too; the disk has room now.
    for name in ("1", "0"):
        file = service.take(tmp_path / name, None, SIZE)
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
    with pytest.raises(StoreUnavailable, match="not created within 20 ms"):
        queue.writable()
    assert queue.last is None
    service.run_once()
    queue.writable()
    service.run_last()
    queue.close()


def test_fast_fail_without_a_buffer(disk: FaultyDisk, tmp_path: Path) -> None:
    pool = TransientStorePool(1, SIZE)
    service = AllocateMappedFileService(disk, pool=pool, fast_fail=True, timeout_ms=PATIENCE_MS)
    service.start()
    file = service.take(tmp_path / "0", tmp_path / "1", SIZE)
    assert file.is_transient
    with pytest.raises(StoreUnavailable, match="no buffer"):
        service.take(tmp_path / "1", None, SIZE)
    file.append(bytes(SIZE))
    file.commit()
    second = service.take(tmp_path / "1", None, SIZE)
    assert second.is_transient
    assert service.stop()
    file.close()
    second.close()


def test_a_bug_in_the_service_poisons_instead_of_hanging_others(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    service = AllocateMappedFileService(disk, timeout_ms=PATIENCE_MS)
    service.start()
    # A name that is not a number is not that of a queue file.
    for name in ("x", "0"):
        with pytest.raises(StoreUnavailable, match="ValueError"):
            service.take(tmp_path / name, None, SIZE)
    assert service.stop()


ROOM_SIZE = 4 << 20
CONFIG = lq.StoreConfig(mapped_file_size_commit_log=ROOM_SIZE, max_hash_slot_num=1_000)


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def punching(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    descriptor = Disk().make_file(path, 1 << 20)
    try:
        Disk().punch(descriptor, 0, 1 << 20)
        if sys.platform != "linux" or blocks(path) or Disk().next_hole(descriptor, 0, 9)[0]:
            pytest.skip("this file system frees no blocks")
    except OSError:
        pytest.skip("this file system frees no blocks")
    finally:
        os.close(descriptor)


@pytest.mark.usefixtures("punching")
def test_only_unwritten_ranges_of_the_last_file_are_freed(tmp_path: Path) -> None:
    disk = Disk()
    folder = tmp_path / "files"
    for name in ("000", "100", "notes"):
        descriptor = disk.make_file(folder / name, ROOM_SIZE)
        for at in (0, ROOM_SIZE // 2, ROOM_SIZE - 10):
            disk.write(descriptor, b"0123456789", at)
        disk.sync(descriptor, folder / name)
        os.close(descriptor)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    free_room(disk, {folder: 0, tmp_path / "missing": 0})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert blocks(folder / "100") < ROOM_SIZE // 4
    assert blocks(folder / "000") >= ROOM_SIZE and blocks(folder / "notes") >= ROOM_SIZE


@pytest.mark.usefixtures("punching")
def test_a_store_that_was_loaded_takes_the_room_of_its_messages(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreWriter.start(root, config=CONFIG) as store:
        store.free_room_at_close()
        store.put(lq.Message("orders", b"x" * 100, keys="k"))
    files = [path for path in root.rglob("*") if path.name.isdigit() and path.is_file()]
    assert len(files) == 3 and sum(map(blocks, files)) < sum(path.stat().st_size for path in files)
    assert blocks(root / "commitlog" / f"{0:020d}") < ROOM_SIZE // 2
    assert not lq.verify(root).findings
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        # The next writer has all blocks again: a full disk is an error when it opens.
        assert blocks(root / "commitlog" / f"{0:020d}") >= ROOM_SIZE
        assert store.put(lq.Message("orders", b"y")).ok
        assert [message.body for message in store.scan()] == [b"x" * 100, b"y"]


def test_without_a_c_library_the_files_keep_their_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "c_library", lambda: None)
    with StoreWriter.start(tmp_path, config=CONFIG) as store:
        store.free_room_at_close()
        store.put(lq.Message("orders", b"x" * 100, keys="k"))
    assert not (tmp_path / "abort").exists()
    assert blocks(tmp_path / "commitlog" / f"{0:020d}") >= ROOM_SIZE


def test_room_is_freed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Mapping[Path, int]] = []
    monkeypatch.setattr(writer_files, "free_room", lambda _, folders: freed.append(folders))
    with opened(tmp_path) as store:
        store.free_room_at_close()
    assert len(freed) == 1


LEAST = 256 << 10
MOST = 64 << 20
FILE_SIZE = 256 << 20


class Ahead:
    """The service over one log file, with what it loads."""

    def __init__(self, root: Path, patched: pytest.MonkeyPatch) -> None:
        disk = Disk()
        self.log = MappedFileQueue(disk, root, FILE_SIZE)
        file = self.log.writable()
        self.file: MappedFile = file
        self.now = 1_000
        patched.setattr(log_files, "monotonic_ms", lambda: self.now)
        if not file.address:
            pytest.skip("interpreted modules do not write through the map")
        self.service = PagesAhead(self.log, disk.health)
        self.loaded: list[tuple[int, int]] = []
        self.works = True
        patched.setattr(log_files, "populate", self._populate)

    def _populate(self, address: int, size: int) -> bool:
        start = address - self.file.address
        self.loaded.append((start, start + size))
        return self.works

    def put(self, size: int, ms: int = 10) -> bool:
        """Grow the log within some time; returns whether the service was woken, and runs it."""
        self.now += ms
        self.file.advance(size)
        self.service.grown()
        flag = self.service.flag
        assert flag is not None
        woken = flag.take(0)
        if woken:
            self.service.run_once()
        return woken


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ahead]:
    made = Ahead(tmp_path, monkeypatch)
    yield made
    made.log.close()


def test_the_first_put_loads_a_few_pages(ahead: Ahead) -> None:
    assert ahead.put(100)
    assert ahead.loaded == [(0, 100 + LEAST)]


def test_pages_are_loaded_again_when_half_are_used(ahead: Ahead) -> None:
    ahead.put(100)
    assert not ahead.put(LEAST // 2)
    assert ahead.put(1)
    (_, first), (start, stop) = ahead.loaded
    assert start == first // PAGESIZE * PAGESIZE
    assert stop > ahead.file.wrote + LEAST


def test_a_load_needs_no_pages(ahead: Ahead) -> None:
    ahead.log.reach = 1 << 20
    assert not ahead.put(1 << 20)
    ahead.log.reach = None
    assert ahead.put(100)
    (loaded,) = ahead.loaded
    assert loaded == (1 << 20, ahead.file.wrote + LEAST)


def test_a_load_into_a_further_file_does_not_count_as_growth(ahead: Ahead) -> None:
    ahead.put(FILE_SIZE)
    ahead.file = ahead.log.writable()
    ahead.log.reach = 2 * FILE_SIZE
    ahead.put(1 << 20)
    ahead.log.reach = None
    ahead.put(100)
    assert ahead.loaded[-1] == (1 << 20, ahead.file.wrote + LEAST)


def test_the_pages_follow_the_speed_of_the_puts(ahead: Ahead) -> None:
    ahead.put(100)
    ahead.put(1 << 20)
    assert ahead.loaded[-1][1] == ahead.file.wrote + (10 << 20)


def test_slow_puts_leave_few_pages(ahead: Ahead) -> None:
    for _ in range(20):
        ahead.put(LEAST, ms=1_000)
    assert ahead.loaded[-1][1] <= ahead.file.wrote + LEAST


def test_an_existing_log_does_not_count_as_growth(ahead: Ahead) -> None:
    ahead.file.advance(FILE_SIZE // 2)
    ahead.service = PagesAhead(ahead.log, Disk().health)
    ahead.put(100)
    assert ahead.loaded[-1][1] == ahead.file.wrote + LEAST


def test_a_load_of_many_messages_leaves_few_pages(ahead: Ahead) -> None:
    ahead.put(100)
    ahead.put(FILE_SIZE // 2)
    assert ahead.loaded[-1] == (ahead.file.wrote // PAGESIZE * PAGESIZE, ahead.file.wrote + MOST)


def test_nothing_is_loaded_behind_the_file(ahead: Ahead) -> None:
    ahead.put(100)
    ahead.put(FILE_SIZE - 5_000)
    assert ahead.loaded[-1][1] == FILE_SIZE
    assert not ahead.put(100)


def test_a_system_that_cannot_is_asked_once(ahead: Ahead) -> None:
    ahead.works = False
    ahead.put(100)
    assert not ahead.put(LEAST)
    ahead.service.run_once()
    assert len(ahead.loaded) == 1


def test_a_closed_file(ahead: Ahead) -> None:
    ahead.file.advance(100)
    ahead.file.close()
    ahead.service.run_once()
    assert ahead.loaded == []


def test_pages_stay_zero(tmp_path: Path) -> None:
    expected = [b"%d" % number for number in range(100)]
    with opened(tmp_path) as store:
        for body in expected:
            store.put(lq.Message("t", body))
        assert bodies(store) == expected
        end = store.max_offset
    log = (tmp_path / f"commitlog/{0:020d}").read_bytes()
    assert not log[end:].strip(b"\0")
