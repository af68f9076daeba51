"""The streaming source `rocketmq`: what Spark calls, around `logquarry.spark.stream`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from logquarry.spark.errors import told_plainly
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.rows import checked, task_rows
from logquarry.spark.stream.planner import Limits, StreamPlanner

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


logger = logging.getLogger(__name__)


class RocketMQStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans beside the driver, in one process for as long as the query runs; reads in the workers.

    Spark makes another one to take :meth:`read` from, and hands that to the workers. Options are
    looked at when the query asks its first question: of what is raised before that, PySpark up to
    4.3 tells nothing but an error of its own.

    Args:
        given: the options, as the user gave them.
        struct: the schema of what is read.
    """

    def __init__(self, given: Mapping[str, str], struct: StructType) -> None:
        self._given = dict(given)
        self._struct = struct

    @cached_property
    def _options(self) -> ReadOptions:
        with told_plainly():
            options = parse_read_options(self._given, is_stream=True)
        for remark in options.remarks:
            logger.warning("rocketmq: %s", remark)
        return options

    @cached_property
    def _planner(self) -> StreamPlanner:
        with told_plainly():
            return StreamPlanner(self._options, checked(self._struct, self._options))

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query starts.

        Raises:
            LogquarryError: if the stores cannot be read as the options say.
        """
        with told_plainly():
            return self._planner.initial()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What the options allow one batch; of two limits the one that counts messages."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Where the next batch ends.

        Raises:
            LogquarryError: if a store is gone, or what was read of it.
        """
        with told_plainly():
            return self._planner.latest(start, self._limits(limit))

    def _limits(self, limit: ReadLimit) -> Limits:
        # Trigger.Once takes all there is, whatever the options say.
        if isinstance(limit, ReadAllAvailable):
            return Limits()
        found = Limits(self._options.max_bytes, self._options.max_rows)
        if isinstance(limit, ReadMaxRows):
            return Limits(found.max_bytes, limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            return Limits(limit.max_bytes, found.max_rows)
        return found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Have the query end with what is there now."""
        with told_plainly():
            self._planner.prepare_available_now()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """How far the logs were when they were last looked at, for the query's progress."""
        return self._planner.newest()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One partition a task.

        Raises:
            MessageNotFound: if some of it was deleted, and that is an error.
        """
        with told_plainly():
            return [InputPartition(task) for task in self._planner.tasks(start, end)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless it is to be skipped; then it is told on stderr.
        """
        yield from task_rows(partition.value, self._struct)
