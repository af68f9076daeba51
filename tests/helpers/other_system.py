"""Runs commands in a Python that looks like another system's: `SYSTEM [[WORD, ...], ...]`.

A simulation, not the system: it hides the modules, functions and constants that the other system
does not have, and makes `mmap.mmap` refuse the arguments that Windows does not know. Paths and the
behaviour of files stay those of this machine.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from typing import Any

WINDOWS_MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "syslog", "posix")
WINDOWS_OS = (
    "O_CLOEXEC", "O_DIRECTORY", "O_DSYNC", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "SEEK_DATA",
    "SEEK_HOLE", "chown", "fchdir", "fchmod", "fchown", "fdatasync", "fork", "geteuid", "getgid",
    "getloadavg", "getpgid", "getuid", "kill", "killpg", "lockf", "mkfifo", "nice", "posix_fadvise",
    "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "register_at_fork",
    "sched_getaffinity", "sched_yield", "sendfile", "statvfs", "fstatvfs", "sync", "sysconf",
    "uname", "waitpid",
)  # fmt: skip
MACOS_OS = ("fdatasync", "posix_fadvise", "posix_fallocate", "sched_getaffinity")
MACOS_MMAP = ("MADV_DONTFORK", "MADV_HUGEPAGE", "MAP_POPULATE")
# macOS has F_GETLK, but with a struct flock that the kernel of this machine does not know.
MACOS_FCNTL = ("F_GETLK", "F_OFD_GETLK", "F_OFD_SETLK", "F_OFD_SETLKW")


def _without(module: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def _hide(*names: str) -> None:
    for name in names:
        sys.modules[name] = None  # type: ignore[assignment]


class _WindowsMap(mmap.mmap):
    """A map that takes the arguments of Windows."""

    def __new__(
        cls,
        fileno: int,
        length: int,
        tagname: str | None = None,
        access: int = mmap.ACCESS_WRITE,
        offset: int = 0,
    ) -> _WindowsMap:
        """Map a file."""
        return super().__new__(cls, fileno, length, access=access, offset=offset)


def become(system: str) -> None:
    """Change this process; call it before anything of logquarry is imported."""
    # These are imported with this system's calls: the other system has its own implementation.
    import asyncio  # noqa: F401
    import multiprocessing  # noqa: F401
    import pathlib  # noqa: F401
    import pydoc  # noqa: F401
    import shutil  # noqa: F401
    import socket  # noqa: F401
    import subprocess  # noqa: F401
    import tempfile  # noqa: F401
    import uuid  # noqa: F401

    import click  # noqa: F401
    import numpy as np  # noqa: F401
    import pyarrow.fs  # noqa: F401

    sys.platform = system
    # PySpark looks for files of the build of the other system's Python.
    _hide("pyspark")
    if system == "win32":
        _hide(*WINDOWS_MODULES)
        _without(os, WINDOWS_OS)
        names = [n for n in dir(mmap) if n.startswith(("MADV_", "MAP_", "PROT_"))]
        _without(mmap, tuple(names))
        mmap.mmap = _WindowsMap  # type: ignore[assignment, misc]
        loaded = ctypes.CDLL

        def library(name: Any, *args: Any, **kwargs: Any) -> Any:
            if name is None:
                raise TypeError("bad argument type for built-in operation")
            return loaded(name, *args, **kwargs)

        ctypes.CDLL = library  # type: ignore[misc, assignment]
    else:
        import fcntl

        _without(os, MACOS_OS)
        _without(mmap, MACOS_MMAP)
        _without(fcntl, MACOS_FCNTL)


if __name__ == "__main__":
    become(sys.argv[1])
    from click.testing import CliRunner

    from logquarry.cli.main import app

    results = [CliRunner().invoke(app, words) for words in json.loads(sys.argv[2])]
    print(json.dumps([[r.exit_code, r.stdout, r.stderr, repr(r.exception)] for r in results]))
