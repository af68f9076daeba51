"""``logquarry import``: the columns ``keys``, ``tags`` and ``uniq_key`` beside the properties."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

import logquarry as lq
from tests.helpers.command import jsonl
from tests.helpers.imports import Document, Import, line, write
from tests.helpers.small_store import SMALL


def merged_rows() -> list[Document]:
    """Rows in which the columns have values that the map lacks, repeats or contradicts."""
    return [
        {"properties": None, "keys": "k1 k2", "tags": "t", "uniq_key": "u"},
        {"properties": {"a": "b"}, "keys": "k", "tags": None, "uniq_key": None},
        {"properties": {"TAGS": "old", "x": "y"}, "keys": None, "tags": "new", "uniq_key": None},
        {"properties": {"KEYS": "k", "TAGS": "t"}, "keys": "k", "tags": "t", "uniq_key": None},
        {"properties": {"TAGS": "t"}, "keys": None, "tags": None, "uniq_key": None},
        {"properties": {}, "keys": None, "tags": "", "uniq_key": "u"},
    ]


def test_the_columns_keys_and_tags_and_the_map_are_merged_alike_from_all_formats(
    tmp_path: Path, put_in: Import
) -> None:
    rows = merged_rows()
    put_in(write(tmp_path / "merged.jsonl", *(line(**row) for row in rows)))
    expected = [message["properties_string"] for message in jsonl(tmp_path / "store")]
    assert expected[:3] == [
        "KEYS\x01k1 k2\x02TAGS\x01t\x02UNIQ_KEY\x01u",
        "a\x01b\x02KEYS\x01k",
        "TAGS\x01new\x02x\x01y",
    ]
    table = rows_table(rows)
    pq.write_table(table, tmp_path / "merged.parquet")
    (tmp_path / "store").rename(tmp_path / "lines")
    put_in(tmp_path / "merged.parquet")
    assert [message["properties_string"] for message in jsonl(tmp_path / "store")] == expected
    with lq.MessageStore.open(tmp_path / "put", mode="rw", config=lq.StoreConfig(**SMALL)) as store:
        store.put_many(table.drop_columns("uniq_key"))
    expected = [text.removesuffix("UNIQ_KEY\x01u").removesuffix("\x02") for text in expected]
    assert [message["properties_string"] for message in jsonl(tmp_path / "put")] == expected


def rows_table(rows: list[Document]) -> pa.Table:
    table = pa.Table.from_pylist(
        [
            row | {"properties": row["properties"] and list(row["properties"].items())}
            for row in rows
        ],
        pa.schema(
            [
                ("properties", pa.map_(pa.string(), pa.string())),
                *((name, pa.string()) for name in ("keys", "tags", "uniq_key")),
            ]
        ),
    )
    count = len(rows)
    return table.append_column("topic", [["orders"] * count]).append_column(
        "body", [[b"text"] * count]
    )


def test_a_property_string_replaces_map_and_columns_of_its_row(
    tmp_path: Path, put_in: Import
) -> None:
    table = rows_table(merged_rows()[:2])
    strings = pa.array([b"x\x01y\x02", None], pa.binary())
    pq.write_table(table.append_column("properties_string", strings), tmp_path / "exact.parquet")
    put_in(tmp_path / "exact.parquet")
    found = [message["properties_string"] for message in jsonl(tmp_path / "store")]
    assert found == ["x\x01y\x02", "a\x01b\x02KEYS\x01k"]


def test_a_null_property_names_the_row_beside_keys(tmp_path: Path, put_in: Import) -> None:
    rows: list[Document] = [{"properties": {"a": "b"}}, {"properties": {"a": None}, "keys": "k"}]
    pq.write_table(rows_table(rows), tmp_path / "null.parquet")
    failed = put_in(tmp_path / "null.parquet", code=1)
    assert "null.parquet: row 2: the property 'a' is null" in failed.stderr
