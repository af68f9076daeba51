"""Hides how operating systems differ in file access, locks, cache folders and interrupts.

Stores can be read on Linux, macOS and Windows, but written only on Linux and macOS.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from logquarry.errors import LIMITS, StoreUnavailable

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:
    fcntl = None
resource: ModuleType | None
try:
    import resource
except ImportError:
    resource = None

_TYPE_AT = 20
"""Position of the lock's type in the bytes that :func:`lock_request` returns on macOS."""

# Without O_NONBLOCK, opening a pipe without a writer blocks forever. Without O_BINARY, Windows
# reads a file as text.
READ_ONLY = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
"""Flags of :func:`os.open` for reading a file of a store."""


@contextmanager
def opened(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or folder for a ``with`` block, and yield its descriptor."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_path(path: str | os.PathLike[str]) -> None:
    """Sync the bytes of a file, or the names in a folder."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a small file whole.

    ``Path.read_bytes`` blocks at a FIFO, and never ends at a device like /dev/zero.

    Raises:
        OSError: if the path is not a regular file, or if the file cannot be read or does not fit
            into memory.
    """
    with opened(path, READ_ONLY) as descriptor:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "not a regular file", os.fspath(path))
        try:
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        except (MemoryError, OverflowError):
            raise OSError(errno.ENOMEM, "too large for the memory", os.fspath(path)) from None


def folders_below(
    folder: str | os.PathLike[str], unreadable: Callable[[Path, OSError], object]
) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and all folders below it, each with the names of its files.

    The function skips missing folders, and does not follow links to folders, like ``os.walk``.
    Before Python 3.12, ``os.walk`` and ``Path.rglob`` fail with RecursionError at a thousand nested
    folders.

    Args:
        unreadable: called with each folder that cannot be listed, and the error. If ``unreadable``
            raises no exception, the folder is skipped.
    """
    waiting = [Path(folder)]
    while waiting:
        one = waiting.pop()
        try:
            with os.scandir(one) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            unreadable(one, error)
            continue
        waiting += [one / entry.name for entry in found if entry.is_dir(follow_symlinks=False)]
        # If links form a circle, DirEntry.is_dir raises OSError, so call Path.is_dir, which returns
        # False.
        yield one, [entry.name for entry in found if not Path(entry).is_dir()]


def read_at(descriptor: int, length: int, position: int) -> bytes:
    """Read from a file at a position; raises OSError.

    On systems without ``pread`` (Windows), the call moves the descriptor's file position, so no
    other thread may use the descriptor at the same time.
    """
    if hasattr(os, "pread"):
        return os.pread(descriptor, length, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.read(descriptor, length)


def next_data(descriptor: int, position: int) -> int:
    """Return the next position that may have data; raise OSError (ENXIO) if no data follows."""
    if hasattr(os, "SEEK_DATA"):
        return os.lseek(descriptor, position, os.SEEK_DATA)
    return position


def lock_request(kind: int) -> bytes:
    """Return a ``struct flock`` for byte 0, the byte that Java's ``tryLock(0, 1)`` locks."""
    # The order of the fields in Linux: type, whence, start, length, pid. In macOS and FreeBSD:
    # start, length, pid, type, whence. FreeBSD also has sysid at the end.
    return (
        struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0)
        if sys.platform == "linux"
        else struct.pack("qqihhi4x", 0, 1, 0, kind, os.SEEK_SET, 0)
    )


_PROC: Final = Path("/proc")
_MARK_TRIES: Final = 20
_MARK_PAUSE: Final = 0.02

_locking = threading.RLock()
_locked_here: Final[dict[int, tuple[int, int]]] = {}
"""Descriptor -> device and inode number of each lock file that this process has locked."""


@contextmanager
def lock_file(path: str | os.PathLike[str]) -> Iterator[bool]:
    """Let one thread at a time use a lock file; yield whether this process has locked the file.

    On macOS, a lock belongs to a process, and ends when the process closes any descriptor of the
    file. So if this process has locked the file, the caller must not open it.
    """
    with _locking:
        try:
            found = os.stat(path)  # noqa: PTH116 - the path may be of type bytes
        except OSError:
            yield False
        else:
            yield (found.st_dev, found.st_ino) in _locked_here.values()


def take_lock(descriptor: int) -> None:
    """Lock a file inside :func:`lock_file`. Raises OSError if another process has locked it."""
    assert fcntl is not None, "require_writing passed"
    command = getattr(fcntl, "F_OFD_SETLK", None)
    if command is None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0, os.SEEK_SET)
    else:
        fcntl.fcntl(descriptor, command, lock_request(fcntl.F_WRLCK))
    found = os.fstat(descriptor)
    _locked_here[descriptor] = found.st_dev, found.st_ino


def end_lock(descriptor: int) -> None:
    """Release a lock that this process has taken, before its descriptor is closed.

    Closing the descriptor would release the lock too. But if Ctrl-C interrupts the closing, the
    descriptor can stay open.
    """
    assert fcntl is not None, "require_writing passed"
    command = getattr(fcntl, "F_OFD_SETLK", None)
    with suppress(OSError):
        if command is None:
            fcntl.lockf(descriptor, fcntl.LOCK_UN, 1, 0, os.SEEK_SET)
        else:
            fcntl.fcntl(descriptor, command, lock_request(fcntl.F_UNLCK))
    _locked_here.pop(descriptor, None)


def _forget_all() -> None:
    # This is a forked child. The file locks stay with the parent. At the fork, another thread of
    # the parent may have held `_locking`. No thread here would release it, so make a new lock.
    global _locking  # noqa: PLW0603 - the one lock of the process
    _locking = threading.RLock()
    _locked_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether a process holds RocketMQ's lock on a file, or has marked the file's folder.

    The mark (:class:`FolderMark`) shows an open store even if its lock file was deleted. Raises
    OSError if the answer is unknown, because this process may not open the file or the folder.
    """
    with lock_file(path) as is_ours:
        return is_ours or _is_locked_elsewhere(path) or is_marked(os.path.dirname(path))  # noqa: PTH120


class FolderMark:
    """Marks a store's folder as open for writing until :meth:`close` is called or the process ends.

    If a user deletes the file ``lock`` of an open store, another process can create and lock a new
    file of this name. The mark is a shared lock on the folder itself, so it does not depend on
    files. RocketMQ does not know the mark. Only Linux has the necessary locks (``F_OFD_SETLK``).
    On other systems, and on file systems that cannot lock folders, the mark has no effect.
    """

    def __init__(self) -> None:
        self._descriptor = -1

    def make(self, folder: str | os.PathLike[str]) -> None:
        """Make the mark. Raises BlockingIOError if another descriptor has marked the folder."""
        command = getattr(fcntl, "F_OFD_SETLK", None)
        if fcntl is None or command is None:
            return
        try:
            self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.fcntl(self._descriptor, command, lock_request(fcntl.F_RDLCK))
            for _ in range(_MARK_TRIES):
                if not _is_locked_for(self._descriptor):
                    return
                # When a process is killed, the system closes its lock file first and its folder
                # slightly later. So wait for the old mark to disappear.
                time.sleep(_MARK_PAUSE)
        except OSError:
            self.close()
            return
        self.close()
        raise BlockingIOError(errno.EAGAIN, "marked by another process", os.fspath(folder))

    def close(self) -> None:
        """Remove the mark."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def is_marked(folder: str | os.PathLike[str]) -> bool:
    """Return whether a process of this machine has marked a folder; raises as `is_locked`."""
    found = False
    if getattr(fcntl, "F_OFD_GETLK", None) is not None:
        with _permitted(), opened(folder or ".", os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            found = _is_locked_for(descriptor)
    return found


@contextmanager
def _permitted() -> Iterator[None]:
    """Suppress an OSError, except that of a permission or limit: it shows nothing about a lock."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno in LIMITS:
            raise


def _is_locked_for(descriptor: int) -> bool:
    """Return whether another descriptor holds any lock on the same file or folder."""
    assert fcntl is not None
    command = getattr(fcntl, "F_OFD_GETLK", getattr(fcntl, "F_GETLK", None))
    if command is None:
        return False
    answer = fcntl.fcntl(descriptor, command, lock_request(fcntl.F_WRLCK))
    at = 0 if sys.platform == "linux" else _TYPE_AT
    return bool(struct.unpack_from("h", answer, at)[0] != fcntl.F_UNLCK)


def folder_holders(folder: Path) -> list[int]:
    """Return the ids of the processes that have marked a folder; empty if they are unknown."""
    with suppress(OSError), opened(folder, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        return lock_holders(descriptor)
    return []


def lock_holders(descriptor: int) -> list[int]:
    """Return the ids of the processes that hold a lock on a file, as /proc reports them."""
    wanted = os.fstat(descriptor)
    found = []
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            if any(_is_locked_by(process, name, wanted) for name in os.listdir(process / "fd")):  # noqa: PTH208
                found.append(int(process.name))
    return sorted(found)


def _is_locked_by(process: Path, name: str, wanted: os.stat_result) -> bool:
    # If a descriptor holds a lock, its file /proc/PID/fdinfo/FD has a line ``lock: ...``.
    try:
        is_same = os.path.samestat((process / "fd" / name).stat(), wanted)
        return is_same and "lock:" in (process / "fdinfo" / name).read_text()
    except OSError:
        # The process may have closed the descriptor.
        return False


def _is_locked_elsewhere(path: str | os.PathLike[str]) -> bool:
    with _permitted(), opened(path, READ_ONLY) as descriptor:
        if fcntl is not None:
            return _is_locked_for(descriptor)
        try:
            # On Windows, a process fails to read a byte that another process has locked.
            read_at(descriptor, 1, 0)
        except PermissionError:
            return True
    return False


def file_limit() -> int:
    """Return how many files and sockets this process may have open."""
    if resource is None:
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else int(soft)


def raise_file_limit() -> None:
    """Let this process open as many files and sockets as the system allows."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # macOS can refuse a soft limit as high as the hard limit. Then the old limit stays.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_writing(place: str | os.PathLike[str]) -> None:
    """Raise StoreUnavailable on Windows: its locks, renames and syncs are untested."""
    if fcntl is None:
        raise StoreUnavailable(
            f"{os.fsdecode(place)}: this system can read stores, but not write them: it has no "
            "fcntl locks. Write on Linux or macOS"
        )


def cache_folders(environ: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Yield candidate folders for caches (the Java shim, compiled kernels), best first.

    The first is LOGQUARRY_CACHE_DIR, or else ``logquarry`` in XDG_CACHE_HOME or in ~/.cache. This
    folder can be missing, read-only or mounted noexec. The last is a temporary folder of this user.
    """
    environ = os.environ if environ is None else environ
    own, xdg = environ.get("LOGQUARRY_CACHE_DIR"), environ.get("XDG_CACHE_HOME")
    if own:
        yield Path(own).absolute()
    elif xdg and Path(xdg).is_absolute():  # the XDG specification ignores relative paths
        yield Path(xdg) / "logquarry"
    else:
        # Without a home, Path.expanduser raises an error.
        home = Path(environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111
        if home.is_absolute():
            yield home / ".cache" / "logquarry"
    yield _temporary_folder()


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Create and return the first writable folder of `cache_folders`; raises OSError."""
    reason: OSError | None = None
    try:
        for folder in cache_folders(environ):
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                if os.access(folder, os.W_OK | os.X_OK):
                    return folder
    except OSError as error:
        reason = error
    raise PermissionError(
        errno.EACCES, "no folder for caches can be written: set LOGQUARRY_CACHE_DIR"
    ) from reason


def _temporary_folder() -> Path:
    # Any user can write to /tmp, and can predict this folder's name. Programs are run from the
    # folder, so reject it if another user owns it or can write to it.
    parent = tempfile.gettempdir()
    if not hasattr(os, "getuid"):  # Windows
        return _folder_of_this_process(parent)
    folder = Path(parent) / f"logquarry-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if stat.S_ISDIR(status.st_mode) and ours and os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError:
        pass
    return _folder_of_this_process(parent)


@cache
def _folder_of_this_process(parent: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="logquarry-", dir=parent))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    # Compare the process id: a forked child must not delete the folder of its parent.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Held:
    """Holds back one interrupt (Ctrl-C, SIGTERM, SIGHUP) until the program calls :meth:`check`, or
    until the ``with`` block of :func:`held` ends. A second interrupt takes effect at once, except a
    SIGHUP: a terminal that closes can send SIGHUP twice, and systemd can send it after SIGTERM.

    Three parts of logquarry hold back interrupts, for these reasons:

    - An import must report exactly how many messages it has put.
    - py4j has one connection per thread. An exception inside a call leaves the call's answer in the
      connection, and the next call fails or hangs.
    - An export that stopped early would leave only some of its files in place.

    Attributes:
        when_noted: called in the main thread when a signal arrives and is held back.
    """

    def __init__(self) -> None:
        self.when_noted: Callable[[], object] | None = None
        self._before: dict[int, Any] = {}
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: int | None = None

    def hold(self) -> None:
        """Start to hold signals back. In any thread but the main thread, the call does nothing."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            self._before[number] = handler
            # A signal that is ignored, or that has the system's default action, is not held back.
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Restore the signal handlers that were set before :meth:`hold` was called, even if the
        program has set other handlers since then.
        """
        for number, handler in self._before.items():
            if handler is not None:
                signal.signal(number, handler)

    def check(self) -> None:
        """Run the handler of a signal that arrived; usually the handler raises an exception."""
        if self._came is not None:
            number, self._came = self._came, None
            self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            if number == getattr(signal, "SIGHUP", None):
                return
            # If a second signal arrives, run its handler at once.
            self._handlers[number](number, frame)
        self._came = number
        if self.when_noted is not None:
            self.when_noted()


@contextmanager
def held() -> Iterator[Held]:
    """Hold back interrupts until the block ends, or until the block calls :meth:`Held.check`."""
    waiting = Held()
    waiting.hold()
    try:
        yield waiting
    finally:
        waiting.release()
        waiting.check()
