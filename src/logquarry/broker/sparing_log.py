"""Limits how many lines a client can cause in the log."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from typing import Final

from logquarry.text import counted

_INTERVAL_SECONDS: Final = 10.0
_MOST_LINES: Final = 5


class SparingLog:
    """Logs at most 5 lines in 10 seconds.

    Before the next line, it logs how many lines it left out. Thread-safe.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._until = 0.0
        self._lines = 0
        self._lock = threading.Lock()

    def warning(self, message: str, *values: object) -> None:
        """Log one line, or count it as left out."""
        now, left_out = time.monotonic(), 0
        with self._lock:
            if now >= self._until:
                left_out = max(0, self._lines - _MOST_LINES)
                self._until, self._lines = now + _INTERVAL_SECONDS, 0
            self._lines += 1
            is_logged = self._lines <= _MOST_LINES
        if left_out:
            lines = counted(left_out, "similar line was", "similar lines were")
            self._logger.warning("%s left out", lines)
        if is_logged:
            self._logger.warning(message, *values)


def line_of(error: BaseException) -> str:
    """Format an exception as one line, with the file and line at which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{error!r}{where}"
