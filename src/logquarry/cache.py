"""Where this package may keep files between runs: the Java shim, compiled kernels.

Nothing in a cache folder is needed: losing it costs a moment on the next run.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path


def cache_folders(environ: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Folders to try, best first; the caller takes the first one that does what it needs.

    The first is LOGQUARRY_CACHE_DIR, else logquarry/ under XDG_CACHE_HOME, else
    ~/.cache/logquarry. It may not exist, not be writable or not allow execution. Then comes a
    folder for temporary files, made when it is asked for, that belongs to this user alone.
    """
    environ = os.environ if environ is None else environ
    own, xdg = environ.get("LOGQUARRY_CACHE_DIR"), environ.get("XDG_CACHE_HOME")
    if own:
        yield Path(own).absolute()
    elif xdg and Path(xdg).is_absolute():  # the XDG specification has relative ones ignored
        yield Path(xdg) / "logquarry"
    else:
        home = Path(environ.get("HOME") or "~").expanduser()
        if home.is_absolute():
            yield home / ".cache" / "logquarry"
    yield _temporary_folder()


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The first of `cache_folders` that can be written to; it exists on return.

    Raises:
        OSError: if not even a temporary folder can be made.
    """
    return next(folder for folder in cache_folders(environ) if _made(folder))


def _made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary_folder() -> Path:
    """A folder under the system's temporary one; the same on each run where that is safe.

    Its name can be guessed and /tmp is everyone's, so one that another user made, or may write to,
    is left alone: programs are run from here.
    """
    parent = tempfile.gettempdir()
    folder = Path(parent) / f"logquarry-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if stat.S_ISDIR(status.st_mode) and ours:
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
    # A forked child ends too, and its parent still works here.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
