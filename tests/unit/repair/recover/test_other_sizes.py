"""Settings with the sizes of another store: no file is cut to these sizes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFile, StoreUnavailable, UsageError
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.read.queue import ConsumeQueue
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.open_check import _check_stated
from logquarry.repair.salvage.salvage import salvage_store
from tests.helpers.small_store import bodies, config, facts, opened

COUNT = 60


def written(root: Path, count: int = COUNT) -> None:
    """A store that was not closed, of two queues."""
    with opened(root) as store:
        for number in range(count):
            message = lq.Message(
                "t", b"%03d" % number * 200, keys=f"k{number}", queue_id=number % 2
            )
            store.put(message)
    (root / "abort").touch()


@pytest.mark.parametrize("count", [COUNT, 18])
@pytest.mark.parametrize("size", [1_024, 4_096, 8_192])
def test_files_of_the_log_that_are_larger(tmp_path: Path, count: int, size: int) -> None:
    """Also if the log has only one file."""
    root = tmp_path / "store"
    written(root, count)
    shutil.rmtree(root / "consumequeue" / "t" / "1")
    before = facts(root)
    wrong = config(mapped_file_size_commit_log=size)
    for apply in (False, True):
        with pytest.raises(UsageError, match=rf"mappedFileSizeCommitLog .* is {size}:"):
            lq.recover(root, apply=apply, config=wrong)
    assert before.items() <= facts(root).items()
    lq.recover(root, apply=True, config=config())
    with opened(root) as store:
        assert len(bodies(store)) == count


@pytest.mark.parametrize("size", [1_024, 8_192, 32_768, 1 << 20])
def test_rebuild_and_salvage_refuse_other_sizes_of_log_files(tmp_path: Path, size: int) -> None:
    """Otherwise a rebuild would leave the messages after the wrong size out of the queues."""
    root = tmp_path / "store"
    written(root)
    before = facts(root)
    wrong = config(mapped_file_size_commit_log=size)
    arguments: tuple[dict[str, Any], ...] = ({}, {"apply": True}, {"into": tmp_path / "into"})
    for argument in arguments:
        with pytest.raises(UsageError, match=rf"mappedFileSizeCommitLog .* is {size}:"):
            rebuild(root, config=wrong, **argument)
    with pytest.raises(UsageError, match=rf"mappedFileSizeCommitLog .* is {size}:"):
        salvage_store(StoreLayout.open(root, wrong), tmp_path / "into")
    assert facts(root) == before
    assert not (tmp_path / "into").exists()
    assert rebuild(root, apply=True, config=config()).messages == COUNT


def test_files_of_a_store_with_smaller_files_among_the_log(tmp_path: Path) -> None:
    """Most files have the size of the other store, so the inferred size is wrong. A salvage with
    this size would leave out the messages after this size in each file of the store.
    """
    root, other = tmp_path / "store", tmp_path / "other"
    written(root)
    with opened(other, mapped_file_size_commit_log=1_024) as store:
        for _ in range(12):
            store.put(lq.Message("t", bytes(600)))
    moved = []
    for path in sorted((other / "commitlog").iterdir()):
        target = root / "commitlog" / path.name
        if not target.exists():
            moved.append(path.rename(target))
    words = "move the files of another store out"
    with pytest.raises(StoreUnavailable, match=words):
        salvage_store(StoreLayout.open(root), tmp_path / "into")
    with pytest.raises(StoreUnavailable, match=words):
        rebuild(root, into=tmp_path / "into")
    with pytest.raises(StoreUnavailable, match=words):
        lq.recover(root, apply=True)
    assert not (tmp_path / "into").exists()
    for path in moved:
        path.unlink()
    assert salvage_store(StoreLayout.open(root), tmp_path / "into").plan.messages == COUNT


@pytest.mark.parametrize("size", [20, 200, 4_000])
def test_files_of_queues(tmp_path: Path, size: int) -> None:
    root = tmp_path / "store"
    written(root)
    before = facts(root)
    wrong = config(mapped_file_size_consume_queue=size)
    words = rf"400 bytes, but mappedFileSizeConsumeQueue .* is {size}:"
    with pytest.raises(UsageError, match=words):
        lq.recover(root, apply=True, config=wrong)
    assert before.items() <= facts(root).items()


def test_a_file_that_is_torn_says_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    written(root, 12)
    shutil.rmtree(root / "consumequeue" / "t" / "1")
    os.truncate(root / "consumequeue" / "t" / "0" / f"{0:020d}", 200)
    os.truncate(root / "commitlog" / f"{0:020d}", 12_000)
    lq.recover(root, apply=True, config=config())
    with opened(root) as store:
        assert len(bodies(store)) == 12


@pytest.mark.parametrize("size", [1 << 20, 1 << 40])
def test_a_file_that_is_longer_without_messages(tmp_path: Path, size: int) -> None:
    """The rest is a terabyte of zeros, which is not read."""
    root = tmp_path / "store"
    written(root)
    os.truncate(root / "commitlog" / f"{0:020d}", size)
    plan = lq.recover(root, config=config())
    assert any(step.kind.value == "cut" for step in plan.steps)


@pytest.mark.parametrize("size", [1 << 31, 10**20])
@pytest.mark.parametrize("name", ["mapped_file_size_commit_log", "max_index_num"])
def test_sizes_that_java_has_no_number_for(name: str, size: int) -> None:
    with pytest.raises(
        UsageError, match=rf"{name} is {size}, and must (not be above|be at most) \d+"
    ):
        config(**{name: size})


def test_a_queue_file_of_an_absurd_length(tmp_path: Path) -> None:
    root = tmp_path / "store"
    written(root)
    os.truncate(root / "consumequeue" / "t" / "0" / f"{0:020d}", 1 << 40)
    lq.recover(root, apply=True, config=lq.StoreConfig(max_hash_slot_num=50, max_index_num=200))
    with lq.MessageStore.open(root) as store:
        assert len(bodies(store)) == COUNT


@pytest.mark.parametrize("path", ["", "file://"])
def test_an_empty_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    written(tmp_path)
    before = facts(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="empty"):
        lq.recover(path, apply=True, config=config())
    with pytest.raises(UsageError, match="empty"):
        rebuild(path, apply=True, config=config())
    assert facts(tmp_path) == before


def test_the_error_names_a_file_with_the_other_size(tmp_path: Path) -> None:
    """An empty file, which a crash leaves, has no wrong size."""
    root = tmp_path / "store"
    written(root)
    os.truncate(root / "consumequeue" / "t" / "0" / f"{0:020d}", 0)
    other = config(mapped_file_size_consume_queue=200)
    wrong = root / "consumequeue" / "t" / "0" / f"{400:020d}"
    layout = StoreLayout(LocalFileSystem(root), other)
    with pytest.raises(CorruptFile, match=f"{wrong}: .*400 bytes, but the settings give 200"):
        _check_stated(layout, other, ConsumeQueue.all_of(layout))
