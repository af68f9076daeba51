"""Pages after the log's end are loaded before puts write them; a few, and no more than puts use."""

from __future__ import annotations

from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk import log_files
from logquarry.disk.disk import LocalDisk
from logquarry.disk.log_files import PagesAhead
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from tests.helpers.small_store import bodies, opened

LEAST = 256 << 10
MOST = 8 << 20
SIZE = 64 << 20


class Ahead:
    """The service over one log file, with what it loads."""

    def __init__(self, root: Path, patched: pytest.MonkeyPatch) -> None:
        disk = LocalDisk()
        self.log = MappedFileQueue(disk, root, SIZE)
        file = self.log.last_file(create=True)
        assert file is not None
        self.file: MappedFile = file
        if not file.address:
            pytest.skip("interpreted modules do not write through the map")
        self.service = PagesAhead(self.log, disk.health)
        self.loaded: list[tuple[int, int]] = []
        self.works = True
        patched.setattr(log_files, "populate", self._populate)

    def _populate(self, address: int, size: int) -> bool:
        start = address - self.file.address
        self.loaded.append((start, start + size))
        return self.works

    def put(self, size: int) -> bool:
        """Grow the log; returns whether the service was woken, and runs it then."""
        self.file.advance(size)
        self.service.grown()
        flag = self.service.flag
        assert flag is not None
        woken = flag.take(0)
        if woken:
            self.service.run_once()
        return woken


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ahead]:
    made = Ahead(tmp_path, monkeypatch)
    yield made
    made.log.close()


def test_the_first_put_loads_a_few_pages(ahead: Ahead) -> None:
    assert ahead.put(100)
    assert ahead.loaded == [(0, 100 + LEAST)]


def test_pages_are_loaded_again_when_half_are_used(ahead: Ahead) -> None:
    ahead.put(100)
    assert not ahead.put(LEAST // 2)
    assert ahead.put(1)
    (_, first), (start, stop) = ahead.loaded
    assert start == first // PAGESIZE * PAGESIZE
    assert stop > ahead.file.wrote + LEAST


def test_the_pages_follow_the_speed_of_the_puts(ahead: Ahead) -> None:
    ahead.put(100)
    ahead.put(1 << 20)
    assert ahead.loaded[-1][1] == ahead.file.wrote + (4 << 20)


def test_a_load_of_many_messages_leaves_few_pages(ahead: Ahead) -> None:
    ahead.put(100)
    ahead.put(SIZE // 2)
    assert ahead.loaded[-1] == (ahead.file.wrote // PAGESIZE * PAGESIZE, ahead.file.wrote + MOST)


def test_nothing_is_loaded_behind_the_file(ahead: Ahead) -> None:
    ahead.put(100)
    ahead.put(SIZE - 5_000)
    assert ahead.loaded[-1][1] == SIZE
    assert not ahead.put(100)


def test_a_system_that_cannot_is_asked_once(ahead: Ahead) -> None:
    ahead.works = False
    ahead.put(100)
    assert not ahead.put(LEAST)
    ahead.service.run_once()
    assert len(ahead.loaded) == 1


def test_a_closed_file(ahead: Ahead) -> None:
    ahead.file.advance(100)
    ahead.file.close()
    ahead.service.run_once()
    assert ahead.loaded == []


def test_pages_stay_zero(tmp_path: Path) -> None:
    expected = [b"%d" % number for number in range(100)]
    with opened(tmp_path) as store:
        for body in expected:
            store.put(lq.Message("t", body))
        assert bodies(store) == expected
        end = store.max_offset
    log = (tmp_path / f"commitlog/{0:020d}").read_bytes()
    assert not log[end:].strip(b"\0")
