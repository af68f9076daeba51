"""Exports to Delta and Iceberg tables contain each message once, also after crashes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, StoreNotFound, StoreUnavailable, UsageError
from logquarry.spark.lakehouse import write
from logquarry.spark.lakehouse.delta import Delta
from logquarry.spark.lakehouse.iceberg import Iceberg
from logquarry.spark.options import ReadOptions
from logquarry.spark.output import OutputFolder
from tests.helpers.hostile_store import EVIL_TOPIC, FIRST_TIME, harm, make_small_store
from tests.helpers.lake import KINDS, Lake, run_here

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 14,
    "mapped_file_size_consume_queue": 2_000,
}


@pytest.fixture(params=KINDS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return Lake(request.param, tmp_path / "table")


def put(store: Path, *bodies: bytes, topic: str = "orders") -> None:
    with lq.MessageStore.open(store, config=lq.StoreConfig(**SMALL), mode="rw") as opened:
        for body in bodies:
            assert opened.put(lq.Message(topic=topic, body=body, queue_id=0)).ok


def numbers(first: int, stop: int) -> list[bytes]:
    return [f"body {number}".encode() for number in range(first, stop)]


def bodies(lake: Lake) -> list[bytes]:
    return [body for (body,) in lake.rows("body")]


def stored(*stores: Path) -> list[tuple[Any, ...]]:
    """Return (offset, topic, queue, queue offset, body) of all messages, in order by store."""
    found = []
    for store in stores:
        with lq.MessageStore.open(store, mode="r") as opened:
            found += [
                (m.physical_offset, m.topic, m.queue_id, m.queue_offset, m.body)
                for m in opened.scan()
            ]
    return found


SLOW = pytest.mark.slow
PLACE = ("physical_offset", "topic", "queue_id", "queue_offset", "body")


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
    assert bodies(lake) == numbers(0, 50)
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
    assert bodies(lake) == [b"a"]


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
    assert bodies(lake) == numbers(0, 25)


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


# ---------------------------------------------------------------------------------------- refusals
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
    assert bodies(lake) == [b"1"]
    moved = tmp_path / "elsewhere" / "store"
    moved.parent.mkdir()
    one.rename(moved)
    put(moved, b"3")
    with pytest.raises(UsageError, match="--moved"):
        lake.export(moved)
    lake.export(moved, moved=True)
    lake.export(moved)
    assert bodies(lake) == [b"1", b"3"]


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


def test_another_export_at_work(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", b"a")
    lake.dest.mkdir()
    lock = OutputFolder(lake.dest).lock()
    assert lock is not None
    with pytest.raises(StoreUnavailable, match="another export is running"):
        lake.export(tmp_path / "store")
    import os

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
    assert bodies(lake) == numbers(0, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_that_is_overtaken_in_the_middle(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second export commits between the last check and the commit."""
    monkeypatch.setattr(OutputFolder, "lock", lambda self: None)
    lake, store = Lake(kind, tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 5))
    lake.export(store)
    put(store, *numbers(5, 9))
    place: Any = (
        ("logquarry.spark.lakehouse.delta._add_action")
        if kind == "delta"
        else ("logquarry.spark.lakehouse.iceberg._data_file")
    )
    module, _, name = place.rpartition(".")
    import importlib

    own = importlib.import_module(module)
    plain = getattr(own, name)

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(own, name, plain)
        lake.export(store)
        return plain(*arguments)

    monkeypatch.setattr(own, name, late)
    with pytest.raises(StoreUnavailable, match="another export has committed"):
        lake.export(store)
    assert bodies(lake) == numbers(0, 9)


def test_somebody_else_changes_the_table_in_the_middle_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change that is no export: the commit succeeds after it."""
    from pyiceberg.catalog import load_catalog

    from logquarry.spark.lakehouse import iceberg

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    put(store, *numbers(3, 6))
    plain, calls = iceberg._data_file, []

    def late(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            catalog = load_catalog("logquarry", type="sql", uri=f"sqlite:///{lake.dest}/catalog.db")
            catalog.load_table("logquarry.messages").delete("physical_offset = 0")
            catalog.close()
        return plain(*arguments)

    monkeypatch.setattr(iceberg, "_data_file", late)
    lake.export(store)
    assert (len(calls), bodies(lake)) == (2, numbers(1, 6))


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


# ----------------------------------------------------------------------------------------- crashes
class Power(BaseException):
    """The process is gone: no cleanup runs."""


STEPS: list[tuple[type[Any], str]] = [
    (OutputFolder, "create"),
    (OutputFolder, "make"),
    (OutputFolder, "move"),
    (OutputFolder, "remove"),
    (OutputFolder, "open"),
    (Delta, "create"),
    (Delta, "append"),
    (Iceberg, "create"),
    (Iceberg, "append"),
]


def counted(
    monkeypatch: pytest.MonkeyPatch, crash_at: int | None, *, behind: bool
) -> Callable[[], int]:
    """Count the calls that change something; crash before or after one of them."""
    calls = 0

    def wrapped(plain: Any) -> Any:
        def call(*arguments: Any, **names: Any) -> Any:
            nonlocal calls
            calls += 1
            if crash_at is not None and calls > crash_at:
                raise Power
            if calls == crash_at and not behind:
                raise Power
            found = plain(*arguments, **names)
            if calls == crash_at:
                raise Power
            return found

        return call

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    return lambda: calls


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("kind", "stride"), [("delta", 1), ("iceberg", 5), pytest.param("iceberg", 1, marks=SLOW)]
)
def test_a_crash_at_each_step(
    kind: str, stride: int, behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    good, bad = b'{"n": 1}', b"no JSON"
    put(store, good, bad, good, good)
    more: dict[str, Any] = {"decode": decode("json", "n bigint")}
    options = {"maxOffsetsPerTrigger": "2", "splitSize": "1k"}
    with monkeypatch.context() as patch:
        total = counted(patch, None, behind=behind)
        Lake(kind, tmp_path / "whole").export(store, options, **more)
        steps = total()
    expected = Lake(kind, tmp_path / "whole").rows("physical_offset")
    dead = Lake(kind, tmp_path / "whole").rows("physical_offset", "reason", dead=True)
    assert (len(expected), len(dead), steps > 10) == (3, 1, True)
    for step in range(1, steps + 1, stride):
        lake = Lake(kind, tmp_path / f"crash-{step}")
        with monkeypatch.context() as patch:
            counted(patch, step, behind=behind)
            with pytest.raises(Power):
                lake.export(store, options, **more)
        lake.export(store, {"splitSize": "1k"}, **more)
        assert lake.rows("physical_offset") == expected, step
        assert lake.rows("physical_offset", "reason", dead=True) == dead, step
        assert lake.known_files() == lake.parquet_files(), step
        assert not list((lake.dest / write.CONTROL).iterdir()), step


def decode(*arguments: str) -> Any:
    from logquarry.spark.decode import parse_decode_options

    return parse_decode_options(*arguments)


# ----------------------------------------------------------------------------------------- details
def test_going_back_to_an_earlier_snapshot_goes_back_with_the_marks(tmp_path: Path) -> None:
    from pyiceberg.catalog import load_catalog

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    put(store, *numbers(0, 3))
    lake.export(store)
    put(store, *numbers(3, 6))
    catalog = load_catalog("logquarry", type="sql", uri=f"sqlite:///{lake.dest}/catalog.db")
    table = catalog.load_table("logquarry.messages")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    lake.export(store)
    table.refresh()
    table.manage_snapshots().rollback_to_snapshot(snapshot.snapshot_id).commit()
    catalog.close()
    assert bodies(lake) == numbers(0, 3)
    lake.export(store)
    assert bodies(lake) == numbers(0, 6)


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
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("logquarry", type="sql", uri=f"sqlite:///{lake.dest}/catalog.db")
        catalog.load_table("logquarry.messages").delete(gone)
        catalog.close()
    put(store, *numbers(6, 8))
    assert lake.export(store).messages == 2
    assert bodies(lake) == numbers(1, 8)


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
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("logquarry", type="sql", uri=f"sqlite:///{lake.dest}/catalog.db")
    table = catalog.load_table("logquarry.messages")
    assert len(list(table.scan(f"physical_offset = {offset}").plan_files())) == 1
    assert len(list(table.scan("topic = 'aaa'").plan_files())) == 0
    assert table.scan(f"physical_offset = {offset}").to_arrow().num_rows == 1
    catalog.close()


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


def test_the_table_tells_what_it_was_begun_with(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    put(tmp_path / "store", b"a")
    Lake("delta", tmp_path / "table").export(tmp_path / "store", {"topics": "orders"})
    told = json.loads(DeltaTable(tmp_path / "table").metadata().configuration["logquarry.export"])
    assert told["filters"] == {"topics": ["orders"]}
    history = DeltaTable(tmp_path / "table").history()[0]
    assert json.loads(history["logquarry.export"])["to"].keys() == {
        "broker:store",
        f"store:{tmp_path / 'store'}",
    }


def test_an_interrupt_leaves_the_table_as_it_was(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", *numbers(0, 4))
    lake.export(tmp_path / "store")
    put(tmp_path / "store", *numbers(4, 6))

    def interrupted(tasks: Any, work: Any) -> Any:
        run_here(tasks, work)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lake.prepared(tmp_path / "store").run_with(interrupted)
    assert lake.known_files() == lake.parquet_files()
    assert bodies(lake) == numbers(0, 4)


def test_a_note_that_a_power_cut_emptied(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", b"a")
    lake.export(tmp_path / "store")
    note = lake.dest / write.CONTROL / "0123456789ab.json"
    note.touch()
    put(tmp_path / "store", b"b")
    lake.export(tmp_path / "store")
    assert (bodies(lake), note.exists()) == ([b"a", b"b"], False)


def test_files_are_on_the_disk_before_a_table_names_them(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    plain = OutputFolder.sync

    def sync(self: OutputFolder, path: str) -> None:
        plain(self, path)
        synced.append(path)

    monkeypatch.setattr(OutputFolder, "sync", sync)
    put(tmp_path / "store", b"a")
    lake.export(tmp_path / "store")
    assert {Path(path).name for path in lake.known_files()} == {Path(p).name for p in synced}


def test_follow(lake: Lake, tmp_path: Path) -> None:
    """Export what is there, then follow until the caller stops."""
    store = tmp_path / "store"
    put(store, *numbers(0, 7))
    seen: list[int] = []

    def on_commit(done: Any) -> None:
        seen.append(done.summary.total.messages)
        if len(seen) == 2:
            put(store, *numbers(7, 9))
        if seen[-1] == 9:
            raise KeyboardInterrupt

    export = lake.prepared(store, {"maxOffsetsPerTrigger": "4"}, follow=True, interval=0.01)
    with pytest.raises(KeyboardInterrupt):
        export.run_with(run_here, on_commit=on_commit)
    assert seen == [4, 7, 9]
    assert bodies(lake) == numbers(0, 9)
    assert replace(export.options, follow=False).interval == 0.01
