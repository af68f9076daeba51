"""DataFrames and streams are written into stores exactly once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import logquarry as lq
from logquarry.errors import LogquarryError, StoreError, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.spark import load
from logquarry.spark.jobs import explain

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SETTINGS = {
    "mappedFileSizeCommitLog": 65_536,
    "mappedFileSizeConsumeQueue": 6_000,
    "maxHashSlotNum": 100,
    "maxIndexNum": 1_000,
    "maxMessageSize": 4_000,
}
CONFIG = lq.StoreConfig.from_mapping(SETTINGS)
Place = tuple[str, int, int, int, bytes]


def rows(spark: SparkSession, first: int, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(first, first + count, 1, partitions).selectExpr(
        "if(id % 3 = 0, 'orders', 'payments') as topic",
        "cast(concat('body ', id) as binary) as body",
        "if(id % 2 = 0, array(concat('k', id), 'all'), null) as keys",
        "'paid' as tags",
        "map('city', 'Zürich') as properties",
        "cast(id as int) as flag",
        "timestamp_millis(1700000000000 + id) as born_timestamp",
    )


def places(root: Path) -> list[Place]:
    """Return all messages of a sound store in order, without store times."""
    assert [
        f for f in verify_store(StoreLayout.open(root)).findings if f.severity == "damage"
    ] == []
    with lq.MessageStore.open(root) as store:
        found = list(store.scan())
        for topic, queue_id in store.queues():
            offsets = [m.queue_offset for m in found if (m.topic, m.queue_id) == (topic, queue_id)]
            assert offsets == list(range(store.queue_offsets(topic, queue_id).max))
    return [(m.topic, m.queue_id, m.queue_offset, m.physical_offset, m.body) for m in found]


def logs(root: Path) -> list[bytes]:
    """Return the log's bytes, without store times."""
    found = []
    for path in sorted((root / "commitlog").glob("0*")):
        data = bytearray(path.read_bytes())
        with lq.MessageStore.open(root) as store:
            for message in store.scan():
                at = message.physical_offset - int(path.name)
                if 0 <= at < len(data):
                    data[at + 56 : at + 64] = bytes(8)
        found.append(bytes(data))
    return found


def written(df: DataFrame, path: Path, **options: Any) -> None:
    config = json.dumps(SETTINGS)
    writer = df.write.format("rocketmq").mode("append").option("config", config)
    writer.options(**options).save(str(path))


def error_of(action: Callable[[], Any]) -> LogquarryError:
    with pytest.raises(Exception) as caught:
        action()
    ours = explain(caught.value)
    assert ours is not None, caught.value
    return ours


# ----------------------------------------------------------------------------------------- batch
def test_rows_become_messages(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "store"
    written(rows(spark, 0, 300), root)
    written(rows(spark, 300, 10), root)
    assert sorted(body for *_, body in places(root)) == sorted(b"body %d" % n for n in range(310))
    with lq.MessageStore.open(root) as store:
        (message,) = store.query("orders", "k6")
        assert (message.tags, message.keys, message.flag) == ("paid", "k6 all", 6)
        assert message.properties["city"] == "Zürich"
        assert message.born_timestamp == 1_700_000_000_006
    back = spark.read.format("rocketmq").load(str(root))
    assert back.count() == 310
    assert not list(root.rglob("*.frames"))


def test_what_was_read_can_be_written(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    """All columns of the source: the sink ignores those that it does not need."""
    df = spark.read.format("rocketmq").load(str(golden / "real-broker" / "store"))
    # A delayed message would be delayed again.
    df = df.where("(sys_flag & 4) = 0 and properties['DELAY'] is null and tags is not null")
    written(df, tmp_path / "copy", onRejected="deadLetter", deadLetterPath=str(tmp_path / "dead"))
    columns = ["topic", "queue_id", "body", "tags", "keys", "flag", "born_timestamp", "properties"]
    both = [
        sorted(map(str, found.select(columns).collect()))
        for found in (df, spark.read.format("rocketmq").load(str(tmp_path / "copy")))
    ]
    assert both[0] == both[1]
    assert len(both[0]) > 10


def test_a_version_is_written_once(spark: SparkSession, tmp_path: Path) -> None:
    root = tmp_path / "store"
    for version in (7, 7, 6, 8):
        written(rows(spark, 10 * version, 5), root, txnAppId="job", txnVersion=version)
    bodies = {body for *_, body in places(root)}
    assert bodies == {b"body %d" % n for n in (*range(70, 75), *range(80, 85))}
    assert len(places(root)) == 10


def test_rejected_rows(spark: SparkSession, tmp_path: Path) -> None:
    good = rows(spark, 0, 20)
    bad = rows(spark, 20, 2).selectExpr(
        "if(flag = 20, 'no/topic', topic) as topic",
        "if(flag = 21, cast(repeat('x', 5000) as binary), body) as body",
        *("keys", "tags", "properties", "flag", "born_timestamp"),
    )
    root, dead = tmp_path / "store", tmp_path / "dead"
    error = error_of(lambda: written(good.union(bad), root))
    assert isinstance(error, StoreError)
    assert "no/topic" in str(error) or "maxMessageSize" in str(error)
    assert not (root / "commitlog").exists()
    assert not list(root.rglob("*.frames"))
    for _ in range(2):
        written(
            good.union(bad),
            root,
            onRejected="deadLetter",
            deadLetterPath=dead,
            txnAppId="job",
            txnVersion=1,
        )
    assert len(places(root)) == 20
    told = spark.read.parquet(str(dead)).collect()
    assert sorted(row["flag"] for row in told) == [20, 21]
    assert all(row["reason"] for row in told)


@pytest.mark.parametrize(
    ("options", "mode", "columns", "why"),
    [
        ({}, "overwrite", "*", "mode: a log can only be appended to"),
        ({}, "append", "topic", "rows need a column body"),
        ({}, "append", "*, 'x' as colour", "there is no column 'colour' to put"),
        (
            {},
            "append",
            "topic, body, timestamp_ntz'2026-01-01' as Born_Timestamp",
            "which has no time zone: give cast(Born_Timestamp AS timestamp)",
        ),
        ({"brokers": "none"}, "append", "*", "brokers: takes a whole number"),
    ],
)
def test_what_cannot_be_written(
    spark: SparkSession, tmp_path: Path, options: Any, mode: str, columns: str, why: str
) -> None:
    df = rows(spark, 0, 3).selectExpr(*columns.split(", "))
    writer = df.write.format("rocketmq").mode(mode).options(**options)
    error = error_of(lambda: writer.save(str(tmp_path / "store")))
    assert isinstance(error, UsageError)
    assert why in str(error)
    assert not (tmp_path / "store").exists()


def test_several_brokers_by_both_ways(spark: SparkSession, tmp_path: Path) -> None:
    df = rows(spark, 0, 400)
    written(df, tmp_path / "written", brokers=3, txnAppId="job", txnVersion=1)
    done: list[tuple[int, int]] = []
    summary = load(
        df,
        tmp_path / "loaded",
        brokers=3,
        txn_app_id="job",
        txn_version=1,
        config=CONFIG,
        progress=lambda done_, total: done.append((done_, total)),
    )
    assert (summary.rows, summary.was_there, len(summary.stores)) == (400, False, 3)
    assert done[-1] == (summary.bytes, summary.bytes)
    assert load(df, tmp_path / "loaded", brokers=3, txn_app_id="job", txn_version=1).was_there
    found = []
    for broker in range(3):
        one, other = (tmp_path / how / f"broker-{broker}" for how in ("written", "loaded"))
        assert places(one) == places(other)
        assert logs(one) == logs(other)
        found += places(one)
    assert sorted(body for *_, body in found) == sorted(b"body %d" % n for n in range(400))
    assert spark.read.format("rocketmq").load(str(tmp_path / "loaded" / "*")).count() == 400


def test_a_load_that_fails_leaves_nothing(spark: SparkSession, tmp_path: Path) -> None:
    bad = rows(spark, 0, 10).selectExpr("topic", "if(flag = 7, null, body) as body")
    with pytest.raises(StoreError, match="the body is missing"):
        load(bad, tmp_path / "store", config=CONFIG)
    assert not list((tmp_path / "store").rglob("*.frames"))
    with pytest.raises(UsageError, match="onRejected"):
        load(bad, tmp_path / "store", on_rejected="drop")


# ---------------------------------------------------------------------------------------- streams
@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """Write files of rows; each file is a batch of a stream."""
    folder = tmp_path / "batches"
    folder.mkdir()
    for number in range(4):
        numbers = range(50 * number, 50 * number + 50)
        table = pa.table(
            {
                "topic": ["orders" if n % 3 else "payments" for n in numbers],
                "body": pa.array([None if n % 40 == 39 else b"body %d" % n for n in numbers]),
                "keys": [f"k{n}" if n % 2 else None for n in numbers],
                "born_timestamp": pa.array(
                    [1_700_000_000_000 + n for n in numbers], pa.timestamp("ms", "UTC")
                ),
            }
        )
        path = folder / f"{number}.parquet"
        pq.write_table(table, path)
        # Spark orders files by their modification time.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return folder


def stream(spark: SparkSession, batches: Path) -> DataFrame:
    schema = "topic string, body binary, keys string, born_timestamp timestamp"
    source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return source.parquet(str(batches))


def run(spark: SparkSession, batches: Path, root: Path, brokers: int = 1) -> None:
    query = (
        stream(spark, batches)
        .writeStream.format("rocketmq")
        .option("checkpointLocation", str(root.parent / "checkpoint"))
        .option("config", json.dumps(SETTINGS))
        .option("brokers", brokers)
        .option("onRejected", "deadLetter")
        .option("deadLetterPath", str(root.parent / "dead"))
        .trigger(availableNow=True)
        .start(str(root))
    )
    query.awaitTermination(120)
    assert query.exception() is None


def stores(root: Path) -> Iterator[Path]:
    yield from sorted(root.glob("broker-*")) or [root]


@pytest.mark.parametrize("brokers", [1, 2])
def test_a_stream_is_written_once(
    spark: SparkSession, batches: Path, tmp_path: Path, brokers: int
) -> None:
    """Without the last entry of the checkpoint's commits, Spark runs the last batch again."""
    undisturbed, disturbed = tmp_path / "one" / "store", tmp_path / "two" / "store"
    run(spark, batches, undisturbed, brokers)
    late = batches / "3.parquet"
    late.rename(tmp_path / "late")
    run(spark, batches, disturbed, brokers)
    commits = disturbed.parent / "checkpoint" / "commits"
    assert (commits / "2").is_file()
    for path in (commits / "2", commits / ".2.crc"):
        path.unlink(missing_ok=True)
    before = [logs(root) for root in stores(disturbed)]
    run(spark, batches, disturbed, brokers)
    assert (commits / "2").is_file()
    assert [logs(root) for root in stores(disturbed)] == before
    (tmp_path / "late").rename(late)
    run(spark, batches, disturbed, brokers)
    for one, two in zip(stores(undisturbed), stores(disturbed), strict=True):
        assert places(one) == places(two)
        assert logs(one) == logs(two)
    bodies = [body for root in stores(disturbed) for *_, body in places(root)]
    assert sorted(bodies) == sorted(b"body %d" % n for n in range(200) if n % 40 != 39)
    for root in (undisturbed, disturbed):
        dead = spark.read.parquet(str(root.parent / "dead"))
        keys = sorted(row["keys"] for row in dead.collect())
        assert keys == sorted(f"k{n}" for n in range(200) if n % 40 == 39)
        assert not list(root.rglob("*.frames"))


def test_a_stream_by_tasks(spark: SparkSession, batches: Path, tmp_path: Path) -> None:
    """With a lost checkpoint, other rows would get the numbers of earlier batches."""

    def loaded(batch: DataFrame, number: int) -> None:
        good = batch.where("body is not null")
        load(good, tmp_path / "s", brokers=2, txn_app_id="job", txn_version=number, config=CONFIG)

    def run_with(checkpoint: str) -> None:
        query = (
            stream(spark, batches)
            .writeStream.foreachBatch(loaded)
            .option("checkpointLocation", str(tmp_path / checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)

    run_with("checkpoint")
    with pytest.raises(Exception, match=r"version 0 of job .* is 3: .*Lost checkpoint"):
        run_with("another")
    assert sum(len(places(root)) for root in stores(tmp_path / "s")) == 195


def test_the_examples_of_the_page_run(spark: SparkSession, tmp_path: Path) -> None:
    """The examples run in their order, in one folder."""
    page = Path(__file__).parents[2] / "docs" / "sink.md"
    names: dict[str, object] = {"CONFIG": CONFIG, "SETTINGS": json.dumps(SETTINGS)}
    folders = "store|stores|dead|incoming|checkpoint|streamed|loaded|by-tasks"
    for example in re.finditer(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        # Spark resolves paths in the folder where its JVM was started. Also, use small files.
        code = re.sub(rf'"({folders})(/\*|-by-tasks)?"', rf'"{tmp_path}/\1\2"', example[1])
        code = code.replace('"rocketmq")', '"rocketmq").option("config", SETTINGS)')
        code = code.replace("brokers=2, ", "config=CONFIG, brokers=2, ")
        exec(compile(code, "docs/sink.md", "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} >= {"store", "stores", "streamed", "by-tasks"}
