"""Exports that are refused: they leave table and folder as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from tests.helpers.lake import Lake, numbers, put

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


@pytest.mark.parametrize(
    ("options", "more", "word"),
    [
        ({"topics": "a"}, {}, "filters"),
        ({"columns": "topic,body"}, {}, "columns"),
        ({}, {"partition_by": ["topic"]}, "partition_by"),
        ({}, {"decode": "json"}, "decode"),
    ],
)
def test_a_table_has_one_kind_of_rows(
    lake: Lake, tmp_path: Path, options: dict[str, str], more: dict[str, Any], word: str
) -> None:
    put(tmp_path / "store", b"{}")
    lake.export(tmp_path / "store")
    with pytest.raises(UsageError, match=f"the table has {word}"):
        lake.export(tmp_path / "store", options, **more)


def test_stores_that_change_their_names(lake: Lake, tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "store", tmp_path / "two" / "store"
    put(one, b"1")
    put(two, b"2")
    lake.export(one)
    # In an export of this store alone, its name was `store`.
    with pytest.raises(UsageError, match="under another name"):
        lake.export([one, two])
    with pytest.raises(UsageError, match="from another path"):
        lake.export(two)
    assert lake.bodies() == [b"1"]
    moved = tmp_path / "elsewhere" / "store"
    moved.parent.mkdir()
    one.rename(moved)
    put(moved, b"3")
    with pytest.raises(UsageError, match="--moved"):
        lake.export(moved)
    lake.export(moved, moved=True)
    lake.export(moved)
    assert lake.bodies() == [b"1", b"3"]


def test_a_store_that_lost_its_end(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, *numbers(0, 9))
    lake.export(store)
    store.rename(tmp_path / "old")
    put(store, b"x")
    with pytest.raises(lq.errors.MessageNotFound, match="it was truncated or replaced"):
        lake.export(store)


def test_places_that_make_no_sense(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, b"a")
    with pytest.raises(UsageError, match="overlaps with the store"):
        Lake(lake.kind, store / "table").export(store)
    lake.dest.mkdir()
    (lake.dest / "letter.txt").touch()
    with pytest.raises(UsageError, match=r"other files \(letter.txt\)"):
        lake.export(store)
    with pytest.raises(StoreNotFound):
        lake.export(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="no end"):
        lake.export(store, {"endingOffsets": "7"})
    with pytest.raises(UsageError, match="unexpected keyword"):
        lake.export(store, colour="red")
    assert sorted(p.name for p in lake.dest.iterdir()) == ["letter.txt"]


def test_a_table_of_somebody_else(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    put(tmp_path / "store", b"a")
    write_deltalake(str(tmp_path / "table"), pa.table({"n": [1]}))
    with pytest.raises(UsageError, match="no export created"):
        Lake("delta", tmp_path / "table").export(tmp_path / "store")


def test_troubles_of_the_libraries_are_told_in_words(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, b"a")
    lake.export(store)
    if lake.kind == "delta":
        (lake.dest / "_delta_log" / f"{1:020d}.json").write_text("no JSON")
    else:
        (lake.dest / "catalog.db").write_bytes(b"no SQLite" * 100)
    with pytest.raises(StoreUnavailable, match=str(lake.dest)):
        lake.export(store)
