"""The driver of a cluster: runs the jobs that lines of JSON on stdin name. Run with -m."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.spark import get_session, load
from logquarry.spark.export import export_parquet
from logquarry.spark.jobs import explain, run_tasks
from logquarry.spark.rebuilding import rebuild_on_spark
from logquarry.spark.repair import verify_stores
from tests.spark.golden_rows import rows_by_broker
from tests.spark.quick_start import QUICK_START

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONFIG: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": QUICK_START,
    "spark.driver.extraJavaOptions": QUICK_START,
    "spark.sql.shuffle.partitions": "2",
    # Start no job before both executors are there.
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "90s",
}


def main(master: str) -> None:
    """Run jobs until stdin ends."""
    spark = get_session(master=master, config=_CONFIG)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = {"result": _JOBS[order["job"]](spark, **order["given"])}
        except Exception:
            answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    spark.stop()


def _workers(spark: SparkSession) -> int:
    """Return how many executors take part in a job of eight tasks."""
    return len(set(run_tasks(spark, "who", [0.2] * 8, _executor, weight=lambda _: 1)))


def _executor(seconds: float) -> int:
    # Long enough that one executor cannot finish all tasks before the other starts.
    time.sleep(seconds)
    # All Python workers of an executor share one daemon.
    return os.getppid()


def _read(spark: SparkSession, stores: list[str], partitions: int) -> Any:
    df = spark.read.format("rocketmq").option("minPartitions", partitions).load(stores)
    used = df.selectExpr("spark_partition_id()").distinct().count()
    return {"partitions": used, "rows": _in_hex(rows_by_broker(df))}


def _error(spark: SparkSession, store: str) -> str:
    """Return the error of reading a store."""
    try:
        spark.read.format("rocketmq").load(store).collect()
    except Exception as error:
        return repr(explain(error))
    return "nothing"


def _export(spark: SparkSession, stores: list[str], out: str) -> Any:
    summary = export_parquet(spark, stores, out, {"minPartitions": "8"})
    return {"messages": summary.messages, "rows": _parquet(spark, out)}


def _stream(spark: SparkSession, store: str, out: str, checkpoint: str) -> Any:
    """Return the rows in a stream's Parquet files, and the number of its batches."""
    reader = spark.readStream.format("rocketmq").option("maxOffsetsPerTrigger", 100)
    writer = reader.option("minPartitions", 2).load(store).writeStream.format("parquet")
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    query = writer.start(out)
    assert query.awaitTermination(120)
    return {"batches": len(query.recentProgress), "rows": _parquet(spark, out)}


def _load(spark: SparkSession, rows: int, out: str, settings: dict[str, int]) -> Any:
    """Write the same rows by the sink and by `load`; return what Spark reads from both."""
    df = spark.range(0, rows, 1, 6).selectExpr(
        "concat('topic', id % 3) as topic",
        "cast(concat('body ', id) as binary) as body",
        "concat('key', id) as keys",
        "timestamp_millis(1700000000000 + id) as born_timestamp",
    )
    writer = df.write.format("rocketmq").mode("append").option("config", json.dumps(settings))
    writer.option("brokers", 2).save(f"{out}/written")
    load(df, f"{out}/loaded", brokers=2, config=lq.StoreConfig.from_mapping(settings))
    found = {}
    for how in ("written", "loaded"):
        back = spark.read.format("rocketmq").load(f"{out}/{how}/*")
        counts = ("count(*)", "count(distinct body)", "count(distinct broker)")
        found[how] = list(back.selectExpr(*counts).collect()[0])
    return found


def _verify(spark: SparkSession, stores: list[str], split_size: int) -> Any:
    return [report.to_json() for report in verify_stores(spark, stores, split_size=split_size)]


def _rebuild(spark: SparkSession, store: str, into: str, settings: dict[str, int]) -> Any:
    config = StoreConfig.from_mapping(settings)
    report = rebuild_on_spark(spark, store, into=Path(into), config=config, split_size=50_000)
    return report.messages


def _parquet(spark: SparkSession, path: str) -> Any:
    return _in_hex(rows_by_broker(spark.read.parquet(path)))


def _in_hex(rows: Any) -> Any:
    for messages in rows.values():
        for message in messages:
            message["body"] = message["body"].hex()
    return rows


_JOBS: Final[dict[str, Callable[..., Any]]] = {
    "workers": _workers,
    "read": _read,
    "error": _error,
    "export": _export,
    "stream": _stream,
    "load": _load,
    "verify": _verify,
    "rebuild": _rebuild,
}


if __name__ == "__main__":
    main(sys.argv[1])
