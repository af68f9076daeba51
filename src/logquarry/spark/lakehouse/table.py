"""The interface of a table to which exports append, and the document that each table stores.

The document describes the first export into the table: its filters, columns and start.

All exports into a table must use the same filters and columns; other filters would leave gaps that
a reader cannot detect. The table stores the document as a property. A later export compares its own
options with the document, and fails if they differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from logquarry.errors import MissingExtra, StoreUnavailable, UsageError
from logquarry.spark.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.spark.decode import DecodeOptions
    from logquarry.spark.output import OutputFolder


_VERSION: Final = 1
# These options determine only where a new export starts. They do not filter later messages.
_STARTS: Final = ("queue_ranges",)


def identity(
    read: ReadOptions, partition_by: Sequence[str], decode: DecodeOptions | None
) -> dict[str, Any]:
    """Return the options that must be the same in all exports into one table."""
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
        "decode": None if decode is None else decode.as_json(),
        "decompress": read.decompress,
    }


def document(own: Mapping[str, Any], start: Mapping[str, Any], dead_letters: str | None) -> str:
    """Return the text of a table's document, which describes the table's export.

    Args:
        own: the options that must stay the same; the result of :func:`identity`.
        start: start time and start queue offsets of the first export, without the physical offsets
            of the brokers. Later exports use the same start.
        dead_letters: name of the table of dead letters; None if there is none.
    """
    found = {"version": _VERSION, **own, "start": dict(start), "dead_letters": dead_letters}
    return json.dumps(found, sort_keys=True)


def parsed(name: str, text: str) -> dict[str, Any]:
    """Parse a table's document."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise UsageError(f"{name}: was created by another version of logquarry: {text!r}")
    return found


def check_same(name: str, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise UsageError if an export's identity differs from the table's identity."""
    for key, value in own.items():
        if json.loads(json.dumps(value)) != found.get(key):
            raise UsageError(
                f"{name}: the table has {key} {json.dumps(found.get(key))}, but this export has "
                f"{json.dumps(value)}: use the table's setting, or export into another table"
            )


def known_document(
    name: str, kind: str, properties: Mapping[str, str], parts: Sequence[str]
) -> str:
    """Return the document among a table's properties.

    Args:
        kind: Delta or Iceberg.
        parts: the columns that partition the table now.

    Raises:
        UsageError: if no export created the table, or if its partitioning has changed since.
    """
    text = properties.get(PROPERTY)
    if text is None:
        raise UsageError(f"{name}: no export created this {kind} table: give another one")
    made = list(parsed(name, text).get("partition_by") or [])
    if list(parts) != made:
        raise UsageError(
            f"{name}: was created with partitions {made}, but has {list(parts)} now: restore the "
            "partitions, or export into another table"
        )
    return text


def check_types(name: str, own: pa.Schema, found: pa.Schema) -> None:
    """Raise UsageError if another program has changed the type of a column.

    A longer integer is accepted, because readers convert the shorter integers of the files. A
    missing column is accepted too: exports still write all columns of the first export.

    Args:
        own: the columns that the export writes.
        found: the table's columns.
    """
    for field in own:
        at = found.get_field_index(field.name)
        if at < 0 or _kind(found.types[at]) == _kind(field.type):
            continue
        one, other = field.type, found.types[at]
        if _is_integer(one) and _is_integer(other) and other.bit_width > one.bit_width:
            continue
        raise UsageError(
            f"{name}: column {field.name} has the type {other} now, but the export writes {one}: "
            "restore the type, or export into another table"
        )


def _kind(kind: pa.DataType) -> str:
    # Ignore differences between libraries. A library may read a column with 64-bit offsets or as
    # views, and may use other names inside a nested type.
    text = str(kind).replace("large_", "").replace("_view", "")
    return text.partition("<")[0] if kind.num_fields else text


def _is_integer(kind: pa.DataType) -> bool:
    return str(kind).startswith("int")


def letters_document(table: Table, table_id: str, own: Mapping[str, Any]) -> str:
    """Return the text of the document of a table of dead letters.

    Args:
        table: the table of the messages.
        table_id: id of the table of the messages.
        own: the result of :func:`identity` for the table of the messages.
    """
    found = {"dead_letters_of": table.name, "table_id": table_id, "identity": dict(own)}
    return document(found, {}, None)


def check_letters(
    letters: Table, text: str, table: Table, state: TableState | None, own: Mapping[str, Any]
) -> None:
    """Raise UsageError if the table of dead letters `letters` does not belong to `table`.

    The marks of `letters` show which undecodable messages the export can skip. If `letters`
    belonged to another table, the export would also skip messages that `letters` does not have.

    Args:
        text: the document of `letters`.
        table: the table of the messages.
        state: state of `table`; None if the table does not exist yet.
        own: the identity of the export.
    """
    advice = "give another folder for the dead letters"
    found = parsed(letters.name, text)
    owner = found.get("dead_letters_of")
    if owner is None:
        raise UsageError(
            f"{letters.name}: is a table of messages, so it cannot hold the dead letters of "
            f"{table.name}: {advice}"
        )
    # A user can move a Delta table and its dead letters. A move does not change the id of the
    # table, so compare the ids. A document of an earlier version contains no id; in this case
    # compare the recorded names of both tables.
    if state is not None:
        table_id = found.get("table_id")
        names = str(owner), str(parsed(table.name, state.document).get("dead_letters"))
        if table_id == state.id or (
            table_id is None and _is_moved(names, (table.name, letters.name))
        ):
            return
    if not table.is_called(str(owner)):
        raise UsageError(
            f"{letters.name}: holds the dead letters of {owner}, not of {table.name}: {advice}"
        )
    # The ids differ if the table was deleted and created again; the id is missing in documents of
    # an earlier version.
    if isinstance(found.get("identity"), dict):
        check_same(letters.name, own, found["identity"])
    elif state is None:
        raise UsageError(
            f"{letters.name}: holds the dead letters of an earlier table {owner}, whose settings "
            f"are unknown: remove it, or {advice}"
        )


def _is_moved(before: tuple[str, str], now: tuple[str, str]) -> bool:
    """Return whether both tables moved together.

    The two earlier names share a prefix. If only this prefix has changed in both names, the tables
    moved together.
    """
    start = len(commonprefix(before))  # noqa: RUF071 - "a" is a prefix of "a_dead_letters"
    ends = [name[start:] for name in before]
    starts = {name.removesuffix(end) for name, end in zip(now, ends, strict=True)}
    return len(starts) == 1 and all(map(str.endswith, now, ends))


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    return list(value) if isinstance(value, tuple) else value


# -------------------------------------------------------------------------------------- interface

PROPERTY: Final = "logquarry.export"
"""Name of the table's property that holds the document."""

DEAD_LETTERS: Final = "_dead_letters"
"""Suffix of the dead letters' default folder or table name."""

Marks = Mapping[str, int]
"""A physical offset for each store: the table has the store's messages before this offset.

The offset of each store is stored under two names, ``broker:NAME`` and ``store:PATH``.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A Parquet file to add to a table.

    Attributes:
        path: path below the table's folder.
        values: values of the partition columns, by column.
        bounds: (smallest, largest) value by column, as Parquet stores values: bytes, or numbers
            (times in microseconds since 1970).
        nulls: number of nulls by column. A column in `nulls` but not in `bounds` has only nulls.
    """

    path: str
    rows: int
    bytes: int
    values: Mapping[str, Any]
    bounds: Mapping[str, tuple[Any, Any]]
    nulls: Mapping[str, int]


class TableUnchanged(StoreUnavailable):
    """The table rejected a commit, and does not have the commit's files."""


class CommitUnknown(StoreUnavailable):
    """The catalog did not answer a commit: the commit may have succeeded, or may succeed later."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(
            f"{name}: it is unknown whether the commit succeeded; the files stay, and the next "
            f"export checks: {library_reason(error)}"
        )


def library_reason(error: BaseException) -> str:
    """Return the text of a library's error in one line, without the SQL that SQLAlchemy adds."""
    reason = " ".join(str(getattr(error, "orig", None) or error).split())
    if reason == "database is locked":
        reason += " by another process: run again when that process has ended"
    return reason


class Table(Protocol):
    """A table that exports append to.

    Each call reads the table's current state, because other programs can change the table.
    """

    @property
    def name(self) -> str:
        """Name or location, for error messages."""

    @property
    def folder(self) -> OutputFolder:
        """Folder of the table's files."""

    def is_called(self, name: str) -> bool:
        """Return whether `name`, which an earlier export recorded, is the name of this table."""

    @property
    def partitions_in_files(self) -> bool:
        """Whether the files contain the columns that partition the table."""

    def look(self) -> TableState | None:
        """Return the state; None if there is no table.

        Raise UsageError if the table was not created by an export.
        """

    def create(self, schema: pa.Schema, partition_by: Sequence[str], document: str) -> None:
        """Create the table without rows; store `document` as the property PROPERTY.

        In `partition_by`, ``day`` is the day of the store timestamp.
        """

    def append(self, files: Sequence[TableFile], marks: Marks, before: Marks) -> None:
        """Add files and set marks, in one commit. The files already have their final paths.

        Args:
            marks: new values.
            before: the values that the caller expects the table's existing marks to have now.

        Raises:
            StoreUnavailable: if a mark differs from `before`; the table then stays unchanged.
            CommitUnknown: if the catalog did not answer.
        """


@dataclass(frozen=True)
class TableState:
    """State of a table at the time of :meth:`Table.look`.

    `id` is the format's unique id of the table. `marks` returns, for the given names, the marks
    that exist.
    """

    id: str
    document: str
    schema: pa.Schema
    marks: Callable[[Iterable[str]], dict[str, int]]


def check_unmoved(name: str, found: Marks, before: Marks) -> None:
    """Raise StoreUnavailable if marks differ from their expected values."""
    if dict(found) != dict(before):
        raise StoreUnavailable(
            f"{name}: another export has committed meanwhile: nothing was added: run again"
        )


def check_location(folder: OutputFolder, package: str, marks: str = "") -> None:
    """Raise UsageError if `package` would parse the location as a URL of another folder.

    `marks` are the characters, such as "?", at which the path of a URL ends.
    """
    path = folder.location
    if not folder.is_local or (unquote(path) == path and not set(marks) & set(path)):
        return
    raise UsageError(
        f"{path}: {package} reads this path as a URL, in which "
        f"{' '.join(['%XX', *marks])} mean other characters: give another folder"
    )


def require_package(module: str) -> None:
    """Import a module; raise MissingExtra if its package is not installed."""
    try:
        import_module(module)
    except ModuleNotFoundError:
        name = module.partition(".")[0]
        raise MissingExtra(
            f"tables need the package {name}: pip install 'logquarry[lakehouse]'"
        ) from None


def text_bound(value: Any) -> str | None:
    """Decode the smallest or largest value of a text column; return None for invalid UTF-8."""
    try:
        return bytes(value).decode("utf-8") if isinstance(value, bytes | bytearray) else None
    except UnicodeDecodeError:
        return None
