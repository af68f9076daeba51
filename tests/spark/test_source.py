"""The batch source returns what real RocketMQ wrote into the golden stores, row by row."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import MapType, StringType, StructField, StructType

from logquarry.errors import (
    CorruptFrame,
    LogquarryError,
    MessageNotFound,
    StoreNotFound,
    UsageError,
)
from logquarry.log.schema import NAMES
from logquarry.spark.jobs import explain
from logquarry.spark.source import RocketMQDataSource
from tests.conformance.golden_facts import LOG_GONE
from tests.helpers.exports import DDL
from tests.spark.golden_rows import (
    LAST_FILE,
    MIDDLE,
    OLD,
    golden_messages,
    harmed_stores,
    offsets_of,
    rows_by_broker,
    sound_stores,
    whole_messages,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOT_LOADED = ("cq-wrong-size", "log-wrong-size")
"""Stores that RocketMQ refuses to load and did not recover."""

Load = Callable[..., "DataFrame"]


@pytest.fixture
def load(spark: SparkSession) -> Load:
    def loaded(path: Any, **options: Any) -> DataFrame:
        paths = [str(p) for p in path] if isinstance(path, list) else str(path)
        return spark.read.format("rocketmq").options(**options).load(paths)

    return loaded


@pytest.fixture(scope="module")
def real(golden: Path) -> Path:
    return golden / "real-broker" / "store"


@pytest.fixture(scope="module")
def messages(golden: Path) -> list[dict[str, Any]]:
    return golden_messages(golden / "real-broker" / "expected.jsonl")


def error_of(action: Callable[[], Any]) -> tuple[LogquarryError, str]:
    """Return the explained error of an action, and Spark's text."""
    with pytest.raises(Exception) as caught:
        action()
    ours = explain(caught.value)
    assert ours is not None, caught.value
    return ours, str(caught.value)


# ------------------------------------------------------------------------------ rows of all stores
def test_rows_of_sound_stores(load: Load, golden: Path) -> None:
    stores = sound_stores(golden)
    found = rows_by_broker(load(list(stores.values())))
    expected = {
        broker: golden_messages(path.parent / "expected.jsonl") for broker, path in stores.items()
    }
    assert found.keys() == expected.keys()
    for broker, rows in expected.items():
        assert found[broker] == rows, broker


def test_rows_of_recovered_stores(load: Load, golden: Path) -> None:
    scenarios = [
        path.parent
        for path in sorted(golden.glob("unclean/*/store-recovered"))
        if path.parent.name not in (*NOT_LOADED, LOG_GONE)
    ]
    scenarios.append(golden / "clean-restart" / "prepad")
    stores = [path / "store-recovered" for path in scenarios]
    found = rows_by_broker(load(stores, onDamage="skip"))
    for scenario in scenarios:
        expected = golden_messages(scenario / "expected.jsonl")
        assert found.get(scenario.name, []) == expected, scenario.name


def test_rows_of_harmed_stores(load: Load, golden: Path) -> None:
    stores = harmed_stores(golden)
    found = rows_by_broker(load(list(stores.values()), onDamage="skip"))
    for scenario in stores:
        assert found.get(scenario, []) == whole_messages(golden, scenario), scenario


def test_small_splits_give_the_same_rows(load: Load, golden: Path) -> None:
    stores = sound_stores(golden)
    df = load(list(stores.values()), splitSize="20k", batchSize="3k")
    assert df.rdd.getNumPartitions() > 2 * len(stores)
    found = rows_by_broker(df)
    for broker, path in stores.items():
        assert found[broker] == golden_messages(path.parent / "expected.jsonl"), broker


# -------------------------------------------------------------------------------- which messages
def test_topics_and_queues(load: Load, real: Path, messages: list[dict[str, Any]]) -> None:
    def wanted(**values: Any) -> list[int]:
        return [
            m["physical_offset"]
            for m in messages
            if all(m[name] in allowed for name, allowed in values.items())
        ]

    main = wanted(topic=["MainTopic"])
    assert 0 < len(main) < len(messages)
    assert offsets_of(load(real, topics="MainTopic")) == main
    assert offsets_of(load(real, subscribe="MainTopic")) == main
    assert offsets_of(load(real, topicPattern="Main.*")) == main
    assert offsets_of(load(real, topics="MainTopic, OrderTopic")) == wanted(
        topic=["MainTopic", "OrderTopic"]
    )
    assert offsets_of(load(real, topics="MainTopic", queueIds="0,2")) == wanted(
        topic=["MainTopic"], queue_id=[0, 2]
    )
    assert offsets_of(load(real, assign='{"MainTopic": [1], "OrderTopic": [0]}')) == sorted(
        wanted(topic=["MainTopic"], queue_id=[1]) + wanted(topic=["OrderTopic"], queue_id=[0])
    )
    assert offsets_of(load(real, topics="NoSuchTopic")) == []


def test_tags_and_keys(load: Load, real: Path, messages: list[dict[str, Any]]) -> None:
    tags = sorted({m["tags"] for m in messages if m["tags"]})[:2]
    assert len(tags) == 2
    expected = [m["physical_offset"] for m in messages if m["tags"] in tags]
    assert offsets_of(load(real, tags=" || ".join(tags))) == expected
    one = next(m for m in messages if m["keys"])
    word = one["keys"].split()[0]
    expected = [
        m["physical_offset"]
        for m in messages
        if word in (m["keys"] or "").split() or m["uniq_key"] == word
    ]
    assert offsets_of(load(real, keys=word)) == expected
    assert offsets_of(load(real, keys=one["uniq_key"] or word, topics=one["topic"]))


def test_offsets(load: Load, real: Path, messages: list[dict[str, Any]]) -> None:
    offsets = [m["physical_offset"] for m in messages]
    first, last = offsets[100], offsets[300]
    start, stop = json.dumps({"store": first}), json.dumps({"store": last})
    assert offsets_of(load(real, startingOffsets=start, endingOffsets=stop)) == offsets[100:300]
    # An offset within a frame: the read starts with the next message.
    inside = json.dumps({"store": first + 1})
    assert offsets_of(load(real, startingOffsets=inside)) == offsets[101:]
    assert offsets_of(load(real, startingOffsets="earliest", endingOffsets="latest")) == offsets
    assert offsets_of(load(real, startingOffsets="latest")) == []


def test_queue_offsets(load: Load, real: Path, messages: list[dict[str, Any]]) -> None:
    expected = [
        m["physical_offset"]
        for m in messages
        if m["topic"] == "MainTopic" and (m["queue_id"] != 0 or 3 <= m["queue_offset"] < 9)
    ]
    df = load(
        real,
        topics="MainTopic",
        startingQueueOffsets='{"MainTopic": {"0": 3}}',
        endingQueueOffsets='{"MainTopic": {"0": 9}}',
    )
    assert offsets_of(df) == expected
    # As in Kafka's source; the other topics' messages are read too.
    others = [m["physical_offset"] for m in messages if m["topic"] != "MainTopic"]
    df = load(
        real,
        startingOffsets='{"MainTopic": {"0": 3}}',
        endingOffsets='{"MainTopic": {"0": 9, "1": -1}}',
    )
    assert offsets_of(df) == sorted(expected + others)


def test_timestamps(load: Load, real: Path, messages: list[dict[str, Any]]) -> None:
    times = sorted({m["store_timestamp"] for m in messages})
    since, until = times[len(times) // 3], times[2 * len(times) // 3]
    expected = [m["physical_offset"] for m in messages if since <= m["store_timestamp"] < until]
    assert offsets_of(load(real, startingTimestamp=since, endingTimestamp=until)) == expected
    day = "2100-01-01T00:00:00+01:00"
    assert offsets_of(load(real, startingTimestamp=day)) == []
    assert len(offsets_of(load(real, endingTimestamp=day))) == len(messages)


# ------------------------------------------------------------------------------- several stores
def test_stores_by_list_and_glob(load: Load, golden: Path) -> None:
    named = load([golden / "single" / "store", golden / "batch" / "store"])
    counts = {row["broker"]: row["count"] for row in named.groupBy("broker").count().collect()}
    assert counts == {"single": 400, "batch": 316}
    globbed = load(golden / "*" / "store").select("broker").distinct().collect()
    brokers = {row[0] for row in globbed}
    assert {"single", "batch", "real-broker"} <= brokers
    assert "store" not in brokers


def test_a_store_that_is_named_twice_is_read_once(load: Load, golden: Path) -> None:
    assert load([golden / "single" / "store", golden / "sing*" / "store"]).count() == 400


def test_min_partitions_over_all_stores(load: Load, golden: Path) -> None:
    stores = [golden / "single" / "store", golden / "rollover" / "store"]
    few = load(stores)
    many = load(stores, minPartitions=12)
    assert few.rdd.getNumPartitions() == 2
    assert 12 <= many.rdd.getNumPartitions() <= 24
    assert many.count() == few.count() == 400 + 730


def test_offsets_by_broker(load: Load, golden: Path) -> None:
    stores = [golden / "single" / "store", golden / "batch" / "store"]
    df = load(stores, startingOffsets='{"single": "latest"}')
    assert [row[0] for row in df.select("broker").distinct().collect()] == ["batch"]
    ours, _ = error_of(lambda: load(stores, startingOffsets='{"singel": 0}').count())
    assert isinstance(ours, UsageError)
    assert str(ours).startswith("startingOffsets: there is no broker 'singel'")


def test_nothing_to_read(load: Load, tmp_path: Path) -> None:
    (tmp_path / "empty" / "commitlog").mkdir(parents=True)
    df = load(tmp_path / "empty")
    assert df.columns == list(NAMES)
    assert df.collect() == []


# --------------------------------------------------------------------------------------- columns
def test_schema(load: Load, spark: SparkSession, real: Path) -> None:
    found = load(real).schema
    empty = spark.createDataFrame([], DDL)
    assert [(f.name, f.dataType.simpleString()) for f in found] == empty.dtypes
    assert [field.name for field in found if field.nullable] == ["tags", "keys", "uniq_key"]
    assert found["properties"].dataType == MapType(StringType(), StringType(), False)


def test_a_schema_may_let_everything_be_null(spark: SparkSession, load: Load, real: Path) -> None:
    nullable = spark.read.format("rocketmq").schema(DDL).load(str(real))
    assert nullable.schema == spark.createDataFrame([], DDL).schema
    assert nullable.collect() == load(real).collect()


def test_columns_option(load: Load, real: Path, messages: list[dict[str, Any]]) -> None:
    df = load(real, columns="queue_id,topic")
    assert df.columns == ["queue_id", "topic"]
    assert sorted(df.collect()) == sorted((m["queue_id"], m["topic"]) for m in messages)


def test_schema_subset(spark: SparkSession, real: Path, messages: list[dict[str, Any]]) -> None:
    reader = spark.read.format("rocketmq")
    df = reader.schema("properties map<string,string>, size int").load(str(real))
    assert df.columns == ["properties", "size"]
    assert [(row[0], row[1]) for row in df.collect()] == [
        (m["properties"], m["size"]) for m in messages
    ]
    strict = reader.schema("topic string not null, tags string").load(str(real))
    assert sorted(row[0] for row in strict.collect()) == sorted(m["topic"] for m in messages)


def test_a_schema_cannot_forbid_null_in_a_column_with_nulls(
    spark: SparkSession, real: Path
) -> None:
    """Spark would rely on the schema, and `tags IS NULL` would find no message."""
    reader = spark.read.format("rocketmq")
    for kind, given in (
        ("native", "topic string, tags string not null"),
        ("kafka", "KEY binary not null"),
    ):
        strict = reader.option("schema", kind).schema(given)
        ours, _ = error_of(strict.load(str(real)).collect)
        assert isinstance(ours, UsageError)
        assert re.search(r"the column (tags|KEY) can be null: leave NOT NULL out", str(ours))


def test_schema_in_another_spelling(
    spark: SparkSession, real: Path, messages: list[dict[str, Any]]
) -> None:
    df = spark.read.format("rocketmq").schema("TOPIC string, Size int not null").load(str(real))
    assert df.columns == ["TOPIC", "Size"]
    assert [(row["TOPIC"], row["Size"]) for row in df.collect()] == [
        (m["topic"], m["size"]) for m in messages
    ]
    assert df.where("topic = 'MainTopic'").select("size").count() > 0


def test_writing_is_told_to_come_later(load: Load, spark: SparkSession, tmp_path: Path) -> None:
    writer = spark.range(3).selectExpr("'t' topic").write.format("rocketmq").mode("append")
    ours, told = error_of(lambda: writer.save(str(tmp_path / "out")))
    assert isinstance(ours, UsageError)
    assert "rows need a column body" in str(ours)
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


def test_an_option_without_effect_is_warned_of(
    real: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Plan here, not in Spark's planning process, whose stderr goes to the JVM.
    source = RocketMQDataSource({"path": str(real), "kafka.group.id": "g"})
    source.reader(StructType([StructField("topic", StringType())]))
    told = [record.getMessage() for record in caplog.records]
    assert told == ["rocketmq: options of Kafka's client have no effect: kafka.group.id"]


def test_an_unknown_option_fails(load: Load, real: Path) -> None:
    ours, told = error_of(lambda: load(real, topic="MainTopic").count())
    assert isinstance(ours, UsageError)
    assert str(ours).startswith("there is no option topic (did you mean topics?)")
    assert "Traceback" not in told


def test_schema_that_is_none_of_ours(spark: SparkSession, real: Path) -> None:
    df = spark.read.format("rocketmq").schema("topic int").load(str(real))
    ours, _ = error_of(df.collect)
    assert isinstance(ours, UsageError)
    assert "schema: the column topic is string, not int" in str(ours)


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("queue_id bigint", "schema: the column queue_id is int, not bigint"),
        ("properties map<string,int>", "schema: the column properties is map<string,string>"),
        ("nope string", "there is no column 'nope'"),
    ],
)
def test_other_schemas_that_are_none_of_ours(
    spark: SparkSession, real: Path, ddl: str, text: str
) -> None:
    # The same call as in Spark's planning process: after an error, Spark starts a new process.
    struct = spark.createDataFrame([], ddl).schema
    with pytest.raises(UsageError, match=re.escape(text)):
        RocketMQDataSource({"path": str(real)}).reader(struct)


def test_a_subset_does_not_touch_bodies(load: Load, golden: Path) -> None:
    harmed = golden / "unclean" / "crc-third-last-file" / "store"
    assert load(harmed, columns="topic,size").count() == 174
    ours, _ = error_of(load(harmed, columns="topic,body").collect)
    assert isinstance(ours, CorruptFrame)


# ------------------------------------------------------------------------------ filters by Spark
def test_filters_of_one_query_do_not_stay_for_the_next(load: Load, real: Path) -> None:
    """PySpark up to 4.3 caches a filtered plan with the table: `pushFilters` must stay unused."""
    df = load(real)
    total = df.count()
    main = df.where("topic = 'MainTopic'")
    few = main.count()
    assert 0 < few < total
    assert df.count() == total
    assert df.where("topic <> 'MainTopic'").count() == total - few
    assert main.union(df).count() == few + total
    assert df.alias("a").join(main.alias("b"), "physical_offset").count() == few


def test_a_limit_stops_early(load: Load, real: Path) -> None:
    assert len(load(real, splitSize="8k").limit(3).collect()) == 3


def test_sql_view(spark: SparkSession, real: Path) -> None:
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW quarry USING rocketmq "
        f"OPTIONS (path '{real}', topics 'MainTopic')"
    )
    rows = spark.sql("SELECT DISTINCT topic FROM quarry").collect()
    assert [row[0] for row in rows] == ["MainTopic"]


# ---------------------------------------------------------------------------------------- errors
def test_damage_is_told_with_file_offset_and_reason(load: Load, golden: Path) -> None:
    store = golden / "unclean" / "crc-third-last-file" / "store"
    ours, told = error_of(load(store).collect)
    assert isinstance(ours, CorruptFrame)
    assert ours.path == str(store / "commitlog" / f"{24576:020d}")
    assert ours.offset == OLD
    assert ours.kind == "bad_body_crc"
    assert str(ours) in told
    # Only Spark's introduction precedes the text, no traceback.
    assert told.index(str(ours)) < 120
    assert "Traceback" not in told


def test_a_torn_tail_is_the_end(load: Load, golden: Path) -> None:
    assert load(golden / "unclean" / "half-frame" / "store").count() == 173


def test_damage_in_the_middle_of_an_open_log(load: Load, golden: Path) -> None:
    store = golden / "unclean" / "total-size-middle" / "store"
    ours, _ = error_of(load(store, splitSize="4k").collect)
    assert isinstance(ours, CorruptFrame)
    assert (ours.offset, ours.kind) == (MIDDLE, "bad_length_sum")
    assert load(store, splitSize="4k", onDamage="skip").count() == 173


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"onDamage": "quarantine"}, "onDamage: quarantine needs a folder"),
        ({"schema": "avro"}, "schema: takes native or kafka"),
        ({"splitSize": "lots"}, "splitSize: takes a size such as 64m, not 'lots'"),
        ({"columns": "topic,nope"}, "columns: there is no column 'nope'"),
    ],
)
def test_bad_options(load: Load, real: Path, options: dict[str, str], text: str) -> None:
    ours, told = error_of(lambda: load(real, **options))
    assert isinstance(ours, UsageError)
    assert str(ours).startswith(text)
    assert "Traceback" not in told


def test_no_store(load: Load, tmp_path: Path) -> None:
    ours, told = error_of(lambda: load(tmp_path / "nowhere"))
    assert isinstance(ours, StoreNotFound)
    assert str(tmp_path / "nowhere") in told
    ours, _ = error_of(lambda: load(tmp_path / "*"))
    assert isinstance(ours, StoreNotFound)
    ours, _ = error_of(lambda: load(tmp_path))
    assert isinstance(ours, StoreNotFound)
    assert "not a store" in str(ours)


def test_a_start_that_was_deleted(load: Load, golden: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(golden / "unclean" / "abort-only" / "store", store)
    (store / "commitlog" / f"{0:020d}").unlink()
    start = json.dumps({"store": 500})
    ours, _ = error_of(load(store, startingOffsets=start).collect)
    assert isinstance(ours, MessageNotFound)
    assert "failOnDataLoss" in str(ours)
    left = offsets_of(load(store, startingOffsets=start, failOnDataLoss="false"))
    assert left == offsets_of(load(store))
    assert left[0] == 24576


def test_a_file_that_goes_between_plan_and_read(load: Load, golden: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(golden / "unclean" / "abort-only" / "store", store)
    strict, lenient = load(store), load(store, failOnDataLoss="false")
    assert strict.rdd.getNumPartitions() == lenient.rdd.getNumPartitions() == 1
    (store / "commitlog" / f"{0:020d}").unlink()
    ours, _ = error_of(strict.collect)
    assert isinstance(ours, MessageNotFound)
    assert offsets_of(lenient)[0] == 24576


def test_config_option(load: Load, golden: Path) -> None:
    scenario = golden / "unclean" / "log-wrong-size"
    size = LAST_FILE // 3
    config = json.dumps({"mappedFileSizeCommitLog": size})
    assert load(scenario / "store", config=config).count() == 174
    assert load(scenario / "store", config=scenario / "params.json").count() == 174
