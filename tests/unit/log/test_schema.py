"""Are the columns those of the documentation, in Arrow's types and in Spark's?"""

from __future__ import annotations

import pyarrow as pa
import pytest

from logquarry.errors import UsageError
from logquarry.log import schema

DDL = (
    "broker string, topic string, queue_id int, queue_offset bigint, physical_offset bigint, "
    "size int, message_id string, store_timestamp timestamp, born_timestamp timestamp, "
    "born_host string, store_host string, sys_flag int, flag int, body_crc int, "
    "reconsume_times int, prepared_transaction_offset bigint, tags string, keys string, "
    "uniq_key string, tags_code bigint, properties map<string,string>, body binary"
)


def test_the_columns() -> None:
    assert schema.spark_ddl() == DDL
    assert tuple(schema.arrow_schema().names) == schema.NAMES
    assert schema.arrow_schema(["topic", "store_timestamp"]) == pa.schema(
        [("topic", pa.string()), ("store_timestamp", pa.timestamp("us", "UTC"))]
    )
    assert schema.spark_ddl(["body"]) == "body binary"


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
