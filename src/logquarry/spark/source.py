"""The data source `rocketmq`: reads stores as DataFrames, as a batch or as a stream.

:func:`read` gives the same result in all supported versions of Spark.

To read only some messages, select them with the options. The source accepts no filters that Spark
pushes down (see `RocketMQReader`), so Spark applies the conditions of a query after the read. The
readers decode only the schema's columns, and check the CRC of a body only if `body` is one of these
columns.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from logquarry.errors import MissingExtra, UsageError
from logquarry.spark.columns import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    checked,
    has_admission,
    has_sources,
    require_sources,
    struct_of,
    task_rows,
)
from logquarry.spark.jobs import context_of
from logquarry.spark.options import FORMAT, ReadOptions, parse_read_options
from logquarry.spark.stream_offset import StreamOffset
from logquarry.spark.stream_planner import Limits, StreamPlanner, UnlimitedPlanner
from logquarry.spark.tasks import ReadTask, open_stores, plan_tasks
from logquarry.spark.worker import Packaged, without_traceback

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


def _parsed(given: Mapping[str, str], *, is_stream: bool = False) -> ReadOptions:
    options = parse_read_options(given, is_stream=is_stream)
    for remark in options.remarks:
        logger.warning("%s: %s", FORMAT, remark)
    return options


class _Reader(Packaged, DataSourceStreamReader):
    """Base class of the stream readers.

    A Python process on the driver's machine plans the tasks, and the workers read the messages.

    The options are parsed at the query's first call and not in the constructor: up to version 4.3,
    PySpark drops the text of a constructor's exception.
    """

    def __init__(self, given: Mapping[str, str], struct: StructType) -> None:
        self._given = dict(given)
        self._struct = struct

    @cached_property
    def _options(self) -> ReadOptions:
        with without_traceback():
            return _parsed(self._given, is_stream=True)

    @property
    def _columns(self) -> tuple[str, ...]:
        return checked(self._struct, self._options)

    @cached_property
    def _planner(self) -> StreamPlanner:
        with without_traceback():
            return StreamPlanner(self._options, self._columns)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a new query starts."""
        with without_traceback():
            return self._planner.initial().to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan one partition for each task.

        Raises:
            MessageNotFound: if messages were deleted, unless failOnDataLoss=false.
            UsageError: before Spark 4.2, if the start in the options differs from the start that
                the checkpoint recorded.
        """
        with without_traceback():
            offsets = StreamOffset.from_json(start), StreamOffset.from_json(end)
            return [InputPartition(task) for task in self._planner.tasks(*offsets)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless onDamage=skip; the worker then logs damage to stderr.
        """
        yield from task_rows(partition.value, self._struct)


class RocketMQStreamReader(_Reader, SupportsTriggerAvailableNow):
    """Reads a stream with limits for its batches."""

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit for messages if the options set it, else the limit for bytes.

        Spark accepts one limit here; :meth:`latestOffset` applies both.
        """
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which the next batch ends."""
        with without_traceback():
            offset = StreamOffset.from_json(start)
            return self._planner.latest(offset, self._limits(limit)).to_json()

    def _limits(self, limit: ReadLimit) -> Limits:
        # Trigger.Once passes ReadAllAvailable and ignores the limits of the options.
        if isinstance(limit, ReadAllAvailable):
            return Limits()
        found = Limits(self._options.max_bytes, self._options.max_rows)
        if isinstance(limit, ReadMaxRows):
            return Limits(found.max_bytes, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            return Limits(limit.max_bytes, found.max_rows)
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query end at the present ends of the logs."""
        with without_traceback():
            self._planner.prepare_available_now()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the logs' ends at the last call of latestOffset, for the progress report."""
        return self._planner.newest()


class RocketMQUnlimitedReader(_Reader):
    """Reads a stream if Spark does not support limits; each batch takes all new messages."""

    @cached_property
    def _planner(self) -> UnlimitedPlanner:
        with without_traceback():
            return UnlimitedPlanner(self._options, self._columns)

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # noqa: N802
        """Return the offset at which the next batch ends: the current ends of the logs."""
        with without_traceback():
            return self._planner.newest_end().to_json()


class RocketMQDataSource(DataSource):
    """The format `rocketmq` of Spark's `read`, `readStream`, `write` and `writeStream`.

    Spark's `load` checks that the stores exist, unless the user gives a schema. The first query on
    a DataFrame plans the tasks; later queries on the same DataFrame reuse the plan, so they do not
    read newer messages.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return all columns, or the columns of the option `columns`."""
        with without_traceback():
            options = parse_read_options(self.options)
            open_stores(options)
            return struct_of(options)

    # PySpark passes `schema` by keyword, so the parameter's name must stay.
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a batch reader. `schema` has all columns or some of them, in any order."""
        with without_traceback():
            options = _parsed(self.options)
            return RocketMQReader(options, checked(schema, options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Make a stream reader. `schema` has all columns or some of them, in any order."""
        kind = RocketMQStreamReader if has_admission() else RocketMQUnlimitedReader
        return kind(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer that puts the rows of a batch into stores."""
        from logquarry.spark import sink

        with without_traceback():
            found = sink.checked_write_options(self.options, schema, overwrite, is_stream=False)
            return sink.RocketMQWriter(found.plan, found.load_id())

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Make a writer that puts the batches of a stream into stores.

        Spark calls this method again for each commit.
        """
        from logquarry.spark import sink

        with without_traceback():
            found = sink.checked_write_options(self.options, schema, overwrite, is_stream=True)
            return sink.RocketMQStreamWriter(found.plan, found.app)


class RocketMQReader(Packaged, DataSourceReader):
    """Reads a batch. Spark plans the tasks on the driver, and reads the messages in the workers.

    This class must not override `pushFilters`. Up to version 4.3, PySpark caches the plan of the
    first query with its filters. So later queries with other filters on the same DataFrame would
    miss rows.
    """

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], struct: StructType) -> None:
        self._options = options
        self._columns = columns
        self._struct = struct

    def partitions(self) -> Sequence[InputPartition]:
        """Plan one partition for each task."""
        with without_traceback():
            tasks = plan_tasks(self._options, self._columns)
        # If there are no tasks, return one partition with None, as PySpark itself does for an empty
        # list.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless onDamage=skip; the worker then logs damage to stderr.
        """
        task: ReadTask | None = partition.value
        if task is None:
            return
        yield from task_rows(task, self._struct)


# ---------------------------------------------------------------------------------------- register
_checked: set[str] = set()
"""Paths of the interpreters that `check_python` has already accepted."""


def register(spark: SparkSession) -> None:
    """Register the source `rocketmq` in `spark`; a second call changes nothing.

    Raises:
        UsageError: if PySpark is older than 4.0, or if `spark` is not a session.
    """
    require_sources()
    if not hasattr(spark, "dataSource"):
        raise UsageError(
            f"register takes a SparkSession, not {type(spark).__name__}: make one with "
            "SparkSession.builder.getOrCreate(), or with logquarry.spark.get_session()"
        )
    context = getattr(spark, "_sc", None)
    if context is not None:
        use_this_python(context)
    spark.dataSource.register(RocketMQDataSource)


def use_this_python(context: SparkContext) -> None:
    """On a local master, make the Python workers use this interpreter, unless the user chose one.

    By default, the workers use the first python3 on PATH. If the driver runs in a virtual
    environment that is not activated, the first python3 is another Python.
    """
    is_chosen = os.environ.get("PYSPARK_PYTHON") or context.getConf().get("spark.pyspark.python")
    if (context.master or "").startswith("local") and not is_chosen:
        context.pythonExec = sys.executable
    check_python(context.pythonExec)


def check_python(executable: str) -> None:
    """Check an interpreter for the workers.

    Raises UsageError if `executable` cannot import logquarry, or if its Python version is not the
    driver's.
    """
    if executable in _checked:
        return
    code = "import sys, logquarry; print(*sys.version_info[:2])"
    try:
        done = subprocess.run(
            [executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        told = done.stderr.strip().splitlines()
        version, why = done.stdout.split(), told[-1] if told else f"exit code {done.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        version, why = [], str(error)
    if version and version != [str(number) for number in sys.version_info[:2]]:
        why = f"it is Python {'.'.join(version)}, and the driver is {sys.version.split()[0]}"
    elif version:
        _checked.add(executable)
        return
    raise UsageError(
        f"Spark's workers would run {executable}, which cannot read stores: {why}. Set "
        f"PYSPARK_PYTHON={sys.executable} before the session starts, or install logquarry there; a "
        "folder that is only in sys.path must be in PYTHONPATH too"
    )


# -------------------------------------------------------------------------------------------- read
StorePath = str | os.PathLike[str]


def read(spark: SparkSession, path: StorePath | Sequence[StorePath], **options: Any) -> DataFrame:
    """Read stores as a DataFrame, with the options of the data source `rocketmq`.

    From Spark 4.0 on, the function calls ``spark.read.format("rocketmq")``, which also works with
    Spark Connect. Spark 3.5 has no data sources in Python. With Spark 3.5, the driver plans the
    tasks during this call, and Spark's mapInArrow runs the tasks. Options that are lists or
    mappings are passed as JSON.

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
    if isinstance(value, str | int | PurePath):
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
        raise MissingExtra(
            "read on Spark 3.5 uses mapInArrow, which needs the package pandas: pip install "
            "'logquarry[spark]'"
        )
    context = context_of(spark)
    use_this_python(context)
    options = _parsed(given)
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
