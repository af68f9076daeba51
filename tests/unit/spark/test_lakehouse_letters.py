"""Tables of dead letters that belong to another table, or lie in its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.spark.decode import parse_decode_options
from logquarry.spark.lakehouse import advance as advance_module
from logquarry.spark.lakehouse import export as export_module
from logquarry.spark.lakehouse import table as table_module
from logquarry.spark.lakehouse.delta import Delta
from logquarry.spark.lakehouse.iceberg import Iceberg
from logquarry.spark.lakehouse.write import Run
from logquarry.spark.output import OutputFolder
from tests.helpers.lake import Lake, put

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

NUMBER = parse_decode_options("json", "n bigint")
BOOLEAN = parse_decode_options("json", "n boolean")


def old_documents(patch: pytest.MonkeyPatch) -> None:
    """Let documents of dead letters have only what an earlier version wrote."""

    def document(own: Any, start: Any, dead_letters: Any) -> str:
        kept = {name: own[name] for name in ("dead_letters_of",) if name in own} or dict(own)
        found = {"version": 1, **kept, "start": dict(start), "dead_letters": dead_letters}
        return json.dumps(found)

    patch.setattr(table_module, "document", document)


@pytest.mark.parametrize("is_old", [False, True])
def test_dead_letters_of_another_table(
    is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, dead = tmp_path / "store", tmp_path / "dead"
    put(store, b'{"n": true}', b'{"n": 1}')
    one, two = Lake("delta", tmp_path / "a"), Lake("delta", tmp_path / "b")
    with monkeypatch.context() as patch:
        if is_old:
            old_documents(patch)
        assert one.export(store, decode=NUMBER, dead_letters=dead).dead_messages == 1
    text = f"{dead}: holds the dead letters of {one.dest}, not of {two.dest}: give another"
    for decode in (BOOLEAN, NUMBER):
        with pytest.raises(UsageError, match=text):
            two.export(store, decode=decode, dead_letters=dead)
    assert not two.dest.exists()
    put(store, b"no JSON")
    assert one.export(store, decode=NUMBER, dead_letters=dead).dead_messages == 1
    done = two.export(store, decode=BOOLEAN)
    assert (done.messages, done.dead_messages) == (1, 2)
    with pytest.raises(UsageError, match=text):
        two.export(store, decode=BOOLEAN, dead_letters=dead)


def test_messages_are_no_dead_letters(tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, b"no JSON")
    one, two = Lake("delta", tmp_path / "a"), Lake("delta", tmp_path / "b")
    one.export(store)
    text = f"{one.dest}: is a table of messages, .* the dead letters of {two.dest}"
    with pytest.raises(UsageError, match=text):
        two.export(store, decode=NUMBER, dead_letters=one.dest)
    two.export(store, decode=NUMBER)
    letters = Lake("delta", Path(f"{two.dest}_dead_letters"))
    with pytest.raises(UsageError, match=f"{letters.dest}: the table has"):
        letters.export(store)
    assert len(one.rows()) == 1


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("letters", [None, "one/dead", "moved alone", "of another name"])
def test_a_table_that_was_moved_with_its_dead_letters(
    is_old: bool, letters: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    put(store, b'{"n": true}')
    one, two = Lake("delta", tmp_path / "one" / "table"), Lake("delta", tmp_path / "two" / "table")
    more: dict[str, Any] = {}
    if letters == "one/dead":
        more["dead_letters"] = tmp_path / letters
    elif letters is not None:
        two = Lake("delta", tmp_path / "one" / "orders")
    with monkeypatch.context() as patch:
        if is_old:
            old_documents(patch)
        one.export(store, decode=NUMBER, **more)
    if letters == "one/dead":
        (tmp_path / "one").rename(tmp_path / "two")
        more["dead_letters"] = dead = tmp_path / "two" / "dead"
    else:
        two.dest.parent.mkdir(exist_ok=True)
        one.dest.rename(two.dest)
        dead = Path(f"{two.dest if letters != 'moved alone' else one.dest}_dead_letters")
        if letters == "moved alone":
            more["dead_letters"] = dead
        else:
            Path(f"{one.dest}_dead_letters").rename(dead)
    put(store, b'{"n": 2}', b'{"n": 3.5}')
    if is_old and letters == "moved alone":
        # Another table that shared the dead letters would look the same.
        with pytest.raises(UsageError, match=f"{dead}: holds the dead letters of {one.dest}, not"):
            two.export(store, decode=NUMBER, **more)
        return
    if is_old and letters is None:
        # An unrelated new table at the earlier place does not matter.
        one.export(store, decode=BOOLEAN)
    done = two.export(store, decode=NUMBER, **more)
    assert (done.messages, done.dead_messages) == (1, 1)
    assert two.export(store, decode=NUMBER, **more).dead_messages == 0
    assert len(Lake("delta", dead).rows()) == 2


@pytest.mark.parametrize("is_old", [False, True])
def test_a_table_through_a_link(
    is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = tmp_path / "store", tmp_path / "real"
    put(store, b'{"n": true}')
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    dead = tmp_path / "dead"
    with monkeypatch.context() as patch:
        if is_old:
            old_documents(patch)
        Lake("delta", tmp_path / "link" / "a").export(store, decode=NUMBER, dead_letters=dead)
    for place in (real / "a", tmp_path / "link" / "a"):
        put(store, b'{"n": 2}', b'{"n": 3.5}')
        done = Lake("delta", place).export(store, decode=NUMBER, dead_letters=dead)
        assert (done.messages, done.dead_messages) == (1, 1)
    assert len(Lake("delta", dead).rows()) == 3


def test_another_table_beside_moved_dead_letters_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tables shared their dead letters; then one table was removed, and all was moved."""
    store = tmp_path / "store"
    put(store, b'{"n": true}', b'{"n": 1}')
    with monkeypatch.context() as patch:
        old_documents(patch)
        patch.setattr(advance_module, "check_letters", no_checks)
        for name in ("a", "b"):
            lake = Lake("delta", tmp_path / "one" / name)
            lake.export(store, decode=NUMBER, dead_letters=tmp_path / "one" / "dead")
    shutil.rmtree(tmp_path / "one" / "a")
    for place in ("one", "two"):
        root = tmp_path / place
        if place == "two":
            (tmp_path / "one").rename(root)
        with pytest.raises(UsageError, match=f"holds the dead letters of .*a, not of {root}/b"):
            Lake("delta", root / "b").export(store, decode=NUMBER, dead_letters=root / "dead")


@pytest.mark.parametrize("is_old", [False, True])
def test_a_table_that_was_created_again(
    lake: Lake, is_old: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    put(store, b'{"n": true}', b'{"n": 1}')
    with monkeypatch.context() as patch:
        if is_old:
            old_documents(patch)
        lake.export(store, decode=NUMBER)
    if lake.kind == "delta":
        shutil.rmtree(lake.dest)
    else:
        with lake.catalog() as catalog:
            catalog.drop_table("logquarry.messages")
    text = "whose settings are unknown: remove it" if is_old else "the table has decode"
    with pytest.raises(UsageError, match=text):
        lake.export(store, decode=BOOLEAN)
    if not is_old:
        done = lake.export(store, decode=NUMBER)
        # The dead letters are complete already.
        assert (done.messages, done.dead_messages) == (1, 0)
        assert len(lake.rows(dead=True)) == 1


def test_dead_letters_overlap_with_no_table_and_no_store(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, b"no JSON")
    lake = Lake(lake.kind, tmp_path / "lakes" / "table")
    own = lake.prepared(store).target.table.folder.location
    (tmp_path / "link").symlink_to(tmp_path / "lakes")
    linked = tmp_path / "link" / Path(own).relative_to(tmp_path / "lakes")
    for place in (own, f"{own}/dead", Path(own).parent, linked / "dead"):
        with pytest.raises(UsageError, match=f"^{place}: overlaps with the folder .*, {own}"):
            lake.export(store, decode=NUMBER, dead_letters=place)
    with pytest.raises(UsageError, match="overlaps with the store"):
        lake.export(store, decode=NUMBER, dead_letters=store / "dead")
    assert not lake.dest.exists()
    assert not (store / "dead").exists()


def no_checks(*_: Any) -> None:
    """Check as little as an earlier version did."""


@pytest.mark.parametrize("ends", ["it fails", "it crashes"])
@pytest.mark.parametrize("below", ["dead", "a/dead"])
def test_dead_letters_inside_an_existing_table_stay(
    lake: Lake, ends: str, below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    put(store, b'{"n": 1}', b"dead 1")
    dead = Path(lake.prepared(store).target.table.folder.location) / below
    kind: Any = Delta if lake.kind == "delta" else Iceberg
    append = kind.append

    def failing(self: Any, *arguments: Any) -> None:
        if not self.folder.location.endswith("dead"):
            raise StoreUnavailable("no table today")
        append(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_check_letters_apart", no_checks)
        lake.export(store, decode=NUMBER, dead_letters=dead)
        put(store, b"dead 2", b'{"n": 2}')
        patch.setattr(kind, "append", failing)
        if ends == "it crashes":
            patch.setattr(Run, "give_up", Run.leave)
        with pytest.raises(StoreUnavailable, match="no table today"):
            lake.export(store, decode=NUMBER, dead_letters=dead)
    committed = set(dead.glob("*.parquet"))
    assert len(committed) == 2
    with pytest.raises(UsageError, match="overlaps"):
        lake.export(store, decode=NUMBER, dead_letters=dead)
    lake.export(store, decode=NUMBER, dead_letters=tmp_path / "other")
    assert [value["n"] for (value,) in lake.rows("value")] == [1, 2]
    assert set(dead.glob("*.parquet")) == committed


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_is_no_path_is_no_table(name: str, tmp_path: Path) -> None:
    assert not Delta(OutputFolder(tmp_path)).is_called(name)
