"""Holds back interrupts (Ctrl-C, SIGTERM) until a point at which they are safe.

An import reports exactly how many messages it has put. py4j has one connection per thread: an
exception inside a call leaves that call's answer in the connection, and the next call then fails
or hangs. And an export should not stop while its files are half in place.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Held:
    """Signals that arrived while :func:`held` held them back.

    Attributes:
        when_noted: called in the main thread when a signal is held back.
    """

    def __init__(self) -> None:
        self.when_noted: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: int | None = None

    def hold(self) -> None:
        """Start to hold signals back. Has an effect only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            self._before[number] = handler
            # Ignored signals, and those with the default action, keep their effect.
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Restore the previous handlers, also over handlers set meanwhile."""
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)

    def check(self) -> None:
        """Run the handler of a signal that arrived; usually that raises."""
        if self._came is not None:
            number, self._came = self._came, None
            self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            # A second signal is not held back.
            self._handlers[number](number, frame)
        self._came = number
        if self.when_noted is not None:
            self.when_noted()


@contextmanager
def held() -> Iterator[Held]:
    """Hold interrupts back until the end of the block, or until :meth:`Held.check` in it."""
    waiting = Held()
    waiting.hold()
    try:
        yield waiting
    finally:
        waiting.release()
        waiting.check()
