"""Does a store read alike from a local folder, through pyarrow.fs and through fsspec?"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from logquarry.errors import StoreNotFound, UsageError
from logquarry.log import batches, filesystem, lost_pages
from logquarry.log.batches import MessageFilter
from logquarry.log.columns import Decoding
from logquarry.log.filesystem import ArrowFileSystem, FileSystem, LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.location import open_filesystem
from logquarry.log.walk import LogReader
from logquarry.read import selection
from logquarry.read.log_end import log_bound
from logquarry.read.selection import Selection, plan_read, read_in_order
from logquarry.repair.verification import verify_store
from tests.helpers.memory_stores import told

KINDS = ("local", "arrow", "fsspec")


@pytest.fixture(scope="module")
def store(golden: Path) -> Path:
    return golden / "clean-restart" / "base" / "store"


@pytest.fixture(params=KINDS)
def files(request: pytest.FixtureRequest, store: Path) -> Iterator[FileSystem]:
    if request.param == "local":
        yield LocalFileSystem(store)
    elif request.param == "arrow":
        yield ArrowFileSystem(pafs.LocalFileSystem(), str(store), f"file://{store}")
    else:
        memory = fsspec.filesystem("memory")
        memory.put(str(store), "/store", recursive=True)
        yield ArrowFileSystem(
            pafs.PyFileSystem(pafs.FSSpecHandler(memory)), "/store", "memory://store"
        )
        memory.rm("/store", recursive=True)


# ------------------------------------------------------------------------------------- the port
def test_lists(files: FileSystem, store: Path) -> None:
    for folder in ["", "commitlog", "consumequeue", "index", *_some_queues(store)]:
        expected = [
            (path.name, path.is_dir(), 0 if path.is_dir() else path.stat().st_size)
            for path in sorted((store / folder).iterdir())
        ]
        found = files.list(folder)
        assert [(e.name, e.is_dir, 0 if e.is_dir else e.size) for e in found] == expected
    assert files.list("nowhere") == []
    assert files.list("nowhere/deeper") == []
    assert files.list("checkpoint") == []


def _some_queues(store: Path) -> list[str]:
    return [str(path.relative_to(store)) for path in sorted(store.glob("consumequeue/*/*"))][:4]


def test_files(files: FileSystem, store: Path) -> None:
    for path in ["checkpoint", "commitlog/00000000000000032768"]:
        assert files.exists(path)
        view = files.open(path)
        assert view.size == (store / path).stat().st_size
        assert files.read(path) == (store / path).read_bytes()
        assert path in view.path
    for path in ["nowhere", "nowhere/deeper", "checkpoint/deeper", "commitlog"]:
        with pytest.raises(FileNotFoundError):
            files.open(path)
    assert files.exists("commitlog")
    assert not files.exists("nowhere")
    assert files.full_path("a/b").endswith("store/a/b")


@pytest.mark.parametrize("least", [1, 100, 1 << 24])
def test_windows(files: FileSystem, store: Path, least: int) -> None:
    path = "commitlog/00000000000000032768"
    data = (store / path).read_bytes()
    view = files.open(path)
    with mock.patch.object(filesystem, "REMOTE_RANGE", least):
        for start in (0, 1, 5000, len(data) - 1, len(data), len(data) + 9):
            for length in (0, 1, 77, len(data), 2 * len(data)):
                window = bytes(view.window(start, length))
                assert data[start:].startswith(window)
                assert len(window) >= min(length, max(0, len(data) - start))


def test_next_data_of_a_sparse_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"x")
        file.truncate(1 << 22)
    view = LocalFileSystem(tmp_path).open("sparse")
    at = view.next_data(0)
    assert 0 <= at <= 1 << 20
    assert not any(view.window(0, at)[:at])
    assert (
        view.next_data((1 << 20) + 1) <= (1 << 20) + 4096
        or view.next_data((1 << 20) + 1) == 1 << 22
    )
    assert view.next_data(1 << 22) == 1 << 22
    path.unlink()
    assert view.next_data(5) == 5  # the file is gone, but mapped bytes are still there
    assert bytes(view.window(1 << 20, 1)[:1]) == b"x"


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for files in (
        LocalFileSystem(tmp_path),
        ArrowFileSystem(pafs.LocalFileSystem(), str(tmp_path), "x"),
    ):
        view = files.open("empty")
        assert view.size == 0
        assert bytes(view.window(0, 10)) == b""
        assert view.next_data(0) == 0


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    files = LocalFileSystem(tmp_path)
    assert [entry.name for entry in files.list("")] == ["folder", "pipe"]
    for name in ("pipe", "folder", "gone", "loop"):
        with pytest.raises(FileNotFoundError):
            files.open(name)
    assert not files.exists("loop")


def test_a_folder_that_cannot_be_listed_is_an_error_of_ours(tmp_path: Path) -> None:
    with (
        mock.patch("os.scandir", side_effect=PermissionError(13, "Permission denied")),
        pytest.raises(StoreNotFound, match="Permission denied"),
    ):
        LocalFileSystem(tmp_path).list("commitlog")


# ------------------------------------------------------------------------------------ whole stores
RANGES = [1, 777, 5000]


@pytest.mark.parametrize("least", RANGES)
def test_a_walk_and_its_columns(files: FileSystem, store: Path, least: int) -> None:
    expected = StoreLayout(LocalFileSystem(store))
    layout = StoreLayout(files)
    with mock.patch.object(filesystem, "REMOTE_RANGE", least):
        for check_crc in (True, False):
            for batch_bytes in (3000, 1 << 20):
                reader = LogReader(layout, check_crc=check_crc, batch_bytes=batch_bytes)
                assert told(reader.events()) == told(LogReader(expected).events())
        runs = batches.sound_runs(LogReader(layout).events(), "fail")
        found = pa.Table.from_batches(batches.record_batches(runs, Decoding()))
    runs = batches.sound_runs(LogReader(expected).events(), "fail")
    assert found.equals(pa.Table.from_batches(batches.record_batches(runs, Decoding())))


def assert_read_through_places(
    files: FileSystem, store: Path, least: int, wanted: MessageFilter
) -> None:
    layout = StoreLayout(files)
    with (
        mock.patch.object(selection, "WORTHWHILE", 1e9),
        mock.patch("logquarry.log.frames.REMOTE_RANGE", least),
        mock.patch.object(filesystem, "REMOTE_RANGE", least),
    ):
        plan = plan_read(layout, Selection(wanted=wanted))
        assert plan.uses_queues
        runs = batches.sound_runs(read_in_order(layout, plan), "fail")
        found = [m.physical_offset for m in batches.messages(runs, Decoding(), wanted)]
    walked = batches.sound_runs(LogReader(StoreLayout(LocalFileSystem(store))).events(), "fail")
    assert found == [m.physical_offset for m in batches.messages(walked, Decoding(), wanted)]
    assert found


@pytest.mark.parametrize("least", RANGES)
def test_a_read_through_the_queues(files: FileSystem, store: Path, least: int) -> None:
    [(topic, _), *_] = StoreLayout(files).queue_names
    wanted = MessageFilter(topics=frozenset({topic}))
    assert_read_through_places(files, store, least, wanted)


@pytest.mark.parametrize("least", RANGES)
def test_a_read_through_the_index(files: FileSystem, store: Path, least: int) -> None:
    """The index names places without sizes: a fetched range ends within a frame."""
    wanted = MessageFilter(keys=frozenset({"user1", "user2"}))
    assert_read_through_places(files, store, least, wanted)


def test_a_check(files: FileSystem) -> None:
    layout = StoreLayout(files)
    assert log_bound(layout)
    assert verify_store(layout).findings == []


# ------------------------------------------------------------------------------------- locations
def test_local_locations(store: Path, tmp_path: Path) -> None:
    for location in (store, str(store), f"file://{store}", f"file:{store}"):
        files = open_filesystem(location)
        assert isinstance(files, LocalFileSystem)
        assert files.root == str(store)
    with pytest.raises(StoreNotFound, match="there is no such folder"):
        open_filesystem(tmp_path / "nowhere")
    with pytest.raises(StoreNotFound, match="not a folder"):
        open_filesystem(store / "checkpoint")


def test_fsspec_locations(store: Path) -> None:
    files = open_filesystem(f"local://{store}", {"auto_mkdir": False})
    assert isinstance(files, ArrowFileSystem)
    assert files.root == f"local://{store}"
    assert files.read("checkpoint") == (store / "checkpoint").read_bytes()


def test_fsspec_locations_without_options(store: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(store), "/store", recursive=True)
    try:
        files = open_filesystem("memory://store")
        assert isinstance(files, ArrowFileSystem)
        assert files.read("checkpoint") == (store / "checkpoint").read_bytes()
        assert verify_store(StoreLayout(files)).findings == []
    finally:
        memory.rm("/store", recursive=True)


@pytest.mark.parametrize("options", [None, {"a": 1}])
def test_without_fsspec(options: dict[str, int] | None) -> None:
    with (
        mock.patch.dict(sys.modules, {"fsspec": None, "fsspec.core": None}),
        pytest.raises(UsageError, match=r"memory://x: .*pip install 'logquarry\[remote\]'"),
    ):
        open_filesystem("memory://x", options)


@pytest.mark.parametrize("location", ["nothing://x/y", "://", "://x"])
def test_locations_that_nobody_knows(location: str) -> None:
    with pytest.raises(UsageError, match=location[:3]):
        open_filesystem(location)


def test_maps_outlive_their_file(store: Path, tmp_path: Path) -> None:
    shutil.copy(store / "checkpoint", tmp_path / "copy")
    view = LocalFileSystem(tmp_path).open("copy")
    window = view.window(0, view.size)
    (tmp_path / "copy").unlink()
    del view
    assert bytes(window) == (store / "checkpoint").read_bytes()


def test_without_a_handler_of_sigbus_windows_are_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_pages, "watch", lambda mapped, in_children: -1)
    data = bytes(range(251)) * 50
    path = tmp_path / "file"
    path.write_bytes(data)
    view = LocalFileSystem(tmp_path).open("file")
    assert not view.is_mapped
    kept = view.window(4_000, 3_000)
    os.truncate(path, 5_000)
    path.unlink()
    assert bytes(kept) == data[4_000:7_000]
    assert bytes(view.window(4_000, 900)) == data[4_000:4_900] and not view.unreadable
    assert bytes(view.window(4_000, 3_000)) == data[4_000:5_000] + b"\xff" * 2_000
    assert [(one.offset, one.length) for one in view.unreadable] == [(5_000, 2_000)]


def test_a_failing_disk_has_no_missing_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = LocalFileSystem(tmp_path)
    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(StoreNotFound, match="abort: cannot be read: Input/output error"):
        files.exists("abort")


def test_an_error_names_the_limit_of_open_files(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: str) -> object:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(StoreNotFound, match=r"cannot be read: Too many open files: raise "):
        StoreLayout.open(store)
