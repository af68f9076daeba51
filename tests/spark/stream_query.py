"""A process with a query of its own, for a test to kill: run with -m."""

from __future__ import annotations

import sys

from logquarry.spark import get_session


def main(store: str, folder: str, how: str) -> None:
    """From a store into ``folder/out``, until it is killed, or until it has what is there now."""
    spark = get_session(master="local[2]")
    stream = spark.readStream.format("rocketmq").option("maxBytesPerTrigger", "2m").load(store)
    writer = stream.select("physical_offset", "body").writeStream.format("parquet")
    writer = writer.option("checkpointLocation", f"{folder}/checkpoint")
    trigger = writer.trigger(availableNow=True) if how == "now" else writer
    query = trigger.start(f"{folder}/out")
    print("started", flush=True)
    query.awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
