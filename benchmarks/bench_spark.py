"""Compare Spark reading a store with Spark reading Parquet.

Run ``python -m benchmarks.bench_spark --store DIR``.

The program makes two comparisons. Each measures both sides in the same run, and takes the best of
some rounds:

- a query that uses every column, over the source and over uncompressed Parquet of the same rows;
- an export to zstd Parquet, by the workers and by Spark's own writer over the source.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from logquarry.log import schema
from logquarry.spark import get_session
from logquarry.spark.export import export_parquet

_QUERY = (
    "sum(length(body)) AS bytes",
    "count(properties['KEYS']) AS keyed",
    "sum(hash({columns})) AS hashed",
)


def best(rounds: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the fastest round, and the result of the last round."""
    seconds, result = float("inf"), None
    for _ in range(rounds):
        start = time.perf_counter()
        result = work()
        seconds = min(seconds, time.perf_counter() - start)
    return seconds, result


def measure(store: Path, work: Path, rounds: int, master: str) -> dict[str, Any]:
    """Return all figures for one store; the Parquet files are written into ``work``."""
    spark = get_session(master=master)
    source = spark.read.format("rocketmq").load(str(store))
    plain = work / "plain"
    source.write.mode("overwrite").option("compression", "none").parquet(str(plain))
    parquet = spark.read.parquet(str(plain))
    columns = ", ".join(name for name in schema.NAMES if name not in ("body", "properties"))
    query = [text.format(columns=columns) for text in _QUERY]
    by_source = by_parquet = float("inf")
    for _ in range(rounds):
        # Alternate between the two kinds, because code that the JVM has compiled while it ran one
        # kind may be slow for the other.
        ours, rows = best(1, lambda: source.selectExpr(*query).collect())
        theirs, same = best(1, lambda: parquet.selectExpr(*query).collect())
        if rows != same:
            raise SystemExit(f"the two sides differ: {rows} and {same}")
        by_source, by_parquet = min(by_source, ours), min(by_parquet, theirs)
    export_rounds = min(rounds, 3)
    ours, _ = best(export_rounds, lambda: export_parquet(spark, [str(store)], str(work / "ours")))

    def theirs_once() -> None:
        writer = source.write.mode("overwrite").option("compression", "zstd")
        writer.parquet(str(work / "theirs"))

    theirs, _ = best(max(1, export_rounds - 1), theirs_once)
    size = sum(file.stat().st_size for file in (store / "commitlog").iterdir())
    spark.stop()
    return {
        "store_bytes": size,
        "query_source_seconds": by_source,
        "query_parquet_seconds": by_parquet,
        "query_speed_against_parquet": by_parquet / by_source,
        "export_workers_seconds": ours,
        "export_spark_writer_seconds": theirs,
        "export_speed_against_spark_writer": theirs / ours,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--master", default="local[2]")
    options = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    try:
        json.dump(
            measure(options.store, work, options.rounds, options.master), sys.stdout, indent=1
        )
        print()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
