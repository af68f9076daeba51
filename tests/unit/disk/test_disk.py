from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from logquarry import paths
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import StoreUnavailable
from logquarry.testing.faulty_disk import FaultyDisk as ModelDisk
from tests.helpers.failing_disk import EIO, ENOSPC, FaultyDisk


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def test_a_new_file_has_its_blocks_and_is_durable(disk: FaultyDisk, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    descriptor = disk.make_file(path, 100_000)
    assert path.read_bytes() == bytes(100_000)
    assert os.fstat(descriptor).st_blocks * 512 >= 100_000
    # Each new folder's name, then the file, then its name.
    assert disk.order == ["sync_folder", "sync_folder", "open", "allocate", "fsync", "sync_folder"]
    assert not os.get_inheritable(descriptor)
    disk.close(descriptor)


def test_an_empty_file_can_replace_a_file(disk: FaultyDisk, tmp_path: Path) -> None:
    """A crash can leave empty files in ``config/``; salvage copies them. posix_fallocate refuses
    the length 0.
    """
    path = tmp_path / "file"
    path.write_bytes(b"before")
    disk.replace(path, b"")
    assert path.read_bytes() == b""


@pytest.mark.parametrize("call", ["open", "allocate", "write", "rename"])
def test_a_failed_replacement_names_the_file_itself(
    disk: FaultyDisk, tmp_path: Path, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    disk.failing[call] = ENOSPC
    with pytest.raises(StoreUnavailable, match=f"^{path}: no room on the disk"):
        disk.replace(path, b"after")
    assert path.read_bytes() == b"before"


ATTRIBUTES = ". If lsattr shows" if sys.platform == "linux" else ""


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EROFS, "mount the file system for writing"),
        (errno.EIO, "check the disk"),
        (errno.EACCES, "use an account that may write there"),
        (errno.EPERM, f"use an account that may write there{ATTRIBUTES}"),
    ],
)
@pytest.mark.parametrize("call", ["open", "fdatasync"])
def test_a_failed_write_names_the_next_step(
    disk: FaultyDisk, tmp_path: Path, call: str, number: int, step: str
) -> None:
    disk.failing[call] = number
    with pytest.raises(StoreUnavailable, match=f": {os.strerror(number)}: {step}"):
        disk.replace(tmp_path / "file", b"after")


@pytest.mark.parametrize("call", ["fsync", "fdatasync"])
def test_a_failed_sync_of_a_replacement_names_the_file_itself(
    disk: FaultyDisk, tmp_path: Path, call: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    disk.failing[call] = EIO
    with pytest.raises(StoreUnavailable) as raised:
        disk.replace(path, b"after")
    assert f"{path}: sync failed" in str(raised.value) and "file.new" not in str(raised.value)
    assert path.read_bytes() == b"before"


def test_a_failed_copy_to_another_disk_names_the_file_itself(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, target = tmp_path / "file", tmp_path / "there"
    path.write_bytes(b"content")
    rename = disk.rename

    def other_disk(source: Path, to: Path) -> None:
        if source == path:
            raise OSError(errno.EXDEV, "another disk")
        rename(source, to)

    monkeypatch.setattr(disk, "rename", other_disk)
    disk.failing["allocate"] = ENOSPC
    with pytest.raises(StoreUnavailable, match=f"^{target}: no room on the disk"):
        disk.move(path, target)
    assert path.read_bytes() == b"content" and not list(tmp_path.glob("*.new"))


def test_a_failed_allocation_leaves_nothing(disk: FaultyDisk, tmp_path: Path) -> None:
    disk.failing["allocate"] = ENOSPC
    with pytest.raises(StoreUnavailable, match="no room"):
        disk.make_file(tmp_path / "file", 100_000)
    assert list(tmp_path.iterdir()) == []
    assert disk.health.reason is None, "a full disk is not a failed sync: later there may be room"
    del disk.failing["allocate"]
    disk.close(disk.make_file(tmp_path / "file", 100_000))


def test_a_name_that_is_taken_is_left_alone(disk: FaultyDisk, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"somebody's")
    with pytest.raises(StoreUnavailable, match="exists"):
        disk.make_file(tmp_path / "file", 10)
    assert (tmp_path / "file").read_bytes() == b"somebody's"


@pytest.mark.parametrize("call", ["fsync", "sync_folder"])
def test_a_file_that_is_not_durable_is_not_used(
    disk: FaultyDisk, tmp_path: Path, call: str
) -> None:
    disk.failing[call] = EIO
    with pytest.raises(StoreUnavailable, match="sync failed"):
        disk.make_file(tmp_path / "file", 10)
    assert list(tmp_path.iterdir()) == []
    assert disk.health.reason is not None


def test_a_failed_sync_is_never_tried_again(disk: FaultyDisk, tmp_path: Path) -> None:
    descriptor = disk.make_file(tmp_path / "file", 10)
    disk.failing["fdatasync"] = EIO
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            disk.sync(descriptor, tmp_path / "file")
    del disk.failing["fdatasync"]
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        disk.sync(descriptor, tmp_path / "file")
    with pytest.raises(StoreUnavailable):
        disk.make_file(tmp_path / "other", 10)
    assert disk.counts["fdatasync"] == 1
    disk.close(descriptor)


def test_short_writes_are_finished(disk: FaultyDisk, tmp_path: Path) -> None:
    descriptor = disk.make_file(tmp_path / "file", 10)
    disk.most_bytes_a_write = 3
    disk.write_all(descriptor, b"0123456789", 0)
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    disk.close(descriptor)


def test_set_aside_keeps_what_is_there(disk: FaultyDisk, tmp_path: Path) -> None:
    for content in (b"one", b"two", b"three"):
        (tmp_path / "file").write_bytes(content)
        disk.set_aside(tmp_path / "file", tmp_path / "aside")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "aside").iterdir()}
    assert kept == {"file": b"one", "file.1": b"two", "file.2": b"three"}
    # Both the new name and the removal of the old one.
    assert disk.synced_folders == [tmp_path, *3 * [tmp_path / "aside", tmp_path]]


def test_remove_is_durable_and_may_find_nothing(disk: FaultyDisk, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk.remove(tmp_path / "file")
    assert disk.order == ["unlink", "sync_folder"]
    disk.remove(tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if made.returncode != 0:
        pytest.skip("no mounts here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.root
def test_a_full_disk_is_an_error_and_reads_go_on(small_disk: Path) -> None:
    queue = MappedFileQueue(Disk(), small_disk / "commitlog", 400_000)
    queue.load()
    with pytest.raises(StoreUnavailable, match="no room"):
        for _ in range(20):
            file = queue.writable()
            assert file.append(b"x" * 100_000) is not None
    assert queue.max_offset == 800_000
    data = queue.select(700_000)
    assert data is not None and bytes(data) == b"x" * 100_000
    assert len(list((small_disk / "commitlog").iterdir())) == 2
    queue.flush()
    # The disk has room again: the store goes on.
    queue.remove_first()
    queue.writable()
    queue.close()


def test_a_file_that_was_not_made_does_not_come_back(tmp_path: Path) -> None:
    """A store goes on with a full disk; the next opening would refuse half a file."""
    disk = ModelDisk(tmp_path)
    disk.fail("allocate", error=ENOSPC)
    with pytest.raises(StoreUnavailable, match="no room"):
        disk.make_file(tmp_path / "file", 10)
    assert disk.health.reason is None
    for seed in range(20):
        assert disk.image(random.Random(seed)).files == {}


def test_a_file_that_was_not_made_and_stays_ends_writing(tmp_path: Path) -> None:
    disk = ModelDisk(tmp_path)
    disk.fail("allocate", error=ENOSPC)
    disk.fail("unlink")
    with pytest.raises(StoreUnavailable, match="cannot be allocated or deleted"):
        disk.make_file(tmp_path / "file", 10)
    assert disk.health.reason is not None


def test_names_that_cannot_be_read_are_a_refusal(tmp_path: Path) -> None:
    disk = ModelDisk(tmp_path)
    disk.fail("list")
    with pytest.raises(StoreUnavailable, match="Input/output error"):
        disk.names_in(tmp_path)
    assert disk.names_in(tmp_path) == []


def test_what_the_system_says_to_a_close_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = ModelDisk(tmp_path)
    descriptor = disk.make_file(tmp_path / "file", 10)
    disk.fail("close")
    disk.let_go(descriptor)
    assert "closing a file failed" in caplog.text


@pytest.mark.parametrize("call", ["make_folders", "set_aside"])
def test_names_that_the_disk_cannot_look_up(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mode_of(path: Path) -> int:
        if path.name == "lost":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return found(path)

    found = paths.mode_of
    disk = Disk()
    file = tmp_path / "lost"
    file.write_bytes(b"")
    monkeypatch.setattr(paths, "mode_of", mode_of)
    with pytest.raises(StoreUnavailable, match="Input/output error: check the disk"):
        if call == "make_folders":
            disk.make_folders(file)
        else:
            disk.set_aside(file, tmp_path / "aside")
    assert file in tmp_path.iterdir()
