"""Columns of other libraries in ``put_many``: anything with ``__arrow_c_stream__``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.errors import UsageError
from tests.helpers.small_store import opened


class Foreign:
    """A table of a library that this package does not know, with the text types of Polars."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[lq.StoreWriter]:
    with opened(tmp_path / "store") as store:
        yield store


def found(store: lq.StoreWriter) -> list[tuple[str, int, str | None, bytes]]:
    return [(m.topic, m.queue_id, m.keys, m.body) for m in store.scan()]


def test_a_frame_of_pandas(store: lq.StoreWriter) -> None:
    frame = pd.DataFrame(
        {
            "topic": ["t", "u"],
            "body": [b"1", b"2"],
            "queue_id": pd.array([3, None], dtype="Int64"),
            "keys": [["a", "b"], []],
            "born_timestamp": pd.to_datetime(["2020-01-01", "2020-01-02"], utc=True),
        },
        index=[7, 9],
    )
    assert store.put_many(frame).message_count == 2
    assert found(store) == [("t", 3, "a b", b"1"), ("u", 0, None, b"2")]
    assert next(store.scan()).born_timestamp == 1_577_836_800_000


def test_properties_of_pandas(store: lq.StoreWriter) -> None:
    dicts = pd.DataFrame({"topic": ["t"] * 4, "properties": [{"a": "1"}, {"b": "2"}, {}, None]})
    store.put_many(dicts)
    # A table that was read from a store has lists of pairs in pandas.
    store.put_many(store.to_arrow(columns=["topic", "properties"]).read_all().to_pandas())
    assert [m.properties for m in store.scan()] == [{"a": "1"}, {"b": "2"}, {}, {}] * 2


def test_streams_and_views(store: lq.StoreWriter) -> None:
    table = pa.table(
        {
            "topic": pa.array(["t"] * 3, pa.string_view()),
            "body": pa.array([b"a body of more than twelve bytes"] * 3, pa.binary_view()),
            "keys": pa.array([["k"], None, ["l", "m"]], pa.large_list(pa.large_string())),
        }
    )
    for source in (Foreign(table), table, table.to_reader(), Foreign(table[:0])):
        store.put_many(source)
    (batch,) = table.to_batches()
    store.put_many(batch)
    assert [keys for _, _, keys, _ in found(store)] == ["k", None, "l m"] * 4


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"body": [b"1"]}, "need a column topic"),
        ({"topic": ["t"], "nope": [1]}, "no column 'nope'"),
        ({"topic": ["t"], "queue_id": [0.5]}, "queue_id takes whole numbers, not double"),
        ({"topic": ["t"], "body": [[1]]}, "body takes text or bytes"),
        ({"topic": ["t"], "tags": [["a"]]}, "tags takes text or bytes"),
        ({"topic": ["t"], "keys": [["a b"]]}, "keys takes words without spaces, not 'a b'"),
        ({"topic": ["t"], "keys": [["a", ""]]}, "keys takes words without spaces"),
        ({"topic": ["t"], "keys": [["a", None]]}, "keys has a list with a null word"),
        ({"topic": ["t"], "properties": [{"a": 1}]}, "properties is a map of text to text"),
        ({"topic": ["t"], "properties": [["ab"]]}, "properties is a map of text to text"),
        ({"topic": ["t"], "properties": [[["a", "b", "c"]]]}, "properties is a map of text"),
        ({"topic": ["t"], "properties": [[["a", None]]]}, "message .: the property 'a' is null"),
        ({"topic": ["t"], "wait_store_ok": [1]}, "wait_store_ok takes true and false"),
        ({"topic": ["t"], "queue_id": [1 << 31]}, "queue_id is 2147483648"),
        ({"topic": ["t"], "delay_level": [True]}, "delay_level takes whole numbers"),
    ],
)
@pytest.mark.parametrize("rows", [1, 100])
def test_wrong_columns(
    store: lq.StoreWriter, columns: dict[str, list[Any]], error: str, rows: int
) -> None:
    table = pa.table({name: values * rows for name, values in columns.items()})
    for source in (table, Foreign(table)):
        with pytest.raises(UsageError, match=error):
            store.put_many(source)
    assert store.max_offset == 0


def test_what_is_no_table_of_messages(store: lq.StoreWriter) -> None:
    mixed = pd.DataFrame({"topic": ["t", 5]})
    for source in (pa.array([1, 2]), pa.chunked_array([[1]]), mixed):
        with pytest.raises(UsageError, match=r"put_many: the .* has no columns of messages"):
            store.put_many(source)

    class OldFrame:
        """A data frame without the protocol iterates over the names of its columns."""

        columns = ("topic",)

        def __iter__(self) -> Iterator[str]:
            return iter(self.columns)

    with pytest.raises(UsageError, match="__arrow_c_stream__"):
        store.put_many(OldFrame())
    assert store.max_offset == 0


def test_the_time_in_the_page_cache(store: lq.StoreWriter) -> None:
    message = lq.Message("t", b"x", delay_level=1)
    for result in (
        store.put(lq.Message("t")),
        store.put(message),
        store.put_many([lq.Message("t"), message] * 50),
    ):
        assert 0 < result.page_cache_ms <= result.elapsed_ms
    # In the compiled module, a batch counts the kernel's ticks.
    batch = store.put_batch([lq.Message("t")])
    assert 0 <= batch.page_cache_ms <= batch.elapsed_ms
