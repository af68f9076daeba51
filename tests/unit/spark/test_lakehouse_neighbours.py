"""Iceberg tables that share a destination: no export removes files of another table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logquarry.errors import UsageError
from logquarry.spark.compaction import compact
from logquarry.spark.lakehouse.export import iceberg_export
from logquarry.spark.lakehouse.iceberg import Iceberg
from logquarry.spark.lakehouse.write import CONTROL, Run
from tests.helpers.lake import Lake, numbers, put, run_here

pytest.importorskip("pyiceberg")

NAMES = ("sales.messages", "audit.messages", "sales.orders", "logquarry.messages")


class Power(BaseException):
    """The process is gone: no cleanup runs."""


def export(dest: Path, store: Path, name: str, **more: Any) -> int:
    done = iceberg_export([store], dest, None, table=name, **more).run_with(run_here)
    return done.messages


def crashed(
    patch: pytest.MonkeyPatch, step: tuple[Any, str], dest: Path, store: Path, name: str
) -> None:
    """Export, and lose the process at a step."""

    def power(*_: Any, **__: Any) -> None:
        raise Power

    with patch.context() as at:
        at.setattr(*step, power)
        at.setattr(Run, "give_up", Run.leave)
        with pytest.raises(Power):
            export(dest, store, name)


def bodies(dest: Path, name: str) -> list[bytes]:
    with Lake("iceberg", dest).catalog() as catalog:
        rows = catalog.load_table(name).scan().to_arrow().sort_by("physical_offset")
    return list(rows.column("body").to_pylist())


def parquet_files(dest: Path) -> int:
    return len(list(dest.rglob("*.parquet")))


@pytest.mark.parametrize("catalog", [None, "sql"])
def test_sqlite_has_no_nested_namespaces(catalog: str | None, tmp_path: Path) -> None:
    put(tmp_path / "store", *numbers(0, 1))
    given = catalog and {"type": catalog, "uri": f"sqlite:///{tmp_path}/catalog.db"}
    with pytest.raises(UsageError, match=r"'a\.b\.c': .* has no nested namespaces"):
        export(tmp_path / "lake", tmp_path / "store", "a.b.c", catalog=given)
    assert not list(tmp_path.rglob("*.parquet"))


@pytest.mark.parametrize("other", NAMES[1:])
def test_a_crash_after_the_commit(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, store = tmp_path / "lake", tmp_path / "store"
    put(store, *numbers(0, 5))
    crashed(monkeypatch, (Run, "commit_done"), dest, store, "sales.messages")
    assert export(dest, store, other) == 5
    assert bodies(dest, "sales.messages") == bodies(dest, other) == numbers(0, 5)
    put(store, *numbers(5, 7))
    for name in ("sales.messages", other):
        assert export(dest, store, name) == 2
        assert bodies(dest, name) == numbers(0, 7)
    assert not list((dest / CONTROL).iterdir())


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_crash_before_the_commit_is_cleaned_up_by_the_tables_next_export(
    is_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, store = tmp_path / "lake", tmp_path / "store"
    put(store, b"a")
    for name in NAMES[1:] if is_begun else ():
        export(dest, store, name)
    if is_begun:
        export(dest, store, "sales.messages")
        put(store, b"b")
    before = parquet_files(dest)
    crashed(monkeypatch, (Iceberg, "append"), dest, store, "sales.messages")
    for name in NAMES[1:]:
        export(dest, store, name)
    assert parquet_files(dest) == before + 4
    export(dest, store, "sales.messages")
    assert parquet_files(dest) == before + 4
    assert not list((dest / CONTROL).iterdir())


def test_a_table_of_the_same_name_in_another_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, store = tmp_path / "lake", tmp_path / "store"
    other = {"name": "other", "type": "sql", "uri": f"sqlite:///{tmp_path}/other.db"}
    put(store, *numbers(0, 5))
    crashed(monkeypatch, (Run, "commit_done"), dest, store, "sales.messages")
    assert export(dest, store, "sales.messages", catalog=other) == 5
    assert bodies(dest, "sales.messages") == numbers(0, 5)


def test_each_table_has_a_folder(tmp_path: Path) -> None:
    dest, store = tmp_path / "lake", tmp_path / "store"
    put(store, b"a")
    for name in NAMES:
        export(dest, store, name)
        put(store, b"b")
        export(dest, store, name)
        assert compact(dest, table=name).files_after == 1
    folders = {path.name for path in dest.iterdir() if path.is_dir()}
    assert folders == {CONTROL, "messages", "sales.messages", "audit.messages", "sales.orders"}


def export_by_an_earlier_version(dest: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export to the table ``sales.messages`` in the folder that earlier versions gave it."""
    with monkeypatch.context() as patch:
        patch.setattr(Iceberg, "folder", property(lambda self: self._below("messages")))
        export(dest, store, "sales.messages")


def test_a_table_of_an_earlier_version_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, store = tmp_path / "lake", tmp_path / "store"
    put(store, b"a")
    export_by_an_earlier_version(dest, store, monkeypatch)
    put(store, b"b")
    export(dest, store, "sales.messages")
    export(dest, store, "audit.messages")
    assert bodies(dest, "sales.messages") == bodies(dest, "audit.messages") == [b"a", b"b"]
    assert compact(dest, table="sales.messages").files_before == 2
    assert len(list((dest / "messages").glob("*.parquet"))) == 3
    assert not (dest / "sales.messages").exists()


def test_a_new_table_takes_no_folder_of_a_table_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iceberg's removal of orphan files deletes what one table does not name from its folder."""
    dest, store = tmp_path / "lake", tmp_path / "store"
    put(store, b"a")
    export_by_an_earlier_version(dest, store, monkeypatch)
    for name in ("logquarry.messages", "audit.messages"):
        export(dest, store, name)
        put(store, b"b")
        assert export(dest, store, name) == 1
        assert len(list((dest / name).glob("*.parquet"))) == 2
    assert export(dest, store, "sales.messages") == 2
    assert len(list((dest / "messages").glob("*.parquet"))) == 2


def test_a_broken_table_of_another_namespace_does_no_harm(tmp_path: Path) -> None:
    dest, store = tmp_path / "lake", tmp_path / "store"
    put(store, b"a")
    export(dest, store, "sales.messages")
    for file in (dest / "sales.messages" / "metadata").glob("*.json"):
        file.write_text("{")
    assert export(dest, store, "logquarry.messages") == 1
    put(store, b"b")
    assert export(dest, store, "logquarry.messages") == 1
    assert bodies(dest, "logquarry.messages") == [b"a", b"b"]


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_lost_catalog(tmp_path: Path, is_empty: bool) -> None:
    """Else the export would start a second table, with all messages again."""
    dest, store = tmp_path / "lake", tmp_path / "store"
    put(store, b"a")
    export(dest, store, "logquarry.messages")
    put(store, b"b")
    (dest / "catalog.db").unlink()
    if is_empty:
        with Lake("iceberg", dest).catalog() as catalog:
            assert not catalog.list_namespaces()
    before = sorted(dest.rglob("*"))
    words = rf"^{dest}/catalog.db: .* missing or empty.*\(messages/metadata/0.*register_table.*"
    for name in ("logquarry.messages", "sales.orders"):
        with pytest.raises(UsageError, match=f"{words}pass --catalog.*another folder"):
            export(dest, store, name)
    assert sorted(dest.rglob("*")) == before
    newest = max((dest / "messages" / "metadata").glob("*.metadata.json"))
    with Lake("iceberg", dest).catalog() as catalog:
        catalog.create_namespace("logquarry")
        catalog.register_table("logquarry.messages", f"file://{newest}")
    assert export(dest, store, "logquarry.messages") == 1
    assert bodies(dest, "logquarry.messages") == [b"a", b"b"]
