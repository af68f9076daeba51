"""Exports to a table in steps.

A step plans a batch, writes its files and commits them, so each message is exported exactly once.

The table holds all state of a step, so any process can make the next step. This module does not
import PySpark: the caller passes a function that runs tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.log.location import stores_by_name
from logquarry.spark.decode import BodyDecoder, DecodeOptions, decoder_for
from logquarry.spark.lakehouse.table import (
    CommitUnknown,
    Marks,
    Table,
    TableFile,
    TableState,
    check_letters,
    check_same,
    check_types,
    document,
    identity,
    letters_document,
    parsed,
)
from logquarry.spark.lakehouse.write import (
    VALUE,
    Run,
    TableResult,
    TableWriter,
    dead_letter_schema,
    table_schema,
)
from logquarry.spark.options import OffsetLimit, ReadOptions
from logquarry.spark.parquet import Summary
from logquarry.spark.stream_offset import START, LastFrame, StreamOffset
from logquarry.spark.stream_planner import Limits, StreamPlanner
from logquarry.spark.tasks import ReadTask
from logquarry.systems import held

QUIET_BYTES: Final = 256 << 20
"""If more than this many bytes of log contain no message for the table, the export commits the end
of these bytes as the new offset, without adding files. After a restart, the export does not read
these bytes again.
"""

Work = Callable[[ReadTask], TableResult]
"""Function that writes the messages of one task."""
RunTasks = Callable[[Sequence[ReadTask], Work], list[TableResult]]
"""Function that runs all tasks and returns their results in the order of the tasks."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Source and destination of an export.

    Attributes:
        dead_letters: table of the bodies that cannot be decoded; None without decoding.
        moved: whether to accept a store whose path has changed since the last export.
    """

    table: Table
    dead_letters: Table | None
    read: ReadOptions
    partition_by: tuple[str, ...]
    decode: DecodeOptions | None
    moved: bool = False

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The options that must be the same in all exports into the table."""
        return identity(self.read, self.partition_by, self.decode)

    def look_at_letters(self, state: TableState | None) -> TableState | None:
        """Return the state of the table of dead letters; None if it does not exist yet.

        Args:
            state: state of the table of the messages; None if the table does not exist yet.

        Raises:
            UsageError: if the dead letters belong to another table.
        """
        letters = None if self.dead_letters is None else self.dead_letters.look()
        if letters is not None:
            assert self.dead_letters is not None
            text = letters.document
            check_letters(self.dead_letters, text, self.table, state, self.identity)
        return letters


@dataclass(kw_only=True)
class TableSummary:
    """The result of an export to a table; ``on_commit`` gets the totals of the export so far.

    `dead_messages` counts the undecodable bodies.
    """

    location: str
    dead_letters: str | None
    files: int = 0
    bytes: int = 0
    summary: Summary = field(default_factory=Summary)
    dead_messages: int = 0
    commits: int = 0
    seconds: float = 0.0

    @property
    def messages(self) -> int:
        """Number of messages added to the table."""
        return self.summary.total.messages


class Advance:
    """The export into one table.

    `is_stopped` is true if damage has ended the export (on_damage="stop").
    """

    def __init__(self, target: Target, run: Run, run_tasks: RunTasks) -> None:
        self._target = target
        self._run = run
        self._run_tasks = run_tasks
        self._decoder: BodyDecoder | None = None
        self.is_stopped = False
        letters = target.dead_letters
        self.done = TableSummary(
            location=target.table.folder.location,
            dead_letters=None if letters is None else letters.folder.location,
        )
        self._state = state = target.table.look()
        places = stores_by_name(target.read.paths, target.read.storage_options)
        self._committed: dict[str, int] = {}
        kept: dict[str, Any] | None = None
        if state is not None:
            found = parsed(target.table.name, state.document)
            check_same(target.table.name, target.identity, found)
            columns = table_schema(target.read.names, is_kafka=target.read.is_kafka)
            check_types(target.table.name, columns, state.schema)
            names = [name for broker in places for name in (_broker(broker), *_frame(broker))]
            self._committed = state.marks([*names, *map(_store, places.values())])
            self._check_places(places)
            kept = found["start"]
            if target.decode is not None:
                self._decoder = self._known_decoder(target.decode, state.schema)
        self._planner, self._at = self._planned(kept)
        if target.decode is not None and not target.decode.needs_sample:
            # Raise the error for an invalid schema now, not after the first message.
            self._can_decode(())

    def _known_decoder(self, decode: DecodeOptions, found: pa.Schema) -> BodyDecoder | None:
        """Make the decoder for an existing table, whose columns are ``found``."""
        name = self._target.table.name
        at = found.get_field_index(VALUE)
        known = None if at < 0 else found.types[at]
        if decode.needs_sample and (known is None or not pa.types.is_struct(known)):
            # A schema inferred from later messages could contradict the files that the table has.
            raise UsageError(
                f"{name}: has no struct column {VALUE} now, but only this column records the "
                "schema that an earlier export inferred: restore the column, or export into "
                "another table"
            )
        decoder = decoder_for(decode, known)
        if decoder is not None:
            check_types(name, pa.schema([decoder.field(VALUE)]), found)
        return decoder

    @property
    def _table_id(self) -> str | None:
        return None if self._state is None else self._state.id

    def _check_places(self, places: Mapping[str, str]) -> None:
        name = self._target.table.name
        for broker, location in places.items():
            by_name = self._committed.get(_broker(broker))
            by_place = self._committed.get(_store(location))
            if by_name is None and by_place is not None:
                raise UsageError(
                    f"{name}: the store {location} was exported before, under another name than "
                    f"{broker!r}: a store's name depends on the stores of the call; pass the same "
                    "stores as before"
                )
            if by_name is not None and by_place != by_name and not self._target.moved:
                raise UsageError(
                    f"{name}: broker {broker!r} was exported before from another path than "
                    f"{location}: if it is the same store, pass --moved (moved=True)"
                )

    def _planned(self, kept: Mapping[str, Any] | None) -> tuple[StreamPlanner, StreamOffset]:
        read = self._target.read
        known = {
            name.removeprefix(_broker("")): value
            for name, value in self._committed.items()
            if name.startswith(_broker(""))
        }
        # If the table already has messages of a store, ignore the start in the options for this
        # store.
        start = OffsetLimit(default=read.start.default, brokers={**read.start.brokers, **known})
        planner = StreamPlanner(replace(read, start=start), read.names)
        first = planner.initial()
        if kept is not None:
            first = replace(StreamOffset.from_json({START: kept}), brokers=first.brokers)
        frames = {
            broker: LastFrame(*(self._committed[name] for name in _frame(broker)))
            for broker in known
            if all(name in self._committed for name in _frame(broker))
        }
        return planner, replace(first.moved(known), first=None, frames=frames)

    # ------------------------------------------------------------------------------------ one step
    def to_what_is_there(self) -> None:
        """Limit all steps to the messages that are in the logs now."""
        self._planner.prepare_available_now()

    def step(self) -> bool:
        """Export the next batch; return False if there was no new batch.

        Raises:
            CorruptFrame: if a log is damaged, and the option ``on_damage`` is neither ``"skip"``
                nor ``"stop"``.
            StoreUnavailable: if another export has committed to the table since this export began.
            CommitUnknown: if it is unknown whether the commit succeeded.
        """
        read = self._target.read
        end = self._planner.latest(self._at, Limits(read.max_bytes, read.max_rows))
        if self.is_stopped or self._marks(end) == self._marks(self._at):
            return False
        tasks = self._planner.tasks(self._at, end)
        if not self._can_decode(tasks):
            return False
        self._run.begin_commit(self._marks(end), self._table_id)
        try:
            results = self._write(tasks)
            stops = _first_damage(tasks, results) if read.on_damage == "stop" else {}
            # If damage has stopped the export, drop the last frame: the frame may be after the
            # damage.
            frames = {b: frame for b, frame in end.frames.items() if b not in stops}
            end = replace(end.moved(stops), first=None, frames=frames)
            kept: list[TableResult] = []
            for task, result in zip(tasks, results, strict=True):
                if _begins(task) <= stops.get(task.broker, _begins(task)):
                    kept.append(result)
                else:
                    self._remove(result)
            files = [file for result in kept for file in result.files]
            dead = [file for result in kept for file in result.dead]
            with held():
                marks = self._marks(end)
                is_far = any(
                    value - self._committed.get(name, 0) > QUIET_BYTES
                    for name, value in marks.items()
                )
                if files or dead or is_far:
                    self._commit(files, dead, end)
                else:
                    self._run.give_up()
        except CommitUnknown:
            self._run.leave()
            raise
        except BaseException:
            self._run.give_up()
            raise
        self._at = end
        self.is_stopped = bool(stops)
        self.done.files += len(files)
        self.done.bytes += sum(file.bytes for file in files)
        self.done.dead_messages += sum(file.rows for file in dead)
        self.done.summary = Summary.of([self.done.summary, *(result.summary for result in kept)])
        return True

    def settle(self) -> None:
        """Commit the offsets that the steps have reached, but have not yet committed.

        A step that finds no message for the table usually commits nothing.
        """
        marks = self._marks(self._at)
        is_ahead = any(self._committed.get(name) != value for name, value in marks.items())
        if is_ahead and self._can_decode(()):
            with held():
                self._commit([], [], self._at)

    def _can_decode(self, tasks: Sequence[ReadTask]) -> bool:
        """Make the decoder if needed; return False if its schema is still unknown."""
        if self._target.decode is not None and self._decoder is None:
            self._decoder = decoder_for(self._target.decode, None, tasks)
        return self._target.decode is None or self._decoder is not None

    def _remove(self, result: TableResult) -> None:
        for file in result.files:
            self._target.table.folder.remove(file.path)
        if self._target.dead_letters is not None:
            for file in result.dead:
                self._target.dead_letters.folder.remove(file.path)

    def _write(self, tasks: Sequence[ReadTask]) -> list[TableResult]:
        target = self._target
        dead_from: dict[str, int] = {}
        if (state := target.look_at_letters(self._state)) is not None:
            names = {_broker(task.broker): task.broker for task in tasks}
            dead_from = {names[name]: value for name, value in state.marks(names).items()}
        writer = TableWriter(
            folder=target.table.folder,
            run=self._run.name,
            partition_by=target.partition_by,
            partitions_in_files=target.table.partitions_in_files,
            decoder=self._decoder,
            dead_folder=None if target.dead_letters is None else target.dead_letters.folder,
            dead_from=dead_from,
        )
        return self._run_tasks(tasks, writer)

    def _commit(
        self, files: Sequence[TableFile], dead: Sequence[TableFile], end: StreamOffset
    ) -> None:
        """Commit the dead letters, then the files and the offset ``end``.

        After a crash between the two commits, the next export reads the messages again, but skips
        the dead letters that the table of dead letters already has.
        """
        target, marks = self._target, self._marks(end)
        if not self._run.name:
            self._run.begin_commit(marks, self._table_id)
        self._create()
        self._run.tell(marks, self._table_id)
        if dead:
            assert target.dead_letters is not None
            assert self._state is not None
            state = target.look_at_letters(self._state)
            if state is None:
                kept = letters_document(target.table, self._state.id, target.identity)
                target.dead_letters.create(dead_letter_schema(), (), kept)
                state = target.look_at_letters(self._state)
                assert state is not None
            before = state.marks(marks)
            target.dead_letters.append(dead, _forward(marks, before), before)
        marks |= {
            name: value
            for broker, frame in end.frames.items()
            for name, value in zip(_frame(broker), frame, strict=True)
        }
        before = {name: v for name, v in self._committed.items() if name in marks}
        target.table.append(files, marks, before)
        self._committed |= marks
        self._run.commit_done(files, dead)
        self.done.commits += 1

    def _create(self) -> None:
        if self._state is not None:
            return
        target = self._target
        read, decoder = target.read, self._decoder
        columns = table_schema(read.names, is_kafka=read.is_kafka, decoder=decoder)
        kept = self._at.to_json().get(START, {})
        letters = None if target.dead_letters is None else target.dead_letters.name
        target.table.create(columns, target.partition_by, document(target.identity, kept, letters))
        self._state = target.table.look()
        assert self._state is not None

    # -------------------------------------------------------------------------------------- marks
    def _marks(self, offset: StreamOffset) -> dict[str, int]:
        read = self._target.read
        places = stores_by_name(read.paths, read.storage_options)
        found: dict[str, int] = {}
        for broker, value in offset.brokers.items():
            found[_broker(broker)] = value
            if broker in places:
                found[_store(places[broker])] = value
        return found


def _broker(name: str) -> str:
    return f"broker:{name}"


def _store(location: str) -> str:
    return f"store:{location}"


def _frame(broker: str) -> tuple[str, str]:
    """Return the names of the two marks that store the two values of a LastFrame."""
    return f"frame:{broker}", f"frame_check_sum:{broker}"


def _forward(marks: Marks, before: Marks) -> dict[str, int]:
    """Return the marks. The value of each mark is the new value or the earlier value, whichever is
    larger.

    The dead letters are committed first. After a crash between the two commits, the marks of the
    dead letters are larger than the marks of the messages. The next export must not lower these
    marks.
    """
    return {name: max(value, before.get(name, value)) for name, value in marks.items()}


def _begins(task: ReadTask) -> int:
    part = task.plan.parts[0]
    return int(getattr(part, "start", 0))


def _first_damage(tasks: Sequence[ReadTask], results: Sequence[TableResult]) -> dict[str, int]:
    """For each broker whose log has damage, return the physical offset of the first damage."""
    found: dict[str, int] = {}
    for task, result in zip(tasks, results, strict=True):
        for span in result.summary.damage:
            found[task.broker] = min(span.offset, found.get(task.broker, span.offset))
    return found
