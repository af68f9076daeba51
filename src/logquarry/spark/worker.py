"""What Spark's Python workers do besides the work itself."""

from __future__ import annotations

import gc
import os
import sys
from typing import TextIO

_MARKS = (
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_SOCK_PATH",
    "PYTHON_WORKER_FACTORY_SOCK_DIR",
)


def in_worker() -> bool:
    """Whether this is a process that Spark started to run Python in."""
    return any(name in os.environ for name in _MARKS)


_tasks = 0
_LOADING = 3
"""The first tasks of a worker load what it runs on; those after them add next to nothing."""


def settle() -> None:
    """At the start of a task: have what a worker has loaded by now stay out of garbage collection.

    PySpark collects all garbage after each task, for which Python walks every object of numba,
    pyarrow and PySpark: 60 ms a task, a fifth of what 128 MiB of log take to decode.
    """
    global _tasks  # noqa: PLW0603
    if in_worker() and _tasks < _LOADING:
        from logquarry.log import codec

        codec.kernels()
        gc.freeze()
        _tasks += 1


class HungUpIsNoNews:
    """A stream for errors that leaves out how PySpark's daemon ends a worker without a socket.

    The JVM closes the socket of a worker that was idle for a minute, and of one whose rows it has
    enough of (a limit, ``show()``). Nothing is wrong then, yet the worker finds a broken pipe on
    its way out, and PySpark's daemon prints a traceback of it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, unless the daemon is about to end for a connection that is gone."""
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError) and error.__traceback__ is not None:
            outermost = error.__traceback__.tb_frame.f_code
            if outermost.co_name == "manager" and outermost.co_filename.endswith("daemon.py"):
                return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def let_hang_up() -> None:
    """Within a worker: say nothing from now on of a JVM that closed the connection."""
    if in_worker() and not isinstance(sys.stderr, HungUpIsNoNews):
        sys.stderr = HungUpIsNoNews(sys.stderr)
