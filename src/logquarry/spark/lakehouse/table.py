"""What an export puts into a table, in words that the table keeps.

A table has one kind of rows: who comes back with other filters or columns would leave holes in it
that nobody sees. So the table says what it was begun with, and an export that wants something else
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.spark.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.spark.output import OutputFolder


_VERSION: Final = 1
# Where a new export starts, and no condition on what comes later.
_STARTS: Final = ("queue_ranges",)


def identity(
    read: ReadOptions, partition_by: Sequence[str], decode: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What distinguishes an export from others into the same table.

    Args:
        read: what is read.
        partition_by: what the table is parted by.
        decode: how bodies are decoded, as JSON; None for not at all.
    """
    wanted = {
        field.name: _plain(value)
        for field in fields(read.wanted)
        if field.name not in _STARTS and (value := getattr(read.wanted, field.name)) is not None
    }
    return {
        "schema": read.schema,
        "columns": list(read.names),
        "partition_by": list(partition_by),
        "filters": wanted,
        "decode": dict(decode) if decode else None,
        "decompress": read.decompress,
    }


def document(own: Mapping[str, Any], start: Mapping[str, Any], dead_letters: str | None) -> str:
    """What the table keeps.

    Args:
        own: the :func:`identity`.
        start: what the planner said of the start besides offsets, which later runs keep.
        dead_letters: where the table of the dead letters is; None for none.
    """
    found = {"version": _VERSION, **own, "start": dict(start), "dead_letters": dead_letters}
    return json.dumps(found, sort_keys=True)


def parsed(name: str, text: str) -> dict[str, Any]:
    """The document of a table.

    Raises:
        UsageError: if it is none that this version knows.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise UsageError(f"{name}: another version of logquarry made this table: {text!r}")
    return found


def check_same(name: str, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """That an export puts into a table what is in it already.

    Raises:
        UsageError: if not, with what differs.
    """
    for key, value in own.items():
        if json.loads(json.dumps(value)) != found.get(key):
            raise UsageError(
                f"{name}: the table was begun with {key} {json.dumps(found.get(key))}, and this "
                f"export has {json.dumps(value)}: export into another one"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    return list(value) if isinstance(value, tuple) else value


# --------------------------------------------------------------------------------------------------
# What an export wants of a table, whatever its format.

PROPERTY: Final = "logquarry.export"
"""The property of a table that says what our exports put into it."""

Marks = Mapping[str, int]
"""Physical offsets by broker (``broker:NAME``) and by the place of its store (``store:PATH``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A Parquet file that is to be part of a table.

    Attributes:
        path: below the table's folder.
        rows: how many.
        bytes: of the file.
        values: by name, what its rows have in common where the table is parted.
        bounds: least and largest value of some columns, as Parquet holds them: numbers (times in
            microseconds since 1970) or bytes.
    """

    path: str
    rows: int
    bytes: int
    values: Mapping[str, Any]
    bounds: Mapping[str, tuple[Any, Any]]


class TableUnchanged(StoreUnavailable):
    """A commit was refused, and the table does not have its files."""


class CommitUnknown(StoreUnavailable):
    """Whether a commit was made is not known: it may be made yet."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(
            f"{name}: it is not known whether the commit was made; nothing is removed, and the "
            f"next export finds out: {error}"
        )


class Table(Protocol):
    """A table that exports append to. Nothing is kept of it from one call to the next."""

    @property
    def name(self) -> str:
        """For people: where it is, or what it is called."""

    @property
    def folder(self) -> OutputFolder:
        """Where its files are."""

    @property
    def partitions_in_files(self) -> bool:
        """Whether files have the columns that the table is parted by."""

    def look(self) -> TableState | None:
        """How it stands now; None if it is not there.

        Raises:
            UsageError: if it is there, and no export of ours made it.
        """

    def create(self, schema: pa.Schema, partition_by: Sequence[str], document: str) -> None:
        """Make it, without rows.

        Args:
            schema: its columns; with ``day`` it is parted by the day of the store timestamp.
            partition_by: what it is parted by.
            document: kept as it is.
        """

    def append(self, files: Sequence[TableFile], marks: Marks, before: Marks) -> None:
        """Add files and move marks, in one commit.

        Args:
            files: all in place.
            marks: new values.
            before: the values that the same marks have now, of those that there are.

        Raises:
            StoreUnavailable: if the marks have moved meanwhile; nothing is changed then.
            CommitUnknown: if whatever keeps the table has not said what became of the commit.
        """


class TableState(Protocol):
    """A table as it stood when it was looked at."""

    @property
    def document(self) -> str:
        """What it was created with."""

    @property
    def schema(self) -> pa.Schema:
        """Its columns."""

    def marks(self, names: Iterable[str]) -> dict[str, int]:
        """The values of some marks, of those that there are."""


def check_unmoved(name: str, found: Marks, before: Marks) -> None:
    """That marks are still where they were.

    Raises:
        StoreUnavailable: if not.
    """
    if dict(found) != dict(before):
        raise StoreUnavailable(
            f"{name}: another export has written there meanwhile: nothing was added"
        )


def check_location(folder: OutputFolder, package: str, marks: str = "") -> None:
    """That a package which makes URLs of paths will find a folder by its own path again.

    What it would write elsewhere nobody would find; on a disk, that is beside the destination.

    Args:
        folder: the table's, or whose it is.
        package: that writes the metadata.
        marks: characters that end a path in its URLs.

    Raises:
        UsageError: if not.
    """
    path = folder.location
    if not folder.is_local or (unquote(path) == path and not set(marks) & set(path)):
        return
    raise UsageError(
        f"{path}: {package} takes a path for a URL, and in this one "
        f"{' '.join(['%XX', *marks])} would mean something else: export into another folder"
    )


def missing_extra(name: str) -> UsageError:
    """What to say where a package is not there."""
    return UsageError(f"this takes the package {name}: pip install 'logquarry[lakehouse]'")


def text_bound(value: Any) -> str | None:
    """A bound of a text column as text; None where it is none."""
    try:
        return bytes(value).decode("utf-8") if isinstance(value, bytes | bytearray) else None
    except UnicodeDecodeError:
        return None
