"""Handles Ctrl-C: prints one line on stderr, and ends the process with exit code 130. Defines the
exception for SIGTERM and SIGHUP.

Before a command runs, Ctrl-C ends the process at once, because a KeyboardInterrupt during the
import of a Python module would print a traceback. While a command runs, Ctrl-C raises
KeyboardInterrupt, so that the command removes its unfinished output. Until this module has
installed its handler, Ctrl-C prints a traceback. So the package imports few modules before this
one.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

# Type checkers treat a variable named TYPE_CHECKING as true. An import of TYPE_CHECKING from typing
# would delay the start.
TYPE_CHECKING = False

if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import Any, Final
else:
    # The built-in module `_signal` has the same functions as `signal`, and its import is faster.
    import _signal as signal

_LINE: Final = b"error: interrupted\n"
_INTERRUPTED: Final = 130
_PAUSE: Final = 0.01
"""If Python could not raise an interrupt, the interrupt is raised again after this many seconds."""


class _Arrived:
    yes = False


class Terminated(SystemExit):
    """The exception for SIGTERM and SIGHUP."""


def has_arrived() -> bool:
    """Return whether Ctrl-C was pressed while a command ran."""
    return _Arrived.yes


def end_at_once() -> None:
    """Make Ctrl-C end the process, unless the program was started with SIGINT ignored."""
    sys.unraisablehook = _unraisable
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


class raising:  # noqa: N801 - used as a context manager; contextlib takes longer to import
    """Context manager: makes Ctrl-C raise KeyboardInterrupt, if :func:`end_at_once` was called."""

    def __enter__(self) -> None:
        self._is_ours = signal.getsignal(signal.SIGINT) is _end
        if self._is_ours:
            signal.signal(signal.SIGINT, _raise)

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    if not _Arrived.yes:
        os.write(2, _LINE)
    os._exit(_INTERRUPTED)


def _raise(number: int, frame: FrameType | None) -> None:
    _Arrived.yes = True
    raise KeyboardInterrupt


def _unraisable(unraisable: Any, /) -> None:
    # Python calls this hook for an exception that it cannot raise, for example in a destructor.
    # For a lost Terminated, send SIGTERM even if SIGHUP was the cause: the handler of SIGHUP raises
    # only once.
    for lost, number in ((KeyboardInterrupt, signal.SIGINT), (Terminated, signal.SIGTERM)):
        if unraisable.exc_type is lost:
            # Raise the lost exception again. In this hook, Python would ignore the exception too,
            # so another thread interrupts the main thread a moment later.
            _thread.start_new_thread(_again, (number,))
            return
    sys.__unraisablehook__(unraisable)


def _again(number: signal.Signals) -> None:
    time.sleep(_PAUSE)
    _thread.interrupt_main(number)
