"""Resolves the locations of stores and outputs (paths, ``file:`` URLs, other URLs and globs), opens
their folders, and chooses a broker name for each store. Checks that an output is outside of the
stores.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logquarry import arguments
from logquarry.config import StoreConfig
from logquarry.errors import MissingExtra, StoreNotFound, UsageError
from logquarry.log.filesystem import ArrowFileSystem, FileSystem, LocalFileSystem
from logquarry.log.log_place import configured_folders
from logquarry.log.store_files import (
    BATCH_QUEUE,
    COMMIT_LOG,
    CONFIG,
    CONSUME_QUEUE,
    INDEX,
    SIDECAR,
)
from logquarry.paths import exists, is_folder

if TYPE_CHECKING:
    from pyarrow import fs as pafs

_S3_OPTIONS: Final = frozenset(
    {
        "access_key",
        "secret_key",
        "session_token",
        "anonymous",
        "region",
        "request_timeout",
        "connect_timeout",
        "scheme",
        "endpoint_override",
        "proxy_options",
        "role_arn",
        "session_name",
        "external_id",
        "force_virtual_addressing",
    }
)
_ARROW_OPTIONS: Final = {"s3": _S3_OPTIONS, "s3a": _S3_OPTIONS}
"""URL scheme -> the storage options that pyarrow.fs accepts for it. fsspec handles other
options.
"""
_SCHEMES: Final = frozenset(
    {
        *("hdfs", "viewfs", "webhdfs", "s3", "s3a", "s3n", "gs", "gcs", "abfs", "abfss", "adl"),
        *("az", "wasb", "wasbs", "oss", "http", "https", "ftp", "sftp", "ssh"),
    }
)
"""Usual URL schemes: ``://`` must follow each of them. ``file`` is not in the set, because
``file:/x`` is valid.
"""
_FOLDERS: Final = (COMMIT_LOG, CONSUME_QUEUE)
_USUAL: Final = "store"
_DEEPEST: Final = 4
"""Number of folder levels from a store's folder to a queue file."""
_MOST_NAMES: Final = 1_000


def path_or_url(location: str) -> str:
    """Return the path of a ``file:`` URL (``file:/x``, ``file:///x``, ``file://localhost/x``), or
    the location unchanged.

    Raises UsageError for a ``file:`` URL of another host or without a path, and for a URL that
    lacks a slash, as in ``s3:/x``. Without this error, the text would be used as a path in a folder
    named ``HOST`` or ``s3:``. If the working folder contains a folder of this name, the text is
    accepted as such a path.
    """
    scheme, colon, rest = location.partition(":")
    is_url = colon and scheme.lower() in _SCHEMES and not rest.startswith("//")
    if is_url and not os.path.lexists(f"{scheme}:"):
        right = f"{scheme}://{rest.lstrip('/')}"
        raise UsageError(f"{location}: a URL has two slashes after its scheme: {right}")
    host = re.match(r"file://(?!localhost/)([^/]+)", location)
    if host is not None and not os.path.lexists(host[1]):
        raise UsageError(f"{location}: a URL of a file on the host {host[1]}: write file:///PATH")
    return re.sub(r"^file:(//localhost(?=/)|//)?", "", location)


def local_store(path: str | os.PathLike[str]) -> Path:
    """Return the local folder of a store that a caller will change. Raises UsageError for a URL."""
    return local_folder(path, "only a local store can be changed")


def local_folder(
    path: str | os.PathLike[str], refusal: str = "only a local folder can be written"
) -> Path:
    """Return the local folder to write to. Raises UsageError for a URL or an empty path."""
    name = path_or_url(arguments.path(path))
    if not name:
        raise UsageError("the path is empty")
    if "://" in name:
        raise UsageError(f"{name}: {refusal}")
    try:
        return Path(name).absolute()
    except FileNotFoundError:
        raise StoreNotFound(
            f"{name}: the working folder of this program was deleted: give an absolute path"
        ) from None


def _first_line(url: str, error: OSError) -> str:
    # Keep only the first line of the error. In the further lines, libhdfs lists every place where
    # it searched for Java.
    text = str(error).partition("\n")[0]
    if url.startswith(("hdfs://", "viewfs://")) and re.search("libjvm|libhdfs", text):
        return f"{text}. HDFS needs Hadoop's libraries: set JAVA_HOME, HADOOP_HOME and CLASSPATH"
    return text


def arrow_folder(
    url: str, storage_options: Mapping[str, Any] | None = None
) -> tuple[pafs.FileSystem, str]:
    """Return the pyarrow file system of a URL, and the folder's path in this file system."""
    from pyarrow import fs as pafs

    trouble = f"{url}: "
    takes = _ARROW_OPTIONS.get(url.partition("://")[0], frozenset())
    if not storage_options or takes.issuperset(storage_options):
        try:
            if storage_options:
                return pafs.S3FileSystem(**storage_options), url.partition("://")[2]
            arrow, base = pafs.FileSystem.from_uri(url)
        except (ValueError, TypeError, NotImplementedError) as error:
            trouble += f"{error}; "
        except OSError as error:
            raise UsageError(f"{url}: {_first_line(url, error)}") from error
        else:
            return arrow, base
    if url.startswith("://"):
        # Reject the text here, because fsspec would accept it as a path.
        raise UsageError(f"{url}: names no file system")
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        hint = "fsspec may know it: pip install 'logquarry[remote]'"
        raise MissingExtra(trouble + hint) from error
    try:
        made, base = url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        raise MissingExtra(f"{trouble}needs a package that is not installed: {error}") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"{trouble}{error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(made)), base


def open_filesystem(
    location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> FileSystem:
    """Open the folder at a path or URL.

    pyarrow.fs opens an ``s3:`` URL that has only options of ``pyarrow.fs.S3FileSystem``. With other
    options, fsspec opens the folder. Without options, the function tries pyarrow.fs before fsspec.

    Raises StoreNotFound if a local path is not a folder, and UsageError for an unknown URL.
    """
    text = path_or_url(arguments.path(location))
    arguments.storage_options(storage_options)
    if "://" not in text:
        if not is_folder(Path(text)):
            what = "not a folder" if exists(Path(text)) else "there is no such folder"
            raise not_a_store(text, f"{text}: {what}")
        return LocalFileSystem(text)
    folder, base = arrow_folder(text, storage_options)
    return ArrowFileSystem(folder, base, text)


def not_a_store(location: str, message: str) -> StoreNotFound:
    """Make the error for a path that is not a store. The error names a store near the path."""
    found = near_store(location)
    if found is None:
        return StoreNotFound(message)
    error = StoreNotFound(f"{message}. Did you mean {found}?")
    error.suggestion = location, found
    return error


def near_store(location: str) -> str | None:
    """Find the store that the user probably meant by a wrong local path. This store is a parent
    folder of the path, or it is inside the folder at the path. If the path contains ``~``, the
    function first replaces ``~`` and everything before it by the user's home folder.
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
    # The shell did not expand "~". If a caller then made the path absolute, "~" is in the middle of
    # the path: /here/~/store.
    parts = location.split("/")
    for number, part in enumerate(parts):
        if part.startswith("~"):
            found = os.path.expanduser("/".join(parts[number:]))  # noqa: PTH111
            return None if found.startswith("~") else found
    return None


def _is_store(path: str) -> bool:
    return any(os.path.isdir(os.path.join(path, name)) for name in _FOLDERS)  # noqa: PTH112, PTH118


# --------------------------------------------------------------------------------------------------
# Globs, and the names of brokers

Stores = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, a URL or a glob, or several of them."""

_WILDCARD = re.compile(r"[*?\[]")


def find_stores(
    locations: Iterable[str | os.PathLike[str]],
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Resolve paths, URLs and globs to the locations of stores. The result has the order of the
    arguments, and contains each store once, even if several arguments or symbolic links lead to it.

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
    """If several paths lead to the same folder, keep one of them, and leave out symbolic links.

    If a read got several paths of one store, it would read each message several times. If all paths
    to a folder are links, the function keeps a link that has the folder's name. If no link has this
    name, it keeps the first link.
    """
    given = tuple(paths)
    kept: dict[str, tuple[int, str]] = {}
    for path in given:
        place = path if "://" in path else os.path.realpath(path).replace(os.sep, "/")
        # Compare each path with its real path, name by name from the end. A path without links has
        # the most equal names. Do not compare whole paths: if a folder above all stores is a link,
        # every path differs from its real path.
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
    """Resolve paths, URLs and globs to stores. Return name -> location.

    A store that was found by a glob is named after the folders that match the wildcard parts of the
    glob: ``b1`` for ``/data/*/store``, ``r1/b1`` for ``/r*/b*/store``. So the name stays the same
    if the glob matches more stores later. Raises UsageError if two stores get the same name.
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
    text = path_or_url(arguments.path(text, may_be_long=True))
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
    return [f"{base}/{path}" for path in below if _is_store_in(folder, path)]


def _folders_like(folder: FileSystem, parent: str, pattern: str) -> list[str]:
    return [
        entry.name
        for entry in folder.list(parent)
        # As in a shell, a wildcard at the start does not match hidden folders.
        if entry.is_dir
        and fnmatchcase(entry.name, pattern)
        and (not entry.name.startswith(".") or pattern.startswith("."))
    ]


def _is_store_in(folder: FileSystem, path: str) -> bool:
    return any(entry.is_dir and entry.name in _FOLDERS for entry in folder.list(path))


def broker_names(locations: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return a different broker name for each store. Raises UsageError if a store is given twice.

    - The name is the name of the store's folder.
    - If several folders have the same name, each of their stores gets the name of a parent folder
      instead. The function uses the lowest level at which all parent folders have different names:
      ``b1`` and ``b2`` for ``/a/b1/store`` and ``/a/b2/store``.
    - If there is no such level, the name is an end of the store's path (``r1/b1/store``): the
      shortest end that no other store's path has.
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


# --------------------------------------------------------------------------------------------------
# Places inside of stores
#
# A command or a job must not write into a store, because readers would use the written files as
# files of the store, or verify would report them.

_LINKED: Final = (COMMIT_LOG, CONSUME_QUEUE, BATCH_QUEUE, INDEX, CONFIG, SIDECAR)
"""Folders of a store that are often links to another disk."""


def lies_in_store(
    place: str | os.PathLike[str], store: str | os.PathLike[str], config: StoreConfig | None = None
) -> bool:
    """Return whether a place is a store's folder or inside it.

    The function follows symbolic links and ``..`` in both paths. Folders on another disk also
    belong to the store, if the configuration or a link in the store leads to them.
    """
    return any(_is_below(place, folder) for folder in _folders(store, config))


def overlaps_store(
    place: str | os.PathLike[str], store: str | os.PathLike[str], config: StoreConfig | None = None
) -> bool:
    """Return whether a place is inside a store, or contains the store or a part of it."""
    folders = list(_folders(store, config))
    return any(_is_below(place, folder) or _is_below(folder, place) for folder in folders)


def _folders(store: str | os.PathLike[str], config: StoreConfig | None) -> Iterator[str]:
    root = os.fsdecode(store)
    yield root
    if "://" not in root:
        yield from (f"{root}/{name}" for name in _LINKED)
        # A relative path in a broker's configuration is relative to the broker's folder, which is
        # unknown here.
        yield from filter(os.path.isabs, configured_folders(config or StoreConfig()))


def _is_below(place: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    inner, outer = map(os.fsdecode, (place, folder))
    if "://" in inner or "://" in outer:
        return f"{inner}/".startswith(f"{outer}/")
    # Unlike Path.resolve, realpath raises no error for a loop of links.
    return Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(outer))
