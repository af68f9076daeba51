"""A folder lists a name, but the disk cannot read the inode of this name."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound
from logquarry.log.filesystem import Entry, LocalFileSystem
from tests.helpers import operator_faults
from tests.helpers.command import ended as run

QUEUE = "consumequeue/orders/0"
QUEUE_FILE = f"{QUEUE}/00000000000000000400"
LOG_FILE = "commitlog/00000000000000016384"
TOPICS = "config/topics.json"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return operator_faults.make_store(tmp_path / "store")


class _Lost:
    """An entry of a folder; the disk cannot read its status."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name = entry.name
        self.is_dir = entry.is_dir
        self.is_symlink = entry.is_symlink

    def stat(self) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def lost(path: Path) -> Iterator[None]:
    """Hide the status of one entry from :class:`LocalFileSystem`."""
    scandir = os.scandir

    def listed(folder: Any) -> Any:
        found = scandir(folder)
        if not isinstance(folder, str) or Path(folder) != path.parent:
            return found
        with found:
            return nullcontext([_Lost(one) if one.name == path.name else one for one in found])

    with mock.patch("logquarry.log.filesystem.os.scandir", listed):
        yield


COMMANDS = ("info", "stats", "verify", "messages", "report --html page.html")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", [QUEUE, QUEUE_FILE, LOG_FILE])
def test_no_command_shows_the_rest_as_the_whole(store: Path, command: str, name: str) -> None:
    word, *options = command.split()
    with lost(store / name):
        shown = run(word, store, *options)
    assert shown.exit_code == 3
    assert shown.stdout == ""
    assert f"{store / name}: cannot be read: Input/output error" in shown.stderr


def test_a_name_that_is_gone_is_left_out(store: Path) -> None:
    files = LocalFileSystem(store)
    gone = FileNotFoundError(errno.ENOENT, "")
    with mock.patch.object(_Lost, "stat", side_effect=gone), lost(store / QUEUE):
        assert [entry.name for entry in files.list("consumequeue/orders")] == ["1"]


def test_a_foreign_link_without_permission(store: Path, tmp_path: Path) -> None:
    (store / "backup").symlink_to(tmp_path)
    (store / "consumequeue" / "link").symlink_to(tmp_path)
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with mock.patch.object(_Lost, "stat", side_effect=denied):
        with lost(store / "backup"):
            assert Entry("backup", True, 0) in LocalFileSystem(store).list("")
            assert run("messages", store).exit_code == 0
        # Only links of the root are ignored: links below the root may be parts of the store.
        for name in ("checkpoint", "consumequeue/link"):
            with lost(store / name), pytest.raises(StoreNotFound, match="Permission denied"):
                LocalFileSystem(store).list(str(Path(name).parent).strip("."))


def test_salvage_saves_the_rest_and_lists_the_name(store: Path, tmp_path: Path) -> None:
    for number, (name, saved) in enumerate([(QUEUE, 80), (LOG_FILE, 57), (TOPICS, 80)]):
        into = tmp_path / f"saved{number}"
        with lost(store / name):
            shown = run("salvage", store, "--into", into)
        assert shown.exit_code == 1
        reason = "it cannot be read: Input/output error (errno 5)"
        assert f"left behind: unreadable ({name}): {reason}" in shown.stdout
        with lq.MessageStore.open(into) as new:
            assert len(list(new.scan())) == saved


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_without_permission_is_no_empty_folder(store: Path) -> None:
    folder = store / "commitlog"
    folder.chmod(0o600)
    try:
        with pytest.raises(StoreNotFound, match="Permission denied"):
            LocalFileSystem(store).exists(f"commitlog/{0:020d}")
    finally:
        folder.chmod(0o755)


# ------------------------------------------------------------------------------ a real file system
@pytest.fixture
def spoiled(store: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Copies the store to a mounted ext4 image, and clears the inode of one name."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()

    def spoil(name: str) -> Path:
        image.touch()
        os.truncate(image, 16 << 20)
        try:
            _call("mkfs.ext4", "-q", "-N", 500, image)
            _call("mount", "-o", "loop", image, mount)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no loop mounts here")
        _call("cp", "-a", store, mount / "store")
        _call("umount", mount)
        _call("debugfs", "-w", "-R", f"clri /store/{name}", image)
        _call("mount", "-o", "loop", image, mount)
        return mount / "store"

    try:
        yield spoil
    finally:
        subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)


def _call(*words: object) -> None:
    subprocess.run([str(word) for word in words], capture_output=True, check=True)


@pytest.mark.root
@pytest.mark.parametrize("name", [QUEUE, LOG_FILE, TOPICS])
def test_a_cleared_inode(spoiled: Callable[[str], Path], name: str) -> None:
    root = spoiled(name)
    shown = run("info", root)
    assert shown.exit_code == 3
    assert f"{root / name}: cannot be read: Structure needs cleaning" in shown.stderr
    assert f"left behind: unreadable ({name})" in run("salvage", root).stdout
