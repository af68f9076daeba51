"""The source `rocketmq`: stores as DataFrames, once or as a stream.

Options choose what is read, instead of filters that Spark would push down (see `pushFilters`
below). Bodies are compared with their CRC exactly where the column `body` is read: a subset of the
columns, by `.schema(...)` or the option `columns`, is decoded alone and does not touch the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
)

from logquarry.spark.errors import told_plainly
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.rows import checked, struct_of, task_rows
from logquarry.spark.worker import let_hang_up

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from logquarry.spark.tasks import ReadTask

logger = logging.getLogger(__name__)

FORMAT = "rocketmq"


class RocketMQDataSource(DataSource):
    """What `spark.read.format("rocketmq")` makes.

    The stores are looked for when `load` is called (without a schema of the user's own), and
    planned when a query runs: a DataFrame keeps the plan of its first query.
    """

    @classmethod
    def name(cls) -> str:
        """The name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """All columns, or those of the option `columns`.

        Raises:
            UsageError: if an option cannot be meant.
            StoreNotFound: if there is no store.
        """
        from logquarry.spark.tasks import open_stores

        let_hang_up()
        with told_plainly():
            options = parse_read_options(self.options)
            open_stores(options)
            return struct_of(options)

    # The parameter's name is PySpark's: it is passed by keyword.
    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns of `schema`: all, or some, in any order.

        Raises:
            UsageError: if one of them is no column of ours, or not of its type.
        """
        let_hang_up()
        with told_plainly():
            options = parse_read_options(self.options)
            for remark in options.remarks:
                logger.warning("%s: %s", FORMAT, remark)
            return RocketMQReader(options, checked(schema, options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A reader for `readStream` of the columns of `schema`: all, or some, in any order."""
        from logquarry.spark.stream.reader import RocketMQStreamReader

        let_hang_up()
        return RocketMQStreamReader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """What writes rows of `schema` into stores.

        Raises:
            UsageError: if an option cannot be meant, or the rows can be no messages.
        """
        from logquarry.spark.sink.writer import batch_writer

        let_hang_up()
        with told_plainly():
            return batch_writer(self.options, schema, overwrite)

    # PySpark's name.
    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """What writes the batches of a stream of rows of `schema` into stores.

        Raises:
            UsageError: if an option cannot be meant, or the rows can be no messages.
        """
        from logquarry.spark.sink.writer import stream_writer

        let_hang_up()
        with told_plainly():
            return stream_writer(self.options, schema, overwrite)


class RocketMQReader(DataSourceReader):
    """Plans on the driver, reads in the workers.

    `pushFilters` is not overridden, on purpose: PySpark up to 4.3 caches a filtered plan with the
    loaded table, and later queries on the same DataFrame then miss rows.
    """

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], struct: StructType) -> None:
        self._options = options
        self._columns = columns
        self._struct = struct

    def partitions(self) -> Sequence[InputPartition]:
        """One partition a task. Where there is nothing to read, one that says so.

        Raises:
            LogquarryError: if the stores cannot be read as the options say.
        """
        from logquarry.spark.tasks import plan_tasks

        with told_plainly():
            tasks = plan_tasks(self._options, self._columns)
        # An empty list would have Spark make a partition of its own, with None in it: the same.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless it is to be skipped; then it is told on stderr.
        """
        task: ReadTask | None = partition.value
        if task is None:
            return
        yield from task_rows(task, self._struct)
