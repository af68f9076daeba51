"""Stores in Spark: the data source `rocketmq`, and jobs over many stores.

    from logquarry.spark import get_session

    spark = get_session()
    spark.read.format("rocketmq").load("store").show()

`get_session` finds Java and makes a session that knows the format `rocketmq`; `register` adds this
format to an existing session. `read` reads stores on each version of Spark, even on 3.5. The jobs:
`verify_stores`, `salvage_stores` and `rebuild_on_spark` check and repair stores, `export_parquet`,
`export_delta`, `export_iceberg` and `compact` write tables, `summarize` counts messages, `load`
writes a DataFrame into stores.

If you pass None instead of a session, `export_parquet`, `compact` and `summarize` run without
Spark, in this process. Everything else needs the extra `logquarry[spark]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Spark's workers import this package too: session.py imports pyspark only inside its functions.
from logquarry.spark.session import get_session, register

if TYPE_CHECKING:
    from logquarry.spark.compaction import compact
    from logquarry.spark.export import export_parquet, summarize
    from logquarry.spark.lakehouse.export import export_delta, export_iceberg
    from logquarry.spark.reading import read
    from logquarry.spark.rebuilding import rebuild_on_spark
    from logquarry.spark.repair import salvage_stores, verify_stores
    from logquarry.spark.sink import load

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
    "read": "reading",
    "rebuild_on_spark": "rebuilding",
    "salvage_stores": "repair",
    "summarize": "export",
    "verify_stores": "repair",
}
"""Module of each job by the job's name; it is imported when the job is first used."""


def __getattr__(name: str) -> Any:
    if name in _JOBS:
        return getattr(import_module(f"{__name__}.{_JOBS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
