"""What Spark's Python workers do besides the work itself."""

from __future__ import annotations

import gc
import os
import sys

_MARKS = (
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_SOCK_PATH",
    "PYTHON_WORKER_FACTORY_SOCK_DIR",
)


def in_worker() -> bool:
    """Whether this is a process that Spark started to run Python in."""
    return any(name in os.environ for name in _MARKS)


def settle() -> None:
    """At the start of a task: have what a worker has loaded by now stay out of garbage collection.

    PySpark collects all garbage after each task, for which Python walks every object of numba,
    pyarrow and PySpark: 60 ms a task, a fifth of what 128 MiB of log take to decode.
    """
    if in_worker() and not gc.get_freeze_count():
        from logquarry.scan import codec

        codec.kernels()
        gc.freeze()


def hush() -> None:
    """Say nothing more on stderr: this process is about to end, and not for a fault of its own."""
    if in_worker():
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
