"""What each put uses besides the frame: the log's lock, flags of other threads, latest names.

This module is compiled if possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from logquarry.write.put_result import PutResult

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython

if cython.compiled:
    from cython.cimports.cpython.exc import PyErr_CheckSignals
    from cython.cimports.cpython.pythread import (
        PyThread_allocate_lock,
        PyThread_free_lock,
        PyThread_release_lock,
    )

_RECENT: Final = 64


class LogLock:
    """Compiled: the log's lock. To take it costs a few instructions if no thread holds it.

    The lock is a number that the GIL protects. A thread that finds it taken waits at a gate, which
    is a lock of the system and usually closed. Each :meth:`release` opens the gate for one waiting
    thread, unless it is open already. A thread that passes the gate closes it, and tries again:
    another thread may have taken the lock first. As with a ``threading.Lock``, Ctrl-C can interrupt
    a thread that waits. The gate may then stay open; the next thread that waits passes it, and just
    tries once more.
    """

    _gate: Any
    _is_taken: bool
    _is_open: bool
    _waiting: int

    def __cinit__(self) -> None:
        """Make the lock; no thread holds it."""
        self._gate = PyThread_allocate_lock()
        if self._gate == cython.NULL or not acquire_lock(self._gate):
            raise MemoryError

    def __dealloc__(self) -> None:
        if self._gate != cython.NULL:
            PyThread_free_lock(self._gate)

    def take(self) -> None:
        """Take the lock, after a wait if necessary."""
        while self._is_taken:
            self._waiting += 1
            has_passed = acquire_lock(self._gate)
            self._waiting -= 1
            if has_passed:
                self._is_open = False
            else:
                # A signal interrupted the wait: its handler may raise.
                PyErr_CheckSignals()
        self._is_taken = True

    def release(self) -> None:
        """Release the lock; wake a thread that waits for it."""
        self._is_taken = False
        if self._waiting and not self._is_open:
            self._is_open = True
            PyThread_release_lock(self._gate)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.release()


class Wakes:
    """Settles puts in a store in which no put waits: it only sets the flags of other threads."""

    def __init__(self) -> None:
        # For each flag, its method is_unset, which each put calls, and the flag itself.
        self._tests_and_flags: tuple[Any, ...] = ()

    def use(self, flags: Iterable[Any]) -> None:
        """Set these flags from now on."""
        # Replace all at once: a put in another thread must find the old flags or the new ones.
        pairs = [(flag.is_unset, flag) for flag in flags]
        self._tests_and_flags = tuple(itertools.chain(*pairs))

    def __call__(self, result: PutResult, wait: bool) -> PutResult:
        """See :data:`~logquarry.write.frame_append.Settle`."""
        self.wake()
        return result

    def wake(self) -> None:
        """Set the flags that are not set."""
        # Usually the flag is set already; checking it costs less than setting it.
        found = self._tests_and_flags
        for number in range(0, len(found), 2):
            if found[number]():
                found[number + 1].set()


class Recent:
    """Compiled: a cache of values by name, which compares the identity of name objects.

    A program usually has one object for a topic's name. To compare identities takes a tenth of the
    time of a dictionary's lookup.
    """

    def __init__(self) -> None:
        self.names: list[str | None] = [None] * _RECENT
        self.values: list[Any] = [None] * _RECENT

    def get(self, name: str) -> Any:
        """The value of a name; None if it is not known."""
        at = recent_place(name)
        return self.values[at] if self.names[at] is name else None

    def put(self, name: str, value: Any) -> None:
        """Store the value of a name."""
        at = recent_place(name)
        self.names[at], self.values[at] = name, value
