"""Something that one thread waits for and another says, whatever a signal interrupts.

``threading.Event`` is written in Python: Ctrl-C in the middle of it leaves its lock taken, and the
other thread waits for ever. A bare lock is taken and let go in one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Flag:
    """Set by some threads, and taken away by the one that waits for it.

    Attributes:
        is_unset: whether it is not set; for those to whom a call of :meth:`set` is too much.
    """

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._free.acquire()
        self.is_unset: Callable[[], bool] = self._free.locked

    def set(self) -> None:
        """Set it; once more changes nothing."""
        try:
            if self._free.locked():
                self._free.release()
        except RuntimeError:
            # Another thread was quicker.
            pass

    def take(self, timeout_s: float | None = None) -> bool:
        """Wait until it is set, and take it away; whether it was set in time."""
        return self._free.acquire(timeout=-1 if timeout_s is None else timeout_s)


class Done:
    """Set once, for good."""

    def __init__(self) -> None:
        self._is_set = False
        self._free = threading.Lock()
        self._free.acquire()

    def set(self) -> None:
        """Set it; only one thread may."""
        if not self._is_set:
            self._is_set = True
            self._free.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set; whether it is."""
        if not self._is_set and self._free.acquire(timeout=timeout_s):
            # For the others who wait.
            self._free.release()
        return self._is_set
