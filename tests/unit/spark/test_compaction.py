"""A compaction loses and duplicates no rows, wherever it is interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.ingest.rows import open_source
from logquarry.log import exported
from logquarry.spark.compaction import compact
from logquarry.spark.export import Merged, MergeTask, Source, _manifest, groups, merge, read_options
from logquarry.spark.jobs import run_tasks
from logquarry.spark.lakehouse.iceberg import Iceberg
from logquarry.spark.output import MANIFEST, SUCCESS, ExportCommit, OutputFolder
from logquarry.spark.parquet import Summary, write_task
from logquarry.spark.tasks import plan_tasks
from tests.helpers.command import run
from tests.helpers.lake import KINDS, Lake, numbers, put, run_here

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 20_000,
    "max_hash_slot_num": 1_000,
    "max_index_num": 2_000,
}


# ---------------------------------------------------------------------------------------- Parquet
def merge_here(tasks: Sequence[MergeTask]) -> list[tuple[Merged, ...]]:
    """Run all merges of a compaction in this process."""
    return [merge(task) for task in tasks]


def export(
    dest: Path, *stores: Path, partition_by: Sequence[str] = (), **options: str
) -> OutputFolder:
    """Export to Parquet in this process, as Spark's workers do."""
    folder = OutputFolder(dest)
    read = read_options([str(store) for store in stores], {"splitSize": "4096", **options})
    tasks = plan_tasks(read)
    commit = ExportCommit(folder)
    commit.begin()
    results = [write_task(task, folder, commit.staging, partition_by) for task in tasks]
    files = [file for result in results for file in result.files]
    summary = Summary.of(result.summary for result in results)
    manifest = _manifest(tasks, files, summary, read.names, partition_by)
    commit.commit([(file.staged, file.path) for file in files], manifest)
    return folder


def make_store(store: Path, first: int = 0, count: int = 300) -> Path:
    """Make messages of two topics; some property strings cannot be represented as a map."""
    with lq.MessageStore.open(store, config=lq.StoreConfig(**SMALL), mode="rw") as opened:
        for number in range(first, first + count):
            odd = "a\x01b\x02\x02a\x01c\x02" if number % 7 == 0 else None
            body = f"body {number}".encode()
            topic = "orders" if number % 3 else "paid"
            opened.put(lq.Message(topic=topic, body=body, queue_id=0, properties_string=odd))
    return store


def rows(dest: Path, *columns: str) -> list[dict[str, Any]]:
    """Return all rows by broker, in the order of the manifest's files."""
    document = json.loads((dest / MANIFEST).read_text("utf-8"))
    files = sorted(document["files"], key=lambda f: (f["broker"], f["first_offset"], f["path"]))
    tables = [pq.read_table(dest / f["path"], partitioning=None) for f in files]
    for table, file in zip(tables, files, strict=True):
        assert table.num_rows == file["rows"]
    found: list[dict[str, Any]] = pa.concat_tables(tables).select(list(columns)).to_pylist()
    return found


def odd_strings(dest: Path) -> list[tuple[Any, Any]]:
    """Return the exact properties in the metadata, by the rows that they belong to."""
    found = []
    for path in sorted(dest.rglob("part-*.parquet")):
        listed = exported.read_exact(pq.read_metadata(path).metadata)
        if listed is not None:
            table = pq.read_table(path, columns=["body"], partitioning=None)
            found += [
                (table.column("body")[row].as_py(), string)
                for row, string in zip(listed[0].tolist(), listed[1].to_pylist(), strict=True)
            ]
    return sorted(found)


PLACE = ("broker", "physical_offset", "topic", "body", "properties")


def test_small_files_become_one(tmp_path: Path) -> None:
    store, dest = make_store(tmp_path / "store"), tmp_path / "out"
    export(dest, store)
    before, odd = rows(dest, *PLACE), odd_strings(dest)
    names = {path.name for path in dest.glob("*.parquet")}
    assert len(names) > 3
    assert len(odd) == 300 // 7 + 1
    told = compact(dest)
    assert (told.files_before, told.files_after) == (len(names), 1)
    assert 0 < told.bytes_after < told.bytes_before
    (path,) = dest.glob("*.parquet")
    assert path.name not in names
    assert rows(dest, *PLACE) == before
    assert odd_strings(dest) == odd
    assert sorted(p.name for p in dest.iterdir()) == [SUCCESS, MANIFEST, path.name]
    assert compact(dest).files_before == 0


def test_what_was_compacted_is_imported_as_it_was(tmp_path: Path) -> None:
    store, dest = make_store(tmp_path / "store"), tmp_path / "out"
    export(dest, store)
    compact(dest)
    assert [file.rows for file in open_source(dest).files] == [300]
    run("import", dest, tmp_path / "again", "--keep-times")
    assert strings(store) == strings(tmp_path / "again")


def strings(store: Path) -> list[Any]:
    with lq.MessageStore.open(store, mode="r") as opened:
        return [(m.topic, m.queue_offset, m.body, m.properties_string) for m in opened.scan()]


def test_brokers_and_partitions_stay_apart(tmp_path: Path) -> None:
    first = make_store(tmp_path / "a" / "store")
    second = make_store(tmp_path / "b" / "store", 1_000)
    dest = tmp_path / "out"
    export(dest, first, second, partition_by=["topic"])
    before = sorted(rows(dest, *PLACE), key=str)
    told = compact(dest)
    assert told.files_after == 4
    assert sorted(rows(dest, *PLACE), key=str) == before
    assert sorted(path.name for path in dest.iterdir()) == [
        SUCCESS, MANIFEST, "topic=orders", "topic=paid",
    ]  # fmt: skip
    # A new export replaces the compacted files.
    export(dest, first, partition_by=["topic"])
    assert len(rows(dest, "body")) == 300
    assert not list(dest.rglob("*.to.*"))


def test_queues_stay_apart_and_in_order(tmp_path: Path) -> None:
    store, dest = make_store(tmp_path / "store"), tmp_path / "out"
    export(dest, store, topics="orders,paid", splitSize="2048")
    compact(dest)
    for path in dest.glob("*.parquet"):
        table = pq.read_table(path)
        offsets = table.column("physical_offset").to_pylist()
        assert offsets == sorted(offsets)


def test_files_of_the_size_stay(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store"))
    sizes = sorted(path.stat().st_size for path in dest.glob("*.parquet"))
    assert compact(dest, target_size=sizes[0]).files_before == 0
    before = rows(dest, *PLACE)
    told = compact(dest, target_size=4 * sizes[-1])
    assert 1 < told.files_after < told.files_before
    assert rows(dest, *PLACE) == before
    # Merged files can be merged again.
    assert compact(dest).files_after == 1
    assert rows(dest, *PLACE) == before
    (path,) = dest.glob("*.parquet")
    assert path.name.count(".to.") == 1


def test_groups() -> None:
    files = [Source(str(at), size, 1) for at, size in enumerate([3, 3, 3, 6, 1, 9, 2, 2, 1])]
    assert [[f.bytes for f in g] for g in groups(files, 10)] == [[3, 3, 3], [2, 2, 1]]
    assert list(groups(files, 1)) == []
    assert list(groups(files[:1], 100)) == []


# ----------------------------------------------------------------------------------------- tables
def filled(lake: Lake, store: Path, times: int = 3) -> None:
    for number in range(0, 3 * times, 3):
        put(store, *numbers(number, number + 3))
        lake.export(store, partition_by=["topic", "day"])


def test_a_table(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    filled(lake, store)
    told = compact(lake.dest)
    assert (told.files_before, told.files_after) == (3, 1)
    assert 0 < told.bytes_after < told.bytes_before
    assert lake.bodies() == numbers(0, 9)
    assert compact(lake.dest).files_before == 0
    put(store, *numbers(9, 11))
    assert lake.export(store, partition_by=["topic", "day"]).messages == 2
    assert lake.bodies() == numbers(0, 11)


def note(lake: Lake) -> None:
    """Add a column, as a user might."""
    if lake.kind == "delta":
        from deltalake import DeltaTable, Field
        from deltalake.schema import PrimitiveType

        DeltaTable(lake.dest).alter.add_columns([Field("note", PrimitiveType("string"))])
        return
    from pyiceberg.types import StringType

    with lake.iceberg() as table, table.update_schema() as change:
        change.add_column("note", StringType())
        change.rename_column("topic", "subject")
        change.delete_column("queue_offset")


def test_a_table_whose_columns_a_user_has_changed(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    filled(lake, store, 2)
    note(lake)
    assert compact(lake.dest).files_after == 1
    put(store, *numbers(6, 8))
    assert lake.export(store, partition_by=["topic", "day"]).messages == 2
    assert compact(lake.dest).files_after == 1
    assert lake.bodies() == numbers(0, 8)
    subject = "topic" if lake.kind == "delta" else "subject"
    assert lake.rows("note", subject) == [(None, "orders")] * 8


def test_a_table_that_a_user_has_parted_otherwise(tmp_path: Path) -> None:
    from pyiceberg.transforms import IdentityTransform

    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    filled(lake, store, 2)
    with lake.iceberg() as table, table.update_spec() as change:
        change.add_field("queue_id", IdentityTransform(), "q")
    put(store, *numbers(6, 8))
    files = lake.parquet_files()
    for act in (
        lambda: compact(lake.dest),
        lambda: lake.export(store, partition_by=["topic", "day"]),
    ):
        with pytest.raises(UsageError, match=r"partitions .*'day'.*, but has .*'q'.* now"):
            act()
    assert (lake.bodies(), lake.parquet_files()) == (numbers(0, 6), files)


def test_a_table_as_it_was_before(tmp_path: Path) -> None:
    from deltalake import DeltaTable

    lake = Lake("delta", tmp_path / "table")
    filled(lake, tmp_path / "store")
    compact(lake.dest)
    assert DeltaTable(lake.dest, version=1).to_pyarrow_table().num_rows == 3


def test_an_iceberg_table_as_it_was_before(tmp_path: Path) -> None:
    lake = Lake("iceberg", tmp_path / "table")
    filled(lake, tmp_path / "store")
    with lake.iceberg() as table:
        snapshot = table.current_snapshot()
    assert snapshot is not None
    compact(lake.dest)
    with lake.iceberg() as table:
        assert table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows == 9
        assert table.scan(row_filter="topic = 'orders'").to_arrow().num_rows == 9
        assert table.scan(row_filter="topic = 'other'").to_arrow().num_rows == 0
    assert table.scan(row_filter="physical_offset = 0").to_arrow().num_rows == 1


def test_a_table_while_an_export_is_at_work(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    filled(lake, store, 2)
    put(store, *numbers(6, 7))

    def meanwhile(tasks: Any, work: Any) -> Any:
        found = run_here(tasks, work)
        assert compact(lake.dest).files_before == 2
        return found

    lake.prepared(store, partition_by=["topic", "day"]).run_with(meanwhile)
    assert lake.bodies() == numbers(0, 7)


def test_an_export_while_a_table_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, store = Lake("iceberg", tmp_path / "table"), tmp_path / "store"
    filled(lake, store, 2)
    put(store, *numbers(6, 8))

    def meanwhile(_: object, __: str, tasks: Sequence[MergeTask], *___: Any, **____: Any) -> Any:
        lake.export(store, partition_by=["topic", "day"])
        return merge_here(tasks)

    monkeypatch.setattr("logquarry.spark.compaction.run_tasks", meanwhile)
    assert compact(lake.dest).files_before == 2
    assert lake.bodies() == numbers(0, 8)
    assert lake.export(store, partition_by=["topic", "day"]).messages == 0


def test_two_compactions_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake("iceberg", tmp_path / "table")
    filled(lake, tmp_path / "store", 2)

    def meanwhile(_: object, __: str, tasks: Sequence[MergeTask], *___: Any, **____: Any) -> Any:
        monkeypatch.setattr("logquarry.spark.compaction.run_tasks", run_tasks)
        assert compact(lake.dest).files_before == 2
        return merge_here(tasks)

    monkeypatch.setattr("logquarry.spark.compaction.run_tasks", meanwhile)
    before = lake.bodies()
    with pytest.raises(StoreUnavailable, match="changed the files meanwhile"):
        compact(lake.dest)
    assert lake.bodies() == before
    files = {str(p) for p in (tmp_path / "table").rglob("*merged*.parquet")}
    assert len(files) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ConnectionError])
def test_a_table_has_its_files_whatever_becomes_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    lake = Lake("iceberg", tmp_path / "table")
    filled(lake, tmp_path / "store", 2)
    own = Iceberg.replace

    def without_an_answer(*arguments: Any) -> None:
        own(*arguments)
        raise error

    monkeypatch.setattr(Iceberg, "replace", without_an_answer)
    with pytest.raises(error):
        compact(lake.dest)
    assert lake.bodies() == numbers(0, 6)
    monkeypatch.undo()
    assert compact(lake.dest).files_before == 0


@pytest.mark.parametrize("name", ["a%41b", "a#b", "a?b", "a b", "a:b;c", "ü"])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_names_of_folders(tmp_path: Path, kind: str, name: str) -> None:
    lake = Lake(kind, tmp_path / name / "table")
    if "%" in name or (kind == "iceberg" and set("#?") & set(name)):
        put(tmp_path / "store", *numbers(0, 3))
        with pytest.raises(UsageError, match="mean other characters"):
            lake.export(tmp_path / "store")
        # No file is written beside the folder.
        assert [path.name for path in tmp_path.iterdir()] == ["store"]
        return
    for first in (0, 3):
        put(tmp_path / "store", *numbers(first, first + 3))
        lake.export(tmp_path / "store")
    assert compact(lake.dest).files_after == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "store"])


def test_the_command(lake: Lake, tmp_path: Path) -> None:
    filled(lake, tmp_path / "store", 2)
    assert "merged 2 files" in run("compact", lake.dest).stderr
    assert "takes a size" in run("compact", lake.dest, "--target-size", "x", code=2).stderr
    run("compact", tmp_path / "nothing", code=3)
    assert lake.bodies() == numbers(0, 6)


def test_the_command_on_parquet(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    assert "into 1 file" in run("compact", dest).stderr
