"""Faults that an open writer meets: a log held for long, files that others make or delete."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import logquarry as lq
from logquarry import paths
from logquarry.disk import folders
from logquarry.disk.service import SyncDelayed
from logquarry.disk.write_buffers import FileCopy
from logquarry.errors import MessageRejected, StoreNotFound, StoreUnavailable
from logquarry.log.readable import WatchedMap
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from tests.helpers.failing_disk import FaultyDisk
from tests.helpers.small_store import bodies, config, opened
from tests.helpers.waiting import eventually


def test_a_put_that_holds_the_log_too_long(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk, os_page_cache_busy_time_out_mills=50) as store:
        store.put(lq.Message("t"))
        with store._engine.writer._lock:
            store._engine.writer._held_since = time.monotonic() - 1
            with pytest.raises(StoreUnavailable) as refused:
                store.put(lq.Message("t"))
            assert refused.value.status == "OS_PAGECACHE_BUSY"
            store._engine.writer._held_since = 0.0


@pytest.mark.parametrize("name", ["consumequeue/t", "consumequeue/t/0", "index"])
def test_a_file_where_a_folder_should_be(name: str, tmp_path: Path) -> None:
    """The store refuses puts while the file is there: the error names it, and nothing is lost."""
    with opened(tmp_path) as store:
        taken = tmp_path / name
        taken.parent.mkdir(exist_ok=True)
        if taken.is_dir():
            taken.rmdir()
        taken.write_bytes(b"")
        store.put(lq.Message("t", b"1", keys="k"))
        with pytest.raises(StoreUnavailable, match=re.escape(f"{taken}: it is not a folder")):
            store.wait_dispatched(timeout=60)
        why = rf"dispatched to queues and index: .* offset 0: {re.escape(str(taken))}: it is"
        with pytest.raises(StoreUnavailable, match=why):
            store.put(lq.Message("t", b"2"))
        taken.unlink()
        eventually(lambda: store.queue_offsets("t", 0).max > 0)
        assert store.get("t", 0).messages[0].body == b"1"
    assert not (tmp_path / "abort").exists()


def test_what_others_delete_comes_back(tmp_path: Path) -> None:
    """A Java store that is opened on our store deletes files before the lock refuses it."""
    with opened(tmp_path) as store:
        for number in range(150):
            store.put(lq.Message("t", b"%d" % number, keys=f"k{number}"))
        store.wait_dispatched()
        for path in [*(tmp_path / "index").iterdir(), *(tmp_path / "commitlog").iterdir()]:
            path.unlink()
        (tmp_path / "abort").unlink()
        queue = sorted((tmp_path / "consumequeue/t/0").iterdir())
        queue[-1].unlink()
        # In the place of the queue's next file, which Java made.
        following = queue[-1].with_name(f"{int(queue[-1].name) + 400:020d}")
        following.write_bytes(b"\xff" * 400)
        eventually((tmp_path / "abort").exists)
        for number in range(150, 200):
            store.put(lq.Message("t", b"%d" % number, keys=f"k{number}"))
        store.wait_dispatched()
    assert not (tmp_path / "abort").exists()
    with lq.MessageStore.open(tmp_path) as reader:
        assert len(bodies(reader)) == 200
        assert reader.queue_offsets("t", 0) == (0, 200)
        assert reader.query("t", "k140") and reader.query("t", "k199")
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings


def test_a_folder_that_others_delete_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"0", keys="k0"))
        store.wait_dispatched()
        shutil.rmtree(tmp_path / "index")
        for number in range(1, 300):
            store.put(lq.Message("t", b"%d" % number, keys=f"k{number}"))
        store.flush()
    with lq.MessageStore.open(tmp_path) as reader:
        for number in (0, 299):
            assert [m.body for m in reader.query("t", f"k{number}")] == [b"%d" % number]
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings


def test_a_put_is_refused_if_another_topic_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system ignores case: each topic would overwrite the queue of the other topic."""
    monkeypatch.setattr(folders, "ignores_case", lambda folder: True)
    root = tmp_path / "s"
    wrong = lq.Message("orders", b"second")
    puts: list[Callable[[StoreWriter], object]] = [
        lambda store: store.put(wrong),
        lambda store: store.put(lq.Message("orders", b"later", delay_level=0, sys_flag=1)),
        lambda store: store.put_batch([wrong, wrong]),
        lambda store: store.put_many([wrong] * 40),
        lambda store: store.put_many([wrong] * 4),
    ]
    for is_known in (False, True):
        with lq.MessageStore.open(root, mode="rw", config=config()) as store:
            store.put(lq.Message("Orders", b"first", queue_id=int(is_known)))
            end = store.max_offset
            for put in puts:
                with pytest.raises(MessageRejected, match="topic Orders has the folder") as refused:
                    put(store)
                assert refused.value.reason == "topic"
            assert store.max_offset == end
            store.put(lq.Message("Orders", b"next", queue_id=2))
            store.put(lq.Message("others", b"next"))
            assert store.wait_dispatched(timeout=60)
        assert store.close_problem is None
    with lq.MessageStore.open(root, mode="rw", config=config()) as store:
        assert [m.body for m in store.get("Orders", 2).messages] == [b"next"] * 2
        assert [m.body for m in store.get("others", 0).messages] == [b"next"] * 2


def test_topics_that_have_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store was copied to a file system that ignores case."""
    root = tmp_path / "s"
    with lq.MessageStore.open(root, mode="rw", config=config()) as store:
        store.put(lq.Message("Orders", b"first"))
        store.put(lq.Message("orders", b"second"))
    shutil.rmtree(root / "consumequeue")
    with monkeypatch.context() as patched:
        patched.setattr(folders, "ignores_case", lambda folder: True)
        for repair in (lq.recover, lq.rebuild):
            with pytest.raises(StoreUnavailable, match="rders already has this folder"):
                repair(root, apply=True, config=config())
    with lq.MessageStore.open(root, mode="rw", config=config()) as store:
        assert [m.body for m in store.get("Orders", 0).messages] == [b"first"]
        assert {m.body for m in store.get("orders", 0).messages} == {b"second"}


def _check_puts(
    root: Path,
    disk: FaultyDisk,
    reason: str,
    repair: Callable[[], object],
    harm: Callable[[], object] = lambda: None,
) -> None:
    """Each put is refused until the fault is repaired; then the store works as before."""
    with opened(root, disk) as store:
        harm()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=reason):
                store.put(lq.Message("t", b"1"))
        repair()
        store.put(lq.Message("t", b"2"))
        assert store.wait_dispatched(timeout=60)
        assert bodies(store) == [b"2"]
    assert store.close_problem is None


def _break_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(FileCopy, "__init__", fail)


class _UnmappedDisk(FaultyDisk):
    """The system has no memory for maps while :attr:`is_full` is true."""

    is_full = True

    def map(self, descriptor: int, size: int) -> WatchedMap:
        if self.is_full:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return super().map(descriptor, size)


def test_a_file_that_cannot_be_mapped_is_made_again(tmp_path: Path) -> None:
    """Otherwise all further puts would fail, because the file exists."""
    disk = _UnmappedDisk()
    _check_puts(tmp_path, disk, "Cannot allocate memory", partial(setattr, disk, "is_full", False))


class _UnwatchedDisk(FaultyDisk):
    """No handler watches the maps, for example because logquarry is not compiled."""

    def map(self, descriptor: int, size: int) -> WatchedMap:
        found = super().map(descriptor, size)
        found._forget()
        return found


def test_a_file_whose_copy_has_no_memory_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the store would take no more messages."""
    disk, reason = _UnwatchedDisk(), "00000: Cannot allocate memory"
    _check_puts(tmp_path, disk, reason, monkeypatch.undo, partial(_break_copies, monkeypatch))


class _UnnamedDisk(FaultyDisk):
    """The disk cannot look up names while :attr:`is_failing` is true."""

    is_failing = True

    def is_named(self, descriptor: int, path: Path) -> bool:
        if self.is_failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().is_named(descriptor, path)


def test_a_new_file_whose_name_cannot_be_checked(tmp_path: Path) -> None:
    """Otherwise the file counts as deleted, and each later put fails, because the file exists."""
    disk = _UnnamedDisk()
    reason = "Input/output error: check the disk"
    _check_puts(tmp_path, disk, reason, partial(setattr, disk, "is_failing", False))


def test_a_name_that_cannot_be_checked_by_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mode_of(path: Path, *, follows: bool = True) -> int:
        if path.parent.name == "commitlog":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return found(path, follows=follows)

    found = paths.mode_of
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"1"))
        store._engine.log._next_check = 0.0
        monkeypatch.setattr(paths, "mode_of", mode_of)
        for call in (store.flush, lambda: store.put(lq.Message("t", b"2"))):
            with pytest.raises(StoreUnavailable, match=r"commitlog.*its name cannot be checked"):
                call()
        monkeypatch.undo()
    assert "its name cannot be checked" in str(store.close_problem)


def test_a_lock_that_cannot_be_released_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost network mount: the store can be opened again in this process."""

    def fstat(descriptor: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    store = opened(tmp_path)
    store.put(lq.Message("t", b"1"))
    monkeypatch.setattr(os, "fstat", fstat)
    store.close()
    monkeypatch.undo()
    assert store.close_problem is not None
    with opened(tmp_path) as again:
        assert bodies(again) == [b"1"]


def test_a_store_that_is_lost_during_its_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mode_of(path: Path, *, follows: bool = True) -> int:
        if path.name == "consumequeue" and follows:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return found(path, follows=follows)

    found = paths.mode_of
    monkeypatch.setattr(paths, "mode_of", mode_of)
    with pytest.raises(StoreNotFound, match="cannot be read: Stale file handle: mount the network"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if os.fspath(path).endswith("consumequeue"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return found(path, follow_symlinks=follow_symlinks)

    found = os.stat
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(StoreUnavailable, match="consumequeue: cannot be read: Input/output error"):
        opened(tmp_path)


@pytest.mark.parametrize("error", [SyncDelayed("a step failed"), OSError("a step failed")])
def test_a_last_step_that_fails_makes_close_raise_nothing(tmp_path: Path, error: Exception) -> None:
    def fail() -> None:
        raise error

    store = opened(tmp_path)
    store.put(lq.Message("t", b"1"))
    store._engine._end.insert(0, fail)
    store.close()
    assert store.close_problem == "a step failed"
