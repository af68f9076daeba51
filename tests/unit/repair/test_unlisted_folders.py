"""A folder of queues or of the index that the disk does not list is not taken for an empty one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.errors import StoreNotFound, StoreUnavailable
from logquarry.repair.recover.store_folders import sync_files
from tests.helpers.small_store import opened


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with opened(tmp_path) as store:
        for number in range(5):
            store.put(lq.Message("t", b"x", keys=f"k{number}"))
    return tmp_path


@contextmanager
def unlisted(folder: Path, code: int) -> Iterator[None]:
    """Let the listing of a folder fail, but not the listings by the reader of the store."""
    scandir = os.scandir

    def failing(path: str | Path) -> Any:
        if path == folder:
            raise OSError(code, os.strerror(code), str(path))
        return scandir(path)

    with patch.object(os, "scandir", failing):
        yield


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", ["consumequeue", "consumequeue/t", "consumequeue/t/0", "index"])
def test_the_plan_of_rebuild(root: Path, name: str, code: int) -> None:
    with (
        unlisted(root / name, code),
        pytest.raises(StoreNotFound, match=f"{root / name}: cannot be read: {os.strerror(code)}"),
    ):
        lq.rebuild(root)
    old = lq.rebuild(root).old
    assert old["consumequeue"].files == 1
    assert old["index"].files == 1


def test_the_plan_counts_a_file_in_a_folder_s_place(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")
    (root / "consumequeue").write_bytes(b"xyz")
    found = lq.rebuild(root).old["consumequeue"]
    assert (found.files, found.bytes) == (1, 3)


def test_a_sync_of_all_files(root: Path) -> None:
    folder = root / "consumequeue/t/0"
    with (
        unlisted(folder, errno.EIO),
        pytest.raises(StoreUnavailable, match=f"{folder}: {os.strerror(errno.EIO)}"),
    ):
        sync_files(Disk(), root)
    # A user may not list lost+found, and no writer of this user has written to it.
    with unlisted(folder, errno.EACCES):
        sync_files(Disk(), root)
