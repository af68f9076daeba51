"""Interrupted salvages start again or finish, and remove only their own files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.salvage.target import SalvageTarget, settle
from logquarry.repair.verification import verify_store
from tests.helpers.small_store import at_each_step, facts
from tests.helpers.store_maker import StoreMaker


class Killed(BaseException):
    pass


class DyingDisk(Disk):
    """Stops before a rename, as a killed process does."""

    def __init__(self, renames: int) -> None:
        super().__init__()
        self.left = renames

    def rename(self, source: Path, target: Path) -> None:
        if source.parent.name == ".salvage":
            if not self.left:
                raise Killed
            self.left -= 1
        super().rename(source, target)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    maker = StoreMaker()
    for number in range(30):
        maker.put(f"topic{number % 2}", 0, b"body %d" % number * 20)
    root = maker.write(tmp_path / "store")
    (root / "config").mkdir(exist_ok=True)
    (root / "config/notes.txt").write_text("kept")
    return root


def begun(store: Path, into: Path, renames: int = 0) -> bool:
    """Start a salvage that is killed after some renames; returns whether it was."""
    try:
        with patch.object(SalvageTarget, "discard"):
            salvage_store(StoreLayout.open(store), into, disk=DyingDisk(renames))
    except Killed:
        return True
    return False


def test_cut_off_at_each_rename(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"
    assert not settle(str(store), into)
    renames = 0
    while begun(store, into, renames):
        assert not settle(str(store), into)
        assert not into.exists() or not list(into.iterdir())
        renames += 1
    assert renames > 4
    assert settle(str(store), into)
    assert not verify_store(StoreLayout.open(into)).has_damage


def refused(store: Path, into: Path) -> str:
    """Repeat a salvage into the same folder; return the error."""
    with pytest.raises(UsageError) as raised:
        salvage_store(StoreLayout.open(store), into)
    return str(raised.value)


def test_a_repeated_salvage_names_all_that_must_be_removed(store: Path, tmp_path: Path) -> None:
    """At each rename: if the user removes the named files, the salvage works."""
    into, renames = tmp_path / "new", 0
    while begun(store, into, renames):
        error = refused(store, into)
        assert "a salvage into it was interrupted" in error
        (named,) = re.findall("remove (.*) to start again", error)
        for name in named.split(", "):
            path = Path(name)
            assert path.parent == into
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert not list(into.iterdir())
        renames += 1
    assert renames > 4
    assert not verify_store(StoreLayout.open(into)).has_damage


def test_a_repeated_salvage_keeps_what_others_made(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"
    assert begun(store, into, 2)
    (into / "commitlog").mkdir()
    (into / "notes").mkdir()
    error = refused(store, into)
    assert str(into / ".salvage") in error
    assert str(into / "commitlog") not in error
    assert str(into / "notes") not in error


def test_a_repeated_salvage_finds_the_complete_store(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"
    salvage_store(StoreLayout.open(store), into)
    error = refused(store, into)
    assert f"the complete store that an earlier salvage of {store} made" in error
    assert f"`logquarry verify {into}`" in error
    (into / ".salvage").mkdir()
    error = refused(store, into)
    assert f"Remove the empty folder {into / '.salvage'}" in error
    assert "complete store" in error


def test_a_repeated_salvage_finds_a_part_of_the_store(store: Path, tmp_path: Path) -> None:
    """As an earlier error told the user, only ``.salvage`` was removed."""
    into = tmp_path / "new"
    salvage_store(StoreLayout.open(store), into)
    shutil.rmtree(into / "commitlog")
    error = refused(store, into)
    assert f"only a part of the store that an interrupted salvage of {store} made" in error
    assert str(into / ".logquarry") in error


def test_an_interrupted_salvage_removes_what_it_made(store: Path, tmp_path: Path) -> None:
    """At each rename, in a new folder and in an empty one; the store itself does not change."""
    before, given = facts(store), tmp_path / "given"
    given.mkdir()
    renames = 0
    while True:
        into = tmp_path / "new"
        try:
            salvage_store(StoreLayout.open(store), into, disk=DyingDisk(renames))
        except Killed:
            assert not into.exists()
        else:
            break
        with pytest.raises(Killed):
            salvage_store(StoreLayout.open(store), given, disk=DyingDisk(renames))
        assert given.is_dir() and not list(given.iterdir())
        renames += 1
    assert renames > 4
    assert facts(store) == before


def test_an_interrupted_salvage_keeps_what_others_made(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"

    def pause() -> None:
        if (into / ".salvage/commitlog").is_dir():
            (into / "commitlog").mkdir()
            (into / "commitlog/00000000000000000000").write_bytes(b"of the broker")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        salvage_store(StoreLayout.open(store), into, bars=at_each_step(pause))
    assert (into / "commitlog/00000000000000000000").read_bytes() == b"of the broker"


def test_all_of_it_was_out(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"
    salvage_store(StoreLayout.open(store), into)
    # The salvage was killed before its last call, and then a broker began to write there.
    (into / ".salvage").mkdir()
    (into / "commitlog/00000000000000009999").write_bytes(b"of the broker")
    before = facts(into)
    assert settle(str(store), into)
    assert facts(into) == {name: fact for name, fact in before.items() if name != ".salvage"}


@pytest.mark.parametrize("renames", [0, 2])
def test_a_store_that_a_broker_began_there_stays(store: Path, tmp_path: Path, renames: int) -> None:
    into = tmp_path / "new"
    assert begun(store, into, renames)
    (into / "commitlog").mkdir()
    (into / "commitlog/00000000000000000000").write_bytes(b"of the broker")
    before = facts(into)
    with pytest.raises(UsageError, match="did not make it: nothing was removed"):
        settle(str(store), into)
    assert facts(into) == before


def test_a_store_that_a_broker_begins_meanwhile(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"

    def pause() -> None:
        (into / "commitlog").mkdir(parents=True, exist_ok=True)

    with pytest.raises(UsageError, match="holds commitlog"):
        salvage_store(StoreLayout.open(store), into, bars=at_each_step(pause))
    assert [path.name for path in into.iterdir()] == ["commitlog"]


def test_another_store_is_not_taken_for_this_one(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"
    salvage_store(StoreLayout.open(store), into)
    with pytest.raises(UsageError, match=f"{store} was saved there, not /rack2/store"):
        settle("/rack2/store", into)
    for text in ("", "[]", "{}", "[" * 100_000):
        (into / ".logquarry/salvage.json").write_text(text)
        with pytest.raises(UsageError, match="not the report of a salvage"):
            settle(str(store), into)


def test_one_that_is_at_work(store: Path, tmp_path: Path) -> None:
    into = tmp_path / "new"

    def pause() -> None:
        if (into / ".salvage").is_dir():
            with pytest.raises(StoreUnavailable, match="at work"):
                settle(str(store), into)

    salvage_store(StoreLayout.open(store), into, bars=at_each_step(pause))
    told = json.loads((into / ".logquarry/salvage.json").read_text())
    assert told["messages"] == 30
