"""A clear error for Python workers that cannot import this package.

Spark pickles the readers and writers for the workers. Without the package a worker fails while it
unpickles them, with a traceback that names a module and no setting.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any


def _by_value() -> Callable[[bytes], Any]:
    """Return a function that Spark pickles by value, because it is inside another function."""

    def load(data: bytes) -> Any:
        import pickle
        import sys

        try:
            import logquarry.spark.worker  # noqa: F401
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
    """Base of the objects that Spark sends to the workers; needs Spark's own pickler."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (pickle.dumps((type(self), self.__dict__)),)
