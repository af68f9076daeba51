"""A recovery first lists the second names of the log's files and of the index files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify
from tests.helpers.small_store import config, facts, opened

HARMS: dict[str, Callable[[Path], object]] = {
    "a file": lambda path: path.write_bytes(b"x"),
    "a broken link": lambda path: path.symlink_to("/missing/folder"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", ["names", "names/commitlog", "names/index"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_plan_refuses_what_is_not_a_folder_of_names(tmp_path: Path, name: str, harm: str) -> None:
    with opened(tmp_path) as made:
        made.put(lq.Message("t", b"body", keys="k"))
    path = tmp_path / ".logquarry" / name
    path.parent.mkdir(exist_ok=True)
    for folder in (*path.glob("*"), path):
        if folder.is_dir():
            folder.rmdir()
    HARMS[harm](path)
    before = facts(tmp_path)
    for apply in (False, True):
        with pytest.raises(StoreUnavailable, match=r"it is .*Nothing was changed") as raised:
            recover(tmp_path, apply=apply, config=config())
        assert str(path) in str(raised.value)
    assert [found.file for found in verify(tmp_path, config=config()).findings] == [
        f".logquarry/{name}"
    ]
    assert facts(tmp_path) == before


def _other_days(tmp_path: Path) -> tuple[Path, Path]:
    """A store that was shut down cleanly, and a copy of it that was made while it was open later.
    The copy has second names of log files that the first store does not have.
    """
    store, later = tmp_path / "store", tmp_path / "later"
    _put(store, 6)
    shutil.copytree(store, tmp_path / "sound")
    with opened(store) as made:
        for number in range(40):
            made.put(lq.Message("t", b"later%d " % number * 200, keys=f"l{number}"))
        made.wait_dispatched()
        shutil.copytree(store, later)
    return tmp_path / "sound", later


def _put(root: Path, count: int) -> None:
    with opened(root) as made:
        for number in range(count):
            made.put(lq.Message("t", b"text%d " % number * 200, keys=f"k{number}"))


def _bodies(root: Path) -> list[bytes]:
    with lq.MessageStore.open(root, config=config()) as store:
        return [message.body for message in store.scan()]


def _by(by: str, root: Path) -> None:
    """Recover or rebuild a store in one of the ways that read its second names."""
    if by == "recover":
        recover(root, apply=True, config=config())
    elif by == "rebuild":
        lq.rebuild(root, apply=True, config=config())
    else:
        settings = config(recovery="rocketmq") if by == "a RocketMQ recovery" else config()
        lq.MessageStore.open(root, mode="rw", config=settings).close()


@pytest.mark.parametrize("by", ["an opening", "a RocketMQ recovery", "recover", "rebuild"])
def test_a_refusal_leaves_the_second_names(tmp_path: Path, by: str) -> None:
    """Of two log files without a first name, only one has a second name: the loss is refused."""
    store, image = tmp_path / "store", tmp_path / "image"
    with opened(store) as made:
        for number in range(40):
            made.put(lq.Message("t", b"later%d " % number * 200, keys=f"l{number}"))
        made.wait_dispatched()
        made.flush()
        shutil.copytree(store, image)
    (image / "lock").touch()
    lost, *_, gone = (path.name for path in sorted((image / "commitlog").iterdir())[1:4])
    for path in ("commitlog", ".logquarry/names/commitlog"):
        (image / path / gone).unlink(missing_ok=True)
    (image / "commitlog" / lost).unlink()
    before = facts(image)
    with pytest.raises(LossRefused, match="Nothing was changed"):
        _by(by, image)
    assert facts(image) == before


@pytest.mark.parametrize(
    "by", ["an opening", "a RocketMQ recovery", "a recovery", "a crash", "recover", "rebuild"]
)
def test_second_names_of_another_day_are_not_restored(tmp_path: Path, by: str) -> None:
    """The user put back the files of an older backup, but kept `.logquarry/names/`."""
    sound, later = _other_days(tmp_path)
    shutil.rmtree(sound / ".logquarry/names", ignore_errors=True)
    shutil.copytree(later / ".logquarry/names", sound / ".logquarry/names")
    lost = {path.name for path in (sound / ".logquarry/names/commitlog").iterdir()}
    files = {path.name for path in (sound / "commitlog").iterdir()}
    assert lost - files
    before = _bodies(sound)
    if by == "a recovery":
        # The queues need a recovery, but the log lacks no file.
        shutil.rmtree(sound / "consumequeue")
    elif by == "a crash":
        # The broker's `abort`, and no durable offset: only the log shows where it ends.
        (sound / "abort").touch()
        (sound / ".logquarry/durable").unlink()
    _by(by, sound)
    assert _bodies(sound) == before
    assert {path.name for path in (sound / "commitlog").iterdir()} == files
    assert not verify(sound, config=config()).findings
    aside = sound / ".logquarry/quarantine/names/commitlog"
    assert {path.name for path in aside.iterdir()} >= {
        name for name in lost - files if any((later / "commitlog" / name).read_bytes())
    }


def test_a_file_of_another_size_is_not_restored(tmp_path: Path) -> None:
    """After a crash, names of a store with other file sizes do not enter the log."""
    with opened(tmp_path) as made:
        made.put(lq.Message("t", b"body", keys="k"))
    (tmp_path / "abort").touch()
    names = tmp_path / ".logquarry/names/commitlog"
    names.mkdir(parents=True, exist_ok=True)
    (names / f"{1 << 30:020d}").write_bytes(b"other" * 100)
    before = _bodies(tmp_path)
    recover(tmp_path, apply=True, config=config())
    assert _bodies(tmp_path) == before
    assert [path.name for path in (tmp_path / "commitlog").iterdir()] == [f"{0:020d}"]
    assert not verify(tmp_path, config=config()).findings
    assert (tmp_path / f".logquarry/quarantine/names/commitlog/{1 << 30:020d}").exists()
