"""The log's lock, the wake-ups and the name cache of each put. Compiled if possible."""

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
    """Compiled: the log's lock. If no thread holds the lock, taking it costs a few instructions.

    The GIL protects the flag ``_is_taken``. If the flag is set, a thread waits for the gate, a
    system lock that is usually taken. Each :meth:`release` releases the gate for one waiting
    thread, which takes the gate and tries again. If Ctrl-C interrupts a waiting thread, the gate
    may stay released, and the next waiting thread only tries once more.
    """

    _gate: Any
    _is_taken: bool
    _is_open: bool
    _waiting: int

    def __cinit__(self) -> None:
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
                # A signal interrupted the wait. The signal's handler may raise an exception.
                PyErr_CheckSignals()
        self._is_taken = True

    def release(self) -> None:
        """Release the lock; wake a waiting thread."""
        self._is_taken = False
        if self._waiting and not self._is_open:
            self._is_open = True
            PyThread_release_lock(self._gate)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *error: object) -> None:
        self.release()


class Wakes:
    """Settles puts in a store whose puts do not wait: sets the flags of other threads."""

    def __init__(self) -> None:
        self._tests_and_flags: tuple[Any, ...] = ()

    def use(self, flags: Iterable[Any]) -> None:
        """Set these flags from now on."""
        # Replace all flags at once, because another thread may read the flags at the same time.
        pairs = [(flag.is_unset, flag) for flag in flags]
        self._tests_and_flags = tuple(itertools.chain(*pairs))

    def __call__(self, result: PutResult, wait: bool) -> PutResult:
        """See :data:`~logquarry.write.frame_append.Settle`."""
        self.wake()
        return result

    def wake(self) -> None:
        """Set the flags that are not set."""
        # Usually the flag is already set, and a check costs less than setting the flag.
        found = self._tests_and_flags
        for number in range(0, len(found), 2):
            if found[number]():
                found[number + 1].set()


class Recent:
    """Compiled: a cache of values by name. Names are compared by identity.

    Comparing identities takes a tenth of the time of a dictionary lookup.
    """

    def __init__(self) -> None:
        self.names: list[str | None] = [None] * _RECENT
        self.values: list[Any] = [None] * _RECENT

    def get(self, name: str) -> Any:
        """Return the value of a name; None if the cache has no value."""
        at = recent_place(name)
        return self.values[at] if self.names[at] is name else None

    def put(self, name: str, value: Any) -> None:
        """Store the value of a name."""
        at = recent_place(name)
        self.names[at], self.values[at] = name, value
