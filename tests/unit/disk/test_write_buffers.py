"""The copy of a file releases its memory in whole pages of the system, however large they are."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from logquarry.disk import write_buffers
from logquarry.disk.disk import Disk
from logquarry.disk.write_buffers import FileCopy, TransientStorePool
from logquarry.errors import StoreUnavailable

PAGE = 64 << 10
SIZE = 16 * PAGE


@pytest.mark.parametrize("loaded", [0, 5, PAGE + 1])
def test_only_whole_pages_are_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: int
) -> None:
    if not hasattr(mmap, "MADV_DONTNEED"):
        pytest.skip("this system has no MADV_DONTNEED")
    monkeypatch.setattr(write_buffers, "PAGESIZE", PAGE, raising=False)
    monkeypatch.setattr(write_buffers, "_STEP", PAGE)
    disk, path = Disk(), tmp_path / "file"
    descriptor = disk.make_file(path, SIZE)
    disk.write(descriptor, b"x" * loaded, 0)
    copy = FileCopy(disk, descriptor, path, SIZE)
    copy.load(loaded)
    released: list[tuple[int, int]] = []
    memory = copy._memory

    def madvise(advice: int, start: int, length: int) -> None:
        assert advice == mmap.MADV_DONTNEED
        released.append((start, start + length))
        memory.madvise(advice, start, length)

    copy._memory = SimpleNamespace(madvise=madvise, close=memory.close)  # type: ignore[assignment]
    for start in range(PAGE + 4096, SIZE, 5 * 4096):
        copy.keep(start, start + 4096)
    assert released
    assert all(at % PAGE == 0 for part in released for at in part)
    assert bytes(copy.view[:loaded]) == b"x" * loaded
    copy.close()
    os.close(descriptor)


def test_a_pool_that_needs_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(StoreUnavailable, match=r"1,000 buffers.*transient_store_pool_size"):
        TransientStorePool(1_000, 1 << 30)
