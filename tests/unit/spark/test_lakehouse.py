"""Exports to Delta and Iceberg tables: each message once, with its columns and statistics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, UsageError
from logquarry.spark.lakehouse.advance import TableSummary
from logquarry.spark.lakehouse.export import delta_export
from logquarry.spark.options import ReadOptions
from tests.helpers.hostile_store import EVIL_TOPIC, FIRST_TIME, harm, make_small_store
from tests.helpers.lake import Lake, numbers, put, run_here

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


PLACE = ("physical_offset", "topic", "queue_id", "queue_offset", "body")


def stored(store: Path) -> list[tuple[Any, ...]]:
    """The columns of PLACE of all messages, in order."""
    with lq.MessageStore.open(store) as opened:
        return [tuple(getattr(message, name) for name in PLACE) for message in opened.scan()]


# ----------------------------------------------------------------------------------------- batch
def test_a_rerun_adds_what_is_new(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, *numbers(0, 30))
    first = lake.export(store)
    assert (first.messages, first.commits) == (30, 1)
    before = lake.known_files()
    again = lake.export(store)
    assert (again.messages, again.files, again.commits) == (0, 0, 0)
    put(store, *numbers(30, 50))
    later = lake.export(store)
    assert later.messages == 20
    assert lake.bodies() == numbers(0, 50)
    assert before < lake.known_files() == lake.parquet_files()
    assert lake.rows(*PLACE) == stored(store)


def test_all_columns_and_hostile_names(lake: Lake, tmp_path: Path) -> None:
    store = make_small_store(tmp_path / "store")
    lake.export(store, {"splitSize": "4k"}, partition_by=["topic", "day"])
    assert lake.rows(*PLACE) == stored(store)
    found = lake.rows("broker", "topic", "store_timestamp", "properties", "tags")
    assert {row[0] for row in found} == {"store"}
    assert {row[1] for row in found} == {"orders", EVIL_TOPIC}
    assert found[0][2].timestamp() == FIRST_TIME / 1000
    assert dict(found[1][3])["city"] == "Zürich"
    assert lake.known_files() == lake.parquet_files()
    # Readers skip files by their bounds: one topic is in half of them.
    if lake.kind == "delta":
        from deltalake import DeltaTable

        table = DeltaTable(lake.dest)
        some = table.file_uris(file_pruning_predicate=[("topic", "=", "orders")])
        assert 0 < len(some) < len(table.file_uris())
        days = set(table.to_pyarrow_table().column("day").to_pylist())
        assert [str(day) for day in days] == ["2023-11-14"]


def test_nothing_to_export(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    assert lake.export(tmp_path / "store").messages == 0
    assert lake.rows() == []
    put(tmp_path / "store", b"a")
    lake.export(tmp_path / "store")
    assert lake.bodies() == [b"a"]


def test_several_brokers_and_one_that_comes_later(lake: Lake, tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "store", tmp_path / "two" / "store"
    put(one, *numbers(0, 10))
    glob = tmp_path / "*" / "store"
    lake.export(glob)
    put(two, *numbers(10, 20))
    put(one, *numbers(20, 30))
    lake.export(glob)
    lake.export(glob)
    found = lake.rows("broker", "body")
    assert [row[1] for row in found if row[0] == "one"] == [*numbers(0, 10), *numbers(20, 30)]
    assert [row[1] for row in found if row[0] == "two"] == numbers(10, 20)


def test_commits_of_bounded_size(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", *numbers(0, 25))
    done = lake.export(tmp_path / "store", {"maxOffsetsPerTrigger": "10"})
    assert (done.commits, done.messages) == (3, 25)
    assert lake.bodies() == numbers(0, 25)


def test_filters_and_columns(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, *numbers(0, 5))
    put(store, b"rare", topic="rare")
    options = {"topics": "rare", "columns": "topic,body"}
    lake.export(store, options)
    put(store, *numbers(5, 9))
    assert lake.export(store, options).commits == 1
    put(store, b"more", topic="rare")
    lake.export(store, options)
    assert sorted(lake.table().to_pydict()["body"]) == [b"more", b"rare"]
    assert lake.table().column_names == ["topic", "body"]


def test_the_columns_of_kafka(lake: Lake, tmp_path: Path) -> None:
    store = make_small_store(tmp_path / "store")
    options = {"schema": "kafka", "includeHeaders": "true"}
    lake.export(store, options, partition_by=["topic", "day"])
    assert lake.export(store, options, partition_by=["topic", "day"]).messages == 0
    table = lake.table()
    names = [
        "key",
        "value",
        "topic",
        "partition",
        "offset",
        "timestamp",
        "timestampType",
        "headers",
    ]
    assert [name for name in table.column_names if name != "day"] == names
    found = sorted((r["topic"], r["partition"], r["offset"], r["value"]) for r in table.to_pylist())
    assert found == sorted((m[1], m[2], m[3], m[4]) for m in stored(store))
    first = next(row for row in table.to_pylist() if row["value"].startswith(b"body 1 "))
    assert first["key"] == b"key1"
    assert {"key": "city", "value": "Zürich".encode()} in first["headers"]
    with pytest.raises(UsageError, match="the table has schema"):
        lake.export(store, partition_by=["topic", "day"])
    other = Lake(lake.kind, tmp_path / "other")
    with pytest.raises(UsageError, match="has a column value already"):
        other.export(store, options, decode="json")
    with pytest.raises(UsageError, match="export the column queue_id too"):
        other.export(store, options, partition_by=["queue_id"])


# ------------------------------------------------------------------------------------------ damage
def test_damage_adds_nothing(lake: Lake, tmp_path: Path) -> None:
    store = harm(make_small_store(tmp_path / "store"))
    with pytest.raises(CorruptFrame, match="bad_body_crc"):
        lake.export(store, {"splitSize": "4k"})
    assert lake.parquet_files() == set()
    done = lake.export(store, {"splitSize": "4k", "onDamage": "skip"})
    assert done.messages == 39
    assert [span.kind for span in done.summary.damage] == ["bad_body_crc"]
    assert lake.export(store, {"onDamage": "skip"}).messages == 0


def test_stop_at_damage_and_go_on_when_it_is_repaired(lake: Lake, tmp_path: Path) -> None:
    store = make_small_store(tmp_path / "store")
    sound = (store / "commitlog" / f"{0:020d}").read_bytes()
    whole = stored(store)
    harm(store)
    options = ReadOptions(paths=(), on_damage="stop", split_size=2_000)
    for expected in (5, 0):
        done = lake.export(store, options)
        assert done.messages == expected
        assert [span.kind for span in done.summary.damage] == ["bad_body_crc"]
    assert lake.rows(*PLACE) == whole[:5]
    assert lake.known_files() == lake.parquet_files()
    (store / "commitlog" / f"{0:020d}").write_bytes(sound)
    assert lake.export(store, options).messages == 35
    assert lake.rows(*PLACE) == whole


# ----------------------------------------------------------------------------------------- details


def test_statistics_tell_where_to_look(lake: Lake, tmp_path: Path) -> None:
    store = make_small_store(tmp_path / "store")
    lake.export(store, {"splitSize": "4k"})
    assert len(lake.known_files()) > 1
    offset = stored(store)[-1][0]
    if lake.kind == "delta":
        from deltalake import DeltaTable

        actions = DeltaTable(lake.dest).get_add_actions(flatten=True)
        found = [dict(zip(actions.column_names, row, strict=True)) for row in _rows(actions)]
        assert sum(row["num_records"] for row in found) == 40
        some = [
            row
            for row in found
            if row["min.physical_offset"] <= offset <= row["max.physical_offset"]
        ]
        assert len(some) == 1
        assert {row["min.topic"] for row in found} <= {"orders", EVIL_TOPIC}
        return
    with lake.iceberg() as table:
        assert len(list(table.scan(f"physical_offset = {offset}").plan_files())) == 1
        assert len(list(table.scan("topic = 'aaa'").plan_files())) == 0
        assert table.scan(f"physical_offset = {offset}").to_arrow().num_rows == 1


def _rows(actions: Any) -> list[list[Any]]:
    import pyarrow as pa

    columns = [pa.chunked_array(actions.column(name)).to_pylist() for name in actions.column_names]
    return [list(row) for row in zip(*columns, strict=True)]


def test_times_beyond_all_calendars(lake: Lake, tmp_path: Path) -> None:
    from logquarry.testing.builder import StoreBuilder

    with StoreBuilder(tmp_path / "store") as builder:
        for number, time in enumerate([0, 1_700_000_000_000, 9_000_000_000_000_000 // 1000 * 1000]):
            builder.put("a", f"{number}".encode(), store_timestamp=time)
    lake.export(tmp_path / "store", partition_by=["day"])
    assert lake.table().select(["body"]).num_rows == 3


@pytest.mark.parametrize("part", [[], ["topic"], ["broker", "topic", "queue_id", "day"]])
@pytest.mark.parametrize("schema", ["native", "kafka"])
def test_a_filter_on_any_column_finds_the_rows(
    tmp_path: Path, schema: str, part: list[str]
) -> None:
    """deltalake hid the rows of a file that had statistics of some columns only."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from deltalake import DeltaTable

    from logquarry.testing.builder import StoreBuilder

    put(tmp_path / "store", b"1", b"2", tags="paid", keys="k")
    put(tmp_path / "store", b"3")
    put(tmp_path / "untagged", b"4")
    with StoreBuilder(tmp_path / "beyond") as builder:
        # A time that no bound in Delta's JSON can have.
        for number, time in enumerate([0, 9_000_000_000_000_000]):
            builder.put("orders", b"%d" % number, store_timestamp=time)
    places = [tmp_path / name for name in ("store", "untagged", "beyond")]
    columns = part if schema == "native" else part[1:2]
    Lake("delta", tmp_path / "lake").export(places, {"schema": schema}, partition_by=columns)
    table = DeltaTable(tmp_path / "lake")
    whole, files = table.to_pyarrow_table(), table.to_pyarrow_dataset()
    assert whole.num_rows == 6
    for name in whole.column_names:
        if pa.types.is_nested(whole[name].type):
            continue
        for value in whole[name]:
            wanted = pc.field(name) == value if value.is_valid else pc.field(name).is_null()
            assert files.filter(wanted).count_rows() == whole.filter(wanted).num_rows


def test_a_table_without_the_names_of_its_indexed_columns(tmp_path: Path) -> None:
    """Earlier versions did not name these columns in the table's properties."""
    from deltalake import DeltaTable

    put(tmp_path / "store", b"1", tags="paid")
    lake = Lake("delta", tmp_path / "lake")
    lake.export(tmp_path / "store")
    more = {"delta.dataSkippingStatsColumns": ""}
    DeltaTable(tmp_path / "lake").alter.set_table_properties(more, raise_if_not_exists=False)
    put(tmp_path / "store", b"2")
    lake.export(tmp_path / "store")
    actions = DeltaTable(tmp_path / "lake").get_add_actions(flatten=True)
    rows = {tuple(row) for row in _rows(actions.select(["num_records"]))}
    assert rows == {(1,)}
    added = [
        json.loads(line)
        for file in sorted((lake.dest / "_delta_log").glob("*.json"))
        for line in file.read_text().splitlines()
        if '"add"' in line
    ]
    assert [sorted(json.loads(one["add"]["stats"])) for one in added] == [
        ["maxValues", "minValues", "nullCount", "numRecords"],
        ["numRecords"],
    ]


def test_the_table_tells_what_it_was_begun_with(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    put(tmp_path / "store", b"a")
    Lake("delta", tmp_path / "table").export(tmp_path / "store", {"topics": "orders"})
    told = json.loads(DeltaTable(tmp_path / "table").metadata().configuration["logquarry.export"])
    assert told["filters"] == {"topics": ["orders"]}
    history = DeltaTable(tmp_path / "table").history()[0]
    assert json.loads(history["logquarry.export"])["to"].keys() == {
        "broker:store",
        "frame:store",
        "frame_check_sum:store",
        f"store:{tmp_path / 'store'}",
    }


def test_follow(lake: Lake, tmp_path: Path) -> None:
    """Export what is there, then follow until the caller stops."""
    store = tmp_path / "store"
    put(store, *numbers(0, 7))
    seen: list[TableSummary] = []

    def on_commit(done: TableSummary) -> None:
        seen.append(done)
        if len(seen) == 2:
            put(store, *numbers(7, 9))
        if done.messages == 9:
            raise KeyboardInterrupt

    export = lake.prepared(store, {"maxOffsetsPerTrigger": "4"}, follow=True, interval=0.01)
    with pytest.raises(KeyboardInterrupt):
        export.run_with(run_here, on_commit=on_commit)
    assert [(done.messages, done.commits) for done in seen] == [(4, 1), (7, 2), (9, 3)]
    assert lake.bodies() == numbers(0, 9)
    assert replace(export.options, follow=False).interval == 0.01


def test_intervals_that_a_process_cannot_wait(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="interval takes seconds, not nan"):
        delta_export([tmp_path], tmp_path / "lake", follow=True, interval=float("nan"))
    put(tmp_path / "store", b"1")
    export = delta_export([tmp_path / "store"], tmp_path / "lake", follow=True, interval=1e300)
    assert export.options.interval < 2**32
