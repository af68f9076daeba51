"""Resolves the location of a store or an output: a path, a ``file:`` URL, or another URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logquarry import arguments
from logquarry.errors import StoreNotFound, UsageError

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
"""Usual URL schemes that ``://`` must follow. The scheme ``file:`` is missing, because ``file:/x``
is valid.
"""
_FOLDERS: Final = ("commitlog", "consumequeue")
_USUAL: Final = "store"
_DEEPEST: Final = 4
"""Number of folder levels from a store's folder to a queue file."""
_MOST_NAMES: Final = 1_000


def path_or_url(location: str) -> str:
    """Return the path of a ``file:`` URL (``file:/x``, ``file:///x``), or the location unchanged.

    Raises UsageError if a URL lacks a slash, as in ``s3:/x``, because the text would otherwise be
    used as a path in a folder ``s3:``.
    """
    scheme, colon, rest = location.partition(":")
    is_url = colon and scheme.lower() in _SCHEMES and not rest.startswith("//")
    if is_url and not os.path.lexists(f"{scheme}:"):
        right = f"{scheme}://{rest.lstrip('/')}"
        raise UsageError(f"{location}: a URL has two slashes after its scheme: {right}")
    return re.sub(r"^file:(//)?", "", location)


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
        raise UsageError(trouble + hint) from error
    try:
        made, base = url_to_fs(url, **(storage_options or {}))
    except ImportError as error:
        raise UsageError(f"{trouble}needs a package that is not installed: {error}") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"{trouble}{error}") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(made)), base


def not_a_store(location: str, message: str) -> StoreNotFound:
    """Make the error for a path that is not a store. The error names a store near the path."""
    found = near_store(location)
    if found is None:
        return StoreNotFound(message)
    error = StoreNotFound(f"{message}. Did you mean {found}?")
    error.suggestion = location, found
    return error


def near_store(location: str) -> str | None:
    """Find a store that a wrong local path may mean: a parent folder of the path, a store in the
    folder, or, if the path contains ``~``, a store below the user's home folder.
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
