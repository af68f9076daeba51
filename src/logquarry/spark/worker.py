"""Prepares Spark's Python workers: garbage collection, closed connections, tracebacks.

Keep the imports of this module few, because two other processes import it too: PySpark's daemon,
and PySpark's search for data sources (`pyspark_logquarry`).
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from logquarry.errors import LogquarryError

# PySpark sets one of these variables in each Python process that it starts.
_MARKS = (
    "PYTHON_WORKER_FACTORY_SECRET",
    "PYTHON_WORKER_FACTORY_SOCK_PATH",
    "PYTHON_WORKER_FACTORY_SOCK_DIR",
)


def in_worker() -> bool:
    """Return whether Spark started this process to run Python code."""
    return any(name in os.environ for name in _MARKS)


_tasks = 0
_modules = 0
_LOADING = 3
"""Number of a worker's first tasks in which the worker always calls :func:`gc.freeze`. In a later
task, the worker calls it only if modules were imported since the last call. Without an import, a
task creates few objects that live long.
"""


def settle() -> None:
    """Exclude all existing objects from garbage collection. Call this function at the start of each
    task. The call has an effect only in the worker's first tasks, and after a task that imported
    modules.

    PySpark collects garbage after each task. Visiting every object of numba, pyarrow and PySpark
    takes 60 ms, a fifth of the time to decode 128 MiB of log.
    """
    global _tasks, _modules  # noqa: PLW0603
    if in_worker() and (_tasks < _LOADING or len(sys.modules) > _modules):
        from logquarry.log import codec

        codec.kernels()
        gc.freeze()
        _tasks += 1
        _modules = len(sys.modules)


class QuietErrors:
    """An error stream that drops a worker's traceback if the JVM closed the worker's connection.

    The JVM closes a connection after an idle minute, or when the query needs no more rows. When
    such a worker exits, its write to the connection fails with a broken pipe, and PySpark's daemon
    prints a traceback.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, except while PySpark's daemon reports a closed connection."""
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError) and error.__traceback__ is not None:
            outermost = error.__traceback__.tb_frame.f_code
            if outermost.co_name == "manager" and outermost.co_filename.endswith("daemon.py"):
                return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def ignore_hang_ups() -> None:
    """In a worker, drop the traceback that PySpark prints when the JVM closes the connection."""
    if in_worker() and not isinstance(sys.stderr, QuietErrors):
        sys.stderr = QuietErrors(sys.stderr)


_HIDE = "SPARK_HIDE_TRACEBACK"


@contextmanager
def without_traceback() -> Iterator[None]:
    """In a worker, report a LogquarryError without traceback; see also :func:`ignore_hang_ups`."""
    ignore_hang_ups()
    try:
        yield
    except LogquarryError:
        # PySpark checks this variable when it reports the exception, just before the process ends.
        if in_worker():
            os.environ[_HIDE] = "1"
        raise


def _by_value() -> Callable[[bytes], Any]:
    """Return a nested function, which Spark pickles by value.

    If a worker cannot import logquarry, it can still run the function. The function then raises an
    error that names the setting to change. If Spark pickled the function by name, the error would
    only name the missing module.
    """

    def load(data: bytes) -> Any:
        import pickle
        import sys

        try:
            import logquarry.spark.worker  # noqa: F401, PLW0406
        except ImportError as error:
            raise ImportError(
                f"the Python of Spark's workers, {sys.executable}, cannot import logquarry "
                f"({error}): install it there (pip install 'logquarry[spark]'), or set "
                "PYSPARK_PYTHON or spark.pyspark.python to a Python that has it"
            ) from None
        kind, state = pickle.loads(data)
        made = kind.__new__(kind)
        made.__dict__.update(state)
        return made

    return load


_load = _by_value()


class Packaged:
    """Base of the objects that Spark sends to the workers; only Spark's pickler can pickle them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (pickle.dumps((type(self), self.__dict__)),)
