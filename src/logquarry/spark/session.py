"""Sessions that know the data source `rocketmq`, on a machine where nothing was set up for Spark.

pyspark is imported where it is used: importing this module costs nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from logquarry.spark.java import launch_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Store and born timestamps are instants: the same rows print the same everywhere.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}

# Between workers and the JVM: half of what TCP costs the kernel, and no port on the machine. A
# worker that the JVM hangs up on then finds a broken pipe, which our daemon does not print.
_WORKERS = {
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "logquarry.spark.daemon",
}

# The host's own name often resolves to an address that nobody listens on, and such a driver needs
# none that others can reach.
_LOOPBACK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def get_session(
    master: str = "local[*]",
    app_name: str = "logquarry",
    config: Mapping[str, str] | None = None,
) -> SparkSession:
    """The running session, or a new one; the source `rocketmq` is registered in it.

    A new session gets a Java (see `logquarry.spark.java`), this interpreter for its Python workers,
    UTC as its time zone, Arrow between Python and the JVM, no web page and a quiet log, and what
    `logquarry.spark.java` tells the JVM. `config` is laid over that. A session that runs already
    keeps what it has, and takes of `config` what can change at run time. Under spark-submit, master
    and Java are those of spark-submit.

    Raises:
        JavaNotFound: a new session is needed and there is no Java >= 17.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # getActiveSession would not do: a session is active by thread.
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
    register(session)
    return session


def register(spark: SparkSession) -> None:
    """Makes the source `rocketmq` known to `spark`; doing it again is harmless."""
    from logquarry.spark.source import RocketMQDataSource

    spark.dataSource.register(RocketMQDataSource)


def _set_python(*, override: bool) -> None:
    """Has the Python workers run this interpreter.

    They would take the first python3 on PATH, which need not have this package, nor the driver's
    version. On a cluster the path may be another one, so there a setting of the user's is kept.
    """
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        if override or not os.environ.get(name):
            os.environ[name] = sys.executable
