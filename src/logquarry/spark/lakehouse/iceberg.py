"""Reads and commits an Iceberg table with the package `pyiceberg`.

The marks (see :mod:`.table`) are a property of each snapshot. A commit writes all marks, so a
rollback to an earlier snapshot also restores the marks of that snapshot. The marks are also a
property of the table, so that they remain after all snapshots of exports have expired.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.spark.export import Source
from logquarry.spark.lakehouse.table import (
    PROPERTY,
    CommitUnknown,
    Marks,
    TableFile,
    TableState,
    TableUnchanged,
    check_location,
    check_unmoved,
    known_document,
    library_reason,
    require_package,
    text_bound,
)
from logquarry.spark.output import OutputFolder

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table as IcebergTable
    from pyiceberg.table.snapshots import Snapshot

MARKS: Final = "logquarry.offsets"
"""Name of the property for the marks, in a snapshot and in the table."""
CATALOG_FILE: Final = "catalog.db"
DEFAULT_NAMESPACE: Final = "logquarry"
_EPOCH: Final = date(1970, 1, 1)
_DAY: Final = "day"
_TRIES: Final = 5
_FIRST_NUMBER: Final = 1
"""Sequence number of a table's first snapshot."""
_COUNTS: Final = ("total", "added", "deleted")
_LIBRARIES: Final = ("pyiceberg", "sqlalchemy", "requests", "pydantic", "pydantic_core")
_SYNCED_FILES: Final = "logquarry.spark.lakehouse.synced_files.SyncedFiles"
_TIMES: Final = ("store_timestamp", "timestamp")
"""Names of the column of the store timestamp: in a table with logquarry's columns, and in a table
with Kafka's columns.
"""


class Iceberg:
    """An Iceberg table; implements :class:`~logquarry.spark.lakehouse.table.Table`.

    Args:
        dest: folder that contains the folders of tables.
        identifier: ``NAMESPACE.TABLE``.
        catalog: properties of the catalog, with `pyiceberg`'s names; None for SQLite in the file
            CATALOG_FILE of `dest`. The configuration file of `pyiceberg` adds missing properties;
            ``name`` selects the catalog in that file.
        folder: folder of the table's files; None for the table's own folder in `dest`.
    """

    partitions_in_files = True

    def __init__(
        self,
        dest: OutputFolder,
        identifier: str,
        catalog: Mapping[str, str] | None,
        folder: OutputFolder | None = None,
    ) -> None:
        require_package("pyiceberg.catalog")
        self._dest = dest
        self._folder = folder
        # The constructor does not ask the catalog for the table's folder, because the catalog can
        # be down.
        self._place = (folder or dest).location
        self._identifier = tuple(identifier.split("."))
        if len(self._identifier) < 2 or not all(self._identifier):
            raise UsageError(f"table {identifier!r}: give NAMESPACE.TABLE")
        check_location(folder or self._below(self._identifier[-1]), "pyiceberg", "?#")
        self._file: Path | None = None
        if catalog is None:
            self._require_flat("the default catalog (SQLite)")
            self._file = Path(dest.location) / CATALOG_FILE
            catalog = {"type": "sql", "uri": f"sqlite:///{self._file}"}
        self._properties = dict(catalog)

    def _require_flat(self, catalog: str) -> None:
        if len(self._identifier) > 2:
            name = ".".join(self._identifier)
            raise UsageError(
                f"table {name!r}: {catalog} has no nested namespaces: give NAMESPACE.TABLE"
            )

    @property
    def name(self) -> str:
        return f"{'.'.join(self._identifier)} ({self._place})"

    @property
    def folder(self) -> OutputFolder:
        """Folder of the table's files.

        An existing table keeps its folder. A new folder is named like the table, with its
        namespace. The namespace is omitted if it is DEFAULT_NAMESPACE and no other table uses the
        folder with the shorter name.
        """
        if self._folder is None:
            short, whole = self._identifier[-1], ".".join(self._identifier)
            location = self._location()
            if location is not None:
                is_short = location.rstrip("/").rpartition("/")[2] != whole
            else:
                is_default = self._identifier[:-1] == (DEFAULT_NAMESPACE,)
                is_short = is_default and not self._is_taken(self._below(short))
            folder = self._below(short if is_short else whole)
            check_location(folder, "pyiceberg", "?#")
            self._folder = folder
        return self._folder

    def _is_taken(self, folder: OutputFolder) -> bool:
        """Return whether another table has, or may have, this folder.

        Only another table whose name has the same last part can have this folder.
        """
        if self._has_no_catalog():
            return False
        with self._catalog() as catalog:
            try:
                return any(
                    catalog.load_table(found).location().rstrip("/") == _uri(folder)
                    for found in _tables(catalog)
                    if found[-1] == self._identifier[-1]
                )
            except Exception:
                # The catalog cannot load a table, or does not list other namespaces. So it is
                # unknown whether another table has this folder.
                return True

    def _below(self, name: str) -> OutputFolder:
        return OutputFolder(f"{self._dest.location}/{name}", self._dest.storage_options)

    def _location(self) -> str | None:
        if self._has_no_catalog():
            return None
        with self._catalog() as catalog:
            table = self._load(catalog)
            return None if table is None else table.location()

    def _has_no_catalog(self) -> bool:
        # Only look for the file: opening the catalog would create the file.
        return self._file is not None and not self._file.exists()

    def lacks_catalog(self) -> bool:
        """Whether the default catalog is missing or empty. Opening a missing one makes it empty."""
        if self._file is None or self._has_no_catalog():
            return self._file is not None
        with self._catalog() as catalog:
            return not catalog.list_namespaces()

    def is_called(self, name: str) -> bool:
        return name.partition(" (")[0] == ".".join(self._identifier)

    @contextmanager
    def _catalog(self) -> Iterator[Catalog]:
        """Open the catalog; turn errors of its libraries into StoreUnavailable."""
        from pyiceberg.catalog import MetastoreCatalog, load_catalog
        from pyiceberg.io import PY_IO_IMPL

        properties = dict(self._properties)
        try:
            catalog = load_catalog(properties.pop("name", "logquarry"), **properties)
            if self._dest.is_local:
                catalog.properties.setdefault(PY_IO_IMPL, _SYNCED_FILES)
            try:
                if isinstance(catalog, MetastoreCatalog):
                    self._require_flat("this catalog")
                yield catalog
            finally:
                catalog.close()
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _LIBRARIES:
                raise
            is_file = self._file is not None and hasattr(error, "orig")
            name = self._file if is_file else self.name
            raise StoreUnavailable(f"{name}: {library_reason(error)}") from error

    def _load(self, catalog: Catalog) -> IcebergTable | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return catalog.load_table(self._identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def look(self) -> TableState | None:
        if self._has_no_catalog():
            return None
        with self._catalog() as catalog:
            table = self._load(catalog)
            if table is None:
                return None
            parts = list(_parts(table))
            document = known_document(self.name, "Iceberg", table.properties, parts)
            marks = partial(_some, _marks(table))
            identity = str(table.metadata.table_uuid)
            return TableState(identity, document, table.schema().as_arrow(), marks)

    def create(self, schema: pa.Schema, partition_by: Sequence[str], document: str) -> None:
        from pyiceberg.table import TableProperties
        from pyiceberg.transforms import DayTransform, IdentityTransform

        with self._catalog() as catalog:
            catalog.create_namespace_if_not_exists(self._identifier[:-1])
            # One transaction: no other process can see the table without its partitions.
            with catalog.create_table_transaction(
                self._identifier,
                schema=schema,
                location=_uri(self.folder),
                properties={PROPERTY: document},
            ) as change:
                with change.update_spec() as spec:
                    for name in partition_by:
                        if name == _DAY:
                            time = next(name for name in _TIMES if name in schema.names)
                            spec.add_field(time, DayTransform(), _DAY)
                        else:
                            spec.add_field(name, IdentityTransform(), name)
                # The Parquet files have no column ids, so readers map columns by name.
                names = change.table_metadata.schema().name_mapping.model_dump_json()
                change.set_properties({TableProperties.DEFAULT_NAME_MAPPING: names})

    def append(self, files: Sequence[TableFile], marks: Marks, before: Marks) -> None:

        def commit(table: IcebergTable | None) -> None:
            if table is None:
                raise StoreUnavailable(f"{self.name}: the table no longer exists")
            found = _marks(table)
            # A try fails if another program commits first. If that program was an export, the marks
            # have changed, and this check raises an error. Otherwise, the next try can succeed.
            check_unmoved(self.name, _some(found, marks), before)
            self._append(table, files, {**found, **marks})

        self._commit(commit, StoreUnavailable)

    def _commit(
        self, commit: Callable[[IcebergTable | None], None], failure: type[StoreUnavailable]
    ) -> None:
        """Call `commit` with the current table; try again if another commit was first."""
        from pyiceberg.exceptions import CommitFailedException

        with self._catalog() as catalog:
            for left in reversed(range(_TRIES)):
                try:
                    commit(self._load(catalog))
                    return
                except CommitFailedException as error:
                    if not left:
                        raise failure(
                            f"{self.name}: {_TRIES} commits lost against other writers: run again: "
                            f"{error}"
                        ) from error

    def _append(self, table: IcebergTable, files: Sequence[TableFile], marks: Marks) -> None:
        from pyiceberg.exceptions import CommitFailedException

        text = json.dumps(dict(marks), sort_keys=True)
        with _one_try(table):
            change = table.transaction()
            change.set_properties({MARKS: text})
            with change.update_snapshot({MARKS: text}).fast_append() as added:
                for file in files:
                    added.append_data_file(_data_file(table, self.folder, file))
            try:
                change.commit_transaction()
                self._sync_catalog()
            except CommitFailedException:
                raise
            except Exception as error:
                # The catalog did not answer: the commit may have succeeded, or may succeed later.
                raise CommitUnknown(self.name, error) from error

    def data_files(self) -> list[TableDataFile]:
        """List the files of the current snapshot that a compaction can merge.

        The list omits files outside of the folder, files with an earlier partitioning, and files
        with deleted rows.
        """
        with self._catalog() as catalog:
            table = self._load(catalog)
            return [] if table is None else list(self._data_files(table))

    def _data_files(self, table: IcebergTable) -> Iterator[TableDataFile]:
        spec, base = table.spec(), f"{_uri(self.folder)}/"
        for task in table.scan().plan_files():
            file = task.file
            is_ours = file.file_path.startswith(base) and file.spec_id == spec.spec_id
            if is_ours and not task.delete_files:
                values = {field.name: file.partition[at] for at, field in enumerate(spec.fields)}
                yield TableDataFile(
                    path=file.file_path.removeprefix(base),
                    rows=file.record_count,
                    bytes=file.file_size_in_bytes,
                    values=values,
                    file=file,
                )

    def replace(self, old: Iterable[TableDataFile], new: Sequence[TableFile]) -> None:
        """Replace files with new files that have the same rows, in one commit.

        Raises:
            TableUnchanged: if the table no longer contains one of the old files, or if other
                writers committed first at each try.
            StoreUnavailable: if the catalog fails; the commit may have succeeded.
        """
        removed = {file.path: file for file in old}

        def commit(table: IcebergTable | None) -> None:
            there = set() if table is None else {f.path for f in self._data_files(table)}
            if table is None or not there.issuperset(removed):
                raise TableUnchanged(
                    f"{self.name}: another process changed the files meanwhile: run again"
                )
            text = json.dumps(dict(_marks(table)), sort_keys=True)
            with _one_try(table):
                change = table.transaction()
                with change.update_snapshot({MARKS: text}).overwrite() as swap:
                    for file in removed.values():
                        swap.delete_data_file(file.file)
                    for added in new:
                        swap.append_data_file(_data_file(table, self.folder, added))
                change.commit_transaction()
                self._sync_catalog()

        self._commit(commit, TableUnchanged)

    def _sync_catalog(self) -> None:
        # SQLite ends a commit with the removal of its journal, but does not sync this removal. If a
        # power cut restored the journal, SQLite would undo the commit.
        if self._file is not None:
            self._dest.sync(CATALOG_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDataFile(Source):
    """A Parquet file of the table's current snapshot, with the values that a compaction needs."""

    values: Mapping[str, Any]
    file: DataFile


def _tables(catalog: Catalog, below: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for namespace in catalog.list_namespaces(below):
        # Skip namespaces that are not inside `below`, because a catalog without nested namespaces
        # can list the top namespaces again.
        if len(namespace) == len(below) + 1:
            yield from catalog.list_tables(namespace)
            yield from _tables(catalog, namespace)


def _parts(table: IcebergTable) -> Iterator[str]:
    """Yield each partition field's name, or TRANSFORM(NAME) if no export chooses the transform."""
    for field in table.spec().fields:
        usual = "day" if field.name == _DAY else "identity"
        transform = str(field.transform)
        yield field.name if transform == usual else f"{transform}({field.name})"


def _some(found: Marks, names: Iterable[str]) -> dict[str, int]:
    return {name: found[name] for name in names if name in found}


def _marks(table: IcebergTable) -> dict[str, int]:
    """Return the marks of the current snapshot, or of the nearest ancestor with marks."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        text = _marks_text(snapshot)
        if text is not None:
            return dict(json.loads(text))
        parent = snapshot.parent_snapshot_id
        if parent is None and _is_first(table, snapshot):
            return {}
        snapshot = None if parent is None else table.snapshot_by_id(parent)
        if snapshot is None:
            return dict(json.loads(table.properties.get(MARKS, "{}")))
    return {}


def _marks_text(snapshot: Snapshot) -> str | None:
    return None if snapshot.summary is None else snapshot.summary.additional_properties.get(MARKS)


def _is_first(table: IcebergTable, snapshot: Snapshot) -> bool:
    """Return whether a snapshot never had a parent.

    The result is True for a table's first snapshot, and for the first snapshot after the table was
    replaced (``CREATE OR REPLACE TABLE``). Other snapshots can have lost their parent: when
    pyiceberg expires a snapshot, it removes the snapshot's id from the child (Java keeps the id).
    The sequence number alone does not show which snapshot is the first. In version 1 of the format,
    every snapshot has the number 0. So the first snapshot after an upgrade to version 2 has the
    number 1, although it is not the table's first.
    """
    if _rows_before(snapshot):
        return False
    # A replaced table still lists the snapshots of earlier exports until these snapshots expire.
    return snapshot.sequence_number == _FIRST_NUMBER or any(map(_marks_text, table.snapshots()))


def _rows_before(snapshot: Snapshot) -> int:
    found = {} if snapshot.summary is None else snapshot.summary.additional_properties
    total, added, deleted = (int(found.get(f"{name}-records", 0)) for name in _COUNTS)
    return total - added + deleted


@contextmanager
def _one_try(table: IcebergTable) -> Iterator[None]:
    """Turn off pyiceberg's retries, because pyiceberg does not check the marks before a retry."""
    from pyiceberg.table import TableProperties

    properties = table.metadata.properties
    key = TableProperties.COMMIT_NUM_RETRIES
    given = properties.get(key)
    properties[key] = "0"
    log = logging.getLogger("pyiceberg.io.pyarrow")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        if given is None:
            properties.pop(key, None)
        else:
            properties[key] = given


def _uri(folder: OutputFolder) -> str:
    return f"file://{folder.location}" if folder.is_local else folder.location


def _data_file(table: IcebergTable, folder: OutputFolder, file: TableFile) -> DataFile:
    """Make the entry that describes a new file in the table's metadata.

    The entry is made from the worker's result, so the file is not opened again.
    """
    from pyiceberg.conversions import to_bytes
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record
    from pyiceberg.types import PrimitiveType, StringType

    schema, spec = table.schema(), table.spec()
    lower: dict[int, bytes] = {}
    upper: dict[int, bytes] = {}
    for name, (low, high) in file.bounds.items():
        field = next((field for field in schema.fields if field.name == name), None)
        if field is None or not isinstance(field.field_type, PrimitiveType):
            # Leave out the bounds of a renamed or dropped column. Bounds only speed up queries.
            continue
        bounds: tuple[Any, Any] = (low, high)
        if isinstance(field.field_type, StringType):
            bounds = text_bound(low), text_bound(high)
        if None not in bounds:
            lower[field.field_id] = to_bytes(field.field_type, bounds[0])
            upper[field.field_id] = to_bytes(field.field_type, bounds[1])
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=f"{_uri(folder)}/{file.path}",
        file_format=FileFormat.PARQUET,
        partition=Record(*(_partition_value(file.values[field.name]) for field in spec.fields)),
        record_count=file.rows,
        file_size_in_bytes=file.bytes,
        column_sizes={},
        value_counts={},
        null_value_counts={},
        nan_value_counts={},
        lower_bounds=lower,
        upper_bounds=upper,
        sort_order_id=None,
        spec_id=table.metadata.default_spec_id,
        equality_ids=None,
        key_metadata=None,
        split_offsets=None,
    )


def _partition_value(value: Any) -> Any:
    return (value - _EPOCH).days if isinstance(value, date) else value
