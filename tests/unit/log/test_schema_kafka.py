"""Messages as Spark's Kafka source shows them. No Spark is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from logquarry.errors import UsageError
from logquarry.log import schema
from logquarry.log.schema import kafka_batch, sources
from logquarry.spark.options import parse_read_options
from logquarry.spark.tasks import plan_tasks, read_batches
from tests.conformance.golden_facts import SOUND
from tests.spark.golden_rows import golden_messages


def rows(store: Path, **options: str) -> list[dict[str, Any]]:
    read = parse_read_options({"path": str(store), "schema": "kafka", **options})
    return [
        row
        for task in plan_tasks(read)
        for batch in read_batches(task)
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize("name", SOUND)
def test_golden_messages(golden: Path, name: str) -> None:
    expected = []
    for m in golden_messages(golden / name / "expected.jsonl"):
        words = (m["keys"] or "").split(" ")
        first = next((word for word in words if word), None)
        headers = [{"key": k, "value": v.encode()} for k, v in m["properties"].items()]
        expected.append(
            {
                "key": first.encode() if first is not None else None,
                "value": m["body"],
                "topic": m["topic"],
                "partition": m["queue_id"],
                "offset": m["queue_offset"],
                "timestamp": m["store_timestamp"],
                "timestampType": 1,
                "headers": sorted(headers, key=lambda pair: pair["key"]) or None,
            }
        )
    found = rows(golden / name / "store", includeHeaders="true", splitSize="20k")
    for row in found:
        row["timestamp"] = round(row["timestamp"].timestamp() * 1000)
        if row["headers"] is not None:
            row["headers"].sort(key=lambda pair: pair["key"])
    place = ("topic", "partition", "offset")
    # Half messages and rollbacks are in no queue, and their queue offsets belong to others.
    order = [*place, "timestamp", "value"]
    found.sort(key=lambda row: [row[name] for name in order])
    expected.sort(key=lambda row: [row[name] for name in order])
    assert found == expected


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("a b c", b"a"),
        ("Zürich", "Zürich".encode()),
        ("  a b", b"a"),
        ("", None),
        ("   ", None),
        (None, None),
    ],
)
def test_the_key_is_the_first_word(keys: str | None, key: bytes | None) -> None:
    batch = pa.record_batch({"keys": pa.array([keys, "next one"], pa.string())})
    assert kafka_batch(batch, ["key"])["key"].to_pylist() == [key, b"next"]


def test_headers_of_a_part_of_an_array() -> None:
    kind = pa.map_(pa.string(), pa.string())
    array = pa.array([[("a", "1")], [], [("b", "2"), ("c", "3")], []], kind).slice(1, 2)
    batch = pa.record_batch({"properties": array})
    assert kafka_batch(batch, ["headers"])["headers"].to_pylist() == [
        None,
        [{"key": "b", "value": b"2"}, {"key": "c", "value": b"3"}],
    ]


def test_only_what_is_needed_is_read(golden: Path) -> None:
    assert sources(["offset", "partition", "offset"]) == ("queue_offset", "queue_id")
    assert sources(["timestampType"]) == ("queue_offset",)
    harmed = golden / "unclean" / "crc-third-last-file" / "store"
    found = rows(harmed, columns="timestampType")
    assert found == [{"timestampType": schema.LOG_APPEND_TIME}] * 174


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"columns": "body"}, "columns: there is no column 'body'; Kafka's are key, value"),
        ({"columns": "key,headers"}, "columns: the column headers needs includeHeaders"),
        ({"columns": "key,key"}, "columns: a column is named twice"),
        ({"columns": ""}, "columns: is empty"),
    ],
)
def test_columns_that_are_none(options: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_read_options({"path": "/s", "schema": "kafka", **options})
    assert str(caught.value).startswith(text)
