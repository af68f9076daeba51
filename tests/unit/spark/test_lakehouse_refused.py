"""Exports that are refused: they leave table and folder as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.spark.compaction import compact
from logquarry.spark.decode import parse_decode_options
from logquarry.spark.lakehouse.delta import Delta
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


@pytest.mark.parametrize("below", [".", "lake"])
def test_the_destination_is_a_file(lake: Lake, tmp_path: Path, below: str) -> None:
    put(tmp_path / "store", b"1")
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(UsageError, match=f"^{file}: is a file: give a folder"):
        Lake(lake.kind, file / below).export(tmp_path / "store")
    assert file.read_text() == "text"


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
    with pytest.raises(UsageError, match=r"onDamage: .* pass options=\{'onDamage': \.\.\.\}"):
        lake.export(store, onDamage="skip")
    assert sorted(p.name for p in lake.dest.iterdir()) == ["letter.txt"]


def test_a_table_of_somebody_else(tmp_path: Path) -> None:
    import pyarrow as pa
    from deltalake import write_deltalake

    put(tmp_path / "store", b"a")
    write_deltalake(str(tmp_path / "table"), pa.table({"n": [1]}))
    with pytest.raises(UsageError, match="no export created"):
        Lake("delta", tmp_path / "table").export(tmp_path / "store")


@pytest.mark.parametrize(("made", "now"), [((), ["topic"]), (("topic",), ["queue_id"])])
def test_a_delta_table_with_other_partitions(
    made: tuple[str, ...], now: list[str], tmp_path: Path
) -> None:
    # The files of the export would have no value for the new partition columns.
    from deltalake import DeltaTable, write_deltalake

    lake, store = Lake("delta", tmp_path / "table"), tmp_path / "store"
    put(store, b"a")
    lake.export(store, partition_by=made)
    rows = lake.table()
    write_deltalake(
        DeltaTable(lake.dest), rows, mode="overwrite", schema_mode="overwrite", partition_by=now
    )
    put(store, b"b")
    with pytest.raises(UsageError, match=r"was created with partitions \["):
        lake.export(store, partition_by=made)
    assert lake.table().equals(rows)


def test_an_iceberg_table_with_another_transform(tmp_path: Path) -> None:
    # Readers would skip the new files: the days in their partitions would count as months.
    from pyiceberg.transforms import MonthTransform

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, b"a")
    lake.export(store, partition_by=["day"])
    with lake.iceberg() as table:
        with table.update_spec() as spec:
            spec.remove_field("day")
        with table.update_spec() as spec:
            spec.add_field("store_timestamp", MonthTransform(), "day")
    put(store, b"b")
    with pytest.raises(UsageError, match=r"was created with partitions.*month\(day\)"):
        lake.export(store, partition_by=["day"])
    assert lake.bodies() == [b"a"]


def test_a_delta_table_with_properties_that_an_export_cannot_keep(tmp_path: Path) -> None:
    """A CHECK constraint; and a property with which the export would add all messages again."""
    from deltalake import DeltaTable

    lake, store = Lake("delta", tmp_path / "table"), tmp_path / "store"
    put(store, b"a")
    lake.export(store)
    DeltaTable(lake.dest).alter.add_constraint({"small": "size < 1000"})
    with pytest.raises(UsageError, match=r"constraint small \(size < 1000\): drop the constraint"):
        lake.export(store)
    DeltaTable(lake.dest).alter.drop_constraint("small")
    name = "delta.setTransactionRetentionDuration"
    DeltaTable(lake.dest).alter.set_table_properties({name: "interval 0 seconds"})
    with pytest.raises(UsageError, match=f"{name}.*remove the property"):
        lake.export(store)
    assert lake.bodies() == [b"a"]


def no_tasks(*_: Any) -> Any:
    raise AssertionError("a task was started")


def test_a_feature_that_the_package_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export refuses the table before it starts a task. If another program adds the feature
    after that, the package refuses the commit before it writes, so the commit has failed.
    """
    from deltalake import DeltaTable, TableFeatures

    lake, store = Lake("delta", tmp_path / "table"), tmp_path / "store"
    for body in (b"a", b"b"):
        put(store, body)
        lake.export(store)
    features = DeltaTable(lake.dest).alter
    features.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)
    put(store, b"c")
    with pytest.raises(UsageError, match=r"these features: RowTracking: drop the features, or"):
        lake.prepared(store).run_with(no_tasks)
    with monkeypatch.context() as later:
        later.setattr(Delta, "_require_features", lambda *_: None)
        with pytest.raises(UsageError, match=r"these features: RowTracking: drop the features"):
            lake.export(store)
    assert len(list(lake.dest.rglob("*.parquet"))) == 2
    with pytest.raises(UsageError, match="these features: RowTracking: drop the features"):
        compact(lake.dest)
    assert lake.bodies() == [b"a", b"b"]


def test_features_that_the_package_can_write(tmp_path: Path) -> None:
    from deltalake import DeltaTable, TableFeatures

    lake, store = Lake("delta", tmp_path / "table"), tmp_path / "store"
    for feature in (TableFeatures.ChangeDataFeed, TableFeatures.DeletionVectors):
        put(store, b"a")
        lake.export(store)
        alter = DeltaTable(lake.dest).alter
        alter.add_feature(feature, allow_protocol_versions_increase=True)
    put(store, b"a")
    assert lake.export(store).messages == 1
    assert DeltaTable(lake.dest).get_add_actions().num_rows == 3


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


@pytest.mark.parametrize("lock", ["EXCLUSIVE", "IMMEDIATE"])
def test_a_locked_catalog(lock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lock EXCLUSIVE, the export cannot read; with IMMEDIATE, it cannot commit."""
    import sqlite3

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, b"a")
    lake.export(store)
    put(store, b"b")
    connect = sqlite3.connect

    def impatient(path: str, **named: Any) -> Any:
        return connect(path, **{**named, "timeout": 0})

    monkeypatch.setattr(sqlite3, "connect", impatient)
    other = connect(lake.dest / "catalog.db", isolation_level=None)
    other.execute(f"BEGIN {lock}")
    words = r"database is locked by another process: run again when that process has ended$"
    with pytest.raises(StoreUnavailable, match=words) as caught:
        lake.export(store)
    assert str(lake.dest) in str(caught.value)
    other.close()
    lake.export(store)
    assert lake.bodies() == [b"a", b"b"]


@pytest.mark.parametrize(("kind", "is_accepted"), [("string", False), ("int64", True)])
def test_another_type_of_a_column(tmp_path: Path, kind: str, is_accepted: bool) -> None:
    """Readers of the table could not read the files of the export."""
    from deltalake import write_deltalake

    lake, store = Lake("delta", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    found = lake.table()
    at = found.schema.get_field_index("queue_id")
    found = found.set_column(at, "queue_id", found["queue_id"].cast(kind))
    write_deltalake(str(lake.dest), found, mode="overwrite", schema_mode="overwrite")
    put(store, *numbers(3, 5))
    if is_accepted:
        lake.export(store)
        assert lake.rows("queue_id") == [(0,)] * 5
    else:
        before = lake.parquet_files()
        with pytest.raises(UsageError, match="column queue_id has the type string now"):
            lake.export(store)
        assert lake.parquet_files() == before


def test_a_replaced_delta_table(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    lake, store = Lake("delta", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    DeltaTable.create(lake.dest, schema=DeltaTable(lake.dest).schema(), mode="overwrite")
    with pytest.raises(UsageError, match="no export created this Delta table"):
        lake.export(store)


@pytest.mark.parametrize("schema", [None, "id int"])
def test_a_dropped_column_of_decoded_bodies(tmp_path: Path, schema: str | None) -> None:
    from pyiceberg.types import StringType

    store, lake = tmp_path / "store", Lake("iceberg", tmp_path / "lake")
    decode = parse_decode_options("json", schema)
    put(store, b'{"id": 1}')
    lake.export(store, decode=decode)
    with lake.iceberg() as table, table.update_schema(allow_incompatible_changes=True) as change:
        change.delete_column("value")
    put(store, b'{"id": 2}')
    if schema is None:
        with pytest.raises(UsageError, match=r"no struct column value now.*restore the column"):
            lake.export(store, decode=decode)
    else:
        lake.export(store, decode=decode)
        assert lake.bodies() == [b'{"id": 1}', b'{"id": 2}']
    # A column of this name with another type would make the table unreadable.
    with lake.iceberg() as table, table.update_schema() as change:
        change.add_column("value", StringType())
    put(store, b'{"id": 3}')
    with pytest.raises(UsageError, match=r"value.*restore the"):
        lake.export(store, decode=decode)
    with lake.iceberg() as table:
        assert len(table.snapshots()) == (1 if schema is None else 2)
