"""Parts of a store are links to other disks, so a file cannot be renamed from or to them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from tests.helpers.small_store import bodies, config, facts, opened

COUNT = 60
PARTS = ("commitlog", "consumequeue", "index")


class ManyDisks(Disk):
    """Each folder of a store is on a separate disk, and the other files are on one more.

    Attributes:
        has_room: whether a copy can be made.
    """

    has_room = True

    def rename(self, path: Path, to: Path) -> None:
        """See :meth:`Disk.rename`."""
        if self._disk_of(path) != self._disk_of(to):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        super().rename(path, to)

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        """See :meth:`Disk.write`."""
        if not self.has_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, data, position)

    @staticmethod
    def _disk_of(path: Path) -> str:
        if ".logquarry" in path.parts:
            return "root"
        return next((part for part in PARTS if part in path.parts), "root")


def harmed(root: Path) -> dict[str, bytes]:
    """A store in which each part has files to remove; their content, by its place in quarantine."""
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"%03d" % number * 200, keys=f"k{number}"))
    log = sorted((root / "commitlog").iterdir())
    stranger = root / "commitlog" / f"{7:020d}"
    stranger.write_bytes(b"no file of this log")
    with log[1].open("ab") as file:
        file.write(b"too much")
    queue = root / "consumequeue" / "t" / "0" / f"{400:020d}"
    os.truncate(queue, 399)
    (root / "abort").touch()
    gone = [stranger, queue, *(root / "index").iterdir()]
    return {str(path.relative_to(root)): path.read_bytes() for path in gone}


@pytest.mark.parametrize("mode", ["linked", "in place"])
def test_what_goes_is_copied(tmp_path: Path, mode: str) -> None:
    root = tmp_path / "store"
    gone = harmed(root)
    if mode == "linked":
        for part in PARTS:
            (root / part).rename(tmp_path / part)
            (root / part).symlink_to(tmp_path / part)
    lq.recover(root, apply=True, config=config(), disk=ManyDisks())
    aside = root / ".logquarry" / "quarantine"
    for name, data in gone.items():
        assert (aside / name).read_bytes() == data
    assert (aside / "commitlog" / f"{16_384:020d}.from-16384").read_bytes() == b"too much"
    assert not list(root.rglob("*.new"))
    assert not lq.recover(root, config=config()).is_needed
    with opened(root) as store:
        assert len(bodies(store)) == COUNT


def test_a_lost_file_gets_a_blank(tmp_path: Path) -> None:
    root = tmp_path / "store"
    harmed(root)
    (root / "commitlog" / f"{16_384:020d}").unlink()
    lq.recover(root, apply=True, config=config(), disk=ManyDisks(), accept_loss=1 << 20)
    assert not list(root.rglob("*.new"))
    assert not lq.recover(root, config=config()).is_needed
    with lq.MessageStore.open(root) as store:
        assert 0 < len(list(store.scan(on_damage="skip"))) < COUNT


@pytest.mark.parametrize("rest", [b"", b"half of it"])
def test_no_room_for_the_copy(tmp_path: Path, rest: bytes) -> None:
    """The files stay where they are, and the next recovery starts from the beginning."""
    root, disk = tmp_path / "store", ManyDisks()
    stranger = root / "commitlog" / f"{7:020d}"
    harmed(root)
    data = stranger.read_bytes()
    aside = root / ".logquarry" / "quarantine" / "commitlog"
    if rest:
        aside.mkdir(parents=True)
        (aside / f"{stranger.name}.new").write_bytes(rest)
    disk.make_folders(aside)
    disk.has_room = False
    with pytest.raises(StoreUnavailable, match="no room on the disk"):
        disk.set_aside(stranger, aside)
    assert stranger.read_bytes() == data and not (aside / stranger.name).exists()
    lq.recover(root, apply=True, config=config(), disk=ManyDisks())
    assert (aside / stranger.name).read_bytes() == data
    assert sorted(path.name for path in aside.iterdir()) == [
        stranger.name,
        f"{16_384:020d}.from-16384",
    ]


def test_real_disks(tmp_path: Path) -> None:
    """Only on a machine with a second disk."""
    other = Path("/dev/shm")
    if not os.access(other, os.W_OK) or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one disk only")
    root, away = tmp_path / "store", other / f"logquarry-{os.getpid()}-{tmp_path.name}"
    gone = harmed(root)
    try:
        shutil.move(root / "commitlog", away)
        (root / "commitlog").symlink_to(away)
        lq.recover(root, apply=True, config=config())
        aside = root / ".logquarry" / "quarantine"
        assert all((aside / name).read_bytes() == data for name, data in gone.items())
        before = facts(away)
        assert not lq.recover(root, config=config()).is_needed
        assert facts(away) == before
    finally:
        shutil.rmtree(away, ignore_errors=True)
