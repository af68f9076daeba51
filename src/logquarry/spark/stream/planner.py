"""The stores of a stream: asked what is new, how much of it to take, and who reads which part.

One planner serves one query for as long as it runs, on the driver. What it remembers makes answers
quicker and never changes them: a query that is started anew gets the same from its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from logquarry.format import java
from logquarry.log.filters import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import LogExtent, LogSplit, plan_splits
from logquarry.log.store_names import stores_by_name
from logquarry.log.walk import LogReader
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.log_end import LogFrontier
from logquarry.read.selection import ReadPlan, Selection, time_range
from logquarry.spark.options import ReadOptions
from logquarry.spark.stream.admission import Backlog, StreamOffset, by_bytes, by_rows
from logquarry.spark.tasks import ReadTask, check_brokers, check_start, even_size, for_workers, lost

_LEVELS_SECONDS: Final = 60.0
"""How long the delay levels of a store are taken as known: its schedule queues tell them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one batch takes; None for anything."""

    max_bytes: int | None = None
    max_rows: int | None = None


class StreamPlanner:
    """Plans the batches of one query.

    Args:
        options: what to read.
        columns: which columns, in order.
    """

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)
        self._frontiers: dict[str, LogFrontier] = {}
        self._levels: dict[str, tuple[float, tuple[int, ...]]] = {}
        self._initial: dict[str, Any] | None = None
        self._targets: dict[str, int] | None = None
        self._latest: dict[str, int] = {}
        self._told: set[str] = set()

    # ------------------------------------------------------------------------------- what is asked
    def initial(self) -> dict[str, Any]:
        """Where a new query starts, as the options say. The answer is an offset's document.

        Spark asks again and again until there is something to read, and `latest` is meant once.

        Raises:
            StoreNotFound, UsageError: if the stores are not there, or not those of the options.
            MessageNotFound: if a wanted start was deleted, and that is an error.
        """
        if self._initial is not None:
            return self._initial
        layouts = self._layouts()
        check_brokers(self._options, list(layouts))
        starts: dict[str, int] = {}
        queues: dict[str, dict[tuple[str, int], int]] = {}
        for broker, layout in layouts.items():
            firsts = {
                queue: first
                for queue, first in self._first_queue_offsets(layout)
                # 0 is no condition.
                if first
            }
            if firsts:
                queues[broker] = firsts
            starts[broker] = self._first_offset(broker, layout, firsts)
        offset = StreamOffset(brokers=starts, since_ms=self._options.wanted.since_ms, queues=queues)
        self._initial = offset.to_json()
        return self._initial

    def latest(self, start: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
        """Where the batch that begins at ``start`` ends; ``start`` itself if nothing is new.

        Raises:
            MessageNotFound: if a store lost what was read already, and that is an error.
        """
        offset = StreamOffset.from_json(start)
        layouts = self._layouts()
        backlogs: dict[str, Backlog] = {}
        for broker, layout in layouts.items():
            known = offset.brokers.get(broker)
            end = self._frontier(broker).end_of(layout, known)
            self._latest[broker] = end
            if known is not None and end < known:
                self._lose(
                    broker,
                    f"{layout.root}: the log ends at offset {end}, and was read up to {known}: "
                    "it lost its end, or is another one",
                )
            if self._targets is not None:
                end = min(end, self._targets.get(broker, -1))
            begin = max(layout.commit_log.start, known or 0)
            if begin < end:
                backlogs[broker] = Backlog(layout, begin, end)
        for broker in offset.brokers.keys() - layouts.keys():
            self._lose(broker, f"the store of broker {broker!r} is not there any more")
        moved = self._admitted(backlogs, limits, offset)
        if not moved:
            return dict(start)
        first = offset.brokers if start == self._initial and self._moves else None
        return replace(offset.moved(moved), first=first).to_json()

    def tasks(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[ReadTask]:
        """Tasks that together read what lies between two offsets, each message in exactly one.

        Raises:
            MessageNotFound: if some of it was deleted, and that is an error.
        """
        until = StreamOffset.from_json(end)
        begins = StreamOffset.from_json(start).brokers if until.first is None else until.first
        layouts = self._layouts()
        ranges: list[tuple[str, StoreLayout, int, int]] = []
        for broker, stop in until.brokers.items():
            if begins.get(broker) == stop:
                continue
            layout = layouts.get(broker)
            if layout is None:
                lost(
                    f"the store of broker {broker!r} is not there any more, and was to be read up "
                    f"to offset {stop}",
                    fail=self._options.fail_on_data_loss,
                )
                continue
            oldest = layout.commit_log.start
            begin = begins.get(broker, oldest)
            if begin < oldest:
                lost(
                    f"{layout.root}: the log starts at offset {oldest}, and the stream had read it "
                    f"up to {begin}: what lies between was deleted",
                    fail=self._options.fail_on_data_loss,
                )
                begin = oldest
            if begin < stop:
                ranges.append((broker, layout, begin, stop))
        size = even_size(max(1, sum(stop - begin for _, _, begin, stop in ranges)), self._options)
        return [task for found in ranges for task in self._tasks_of(*found, until, size)]

    def prepare_available_now(self) -> None:
        """Have the query end with what is there now."""
        self._targets = {
            broker: self._frontier(broker).end_of(layout)
            for broker, layout in self._layouts().items()
        }

    def newest(self) -> dict[str, int] | None:
        """How far the logs were when they were last looked at, None before that."""
        return dict(sorted(self._latest.items())) or None

    # ------------------------------------------------------------------------------------- details
    def _layouts(self) -> dict[str, StoreLayout]:
        """The stores that there are now: under a glob more may come."""
        options = self._options
        found = stores_by_name(options.paths, options.storage_options)
        return {
            broker: StoreLayout.open(location, options.config, options.storage_options)
            for broker, location in found.items()
        }

    def _frontier(self, broker: str) -> LogFrontier:
        skips = self._options.on_damage == "skip"
        return self._frontiers.setdefault(broker, LogFrontier(skips_damage=skips))

    @property
    def _moves(self) -> bool:
        """Whether another look at the options may give another start than the first."""
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
        check_start(
            layout,
            Selection(wanted=wanted, start_offset=start),
            fail=options.fail_on_data_loss,
        )
        if wanted.since_ms is not None:
            first, _ = time_range(layout, wanted, LogExtent(log.start, end))
            start = max(first, start or 0)
        if start is None or start <= log.start:
            return log.start
        if start >= end:
            return end
        if start == layout.commit_log.start:
            return start
        found = LogReader(layout).find(start, end)
        return end if found is None else found

    def _first_queue_offsets(self, layout: StoreLayout) -> Iterator[tuple[tuple[str, int], int]]:
        """The first queue offset that is wanted of each queue that the options name."""
        for (topic, queue_id), (first, _) in (self._options.wanted.queue_ranges or {}).items():
            if first != java.LONG_MAX:
                yield (topic, queue_id), first
            elif (topic, queue_id) in layout.queue_names:
                oldest = layout.commit_log.start
                queue = ConsumeQueue(layout, topic, queue_id, log_min_offset=oldest)
                yield (topic, queue_id), queue.max_offset

    def _filter(self, broker: str, offset: StreamOffset) -> MessageFilter:
        """Which messages of a store are wanted, as the offset has it rather than the options."""
        firsts = offset.queues.get(broker, {})
        return replace(
            self._options.wanted,
            since_ms=offset.since_ms,
            queue_ranges={queue: (first, None) for queue, first in firsts.items()} or None,
        )

    def _admitted(
        self, backlogs: Mapping[str, Backlog], limits: Limits, offset: StreamOffset
    ) -> dict[str, int]:
        """Where the batch ends, of the brokers that have any share in it."""
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
        # With a bound that the durable mark covers, a reader takes no damage for the log's end.
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
        """Tell of a loss: fail, or say it once."""
        fail = self._options.fail_on_data_loss
        if fail or broker not in self._told:
            self._told.add(broker)
            lost(text, fail=fail)
