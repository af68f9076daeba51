"""Commits without an answer: a later export finds out from the table whether they succeeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logquarry.spark.lakehouse import write
from logquarry.spark.lakehouse.table import CommitUnknown
from logquarry.spark.output import OutputFolder
from tests.helpers.lake import KINDS, Lake, numbers, put

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")
Late = Callable[[], Any]


def commit_of(kind: str) -> tuple[Any, str, Exception]:
    """Class and method that commit, and the error without an answer."""
    if kind == "delta":
        from deltalake import DeltaTable

        return DeltaTable, "create_write_transaction", OSError("operation timed out")
    # Imported late: the catalog's SQLAlchemy would cost each process that collects tests a second.
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.exceptions import CommitStateUnknownException

    return SqlCatalog, "commit_table", CommitStateUnknownException("504: gateway timeout")


def begun(lake: Lake, store: Path) -> None:
    """Make a table with messages, and a store with more messages."""
    put(store, *numbers(0, 3))
    lake.export(store)
    put(store, *numbers(3, 6))


def without_an_answer(
    patch: pytest.MonkeyPatch, kind: str, *, is_made: bool, asked: list[Late]
) -> None:
    owner, name, error = commit_of(kind)
    own = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> None:
        asked.append(lambda: own(*arguments, **named))
        if is_made:
            own(*arguments, **named)
        raise error

    patch.setattr(owner, name, call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_made", [True, False])
def test_the_next_run_finds_out(
    kind: str, is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, store = Lake(kind, tmp_path / "table"), tmp_path / "store"
    begun(lake, store)
    known = lake.known_files()
    asked: list[Late] = []
    with monkeypatch.context() as patch:
        without_an_answer(patch, kind, is_made=is_made, asked=asked)
        with pytest.raises(CommitUnknown, match=r"the next export checks: .*time"):
            lake.export(store)
    written = lake.parquet_files() - known
    assert len(asked) == 1
    assert written
    assert lake.known_files() == (known | written if is_made else known)
    done = lake.export(store)
    assert (done.messages, lake.bodies()) == (0 if is_made else 3, numbers(0, 6))
    assert lake.known_files() == lake.parquet_files()
    assert is_made == (written <= lake.parquet_files())
    assert not list((lake.dest / write.CONTROL).iterdir())


def test_a_commit_that_comes_after_the_files_are_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog is still busy while the next run checks, removes the files and writes its own."""
    from pyiceberg.exceptions import CommitFailedException

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    begun(lake, store)
    asked: list[Late] = []
    with monkeypatch.context() as patch:
        without_an_answer(patch, "iceberg", is_made=False, asked=asked)
        with pytest.raises(CommitUnknown):
            lake.export(store)
    refused: list[bool] = []
    remove = OutputFolder.remove

    def removed(folder: OutputFolder, path: str) -> None:
        if path.endswith(".parquet"):
            with pytest.raises(CommitFailedException):
                asked[0]()
            refused.append(True)
        remove(folder, path)

    monkeypatch.setattr(OutputFolder, "remove", removed)
    lake.export(store)
    assert refused
    assert lake.bodies() == numbers(0, 6)
    assert lake.known_files() == lake.parquet_files()


def test_a_commit_that_comes_while_the_next_run_looks_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    begun(lake, store)
    asked: list[Late] = []
    with monkeypatch.context() as patch:
        without_an_answer(patch, "iceberg", is_made=False, asked=asked)
        with pytest.raises(CommitUnknown):
            lake.export(store)
    reached = write._reached

    def late(*marks: Any) -> bool:
        found = reached(*marks)
        if len(asked) == 1:
            asked.append(asked[0])
            asked[0]()
        return found

    monkeypatch.setattr(write, "_reached", late)
    done = lake.export(store)
    assert (done.messages, lake.bodies()) == (0, numbers(0, 6))
    assert lake.known_files() == lake.parquet_files()


def test_the_dead_letters_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from logquarry.spark.decode import parse_decode_options

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    decode = parse_decode_options("json", "id int")
    put(store, b'{"id": 1}', b"dead 1")
    lake.export(store, decode=decode)
    put(store, b'{"id": 2}', b"dead 2")
    asked: list[Late] = []
    with monkeypatch.context() as patch:
        without_an_answer(patch, "iceberg", is_made=True, asked=asked)
        with pytest.raises(CommitUnknown, match="dead_letters"):
            lake.export(store, decode=decode)
    assert len(asked) == 1
    lake.export(store, decode=decode)
    assert [value["id"] for (value,) in lake.rows("value")] == [1, 2]
    assert [row[2] for row in lake.rows(dead=True)] == [b"dead 1", b"dead 2"]
    assert lake.known_files() == lake.parquet_files()
