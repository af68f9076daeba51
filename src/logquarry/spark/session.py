"""Makes a Spark session with the data source `rocketmq`; the machine needs no setup for Spark.

Imports pyspark only inside functions, so importing this module is cheap.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from logquarry.errors import UsageError
from logquarry.spark.java import launch_environment

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

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
