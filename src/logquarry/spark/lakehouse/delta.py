"""Reads and commits a Delta table with the package `deltalake`.

A commit of files stores the marks (see :mod:`.table`) as application transactions (``txn``
actions), and Delta's checkpoints keep these transactions. If two concurrent commits change the same
mark, Delta rejects one commit.

`deltalake` syncs no file of a local table. So this module syncs the new files after each commit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.spark.lakehouse.table import (
    PROPERTY,
    CommitUnknown,
    Marks,
    TableFile,
    TableState,
    check_location,
    check_unmoved,
    known_document,
    require_package,
    text_bound,
)
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import STATISTICS

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.table import ProtocolVersions

_APP: Final = "logquarry:"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DAY: Final = "day"
_LOG: Final = "_delta_log"
"""Folder of a table's commits."""
_CHECKPOINT: Final = ".checkpoint."
_FORGET: Final = "delta.setTransactionRetentionDuration"
"""Property of a table: time after which Delta drops the application transactions."""
_CONSTRAINT: Final = "delta.constraints."
"""Prefix of the properties that are CHECK constraints: each is an SQL expression."""
_INDEXED: Final = "delta.dataSkippingStatsColumns"
"""Property of a table: the columns that have statistics in the log.

If a table lacks the property, the package `deltalake` expects statistics of all columns. If such a
table has a file with statistics of only some columns, a filter on another column finds no row of
the file (`DeltaTable.to_pyarrow_table` and `to_pyarrow_dataset`, deltalake 1.6).
"""
_INDEXED_COUNT: Final = "delta.dataSkippingNumIndexedCols"
_UNSUPPORTED: Final = "Unsupported table features required:"
"""Start of the error of `deltalake` for a commit that it refused before it wrote any file."""
_FEATURES_FROM: Final = 3
"""First version of Delta's writer protocol with features that `deltalake` may be unable to write.
Exports create tables of version 2.
"""
_COLUMN: Final = {"name": "body", "type": "binary", "nullable": True, "metadata": {}}
_EMPTY_TABLE: Final = {
    "id": "logquarry",
    "format": {"provider": "parquet", "options": {}},
    "schemaString": json.dumps({"type": "struct", "fields": [_COLUMN]}),
    "partitionColumns": [],
    "configuration": {},
}


class Delta:
    """A Delta table; implements :class:`~logquarry.spark.lakehouse.table.Table`."""

    partitions_in_files = False

    def __init__(self, folder: OutputFolder, options: Mapping[str, str] | None = None) -> None:
        require_package("deltalake")
        check_location(folder, "deltalake")
        self.folder = folder
        self._options = dict(options or {}) or None
        self._synced: Collection[str] | None = None
        self._accepted: ProtocolVersions | None = None

    @property
    def name(self) -> str:
        return self.folder.location

    def is_called(self, name: str) -> bool:
        # Two local paths are equal if they resolve to the same folder.
        if not self.folder.is_local:
            return name == self.name
        try:
            return os.path.realpath(name) == os.path.realpath(self.name)
        except ValueError:
            # The name is no path: it has a NUL, or text that UTF-8 cannot encode.
            return False

    def _open(self) -> DeltaTable | None:
        from deltalake import DeltaTable

        where = self.folder.location
        with self._our_errors():
            if not DeltaTable.is_deltatable(where, self._options):
                return None
            return DeltaTable(where, storage_options=self._options)

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        from deltalake.exceptions import CommitFailedError, DeltaError

        try:
            yield
        except CommitFailedError:
            raise
        except DeltaError as error:
            raise StoreUnavailable(f"{self.name}: {error}") from error

    def _there(self) -> DeltaTable:
        table = self._open()
        if table is None:
            raise StoreUnavailable(f"{self.name}: the table no longer exists")
        return table

    def look(self) -> TableState | None:
        table = self._open()
        if table is None:
            return None
        metadata = table.metadata()
        properties = metadata.configuration
        document = known_document(self.name, "Delta", properties, metadata.partition_columns)
        if _FORGET in properties:
            # With this property, Delta drops the marks after some time. The export would then add
            # all messages again.
            raise UsageError(
                f"{self.name}: with the property {_FORGET}, Delta forgets which messages the table "
                "has: remove the property. If no export has added messages for longer than "
                f"{properties[_FORGET]!r}, export into another table"
            )
        if constraint := next((name for name in properties if name.startswith(_CONSTRAINT)), None):
            # Delta requires that a writer checks the rows, but `deltalake` does not check them when
            # it adds whole files.
            raise UsageError(
                f"{self.name}: the export cannot check the constraint "
                f"{constraint.removeprefix(_CONSTRAINT)} ({properties[constraint]}): drop the "
                "constraint, or export into another table"
            )
        self._require_features(table)
        schema = pa.schema(table.schema().to_arrow())
        return TableState(str(metadata.id), document, schema, partial(_marks, table))

    def create(self, schema: pa.Schema, partition_by: Sequence[str], document: str) -> None:
        from deltalake import DeltaTable, Schema

        if _DAY in partition_by:
            schema = schema.append(pa.field(_DAY, pa.date32()))
        # Delta refuses the property if it lists a partition column.
        indexed = [n for n in schema.names if n in STATISTICS and n not in partition_by]
        index = {_INDEXED: ",".join(indexed)} if indexed else {_INDEXED_COUNT: "0"}
        with self._our_errors():
            DeltaTable.create(
                self.folder.location,
                schema=Schema.from_arrow(schema),
                mode="error",
                partition_by=list(partition_by) or None,
                configuration={PROPERTY: document, **index},
                storage_options=self._options,
                raise_if_key_not_exists=False,
            )
        self._sync_log()

    def append(self, files: Sequence[TableFile], marks: Marks, before: Marks) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.exceptions import CommitFailedError

        table = self._there()
        check_unmoved(self.name, _marks(table, marks), before)
        types = {field.name: field.type for field in pa.schema(table.schema().to_arrow())}
        indexed = table.metadata().configuration.get(_INDEXED, "")
        names = [name for name in indexed.split(",") if name]
        now = int(time.time() * 1000)
        moved = [Transaction(_APP + name, value, now) for name, value in marks.items()]
        record = {PROPERTY: json.dumps({"from": dict(before), "to": dict(marks)})}
        try:
            with self._our_errors():
                table.create_write_transaction(
                    [_add_action(file, names, types, now) for file in files],
                    mode="append",
                    schema=table.schema(),
                    partition_by=table.metadata().partition_columns or None,
                    commit_properties=CommitProperties(
                        custom_metadata=record, app_transactions=moved
                    ),
                )
            self._sync_log()  # The caller now removes its own record of this commit.
        except CommitFailedError as error:
            self._check_features(error)
            check_unmoved(self.name, _marks(self._there(), marks), before)
            raise CommitUnknown(self.name, error) from error
        except (StoreUnavailable, OSError) as error:
            self._check_features(error)
            raise CommitUnknown(self.name, error) from error

    def _require_features(self, table: DeltaTable) -> None:
        """Raise UsageError if `deltalake` cannot commit to a table with these features.

        `deltalake` checks the features only in a commit. The export would then have written all
        files already. So this method makes an empty commit to a temporary table with the same
        features.
        """
        from deltalake import DeltaTable

        protocol = table.protocol()
        if protocol.min_writer_version < _FEATURES_FROM or protocol == self._accepted:
            return
        wanted = {
            "minReaderVersion": protocol.min_reader_version,
            "minWriterVersion": protocol.min_writer_version,
            "readerFeatures": protocol.reader_features,
            "writerFeatures": protocol.writer_features,
        }
        actions = (
            {"protocol": {name: value for name, value in wanted.items() if value is not None}},
            {"metaData": _EMPTY_TABLE},
        )
        with suppress(OSError), TemporaryDirectory(prefix="logquarry-") as folder:
            log = Path(folder, _LOG)
            log.mkdir()
            (log / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)))
            try:
                trial = DeltaTable(folder)
                trial.create_write_transaction([], mode="append", schema=trial.schema())
            except Exception as error:
                # After any other error, the real commit shows whether it is possible.
                self._check_features(error)
        self._accepted = protocol

    def _check_features(self, error: Exception) -> None:
        """Raise UsageError if `deltalake` refused a commit because of the table's features."""
        _, refused, features = str(error).partition(_UNSUPPORTED)
        if refused:
            raise UsageError(
                f"{self.name}: the package deltalake cannot write to a table with these features: "
                f"{features.strip(' []')}: drop the features, or export into another table"
            ) from error

    def _sync_log(self) -> None:
        """Sync the new files in the folder of the commits.

        The first call also syncs the files of earlier exports, because a crashed export may not
        have synced its commit. Readers of the table do not need the commits before the newest
        checkpoint, so the first call does not sync these commits. A table can have thousands of
        commits, and each sync takes milliseconds.
        """
        if not self.folder.is_local:
            return
        if self._synced is None:
            # The name of a commit or checkpoint begins with its version, padded with zeros.
            found = set(self.folder.files(_LOG))
            newest = max((file for file in found if _CHECKPOINT in file), default="")
            self._synced = {file for file in found if file < newest.partition(_CHECKPOINT)[0]}
        self._synced = self.folder.sync_new(self._synced, _LOG)

    def compact(self, target_size: int | None) -> dict[str, Any]:
        """Merge small files; return the metrics of `deltalake`."""
        from deltalake.exceptions import CommitFailedError

        before = set(self.folder.files()) if self.folder.is_local else set()
        try:
            with self._our_errors():
                done = self._there().optimize.compact(target_size=target_size)
        except CommitFailedError as error:
            self._check_features(error)
            raise
        self.folder.sync_new(before)
        return done


def _marks(table: DeltaTable, names: Iterable[str]) -> dict[str, int]:
    found = {name: table.transaction_version(_APP + name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _add_action(
    file: TableFile, indexed: Sequence[str], types: Mapping[str, pa.DataType], now: int
) -> Any:
    from deltalake.transaction import AddAction

    stats = {"numRecords": file.rows, **_statistics(file, indexed, types)}
    return AddAction(
        path=file.path,
        size=file.bytes,
        partition_values={
            name: None if value is None else str(value) for name, value in file.values.items()
        },
        modification_time=now,
        data_change=True,
        stats=json.dumps(stats),
    )


def _statistics(
    file: TableFile, indexed: Sequence[str], types: Mapping[str, pa.DataType]
) -> dict[str, Any]:
    """Return Delta's statistics of the columns in `indexed`. If one of these columns lacks
    statistics, return {}.

    Incomplete statistics would hide rows (see `_INDEXED`).
    """
    least: dict[str, Any] = {}
    largest: dict[str, Any] = {}
    for name in indexed:
        if name not in file.nulls:
            return {}
        if name in file.bounds:
            low, high = (_json_value(value, types.get(name)) for value in file.bounds[name])
            if low is None or high is None:
                return {}
            least[name], largest[name] = low, high
    if not indexed:
        return {}
    nulls = {name: file.nulls[name] for name in indexed}
    return {"minValues": least, "maxValues": largest, "nullCount": nulls}


def _json_value(value: Any, kind: pa.DataType | None) -> Any:
    """Convert a column's smallest or largest value to the form of Delta's statistics."""
    if kind is None:
        return None
    if pa.types.is_integer(kind):
        return value
    if pa.types.is_timestamp(kind):
        try:
            # The conversion loses no digit: store timestamps are whole milliseconds.
            moment = _EPOCH + timedelta(microseconds=value)
        except OverflowError:
            return None
        return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
    return text_bound(value)
