"""Where this package may keep files between runs: the Java shim, compiled kernels.

Nothing in a cache folder is needed: losing it costs a moment on the next run.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
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
    """The first of `cache_folders` that can be written to; it exists on return."""
    folders = list(cache_folders(environ))
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return folders[-1]


def _temporary_folder() -> Path:
    """A folder under the system's temporary one; the same on each run where that is safe.

    Its name can be guessed and /tmp is everyone's, so one that another user made, or may write to,
    is left alone: programs are run from here.
    """
    folder = Path(tempfile.gettempdir()) / f"logquarry-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if stat.S_ISDIR(status.st_mode) and ours:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="logquarry-"))
