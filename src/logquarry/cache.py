"""Folders in which this package keeps files between runs: the Java shim, compiled kernels.

A cache folder may be deleted at any time; the next run then takes a moment longer.
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
    """Candidate folders, best first; the caller takes the first that it can use.

    The first candidate is LOGQUARRY_CACHE_DIR, else logquarry/ under XDG_CACHE_HOME, else
    ~/.cache/logquarry. It may be missing, read-only or mounted noexec. The second candidate is a
    temporary folder that only this user can write; it is created when the iterator reaches it.
    """
    environ = os.environ if environ is None else environ
    own, xdg = environ.get("LOGQUARRY_CACHE_DIR"), environ.get("XDG_CACHE_HOME")
    if own:
        yield Path(own).absolute()
    elif xdg and Path(xdg).is_absolute():  # the XDG specification ignores relative paths
        yield Path(xdg) / "logquarry"
    else:
        home = Path(environ.get("HOME") or "~").expanduser()
        if home.is_absolute():
            yield home / ".cache" / "logquarry"
    yield _temporary_folder()


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The first writable folder of `cache_folders`; it exists on return.

    Raises:
        OSError: if not even a temporary folder can be created.
    """
    return next(folder for folder in cache_folders(environ) if _made(folder))


def _made(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _temporary_folder() -> Path:
    """A folder below the system's temporary folder; the same folder on each run if that is safe.

    Its name is predictable and any user can write to /tmp. Programs are run from the folder, so a
    folder that another user created or may write to is not used.
    """
    parent = tempfile.gettempdir()
    if not hasattr(os, "getuid"):  # Windows
        return _folder_of_this_process(parent)
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
    # A forked child exits too, while its parent still uses the folder.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
