"""A thread of the store that does something now and then (``ServiceThread``).

:meth:`Service.run_once` is the work, and can be called without any thread. The thread is a daemon:
the interpreter's end waits for none of them, but stops them through the store's close
(:mod:`logquarry.store.disk.lifetime`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.health import Health
from logquarry.store.disk.signal_flag import Flag

logger = logging.getLogger(__name__)

Clock = Callable[[], int]
"""Milliseconds; only differences count."""


def monotonic_ms() -> int:
    """The clock of intervals and timeouts, which nobody sets."""
    return time.monotonic_ns() // 1_000_000


class Service(ABC):
    """Something that runs at an interval, or when it is woken.

    Args:
        name: the thread's name.
        health: of the store. Poisoned, the service ends; and if its work fails with anything but
            StoreUnavailable, which is a bug, it poisons the store: nobody would do the work.
        interval_ms: pause between two runs; None to run only when woken.
        is_timed: whether :meth:`wakeup` is not to cut the pause short.
    """

    def __init__(
        self, name: str, health: Health, *, interval_ms: int | None, is_timed: bool = False
    ) -> None:
        self.name = name
        self.health = health
        self.interval_ms = interval_ms
        self.is_timed = is_timed
        self._wake = Flag()
        self._is_stopping = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"logquarry-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def wakeup(self) -> None:
        """Run soon, and not only after the interval."""
        if not self.is_timed:
            self._wake.set()

    @property
    def flag(self) -> Flag | None:
        """What :meth:`wakeup` sets, None where it does nothing."""
        return None if self.is_timed else self._wake

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the run that is going on and a last one; whether it has ended in time.

        Does nothing in a forked child, where the thread never was.
        """
        if self._process != os.getpid():
            return True
        self._is_stopping = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("%s has not ended in %s s", self.name, timeout_s)
                return False
        return True

    @property
    def is_current(self) -> bool:
        """Whether the caller is this service's own thread."""
        return self._thread is threading.current_thread()

    @property
    def is_stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._is_stopping

    @abstractmethod
    def run_once(self) -> None:
        """Do the work that is due."""

    def run_last(self) -> None:  # noqa: B027
        """Do what remains when the service is stopped."""

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                pause = self.interval_ms
                self._wake.take(None if pause is None else pause / 1000)
                if not self._is_stopping:
                    self.run_once()
            self.run_last()
        except StoreUnavailable as error:
            logger.error("%s ended: %s", self.name, error)
        except BaseException as error:
            logger.exception("%s failed", self.name)
            self.health.poison(f"{self.name} failed: {error!r}")
        finally:
            self.ended()

    def ended(self) -> None:  # noqa: B027
        """Called in the thread when it ends, for whatever reason."""
