"""What is imported: one file, the files of a folder, or those that a glob names.

A folder that our export to Parquet has written says in its manifest which files there are, and how
many rows each has. They are read by broker and first offset: so each queue's messages come in
their order, however the files are named.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from logquarry.errors import SourceNotReadable, UsageError
from logquarry.files.filesystem import without_file_scheme

# As the export names them (spark/commit.py), which stands below this layer.
MANIFEST: Final = "_manifest.json"
SUCCESS: Final = "_SUCCESS"

_PARQUET_MAGIC: Final = b"PAR1"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file.

    Attributes:
        path: where it is.
        is_parquet: or else it has JSON lines.
        size: its bytes.
        rows: how many the manifest says; None without one.
    """

    path: str
    is_parquet: bool
    size: int
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The files, in the order in which they are imported.

    Attributes:
        location: what was asked for.
        files: the files.
        damage: places that the export passed over, as its manifest says.
    """

    location: str
    files: tuple[SourceFile, ...]
    damage: int = 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def open_source(location: str | os.PathLike[str]) -> Source:
    """Find the files.

    Args:
        location: a file, a folder, or a glob (``*``, ``?``, ``[...]``, ``**``).

    Raises:
        SourceNotReadable: if there are none, one cannot be read, or an export was not finished.
        UsageError: if it is a URL.
    """
    name = without_file_scheme(os.fspath(location))
    if "://" in name:
        raise UsageError(f"{name}: only local files are imported")
    path = Path(name)
    if path.is_dir():
        if (path / MANIFEST).is_file() or (path / SUCCESS).is_file():
            return _exported(path)
        found = [child for child in sorted(path.iterdir()) if _is_data(child)]
    elif path.exists() or not glob.has_magic(name):
        found = [path]
    else:
        found = [Path(match) for match in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207
        found = [match for match in found if _is_data(match)]
    if not found:
        raise SourceNotReadable(f"{name}: there are no files to import")
    return Source(name, tuple(_file(child) for child in found))


def _is_data(path: Path) -> bool:
    # As Spark and pyarrow: such names are not data.
    return path.is_file() and not path.name.startswith(("_", "."))


def _file(path: Path, rows: int | None = None) -> SourceFile:
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC
        return SourceFile(str(path), is_parquet, path.stat().st_size, rows)
    except OSError as error:
        raise SourceNotReadable(f"{path}: {error.strerror}") from error


# --------------------------------------------------------------------------------------- manifest
def _exported(folder: Path) -> Source:
    if not (folder / SUCCESS).is_file():
        raise SourceNotReadable(
            f"{folder}: the export was not finished ({SUCCESS} is missing): run it again"
        )
    manifest = folder / MANIFEST
    try:
        document = json.loads(manifest.read_bytes())
        entries = sorted(document["files"], key=_place)
        files = [(folder / entry["path"], _count(entry["rows"])) for entry in entries]
        damage = len(document.get("damage", ()))
    except OSError as error:
        raise SourceNotReadable(f"{manifest}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceNotReadable(f"{manifest}: not the manifest of an export: {error!r}") from error
    _require_within(folder, [path for path, _ in files])
    return Source(str(folder), tuple(_file(path, rows) for path, rows in files), damage)


def _place(entry: dict[str, Any]) -> tuple[str, int, str]:
    return entry["broker"], entry["first_offset"], entry["path"]


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"rows is {value!r}")
    return value


def _require_within(folder: Path, paths: Sequence[Path]) -> None:
    root = folder.resolve()
    for path in paths:
        if not path.resolve().is_relative_to(root):
            raise SourceNotReadable(f"{folder}: {MANIFEST} names {path}, which lies elsewhere")
