"""Sessions and reads: a Spark session with the source `rocketmq`, and DataFrames by one call.

Makes a Spark session with the data source `rocketmq`; the machine needs no setup for Spark.

Imports pyspark only inside functions, so importing this module is cheap.

Reads stores as a DataFrame by one call that is the same on each version of Spark.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from logquarry.errors import UsageError
from logquarry.spark.columns import checked, has_sources, struct_of, task_rows
from logquarry.spark.java import launch_environment
from logquarry.spark.jobs import context_of
from logquarry.spark.option_names import FORMAT
from logquarry.spark.options import parse_read_options
from logquarry.spark.tasks import plan_tasks
from logquarry.spark.worker import Packaged

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_checked: set[str] = set()
"""Interpreters that `check_python` accepted."""

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Timestamps are instants: in UTC the same rows print the same on every machine.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}

# Unix sockets between workers and the JVM cost the kernel half as much as TCP and open no port. If
# the JVM closes a connection, the worker gets a broken pipe; our daemon does not print that error.
_WORKERS = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "logquarry.spark.daemon",
}

# The host's own name often resolves to an address on which no process listens. A local driver does
# not need an address that other machines reach.
_LOOPBACK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def get_session(
    master: str = "local[*]",
    app_name: str = "logquarry",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the running session, or make one; register the source `rocketmq` in it.

    A new session uses: a Java that runs Spark (see `logquarry.spark.java`), this interpreter for
    the Python workers, UTC, Arrow between Python and the JVM, no web UI and a quiet log. `config`
    overrides these settings. A running session keeps its settings and takes from `config` the
    settings that can change at run time. Under spark-submit, spark-submit sets master and Java.

    Raises:
        JavaNotFound: if a new session is needed and there is no Java >= 17.
    """
    # First: without PySpark its error names the extra.
    from logquarry.spark.columns import has_sources  # isort: skip
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # Not getActiveSession: the active session differs by thread.
    running = SparkContext._active_spark_context is not None
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    local = master.startswith("local")

    options: dict[str, str] = {}
    if not running:
        options |= _DEFAULTS | {"spark.app.name": app_name}
        if not submitted:
            options |= {"spark.master": master} | (_LOOPBACK | _WORKERS if local else {})
    options |= config or {}

    builder = SparkSession.builder
    for key, value in options.items():
        builder = builder.config(key, value)
    if running:
        session = builder.getOrCreate()
    else:
        _set_python(override=local and not submitted)
        with nullcontext() if submitted else launch_environment(options):
            session = builder.getOrCreate()
    if has_sources():
        register(session)
    return session


def register(spark: SparkSession) -> None:
    """Register the source `rocketmq` in `spark`; a second call changes nothing.

    Raises:
        UsageError: if this PySpark has no data sources in Python (3.5 has none), or if `spark` is
            not a session.
    """
    from logquarry.spark.columns import require_sources

    require_sources()
    if not hasattr(spark, "dataSource"):
        raise UsageError(
            f"register takes a SparkSession, not {type(spark).__name__}: make one with "
            "SparkSession.builder.getOrCreate(), or with logquarry.spark.get_session()"
        )
    from logquarry.spark.source import RocketMQDataSource

    context = getattr(spark, "_sc", None)
    if context is not None:
        use_this_python(context)
    spark.dataSource.register(RocketMQDataSource)


def use_this_python(context: SparkContext) -> None:
    """On a local master, make the Python workers run this interpreter, unless the user chose one.

    Without a setting PySpark starts the first python3 on PATH, also if the driver runs in a virtual
    environment that is not activated.
    """
    is_chosen = os.environ.get("PYSPARK_PYTHON") or context.getConf().get("spark.pyspark.python")
    if (context.master or "").startswith("local") and not is_chosen:
        context.pythonExec = sys.executable
    check_python(context.pythonExec)


def check_python(executable: str) -> None:
    """Check that the Python that Spark starts on this machine can import this package.

    Raises:
        UsageError: if it cannot, or has another version than this Python.
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
        "folder that only sys.path names must be in PYTHONPATH"
    )


def _set_python(*, override: bool) -> None:
    """Make the Python workers run this interpreter.

    By default they run the first python3 on PATH, which may lack this package or have another
    version. On a cluster the interpreter's path may differ, so there the user's setting stays.
    """
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        if override or not os.environ.get(name):
            os.environ[name] = sys.executable


logger = logging.getLogger(__name__)

Path = str | os.PathLike[str]


def read(spark: SparkSession, path: Path | Sequence[Path], **options: Any) -> DataFrame:
    """Read stores as a DataFrame, with the options of the source `rocketmq`.

    From Spark 4.0 on this is ``spark.read.format("rocketmq")``. On Spark 3.5, which has no data
    sources in Python, the driver plans the same tasks immediately, and mapInArrow reads them.

    Args:
        spark: a session; of Spark Connect only from Spark 4.0 on.
        path: path, URL or glob of stores, or several.
        options: options of the source; a list or mapping is passed as JSON.

    Raises:
        UsageError: if an option is unknown or has an invalid value; on Spark 4 Spark wraps it.
        StoreNotFound: if a path is not a store; on Spark 4 Spark wraps it.
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
    # One task in each partition; a read without tasks has one partition without rows.
    spread = context.parallelize(tasks, max(1, len(tasks)))
    return spark.createDataFrame(spread, "task binary").mapInArrow(_Read(struct), struct)


class _Read(Packaged):
    """The function of mapInArrow, in the workers."""

    def __init__(self, struct: StructType) -> None:
        self._struct = struct

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0):
                yield from task_rows(pickle.loads(task.as_py()), self._struct)
