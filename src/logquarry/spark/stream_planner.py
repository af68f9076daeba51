"""Plans the batches of a stream: the offsets of a batch, and the tasks that read the batch.

A restarted query reads its offsets from its checkpoint. The state in a planner is therefore only a
cache.

Spark before 4.2 has no admission control: Spark requests the newest offset, but passes neither the
batch's start nor a limit. So each batch takes all new messages: with a limit, a
Trigger.AvailableNow query would end after its first batch. A restarted query requests the newest
offset before the planner sees the checkpoint. `tasks` therefore compares the start options with the
start that the checkpoint recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from logquarry.errors import UsageError
from logquarry.format import java, sys_flag
from logquarry.log.batches import MessageFilter
from logquarry.log.columns import fixed_fields, topic_ids
from logquarry.log.layout import StoreLayout
from logquarry.log.location import stores_by_name
from logquarry.log.splits import LogExtent, LogSplit, frame_start, plan_splits
from logquarry.log.walk import LogReader, Run
from logquarry.read.batch_queue import open_queue
from logquarry.read.bulk import warn_of_unknown_topics
from logquarry.read.log_end import LogFrontier, last_entries
from logquarry.read.selection import ReadPlan, Selection, time_range
from logquarry.spark.options import FORMAT, ReadOptions
from logquarry.spark.stream_offset import (
    Backlog,
    LastFrame,
    StreamOffset,
    by_bytes,
    by_rows,
    is_other_log,
    is_same_log,
    last_frame,
)
from logquarry.spark.tasks import (
    ReadTask,
    check_brokers,
    check_start,
    even_size,
    for_workers,
    lost,
    open_layouts,
)

_LEVELS_SECONDS: Final = 60.0
"""Seconds for which the delay levels that were inferred from a store are cached."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum bytes of log and maximum number of messages in one batch; None for no limit."""

    max_bytes: int | None = None
    max_rows: int | None = None


class StreamPlanner:
    """Plans the batches of one query."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)
        self._frontiers: dict[str, LogFrontier] = {}
        self._levels: dict[str, tuple[float, tuple[int, ...]]] = {}
        self._initial: StreamOffset | None = None
        self._targets: dict[str, int] | None = None
        self._latest: dict[str, int] = {}
        self._reported: set[str] = set()

    # ------------------------------------------------------------------------- offsets and tasks
    def initial(self) -> StreamOffset:
        """Return the offset at which a new query starts.

        Later calls return the result of the first call, so "latest" means the log's end at the time
        of the first call.
        """
        if self._initial is not None:
            return self._initial
        layouts = self._layouts()
        check_brokers(self._options, list(layouts))
        warn_of_unknown_topics(list(layouts.values()), self._options.wanted)
        starts: dict[str, int] = {}
        queues: dict[str, dict[tuple[str, int], int]] = {}
        for broker, layout in layouts.items():
            firsts = {
                queue: first
                for queue, first in self._first_queue_offsets(broker, layout)
                # If a queue is read from queue offset 0 on, do not record its start.
                if first
            }
            if firsts:
                queues[broker] = firsts
            starts[broker] = self._first_offset(broker, layout, firsts)
        since = self._options.wanted.since_ms
        self._initial = StreamOffset(brokers=starts, since_ms=since, queues=queues)
        return self._initial

    def latest(self, start: StreamOffset, limits: Limits) -> StreamOffset:
        """Return the end of the batch that begins at ``start``; ``start`` if no message is new."""
        layouts = self._layouts()
        backlogs: dict[str, Backlog] = {}
        for broker, layout in layouts.items():
            known = start.brokers.get(broker)
            end = self._frontier(broker).end_of(layout, known)
            self._latest[broker] = end
            if known is not None and end < known:
                self._lose(
                    broker,
                    f"{layout.root}: the log ends at physical offset {end}, but the stream has "
                    f"read it up to {known}: it was truncated or replaced",
                )
            if self._targets is not None:
                end = min(end, self._targets.get(broker, -1))
            begin = max(layout.commit_log.start, known or 0)
            if begin < end:
                backlogs[broker] = Backlog(layout, begin, end)
        _require_names(start, layouts)
        for broker in start.brokers.keys() - layouts.keys():
            self._lose(broker, f"the store of broker {broker!r} no longer exists")
        moved = self._admitted(backlogs, limits, start)
        if not moved:
            return start
        first = start.brokers if start == self._initial and self._moves else None
        frames = {**start.frames, **_last_frames(layouts, moved)}
        return replace(start.moved(moved), first=first, frames=frames)

    def tasks(self, start: StreamOffset, end: StreamOffset) -> list[ReadTask]:
        """Plan tasks that read each message between two offsets exactly once."""
        begins = start.brokers if end.first is None else end.first
        layouts = self._layouts()
        _require_names(start, layouts)
        ranges: list[tuple[str, StoreLayout, int, int]] = []
        for broker, stop in end.brokers.items():
            if begins.get(broker) == stop:
                continue
            layout = layouts.get(broker)
            if layout is None:
                lost(
                    self._options,
                    f"the store of broker {broker!r} no longer exists, but the batch reads it up "
                    f"to physical offset {stop}",
                )
                continue
            oldest = layout.commit_log.start
            begin = begins.get(broker, oldest)
            if begin < oldest:
                lost(
                    self._options,
                    f"{layout.root}: the log starts at physical offset {oldest}, but the stream "
                    f"has read it only up to {begin}: the messages between were deleted",
                )
                begin = oldest
            known = start.frames.get(broker) if end.first is None else None
            if known is not None and is_other_log(layout, known):
                lost(
                    self._options,
                    f"{layout.root}: the frame at physical offset {known.offset} is not the one "
                    f"that the stream has read: the log was truncated or replaced, and messages "
                    f"before offset {begin} may be missing",
                )
                begin = frame_start(layout, begin)
            if begin < stop:
                ranges.append((broker, layout, begin, stop))
        size = even_size(max(1, sum(stop - begin for _, _, begin, stop in ranges)), self._options)
        return [task for found in ranges for task in self._tasks_of(*found, end, size)]

    def prepare_available_now(self) -> None:
        """Make the query end at the present ends of the logs (Trigger.AvailableNow)."""
        self._targets = {
            broker: self._frontier(broker).end_of(layout)
            for broker, layout in self._layouts().items()
        }

    def newest(self) -> dict[str, int] | None:
        """Return the logs' ends as of the last call of :meth:`latest`; None before that call."""
        return dict(sorted(self._latest.items())) or None

    # ------------------------------------------------------------------------------ stores, filters
    def _layouts(self) -> dict[str, StoreLayout]:
        """Open the stores that exist now: a glob can match more stores than at the last call."""
        options = self._options
        return open_layouts(options, stores_by_name(options.paths, options.storage_options))

    def _frontier(self, broker: str) -> LogFrontier:
        skips = self._options.on_damage == "skip"
        return self._frontiers.setdefault(broker, LogFrontier(skips_damage=skips))

    @property
    def _moves(self) -> bool:
        """Whether the start is "latest" or a time. The offset of such a start can change while the
        log grows.
        """
        start, wanted = self._options.start, self._options.wanted
        starts = [start.default, *start.brokers.values()]
        return java.LONG_MAX in starts or wanted.since_ms is not None

    def _first_offset(
        self, broker: str, layout: StoreLayout, firsts: Mapping[tuple[str, int], int]
    ) -> int:
        options, log = self._options, layout.commit_log
        wanted = replace(
            options.wanted, queue_ranges={queue: (n, None) for queue, n in firsts.items()} or None
        )
        start = options.start.of(broker)
        end = self._frontier(broker).end_of(layout)
        if start == java.LONG_MAX:
            return end
        check_start(layout, Selection(wanted=wanted, start_offset=start), options)
        if wanted.since_ms is not None:
            first, _ = time_range(layout, wanted, LogExtent(log.start, end))
            start = max(first, start or 0)
        if start is None or start <= log.start:
            return log.start
        if start >= end:
            return end
        return min(end, frame_start(layout, start))

    def _first_queue_offsets(
        self, broker: str, layout: StoreLayout
    ) -> Iterator[tuple[tuple[str, int], int]]:
        latest: set[tuple[str, int]] = set()
        for queue, (first, _) in (self._options.wanted.queue_ranges or {}).items():
            if first != java.LONG_MAX:
                yield queue, first
            else:
                latest.add(queue)
        if not latest:
            return
        # The last messages of a queue may have no entry yet, and the queue may have no file.
        behind = _not_dispatched(layout, self._frontier(broker).end_of(layout), latest)
        for queue in latest:
            known = open_queue(layout, *queue)
            yield queue, max(behind.get(queue, 0), 0 if known is None else known.max_offset)

    def _filter(self, broker: str, offset: StreamOffset) -> MessageFilter:
        firsts = offset.queues.get(broker, {})
        return replace(
            self._options.wanted,
            since_ms=offset.since_ms,
            queue_ranges={queue: (first, None) for queue, first in firsts.items()} or None,
        )

    def _admitted(
        self, backlogs: Mapping[str, Backlog], limits: Limits, offset: StreamOffset
    ) -> dict[str, int]:
        ends = {broker: log.end for broker, log in backlogs.items()}
        if limits.max_rows is not None:
            wanted = {broker: self._filter(broker, offset) for broker in backlogs}
            ends = by_rows(backlogs, limits.max_rows, wanted)
        if limits.max_bytes is not None:
            left = {b: replace(log, end=ends[b]) for b, log in backlogs.items()}
            ends = by_bytes(left, limits.max_bytes)
        return {broker: end for broker, end in ends.items() if end > backlogs[broker].start}

    def _tasks_of(
        self,
        broker: str,
        layout: StoreLayout,
        start: int,
        stop: int,
        offset: StreamOffset,
        size: int,
    ) -> Iterator[ReadTask]:
        durable = layout.durable_end
        # The log is known to be on the disk up to the durable offset. Before this offset, a reader
        # reports invalid bytes as damage. After the durable offset, invalid bytes can be the log's
        # end.
        bound = stop if durable is not None and stop <= durable else None
        extent = LogExtent(layout.commit_log.start, stop, bound)
        splits = plan_splits(layout, extent, start=start, stop=stop, split_size=size)
        selection, own = Selection(wanted=self._filter(broker, offset)), for_workers(self._options)
        for number, split in enumerate(splits):
            part = LogSplit(split.start, split.stop, resync=number > 0)
            yield ReadTask(
                location=layout.root,
                broker=broker,
                plan=ReadPlan(selection, extent, (part,), live=True),
                options=own,
                columns=self._columns,
                delay_levels_ms=self._delay_levels(layout),
                certain_to=stop,
            )

    def _delay_levels(self, layout: StoreLayout) -> tuple[int, ...]:
        now = time.monotonic()
        known = self._levels.get(layout.root)
        if known is None or now - known[0] > _LEVELS_SECONDS:
            self._levels[layout.root] = known = (now, layout.delay_levels_ms)
        return known[1]

    def _lose(self, broker: str, text: str) -> None:
        """Report lost messages: raise an error, or log one warning for each broker."""
        if self._options.fail_on_data_loss or broker not in self._reported:
            self._reported.add(broker)
            lost(self._options, text)


def _last_frames(
    layouts: Mapping[str, StoreLayout], ends: Mapping[str, int]
) -> dict[str, LastFrame]:
    """Return each broker's last frame before its end; omit brokers without a frame near the end."""
    found = {broker: last_frame(layouts[broker], end) for broker, end in ends.items()}
    return {broker: frame for broker, frame in found.items() if frame is not None}


def _require_names(start: StreamOffset, layouts: Mapping[str, StoreLayout]) -> None:
    """Raise UsageError if a store now has another name than in the checkpoint.

    The stream would read this store again from its start.
    """
    for broker in start.brokers.keys() - layouts.keys():
        known = start.frames.get(broker)
        for name in layouts.keys() - start.brokers.keys():
            if known is not None and is_same_log(layouts[name], known):
                raise UsageError(
                    f"{layouts[name].root}: the stream has read this store as broker {broker!r}, "
                    f"but its name is {name!r} now, because the name depends on the query's paths "
                    f"(docs/spark.md, Streams): give paths with which the name is {broker!r}, for "
                    "example the path of a symbolic link"
                )


def _not_dispatched(
    layout: StoreLayout, end: int, queues: Set[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """Return the next queue offset of each queue whose last messages have no entry yet.

    Args:
        end: physical offset at which the log ends.
    """
    entries = last_entries(layout)
    start = min(entries[0].end, end) if entries else layout.commit_log.start
    found: dict[tuple[str, int], int] = {}
    for event in LogReader(layout, check_crc=False).events(start, end, resync=True):
        if not isinstance(event, Run):
            continue
        ids, topics = topic_ids(event.window, event.rows)
        columns = fixed_fields(event.window, event.rows, ("queue_id", "queue_offset", "sys_flag"))
        kinds = sys_flag.transaction_type(columns["sys_flag"])
        is_queued = np.isin(kinds, (sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_COMMIT))
        for topic, queue_id in queues:
            if topic not in topics:
                continue
            is_wanted = is_queued & (ids == topics.index(topic)) & (columns["queue_id"] == queue_id)
            offsets = columns["queue_offset"][is_wanted]
            if len(offsets):
                # Use the last offset, not the largest one: if the topic was deleted and created
                # again, its queue offsets started again at 0.
                found[topic, queue_id] = int(offsets[-1]) + 1
    return found


logger = logging.getLogger(__name__)

_SAME_START = "this Spark cannot keep a start across a restart; give the original start options"


class UnlimitedPlanner(StreamPlanner):
    """Plans batches of all new messages, for versions of Spark that do not support limits."""

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._reached: StreamOffset | None = None
        self._resumed: StreamOffset | None = None
        if options.max_rows is not None or options.max_bytes is not None:
            logger.warning(
                "%s: maxOffsetsPerTrigger and maxBytesPerTrigger have no effect: a batch takes all "
                "messages, because only Spark 4.2 and later limit the batches of a Python source",
                FORMAT,
            )

    def initial(self) -> StreamOffset:
        """See `StreamPlanner.initial`."""
        start = super().initial()
        if self._reached is None:
            self._reached = start
        return start

    def newest_end(self) -> StreamOffset:
        """Return the end of a batch that reads all new messages."""
        if self._reached is not None:
            return self.latest(self._reached, Limits())
        layouts = self._layouts()
        # Leave out the queues whose start is "latest" (LONG_MAX). For such a queue, the checkpoint
        # has a number instead: the queue's end at the time when the query first started.
        numbers = {
            queue: first
            for queue, (first, _) in (self._options.wanted.queue_ranges or {}).items()
            if first and first != java.LONG_MAX
        }
        self._resumed = StreamOffset(
            brokers={name: self._frontier(name).end_of(found) for name, found in layouts.items()},
            since_ms=self._options.wanted.since_ms,
            queues=dict.fromkeys(layouts, numbers) if numbers else {},
        )
        frames = _last_frames(layouts, self._resumed.brokers)
        self._resumed = replace(self._resumed, frames=frames)
        return self._resumed

    def tasks(self, start: StreamOffset, end: StreamOffset) -> list[ReadTask]:
        """See `StreamPlanner.tasks`."""
        if end == self._resumed:
            end = self._continued(start, end)
        self._reached = end
        return super().tasks(start, end)

    def _continued(self, start: StreamOffset, end: StreamOffset) -> StreamOffset:
        """Return the end of the first batch after a restart.

        The end keeps the start time and the queue offsets that the checkpoint recorded.
        """
        if start.since_ms != end.since_ms:
            raise UsageError(f"startingTimestamp: differs from the checkpoint's: {_SAME_START}")
        given = (self._options.wanted.queue_ranges or {}).keys()
        for broker in end.queues.keys() | start.queues.keys():
            queues, known = end.queues.get(broker, {}), start.queues.get(broker, {})
            if not (queues.items() <= known.items() and known.keys() <= given):
                raise UsageError(
                    f"startingQueueOffsets: differs from the checkpoint's for broker {broker!r}: "
                    f"{_SAME_START}"
                )
        _require_names(start, self._layouts())
        for broker, read in start.brokers.items():
            if broker not in end.brokers:
                self._lose(broker, f"the store of broker {broker!r} no longer exists")
            elif end.brokers[broker] < read:
                self._lose(
                    broker,
                    f"the log of broker {broker!r} ends at physical offset {end.brokers[broker]}, "
                    f"but the stream has read it up to {read}: it was truncated or replaced",
                )
        return replace(end, since_ms=start.since_ms, queues=start.queues)
