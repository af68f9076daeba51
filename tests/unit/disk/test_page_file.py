"""Are checkpoint and durable offset that the disk does not deliver set aside before a write?"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from logquarry.disk.disk import Disk
from logquarry.disk.page_file import CheckpointFile, DurableFile, PageFile
from logquarry.format.checkpoint import Checkpoint


class BadFile(Disk):
    """A disk that does not deliver the bytes of one file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._bad = path.stat().st_ino
        self.writes = 0

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        if os.fstat(descriptor).st_ino == self._bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(descriptor, count, position)

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        self.writes += os.fstat(descriptor).st_ino == self._bad
        return super().write(descriptor, data, position)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("checkpoint", CheckpointFile),
        (
            ".logquarry/durable",
            lambda disk, path: DurableFile(disk, path, 100, Checkpoint(0, 0, 0)),
        ),
    ],
)
def test_an_unreadable_file_is_set_aside(
    name: str, make: Callable[[Disk, Path], CheckpointFile | DurableFile], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\1" * 4096)
    disk = BadFile(path)
    file = make(disk, path)
    if isinstance(file, CheckpointFile):
        file.physic_timestamp = 5
        file.flush()
    file.close()
    aside = tmp_path / ".logquarry" / "quarantine" / path.name
    assert aside.read_bytes() == b"\1" * 4096 and disk.writes == 0
    assert path.read_bytes() != aside.read_bytes()


def test_a_fork_may_find_the_descriptor_closed(tmp_path: Path) -> None:
    """A child may have closed all descriptors, as daemons do, before it abandons the file."""
    file = PageFile(Disk(), tmp_path / "page", 4096, tmp_path)
    os.close(file._descriptor)
    file.abandon_in_child()
    assert not file.is_open
