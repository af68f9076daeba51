"""A folder that cannot be opened for a sync: the sync is repeated, and nothing counts as synced."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import SyncDelayed
from logquarry.errors import StoreUnavailable
from logquarry.write.flush import FlushRealTimeService, GroupCommitService, Timing
from logquarry.write.put_result import PutStatus
from tests.helpers.small_store import config
from tests.helpers.waiting import eventually, wait_for


class Opens:
    """Replaces ``os.open``. While ``number`` is set, no folder can be opened.

    Attributes:
        refused: how many folders could not be opened.
        folders: the folders that were opened, in order.
    """

    def __init__(self) -> None:
        self.number = 0
        self.refused = 0
        self.folders: list[Path] = []
        self.real = os.open

    def __call__(self, path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_DIRECTORY:
            if self.number:
                self.refused += 1
                raise OSError(self.number, os.strerror(self.number), str(path))
            self.folders.append(Path(path))
        return self.real(path, flags, *args, **more)


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> Opens:
    opens = Opens()
    monkeypatch.setattr(os, "open", opens)
    return opens


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_no_sync_succeeds_before_the_delayed_one(number: int, opens: Opens, tmp_path: Path) -> None:
    disk = Disk()
    descriptor = disk.make_file(tmp_path / "old", 100)
    opens.number = number
    with pytest.raises(SyncDelayed, match=f"{tmp_path}: cannot be opened .* tries again"):
        disk.make_folders(tmp_path / "a" / "b")
    for _ in range(2):
        with pytest.raises(SyncDelayed):
            disk.sync(descriptor, tmp_path / "old")
        with pytest.raises(SyncDelayed):
            disk.make_file(tmp_path / "a" / "new", 100)
    assert not (tmp_path / "a" / "new").exists()
    assert disk.health.reason is None
    opens.number = 0
    opens.folders.clear()
    disk.sync(descriptor, tmp_path / "old")
    assert opens.folders == [tmp_path]
    disk.sync(descriptor, tmp_path / "old")
    assert opens.folders == [tmp_path]
    disk.close(descriptor)


def test_an_error_names_the_limit_to_raise(tmp_path: Path) -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    found = str(Disk().refused(tmp_path, error))
    assert (
        found
        == f"{tmp_path}: Too many open files: raise the process's limit of open files (ulimit -n)"
    )


def test_a_new_file_is_removed_again(opens: Opens, tmp_path: Path) -> None:
    disk = Disk()
    opens.number = errno.EMFILE
    with pytest.raises(StoreUnavailable, match="cannot be opened for a sync"):
        disk.make_file(tmp_path / "new", 100)
    assert not (tmp_path / "new").exists() and disk.health.reason is None
    opens.number = 0
    disk.close(disk.make_file(tmp_path / "new", 100))


def test_both_folders_of_a_moved_file_are_synced_later(opens: Opens, tmp_path: Path) -> None:
    disk = Disk()
    for name in "ab":
        disk.make_folders(tmp_path / name)
    (tmp_path / "a" / "x").touch()
    (tmp_path / "b" / "y").touch()
    opens.number = errno.EMFILE
    with pytest.raises(SyncDelayed):
        disk.remove(tmp_path / "b" / "y")
    with pytest.raises(SyncDelayed):
        disk.move(tmp_path / "a" / "x", tmp_path / "b" / "x")
    assert (tmp_path / "b" / "x").exists()
    opens.number = 0
    opens.folders.clear()
    disk.sync_names(tmp_path)
    assert opens.folders == [tmp_path / "a", tmp_path / "b", tmp_path]


def test_a_folder_that_was_deleted_meanwhile_needs_no_sync(opens: Opens, tmp_path: Path) -> None:
    disk = Disk()
    disk.make_folders(tmp_path / "a")
    opens.number = errno.EMFILE
    with pytest.raises(SyncDelayed):
        disk.make_folders(tmp_path / "a" / "b")
    opens.number = 0
    (tmp_path / "a" / "b").rmdir()
    (tmp_path / "a").rmdir()
    disk.sync_names(tmp_path)


def test_a_failed_sync_is_final_also_if_it_was_delayed(
    opens: Opens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk()
    opens.number = errno.EMFILE
    with pytest.raises(SyncDelayed):
        disk.make_folders(tmp_path / "a")
    opens.number = 0

    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreUnavailable, match="sync failed") as failed:
        disk.sync_names(tmp_path)
    assert not isinstance(failed.value, SyncDelayed)
    monkeypatch.undo()
    with pytest.raises(StoreUnavailable, match="sync failed"):
        disk.sync_names(tmp_path)


def test_a_change_that_cannot_be_repeated_stays_final(opens: Opens, tmp_path: Path) -> None:
    disk = Disk()
    opens.number = errno.EMFILE
    with pytest.raises(StoreUnavailable) as failed, disk.finally_synced():
        disk.make_folders(tmp_path / "a")
    assert not isinstance(failed.value, SyncDelayed) and disk.health.reason is not None


def test_a_waiting_put_ends_after_its_timeout_or_with_a_later_sync(
    opens: Opens, tmp_path: Path
) -> None:
    disk = Disk()
    queue = MappedFileQueue(disk, tmp_path / "log", 1 << 16)
    file = queue.writable()
    file.append(b"message")
    opens.number = errno.EMFILE
    with pytest.raises(SyncDelayed):
        disk.make_folders(tmp_path / "queue")
    now = 0
    service = GroupCommitService(queue, disk.health, timeout_ms=100, clock=lambda: now)
    service.start()
    late = wait_for(service, queue.max_offset)
    now = 100
    assert late.result() is False
    assert queue.flushed_offset == 0
    # No time passes from here on: only a sync can end these waits.
    waits = [wait_for(service, queue.max_offset)]
    runs = opens.refused
    eventually(lambda: opens.refused > runs)
    waits.append(wait_for(service, queue.max_offset))
    assert not any(wait.done() for wait in waits)
    opens.number = 0
    assert all(wait.result() is True for wait in waits)
    assert service.stop()
    queue.close()


def test_the_run_after_a_delayed_thorough_flush_is_thorough(opens: Opens, tmp_path: Path) -> None:
    disk = Disk()
    queue = MappedFileQueue(disk, tmp_path / "log", 1 << 16)
    file = queue.writable()
    file.append(b"message")
    service = FlushRealTimeService(queue, disk.health, Timing(500, 4, 10_000), clock=lambda: 1)
    opens.number = errno.EMFILE
    with pytest.raises(SyncDelayed):
        disk.make_folders(tmp_path / "queue")
    with pytest.raises(SyncDelayed):
        service.run_once()
    opens.number = 0
    service.run_once()
    assert queue.flushed_offset == len(b"message")
    queue.close()


def test_a_store_without_descriptors_takes_puts_again(opens: Opens, tmp_path: Path) -> None:
    settings = config(flush_disk_type="SYNC_FLUSH", sync_flush_timeout=300)
    with lq.MessageStore.open(tmp_path / "store", mode="rw", config=settings) as store:
        # With the short timeout, a put on a slow disk would not end with PUT_OK.
        store.put(lq.Message("a", b"0", wait_store_ok=False))
        store.flush()
        store.wait_dispatched()
        opens.number = errno.EMFILE
        # The dispatcher cannot make the folder of the new queue durably.
        store.put(lq.Message("b", b"1"))
        with pytest.raises(StoreUnavailable, match="cannot be opened for a sync"):
            store.wait_dispatched(timeout=60)
        late = store.put_async(lq.Message("a", b"2"))
        with pytest.raises(StoreUnavailable, match="cannot be opened for a sync"):
            store.flush()
        opens.number = 0
        store.flush()

        def takes_puts() -> bool:
            try:
                return store.put(lq.Message("a", b"3")).status is PutStatus.PUT_OK
            except StoreUnavailable:
                return False

        eventually(takes_puts)
        assert late.exception() is not None or late.result().status in PutStatus
    assert not (tmp_path / "store" / "abort").exists()
    with lq.MessageStore.open(tmp_path / "store") as reader:
        bodies = [message.body for message in reader.scan()]
        assert {b"0", b"1", b"3"} <= set(bodies)
        assert [m.body for m in reader.get("b", 0).messages] == [b"1"]
