"""Ranges of the log of which it is known that all of it is there.

A stream is planned up to an offset at which the log had been followed without a doubt. Whatever a
reader finds missing before that is damage, and never the log's end; whatever stands behind it is
the next batch's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from logquarry.errors import MessageNotFound, StoreNotFound, UsageError
from logquarry.log import kafka
from logquarry.log.batches import BadBodies, DamageLog, record_batches, sound_runs
from logquarry.log.columns import Decoding
from logquarry.log.filters import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import LogSplit
from logquarry.log.store_names import broker_names, find_stores
from logquarry.log.walk import MISSING_FILE, DamagedSpan, Event, ExpiredSpan, LogEnd
from logquarry.read.selection import (
    Part,
    PlaceList,
    ReadPlan,
    Selection,
    filter_of,
    plan_read,
    read_part,
)
from logquarry.spark.options import OffsetLimit, ReadOptions
from logquarry.spark.output import OutputFolder
from logquarry.spark.quarantine import Quarantine

if TYPE_CHECKING:
    import pyarrow as pa


LOST_END: Final = "lost_end"
"""Kind of the bytes that were the log's when a batch of a stream was planned, and are no more."""


def certain_events(
    events: Iterable[Event], stop: int, path_at: Callable[[int], str]
) -> Iterator[Event]:
    """What stands in a part of the log whose end is known, as a reader tells it.

    Args:
        events: what a reader found, from any place before ``stop``.
        stop: physical offset up to which the log was there.
        path_at: the path of the file that holds an offset.
    """
    for event in events:
        if isinstance(event, LogEnd | DamagedSpan) and event.offset >= stop:
            return
        if isinstance(event, LogEnd) or (
            isinstance(event, DamagedSpan) and (event.is_tail or event.ends_log)
        ):
            # A log that lost its end to a power cut, or was replaced by another.
            why = "the log went on here when it was followed, and holds nothing whole any more"
            yield DamagedSpan(
                event.offset, stop - event.offset, LOST_END, why, path_at(event.offset)
            )
            return
        yield event


# --------------------------------------------------------------------------------------------------
# What the tasks of a job read: stores planned on the driver, parts read where a worker is.
#
# Knows nothing of Spark: a :class:`ReadTask` is picklable and small, :func:`plan_tasks` makes them
# and :func:`read_batches` reads one. The source, the export and the summary share both.

logger = logging.getLogger(__name__)

LARGEST_SPLIT = 128 << 20
"""Most bytes of a task where the user states none."""
LEAST_SPLIT = 16 << 20
"""A task with fewer bytes costs more to start than to run."""
_TASKS_A_CORE = 4
LEAST_STATED_SPLIT = 64 << 10
"""Bytes of the smallest task that a user can ask for: nearly all of its time is Spark's own."""
FEW_TASKS = 1_000
"""So many tasks may always be asked for, however small they are then."""
MOST_TASKS = 100_000
"""Most tasks of one read: the driver keeps a few kilobytes of each."""
MOST_PARTS = 256
"""Most parts of one task, some 30 bytes each: queues and gaps between messages may be a million."""


@dataclass(frozen=True, kw_only=True)
class ReadTask:
    """What one task reads: some parts of one store.

    Attributes:
        location: the store.
        broker: what it is called.
        plan: how it is read; its parts are those of this task alone.
        options: how to read; see :func:`for_workers`.
        columns: which columns of the table that the options name, in order.
        delay_levels_ms: for tags codes.
        certain_to: where it is a stream's: up to here (and the end of its parts) all of the log
            was there when it was planned, and what is behind that is not looked at.
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
        """Bytes of messages in it, about."""
        return sum(part.length for part in self.plan.parts)


@dataclass(frozen=True, slots=True)
class _Store:
    location: str
    broker: str
    layout: StoreLayout
    selection: Selection


# -------------------------------------------------------------------------------- on the driver
def open_stores(options: ReadOptions) -> list[tuple[str, str, StoreLayout]]:
    """(location, broker, layout) of each store that the options name.

    Raises:
        StoreNotFound: if one of them is no store, or a glob matches none.
        UsageError: if an option names a broker that is not among them.
    """
    locations = find_stores(options.paths, options.storage_options)
    brokers = broker_names(locations)
    check_brokers(options, brokers)
    return [
        (location, broker, StoreLayout.open(location, options.config, options.storage_options))
        for location, broker in zip(locations, brokers, strict=True)
    ]


def check_brokers(options: ReadOptions, brokers: Sequence[str]) -> None:
    """Whether the options name only brokers that there are.

    Raises:
        UsageError: if not.
    """
    for name, limit in (("startingOffsets", options.start), ("endingOffsets", options.stop)):
        for broker in limit.brokers:
            if broker not in brokers:
                known = ", ".join(brokers)
                raise UsageError(f"{name}: there is no broker {broker!r} among {known}")


def plan_tasks(
    options: ReadOptions, columns: Sequence[str] | None = None, *, min_tasks: int = 1
) -> list[ReadTask]:
    """Tasks that together read what the options want, each message in exactly one.

    Those of one store come one after the other; where only its log is read, in the log's order.

    Args:
        options: what to read.
        columns: which columns (default: as the options say).
        min_tasks: fewest tasks, if there is enough to read for tasks of a sensible size;
            ``options.min_partitions`` holds for smaller ones, too (see LEAST_STATED_SPLIT).

    Raises:
        StoreNotFound, UsageError: as :func:`open_stores`.
        UnsupportedStore: if a store keeps its log in other folders.
        MessageNotFound: if a wanted start is no longer there, and that matters.
    """
    stores: list[_Store] = []
    for location, broker, layout in open_stores(options):
        selection = Selection(
            wanted=options.wanted,
            start_offset=options.start.of(broker),
            stop_offset=options.stop.of(broker),
        )
        layout.require_log()
        check_start(layout, selection, fail=options.fail_on_data_loss)
        stores.append(_Store(location, broker, layout, selection))
    whole = sum(file.size for store in stores for file in store.layout.commit_log.files)
    size = max(options.split_size or _split_size(whole, min_tasks), _least_split(whole))
    plans = [_plan(store, options, size) for store in stores]
    lengths = [sum(part.length for part in plan.parts) for plan in plans]
    # Only now it is known how much is read, of files that may be mostly empty.
    even = -(-sum(lengths) // max(options.min_partitions, 1))
    stated = min(options.split_size or size, even)
    least = _least_split(sum(lengths))
    if 0 < stated < least:
        logger.warning("partitions of %d bytes would be too many: they have %d", stated, least)
    if 0 < (smaller := max(stated, least)) < size:
        size = smaller
        plans = [
            _plan(
                store,
                options,
                size,
                min_parts=max(1, -(-length // size)) if even <= size else 1,
            )
            for store, length in zip(stores, lengths, strict=True)
        ]
    own = for_workers(options)
    return [
        ReadTask(
            location=store.location,
            broker=store.broker,
            plan=plan,
            options=own,
            columns=tuple(columns or options.names),
            delay_levels_ms=store.layout.delay_levels_ms,
        )
        for store, whole_plan in zip(stores, plans, strict=True)
        for plan in _packed(whole_plan, size)
    ]


def even_size(length: int, options: ReadOptions) -> int:
    """Bytes of a task, where it is known how many there are in all."""
    stated = min(options.split_size or _split_size(length, 1), -(-length // options.min_partitions))
    return max(stated, _least_split(length))


def _split_size(whole: int, min_tasks: int) -> int:
    """Bytes of a task: small enough that all cores have work to the end."""
    cores = max(min_tasks, os.cpu_count() or 1)
    return min(LARGEST_SPLIT, max(LEAST_SPLIT, -(-whole // (cores * _TASKS_A_CORE))))


def _least_split(length: int) -> int:
    """Fewest bytes of a task, where so many are read in all, whatever the user asks for."""
    small = min(LEAST_STATED_SPLIT, -(-length // FEW_TASKS))
    return max(small, -(-length // MOST_TASKS), 1)


def _plan(store: _Store, options: ReadOptions, size: int, *, min_parts: int = 1) -> ReadPlan:
    if options.on_damage != "stop":
        return plan_read(
            store.layout,
            store.selection,
            split_size=size,
            min_parts=min_parts,
            skip_damage=options.on_damage == "skip",
        )
    # Where the first damage is the end, it takes a walk over the log to know what comes before it.
    wanted = store.selection.wanted
    by_time = MessageFilter(since_ms=wanted.since_ms, until_ms=wanted.until_ms)
    walk = plan_read(
        store.layout,
        replace(store.selection, wanted=by_time),
        split_size=size,
        min_parts=min_parts,
    )
    return replace(walk, selection=store.selection)


def _packed(plan: ReadPlan, size: int) -> Iterator[ReadPlan]:
    """The parts of a plan as plans of about ``size`` bytes each: small parts go together.

    Ranges of the log and places in it stay apart, and in order.
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
    """What tasks need of some options: their plans say the rest, and stores and queues are many."""
    nothing = OffsetLimit()
    return replace(options, paths=(), start=nothing, stop=nothing, wanted=MessageFilter())


def check_start(layout: StoreLayout, selection: Selection, *, fail: bool) -> None:
    """Whether what is wanted first is still there (Kafka's failOnDataLoss).

    Raises:
        MessageNotFound: if it is not, and that is an error.
    """
    start, oldest = selection.start_offset, layout.commit_log.start
    if start is not None and layout.commit_log.files and start < oldest:
        lost(
            f"{layout.root}: the log starts at offset {oldest}, and startingOffsets wants it from "
            f"{start} on: what lies between was deleted",
            fail=fail,
        )
    for (topic, queue_id), (first, _) in (selection.wanted.queue_ranges or {}).items():
        if first <= 0 or not selection.wanted.takes_queue(topic, queue_id):
            continue
        found = _oldest_in_queue(layout, topic, queue_id)
        if found is not None and first < found:
            lost(
                f"{layout.root}: queue {queue_id} of {topic} starts at offset {found}, and "
                f"startingQueueOffsets wants it from {first} on: what lies between was deleted",
                fail=fail,
            )


def _oldest_in_queue(layout: StoreLayout, topic: str, queue_id: int) -> int | None:
    from logquarry.read.consume_queue import ConsumeQueue

    if (topic, queue_id) not in layout.queue_names:
        return None
    queue = ConsumeQueue(layout, topic, queue_id, log_min_offset=layout.commit_log.start)
    return queue.min_offset


def lost(text: str, *, fail: bool) -> None:
    """Tell that what was wanted is gone.

    Raises:
        MessageNotFound: if that is an error.
    """
    if fail:
        raise MessageNotFound(f"{text} (failOnDataLoss=false reads what is left)")
    logger.warning("%s", text)


# -------------------------------------------------------------------------------- in the worker
def read_batches(task: ReadTask, damage: DamageLog | None = None) -> Iterator[pa.RecordBatch]:
    """The messages of a task as batches; none is empty.

    Bodies are compared with their CRC exactly where ``body`` is among the columns: a read of
    other columns does not touch them.

    Args:
        task: what to read.
        damage: gets what was passed over, if it is wanted.

    Raises:
        CorruptFrame: on damage, as the options' ``on_damage`` says.
        MessageNotFound: if files went since the plan was made, and that matters.
    """
    options, plan = task.options, task.plan
    layout = StoreLayout.open(task.location, options.config, options.storage_options)
    seen = DamageLog() if damage is None else damage
    names = kafka.sources(task.columns) if options.is_kafka else task.columns
    quarantine = _quarantine(task)
    bad_bodies = BadBodies(layout, options.on_damage, seen)
    decoding = Decoding(
        columns=names,
        broker=task.broker,
        delay_levels_ms=task.delay_levels_ms,
        decompress=options.decompress,
        decompress_limit=options.config.decompress_limit,
        on_bad_body=bad_bodies if quarantine is None else quarantine.of_bodies(layout, bad_bodies),
    )
    try:
        for part in plan.parts:
            events = _not_deleted(task, layout, part, check_crc="body" in names)
            if quarantine is not None:
                events = _kept(events, layout, quarantine, live=plan.live)
            wanted = filter_of(plan, part)
            runs = sound_runs(events, options.on_damage, seen)
            for batch in record_batches(runs, decoding, None if wanted.is_empty else wanted):
                yield kafka.kafka_batch(batch, task.columns) if options.is_kafka else batch
            if options.on_damage == "stop" and seen.spans:
                return
    except OSError as error:
        raise StoreNotFound(f"{error.filename or layout.root}: {error.strerror}") from error


def _quarantine(task: ReadTask) -> Quarantine | None:
    path = task.options.quarantine_path
    if path is None:
        return None
    return Quarantine(OutputFolder(path, task.options.storage_options), task.broker)


def _kept(
    events: Iterator[Event], layout: StoreLayout, quarantine: Quarantine, *, live: bool
) -> Iterator[Event]:
    for event in events:
        # A torn tail of a log that is being written is a message on its way.
        if isinstance(event, DamagedSpan) and not (live and event.is_tail):
            quarantine.keep(layout, event)
        yield event


def _not_deleted(
    task: ReadTask, layout: StoreLayout, part: Part, *, check_crc: bool
) -> Iterator[Event]:
    """What stands in a part. What retention deleted since the plan was made is no damage."""
    oldest = layout.commit_log.start
    gone = isinstance(part, LogSplit) and part.start < oldest
    # Without a body among the columns none is looked at, except to search it.
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
            f"{layout.root}: the log starts at offset {oldest} now: what was before it was deleted "
            "while it was read",
            fail=task.options.fail_on_data_loss,
        )
