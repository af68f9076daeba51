"""Resolves paths, URLs and globs to stores, and names the broker of each store."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from logquarry.errors import StoreNotFound, UsageError
from logquarry.log.filesystem import FileSystem, open_filesystem
from logquarry.log.location import path_or_url
from logquarry.log.store_files import COMMIT_LOG, CONSUME_QUEUE

Stores = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a URL or a glob, or several of them."""

_WILDCARD = re.compile(r"[*?\[]")


def find_stores(
    locations: Iterable[str | os.PathLike[str]],
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Resolve paths, URLs and globs to the locations of stores. The result has the order of the
    arguments, and contains each store once, also if symbolic links point to it.

    A glob is replaced by the folders that match and are stores, sorted by name. Each wildcard
    (``*``, ``?``, ``[...]``) matches within one name. If a path exists, it is not used as a glob,
    even if it contains a wildcard character. The function does not check whether a location without
    wildcards is a store.

    Raises StoreNotFound if a glob matches no store, and UsageError for a wildcard in the name of a
    bucket or host.
    """
    found: dict[str, None] = {}
    for location in locations:
        path = absolute(location)
        if _WILDCARD.search(path) is None or ("://" not in path and os.path.isdir(path)):  # noqa: PTH112
            found[path] = None
            continue
        matches = _matches(path, storage_options)
        if not matches:
            raise StoreNotFound(f"{path}: the glob matches no store")
        found.update(dict.fromkeys(matches))
    if not found:
        raise UsageError("no store is given: pass the path of one")
    return _without_links(found)


def _without_links(paths: Iterable[str]) -> tuple[str, ...]:
    """Leave out symbolic links to folders that another of the paths has.

    Without this, each message of the store would be read twice. If all paths to a folder are links,
    one with the folder's name stays, else the first.
    """
    given = tuple(paths)
    kept: dict[str, tuple[int, str]] = {}
    for path in given:
        place = path if "://" in path else os.path.realpath(path).replace(os.sep, "/")
        # The folder above all stores may be a link too, so no path may be equal to its place. A
        # path without a link below this folder has the most names at its end in common with the
        # place.
        ends = zip(reversed(path.split("/")), reversed(place.split("/")), strict=False)
        same = sum(1 for _ in takewhile(lambda names: names[0] == names[1], ends))
        if same > kept.get(place, (-1, ""))[0]:
            kept[place] = same, path
    once = {path for _, path in kept.values()}
    return tuple(path for path in given if path in once)


def stores_by_name(
    locations: Iterable[str | os.PathLike[str]],
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Resolve paths, URLs and globs to stores. Return name -> location; names are stable.

    If a glob matches a store, the store's name consists of the folder names that the parts with
    wildcards match: ``b1`` for ``/data/*/store``, ``r1/b1`` for ``/r*/b*/store``. Raises UsageError
    if two stores get the same name.
    """
    stated: dict[str, None] = {}
    globbed: dict[str, str] = {}
    for location in locations:
        for path in find_stores([location], storage_options):
            pattern = absolute(location)
            if path == pattern:
                stated[path] = None
            else:
                globbed.setdefault(path, _in_wildcards(pattern, path))
    once = _without_links([*stated, *globbed])
    names = [path for path in stated if path in once]
    found = dict(zip(broker_names(names), names, strict=True)) if names else {}
    for path, name in globbed.items():
        if path in stated or path not in once:
            continue
        if name in found:
            raise UsageError(
                f"the stores {found[name]} and {path} would both be called {name!r}: use one glob "
                "for both, or give their paths"
            )
        found[name] = path
    if not found:
        raise UsageError("no store is given: pass the path of one")
    return found


def _in_wildcards(pattern: str, path: str) -> str:
    parts = zip(pattern.strip("/").split("/"), path.strip("/").split("/"), strict=True)
    return "/".join(name for wanted, name in parts if _WILDCARD.search(wanted))


def has_wildcard(pattern: str) -> bool:
    """Whether a path has wildcards, and so may match several stores."""
    return _WILDCARD.search(pattern) is not None


def as_paths(stores: Stores) -> tuple[str, ...]:
    """Return one or several paths, URLs or globs as a tuple."""
    given = [stores] if isinstance(stores, str | os.PathLike) else stores
    return tuple(os.fspath(store) for store in given)


def absolute(location: str | os.PathLike[str]) -> str:
    """Make a path absolute. A ``file:`` URL becomes a path; other URLs do not change."""
    text = os.fsdecode(location)
    if not text:
        raise UsageError("the path of a store is empty")
    text = path_or_url(text)
    if "://" in text:
        return text.rstrip("/")
    # On Windows, use "/" instead of a backslash, because logquarry splits paths at "/".
    return os.path.abspath(text).replace(os.sep, "/")  # noqa: PTH100


def _matches(pattern: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    wildcard = _WILDCARD.search(pattern)
    assert wildcard is not None
    base = pattern[: wildcard.start()].rpartition("/")[0]
    if base.endswith(":/"):
        raise UsageError(
            f"{pattern}: the name of the bucket or host has a wildcard, but wildcards match only "
            "folders: give one location for each bucket or host"
        )
    rest = pattern[len(base) + 1 :].strip("/")
    try:
        folder = open_filesystem(base or "/", storage_options)
    except StoreNotFound:
        return []
    below = [""]
    for name in rest.split("/"):
        below = [
            f"{parent}/{child}".lstrip("/")
            for parent in below
            for child in _folders_like(folder, parent, name)
        ]
    return [f"{base}/{path}" for path in below if _is_store(folder, path)]


def _folders_like(folder: FileSystem, parent: str, pattern: str) -> list[str]:
    return [
        entry.name
        for entry in folder.list(parent)
        # As in a shell, a wildcard at the start does not match hidden folders.
        if entry.is_dir
        and fnmatchcase(entry.name, pattern)
        and (not entry.name.startswith(".") or pattern.startswith("."))
    ]


def _is_store(folder: FileSystem, path: str) -> bool:
    names = {entry.name for entry in folder.list(path) if entry.is_dir}
    return bool(names & {COMMIT_LOG, CONSUME_QUEUE})


def broker_names(locations: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return a broker name for each store, all different. Raises UsageError if a store is given
    twice.

    - The name is the name of the store's folder.
    - If several stores' folders have the same name, each store has the name of a parent folder
      instead. All these parent folders are at the same level above the stores, the lowest level at
      which all names differ: ``b1`` and ``b2`` for ``/a/b1/store`` and ``/a/b2/store``.
    - If there is no such level, the name is the shortest end of the path that no other path has
      (``r1/b1/store``).
    """
    absolutes = [absolute(location) for location in locations]
    for path in absolutes:
        if absolutes.count(path) > 1:
            raise UsageError(f"the store {path} is given twice")
    paths = [_components(path) for path in absolutes]
    names = [path[-1] for path in paths]
    for name in {name for name in names if names.count(name) > 1}:
        group = [i for i, other in enumerate(names) if other == name]
        for i, better in zip(group, _telling_level([paths[i] for i in group]), strict=True):
            names[i] = better
    clashing = {name for name in names if names.count(name) > 1}
    return [
        _telling_end(path, paths) if name in clashing else name
        for name, path in zip(names, paths, strict=True)
    ]


def _components(path: str) -> tuple[str, ...]:
    parts = tuple(part for part in path.partition("://")[2].split("/") if part)
    return parts or tuple(part for part in path.split("/") if part) or ("/",)


def _telling_level(group: list[tuple[str, ...]]) -> list[str]:
    for level in range(2, min(map(len, group)) + 1):
        names = [path[-level] for path in group]
        if len(set(names)) == len(names):
            return names
    return [path[-1] for path in group]


def _telling_end(path: tuple[str, ...], paths: list[tuple[str, ...]]) -> str:
    for length in range(2, len(path)):
        end = path[-length:]
        if sum(other[-length:] == end for other in paths) == 1:
            return "/".join(end)
    return "/".join(path)
