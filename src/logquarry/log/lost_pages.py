"""Keeps SIGBUS from ending the process if the disk does not deliver a page of a watched map.

Compiled by Cython (``lost_pages.pxd`` has the handler). If this module runs interpreted, it watches
no map, and the process touches no page of a map: readers copy their windows
(:class:`logquarry.log.readable.ReadableMap`), writers call ``pwrite``
(:class:`logquarry.disk.write_buffers.FileCopy`).

A page of a map can fail after it was probed: the page cache drops it and the disk fails when it is
read again, another program truncates the file, or a written page finds no block on a full disk.
The handler puts a page of ``FILL`` in place of such a page and notes its number; the access
continues. After each read, :mod:`logquarry.log.readable` checks whether a page was lost.

The handler is installed with the first map. If another handler took its place, such as that of
``faulthandler``, the next map installs it again. It replaces pages of watched maps only. For every
other address, for a signal that a process sent, and for misaligned accesses it calls the handler
that was there before. With ``LOGQUARRY_SIGBUS=off`` no handler is installed. Set this if another
library in the process, such as a Java virtual machine, must be the only one to handle SIGBUS.
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
    """Watch a map until :func:`forget`; returns its number, -1 if it is not watched.

    Args:
        mapped: the map.
        in_children: whether forked children have the map too.
    """
    if not cython.compiled or not _IS_ON:
        return -1
    with memoryview(mapped) as view:
        number: int = c_watch(PyMemoryView_GET_BUFFER(view).buf, view.nbytes, in_children)
    return number


def forget(number: int) -> None:
    """Stop watching a map; it is unmapped afterwards."""
    if cython.compiled:
        c_forget(number)


def lost() -> int:
    """How often this process has lost a page of a map, or found a truncated file."""
    return c_total() if cython.compiled else _noted


def note_truncated() -> None:
    """Count a truncated file in :func:`lost`, because the rest of its last page became zeros."""
    global _noted  # noqa: PLW0603 - the one count of the process
    if cython.compiled:
        c_note()
    else:
        _noted += 1


def next_lost(number: int, block: int) -> int:
    """The first lost block of a watched map at or after ``block``; -1 if there is none.

    A block has 4,096 bytes.
    """
    return c_next(number, block) if cython.compiled else -1
