"""Handles Ctrl-C: at any moment it prints one line on stderr, and the exit code is 130.

Before a command runs, there is nothing to clean up. So the first handler ends the process at once,
even during imports, when a KeyboardInterrupt would print a traceback. While a command runs, Ctrl-C
raises KeyboardInterrupt, so that the command removes its unfinished output. The handler is not
installed yet while Python starts and imports the package, so Ctrl-C still prints a traceback then.
To keep this time short, the package imports little.
"""

from __future__ import annotations

import _thread
import os
import sys
import time

# Type checkers treat this name as true. It is not imported from typing, because this would delay
# the start.
TYPE_CHECKING = False

if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import Any, Final
else:
    # `_signal` has the same functions as `signal`, but is imported faster. During an import, Ctrl-C
    # would print a traceback.
    import _signal as signal

_LINE: Final = b"error: interrupted\n"
_INTERRUPTED: Final = 130
_PAUSE: Final = 0.01
"""Seconds after which an interrupt is repeated."""


class _Arrived:
    """Whether Ctrl-C was pressed while a command ran."""

    yes = False


def has_arrived() -> bool:
    """Whether Ctrl-C was pressed while a command ran."""
    return _Arrived.yes


def end_at_once() -> None:
    """From now on, let Ctrl-C end the process. Changes nothing if the caller ignores Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
        sys.unraisablehook = _unraisable


class raising:  # noqa: N801 - used as a context manager; contextlib takes longer to import
    """Let Ctrl-C raise KeyboardInterrupt in the block, if :func:`end_at_once` was called before."""

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
    """Repeat an interrupt that Python could not raise where it arrived, such as in a destructor."""
    if unraisable.exc_type is KeyboardInterrupt:
        # Another thread must raise it, because Python would ignore it again here.
        _thread.start_new_thread(_again, ())
        return
    sys.__unraisablehook__(unraisable)


def _again() -> None:
    time.sleep(_PAUSE)
    _thread.interrupt_main()
