"""Searches in a sparse log file read only the parts with data, also in memory (tmpfs)."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import LogBytes
from logquarry.log.walk import LogEnd, LogReader
from logquarry.testing.builder import fill

MEMORY = Path("/dev/shm")
FILE = 64 << 20
MOST = 8 << 20


@pytest.fixture
def root() -> Iterator[Path]:
    if not os.access(MEMORY, os.W_OK):
        pytest.skip("there is no folder in memory")
    folder = Path(tempfile.mkdtemp(prefix="logquarry-test-", dir=MEMORY))
    try:
        yield folder / "store"
    finally:
        shutil.rmtree(folder)


def log_end(layout: StoreLayout) -> int:
    *_, last = LogReader(layout).events()
    assert isinstance(last, LogEnd)
    return last.offset


def used(root: Path) -> int:
    """Bytes that the log takes from the disk."""
    return sum(path.stat().st_blocks for path in (root / "commitlog").iterdir()) * 512


def test_a_search_does_not_fill_holes(root: Path) -> None:
    """A read of a hole through a map takes memory on a tmpfs, and the hole then looks like data."""
    fill(root, count=100, file_size=FILE)
    layout = StoreLayout.open(root)
    end = log_end(layout)
    assert used(root) < MOST
    log = LogBytes(layout, check_crc=True, batch_bytes=1 << 24)
    assert log.data_end(0) <= end
    assert log.find(end, FILE) is None
    assert used(root) < MOST


def test_data_after_a_hole_is_found(root: Path) -> None:
    fill(root, count=100, file_size=FILE)
    path = next((root / "commitlog").iterdir())
    layout = StoreLayout.open(root)
    end = log_end(layout)
    frame = path.read_bytes()[:100]
    for at in (3 << 20, (3 << 20) - 50, 5 * (1 << 20) + 12_345, FILE - 200):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(frame)
        log = LogBytes(StoreLayout.open(root), check_crc=True, batch_bytes=1 << 24)
        assert log.data_end(0) == log.data_end(end) == at + len(frame.rstrip(b"\0"))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes(len(frame)))
