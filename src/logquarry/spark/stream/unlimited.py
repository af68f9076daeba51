"""Plans the batches of a stream for a Spark without admission control (before Spark 4.2).

Such a Spark asks for the newest offset and passes neither the batch's start nor a limit. A batch
therefore takes everything: with a limit that the source kept for itself, Trigger.AvailableNow,
which asks once, would end after the first batch as if it had read all messages.

A restarted query also begins by asking for the newest offset, before the planner has seen the
checkpoint. Its first offset then holds the start conditions of the options; `tasks` compares them
with those of the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.spark.option_names import FORMAT
from logquarry.spark.options import ReadOptions
from logquarry.spark.stream.admission import StreamOffset
from logquarry.spark.stream.planner import Limits, StreamPlanner
from logquarry.spark.tasks import ReadTask

logger = logging.getLogger(__name__)

_SAME_START = "this Spark cannot keep a start across a restart; give the original start options"


class UnlimitedPlanner(StreamPlanner):
    """Plans batches that take everything there is.

    Args:
        options: what to read.
        columns: columns to read, in order.
    """

    def __init__(self, options: ReadOptions, columns: Sequence[str]) -> None:
        super().__init__(options, columns)
        self._reached: Mapping[str, Any] | None = None
        self._resumed: Mapping[str, Any] | None = None
        if options.max_rows is not None or options.max_bytes is not None:
            logger.warning(
                "%s: maxOffsetsPerTrigger and maxBytesPerTrigger have no effect: a batch takes all "
                "messages, because only Spark 4.2 and later limit the batches of a Python source",
                FORMAT,
            )

    def initial(self) -> dict[str, Any]:
        """Return the offset at which a new query starts; see `StreamPlanner.initial`."""
        start = super().initial()
        if self._reached is None:
            self._reached = start
        return start

    def newest_end(self) -> dict[str, Any]:
        """Return the offset at which a batch of all messages ends.

        Raises:
            StoreNotFound: if there is no store.
            MessageNotFound: if a store lost messages that were read already, unless
                failOnDataLoss=false.
        """
        if self._reached is not None:
            return self.latest(self._reached, Limits())
        layouts = self._layouts()
        # A start "latest" is in the checkpoint; the messages after the first batch are all newer.
        numbers = {
            queue: first
            for queue, (first, _) in (self._options.wanted.queue_ranges or {}).items()
            if first and first != java.LONG_MAX
        }
        self._resumed = StreamOffset(
            brokers={name: self._frontier(name).end_of(found) for name, found in layouts.items()},
            since_ms=self._options.wanted.since_ms,
            queues=dict.fromkeys(layouts, numbers) if numbers else {},
        ).to_json()
        return dict(self._resumed)

    def tasks(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[ReadTask]:
        """Plan tasks that read each message between two offsets exactly once.

        Raises:
            MessageNotFound: if some were deleted, unless failOnDataLoss=false.
            UsageError: if the options of a restarted query give another start than its checkpoint.
        """
        if end == self._resumed:
            end = self._continued(StreamOffset.from_json(start), StreamOffset.from_json(end))
        self._reached = end
        return super().tasks(start, end)

    def _continued(self, start: StreamOffset, end: StreamOffset) -> dict[str, Any]:
        """Return the end of the first batch after a restart, with the start's conditions."""
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
        for broker, read in start.brokers.items():
            if broker not in end.brokers:
                self._lose(broker, f"the store of broker {broker!r} no longer exists")
            elif end.brokers[broker] < read:
                self._lose(
                    broker,
                    f"the log of broker {broker!r} ends at physical offset {end.brokers[broker]}, "
                    f"but the stream has read it up to {read}: it was truncated or replaced",
                )
        return replace(end, since_ms=start.since_ms, queues=start.queues).to_json()
