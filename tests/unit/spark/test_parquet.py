"""The files that one task of an export writes. Needs no Spark."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logquarry.errors import CorruptFrame, StoreUnavailable, UnsupportedStore, UsageError
from logquarry.log import schema
from logquarry.log.splits import LogExtent, LogSplit
from logquarry.read.selection import Part, PlaceList, QueueSlice, ReadPlan, Selection
from logquarry.spark import parquet, tasks
from logquarry.spark.options import ReadOptions
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import TaskResult, check_partition_columns, file_stem, write_task
from logquarry.spark.tasks import ReadTask, plan_tasks, read_batches
from tests.helpers.store_maker import FIRST_TIME, StoreMaker

DAY_MS = 86_400_000


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Make messages of three topics on two days, alternating."""
    maker = StoreMaker()
    for n in range(60):
        time = FIRST_TIME + n * DAY_MS // 40
        maker.put(["orders", "%RETRY%g", "a=b"][n % 3], body=b"text %d" % n, time=time, tags="t")
    return maker.write(tmp_path / "store")


def written(
    tmp_path: Path, store: Path, partition_by: Sequence[str] = (), **options: Any
) -> tuple[OutputFolder, TaskResult]:
    folder = OutputFolder(tmp_path / "out")
    folder.make("staging")
    (task,) = plan_tasks(ReadOptions(paths=(str(store),), **options))
    return folder, write_task(task, folder, "staging", partition_by)


def rows_of(folder: OutputFolder, result: TaskResult) -> list[dict[str, Any]]:
    root = Path(folder.location)
    return [
        row
        for file in result.files
        for row in pq.ParquetFile(root / file.staged).read().to_pylist()
    ]


def all_rows(store: Path) -> list[dict[str, Any]]:
    (task,) = plan_tasks(ReadOptions(paths=(str(store),)))
    return [row for batch in read_batches(task) for row in batch.to_pylist()]


def test_one_file(tmp_path: Path, store: Path) -> None:
    folder, result = written(tmp_path, store)
    (file,) = result.files
    assert file.path == "part-store.00000000000000000000.parquet"
    assert file.staged.startswith("staging/")
    assert file.rows == 60
    assert (file.first_offset, file.broker) == (0, "store")
    assert file.bytes == (Path(folder.location) / file.staged).stat().st_size
    assert rows_of(folder, result) == all_rows(store)
    assert result.summary.total.messages == 60
    assert result.summary.topics["orders"].messages == 20


def test_the_file_is_zstd_and_has_our_columns(tmp_path: Path, store: Path) -> None:
    folder, result = written(tmp_path, store)
    file = pq.ParquetFile(Path(folder.location) / result.files[0].staged)
    assert file.schema_arrow.equals(schema.arrow_schema())
    group = file.metadata.row_group(0)
    codecs = {group.column(i).compression for i in range(group.num_columns)}
    assert codecs == {"ZSTD"}


def test_row_groups_bound_memory(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 4_000)
    folder, result = written(tmp_path, store, batch_bytes=1_000)
    file = pq.ParquetFile(Path(folder.location) / result.files[0].staged)
    assert file.num_row_groups > 1
    assert rows_of(folder, result) == all_rows(store)


@pytest.mark.parametrize("columns", [("topic", "body"), ("broker", "properties", "queue_id")])
def test_some_columns(tmp_path: Path, store: Path, columns: tuple[str, ...]) -> None:
    folder, result = written(tmp_path, store, columns=columns)
    everything = all_rows(store)
    assert rows_of(folder, result) == [{name: row[name] for name in columns} for row in everything]
    # The manifest's entries do not depend on the columns.
    _, whole = written(tmp_path, store)
    assert result.summary == whole.summary
    assert result.summary.total.messages == 60
    ends = (everything[0]["physical_offset"], everything[-1]["physical_offset"])
    assert (result.files[0].first_offset, result.files[0].last_offset) == ends


def test_partitions(tmp_path: Path, store: Path) -> None:
    folder, result = written(tmp_path, store, ("topic", "day"))
    stem = "part-store.00000000000000000000.parquet"
    assert [file.path for file in result.files] == [
        f"topic={topic}/day=2023-11-{day}/{stem}"
        for topic in ("%25RETRY%25g", "a%3Db", "orders")
        for day in (14, 15, 16)
    ]
    found = rows_of(folder, result)
    assert sorted(found, key=lambda row: row["physical_offset"]) == all_rows(store)
    for file in result.files:
        rows = pq.ParquetFile(Path(folder.location) / file.staged).read()
        offsets = rows["physical_offset"].to_pylist()
        assert offsets == sorted(offsets)
        assert (file.first_offset, file.last_offset) == (offsets[0], offsets[-1])
        assert len(set(rows["topic"].to_pylist())) == 1
        assert len({time.date() for time in rows["store_timestamp"].to_pylist()}) == 1


def test_more_partitions_than_open_files(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MOST_FILES", 2)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 3_000)
    folder, result = written(tmp_path, store, ("topic",), batch_bytes=500)
    names = [file.path for file in result.files]
    assert len(set(names)) == len(names) > 3
    assert "topic=orders/part-store.00000000000000000000.1.parquet" in names
    found = sorted(rows_of(folder, result), key=lambda row: row["physical_offset"])
    assert found == all_rows(store)


def test_days_that_no_calendar_has(tmp_path: Path) -> None:
    maker = StoreMaker()
    for time in (FIRST_TIME, 1 << 52, -(1 << 52), -1):
        maker.put(time=time)
    _, result = written(tmp_path, maker.write(tmp_path / "store"), ("day",))
    days = sorted(file.path.partition("/")[0] for file in result.files)
    assert "day=__HIVE_DEFAULT_PARTITION__" in days
    assert "day=1969-12-31" in days
    assert "day=2023-11-14" in days


def test_damage(tmp_path: Path, store: Path) -> None:
    log = store / "commitlog" / f"{0:020d}"
    data = bytearray(log.read_bytes())
    frame_size = int.from_bytes(data[:4], "big")
    data[frame_size + 5] ^= 0xFF
    log.write_bytes(data)
    with pytest.raises(CorruptFrame):
        written(tmp_path, store)
    _, result = written(tmp_path, store, on_damage="skip")
    assert result.files[0].rows == 59
    (span,) = result.summary.damage
    assert (span.offset, span.kind) == (frame_size, "bad_magic")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("row_bytes", [1, 64 << 20])
def test_a_full_disk(
    row_bytes: int, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writes of rows fail, or the write of the footer."""
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", row_bytes)
    monkeypatch.setattr(OutputFolder, "create", lambda *_: pa.OSFile("/dev/full", "wb"))
    with pytest.raises(
        StoreUnavailable,
        match=rf"^{tmp_path}/out: cannot be written: .*: free some space",
    ):
        written(tmp_path, store)


def test_names_of_files() -> None:
    def stem(part: Part, broker: str = "b") -> str:
        plan = ReadPlan(Selection(), LogExtent(0, 0), (part,), False)
        task = ReadTask(
            location="/s",
            broker=broker,
            plan=plan,
            options=ReadOptions(paths=("/s",)),
            columns=schema.NAMES,
            delay_levels_ms=(),
        )
        return file_stem(task)

    assert stem(LogSplit(7, 9)) == "part-b.00000000000000000007"
    assert stem(QueueSlice("%R%g", 3, 5, 9, 1)) == "part-b.~25R~25g.3.00000000000000000005"
    assert stem(PlaceList((4, 8))) == "part-b.at.00000000000000000004"
    assert stem(LogSplit(7, 9), "10.0.0.1") == "part-10~2e0~2e0~2e1.00000000000000000007"
    assert stem(LogSplit(7, 9), "x/é") == "part-x~2f~c3~a9.00000000000000000007"
    long = stem(LogSplit(7, 9), "é" * 100)
    assert len(long) <= 180
    assert long != stem(LogSplit(8, 9), "é" * 100)


def test_partition_columns() -> None:
    assert check_partition_columns(["topic", "day"], schema.NAMES) == ("topic", "day")
    for names, columns, text in (
        (["tags"], schema.NAMES, "takes broker, topic"),
        (["day"], ("topic",), "export the column store_timestamp too"),
        (["topic", "topic"], schema.NAMES, "a column appears twice"),
    ):
        with pytest.raises(UsageError, match=text):
            check_partition_columns(names, columns)


def test_tasks_are_small(store: Path) -> None:
    import pickle

    options = ReadOptions(paths=(str(store),), split_size=1_000)
    many = plan_tasks(options)
    assert len(many) > 5
    assert max(len(pickle.dumps(task)) for task in many) < 3_000
    rows = [row for task in many for batch in read_batches(task) for row in batch.to_pylist()]
    assert rows == all_rows(store)
    few = plan_tasks(replace(options, split_size=None, min_partitions=4))
    assert 4 <= len(few) <= 6


@pytest.mark.parametrize("asked", [{"split_size": 1}, {"min_partitions": 1 << 20}])
def test_there_are_not_too_many_tasks(
    store: Path,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ReadOptions(paths=(str(store),), **asked)
    monkeypatch.setattr(tasks, "FEW_TASKS", 10)
    few = plan_tasks(options)
    # A range may end before the split size, at the end of a file.
    assert 5 <= len(few) <= 12
    assert "would be too many" in caplog.text
    rows = [row for task in few for batch in read_batches(task) for row in batch.to_pylist()]
    assert rows == all_rows(store)
    monkeypatch.setattr(tasks, "MOST_TASKS", 3)
    assert len(plan_tasks(options)) <= 4
    monkeypatch.setattr(tasks, "MOST_TASKS", 100)
    monkeypatch.setattr(tasks, "FEW_TASKS", 1)
    assert len(plan_tasks(options)) == 1


def test_a_store_without_a_log_is_refused(store: Path) -> None:
    shutil.rmtree(store / "commitlog")
    with pytest.raises(UnsupportedStore, match="is a disk not mounted"):
        plan_tasks(ReadOptions(paths=(str(store),)))


def test_small_queues_share_a_task(tmp_path: Path) -> None:
    maker = StoreMaker()
    for n in range(400):
        maker.put(f"topic-{n % 40}", n % 4)
    options = ReadOptions(paths=(str(maker.write(tmp_path / "store")),))
    wanted = replace(options.wanted, topic_pattern="topic-1.")
    few = plan_tasks(replace(options, wanted=wanted))
    # One task for the ranges of queues, one for the blanks between them.
    assert len(few) == 2
    assert sum(len(task.plan.parts) for task in few) > 10
    assert sum(batch.num_rows for task in few for batch in read_batches(task)) == 100


def test_tables_of_no_rows_have_the_columns(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    folder.make("staging")
    file = parquet.write_empty(folder, "staging", schema.NAMES)
    assert pq.ParquetFile(tmp_path / file.staged).schema_arrow.equals(schema.arrow_schema())
    assert isinstance(pq.ParquetFile(tmp_path / file.staged).read(), pa.Table)
