"""``logquarry.recover``: what it touches, whom it refuses, and what an interrupt leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.store.recovery.plan import StepKind
from tests.faulty_disk import StoppedDisk
from tests.small_store import bodies, config, facts, opened

COUNT = 60


def crashed(tmp_path: Path, *, torn: bool = True) -> Path:
    """What a writer leaves that was killed, with half a message at the end."""
    with opened(tmp_path / "live") as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"%d" % number * 50, queue_id=number % 2, keys=f"k{number}"))
        store.wait_dispatched()
        end = store.max_offset
        shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    if torn:
        size = config().mapped_file_size_commit_log
        assert size is not None
        path = tmp_path / "crashed" / "commitlog" / f"{end - end % size:020d}"
        with path.open("r+b") as file:
            file.seek(end % size)
            file.write(b"\0\0\1\2\xda\xa3\x20\xa7half a message")
    return tmp_path / "crashed"


def test_a_plan_touches_nothing(tmp_path: Path) -> None:
    root = crashed(tmp_path)
    before = facts(root)
    plan = lq.recover(root)
    assert facts(root) == before
    assert plan.is_needed and plan.refused is None
    kinds = [step.kind for step in plan.steps]
    assert StepKind.ZERO in kinds and kinds[-1] is StepKind.REMOVE
    assert plan.steps[-1].file == "abort"


def test_applied_it_opens_as_a_store_that_was_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = crashed(tmp_path)
    assert lq.recover(root, apply=True).is_needed
    assert not (root / "abort").exists()
    assert not lq.recover(root).is_needed
    before = facts(root)
    assert not lq.recover(root, apply=True).is_needed
    assert facts(root) == before
    caplog.clear()
    with lq.MessageStore.open(root, mode="rw") as store:
        assert len(bodies(store)) == COUNT
        assert store.query("t", f"k{COUNT - 1}")
        assert [record.message for record in caplog.records] == []
    tails = list((root / ".logquarry" / "quarantine").rglob("*.from-*"))
    assert any(b"half a message" in path.read_bytes() for path in tails)


def test_a_store_that_is_open_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(lq.Message("t", keys="k"))
        store.wait_dispatched()
        for apply in (False, True):
            with pytest.raises(StoreUnavailable, match="open in another program"):
                lq.recover(tmp_path, apply=apply)
        assert store.put(lq.Message("t", keys="k")).ok
    assert not lq.recover(tmp_path).is_needed


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for name in ("other", "nothing"):
        with pytest.raises(StoreNotFound):
            lq.recover(tmp_path / name, apply=True)
    assert list((tmp_path / "other").iterdir()) == []
    with pytest.raises(UsageError):
        lq.recover("memory://store", apply=True)


def test_damage_is_noted_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(5):
            store.put(lq.Message("t", b"body %d" % number, keys="k"))
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"body 2", b"rotten"))
    plan = lq.recover(tmp_path)
    assert [step.kind for step in plan.steps] == [StepKind.NOTE_DAMAGE]
    assert len(plan.damage) == 1
    lq.recover(tmp_path, apply=True)
    after = lq.recover(tmp_path)
    assert not after.is_needed and after.damage == plan.damage
    with lq.MessageStore.open(tmp_path, mode="rw") as store:
        assert len(store.get("t", 0).messages) == 4


def test_a_file_that_has_only_its_second_name_comes_back(tmp_path: Path) -> None:
    """A Java store that was opened beside the writer deleted it, and then the writer was killed."""
    root = crashed(tmp_path, torn=False)
    (second,) = (root / ".logquarry" / "names" / "commitlog").iterdir()
    (root / "commitlog" / second.name).unlink()
    lq.recover(root, apply=True)
    with lq.MessageStore.open(root) as store:
        assert len(bodies(store)) == COUNT


def test_whoever_is_interrupted_begins_again(tmp_path: Path) -> None:
    root = crashed(tmp_path)
    log = min((root / "commitlog").iterdir())
    whole = StoppedDisk()
    shutil.copytree(root, tmp_path / "whole")
    lq.recover(tmp_path / "whole", apply=True, disk=whole)
    assert len(whole.order) > 30
    for number in range(0, len(whole.order), 3):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, config=config(), disk=StoppedDisk(number))
        with lq.MessageStore.open(copy, config=config()) as store:
            assert len(bodies(store)) == COUNT
        if (copy / "abort").exists():
            assert lq.recover(copy, config=config()).is_needed
        lq.recover(copy, apply=True, config=config())
        with lq.MessageStore.open(copy, mode="rw") as store:
            assert len(bodies(store)) == COUNT
            for queue_id in range(2):
                assert store.queue_offsets("t", queue_id) == (0, COUNT // 2)
            assert all(store.query("t", f"k{number}") for number in range(COUNT))
            end = store.max_offset
        assert (copy / "commitlog" / log.name).read_bytes()[:end] == log.read_bytes()[:end]
        shutil.rmtree(copy)
