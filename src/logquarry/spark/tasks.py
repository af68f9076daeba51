"""Plans the read tasks of a job (Spark's partitions) on the driver, and reads a task in a worker.

:mod:`logquarry.read.selection` applies the filters; this module packs the selected parts into
tasks. The data source, the exports and the summary use this module, which does not import PySpark.

A read with ``onDamage=quarantine`` copies the damage that it skips::

    FOLDER/BROKER/00000000000000078237.bin    the damaged bytes, without the zeros at their end
    FOLDER/BROKER/00000000000000078237.json   file, offset, length, kind and reason

A file name depends only on broker and physical offset, so a second read finds the copies that the
first read made.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from logquarry.errors import MessageNotFound, StoreNotFound, StoreUnavailable, UsageError
from logquarry.log import schema
from logquarry.log.batches import (
    BAD_COMPRESSION,
    BadBodies,
    DamageLog,
    MessageFilter,
    message_runs,
    record_batches,
)
from logquarry.log.columns import Decoding
from logquarry.log.layout import StoreLayout
from logquarry.log.location import broker_names, find_stores, lies_in_store
from logquarry.log.splits import LogSplit
from logquarry.log.store_files import NAME_DIGITS
from logquarry.log.walk import MISSING_FILE, DamagedSpan, Event, ExpiredSpan, LogEnd
from logquarry.read.batch_queue import open_queue
from logquarry.read.bulk import warn_of_unknown_topics
from logquarry.read.selection import (
    Part,
    PlaceList,
    ReadPlan,
    Selection,
    filter_of,
    plan_read,
    read_part,
)
from logquarry.read.store_sizes import require_log
from logquarry.spark.options import OffsetLimit, ReadOptions
from logquarry.spark.output import OutputFolder

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)
_PIECE: Final = 8 << 20
_as_name = partial(quote, safe=" ")  # a broker's name can contain slashes


class Quarantine:
    """Copies the damaged bytes of one store."""

    def __init__(self, folder: OutputFolder, broker: str, layout: StoreLayout) -> None:
        self._folder = folder
        self._broker = broker
        self._layout = layout

    def keep(self, span: DamagedSpan) -> None:
        """Copy a damaged span, unless the folder has a copy of the same or a longer span."""
        name = f"{_as_name(self._broker)}/{span.offset:0{NAME_DIGITS}d}"
        try:
            self._keep(span, name)
        except OSError as error:
            where = f"{self._folder.location}/{name}"
            raise StoreUnavailable(f"{where}: damage cannot be copied there: {error}") from error

    def of_bodies(self, report: BadBodies) -> Callable[[int, str], None]:
        """Make the callback :attr:`Decoding.on_bad_body`, which a read calls if it cannot
        decompress a body.

        The callback adds only the JSON file to the quarantine, without bytes, because the read
        returns the message with its compressed body.
        """

        def keep(offset: int, reason: str) -> None:
            report(offset, reason)
            path = self._layout.log_path(offset)
            self.keep(DamagedSpan(offset, 0, BAD_COMPRESSION, reason, path))

        return keep

    def _keep(self, span: DamagedSpan, name: str) -> None:
        if self._kept_length(f"{name}.json") >= span.length:
            return
        # Each attempt of a task writes its own temporary file. If several attempts copy the same
        # damage, the last copy replaces the others.
        passing = f"{name}.{uuid.uuid4().hex}.tmp"
        self._folder.make(name.rpartition("/")[0])
        size = 0
        with self._folder.create(passing) as sink:
            for piece in _pieces(self._layout, span):
                sink.write(piece)
                size += len(piece)
        # A later read does not copy the damage again if the JSON document exists. Sync the bytes
        # first, so that a power cut cannot keep the document and lose the bytes.
        self._folder.sync(passing)
        self._folder.move(passing, f"{name}.bin")
        document = {"broker": self._broker, **span.to_json(), "bytes": size}
        self._folder.write_json(f"{name}.json", document, by_way_of=passing)

    def _kept_length(self, path: str) -> int:
        try:
            document = self._folder.read_json(path)
        except ValueError:
            return -1
        length = document.get("length") if isinstance(document, dict) else None
        return length if isinstance(length, int) else -1


def _pieces(layout: StoreLayout, span: DamagedSpan) -> Iterator[bytes]:
    """Yield the damaged bytes in the file, without the zeros at the end of the damage."""
    file = layout.commit_log.at(span.offset)
    if file is None:
        return
    try:
        view = layout.open_file(file.path)
    except FileNotFoundError:
        return
    at, stop = span.offset - file.base, min(span.offset - file.base + span.length, view.size)
    zeros = 0
    while at < stop:
        length = min(_PIECE, stop - at)
        piece = bytes(view.window(at, length)[:length])
        data = piece.rstrip(b"\0")
        if data:
            while zeros:
                yield bytes(min(zeros, _PIECE))
                zeros -= min(zeros, _PIECE)
            yield data
        zeros += len(piece) - len(data)
        at += length


LOST_END: Final = "lost_end"
"""Kind of damage: bytes that the log has lost since a stream's batch was planned."""
LARGEST_SPLIT = 128 << 20
"""Maximum bytes of a task, unless the user gives a split size."""
LEAST_SPLIT = 16 << 20
"""Default minimum bytes of a task. Starting a smaller task costs more than running the task."""
_TASKS_A_CORE = 4
LEAST_STATED_SPLIT = 64 << 10
"""Minimum bytes of a task that the user can request. A smaller task is nearly all overhead."""
FEW_TASKS = 1_000
"""Number of tasks that the user can always request, even if each task then reads very little."""
MOST_TASKS = 100_000
"""Maximum number of tasks of one read; the driver keeps a few kilobytes for each task."""
MOST_PARTS = 256
"""Maximum number of parts of one task. A part takes 30 bytes; a read can have a million parts."""


@dataclass(frozen=True, kw_only=True)
class ReadTask:
    """Parts of one store that one task reads.

    Attributes:
        plan: the read plan, with only the parts of this task.
        options: the read's options without the values that `plan` contains; see
            :func:`for_workers`.
        delay_levels_ms: delay in milliseconds of each delay level; needed because the tags code of
            a delayed message is its delivery time.
        certain_to: physical offset up to which the log was complete when a stream's batch was
            planned. The task reads no byte after this offset. None if the read is not a stream.
    """

    location: str
    broker: str
    plan: ReadPlan
    options: ReadOptions
    columns: tuple[str, ...]
    delay_levels_ms: tuple[int, ...]
    certain_to: int | None = None

    @property
    def length(self) -> int:
        """Bytes of log to read, approximately."""
        return sum(part.length for part in self.plan.parts)


# -------------------------------------------------------------------------------- on the driver
def open_stores(options: ReadOptions) -> dict[str, StoreLayout]:
    """Open each store that the options select; return the layouts by broker."""
    locations = find_stores(options.paths, options.storage_options)
    brokers = broker_names(locations)
    check_brokers(options, brokers)
    layouts = open_layouts(options, dict(zip(brokers, locations, strict=True)))
    for layout in layouts.values():
        require_log(layout)
    return layouts


def open_layouts(options: ReadOptions, stores: Mapping[str, str]) -> dict[str, StoreLayout]:
    """Open stores; `stores` has their locations by broker.

    Raises UsageError if the quarantine's folder is inside a store.
    """
    folder = options.quarantine_path
    places = [folder, *(f"{folder}/{_as_name(broker)}" for broker in stores)] if folder else []
    for location in stores.values():
        for place in places:
            if lies_in_store(place, location, options.config):
                raise UsageError(
                    f"quarantinePath: {place} lies in the store {location}, where copies of damage "
                    "would look like files of the store: give a folder outside of it"
                )
    return {
        broker: StoreLayout.open(location, options.config, options.storage_options)
        for broker, location in stores.items()
    }


def check_brokers(options: ReadOptions, brokers: Sequence[str]) -> None:
    """Raise UsageError if the starting or ending offsets name an unknown broker."""
    for name, limit in (("startingOffsets", options.start), ("endingOffsets", options.stop)):
        for broker in limit.brokers:
            if broker not in brokers:
                known = ", ".join(brokers)
                raise UsageError(f"{name}: there is no broker {broker!r}; there are: {known}")


def plan_tasks(
    options: ReadOptions, columns: Sequence[str] | None = None, *, min_tasks: int = 1
) -> list[ReadTask]:
    """Plan tasks that read each wanted message exactly once.

    The list has all tasks of one store, then all tasks of the next store. The tasks of a store are
    in the order of its log, unless the options select messages by queue.

    Args:
        columns: columns to read; None for the columns of the options.
        min_tasks: minimum number of tasks. If each task would then have less than LEAST_SPLIT
            bytes, the plan has fewer tasks. ``options.min_partitions`` can make smaller tasks, down
            to LEAST_STATED_SPLIT.
    """
    stores = open_stores(options)
    for broker, layout in stores.items():
        check_start(layout, _selection(options, broker), options)
    warn_of_unknown_topics(list(stores.values()), options.wanted)
    whole = sum(file.size for layout in stores.values() for file in layout.commit_log.files)
    size = max(options.split_size or _split_size(whole, min_tasks), _least_split(whole))
    plans = [_plan(layout, options, broker, size) for broker, layout in stores.items()]
    lengths = [sum(part.length for part in plan.parts) for plan in plans]
    # Add up the bytes in the plans, not the sizes of the files: a file can be nearly empty.
    even = -(-sum(lengths) // max(options.min_partitions, 1))
    stated = min(options.split_size or size, even)
    least = _least_split(sum(lengths))
    if 0 < stated < least:
        logger.warning(
            "partitions of %d bytes would be too many: each partition has %d bytes instead",
            stated,
            least,
        )
    if 0 < (smaller := max(stated, least)) < size:
        size = smaller
        counts = [max(1, -(-length // size)) if even <= size else 1 for length in lengths]
        plans = [
            _plan(layout, options, broker, size, min_parts=count)
            for (broker, layout), count in zip(stores.items(), counts, strict=True)
        ]
    own = for_workers(options)
    return [
        ReadTask(
            location=layout.root,
            broker=broker,
            plan=plan,
            options=own,
            columns=tuple(columns or options.names),
            delay_levels_ms=layout.delay_levels_ms,
        )
        for (broker, layout), whole_plan in zip(stores.items(), plans, strict=True)
        for plan in _packed(whole_plan, size)
    ]


def _selection(options: ReadOptions, broker: str) -> Selection:
    return Selection(
        wanted=options.wanted,
        start_offset=options.start.of(broker),
        stop_offset=options.stop.of(broker),
    )


def even_size(length: int, options: ReadOptions) -> int:
    """Return the bytes of a task for a read of `length` bytes in total."""
    stated = min(options.split_size or _split_size(length, 1), -(-length // options.min_partitions))
    return max(stated, _least_split(length))


def _split_size(whole: int, min_tasks: int) -> int:
    cores = max(min_tasks, os.cpu_count() or 1)
    return min(LARGEST_SPLIT, max(LEAST_SPLIT, -(-whole // (cores * _TASKS_A_CORE))))


def _least_split(length: int) -> int:
    """Return the smallest task size that the options can set for a read of `length` bytes."""
    small = min(LEAST_STATED_SPLIT, -(-length // FEW_TASKS))
    return max(small, -(-length // MOST_TASKS), 1)


def _plan(
    layout: StoreLayout, options: ReadOptions, broker: str, size: int, *, min_parts: int = 1
) -> ReadPlan:
    selection = planned = _selection(options, broker)
    if options.on_damage == "stop":
        # The first damage ends the read, so the parts must be in the order of the log. Plan with
        # the time range as the only filter; the tasks apply the other filters while they read.
        wanted = selection.wanted
        by_time = MessageFilter(since_ms=wanted.since_ms, until_ms=wanted.until_ms)
        planned = replace(selection, wanted=by_time)
    plan = plan_read(
        layout,
        planned,
        split_size=size,
        min_parts=min_parts,
        skip_damage=options.on_damage == "skip",
    )
    return replace(plan, selection=selection)


def _packed(plan: ReadPlan, size: int) -> Iterator[ReadPlan]:
    """Split a plan into plans of about `size` bytes each; small parts share a plan.

    Each new plan contains either ranges of the log or positions of single messages, not both.
    """
    group: list[Part] = []
    filled = 0
    for part in sorted(plan.parts, key=lambda part: not isinstance(part, LogSplit)):
        mixed = bool(group) and isinstance(group[0], LogSplit) != isinstance(part, LogSplit)
        is_full = filled + part.length > size or len(group) == MOST_PARTS
        is_full |= isinstance(part, PlaceList)
        if group and (mixed or is_full):
            yield replace(plan, parts=tuple(group))
            group, filled = [], 0
        group.append(part)
        filled += part.length
    if group:
        yield replace(plan, parts=tuple(group))


def for_workers(options: ReadOptions) -> ReadOptions:
    """Return options without the values that each task's plan contains, to keep tasks small."""
    nothing = OffsetLimit()
    return replace(options, paths=(), start=nothing, stop=nothing, wanted=MessageFilter())


def check_start(layout: StoreLayout, selection: Selection, options: ReadOptions) -> None:
    """Report a loss if the requested start is before the first message that still exists."""
    start, oldest = selection.start_offset, layout.commit_log.start
    if start is not None and layout.commit_log.files and start < oldest:
        lost(
            options,
            f"{layout.root}: startingOffsets is {start}, but the log starts at physical offset "
            f"{oldest}: the messages before it were deleted",
        )
    for (topic, queue_id), (first, _) in (selection.wanted.queue_ranges or {}).items():
        if first <= 0 or not selection.wanted.takes_queue(topic, queue_id):
            continue
        queue = open_queue(layout, topic, queue_id)
        if queue is not None and first < queue.min_offset:
            lost(
                options,
                f"{layout.root}: startingQueueOffsets is {first} for queue {queue_id} of {topic}, "
                f"but the queue starts at {queue.min_offset}: the messages before it were deleted",
            )


def lost(options: ReadOptions, text: str) -> None:
    """Report that wanted messages were deleted.

    With failOnDataLoss (an option as in Kafka), raise MessageNotFound; else log a warning.
    """
    if options.fail_on_data_loss:
        raise MessageNotFound(f"{text} (give failOnDataLoss=false to read the rest)")
    logger.warning("%s", text)


# -------------------------------------------------------------------------------- in the worker
def read_batches(task: ReadTask, damage: DamageLog | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the messages of a task in non-empty batches; add skipped damage to `damage`.

    Bodies get a CRC check only if ``body`` is a wanted column, or if the filter searches bodies.

    Raises:
        CorruptFrame: if the log is damaged, unless ``options.on_damage`` makes the read skip damage
            or stop at damage.
        MessageNotFound: if retention has deleted files since the planning, and
            ``options.fail_on_data_loss`` is true.
        StoreNotFound: if a file cannot be read.
    """
    options, plan = task.options, task.plan
    layout = StoreLayout.open(task.location, options.config, options.storage_options)
    seen = DamageLog() if damage is None else damage
    names = schema.sources(task.columns) if options.is_kafka else task.columns
    quarantine = None
    if options.quarantine_path is not None:
        folder = OutputFolder(options.quarantine_path, options.storage_options)
        quarantine = Quarantine(folder, task.broker, layout)
    bad_bodies = BadBodies(layout, options.on_damage, seen)
    decoding = Decoding(
        columns=names,
        broker=task.broker,
        delay_levels_ms=task.delay_levels_ms,
        decompress=options.decompress,
        decompress_limit=options.config.decompress_limit,
        on_bad_body=bad_bodies if quarantine is None else quarantine.of_bodies(bad_bodies),
    )
    try:
        for part in plan.parts:
            events = _not_deleted(task, layout, part, check_crc="body" in names)
            if quarantine is not None:
                events = _kept(events, quarantine, live=plan.live)
            wanted = filter_of(plan, part)
            runs = message_runs(
                events, options.on_damage, seen, limit=options.config.decompress_limit
            )
            for batch in record_batches(runs, decoding, None if wanted.is_empty else wanted):
                yield schema.kafka_batch(batch, task.columns) if options.is_kafka else batch
            if options.on_damage == "stop" and seen.spans:
                return
    except OSError as error:
        raise StoreNotFound(f"{error.filename or layout.root}: {error.strerror}") from error


def _kept(events: Iterator[Event], quarantine: Quarantine, *, live: bool) -> Iterator[Event]:
    for event in events:
        # In a log that a broker is writing, a torn tail is a message that the broker has not
        # finished.
        if isinstance(event, DamagedSpan) and not (live and event.is_tail):
            quarantine.keep(event)
        yield event


def _not_deleted(
    task: ReadTask, layout: StoreLayout, part: Part, *, check_crc: bool
) -> Iterator[Event]:
    """Read a part.

    If retention has deleted bytes of the part since the planning, the function does not report
    damage, but calls :func:`lost`.
    """
    oldest = layout.commit_log.start
    gone = isinstance(part, LogSplit) and part.start < oldest
    # A filter that searches bodies needs bodies with a checked CRC.
    check_crc |= task.plan.selection.wanted.grep is not None
    events = read_part(
        layout, task.plan, part, check_crc=check_crc, batch_bytes=task.options.batch_bytes
    )
    if task.certain_to is not None:
        events = certain_events(events, task.certain_to, layout.log_path)
    for event in events:
        if isinstance(event, ExpiredSpan) or (
            isinstance(event, DamagedSpan) and event.kind == MISSING_FILE and event.offset < oldest
        ):
            gone = True
        else:
            yield event
    if gone:
        lost(
            task.options,
            f"{layout.root}: the log now starts at physical offset {oldest}: the messages before "
            "it were deleted during the read",
        )


def certain_events(
    events: Iterable[Event], stop: int, path_at: Callable[[int], str]
) -> Iterator[Event]:
    """Yield the events of a walk; add damage if the log lost bytes after the batch was planned.

    When the stream's batch was planned, the log was complete up to `stop`. If the log now ends or
    has a torn tail before `stop`, yield damage of the kind LOST_END. The next batch reads the
    events at and after `stop`.
    """
    for event in events:
        if isinstance(event, LogEnd | DamagedSpan) and event.offset >= stop:
            return
        if isinstance(event, LogEnd) or (
            isinstance(event, DamagedSpan) and (event.is_tail or event.ends_log)
        ):
            # A power cut truncated the log, or another log replaced the log.
            why = "the log had whole frames here when the batch was planned, and has none now"
            yield DamagedSpan(
                event.offset, stop - event.offset, LOST_END, why, path_at(event.offset)
            )
            return
        yield event
