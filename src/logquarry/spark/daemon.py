"""The daemon that forks Spark's Python workers: PySpark's daemon with fewer tracebacks.

Unlike PySpark's daemon, it prints no traceback when the JVM closes a worker's connection.

Spark runs this module if the setting ``spark.python.daemon.module`` names it. The Python processes
in which Spark plans a read ignore that setting and use PySpark's daemon: see
:mod:`pyspark_logquarry`.
"""

from __future__ import annotations

from pyspark import daemon

from logquarry.spark.worker import ignore_hang_ups

if __name__ == "__main__":
    ignore_hang_ups()
    daemon.manager()
