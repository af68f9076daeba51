"""What Spark starts its Python workers from: PySpark's daemon, silent about a JVM that hung up.

The JVM closes the socket of a worker that was idle for a minute, and of one whose rows it has
enough of (a limit, ``show()``). Nothing is wrong then, yet the worker finds a broken pipe on its
way out and prints a traceback. Run as a module, by the setting ``spark.python.daemon.module``.
"""

from __future__ import annotations

import sys
from typing import TextIO

from pyspark import daemon


class HungUpIsNoNews:
    """A stream for errors that leaves out what is written while a broken pipe is handled."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, unless a BrokenPipeError is being handled."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.stderr = HungUpIsNoNews(sys.stderr)
    daemon.manager()
