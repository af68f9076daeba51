"""A variant of PySpark's daemon, which forks the workers.

This variant prints no traceback if the JVM closes a worker's connection.

The setting ``spark.python.daemon.module`` makes Spark run this module. The Python processes that
plan a read ignore the setting: see :mod:`pyspark_logquarry`.
"""

from __future__ import annotations

from pyspark import daemon

from logquarry.spark.worker import ignore_hang_ups

if __name__ == "__main__":
    ignore_hang_ups()
    daemon.manager()
