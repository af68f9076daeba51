"""What each version of Spark must do: the same rows and offsets, streams, sinks and exports.

`make test-matrix` runs these tests in an environment for each version. They use only what PySpark
3.5 has as well, and skip the rest by the feature's name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.spark import export_delta, export_parquet, load, read, register, verify_stores
from logquarry.spark.columns import has_admission, has_sources
from tests.helpers.store_maker import StoreMaker
from tests.spark.golden_rows import golden_messages, rows_by_broker, sound_stores

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_SHA256 = "f763452eaab496c297fa28519980422e242684e3878c40a707bed221574a616d"
"""Hash of all rows of the sound golden stores, the same on each version of Spark."""

needs_sources = pytest.mark.skipif(
    not has_sources(), reason="this PySpark has no data sources in Python"
)
SETTINGS = json.dumps({"mappedFileSizeCommitLog": 1 << 16, "mappedFileSizeConsumeQueue": 6_000})


def small_store(path: Path, first: int, count: int) -> list[bytes]:
    """Write a store of `first` + `count` messages; return the bodies of the last `count`."""
    maker = StoreMaker()
    for n in range(first + count):
        maker.put(["orders", "payments"][n % 2], body=b"body %d" % n, keys=f"k{n}")
    shutil.rmtree(path, ignore_errors=True)
    maker.write(path)
    return [b"body %d" % n for n in range(first, first + count)]


def test_all_golden_rows(spark: SparkSession, golden: Path) -> None:
    stores = sound_stores(golden)
    found = rows_by_broker(read(spark, list(stores.values()), minPartitions=4))
    digest = hashlib.sha256()
    for name, store in sorted(stores.items()):
        assert found.get(name, []) == golden_messages(store.parent / "expected.jsonl"), name
        digest.update(json.dumps([name, found[name]], sort_keys=True, default=bytes.hex).encode())
    assert digest.hexdigest() == ROWS_SHA256


def test_columns_and_filters(spark: SparkSession, tmp_path: Path) -> None:
    small_store(tmp_path / "store", 0, 20)
    df = read(spark, tmp_path / "store", topics=["orders"], columns="body,queue_offset")
    assert df.columns == ["body", "queue_offset"]
    assert {bytes(row[0]) for row in df.collect()} == {b"body %d" % n for n in range(0, 20, 2)}
    assert read(spark, tmp_path / "store", topics="none", schema="kafka").collect() == []


def test_export_to_parquet(spark: SparkSession, tmp_path: Path) -> None:
    small_store(tmp_path / "store", 0, 20)
    done = export_parquet(spark, str(tmp_path / "store"), str(tmp_path / "out"))
    assert done.messages == 20
    files = [str(tmp_path / "out" / file.path) for file in done.files]
    assert ds.dataset(files).count_rows() == 20


def test_export_to_delta(spark: SparkSession, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="needs the extra lakehouse")
    for added, total in ((20, 20), (10, 30)):
        small_store(tmp_path / "store", total - added, added)
        done = export_delta(spark, tmp_path / "store", tmp_path / "table", partition_by=["topic"])
        assert done.messages == added
        table = deltalake.DeltaTable(str(tmp_path / "table")).to_pyarrow_table(columns=["body"])
        assert sorted(table["body"].to_pylist()) == sorted(b"body %d" % n for n in range(total))


def test_a_job_over_stores(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("a", "b"):
        small_store(tmp_path / name, 0, 20)
    reports = verify_stores(spark, str(tmp_path / "*"))
    found = [(report.counts["messages"], report.has_damage) for report in reports]
    assert found == [(20, False)] * 2


@pytest.mark.skipif(has_sources(), reason="this PySpark has data sources in Python")
def test_without_sources_register_names_the_way(spark: SparkSession) -> None:
    with pytest.raises(UsageError, match=r"has no data sources in Python.*spark.read\(spark, path"):
        register(spark)


@needs_sources
def test_stream_with_restart(spark: SparkSession, tmp_path: Path) -> None:
    def run() -> list[Any]:
        stream = spark.readStream.format("rocketmq").option("maxOffsetsPerTrigger", "8")
        writer = stream.load(str(tmp_path / "store")).writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start(str(tmp_path / "out"))
        assert query.awaitTermination(240)
        return [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]]

    small_store(tmp_path / "store", 0, 20)
    assert run() == ([8, 8, 4] if has_admission() else [20])
    small_store(tmp_path / "store", 20, 10)
    assert sum(run()) == 10
    assert sum(run()) == 0
    rows = spark.read.parquet(str(tmp_path / "out")).select("body").collect()
    assert sorted(bytes(row[0]) for row in rows) == sorted(b"body %d" % n for n in range(30))


def as_messages(df: DataFrame) -> DataFrame:
    return df.selectExpr("'orders' as topic", "cast(concat('n', id) as binary) as body")


def test_load(spark: SparkSession, tmp_path: Path) -> None:
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = spark.conf.get(name)
    config = StoreConfig.from_mapping(json.loads(SETTINGS))
    done = load(as_messages(spark.range(0, 700, 1, 2)), tmp_path / "store", config=config)
    assert done.rows == 700
    assert spark.conf.get(name) == before
    found = read(spark, tmp_path / "store").select("body").collect()
    assert sorted(bytes(row[0]) for row in found) == sorted(b"n%d" % n for n in range(700))


@needs_sources
def test_sink(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    writer = as_messages(spark.range(0, 40, 1, 2)).write.format("rocketmq").mode("append")
    writer.option("config", SETTINGS).save(path)
    found = read(spark, path).select("topic", "body").collect()
    assert sorted((row[0], bytes(row[1])) for row in found) == sorted(
        ("orders", b"n%d" % n) for n in range(40)
    )


@needs_sources
def test_sink_of_a_stream(spark: SparkSession, tmp_path: Path) -> None:
    small_store(tmp_path / "in", 0, 20)
    for _ in range(2):
        stream = spark.readStream.format("rocketmq").load(str(tmp_path / "in"))
        writer = stream.select("topic", "body", "keys").writeStream.format("rocketmq")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer = writer.option("config", SETTINGS).option("path", str(tmp_path / "out"))
        assert writer.trigger(availableNow=True).start().awaitTermination(240)
    found = [bytes(row[0]) for row in read(spark, tmp_path / "out").select("body").collect()]
    assert sorted(found) == sorted(b"body %d" % n for n in range(20))


@needs_sources
def test_a_session_of_connect(tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="Spark Connect needs pyspark[connect]")
    small_store(tmp_path / "store", 0, 20)
    # A process cannot have a classic session and one of Spark Connect. With SPARK_TESTING, the
    # server listens on a port that the system chooses.
    code = f"""
from pyspark.sql import SparkSession
from logquarry.errors import UsageError
from logquarry.spark import read, register, verify_stores

spark = SparkSession.builder.remote("local[1]").getOrCreate()
register(spark)
df = spark.read.format("rocketmq").option("topics", "orders").load({str(tmp_path / "store")!r})
assert df.count() == 10
df.select("topic", "body").write.format("rocketmq").mode("append").option(
    "config", {SETTINGS!r}).save({str(tmp_path / "out")!r})
assert read(spark, {str(tmp_path / "out")!r}).count() == 10
try:
    verify_stores(spark, {str(tmp_path / "out")!r})
except UsageError as error:
    print("refused:", error)
spark.stop()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SPARK_TESTING": "1", "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:3000]
    assert "refused: this job needs a classic Spark session" in done.stdout
