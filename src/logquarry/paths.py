"""Looks up local paths. Unlike the methods of ``Path`` since Python 3.14, these functions raise an
error if the disk fails, so an unreadable path does not look missing.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

ABSENT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Error numbers for a path that does not exist, or for a link without a target."""


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether a path exists. Raises OSError if the disk fails or a folder forbids the lookup."""
    return mode_of(path) != 0


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a regular file; see :func:`exists`."""
    return stat.S_ISREG(mode_of(path))


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder; see :func:`exists`."""
    return stat.S_ISDIR(mode_of(path))


def is_link(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a symbolic link; see :func:`exists`."""
    return stat.S_ISLNK(mode_of(path, follows=False))


def mode_of(path: str | os.PathLike[str], *, follows: bool = True) -> int:
    """Return the mode of a path; 0 if the path is missing. With ``follows``, the mode of a link is
    the mode of its target. See :func:`exists`.
    """
    try:
        return os.stat(path, follow_symlinks=follows).st_mode  # noqa: PTH116
    except ValueError:
        # No file can have this name.
        return 0
    except OSError as error:
        if error.errno in ABSENT:
            return 0
        raise
