"""The daemon that forks Spark's Python workers: PySpark's, with fewer tracebacks.

It prints no traceback when the JVM closes a worker's connection.

Spark runs it as a module, by the setting ``spark.python.daemon.module``. The processes that plan
for Spark ignore that setting and use PySpark's daemon: see :mod:`pyspark_logquarry`.
"""

from __future__ import annotations

from pyspark import daemon

from logquarry.spark.worker import ignore_hang_ups

if __name__ == "__main__":
    ignore_hang_ups()
    daemon.manager()
