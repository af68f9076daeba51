"""Interrupts (Ctrl-C, SIGTERM) that wait for a moment when they break nothing.

An import says exactly how many messages it has put. py4j has one connection a thread: an exception
in the middle of a call leaves the answer of that call in it, which the next one takes for its own:
it fails with a page of Python, or waits for ever. And files of an export that are half in place are
better put in place whole.
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
    """Signals that came while :func:`held` had them wait."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: int | None = None

    def hold(self) -> None:
        """Have them wait from here on. Only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            self._before[number] = handler
            # What is ignored, or ends the process at once, does so as before.
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Have the handlers back that were there before, also where somebody has set others."""
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)

    def check(self) -> None:
        """Do now what a signal that has come asks for: mostly, raise."""
        if self._came is not None:
            number, self._came = self._came, None
            self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            # Whoever asks twice means it.
            self._handlers[number](number, frame)
        self._came = number


@contextmanager
def held() -> Iterator[Held]:
    """Have interrupts wait for the end of the block, or for :meth:`Held.check` within it."""
    waiting = Held()
    waiting.hold()
    try:
        yield waiting
    finally:
        waiting.release()
        waiting.check()
