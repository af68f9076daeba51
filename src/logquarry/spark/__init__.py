"""Stores as DataFrames: sessions, and the data source `rocketmq`.

    from logquarry.spark import get_session, register

    spark = get_session()
    spark.read.format("rocketmq").load("store").show()

`get_session` finds or provides Java and makes a session that knows the source; `register` makes the
source known to a session of your own; `load` writes a DataFrame into stores. Needs the extra
`logquarry[spark]`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("pyspark") is None:
    raise ModuleNotFoundError(
        "logquarry.spark needs PySpark, which is not installed: pip install 'logquarry[spark]'",
        name="pyspark",
    )

# session.py imports pyspark where it uses it: Spark's workers come past here too.
from logquarry.spark.session import get_session, register

if TYPE_CHECKING:
    from logquarry.spark.sink.load import load

__all__ = ["get_session", "load", "register"]


def __getattr__(name: str) -> Any:
    # What a load needs is a lot to import for those who only read.
    if name == "load":
        from logquarry.spark.sink.load import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
