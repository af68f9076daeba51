"""A source that accepts filters from Spark, as ours would if PySpark did not cache them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    Filter,
    GreaterThanOrEqual,
    InputPartition,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

ROWS = 100


class CanarySource(DataSource):
    """Yields the numbers from 0 on."""

    @classmethod
    def name(cls) -> str:
        return "canary"

    def schema(self) -> str:
        return "a int"

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader()


class _Reader(DataSourceReader):
    def __init__(self) -> None:
        self._least = 0

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        for wanted in filters:
            if isinstance(wanted, GreaterThanOrEqual):
                self._least = int(wanted.value)
            else:
                yield wanted

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self._least)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        for number in range(partition.value, ROWS):
            yield (number,)
