"""The streaming source on Spark: what tests/unit/spark/test_stream_planner.py cannot show."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from logquarry.errors import CorruptFrame, LogquarryError, UsageError
from logquarry.spark.jobs import explain
from tests.helpers.store_maker import StoreMaker
from tests.spark.golden_rows import golden_messages, rows_by_broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MINUTE = 60


@pytest.fixture(scope="module")
def real(golden: Path) -> Path:
    return golden / "real-broker" / "store"


@pytest.fixture
def to_parquet(spark: SparkSession, tmp_path: Path) -> Callable[..., StreamingQuery]:
    """Start a query from a store into `tmp_path/out`, with one checkpoint for all runs."""

    def started(
        store: Path | str, trigger: dict[str, Any] | None = None, **options: str
    ) -> StreamingQuery:
        stream = spark.readStream.format("rocketmq").options(**options).load(str(store))
        writer = stream.writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(**(trigger or {"availableNow": True})).start(str(tmp_path / "out"))

    return started


def done(query: StreamingQuery) -> list[Any]:
    assert query.awaitTermination(2 * MINUTE)
    return list(query.recentProgress)


def error_of(query: StreamingQuery) -> LogquarryError:
    with pytest.raises(Exception) as caught:
        query.awaitTermination(2 * MINUTE)
    ours = explain(caught.value)
    assert ours is not None, caught.value
    return ours


def test_a_batch_that_is_run_again_is_there_once(
    spark: SparkSession, real: Path, tmp_path: Path, to_parquet: Callable[..., StreamingQuery]
) -> None:
    progress = done(to_parquet(real, maxOffsetsPerTrigger="100"))
    assert [p["numInputRows"] for p in progress][:4] == [100] * 4
    source = progress[-1]["sources"][0]
    end = json.loads(source["endOffset"])
    assert end.pop("/start").keys() == {"lastFrames"}
    assert end == json.loads(source["latestOffset"])
    assert end.keys() == {"store"}
    # As after a crash between writing a batch's files and its commit: the third batch runs again.
    number = len(progress) - 1
    for folder in (tmp_path / "checkpoint/commits", tmp_path / "out/_spark_metadata"):
        (folder / f"{number}").unlink()
        (folder / f".{number}.crc").unlink()
    assert done(to_parquet(real))[0]["numInputRows"] == progress[-1]["numInputRows"]
    assert sum(p["numInputRows"] for p in done(to_parquet(real))) == 0
    found = rows_by_broker(spark.read.parquet(str(tmp_path / "out")))
    assert found == {"store": golden_messages(real.parent / "expected.jsonl")}


def test_a_word_count_written_for_kafka(spark: SparkSession, tmp_path: Path) -> None:
    from pyspark.sql.functions import explode, split

    rng = random.Random(4)
    expected: Counter[str] = Counter()
    maker = StoreMaker()
    for n in range(60):
        words = rng.choices(["to", "be", "or", "not", "zwölf", "日本"], k=rng.randrange(1, 9))
        maker.put(["lines", "others"][n % 2], body=" ".join(words).encode())
        expected.update(words if n % 2 == 0 else [])
    maker.write(tmp_path / "store")

    # structured_kafka_wordcount.py of Spark's examples, except for format, path and schema.
    reader = spark.readStream.format("rocketmq").option("schema", "kafka")
    lines = (
        reader.option("kafka.bootstrap.servers", "localhost:9092")
        .option("subscribe", "lines")
        .load(str(tmp_path / "store"))
        .selectExpr("CAST(value AS STRING)")
    )
    counts = lines.select(explode(split(lines.value, " ")).alias("word")).groupBy("word").count()
    writer = counts.writeStream.outputMode("complete").format("memory").queryName("words")
    done(writer.trigger(availableNow=True).start())
    assert {row[0]: row[1] for row in spark.sql("SELECT * FROM words").collect()} == expected


def test_kafkas_schema(spark: SparkSession, real: Path) -> None:
    reader = spark.read.format("rocketmq").options(schema="kafka", includeHeaders="true")
    df = reader.load(str(real))
    assert df.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int,headers:array<struct<key:string,value:binary>>>"
    )
    assert all(field.nullable for field in df.schema)
    expected = golden_messages(real.parent / "expected.jsonl")
    rows = df.selectExpr("*", "unix_millis(timestamp) AS ms").collect()
    assert sorted((r.topic, r.partition, r.offset, r.ms, bytes(r.value)) for r in rows) == sorted(
        (m["topic"], m["queue_id"], m["queue_offset"], m["store_timestamp"], m["body"])
        for m in expected
    )
    pairs = sum(len(row.headers or ()) for row in rows)
    assert pairs == sum(len(m["properties"]) for m in expected)


def test_errors_reach_the_user(
    golden: Path, real: Path, to_parquet: Callable[..., StreamingQuery]
) -> None:
    ours = error_of(to_parquet(real, endingOffsets="latest"))
    assert isinstance(ours, UsageError)
    assert str(ours).startswith("endingOffsets: a stream has no end")
    harmed = golden / "unclean" / "crc-third-last-file" / "store"
    ours = error_of(to_parquet(harmed))
    assert isinstance(ours, CorruptFrame)
    assert ours.offset == 36796


def begun(start: Callable[[], StreamingQuery], checkpoint: Path) -> StreamingQuery:
    """Start a query; return it once the checkpoint has the offsets of the first batch.

    `stop` may interrupt Spark while it writes those. Spark then leaves their temporary file behind
    and refuses the checkpoint from then on (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY), whatever
    the source. Nothing is lost, as no batch has run, but the checkpoint has to be deleted by hand.
    """
    query, deadline = start(), time.monotonic() + 2 * MINUTE
    while not (checkpoint / "offsets/0").exists():
        assert time.monotonic() < deadline, "no batch was planned"
        if not query.isActive:
            assert is_slow(query), query.exception()
            query = start()
        time.sleep(0.02)
    return query


def is_slow(query: StreamingQuery) -> bool:
    """Whether a query failed only because Spark gives a Python worker ten seconds to start."""
    return "Python worker failed to connect back" in str(query.exception())


def test_a_store_that_is_written_meanwhile(
    spark: SparkSession, tmp_path: Path, to_parquet: Callable[..., StreamingQuery]
) -> None:
    """A query that is stopped at any point and restarted returns every message once."""
    store, count = tmp_path / "store", 4_000
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.stream_writer", str(store), str(count), "60"],
        stdout=subprocess.PIPE,
        text=True,
    )
    rng = random.Random(11)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "open\n"
        for _ in range(4):
            query = begun(
                lambda: to_parquet(
                    store, {"processingTime": "0 seconds"}, maxBytesPerTrigger="32k"
                ),
                tmp_path / "checkpoint",
            )
            time.sleep(rng.uniform(0.5, 2.5))
            query.stop()
            assert query.exception() is None or is_slow(query)
        assert writer.wait(MINUTE) == 0
    finally:
        writer.kill()
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()
    for tries in range(3):
        query = to_parquet(store)
        try:
            done(query)
            break
        except StreamingQueryException:
            # Spark gives a Python process ten seconds to start, which can be too short on a busy
            # machine. The restarted query continues from the checkpoint.
            assert tries < 2 and is_slow(query)
    df = spark.read.parquet(str(tmp_path / "out"))
    assert sorted(int(row[0]) for row in df.select("body").collect()) == list(range(count))


def test_pushed_filters_still_stay_for_the_next_query(spark: SparkSession) -> None:
    """If this fails, PySpark has fixed `pushFilters`, and our source can accept filters."""
    from tests.spark.canary import CanarySource

    switch = "spark.sql.python.filterPushdown.enabled"
    before = spark.conf.get(switch)
    spark.dataSource.register(CanarySource)
    try:
        spark.conf.set(switch, "true")
        df: DataFrame = spark.read.format("canary").load()
        assert df.where("a >= 50").count() == 50
        assert df.count() == 50, "100 is right: PySpark has mended it"
    finally:
        spark.conf.set(switch, before or "false")
