"""The differences between versions of PySpark, in one place; each is found by its feature.

| feature | first PySpark | without it |
|---|---|---|
| data sources in Python | 4.0 | batch reads by `logquarry.spark.read` with mapInArrow |
| Arrow batches for the sink of a stream | 4.1 | 4.0: see `DataSourceStreamArrowWriter` below |
| `to_arrow_schema(timezone=)` | 4.2 | timestamps are UTC without it |
| limits for the batches of a stream | 4.2 | a batch takes everything: `stream/unlimited.py` |

All other modules take PySpark's base classes from here. If this PySpark lacks a class, the name is
an empty class, so that the modules can be imported.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import pyspark
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "PySpark is not installed: pip install 'logquarry[spark]'", name=error.name
    ) from error

from logquarry.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import (
        DataSource,
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
        DataSourceWriter,
        InputPartition,
        WriterCommitMessage,
    )
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxBytes,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
    from pyspark.sql.types import StructType

__all__ = [
    "DataSource",
    "DataSourceArrowWriter",
    "DataSourceReader",
    "DataSourceStreamArrowWriter",
    "DataSourceStreamReader",
    "DataSourceWriter",
    "InputPartition",
    "ReadAllAvailable",
    "ReadLimit",
    "ReadMaxBytes",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "WriterCommitMessage",
    "arrow_schema",
    "has_admission",
    "has_sources",
    "require_sources",
]


def _class_of(module: str, name: str) -> Any:
    """Return a class of PySpark, or an empty class if this PySpark lacks it."""
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        # If a module that PySpark itself needs is missing, the user must see that error.
        if error.name is None or not error.name.startswith("pyspark"):
            raise
        found = None
    return found or type(name, (_Absent,), {})


class _Absent:
    """Base of the classes that this PySpark lacks."""


if not TYPE_CHECKING:
    _SOURCE, _STREAM = "pyspark.sql.datasource", "pyspark.sql.streaming.datasource"
    DataSource = _class_of(_SOURCE, "DataSource")
    DataSourceArrowWriter = _class_of(_SOURCE, "DataSourceArrowWriter")
    DataSourceReader = _class_of(_SOURCE, "DataSourceReader")
    DataSourceStreamReader = _class_of(_SOURCE, "DataSourceStreamReader")
    DataSourceWriter = _class_of(_SOURCE, "DataSourceWriter")
    InputPartition = _class_of(_SOURCE, "InputPartition")
    WriterCommitMessage = _class_of(_SOURCE, "WriterCommitMessage")
    ReadAllAvailable = _class_of(_STREAM, "ReadAllAvailable")
    ReadLimit = _class_of(_STREAM, "ReadLimit")
    ReadMaxBytes = _class_of(_STREAM, "ReadMaxBytes")
    ReadMaxRows = _class_of(_STREAM, "ReadMaxRows")
    SupportsTriggerAvailableNow = _class_of(_STREAM, "SupportsTriggerAvailableNow")
    DataSourceStreamArrowWriter = _class_of(_SOURCE, "DataSourceStreamArrowWriter")
    if issubclass(DataSourceStreamArrowWriter, _Absent):
        # PySpark 4.0 passes Arrow batches to each writer that is a DataSourceArrowWriter, also to
        # the writer of a stream.
        class DataSourceStreamArrowWriter(
            _class_of(_SOURCE, "DataSourceStreamWriter"), DataSourceArrowWriter
        ):
            """A stream's writer that takes Arrow batches."""


def has_sources() -> bool:
    """Return whether this PySpark has data sources in Python."""
    return not issubclass(DataSource, _Absent)


def require_sources() -> None:
    """Check that this PySpark has data sources in Python.

    Raises:
        UsageError: if it has none.
    """
    if not has_sources():
        raise UsageError(
            f"PySpark {pyspark.__version__} has no data sources in Python (PySpark 4.0 has): read "
            "stores with logquarry.spark.read(spark, path), or install PySpark 4.0 or later"
        )


def has_admission() -> bool:
    """Return whether Spark gives a stream's reader the start and the limit of each batch."""
    method = getattr(DataSourceStreamReader, "latestOffset", None)
    return method is not None and "limit" in inspect.signature(method).parameters


def arrow_schema(struct: StructType) -> pa.Schema:
    """Return the Arrow schema in which Spark expects rows of `struct`; timestamps are UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(struct, timezone="UTC")
    return to_arrow_schema(struct)
