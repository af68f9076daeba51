"""A variant of PySpark's daemon, which forks the workers.

This variant imports the modules of the workers once, before it forks, and prints no traceback if
the JVM closes a worker's connection.

The setting ``spark.python.daemon.module`` makes Spark run this module. The Python processes that
plan a read ignore the setting: see :mod:`pyspark_logquarry`.
"""

from __future__ import annotations

import gc
import os

from pyspark import daemon

from logquarry.spark.worker import ignore_hang_ups


def load_worker_modules() -> None:
    """Import the modules that a worker needs, except modules that start a thread.

    Spark starts a new worker after an error or an idle minute. Without this call, each worker
    spends most of its first second on these imports. Threads do not survive a fork, so this call
    leaves out pyarrow, whose allocator has a thread. NumPy's OpenBLAS starts threads unless Spark
    has set OMP_NUM_THREADS to 1.
    """
    if os.environ.get("OMP_NUM_THREADS") != "1":
        return
    import pyspark.worker  # noqa: F401

    from logquarry.log import codec, walk  # noqa: F401

    codec.kernels()
    # Freeze all objects, so that garbage collection in a worker does not write to the memory that
    # the processes share: Linux would copy this memory.
    gc.freeze()


if __name__ == "__main__":
    ignore_hang_ups()
    load_worker_modules()
    daemon.manager()
