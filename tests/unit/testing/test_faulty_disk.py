"""FaultyDisk loses only data that was not synced."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from logquarry.testing.disk_state import CALLS, PAGE, SECTOR, SHORT, CrashImage, Stopped
from logquarry.testing.faulty_disk import FaultyDisk

SIZE = 3 * PAGE


@pytest.fixture
def disk(tmp_path: Path) -> FaultyDisk:
    return FaultyDisk(tmp_path)


def images(disk: FaultyDisk, count: int = 200) -> Iterator[CrashImage]:
    state = disk.state()
    return (state.crash(random.Random(seed)) for seed in range(count))


def made(disk: FaultyDisk, name: str, data: bytes) -> int:
    """A durable file."""
    descriptor = disk.make_file(disk.root / name, len(data))
    disk.write_all(descriptor, data, 0)
    disk.fdatasync(descriptor)
    return descriptor


def test_what_is_synced_is_in_each_image(disk: FaultyDisk) -> None:
    data = os.urandom(SIZE)
    disk.make_folders(disk.root / "a" / "b")
    disk.close(made(disk, "a/b/file", data))
    for image in images(disk):
        assert image == CrashImage(("a", "a/b"), {"a/b/file": data})


def test_pages_are_old_new_in_between_or_torn(disk: FaultyDisk) -> None:
    descriptor = made(disk, "file", b"1" * SIZE)
    mapped = disk.map(descriptor, SIZE)
    mapped[:] = b"2" * SIZE
    disk.state()
    mapped[:] = b"3" * SIZE
    seen: set[bytes] = set()
    for image in images(disk, 2_000):
        data = image.files["file"]
        assert len(data) == SIZE
        for at in range(0, SIZE, PAGE):
            sectors = [data[at : at + PAGE][n : n + SECTOR] for n in range(0, PAGE, SECTOR)]
            assert all(
                sector in (b"1" * SECTOR, b"2" * SECTOR, b"3" * SECTOR) for sector in sectors
            )
            seen.add(b"".join(sector[:1] for sector in sectors))
    assert {b"1" * 8, b"2" * 8, b"3" * 8} < seen
    assert any(len(set(page)) == 2 for page in seen), "torn ones"
    assert disk.state().killed().files["file"] == b"3" * SIZE
    assert disk.state().synced().files["file"] == b"1" * SIZE
    disk.fdatasync(descriptor)
    assert {image.files["file"] for image in images(disk)} == {b"3" * SIZE}
    mapped.close()
    disk.close(descriptor)


def test_a_new_file_is_there_absent_empty_or_short(disk: FaultyDisk) -> None:
    descriptor = disk.open(disk.root / "file", create=True)
    disk.allocate(descriptor, SIZE)
    sizes = {len(image.files["file"]) if image.files else None for image in images(disk, 500)}
    assert {None, 0, SIZE} < sizes
    disk.fsync(descriptor)
    assert {len(i.files["file"]) if i.files else None for i in images(disk)} == {None, SIZE}
    disk.sync_folder(disk.root)
    assert {len(image.files["file"]) for image in images(disk)} == {SIZE}
    disk.close(descriptor)


def test_a_name_that_was_taken_away_may_come_back(disk: FaultyDisk) -> None:
    disk.close(made(disk, "file", b"x"))
    disk.unlink(disk.root / "file")
    assert {tuple(image.files) for image in images(disk)} == {(), ("file",)}
    disk.sync_folder(disk.root)
    assert {tuple(image.files) for image in images(disk)} == {()}


@pytest.mark.parametrize("synced", [None, "from", "to"])
def test_a_rename_loses_no_file(disk: FaultyDisk, synced: str | None) -> None:
    for folder in ("from", "to"):
        disk.make_folders(disk.root / folder)
    disk.close(made(disk, "from/file", b"x"))
    disk.rename(disk.root / "from" / "file", disk.root / "to" / "file")
    if synced is not None:
        disk.sync_folder(disk.root / synced)
    found = {frozenset({*image.files, *image.links}) for image in images(disk)}
    both, new = frozenset({"from/file", "to/file"}), frozenset({"to/file"})
    old = frozenset({"from/file"})
    assert found == {None: {old, both, new}, "from": {new}, "to": {both, new}}[synced]


def test_links_are_one_file(disk: FaultyDisk, tmp_path: Path) -> None:
    disk.close(made(disk, "file", b"x"))
    disk.link(disk.root / "file", disk.root / "other")
    disk.sync_folder(disk.root)
    (image,) = images(disk, 1)
    root = image.write(tmp_path / "image")
    assert (root / "file").samefile(root / "other")
    assert (root / "file").read_bytes() == b"x"


def test_a_failed_sync_loses_what_it_was_for(disk: FaultyDisk) -> None:
    descriptor = made(disk, "file", b"1" * SIZE)
    mapped = disk.map(descriptor, SIZE)
    mapped[:PAGE] = b"2" * PAGE
    disk.fail("fdatasync")
    with pytest.raises(OSError):
        disk.fdatasync(descriptor)
    mapped[PAGE : 2 * PAGE] = b"3" * PAGE
    disk.fdatasync(descriptor)
    expected = b"1" * PAGE + b"3" * PAGE + b"1" * PAGE
    assert disk.state().synced().files["file"] == expected
    # The second write makes the page dirty again.
    disk.write_all(descriptor, b"2" * 10, 0)
    disk.fdatasync(descriptor)
    assert disk.state().synced().files["file"] == b"2" * PAGE + expected[PAGE:]
    mapped.close()
    disk.close(descriptor)


def test_calls_fail_as_they_are_told(disk: FaultyDisk) -> None:
    descriptor = made(disk, "file", bytes(10))
    disk.fail("write", nth=2, error=errno.ENOSPC)
    assert disk.write(descriptor, b"abcd", 0) == 4
    with pytest.raises(OSError, match="No space"):
        disk.write(descriptor, b"abcd", 0)
    assert disk.write(descriptor, b"abcd", 0) == 4
    disk.fail("write", error=SHORT, for_ever=True)
    assert [disk.write(descriptor, b"abcde", 0) for _ in range(2)] == [3, 3]
    disk.faults.clear()
    disk.fail(nth=2)
    assert disk.size(descriptor) == 10
    with pytest.raises(OSError, match="Input/output"):
        disk.list(disk.root)
    with pytest.raises(ValueError, match="not a disk call"):
        disk.fail("fsnyc")
    disk.close(descriptor)


def test_nothing_happens_after_the_end(disk: FaultyDisk) -> None:
    descriptor = made(disk, "file", b"before")
    disk.stop_at(disk.faults.total + 2)
    disk.write(descriptor, b"middle", 0)
    with pytest.raises(Stopped):
        disk.fdatasync(descriptor)
    state = disk.state()
    assert state.killed().files == {"file": b"middle"}
    with pytest.raises(Stopped):
        disk.write(descriptor, b"behind", 0)
    assert disk.state() is state
    disk.close(descriptor)
    disk.restart()
    again = disk.open(disk.root / "file")
    assert disk.read(again, 10, 0) == b"middle" and disk.health.reason is None
    disk.close(again)


def test_places_that_sync_are_known_and_can_be_left_out(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = FaultyDisk(root)
    disk.close(disk.make_file(root / "file", 10))
    assert [site.split(":")[0] for site in disk.sites] == ["fsync ?", "sync_folder root"]
    (folder_site,) = [site for site in disk.sites if site.startswith("sync_folder")]
    disk.ignored.add(folder_site)
    disk.close(disk.make_file(root / "other", 10))
    assert {tuple(sorted(i.files)) for i in images(disk)} == {("file",), ("file", "other")}


def test_what_is_there_at_the_start_is_durable(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"x")
    os.link(tmp_path / "folder" / "file", tmp_path / "second")
    (image,) = images(FaultyDisk(tmp_path), 1)
    assert image.folders == ("folder",) and len(image.files) == len(image.links) == 1


def test_all_calls_of_the_port_are_known(tmp_path: Path) -> None:
    from logquarry.disk.disk import Disk

    replaced = {name for name in vars(Disk).keys() & vars(FaultyDisk) if not name.startswith("_")}
    assert replaced == CALLS
