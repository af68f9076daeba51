"""A process that moves messages of a store with Spark, for a test to kill: run with -m."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from logquarry.spark import get_session, load
from tests.spark.quick_start import QUICK_START

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# A task may fail three times: killing a worker does not end the query.
MASTER = "local[2,4]"
SETTINGS: dict[str, Any] = {
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 20 * 5_000,
    "maxHashSlotNum": 5_000,
    "maxIndexNum": 20_000,
}
COLUMNS = "topic, queue_id, body, keys, tags, flag, born_timestamp, born_host, properties"


def main(form: str, store: str, folder: str, how: str, most: str) -> None:
    """Move messages from a store to ``folder``.

    Args:
        form: kind of the target, and the way to write it.
        store: store that another process is writing.
        folder: folder for the target and its checkpoint.
        how: ``on`` to run until killed, ``now`` to read what is there and end.
        most: most bytes of log in a batch.
    """
    spark = get_session(master=MASTER, config={"spark.driver.extraJavaOptions": QUICK_START})
    print("started", flush=True)
    if form in ("delta", "iceberg"):
        _export(form, store, folder, how, most)
        return
    # Small partitions, so that a batch has several and their order in a log is tested.
    reader = spark.readStream.format("rocketmq").option("maxBytesPerTrigger", most)
    stream = reader.option("minPartitions", 3).load(store)
    writer = _WRITERS[form](spark, stream, folder)
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
    if how == "now":
        writer = writer.trigger(availableNow=True)
    writer.start().awaitTermination()


def _export(kind: str, store: str, folder: str, how: str, most: str) -> None:
    """Export by the command, which uses the running session."""
    from logquarry.cli.main import app

    words = ["export", store, "--to", f"{folder}/out", "--format", kind, "--spark-master", MASTER]
    words += ["--columns", "physical_offset,topic,body", "--partition-by", "topic"]
    words += ["--max-bytes", most]
    words += ["--follow", "--interval", "0.1"] if how == "on" else []
    app(words)


def _parquet(_: SparkSession, stream: DataFrame, folder: str) -> DataStreamWriter:
    writer = stream.select("physical_offset", "body").writeStream.format("parquet")
    return writer.option("path", f"{folder}/out")


def _delta_by_batches(_: SparkSession, stream: DataFrame, folder: str) -> DataStreamWriter:
    """Write each batch with its number in the table, as a user would without the sink."""
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

    place = f"{folder}/out"

    def write(batch: DataFrame, number: int) -> None:
        if DeltaTable.is_deltatable(place):
            done = DeltaTable(place).transaction_version("query")
            if done is not None and done >= number:
                return
        which = CommitProperties(app_transactions=[Transaction("query", number)])
        write_deltalake(place, batch.toArrow(), mode="append", commit_properties=which)

    return stream.select("physical_offset", "topic", "body").writeStream.foreachBatch(write)


def _sink(_: SparkSession, stream: DataFrame, folder: str) -> DataStreamWriter:
    writer = stream.selectExpr(COLUMNS.split(", ")).writeStream.format("rocketmq")
    return writer.option("config", json.dumps(SETTINGS)).option("path", f"{folder}/out/store")


def _load(_: SparkSession, stream: DataFrame, folder: str) -> DataStreamWriter:
    """Append by tasks, into two stores."""
    import logquarry as lq

    config = lq.StoreConfig.from_mapping(SETTINGS)

    def write(batch: DataFrame, number: int) -> None:
        out = f"{folder}/out"
        load(batch, out, brokers=2, txn_app_id="query", txn_version=number, config=config)

    return stream.selectExpr(COLUMNS.split(", ")).writeStream.foreachBatch(write)


_WRITERS: dict[str, Callable[[Any, Any, str], Any]] = {
    "parquet": _parquet,
    "delta-by-batches": _delta_by_batches,
    "sink": _sink,
    "load": _load,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
