"""Reads stores as a DataFrame, with the same result in all supported versions of Spark."""

from __future__ import annotations

import json
import logging
import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from logquarry.errors import UsageError
from logquarry.spark.columns import checked, has_sources, struct_of, task_rows
from logquarry.spark.jobs import context_of
from logquarry.spark.options import FORMAT, parse_read_options
from logquarry.spark.session import register, use_this_python
from logquarry.spark.tasks import plan_tasks
from logquarry.spark.worker import Packaged

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]


def read(spark: SparkSession, path: Path | Sequence[Path], **options: Any) -> DataFrame:
    """Read stores as a DataFrame, with the options of the data source `rocketmq`.

    From Spark 4.0 on, the function calls ``spark.read.format("rocketmq")``, which also works with
    Spark Connect. Spark 3.5 has no data sources in Python. There the driver plans the tasks during
    this call, and Spark's mapInArrow runs the tasks. Options that are lists or mappings are passed
    as JSON.

    Raises:
        UsageError: if an option is unknown or invalid; Spark 4 wraps the error.
        StoreNotFound: if a path is not a store; Spark 4 wraps the error.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    places = [os.fspath(place) for place in paths]
    texts = {name: _text(name, value) for name, value in options.items() if value is not None}
    if has_sources():
        register(spark)
        return spark.read.format(FORMAT).options(**texts).load(places)
    return _by_map(spark, {**texts, "paths": json.dumps(places)})


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        return json.dumps(list(value))
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    raise UsageError(
        f"{name}: takes text, a number, a boolean, a list or a mapping, not {type(value).__name__}"
    )


def _by_map(spark: SparkSession, given: Mapping[str, str]) -> DataFrame:
    if find_spec("pandas") is None:
        raise UsageError(
            "read on Spark 3.5 uses mapInArrow, which needs the package pandas: pip install "
            "'logquarry[spark]'"
        )
    context = context_of(spark)
    use_this_python(context)
    options = parse_read_options(given)
    for remark in options.remarks:
        logger.warning("%s: %s", FORMAT, remark)
    struct = struct_of(options)
    tasks = [(pickle.dumps(task),) for task in plan_tasks(options, checked(struct, options))]
    # Each partition runs one task. If the read has no task, make one empty partition.
    spread = context.parallelize(tasks, max(1, len(tasks)))
    return spark.createDataFrame(spread, "task binary").mapInArrow(_Read(struct), struct)


class _Read(Packaged):
    def __init__(self, struct: StructType) -> None:
        self._struct = struct

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0):
                yield from task_rows(pickle.loads(task.as_py()), self._struct)
