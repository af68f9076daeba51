"""Keeps SIGBUS from ending the process if the disk does not deliver a page of a watched map.

A page can fail after its probe: the page cache drops the page and the disk fails later, another
program truncates the file, or a full disk has no block for a written page. The handler replaces
such a page by a page of ``FILL``, and notes the page's number. The access then continues. After
each read, :mod:`logquarry.log.readable` checks whether a page was lost.

Cython compiles this module; ``lost_pages.pxd`` has the handler. If this module runs interpreted, no
map is watched, and the process touches no page of a map. Readers then copy their windows
(:class:`logquarry.log.readable.ReadableMap`), and writers call ``pwrite``
(:class:`logquarry.disk.write_buffers.FileCopy`).

If another handler, for example of ``faulthandler``, has replaced this handler, the next watched map
installs this handler again. The handler calls the earlier handler for other addresses, for signals
that a process sent, and for misaligned accesses. ``LOGQUARRY_SIGBUS=off`` prevents the
installation, for example if a Java virtual machine in this process must handle SIGBUS.
"""

from __future__ import annotations

import mmap
from typing import Final

from logquarry.compiled import is_switched_off

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython

if cython.compiled:
    from cython.cimports.cpython.memoryview import PyMemoryView_GET_BUFFER

SWITCH: Final = "LOGQUARRY_SIGBUS"
_IS_ON: Final = not is_switched_off(SWITCH)

_noted = 0


def watch(mapped: mmap.mmap, in_children: bool) -> int:
    """Watch a map until :func:`forget`. Return its number, -1 if the map is not watched."""
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
    """Count a truncated file in :func:`lost`, because the rest of its last page became zeros."""
    global _noted  # noqa: PLW0603 - the one count of the process
    if cython.compiled:
        c_note()
    else:
        _noted += 1


def next_lost(number: int, block: int) -> int:
    """Return the first lost block (4,096 bytes) of a map from ``block`` on; -1 if there is none."""
    return c_next(number, block) if cython.compiled else -1
