"""Findings name the log's own folder, also if the log is not in ``commitlog/``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.format.arrays import Int32, Int64
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan
from logquarry.read.log_end import LogFrontier
from logquarry.read.store_sizes import require_stated_size
from logquarry.store import state
from tests.helpers.store_maker import StoreMaker

FILE_SIZE = 1000
FOLDERS = ("clA", "clB")
FAR = 1 << 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store whose log files lie in two folders in turn."""
    maker = StoreMaker(log_file_size=FILE_SIZE)
    for _ in range(20):
        maker.put()
    root = maker.write(tmp_path / "store")
    for number, path in enumerate(sorted((root / "commitlog").iterdir())):
        folder = root / FOLDERS[number % 2]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    (root / "commitlog").rmdir()
    return root


def test_an_offset_without_a_file(root: Path) -> None:
    layout = StoreLayout.open(root)
    offsets: Int64 = np.array([FAR], np.int64)
    sizes: Int32 = np.array([100], np.int32)
    (span,) = runs_at(layout, offsets, sizes)
    assert isinstance(span, DamagedSpan) and span.path == str(root / "clA")
    assert layout.log_path(FAR) == str(root / "clA")
    assert layout.log_path(FILE_SIZE) == str(root / "clB" / f"{FILE_SIZE:020d}")


def test_a_size_that_the_files_contradict(root: Path) -> None:
    config = StoreConfig(mapped_file_size_commit_log=FILE_SIZE // 2)
    with pytest.raises(UsageError, match=str(root / "clA")):
        require_stated_size(StoreLayout.open(root, config))


def test_the_lost_end_of_the_log(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = StoreLayout.open(root)
    LogFrontier(skips_damage=True)._with_lost_files(layout, layout.commit_log.end, FAR)
    assert f"{root / 'clA'}: the last " in caplog.text


def test_the_use_of_the_disk_with_most_room(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"clA": 90, "clB": 40, "consumequeue": 70}

    def statvfs(path: Path) -> os.statvfs_result:
        free = 100 - shares[path.name]
        return os.statvfs_result((1, 1, 100, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    layout = StoreLayout.open(root)
    ratio: Callable[..., float | None] = state._disk_ratio
    assert ratio(layout, layout.log_folders.paths) == pytest.approx(0.4)
    assert ratio(layout, ("consumequeue",)) == pytest.approx(0.7)
