"""What an export wants of a table, whatever its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from logquarry.errors import StoreUnavailable, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.spark.output import OutputFolder

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
