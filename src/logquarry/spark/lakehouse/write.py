"""Writes the messages of one task to files of a table, in a worker; removes the files of crashed
exports.

This module does not import PySpark.

The task writes directly into the table's folder. A file name contains the run (one call of an
export) and the task's attempt. During a commit, a file (the run's note) describes the commit::

    DEST/_logquarry/RUN.json     the table, and its marks after the run's commit

A run writes the note before the first file of a commit, and removes the note after the commit. A
run first locks the destination. If the run then finds the note of an earlier run, the earlier run
has crashed. If the table's marks (:mod:`logquarry.spark.lakehouse`) have reached the marks in the
note, the crashed run's commit succeeded, and its files belong to the table. Otherwise, the new run
removes the files. But a catalog may still be carrying out the crashed run's commit. So before the
new run removes files, it makes an empty commit. After the empty commit, the catalog rejects the
crashed run's commit. Several Iceberg tables can share a destination, so a run removes only files of
earlier runs for the same table.

An object store has no locks, so a new run does not know whether an earlier run has crashed or is
still running. In an object store, a new run therefore removes no files. The user can remove the
files of crashed runs with the table format's ``vacuum`` or ``remove_orphan_files``.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.log import schema
from logquarry.log.batches import DamageLog
from logquarry.log.schema import EXACT_PROPERTIES
from logquarry.log.splits import LogSplit
from logquarry.spark.export import Merged
from logquarry.spark.lakehouse.table import Marks, Table, TableFile
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import TALLY_COLUMNS, PartedFiles, Summary, WrittenFile
from logquarry.spark.tasks import ReadTask, read_batches

if TYPE_CHECKING:
    from logquarry.spark.decode import BodyDecoder

logger = logging.getLogger(__name__)

VALUE: Final = "value"
"""Column of decoded bodies."""
REASON: Final = "reason"
"""Column of the table of dead letters: the reason why the body cannot be decoded."""
_PLACE: Final = (
    "broker", "topic", "queue_id", "queue_offset", "physical_offset", "store_timestamp",
)  # fmt: skip
_LONGEST_WORD: Final = 60


@dataclass(frozen=True, kw_only=True)
class TableResult:
    """The result of one task; `dead` are the files of the new dead letters."""

    files: tuple[TableFile, ...]
    dead: tuple[TableFile, ...]
    summary: Summary


@dataclass(frozen=True, kw_only=True)
class TableWriter:
    """Writes the files of a task. Picklable.

    Attributes:
        run: name of the run, of letters and digits.
        decoder: makes the column ``value``; None without decoding.
        dead_from: a physical offset for each broker. The table of dead letters already has the
            undecodable messages before this offset.
    """

    folder: OutputFolder
    run: str
    partition_by: tuple[str, ...]
    partitions_in_files: bool
    decoder: BodyDecoder | None = None
    dead_folder: OutputFolder | None = None
    dead_from: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, task: ReadTask) -> TableResult:
        """Write the messages of a task; remove the files if the attempt fails."""
        columns, is_kafka = task.columns, task.options.is_kafka
        wanted = table_schema(columns, is_kafka=is_kafka, decoder=self.decoder)
        left_out = () if self.partitions_in_files else self.partition_by
        files = PartedFiles(
            self.folder,
            task.broker,
            pa.schema([column for column in wanted if column.name not in left_out]),
            _namer(self.run, task, self.partition_by),
            self.partition_by,
            exact="properties" in columns,
        )
        damage = DamageLog()
        letters = None if self.decoder is None else _DeadLetters(self, self.decoder, task)
        # Read native columns, which partitioning and counting need; Kafka's columns are added
        # below.
        native = replace(task.options, schema="native", columns=None)
        batches = read_batches(replace(task, columns=self._needed(task), options=native), damage)
        if is_kafka:
            batches = (_with_kafka(batch, columns) for batch in batches)
        try:
            summary = files.add_all(batches if letters is None else letters.sorted_out(batches))
            written = _closed(files)
            dead = () if letters is None else _closed(letters.files)
        except BaseException:
            # Remove the files, because a later attempt of the task uses other file names.
            files.remove_all()
            if letters is not None:
                letters.files.remove_all()
            raise
        summary.damage = damage.spans
        return TableResult(files=written, dead=dead, summary=summary)

    def _needed(self, task: ReadTask) -> tuple[str, ...]:
        own = schema.sources(task.columns) if task.options.is_kafka else task.columns
        needed = [*own, *TALLY_COLUMNS, "physical_offset"]
        needed += [EXACT_PROPERTIES.name] if "properties" in task.columns else []
        needed += [*_PLACE, "body"] if self.decoder is not None else []
        return tuple(dict.fromkeys(needed))


def _with_kafka(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    made = schema.kafka_batch(batch, columns)
    for name in made.schema.names:
        # Both the table of messages and the table of dead letters have a column topic.
        if name not in batch.schema.names:
            batch = batch.append_column(made.schema.field(name), made.column(name))
    return batch


class _DeadLetters:
    def __init__(self, writer: TableWriter, decoder: BodyDecoder, task: ReadTask) -> None:
        assert writer.dead_folder is not None, "an export that decodes has a table of dead letters"
        self._decoder = decoder
        self._done_to = writer.dead_from.get(task.broker, 0)
        self.files = PartedFiles(
            writer.dead_folder, task.broker, dead_letter_schema(), _namer(writer.run, task, ())
        )

    def sorted_out(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches with the column ``value``, but without undecodable messages."""
        for batch in batches:
            values, failed = self._decoder.decode(batch.column("body"))
            if failed:
                self._keep(batch, failed)
                sound = [row for row in range(batch.num_rows) if row not in failed]
                batch = batch.take(pa.array(sound, pa.int64()))  # noqa: PLW2901
                values = values.take(pa.array(sound, pa.int64()))
            if batch.num_rows:
                yield batch.append_column(VALUE, values)

    def _keep(self, batch: pa.RecordBatch, failed: Mapping[int, str]) -> None:
        offsets = batch.column("physical_offset")
        rows = [row for row in sorted(failed) if offsets[row].as_py() >= self._done_to]
        if rows:
            taken = batch.take(pa.array(rows, pa.int64()))
            reasons = pa.array([failed[row] for row in rows], pa.string())
            columns = [taken.column(name) for name in (*_PLACE, "body")]
            arrays = [*columns[:-1], reasons, columns[-1]]
            self.files.add(pa.Table.from_arrays(arrays, schema=dead_letter_schema()))


def table_schema(
    columns: Sequence[str], *, is_kafka: bool, decoder: BodyDecoder | None = None
) -> pa.Schema:
    """Return the columns of a table; with a decoder also the column of decoded bodies."""
    if is_kafka:
        sources = schema.arrow_schema(schema.sources(columns))
        return schema.kafka_batch(pa.RecordBatch.from_pylist([], sources), columns).schema
    own = schema.arrow_schema(columns)
    return own if decoder is None else own.append(decoder.field(VALUE))


def dead_letter_schema() -> pa.Schema:
    """Return the columns of the dead letters: place of the message, reason, and body."""
    place = schema.arrow_schema(_PLACE)
    return place.append(pa.field(REASON, pa.string())).append(pa.field("body", pa.binary()))


# ------------------------------------------------------------------------------------------ names
def _namer(
    run: str, task: ReadTask, partition_by: Sequence[str]
) -> Callable[[tuple[Any, ...], int], tuple[str, str]]:
    """Make file names: ``topic=orders/part-BROKER-OFFSET-RUN-ATTEMPT-NUMBER.parquet``.

    In a topic's name, ``_`` replaces each character that a library may escape. Two topics can
    therefore share a folder. Each file name is still unique, because it contains the attempt and a
    number.
    """
    first = task.plan.parts[0]
    assert isinstance(first, LogSplit)
    stem = f"part-{_plain(task.broker)}-{first.start:020d}-{run}-{uuid.uuid4().hex[:12]}"
    numbers = count()

    def name(values: tuple[Any, ...], _: int) -> tuple[str, str]:
        folders = [f"{n}={_plain(v)}" for n, v in zip(partition_by, values, strict=True)]
        path = "/".join([*folders, f"{stem}-{next(numbers)}.parquet"])
        return path, path

    return name


def noted_run(path: str) -> str | None:
    """Return the run that wrote the note at a path of the destination; None for other files."""
    place, _, name = path.rpartition("/")
    return name.removesuffix(_NOTE) if place == CONTROL and name.endswith(_NOTE) else None


def table_folders(paths: Iterable[str]) -> set[str]:
    """Return the subfolders, with a final slash, that are Delta or Iceberg tables.

    `paths` are all files of a folder.
    """
    found: set[str] = set()
    for path in paths:
        place, is_delta, _ = path.partition("/_delta_log/")
        if not is_delta and path.endswith(".metadata.json"):
            place, is_delta, _ = path.rpartition("/metadata/")
        if is_delta:
            found.add(f"{place}/")
    return found


def is_of_run(path: str, run: str) -> bool:
    """Return whether a run wrote the file."""
    name = path.rpartition("/")[2]
    return name.startswith("part-") and f"-{run}-" in name and name.endswith(".parquet")


def _plain(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", str(value))[:_LONGEST_WORD] or "_"


# ----------------------------------------------------------------------------------------- bounds
def _closed(files: PartedFiles) -> tuple[TableFile, ...]:
    names = files.partition_by
    return tuple(
        table_file(files.folder, file, dict(zip(names, file.values, strict=True)))
        for file in files.close()
    )


def table_file(
    folder: OutputFolder, file: WrittenFile | Merged, values: Mapping[str, Any]
) -> TableFile:
    """Describe a written file for the table; `values` are the values of the partition columns."""
    bounds, nulls = column_statistics(folder, file.path)
    return TableFile(
        path=file.path,
        rows=file.rows,
        bytes=file.bytes,
        values=values,
        bounds=bounds,
        nulls=nulls,
    )


def column_statistics(
    folder: OutputFolder, path: str
) -> tuple[dict[str, tuple[Any, Any]], dict[str, int]]:
    """Return the statistics of the columns in a Parquet file.

    Returns ((smallest, largest) value by column, number of nulls by column). A column is in neither
    mapping if the file lacks its statistics. A column with only nulls has no smallest value.
    """
    with folder.open(path) as source:
        metadata = pq.read_metadata(source)
    found: dict[str, tuple[Any, Any]] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            name, statistics = column.path_in_schema, column.statistics
            if "." in name:
                continue
            if statistics is None or not statistics.has_null_count:
                unknown.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + statistics.null_count
            if statistics.null_count == column.num_values:
                continue
            if not statistics.has_min_max:
                unknown.add(name)
                continue
            low, high = statistics.min_raw, statistics.max_raw
            if name in found:
                low, high = min(low, found[name][0]), max(high, found[name][1])
            found[name] = (low, high)
    for name in unknown:
        found.pop(name, None)
        nulls.pop(name, None)
    return found, nulls


CONTROL: Final = "_logquarry"
_NOTE: Final = ".json"
_ON_ITS_WAY: Final = "on_its_way"


class Run:
    """A running export. The export locks its destination if the destination is on a local disk.

    The first of `tables` is the table of the messages.
    """

    def __init__(self, folder: OutputFolder, tables: Sequence[Table]) -> None:
        self._folder = folder
        self._tables = tables
        self.name = ""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the destination; remove the files of crashed runs if no table owns the files."""
        self._folder.make()
        lock = self._folder.lock()
        try:
            if lock is not None:
                self._clear()
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def begin_commit(self, marks: Marks, table_id: str | None) -> None:
        """Write the note of the next commit; call before the first file is written.

        `table_id` is the id of the table; None if the table does not exist yet.
        """
        self.name = uuid.uuid4().hex[:12]
        self._folder.make(CONTROL)
        self.tell(marks, table_id, is_on_its_way=False)

    def tell(self, marks: Marks, table_id: str | None, *, is_on_its_way: bool = True) -> None:
        """Update the note with the marks that the commit will set; call just before the commit.

        If `is_on_its_way` is true, the catalog can receive the commit at any time after this call.
        """
        path = self._note(self.name)
        document = {
            "table": self._tables[0].name,
            "id": table_id,
            "marks": dict(marks),
            _ON_ITS_WAY: is_on_its_way,
        }
        self._folder.write_json(path, document, by_way_of=f"{path}.tmp")

    def commit_done(self, *committed: Sequence[TableFile]) -> None:
        """After a commit, remove the files of killed attempts, and then the note.

        If a worker is killed, Spark repeats its task. The files of the killed attempt then belong
        to no table. These files are in the same folders as the files of the repeated task.

        Args:
            committed: for each table, the files that belong to it now.
        """
        for table, files in zip(self._tables, committed, strict=False):
            folder, paths = table.folder, {file.path for file in files}
            for place in {path.rpartition("/")[0] for path in paths} if folder.is_local else ():
                with suppress(OSError):
                    for name, _ in folder.names(place):
                        path = f"{place}/{name}" if place else name
                        if is_of_run(path, self.name) and path not in paths:
                            folder.remove(path)
        self._folder.remove(self._note(self.name))
        self.name = ""

    def give_up(self) -> None:
        """Remove the files of a commit that has failed and cannot succeed later."""
        if self.name:
            self._clear_run(self.name, self._read(self.name), may_be_on_its_way=False)
            self.name = ""

    def leave(self) -> None:
        """End the commit without removing its note and files.

        Call this if it is unknown whether the commit succeeded; the next run checks this.
        """
        self.name = ""

    def _clear(self) -> None:
        for path in sorted(self._folder.files(CONTROL)):
            if path.endswith(".tmp"):
                self._folder.remove(path)
            elif (run := noted_run(path)) is not None:
                document = self._read(run)
                if not document or self._is_ours(document):
                    self._clear_run(run, document)
                elif document.get("table") is None:
                    logger.warning(
                        "%s/%s: an earlier version wrote this note without the name of a table: "
                        "the export does not remove the files of this run: remove them (vacuum, "
                        "remove_orphan_files), then remove the note",
                        *(self._folder.location, path),
                    )

    def _read(self, run: str) -> dict[str, Any]:
        try:
            document = self._folder.read_json(self._note(run))
        except ValueError:
            # A power cut can leave an empty note. The files of the crashed run then stay in the
            # folder.
            document = None
        return document if isinstance(document, dict) else {}

    def _is_ours(self, document: Mapping[str, Any]) -> bool:
        """Return whether an export into this table wrote the note.

        The caller removes the files of the run that wrote the note. So the caller must skip the
        notes of exports into other tables.
        """
        table = self._tables[0]
        table_id = document.get("id")
        if table_id is not None and (state := table.look()) is not None and state.id == table_id:
            return True
        # Before the commit is sent, the files belong to no table. Then the table's name in the
        # note is enough. Later, only the id counts: another catalog can have a table of the same
        # name.
        return document.get(_ON_ITS_WAY) is False and table.is_called(str(document.get("table")))

    def _clear_run(
        self, run: str, document: Mapping[str, Any], *, may_be_on_its_way: bool = True
    ) -> None:
        wanted = document.get("marks")
        if run.isalnum() and isinstance(wanted, dict):
            may_come = may_be_on_its_way and document.get(_ON_ITS_WAY) is not False
            for table in self._tables:
                if _has(table, wanted, may_come=may_come):
                    continue
                paths = list(table.folder.files())
                # Skip subfolders that are tables themselves. In earlier versions, the table of dead
                # letters could be such a subfolder.
                nested = tuple(table_folders(paths))
                for path in paths:
                    if is_of_run(path, run) and not path.startswith(nested):
                        table.folder.remove(path)
        self._folder.remove(self._note(run))

    @staticmethod
    def _note(run: str) -> str:
        return f"{CONTROL}/{run}{_NOTE}"


def _has(table: Table, wanted: Marks, *, may_come: bool) -> bool:
    """Return whether the commit succeeded.

    If `may_come` is true, the catalog may still carry out the commit. Then this function first
    makes an empty commit, after which the catalog can no longer carry out the other commit.
    """
    state = table.look()
    if state is None or _reached(state.marks(wanted), wanted):
        return state is not None
    if not may_come:
        return False
    table.append((), {}, {})
    state = table.look()
    return state is not None and _reached(state.marks(wanted), wanted)


def _reached(found: Marks, wanted: Marks) -> bool:
    return bool(wanted) and all(found.get(name, -1) >= value for name, value in wanted.items())
