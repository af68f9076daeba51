"""What Spark starts its Python workers from: PySpark's daemon, silent about a JVM that hung up.

Run as a module, by the setting ``spark.python.daemon.module``. Processes that plan for Spark are
started from PySpark's own daemon whatever is set: see :mod:`pyspark_logquarry`.
"""

from __future__ import annotations

from pyspark import daemon

from logquarry.spark.worker import let_hang_up

if __name__ == "__main__":
    let_hang_up()
    daemon.manager()
