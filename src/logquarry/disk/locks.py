"""Locks on a store (``lock`` and ``abort``), and on a folder that is not a store yet.

A folder lock leaves no file, and ends with its process. A store lock also excludes a RocketMQ
broker.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.disk.service import abandon_in_children
from logquarry.errors import StoreUnavailable
from logquarry.log.store_files import ABORT, LOCK
from logquarry.systems import fcntl, lock_request, read_file, require_writing

AT_WORK: Final = "a salvage or rebuild is at work there"


def lock_folder(folder: str | os.PathLike[str], at_work: str = AT_WORK) -> int | None:
    """Lock a folder until the returned descriptor is closed; None if locks are not supported.

    Raises FileNotFoundError if the folder does not exist, and StoreUnavailable with the text
    ``at_work`` if another process holds the lock.
    """
    if fcntl is None:
        return None
    while True:
        with contextlib.ExitStack() as opened:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another process may have replaced the folder after it was opened.
                if os.path.samestat(os.fstat(descriptor), os.stat(folder)):  # noqa: PTH116
                    opened.pop_all()
                    return descriptor
            except BlockingIOError:
                raise StoreUnavailable(f"{os.fsdecode(folder)}: {at_work}") from None
            except FileNotFoundError:
                raise
            except OSError:
                # Some file systems do not support locks.
                return None


@contextmanager
def alone_in(disk: Disk, folder: Path) -> Iterator[None]:
    """Create a folder if it is missing, and lock the folder until the block ends. Raises
    StoreUnavailable for a locked folder.
    """
    require_writing(folder)
    while True:
        is_new = not folder.exists()
        try:
            disk.make_folders(folder)
        except BaseException:
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
            raise
        try:
            descriptor = lock_folder(folder)
            break
        except FileNotFoundError:
            # Another process removed the folder again, because it was empty.
            continue
        except OSError as error:
            raise disk.refused(folder, error) from error
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# The lock of a store, and ``abort``, which shows whether the store was shut down cleanly
#
# Like Java's ``tryLock(0, 1)``, the lock covers byte 0 of the file ``lock``. The lock belongs to
# the open file (``F_OFD_SETLK``), so it also excludes a second opener in this process. ``lockf``
# would release the lock if this process closes any descriptor of the file.
#
# A writer takes the lock before reading the store. Java takes the lock after its recovery.

_CONTENT: Final = b"lock"
_HELD: Final = frozenset({errno.EAGAIN, errno.EACCES})
_PROC: Final = Path("/proc")


def is_lockable(root: Path) -> bool:
    """Whether a store already has the lock's file, so that taking the lock changes no file."""
    try:
        return read_file(root / LOCK) == _CONTENT
    except OSError:
        return False


class StoreLock:
    """The lock of a store. The constructor takes the lock, or raises StoreUnavailable."""

    def __init__(self, disk: Disk, root: Path) -> None:
        require_writing(root)
        self.path = root / LOCK
        self._disk = disk
        existed = self.path.exists()
        if existed and not self.path.is_file() and not self.path.is_dir():
            # A device can be opened and locked, but stores no bytes.
            raise StoreUnavailable(f"{self.path}: it is not a plain file: move it out of the store")
        with disk.refusing(self.path):
            self._descriptor = disk.open(self.path, create=True)
        try:
            _take(self._descriptor)
        except OSError as error:
            holders = _holders(self._descriptor) if error.errno in _HELD else []
            disk.let_go(self._descriptor)
            if error.errno not in _HELD:
                raise disk.refused(self.path, error) from error
            by = f" (process {', '.join(map(str, holders))})" if holders else ""
            raise StoreUnavailable(
                f"{root}: the store is open in another program{by}, which holds {self.path.name}"
            ) from error
        try:
            if not existed:
                disk.sync_names(root)
            # Java's start() writes these bytes, but no program reads them.
            if disk.read(self._descriptor, len(_CONTENT), 0) != _CONTENT:
                disk.write_all(self._descriptor, _CONTENT, 0)
        except OSError as error:
            self.release()
            raise disk.refused(self.path, error) from error
        except StoreUnavailable:
            self.release()
            raise
        abandon_in_children(self)

    @property
    def is_held(self) -> bool:
        """Whether this process still holds the lock."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.let_go(descriptor)

    def abandon_in_child(self) -> None:
        """Close the lock's descriptor in a forked child. The parent keeps the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class AbortFile:
    """The file ``abort``, which exists while a store is open.

    If the file exists at an opening, the store was not shut down cleanly. So a writer durably
    creates the file before any change, and durably deletes the file after the last flush.
    """

    def __init__(self, disk: Disk, root: Path) -> None:
        self.path = root / ABORT
        self._disk = disk

    @property
    def exists(self) -> bool:
        """Whether the file exists."""
        return self.path.exists()

    def make(self) -> None:
        """Create the file, if it does not exist. After a failure, do not change the store."""
        with self._disk.refusing(self.path):
            self._disk.let_go(self._disk.open(self.path, create=True))
        self._disk.sync_names(self.path.parent)

    def remove(self) -> None:
        """Delete the file. Raises StoreUnavailable if the store is poisoned and needs recovery."""
        self._disk.health.require_writable()
        self._disk.remove(self.path)


def _take(descriptor: int) -> None:
    assert fcntl is not None, "require_writing passed"
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        # macOS has no locks of open files, only locks of processes.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
    else:
        fcntl.fcntl(descriptor, command, lock_request(fcntl.F_WRLCK))


def _holders(descriptor: int) -> list[int]:
    """Return the processes with a lock on a file: /proc/PID/fdinfo/FD has a line ``lock: ...``."""
    wanted = os.fstat(descriptor)
    found = []
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(_is_locked_by(process, name, wanted) for name in os.listdir(process / "fd")):  # noqa: PTH208
                found.append(int(process.name))
    return sorted(found)


def _is_locked_by(process: Path, name: str, wanted: os.stat_result) -> bool:
    try:
        is_same = os.path.samestat((process / "fd" / name).stat(), wanted)
        return is_same and "lock:" in (process / "fdinfo" / name).read_text()
    except OSError:
        # The process may have closed the descriptor.
        return False
