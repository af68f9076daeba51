"""Are the columns those of the documentation, in Arrow's types and in Spark's?"""

from __future__ import annotations

import pyarrow as pa
import pytest

from logquarry.errors import UsageError
from logquarry.log import schema
from tests.helpers.exports import DDL


def test_the_columns() -> None:
    assert ", ".join(f"{column.name} {column.spark}" for column in schema.COLUMNS) == DDL
    assert tuple(schema.arrow_schema().names) == schema.NAMES
    assert schema.arrow_schema(["topic", "store_timestamp"]) == pa.schema(
        [("topic", pa.string()), ("store_timestamp", pa.timestamp("us", "UTC"))]
    )


@pytest.mark.parametrize("names", [["nothing"], ["topic", "topic"], ["Topic"], []])
def test_names_that_are_no_columns(names: list[str]) -> None:
    with pytest.raises(UsageError, match="column"):
        schema.check_names(names)


def test_names_that_are() -> None:
    assert schema.check_names(iter(["body", "topic"])) == ("body", "topic")


def test_every_column_stands_in_the_table() -> None:
    lines = schema.markdown().splitlines()
    assert len(lines) == 2 + len(schema.NAMES)
    assert lines[2].startswith("| broker | `string` |")
