"""Replaces system calls for reading a store that macOS or Windows does not have.

Reading works on all three. Writing needs Linux or macOS: see :func:`require_writing`.
"""

from __future__ import annotations

import os
from types import ModuleType

from logquarry.errors import StoreUnavailable

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:
    fcntl = None

# Without O_NONBLOCK, opening a pipe without a writer would block for ever. Without O_BINARY,
# Windows reads a file as text.
READ_ONLY = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
"""Flags of :func:`os.open` for reading a file of a store."""


def read_at(descriptor: int, length: int, position: int) -> bytes:
    """Read at a position. Raises OSError.

    Without ``pread`` it moves the descriptor: no other thread may use it.
    """
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.read(descriptor, length)


def next_data(descriptor: int, position: int) -> int:
    """The first place at or after ``position`` that may hold data. Raises OSError (ENXIO: none)."""
    if hasattr(os, "SEEK_DATA"):
        return os.lseek(descriptor, position, os.SEEK_DATA)
    return position


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether a process holds the lock that RocketMQ takes on a file; False if there is no file."""
    import struct

    try:
        descriptor = os.open(path, READ_ONLY)
    except OSError:
        return False
    command = getattr(fcntl, "F_OFD_GETLK", None)
    try:
        if fcntl is None:
            # On Windows a process cannot read the byte that another process has locked.
            read_at(descriptor, 1, 0)
            return False
        if command is None:
            return False
        # struct flock: type, whence, start, length, pid. Java's tryLock(0, 1) locks byte 0.
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        answer = fcntl.fcntl(descriptor, command, request)
        return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
    except OSError as error:
        return fcntl is None and isinstance(error, PermissionError)
    finally:
        os.close(descriptor)


def require_writing(place: str | os.PathLike[str]) -> None:
    """Refuse to write a store on Windows: its locks, renames and syncs differ, and are untested.

    Raises:
        StoreUnavailable: if this system cannot write stores.
    """
    if fcntl is None:
        raise StoreUnavailable(
            f"{os.fsdecode(place)}: this system can read stores, but not write them: it has no "
            "fcntl locks. Write on Linux or macOS"
        )
