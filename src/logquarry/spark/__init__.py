"""Stores in Spark: the data source `rocketmq`, and jobs over many stores.

    from logquarry.spark import get_session

    spark = get_session()
    spark.read.format("rocketmq").load("store").show()

`export_parquet`, `compact` and `summarize` also accept None instead of a session; they then run in
this process, without Spark. All other functions need the extra `logquarry[spark]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Spark's workers import this package too, so session.py imports pyspark only inside functions.
from logquarry.spark.session import get_session

if TYPE_CHECKING:
    from logquarry.spark.compaction import compact
    from logquarry.spark.export import export_parquet, summarize
    from logquarry.spark.lakehouse.export import export_delta, export_iceberg
    from logquarry.spark.rebuilding import rebuild_on_spark
    from logquarry.spark.repair import salvage_stores, verify_stores
    from logquarry.spark.sink import load
    from logquarry.spark.source import read, register

__all__ = [
    "compact",
    "export_delta",
    "export_iceberg",
    "export_parquet",
    "get_session",
    "load",
    "read",
    "rebuild_on_spark",
    "register",
    "salvage_stores",
    "summarize",
    "verify_stores",
]

_JOBS = {
    "compact": "compaction",
    "export_delta": "lakehouse.export",
    "export_iceberg": "lakehouse.export",
    "export_parquet": "export",
    "load": "sink",
    "read": "source",
    "rebuild_on_spark": "rebuilding",
    "register": "source",
    "salvage_stores": "repair",
    "summarize": "export",
    "verify_stores": "repair",
}
"""For each public function, the module that defines it. The first use of a function imports its
module.
"""


def __getattr__(name: str) -> Any:
    if name in _JOBS:
        return getattr(import_module(f"{__name__}.{_JOBS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
