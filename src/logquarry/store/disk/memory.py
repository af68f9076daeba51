"""Pages of a map: brought into memory, and kept there. All of it as far as the system lets.

Through the C library, whose calls release the GIL; those of ``mmap`` objects do not, and filling
a gigabyte takes a fifth of a second.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any, Final

_POPULATE_WRITE: Final = 23
_STEP: Final = 8 << 20


def address_of(mapped: mmap.mmap) -> int:
    """Where a writable map begins. Keeps nothing alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def populate(address: int, size: int) -> bool:
    """Bring pages into memory, writable (``MADV_POPULATE_WRITE``, Linux 5.14)."""
    # In steps: one call over a gigabyte holds the lock of the process' memory for long.
    return all(
        _call("madvise", address + at, min(_STEP, size - at), _POPULATE_WRITE)
        for at in range(0, size, _STEP)
    )


def lock(address: int, size: int) -> bool:
    """Keep pages in memory; False where the limit of locked memory does not let it."""
    return _call("mlock", address, size)


def unlock(address: int, size: int) -> bool:
    """Let the system have the pages when it wants them."""
    return _call("munlock", address, size)


def leave_mapped(mapped: mmap.mmap) -> None:
    """Never unmap a map: in a forked child something else may lie at its place by then."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))


def _call(name: str, address: int, size: int, *more: int) -> bool:
    function = getattr(_libc(), name, None)
    if function is None:
        return False
    return bool(function(ctypes.c_void_p(address), ctypes.c_size_t(size), *more) == 0)


@cache
def _libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
