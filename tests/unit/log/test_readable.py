"""Does a map hand out only bytes that can be read?"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
from pathlib import Path

import pytest

from logquarry.errors import LIMITS, CorruptFile, StoreNotFound, UnreadableFile
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.readable import (
    BLOCK,
    CHUNK,
    FILL,
    UNREADABLE,
    Probe,
    ReadableMap,
    Unreadable,
    WatchedMap,
    first_unreadable,
    joined,
    probed_by,
)
from logquarry.testing.disk_state import BadBlocks

SIZE = 4 * CHUNK + 1000
DATA = bytes(range(1, 251)) * (SIZE // 250 + 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(DATA[:SIZE])
    return path


def mapped(path: Path) -> ReadableMap:
    with path.open("rb") as file:
        return ReadableMap(
            str(path), WatchedMap(file.fileno(), 0, prot=mmap.PROT_READ).watch(), SIZE
        )


def test_a_window_ends_where_the_probed_bytes_end(path: Path) -> None:
    view = mapped(path)
    assert len(view.window(10, 20)) == CHUNK - 10
    assert view.window(2 * CHUNK, 1)[:5] == DATA[2 * CHUNK : 2 * CHUNK + 5]
    assert len(view.window(10, 20)) == CHUNK - 10
    assert len(view.window(10, CHUNK)) == 3 * CHUNK - 10
    assert view.good_start(2 * CHUNK + 7) == 0
    assert view.window(SIZE - 1, 100) == DATA[SIZE - 1 : SIZE]
    assert view.window(SIZE, 1) == b""
    assert view.unreadable == ()


@pytest.mark.parametrize("has_populate", [True, False])
def test_unreadable_blocks_are_filled_and_listed(path: Path, has_populate: bool) -> None:
    bad = [1, 2, CHUNK // BLOCK + 3]
    with probed_by(BadBlocks([(path.name, number) for number in bad], has_populate=has_populate)):
        view = mapped(path)
        wanted = bytearray(DATA[:SIZE])
        for number in bad:
            wanted[number * BLOCK : (number + 1) * BLOCK] = FILL * BLOCK
        assert view.window(0, SIZE) == wanted
        assert view.window(BLOCK + 5, 2 * BLOCK) == wanted[BLOCK + 5 : 3 * BLOCK + 5]
        assert [(one.offset, one.length) for one in view.unreadable] == [
            (BLOCK, 2 * BLOCK),
            (CHUNK + 3 * BLOCK, BLOCK),
        ]
        assert view.unreadable[0].reason.endswith("(errno 5)")
        assert len(view.window(2 * CHUNK, 1)) == SIZE - 2 * CHUNK
        assert view.good_start(3 * CHUNK) == 2 * CHUNK


def test_a_system_without_populate_reads_the_pages(path: Path) -> None:
    class Old(Probe):
        def populate(self, path: str, position: int, address: int, length: int) -> bool | None:
            return None

    with probed_by(Old()):
        assert mapped(path).window(0, SIZE) == DATA[:SIZE]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_limit_of_the_process_is_no_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    class Old(Probe):
        def populate(self, path: str, position: int, address: int, length: int) -> bool | None:
            return None

    view = mapped(path)
    with probed_by(Old()):
        with monkeypatch.context() as limited:
            limited.setattr(os, call, refuse)
            with pytest.raises(
                StoreNotFound, match=f"file: cannot be read: .*: {LIMITS[number][:20]}"
            ):
                view.window(0, SIZE)
        assert not view.unreadable
        assert view.window(0, SIZE) == DATA[:SIZE]


def test_the_probe_of_this_system_finds_bytes_beyond_the_end_of_a_file(path: Path) -> None:
    view = mapped(path)
    view._may_shrink = False
    os.truncate(path, 0)
    assert view.window(0, SIZE) == FILL * SIZE
    assert view.unreadable[0].offset == 0


def test_a_file_that_was_truncated_after_its_probe(path: Path) -> None:
    view = mapped(path)
    view.window(0, SIZE)
    assert view.reaches(SIZE)
    os.truncate(path, CHUNK + 100)
    assert not view.reaches(SIZE)
    found = view.window(0, SIZE)
    assert found[: CHUNK + 100] == DATA[: CHUNK + 100]
    assert found[CHUNK + 100 :] == FILL * (SIZE - CHUNK - 100)
    assert [(one.offset, one.length) for one in view.unreadable] == [
        (CHUNK + 100, SIZE - CHUNK - 100)
    ]
    assert f"truncated to {CHUNK + 100} bytes" in view.unreadable[0].reason


def test_a_small_file_with_an_unreadable_block_is_an_error(path: Path) -> None:
    files = LocalFileSystem(path.parent)
    error = pytest.raises(UnreadableFile, match=r"at offset 0: 4096 bytes .*errno 5")
    with probed_by(BadBlocks([(path.name, 0)])), error as caught:
        files.read(path.name)
    assert list(files.unreadable) == [path.name]
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, CorruptFile)
    assert (again.kind, again.offset) == (UNREADABLE, 0)


def test_ranges() -> None:
    ranges = joined([Unreadable(20, 10, "a"), Unreadable(0, 10, "a"), Unreadable(10, 5, "a")])
    assert [(one.offset, one.length) for one in ranges] == [(0, 15), (20, 10)]
    assert first_unreadable(ranges, 14, 1) == ranges[0]
    assert first_unreadable(ranges, 15, 5) is None
    assert first_unreadable(ranges, 15, 6) == ranges[1]
    assert first_unreadable((), 0, 100) is None


class _LostMap(WatchedMap):
    """A map of a file on a network mount that is lost."""

    def size(self) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_whose_size_is_not_known_any_more(path: Path) -> None:
    with path.open("rb") as file:
        view = ReadableMap(str(path), _LostMap(file.fileno(), 0, prot=mmap.PROT_READ), SIZE)
    for call in (lambda: view.window(0, 10), lambda: view.reaches(10)):
        with pytest.raises(UnreadableFile, match="its size cannot be read: Stale file handle"):
            call()
