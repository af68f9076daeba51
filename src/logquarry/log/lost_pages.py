"""Handles SIGBUS, so that an unreadable page of a watched map does not end the process.

Readers probe a page before they use it, but the page can fail later:

- The page cache drops the page, and the disk does not deliver it again.
- Another program truncates the file.
- The disk is full when a page is written.

The handler replaces such a page by a page of ``FILL``, and records the page's number. The read or
write that caused the signal then continues. After each read, :mod:`logquarry.log.readable` checks
whether a page was lost.

Cython compiles this module; ``lost_pages.pxd`` has the handler. If this module runs interpreted,
there is no handler, so no map is watched, and the process must not touch the pages of a map.
Readers then copy their windows (:class:`logquarry.log.readable.ReadableMap`), and writers call
``pwrite`` (:class:`logquarry.disk.write_buffers.FileCopy`).

If another handler, for example that of ``faulthandler``, has replaced this handler, the next call
of :func:`watch` installs this handler again. When this handler is installed, it keeps the earlier
handler. It passes a signal to the earlier handler in three cases: the address is in no watched map,
a process sent the signal, or the access was misaligned. ``LOGQUARRY_SIGBUS=off`` prevents the
installation, for example if a Java virtual machine in this process must handle SIGBUS.
"""

from __future__ import annotations

import mmap
from typing import Final

from logquarry.compiled import is_switched_off

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.memoryview import PyMemoryView_GET_BUFFER

SWITCH: Final = "LOGQUARRY_SIGBUS"
_IS_ON: Final = not is_switched_off(SWITCH)

_noted = 0


def watch(mapped: mmap.mmap, in_children: bool) -> int:
    """Watch a map until :func:`forget`. Return the number by which other functions identify the
    map; -1 if the map is not watched.
    """
    if not cython.compiled or not _IS_ON:
        return -1
    with memoryview(mapped) as view:
        number: int = c_watch(PyMemoryView_GET_BUFFER(view).buf, view.nbytes, in_children)
    return number


def forget(number: int) -> None:
    """Stop watching a map that is being closed."""
    if cython.compiled:
        c_forget(number)


def lost() -> int:
    """Return how often this process lost a page of a map, or found a truncated file."""
    return c_total() if cython.compiled else _noted


def note_truncated() -> None:
    """Add 1 to the count of :func:`lost` for a truncated file. The rest of the file's last page
    reads as zeros, without a signal.
    """
    global _noted  # noqa: PLW0603 - the one count of the process
    if cython.compiled:
        c_note()
    else:
        _noted += 1


def next_lost(number: int, block: int) -> int:
    """Return the first lost block (4,096 bytes) of a map at or after ``block``; -1 if there is
    none.
    """
    return c_next(number, block) if cython.compiled else -1
