"""An Iceberg table, through the package `pyiceberg`.

The marks are a property of the snapshot that a commit makes, all of them, also those that it does
not move: whoever goes back to an earlier snapshot goes back with the marks. They are a property of
the table besides, for tables whose snapshots of ours have expired.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.spark.lakehouse.table import (
    PROPERTY,
    CommitUnknown,
    Marks,
    TableFile,
    TableState,
    TableUnchanged,
    check_location,
    check_unmoved,
    missing_extra,
    parsed,
    text_bound,
)
from logquarry.spark.output import OutputFolder

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table as IcebergTable

MARKS: Final = "logquarry.offsets"
"""The property of snapshots, and of the table."""
CATALOG_FILE: Final = "catalog.db"
_EPOCH: Final = date(1970, 1, 1)
_DAY: Final = "day"
_TRIES: Final = 5
_LIBRARIES: Final = ("pyiceberg", "sqlalchemy", "requests", "pydantic", "pydantic_core")
_TIMES: Final = ("store_timestamp", "timestamp")
"""What the store time is called, in our table and in Kafka's."""


class Iceberg:
    """An Iceberg table of a catalog.

    Args:
        folder: where its files are.
        identifier: ``NAMESPACE.TABLE``.
        catalog: properties of the catalog, as `pyiceberg` takes them; those that are not given
            come from its own configuration (``name`` says which). None for one in SQLite.
        catalog_file: where that is.
    """

    partitions_in_files = True

    def __init__(
        self,
        folder: OutputFolder,
        identifier: str,
        catalog: Mapping[str, str] | None,
        catalog_file: Path,
    ) -> None:
        try:
            import pyiceberg.catalog  # noqa: F401
        except ModuleNotFoundError:
            raise missing_extra("pyiceberg") from None
        check_location(folder, "pyiceberg", "?#")
        self.folder = folder
        self._identifier = tuple(identifier.split("."))
        if len(self._identifier) < 2 or not all(self._identifier):
            raise UsageError(f"table {identifier!r}: takes NAMESPACE.TABLE")
        self._file = catalog_file if catalog is None else None
        sqlite = {"type": "sql", "uri": f"sqlite:///{catalog_file}"}
        self._properties = dict(sqlite if catalog is None else catalog)

    @property
    def name(self) -> str:
        """Its identifier, and its location."""
        return f"{'.'.join(self._identifier)} ({self.folder.location})"

    @contextmanager
    def _catalog(self) -> Iterator[Catalog]:
        """The catalog, open; its own troubles as one of ours."""
        from pyiceberg.catalog import load_catalog

        properties = dict(self._properties)
        try:
            catalog = load_catalog(properties.pop("name", "logquarry"), **properties)
            try:
                yield catalog
            finally:
                catalog.close()
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in _LIBRARIES:
                raise
            raise StoreUnavailable(f"{self.name}: {error}") from error

    def _load(self, catalog: Catalog) -> IcebergTable | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return catalog.load_table(self._identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None

    def look(self) -> TableState | None:
        """How it stands now."""
        if self._file is not None and not self._file.exists():
            # Whoever opens it makes it.
            return None
        with self._catalog() as catalog:
            table = self._load(catalog)
            if table is None:
                return None
            document = table.properties.get(PROPERTY)
            if document is None:
                raise UsageError(f"{self.name}: an Iceberg table that no export of ours made")
            self._check_parts(table, document)
            return _State(document, table.schema().as_arrow(), _marks(table))

    def _check_parts(self, table: IcebergTable, document: str) -> None:
        """That the table is parted as it was made: files say what of their rows is for that."""
        made = list(parsed(self.name, document).get("partition_by") or [])
        found = [field.name for field in table.spec().fields]
        if found != made:
            raise UsageError(
                f"{self.name}: it is parted by {found} now, and was by {made} when it was made: "
                "change that back, or export into another table"
            )

    def create(self, schema: pa.Schema, partition_by: Sequence[str], document: str) -> None:
        """Make it, without rows."""
        from pyiceberg.table import TableProperties
        from pyiceberg.transforms import DayTransform, IdentityTransform

        with self._catalog() as catalog:
            catalog.create_namespace_if_not_exists(self._identifier[:-1])
            # One transaction: a table without its partitions would be another one.
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
                # The files have no ids of columns: readers find these by their names.
                names = change.table_metadata.schema().name_mapping.model_dump_json()
                change.set_properties({TableProperties.DEFAULT_NAME_MAPPING: names})

    def append(self, files: Sequence[TableFile], marks: Marks, before: Marks) -> None:
        """Add files and move marks, in one commit."""
        from pyiceberg.exceptions import CommitFailedException

        with self._catalog() as catalog:
            for left in reversed(range(_TRIES)):
                table = self._load(catalog)
                if table is None:
                    raise StoreUnavailable(f"{self.name}: the table is not there any more")
                found = _marks(table)
                check_unmoved(self.name, _some(found, marks), before)
                try:
                    self._append(table, files, {**found, **marks})
                    return
                except CommitFailedException as error:
                    # Somebody changed the table between the look and the commit. Where that was
                    # no export, the marks are as they were, and the next try finds them so.
                    if not left:
                        raise StoreUnavailable(
                            f"{self.name}: others change the table all the time: {error}"
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
            except CommitFailedException:
                raise
            except Exception as error:
                # A catalog that did not answer may have done it, or may do it yet.
                raise CommitUnknown(self.name, error) from error

    def data_files(self) -> list[TableDataFile]:
        """The files of the table as it stands now: those that a compaction may merge.

        Not those with deletes, nor of an older way to part the table, nor from elsewhere.
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
        """Put files in the place of others that have the same rows, in one commit.

        Raises:
            TableUnchanged: if the others are not all there any more, or others come first each
                time.
            StoreUnavailable: if the catalog fails; nobody knows then whether there was a commit.
        """
        from pyiceberg.exceptions import CommitFailedException

        removed = {file.path: file for file in old}
        with self._catalog() as catalog:
            for left in reversed(range(_TRIES)):
                table = self._load(catalog)
                there = set() if table is None else {f.path for f in self._data_files(table)}
                if table is None or not there.issuperset(removed):
                    raise TableUnchanged(f"{self.name}: others have changed it meanwhile")
                try:
                    self._replace(table, removed.values(), new)
                    return
                except CommitFailedException as error:
                    if not left:
                        raise TableUnchanged(
                            f"{self.name}: others change the table all the time: {error}"
                        ) from error

    def _replace(
        self, table: IcebergTable, old: Iterable[TableDataFile], new: Sequence[TableFile]
    ) -> None:
        text = json.dumps(dict(_marks(table)), sort_keys=True)
        with _one_try(table):
            change = table.transaction()
            with change.update_snapshot({MARKS: text}).overwrite() as swap:
                for file in old:
                    swap.delete_data_file(file.file)
                for added in new:
                    swap.append_data_file(_data_file(table, self.folder, added))
            change.commit_transaction()


@dataclass(frozen=True, kw_only=True, slots=True)
class TableDataFile:
    """A file of the table.

    Attributes:
        path: below the table's folder.
        rows: how many.
        bytes: of the file.
        values: what its rows have in common, by the names of the table's partition.
        file: what `pyiceberg` knows of it.
    """

    path: str
    rows: int
    bytes: int
    values: Mapping[str, Any]
    file: DataFile


@dataclass(frozen=True)
class _State:
    document: str
    schema: pa.Schema
    found: Marks

    def marks(self, names: Iterable[str]) -> dict[str, int]:
        return _some(self.found, names)


def _some(found: Marks, names: Iterable[str]) -> dict[str, int]:
    return {name: found[name] for name in names if name in found}


def _marks(table: IcebergTable) -> dict[str, int]:
    """The marks of the table's current snapshot, or of the last one before it that has any."""
    snapshot = table.current_snapshot()
    while snapshot is not None:
        summary = snapshot.summary
        text = None if summary is None else summary.additional_properties.get(MARKS)
        if text is not None:
            return dict(json.loads(text))
        parent = snapshot.parent_snapshot_id
        if parent is None:
            return {}
        snapshot = table.snapshot_by_id(parent)
        if snapshot is None:
            return dict(json.loads(table.properties.get(MARKS, "{}")))
    return {}


@contextmanager
def _one_try(table: IcebergTable) -> Iterator[None]:
    """No second try of a commit that came too late: it would not look at the marks again."""
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
    """What the workers know of a file is enough: the driver does not open it."""
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
            # Renamed or dropped since: what readers find by the table's names they find all the
            # same, if not as quickly.
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
