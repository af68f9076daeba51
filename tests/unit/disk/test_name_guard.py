from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Literal

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.disk.log_files import AllocateMappedFileService
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.name_guard import NameGuard, link_of
from logquarry.errors import StoreUnavailable
from logquarry.store.message_store import StoreWriter
from logquarry.testing.faulty_disk import FaultyDisk as ModelDisk
from tests.helpers.failing_disk import FaultyDisk
from tests.helpers.small_store import config, forget_start, opened

SIZE = 4096


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def make(disk: FaultyDisk, root: Path) -> MappedFileQueue:
    queue = MappedFileQueue(disk, root / "commitlog", SIZE, guard_names=True)
    queue.load()
    return queue


def put(queue: MappedFileQueue, data: bytes) -> Path:
    file = queue.writable()
    assert file.append(data) is not None
    return file.path


def second_names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".logquarry" / "names" / "commitlog").iterdir())


def test_a_deleted_file_comes_back_with_what_was_written_since(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logquarry.disk.mapped_file_queue._CHECK_EVERY", 0)
    queue = make(disk, tmp_path)
    path = put(queue, b"before")
    path.unlink()
    put(queue, b" after")
    queue.flush()
    assert path.read_bytes().startswith(b"before after")
    assert disk.order[-2:] == ["link", "sync_folder"]
    queue.close()


def test_it_comes_back_at_the_end_and_leaves_no_second_names(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    queue = make(disk, tmp_path)
    first = put(queue, b"x" * SIZE)
    put(queue, b"more")
    queue.flush()
    first.unlink()
    queue.close()
    assert first.read_bytes() == b"x" * SIZE
    assert second_names(tmp_path) == []


def test_it_comes_back_after_a_crash(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    first = put(queue, b"x" * SIZE)
    second = put(queue, b"acked")
    queue.flush()
    second.unlink()
    assert second_names(tmp_path) == [first.name, second.name]
    # Nothing closes the store: its process has died, and another one opens it.
    again = make(FaultyDisk(), tmp_path)
    assert second.read_bytes().startswith(b"acked")
    assert again.max_offset == 2 * SIZE
    again.truncate_to(SIZE + 5)
    assert second_names(tmp_path) == [second.name]
    again.close()
    assert second_names(tmp_path) == []


@pytest.mark.parametrize("error", [StoreUnavailable, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("is_removed", [False, True])
def test_an_interrupted_recovery_leaves_the_names(
    disk: FaultyDisk, tmp_path: Path, error: type[BaseException], *, is_removed: bool
) -> None:
    """But if the second name was removed meanwhile, the file must keep its first name."""
    queue = make(disk, tmp_path)
    path = put(queue, b"acked")
    queue.flush()
    path.unlink()
    guard = NameGuard(FaultyDisk())
    with pytest.raises(error), guard.restored([path.parent]) as back:
        assert back == [path]
        if is_removed:
            link_of(path).unlink()
        raise error("text")
    left = path if is_removed else link_of(path)
    assert left.read_bytes().startswith(b"acked")
    assert path.exists() is is_removed


def test_what_retention_deletes_stays_deleted(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    first = put(queue, b"x" * SIZE)
    put(queue, b"y")
    queue.flush()
    queue.remove_first()
    queue.close()
    make(disk, tmp_path).close()
    assert not first.exists()


@pytest.mark.parametrize(("lost", "back"), [([0, 1], []), ([0, 1, 3], [3]), ([0, 2, 3], [2, 3])])
def test_expired_files_do_not_come_back(
    disk: FaultyDisk, tmp_path: Path, lost: list[int], back: list[int]
) -> None:
    """A retention deletes the first files. A lost name leaves no gap before the first file."""
    folders = [tmp_path / "a" / "commitlog", tmp_path / "b" / "commitlog"]
    paths = [folders[number % 2] / f"{number * SIZE:020d}" for number in range(6)]
    for path in paths:
        disk.let_go(disk.make_file(path, SIZE))
    guard = NameGuard(disk)
    for number in lost:
        guard.guard(paths[number])
    for path in paths[:4]:
        path.unlink()
    assert sorted(NameGuard(disk).restore(folders)) == sorted(paths[number] for number in back)
    assert [path for path in paths[:4] if path.exists()] == [paths[number] for number in back]
    assert not any(link_of(path).exists() for path in paths)


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("recovery", ["safe", "rocketmq"])
def test_an_opening_after_a_brokers_retention(
    tmp_path: Path, recovery: Literal["safe", "rocketmq"], *, is_clean: bool
) -> None:
    with StoreWriter.start(tmp_path, config=config()) as store:
        for number in range(40):
            store.put(lq.Message("t", b"%04d" % number * 500))
    paths = sorted((tmp_path / "commitlog").iterdir())
    os.link(paths[1], link_of(paths[1]))
    for path in paths[:3]:
        path.unlink()
    forget_start(tmp_path)
    if not is_clean:
        (tmp_path / "abort").touch()
    with StoreWriter.start(tmp_path, config=config(recovery=recovery)) as store:
        assert store.min_offset == int(paths[3].name)
    assert sorted((tmp_path / "commitlog").iterdir()) == paths[3:]
    assert second_names(tmp_path) == []


def test_without_hard_links_a_lost_file_poisons(disk: FaultyDisk, tmp_path: Path) -> None:
    disk.failing["link"] = 95
    queue = make(disk, tmp_path)
    path = put(queue, b"text")
    queue.flush()
    put(queue, b"more")
    path.unlink()
    with pytest.raises(StoreUnavailable, match="deleted"):
        queue.flush()
    assert queue.flushed_offset == 4
    queue.close()


def test_files_that_lose_both_names_poison(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logquarry.disk.mapped_file_queue._CHECK_EVERY", 0)
    queue = make(disk, tmp_path)
    path = put(queue, b"x" * SIZE)
    put(queue, b"more")
    queue.flush()
    path.unlink()
    (tmp_path / ".logquarry" / "names" / "commitlog" / path.name).unlink()
    with pytest.raises(StoreUnavailable, match="cannot be restored"):
        queue.flush()
    queue.close()


def test_no_byte_is_lost_while_somebody_deletes_what_looked_empty(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    folder = tmp_path / "commitlog"
    allocator = AllocateMappedFileService(disk)
    allocator.start()
    queue = MappedFileQueue(disk, folder, SIZE, allocator=allocator, guard_names=True)
    queue.load()
    is_over = threading.Event()
    deleted = 0

    def meddle() -> None:
        nonlocal deleted
        chance = random.Random(1)
        while not is_over.is_set():
            # As Java does it: the last file is empty when it looks, and deleted later.
            found = sorted(folder.iterdir())[-1:]
            time.sleep(chance.choice([0, 0.0005, 0.002, 0.01]))
            for path in found:
                path.unlink(missing_ok=True)
                deleted += 1

    queue.writable()
    meddler = threading.Thread(target=meddle, daemon=True)
    meddler.start()
    written = b""
    end = time.monotonic() + 60
    while deleted < 200:
        assert time.monotonic() < end
        data = len(written).to_bytes(8, "big") * 64
        put(queue, data)
        written += data
        if len(written) % (1 << 16) == 0:
            assert queue.flush() == len(written)
    is_over.set()
    meddler.join()
    assert allocator.stop()
    queue.close()
    again = make(FaultyDisk(), tmp_path)
    found = b"".join(bytes(again.select(base) or b"") for base in again.bases)
    assert found[: len(written)] == written
    again.close()


def test_a_second_name_does_not_come_back_with_a_file_that_went(tmp_path: Path) -> None:
    """A crash brings back a file with only its second name; a deleted file must not have one."""
    disk = ModelDisk(tmp_path)
    guard = NameGuard(disk)
    path = tmp_path / "log" / "0"
    disk.let_go(disk.make_file(path, 10))
    guard.guard(path)
    disk.sync_folder(tmp_path / ".logquarry" / "names" / "log")
    guard.release(path)
    disk.remove(path)
    for seed in range(20):
        assert disk.image(random.Random(seed)).files == {}


def guarded(disk: ModelDisk, root: Path) -> tuple[NameGuard, Path]:
    """A file of a log, and its guard; both names are durable."""
    guard = NameGuard(disk)
    path = root / "log" / "0"
    disk.let_go(disk.make_file(path, 10))
    guard.guard(path)
    disk.sync_folder(root / ".logquarry" / "names" / "log")
    return guard, path


def test_a_second_name_removed_by_a_shutdown_does_not_come_back(tmp_path: Path) -> None:
    disk = ModelDisk(tmp_path)
    guard, path = guarded(disk, tmp_path)
    guard.close()
    # A retention, maybe by a broker, which knows no second names.
    disk.remove(path)
    for seed in range(20):
        assert disk.image(random.Random(seed)).files == {}


def test_a_second_name_removed_without_a_sync_does_not_come_back(tmp_path: Path) -> None:
    """The process ended before its sync; the next opening syncs."""
    disk = ModelDisk(tmp_path)
    _, path = guarded(disk, tmp_path)
    disk.unlink(link_of(path))
    NameGuard(disk).restore([path.parent])
    # A recovery or a retention, which finds no second name.
    disk.remove(path)
    for seed in range(20):
        assert disk.image(random.Random(seed)).files == {}


def test_a_second_name_that_stays_fails_the_close(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    put(queue, b"text")
    (file,) = queue.open_files
    disk.failing["unlink"] = errno.EIO
    with pytest.raises(StoreUnavailable, match=r"names/commitlog/0+: "):
        queue.close()
    assert file.select(0, 4) is None


class KeepsLinks(Disk):
    """A disk that removes no second name."""

    def unlink(self, path: Path) -> None:
        if "names" in path.parts:
            raise OSError(errno.EIO, "cannot be removed")
        super().unlink(path)


def test_a_shutdown_that_leaves_a_second_name_is_not_clean(tmp_path: Path) -> None:
    store = StoreWriter.start(tmp_path, config=config(), disk=KeepsLinks())
    store.put(lq.Message("t", b"text"))
    store.close()
    assert second_names(tmp_path) and (tmp_path / "abort").exists()
    with StoreWriter.start(tmp_path, config=config()) as again:
        assert [message.body for message in again.scan()] == [b"text"]
    assert not second_names(tmp_path) and not (tmp_path / "abort").exists()


def test_a_poisoned_store_keeps_its_second_names(disk: FaultyDisk, tmp_path: Path) -> None:
    queue = make(disk, tmp_path)
    path = put(queue, b"text")
    disk.health.poison("a sync failed")
    queue.close()
    assert second_names(tmp_path) == [path.name]


@pytest.mark.parametrize("is_newer", [True, False])
def test_second_names_in_a_copy_of_an_open_store(tmp_path: Path, *, is_newer: bool) -> None:
    """``cp -r`` makes a file of each second name. It can have messages that no other file has."""
    copy = tmp_path / "copy"
    with opened(tmp_path / "store") as store:
        for number in range(12):
            store.put(lq.Message("t", b"%04d" % number * 500))
        store.flush()
        shutil.copytree(tmp_path / "store/commitlog", copy / "commitlog")
        if is_newer:
            store.put(lq.Message("t", b"the copy of the log lacks this" * 20))
            store.flush()
        shutil.copytree(tmp_path / "store/.logquarry", copy / ".logquarry")
        (copy / "abort").touch()
    names = copy / ".logquarry/names/commitlog"
    changed = {
        path.name: path.read_bytes()
        for path in names.iterdir()
        if path.read_bytes() != (copy / "commitlog" / path.name).read_bytes()
    }
    assert bool(changed) == is_newer
    lq.recover(copy, apply=True, config=config(), accept_loss=1 << 20)
    assert second_names(copy) == []
    aside = copy / ".logquarry/quarantine/names/commitlog"
    assert {path.name: path.read_bytes() for path in aside.glob("*")} == changed
    assert not lq.recover(copy, config=config()).is_needed
