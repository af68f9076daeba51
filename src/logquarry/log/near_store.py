"""Finds the store that a wrong path means: one level too high or too low, or with ``~``."""

from __future__ import annotations

import os
from itertools import islice
from typing import Final

from logquarry.errors import StoreNotFound

_FOLDERS: Final = ("commitlog", "consumequeue")
_USUAL: Final = "store"
_DEEPEST: Final = 4
"""A queue file lies this many levels below its store."""
_MOST_NAMES: Final = 1_000


def not_a_store(location: str, message: str) -> StoreNotFound:
    """The error for a path that is no store; it names the nearest store, if there is one."""
    found = near_store(location)
    if found is None:
        return StoreNotFound(message)
    error = StoreNotFound(f"{message}. Did you mean {found}?")
    error.suggestion = location, found
    return error


def near_store(location: str) -> str | None:
    """The store near a local path: above it, in it, or in the user's home for ``~``.

    Returns:
        The path as a user would type it; None if there is no store or more than one.
    """
    if "://" in location:
        return None
    home = _from_home(location)
    if home is not None:
        return home if _is_store(home) else near_store(home)
    for level in range(1, _DEEPEST + 1):
        above = os.path.normpath(os.path.join(location, *[os.pardir] * level))  # noqa: PTH118
        if _is_store(above):
            return above
    usual = os.path.join(location, _USUAL)  # noqa: PTH118
    if _is_store(usual):
        return usual
    try:
        with os.scandir(location) as names:
            inside = [name.path for name in islice(names, _MOST_NAMES) if _is_store(name.path)]
    except OSError:
        return None
    return inside[0] if len(inside) == 1 else None


def _from_home(location: str) -> str | None:
    """The path with its ``~`` replaced; None without a ``~``.

    A caller may have made the path absolute: ``/here/~/store``.
    """
    parts = location.split("/")
    for number, part in enumerate(parts):
        if part.startswith("~"):
            found = os.path.expanduser("/".join(parts[number:]))  # noqa: PTH111
            return None if found.startswith("~") else found
    return None


def _is_store(path: str) -> bool:
    return any(os.path.isdir(os.path.join(path, name)) for name in _FOLDERS)  # noqa: PTH112, PTH118
