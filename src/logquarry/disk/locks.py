"""Who may make something in a folder that is no store: a lock on the folder itself.

Nothing is left of it, in the folder or elsewhere, and it goes with its process. A store has a lock
of its own (:mod:`logquarry.disk.locks`), which Java knows.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.disk.lifetime import abandon_in_children
from logquarry.errors import StoreUnavailable
from logquarry.log.layout import ABORT, LOCK

AT_WORK: Final = "a salvage or rebuild is at work there"


def lock_folder(folder: str | os.PathLike[str], at_work: str = AT_WORK) -> int | None:
    """A lock on a folder, held until the descriptor is closed; None where there are no locks.

    Args:
        folder: the folder.
        at_work: what is said of it if somebody has the lock.

    Raises:
        FileNotFoundError: if it is not there, or went while this waited for nobody.
        StoreUnavailable: if somebody has the lock.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have put another folder in its place since it was opened.
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):  # noqa: PTH116
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise StoreUnavailable(f"{os.fsdecode(folder)}: {at_work}") from None
        except FileNotFoundError:
            os.close(descriptor)
            raise
        except OSError:
            # Not every file system that is mounted has locks.
            os.close(descriptor)
            return None
        os.close(descriptor)


@contextmanager
def alone_in(disk: Disk, folder: Path) -> Iterator[None]:
    """Make a folder, and have it for oneself for as long as the block takes.

    Raises:
        StoreUnavailable: if somebody else is at work there, or it cannot be made.
    """
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
            # Who made it, and had nothing to leave in it, took it away again.
            continue
        except OSError as error:
            raise disk.refused(folder, error) from error
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


# --------------------------------------------------------------------------------------------------
# Who may write a store: ``lock``, and ``abort``, which tells whether the last one closed it.
#
# The lock is one on byte 0 of ``lock``, which excludes Java's ``tryLock(0, 1)`` and is excluded by
# it. It belongs to the open file (``F_OFD_SETLK``): a second opener in the same process is refused
# too, and closing some other descriptor of the file does not drop it, as with plain ``lockf``.
#
# It is taken before anything of the store is read. (Java takes it only after its recovery has
# acted: reliability.md, rule 1.)

_CONTENT: Final = b"lock"
_HELD: Final = frozenset({errno.EAGAIN, errno.EACCES})
# struct flock on Linux: type, whence, start, length, pid.
_BYTE_0: Final = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
_PROC: Final = Path("/proc")


class StoreLock:
    """The lock of a store, taken.

    Raises:
        StoreUnavailable: if somebody holds it, by pid where that can be told; or if there is no
            lock to be had. Nothing has been changed then.
    """

    def __init__(self, disk: Disk, root: Path) -> None:
        self.path = root / LOCK
        self._disk = disk
        existed = self.path.exists()
        try:
            self._descriptor = disk.open(self.path, create=True)
        except OSError as error:
            raise disk.refused(self.path, error) from error
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
            # What Java's start() writes. Nobody reads it.
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
        """Whether the lock is still held, by this process."""
        return self._descriptor >= 0

    def release(self) -> None:
        """Let others open the store; once more does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.let_go(descriptor)

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.disk.lifetime`. The parent keeps the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class AbortFile:
    """The file that is there while a store is open.

    Who finds it at opening knows that the last one did not close the store, and recovers. So it
    is made before anything is changed, and taken away after all is flushed, both durably.
    """

    def __init__(self, disk: Disk, root: Path) -> None:
        self.path = root / ABORT
        self._disk = disk

    @property
    def exists(self) -> bool:
        """Whether it is there."""
        return self.path.exists()

    def make(self) -> None:
        """Make it; nothing happens if it is there.

        Raises:
            StoreUnavailable: if that failed: then nothing of the store may be changed.
        """
        try:
            self._disk.let_go(self._disk.open(self.path, create=True))
        except OSError as error:
            raise self._disk.refused(self.path, error) from error
        self._disk.sync_names(self.path.parent)

    def remove(self) -> None:
        """Take it away: the store is closed in order.

        Raises:
            StoreUnavailable: if that failed, or the store is poisoned: the next opening recovers.
        """
        self._disk.health.require_writable()
        self._disk.remove(self.path)


def _take(descriptor: int) -> None:
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        # Where there is no such lock (macOS), one of the process is better than none.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
    else:
        fcntl.fcntl(descriptor, command, _BYTE_0)


def _holders(descriptor: int) -> list[int]:
    """The processes that hold a lock on a file, as far as this one may look at them.

    A lock of an open file names no pid, but the process that has the file open tells that the
    file is locked: ``lock: 1: OFDLCK ADVISORY WRITE ...`` in /proc/PID/fdinfo/FD.
    """
    wanted = os.fstat(descriptor)
    found = []
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(_is_locked_by(process, name, wanted) for name in os.listdir(process / "fd")):  # noqa: PTH208
                found.append(int(process.name))
    return sorted(found)


def _is_locked_by(process: Path, name: str, wanted: os.stat_result) -> bool:
    try:
        status = (process / "fd" / name).stat()
        if (status.st_dev, status.st_ino) != (wanted.st_dev, wanted.st_ino):
            return False
        return "lock:" in (process / "fdinfo" / name).read_text()
    except OSError:
        # Closed since, or a file that is on no disk.
        return False
