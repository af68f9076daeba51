"""Three parts that each put uses: the log's lock, the wake-ups of other threads, and a cache of
names. The module is compiled if possible.
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
    from logquarry import compiled as cython

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

    The flag ``_is_taken``, which the GIL protects, shows whether the lock is taken. A thread that
    finds the flag set waits for a system lock. This lock is called the gate, and it is normally
    taken. :meth:`release` clears the flag, and releases the gate if a thread waits. One waiting
    thread then takes the gate, and checks the flag again. If Ctrl-C interrupts a waiting thread,
    the gate may stay released. This does no harm: the next waiting thread takes the gate at once,
    and checks the flag one more time.
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
    """Wakes other threads after a put, by setting their flags. This class is used in stores whose
    puts do not wait for flush or replica.
    """

    def __init__(self) -> None:
        self._tests_and_flags: tuple[Any, ...] = ()

    def use(self, flags: Iterable[Any]) -> None:
        """Replace the flags that each put sets."""
        # Replace the tuple in one step, because another thread may read it at the same time.
        pairs = [(flag.is_unset, flag) for flag in flags]
        self._tests_and_flags = tuple(itertools.chain(*pairs))

    def __call__(self, result: PutResult, wait: bool) -> PutResult:
        """See :data:`~logquarry.write.frame_append.Settle`."""
        self.wake()
        return result

    def wake(self) -> None:
        """Set the flags that are not set."""
        # Usually a flag is already set, and checking it takes less time than setting it again.
        found = self._tests_and_flags
        for number in range(0, len(found), 2):
            if found[number]():
                found[number + 1].set()


class Recent:
    """Compiled: a small cache from names to values. A name is found only if it is the same object
    as the stored name.

    A search in the cache takes a tenth of the time of a dictionary lookup.
    """

    def __init__(self) -> None:
        self.names: list[str | None] = [None] * _RECENT
        self.values: list[Any] = [None] * _RECENT

    def get(self, name: str) -> Any:
        """Return the value of a name; None if the cache does not have the name."""
        at = recent_place(name)
        return self.values[at] if self.names[at] is name else None

    def put(self, name: str, value: Any) -> None:
        """Store the value of a name."""
        at = recent_place(name)
        self.names[at], self.values[at] = name, value
