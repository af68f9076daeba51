"""Looks up local paths. These functions raise an error if the disk fails, so an unreadable path
does not look missing. ``glob`` and the methods of ``Path`` since Python 3.14 hide the error.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
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


def matching(pattern: str) -> list[Path]:
    """Return the sorted paths that match a glob; ``**`` stands for any number of folders, or none.

    As in ``glob.glob``, wildcards do not match names that begin with a dot, and a pattern with a
    slash at its end matches only folders. Raises OSError if a folder cannot be listed.
    """
    path = Path(pattern)
    found = {Path(path.anchor)}
    for part in path.parts[bool(path.anchor) :]:
        found = {child for folder in found for child in _children(folder, part)}
    if pattern.endswith(("/", "/.")):
        found = {folder for folder in found if is_folder(folder)}
    return sorted(found)


def _children(folder: Path, part: str) -> Iterator[Path]:
    if not glob.has_magic(part):
        if mode_of(folder / part, follows=False):
            yield folder / part
    elif is_folder(folder):
        if part == "**":
            yield folder
        with os.scandir(folder) as entries:
            for entry in entries:
                child = folder / entry.name
                if entry.name.startswith(".") and not part.startswith("."):
                    continue
                if part != "**":
                    if fnmatchcase(entry.name, part):
                        yield child
                elif entry.is_symlink() and _contains(child, folder):
                    # Do not follow a link in a circle.
                    yield child
                elif entry.is_dir():
                    yield from _children(child, part)
                else:
                    yield child


def _contains(link: Path, folder: Path) -> bool:
    return Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(link))
