"""The data source `rocketmq`: reads stores as DataFrames, as a batch or as a stream.

Options, not filters pushed down by Spark, select the messages (see `RocketMQReader`). The readers
decode only the columns of the schema, and check the CRC of a body only if the column `body` is
among them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from logquarry.spark.columns import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
    InputPartition,
    checked,
    struct_of,
    task_rows,
)
from logquarry.spark.option_names import FORMAT
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.tasks import ReadTask, open_stores, plan_tasks
from logquarry.spark.worker import Packaged, ignore_hang_ups, without_traceback

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


class RocketMQDataSource(DataSource):
    """The class behind `format("rocketmq")` of `read`, `readStream`, `write` and `writeStream`.

    `load` checks that the stores exist, unless the user gives a schema. The first query on a
    DataFrame plans its tasks; later queries on the same DataFrame reuse that plan.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return FORMAT

    def schema(self) -> StructType:
        """Return all columns, or those of the option `columns`.

        Raises:
            UsageError: if an option has an invalid value.
            StoreNotFound: if there is no store.
        """
        ignore_hang_ups()
        with without_traceback():
            options = parse_read_options(self.options)
            open_stores(options)
            return struct_of(options)

    # The parameter's name is PySpark's: it is passed by keyword.
    def reader(self, schema: StructType) -> DataSourceReader:
        """Make a batch reader of the columns of `schema`: all or some, in any order.

        Raises:
            UsageError: if the table has no such column, or its type differs.
        """
        ignore_hang_ups()
        with without_traceback():
            options = parse_read_options(self.options)
            for remark in options.remarks:
                logger.warning("%s: %s", FORMAT, remark)
            return RocketMQReader(options, checked(schema, options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Make a stream reader of the columns of `schema`: all or some, in any order."""
        from logquarry.spark.stream.reader import stream_reader

        ignore_hang_ups()
        return stream_reader(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make a writer that puts the rows of a batch into stores.

        Raises:
            UsageError: if an option has an invalid value, or `schema` does not describe messages.
        """
        from logquarry.spark.sink import batch_writer

        ignore_hang_ups()
        with without_traceback():
            return batch_writer(self.options, schema, overwrite)

    # PySpark's name.
    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        """Make a writer that puts the batches of a stream into stores.

        Raises:
            UsageError: if an option has an invalid value, or `schema` does not describe messages.
        """
        from logquarry.spark.sink import stream_writer

        ignore_hang_ups()
        with without_traceback():
            return stream_writer(self.options, schema, overwrite)


class RocketMQReader(Packaged, DataSourceReader):
    """Reads a batch: plans on the driver, reads in the workers.

    It does not override `pushFilters`: PySpark up to 4.3 caches a filtered plan with the loaded
    table, and later queries on the same DataFrame then miss rows.
    """

    def __init__(self, options: ReadOptions, columns: tuple[str, ...], struct: StructType) -> None:
        self._options = options
        self._columns = columns
        self._struct = struct

    def partitions(self) -> Sequence[InputPartition]:
        """Plan one partition for each task.

        Raises:
            LogquarryError: if the stores cannot be read with these options.
        """

        with without_traceback():
            tasks = plan_tasks(self._options, self._columns)
        # Without tasks: one partition with None, as PySpark makes it for an empty list.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the messages of a partition as Arrow batches.

        Raises:
            CorruptFrame: on damage, unless onDamage=skip; then the worker logs it to stderr.
        """
        task: ReadTask | None = partition.value
        if task is None:
            return
        yield from task_rows(task, self._struct)
