"""Changes to a table besides an export: by another export, and by other programs."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from logquarry.errors import StoreUnavailable
from logquarry.spark.lakehouse import delta, iceberg
from logquarry.spark.output import OutputFolder
from tests.helpers.lake import Lake, numbers, put, run_here

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


def test_another_export_at_work(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", b"a")
    lake.dest.mkdir()
    lock = OutputFolder(lake.dest).lock()
    assert lock is not None
    with pytest.raises(StoreUnavailable, match="another export is running"):
        lake.export(tmp_path / "store")
    os.close(lock)
    lake.export(tmp_path / "store")


def test_without_locks_two_exports_do_not_double(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second export runs completely while this one's files are written."""
    monkeypatch.setattr(OutputFolder, "lock", lambda self: None)
    store = tmp_path / "store"
    put(store, *numbers(0, 5))
    lake.export(store)
    put(store, *numbers(5, 9))

    def overtaken(tasks: Any, work: Any) -> Any:
        found = run_here(tasks, work)
        lake.export(store)
        return found

    with pytest.raises(StoreUnavailable, match="another export has committed"):
        lake.prepared(store).run_with(overtaken)
    assert lake.bodies() == numbers(0, 9)


def test_a_commit_that_is_overtaken_in_the_middle(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second export commits between the last check and the commit."""
    monkeypatch.setattr(OutputFolder, "lock", lambda self: None)
    store = tmp_path / "store"
    put(store, *numbers(0, 5))
    lake.export(store)
    put(store, *numbers(5, 9))
    module: Any = delta if lake.kind == "delta" else iceberg
    name = "_add_action" if lake.kind == "delta" else "_data_file"
    plain = getattr(module, name)

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(module, name, plain)
        lake.export(store)
        return plain(*arguments)

    monkeypatch.setattr(module, name, late)
    with pytest.raises(StoreUnavailable, match="another export has committed"):
        lake.export(store)
    assert lake.bodies() == numbers(0, 9)


def test_somebody_else_changes_the_table_in_the_middle_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change that is not an export: the commit succeeds after it."""
    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    put(store, *numbers(3, 6))
    plain, calls = iceberg._data_file, []

    def late(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            with lake.iceberg() as table:
                table.delete("physical_offset = 0")
        return plain(*arguments)

    monkeypatch.setattr(iceberg, "_data_file", late)
    lake.export(store)
    assert (len(calls), lake.bodies()) == (2, numbers(1, 6))


def test_going_back_to_an_earlier_snapshot_goes_back_with_the_marks(tmp_path: Path) -> None:
    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    put(store, *numbers(3, 6))
    with lake.iceberg() as table:
        snapshot = table.current_snapshot()
        assert snapshot is not None
        lake.export(store)
        table.refresh()
        table.manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
    assert lake.bodies() == numbers(0, 3)
    lake.export(store)
    assert lake.bodies() == numbers(0, 6)


def test_the_marks_of_a_table_that_others_have_written_to(lake: Lake, tmp_path: Path) -> None:
    """Rows that a user deletes do not appear again."""
    store = tmp_path / "store"
    put(store, *numbers(0, 6))
    lake.export(store)
    gone = "physical_offset = 0"
    if lake.kind == "delta":
        from deltalake import DeltaTable

        DeltaTable(lake.dest).delete(gone)
        DeltaTable(lake.dest).optimize.compact()
        DeltaTable(lake.dest).create_checkpoint()
    else:
        with lake.iceberg() as table:
            table.delete(gone)
    put(store, *numbers(6, 8))
    assert lake.export(store).messages == 2
    assert lake.bodies() == numbers(1, 8)


def test_the_marks_after_the_snapshots_of_exports_have_expired(tmp_path: Path) -> None:
    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    with lake.iceberg() as table:
        table.delete("physical_offset = 0")
        table.maintenance.expire_snapshots().older_than(datetime.now()).commit()
        assert len(table.snapshots()) == 1
    put(store, *numbers(3, 5))
    assert lake.export(store).messages == 2
    assert lake.bodies() == numbers(1, 5)


@pytest.mark.parametrize("is_expired", [False, True])
def test_the_marks_after_an_upgrade_of_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_expired: bool
) -> None:
    from pyiceberg.table import TableProperties

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    with monkeypatch.context() as patch:
        patch.setattr(TableProperties, "DEFAULT_FORMAT_VERSION", 1)
        lake.export(store)
    with lake.iceberg() as table:
        assert table.format_version == 1
        with table.transaction() as change:
            change.upgrade_table_version(2)
        table.delete("physical_offset = 0")
        last = table.current_snapshot()
        assert last is not None and last.sequence_number == 1
        if is_expired:
            table.maintenance.expire_snapshots().older_than(datetime.now()).commit()
            assert len(table.snapshots()) == 1
    put(store, *numbers(3, 5))
    assert lake.export(store).messages == 2
    assert lake.bodies() == numbers(1, 5)


def test_going_back_to_before_the_first_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    with monkeypatch.context() as patch:
        patch.setattr(iceberg.Iceberg, "append", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            lake.export(store)
    with lake.iceberg() as table:
        table.append(table.scan().to_arrow())
        first = table.current_snapshot()
        assert first is not None
        lake.export(store)
        table.refresh()
        table.manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
    lake.export(store)
    assert lake.bodies() == numbers(0, 3)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_replaced_table_gets_all_messages_again(tmp_path: Path, rows: int) -> None:
    """CREATE OR REPLACE TABLE keeps the properties and the snapshots, but removes the branch."""
    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    with lake.iceberg() as table:
        found = table.scan().to_arrow()
        table.manage_snapshots()._remove_ref_snapshot("main").commit()
        table.refresh()
        assert table.current_snapshot() is None
        if rows:
            table.append(found.slice(0, rows))
            assert table.current_snapshot().parent_snapshot_id is None
    assert lake.export(store).messages == 3
    assert lake.bodies() == sorted([*numbers(0, rows), *numbers(0, 3)])
    assert lake.export(store).messages == 0
