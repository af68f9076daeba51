"""Decoded bodies in tables, and the tables of dead letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.spark.decode import DecodeOptions, parse_decode_options
from logquarry.spark.lakehouse.delta import Delta
from logquarry.spark.lakehouse.iceberg import Iceberg
from tests.helpers.lake import Lake, put, run_here

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


def test_a_given_schema(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    good = b'{"id": 1, "tags": ["x"], "more": 0, "at": "2024-05-01T00:00:00Z"}'
    offsets = put(store, good, b"oops", b'{"id": "one"}', b"{}")
    decode = parse_decode_options("json", "id bigint, tags array<string>, at timestamp")
    done = lake.export(store, decode=decode, partition_by=["topic"])
    assert (done.messages, done.dead_messages) == (2, 2)
    found = lake.rows("physical_offset", "body", "value")
    assert [row[0] for row in found] == [offsets[0], offsets[3]]
    assert found[0][1] == good
    assert (found[0][2]["id"], found[0][2]["tags"]) == (1, ["x"])
    assert found[0][2]["at"].isoformat() == "2024-05-01T00:00:00+00:00"
    assert found[1][2] == {"id": None, "tags": None, "at": None}
    dead = lake.rows("broker", "topic", "physical_offset", "reason", "body", dead=True)
    assert [row[:3] for row in dead] == [("store", "orders", offset) for offset in offsets[1:3]]
    assert dead[0][3].startswith("JSONDecodeError") and dead[0][4] == b"oops"
    assert dead[1][3] == "value.id: needs a whole number, not a string"
    assert lake.known_files() == lake.parquet_files()


def test_a_schema_of_a_sample_is_the_tables_for_good(lake: Lake, tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, b'{"id": 1, "o": {"p": [1.5]}}', b"oops")
    lake.export(store, decode="json")
    put(store, b'{"id": "two"}', b'{"id": 3, "new": true}')
    done = lake.export(store, decode="json")
    assert (done.messages, done.dead_messages) == (1, 1)
    values = [value for (value,) in lake.rows("value")]
    assert values == [{"id": 1, "o": {"p": [1.5]}}, {"id": 3, "o": None}]
    assert len(lake.rows(dead=True)) == 2


def test_an_invalid_schema_is_an_error_before_the_first_message(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    decode = DecodeOptions(kind="json", schema=b"id nosuchtype")
    export = lake.prepared(tmp_path / "store", decode=decode, follow=True)

    def waits(_: float) -> None:
        raise AssertionError("the export waits for messages")

    monkeypatch.setattr("logquarry.spark.lakehouse.export.time.sleep", waits)
    with pytest.raises(UsageError, match="nosuchtype"):
        export.run_with(run_here)


def test_a_sample_that_is_not_there_yet(lake: Lake, tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    assert lake.export(tmp_path / "store", decode="json").commits == 0
    put(tmp_path / "store", b"x", b"{}")
    with pytest.raises(UsageError, match="of the first 2 bodies, 1 is a JSON object"):
        lake.export(tmp_path / "store", decode="json")
    put(tmp_path / "store", b'{"a": true}')
    done = lake.export(tmp_path / "store", decode="json")
    # An object without fields is also valid.
    assert (done.messages, done.dead_messages) == (2, 1)


def test_the_content_of_compressed_bodies_without_the_bodies(lake: Lake, tmp_path: Path) -> None:
    import zlib

    text = json.dumps({"id": 5}).encode()
    # Bit 0 of the flags: the client has compressed the body.
    put(tmp_path / "store", zlib.compress(text), sys_flag=1)
    lake.export(
        tmp_path / "store",
        {"columns": "physical_offset,broker"},
        decode=parse_decode_options("json", "id int"),
    )
    assert lake.table().column_names == ["physical_offset", "broker", "value"]
    assert lake.rows("value") == [({"id": 5},)]


def test_dead_letters_are_there_once_if_the_table_misses_its_commit(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    decode = parse_decode_options("json", "id int")
    put(store, b'{"id": 1}', b"dead 1")
    kind: Any = Delta if lake.kind == "delta" else Iceberg
    append = kind.append

    def failing(self: Any, *arguments: Any) -> None:
        if not self.folder.location.endswith("_dead_letters"):
            raise StoreUnavailable("no table today")
        append(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "append", failing)
        with pytest.raises(StoreUnavailable):
            lake.export(store, decode=decode)
    assert len(lake.rows(dead=True)) == 1
    # The next commit ends at another offset than the failed one.
    put(store, b"dead 2", b'{"id": 2}')
    done = lake.export(store, decode=decode)
    assert (done.messages, done.dead_messages) == (2, 1)
    assert [row[2] for row in lake.rows(dead=True)] == [b"dead 1", b"dead 2"]
    assert [value["id"] for (value,) in lake.rows("value")] == [1, 2]
    assert lake.known_files() == lake.parquet_files()


def test_another_schema_is_another_table(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", b"{}")
    lake.export(tmp_path / "store", decode=parse_decode_options("json", "id int"))
    with pytest.raises(UsageError, match="the table has decode"):
        lake.export(tmp_path / "store", decode=parse_decode_options("json", "id bigint"))
    with pytest.raises(UsageError, match="only with decode"):
        lake.export(tmp_path / "store", dead_letters=tmp_path / "dead")
