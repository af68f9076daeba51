"""Exports to Parquet, and what Spark reads back."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logquarry.errors import CorruptFrame, StoreNotFound, UsageError
from logquarry.spark.export import ExportSummary, export_parquet, summarize
from logquarry.spark.options import ReadOptions
from logquarry.spark.output import INTENT, MANIFEST, SUCCESS
from tests.helpers.exports import DDL
from tests.helpers.files import bytes_of
from tests.spark.golden_rows import (
    MIDDLE,
    OLD,
    golden_messages,
    harmed_stores,
    rows_by_broker,
    sound_stores,
    whole_messages,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def parquet_files(dest: Path) -> set[str]:
    return {name for name in bytes_of(dest) if name.endswith(".parquet")}


def test_sound_stores(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    stores = sound_stores(golden)
    told: list[tuple[int, int]] = []
    result = export_parquet(
        spark,
        list(stores.values()),
        tmp_path / "out",
        progress=lambda done, total: told.append((done, total)),
    )
    df = spark.read.parquet(str(tmp_path / "out"))
    assert df.schema == spark.createDataFrame([], DDL).schema
    found = rows_by_broker(df)
    assert found.keys() == stores.keys()
    for broker, path in stores.items():
        assert found[broker] == golden_messages(path.parent / "expected.jsonl"), broker
    assert result.messages == sum(map(len, found.values())) == result.summary.total.messages
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert {entry["path"] for entry in manifest["files"]} == parquet_files(tmp_path / "out")
    assert manifest["messages"] == result.messages
    assert manifest["damage"] == []
    assert (tmp_path / "out" / SUCCESS).exists()


def test_a_rerun_replaces(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    store = golden / "single" / "store"
    options = {"splitSize": "30k"}
    first = export_parquet(spark, store, dest, options)
    before = bytes_of(dest)
    assert len(first.files) > 3
    second = export_parquet(spark, store, dest, options)
    assert [file.path for file in second.files] == [file.path for file in first.files]
    after = bytes_of(dest)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in parquet_files(dest))
    # The second export has other files and removes those of the first.
    third = export_parquet(spark, store, dest, partition_by=["topic"])
    assert parquet_files(dest) == {file.path for file in third.files}
    assert spark.read.parquet(str(dest)).count() == 400


def test_partitions(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    stores = [golden / "real-broker" / "store", golden / "single" / "store"]
    export_parquet(spark, stores, tmp_path / "out", partition_by=["topic", "day"])
    df = spark.read.parquet(str(tmp_path / "out"))
    assert df.drop("day").schema == spark.createDataFrame([], DDL).schema
    assert df.schema["day"].dataType.simpleString() == "date"
    assert df.where("day <> to_date(store_timestamp)").count() == 0
    found = rows_by_broker(df.drop("day"))
    for store in stores:
        expected = golden_messages(store.parent / "expected.jsonl")
        assert found[store.parent.name] == expected
    assert all("/day=" in name for name in parquet_files(tmp_path / "out"))


def test_filters_and_columns(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    store = golden / "real-broker" / "store"
    options = {"topics": "MainTopic", "queueIds": "0", "columns": "topic,queue_id,body"}
    export_parquet(spark, store, tmp_path / "out", options)
    expected = [
        (m["topic"], m["queue_id"], m["body"])
        for m in golden_messages(store.parent / "expected.jsonl")
        if (m["topic"], m["queue_id"]) == ("MainTopic", 0)
    ]
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted((row[0], row[1], bytes(row[2])) for row in rows) == sorted(expected)


def test_nothing_to_export(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    result = export_parquet(
        spark, golden / "single" / "store", tmp_path / "out", {"topics": "NoSuchTopic"}
    )
    assert result.messages == 0
    df = spark.read.parquet(str(tmp_path / "out"))
    assert df.schema == spark.createDataFrame([], DDL).schema
    assert df.count() == 0
    (tmp_path / "empty" / "commitlog").mkdir(parents=True)
    assert export_parquet(spark, tmp_path / "empty", tmp_path / "out").messages == 0


# ---------------------------------------------------------------------------------------- damage
def test_damage_is_skipped_and_counted(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    stores = harmed_stores(golden)
    result = export_parquet(spark, list(stores.values()), tmp_path / "out", {"onDamage": "skip"})
    found = rows_by_broker(spark.read.parquet(str(tmp_path / "out")))
    for scenario in stores:
        assert found.get(scenario, []) == whole_messages(golden, scenario), scenario
    spans = {(Path(span.path).parts[-4], span.offset, span.kind) for span in result.summary.damage}
    assert ("crc-third-last-file", OLD, "bad_body_crc") in spans
    assert ("total-size-middle", MIDDLE, "bad_length_sum") in spans
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert len(manifest["damage"]) == len(result.summary.damage)
    entry = next(d for d in manifest["damage"] if "/crc-third-last-file/" in d["file"])
    assert (entry["offset"], entry["length"], entry["kind"]) == (OLD, 336, "bad_body_crc")


def test_damage_fails_and_leaves_everything_as_it_was(
    spark: SparkSession, golden: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "out"
    export_parquet(spark, golden / "single" / "store", dest)
    before = bytes_of(dest)
    with pytest.raises(CorruptFrame) as caught:
        export_parquet(spark, golden / "unclean" / "crc-third-last-file" / "store", dest)
    assert (caught.value.offset, caught.value.kind) == (OLD, "bad_body_crc")
    assert bytes_of(dest) == before


@pytest.mark.parametrize("split_size", [None, 3_000])
def test_stop_at_the_first_damage(
    spark: SparkSession, golden: Path, tmp_path: Path, split_size: int | None
) -> None:
    scenario = golden / "unclean" / "crc-third-last-file"
    before = golden_messages(golden / "unclean" / "before-harm-expected.jsonl")
    options = ReadOptions(paths=(), on_damage="stop", split_size=split_size)
    result = export_parquet(spark, scenario / "store", tmp_path / "out", options)
    found = rows_by_broker(spark.read.parquet(str(tmp_path / "out")))["store"]
    assert found == [m for m in before if m["physical_offset"] < OLD]
    assert [span.offset for span in result.summary.damage] == [OLD]
    assert result.summary.total.messages == len(found)
    summary = summarize(spark, scenario / "store", options)
    assert summary.total.messages == len(before)  # the summary does not read bodies


def test_a_torn_tail(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    store = golden / "unclean" / "half-frame" / "store"
    result = export_parquet(spark, store, tmp_path / "out")
    assert result.messages == 173
    assert [span.kind for span in result.summary.damage] == ["torn_tail"]
    strict = ReadOptions(paths=(), on_damage="fail")
    with pytest.raises(CorruptFrame):
        export_parquet(spark, store, tmp_path / "out", strict)


# --------------------------------------------------------------------------------------- refusals
def test_foreign_files(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    spark.range(3).write.parquet(str(tmp_path / "out"))
    before = bytes_of(tmp_path / "out")
    with pytest.raises(UsageError, match="no export wrote"):
        export_parquet(spark, golden / "single" / "store", tmp_path / "out")
    assert bytes_of(tmp_path / "out") == before


def test_places_that_make_no_sense(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    store = golden / "single" / "store"
    for dest in (store, store / "out", store.parent):
        with pytest.raises(UsageError, match="overlaps with the store"):
            export_parquet(spark, store, dest)
    with pytest.raises(StoreNotFound):
        export_parquet(spark, tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(UsageError, match="partition by"):
        export_parquet(spark, store, tmp_path / "out", partition_by=["keys"])
    with pytest.raises(UsageError, match="there is no option topic "):
        export_parquet(spark, store, tmp_path / "out", {"topic": "a"})
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------- crashes and interrupts
def test_a_crash_in_the_middle_of_putting_files_in_place(
    spark: SparkSession, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logquarry.spark.output import OutputFolder

    dest = tmp_path / "out"
    store = golden / "single" / "store"
    export_parquet(spark, store, dest, {"splitSize": "60k"})
    move = OutputFolder.move
    moved: list[str] = []

    def failing(self: OutputFolder, source: str, target: str) -> None:
        if target.endswith(".parquet"):
            if len(moved) == 2:
                raise OSError("no space left")
            moved.append(target)
        move(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "move", failing)
        with pytest.raises(OSError, match="no space left"):
            export_parquet(spark, store, dest, {"splitSize": "30k"})
    assert (dest / INTENT).exists()
    assert not (dest / SUCCESS).exists()
    export_parquet(spark, store, dest, {"splitSize": "30k"})
    assert not (dest / INTENT).exists()
    assert (dest / SUCCESS).exists()
    found = rows_by_broker(spark.read.parquet(str(dest)))["store"]
    assert found == golden_messages(store.parent / "expected.jsonl")


def test_an_interrupt_leaves_everything_as_it_was(
    spark: SparkSession, golden: Path, tmp_path: Path
) -> None:
    dest = tmp_path / "out"
    store = golden / "single" / "store"
    export_parquet(spark, store, dest)
    before = bytes_of(dest)
    interrupted: list[int] = []

    def interrupt(done: int, total: int) -> None:
        if not interrupted:
            interrupted.append(done)
            signal.raise_signal(signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            export_parquet(spark, store, dest, {"splitSize": "4k"}, progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert bytes_of(dest) == before
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()
    assert threading.active_count() < 30
    assert export_parquet(spark, store, dest).messages == 400


# ---------------------------------------------------------------------------------------- summary
def test_summary(spark: SparkSession, golden: Path) -> None:
    messages = golden_messages(golden / "real-broker" / "expected.jsonl")
    summary = summarize(spark, golden / "real-broker" / "store")
    by_topic: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        by_topic.setdefault(message["topic"], []).append(message)
    assert list(summary.topics) == sorted(by_topic)
    for topic, own in by_topic.items():
        found = summary.topics[topic]
        assert found.messages == len(own)
        assert found.bytes == sum(m["size"] for m in own)
        assert found.first_ms == min(m["store_timestamp"] for m in own)
        assert found.last_ms == max(m["store_timestamp"] for m in own)
    assert summary.damage == []


def test_export_summary_is_a_value() -> None:
    empty = ExportSummary(location="/x", files=(), summary=summarize_nothing(), seconds=0.0)
    assert (empty.messages, empty.bytes) == (0, 0)


def summarize_nothing() -> Any:
    from logquarry.spark.parquet import Summary

    return Summary()
