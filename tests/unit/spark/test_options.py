"""Options of the source, parsed from text. Needs no Spark."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.errors import LogquarryError, UsageError
from logquarry.format import java
from logquarry.log.batches import MessageFilter
from logquarry.spark.options import OffsetLimit, ReadOptions, parse_read_options
from logquarry.text import byte_count


def parse(**options: str) -> ReadOptions:
    return parse_read_options({"path": "/store", **options})


def wanted(**options: str) -> MessageFilter:
    return parse(**options).wanted


def test_defaults() -> None:
    options = parse()
    assert options == ReadOptions(paths=("/store",))
    assert options.wanted.is_empty
    assert options.on_damage == "default"
    assert options.fail_on_data_loss
    assert options.remarks == ()


def test_names_are_case_insensitive() -> None:
    options = parse_read_options({"PATH": "/s", "TOPICS": "a", "failondataloss": "FALSE"})
    assert options.paths == ("/s",)
    assert options.wanted.topics == frozenset({"a"})
    assert not options.fail_on_data_loss


def test_options_are_picklable() -> None:
    options = parse(
        topicPattern="a.*", startingQueueOffsets='{"a": {"0": 5}}', storageOptions='{"key": "x"}'
    )
    assert pickle.loads(pickle.dumps(options)) == options


def test_paths() -> None:
    several = parse_read_options({"paths": json.dumps(["/a b", "/c,d"])})
    assert several.paths == ("/a b", "/c,d")
    with pytest.raises(UsageError, match=r"^path: no store to read"):
        parse_read_options({"topics": "a"})


def test_lists() -> None:
    assert wanted(topics="orders, payments").topics == frozenset({"orders", "payments"})
    assert wanted(topics='["with,comma", "b"]').topics == frozenset({"with,comma", "b"})
    # Not JSON: the name of a topic that begins with a bracket.
    assert wanted(topics="[a").topics == frozenset({"[a"})
    assert wanted(subscribe="a,b").topics == frozenset({"a", "b"})
    assert wanted(queueIds="0, 3").queue_ids == frozenset({0, 3})
    assert wanted(keys="o-1 u-7,k").keys == frozenset({"o-1", "u-7", "k"})
    assert parse(columns="topic, body").columns == ("topic", "body")
    assert parse(columns="Topic, BODY").columns == ("topic", "body")
    found = parse(columns="TIMESTAMPTYPE,Headers", schema="kafka", includeHeaders="true").columns
    assert found == ("timestampType", "headers")


@pytest.mark.parametrize("word", ["1.5", "true", "null", '["b"]', '{"b": 1}'])
@pytest.mark.parametrize("name", ["topics", "tags", "keys", "queueIds", "columns", "paths"])
def test_lists_with_other_values(name: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**{name: f'["a", {word}]'})
    assert str(caught.value).startswith(
        f"{name}: takes a list of texts or whole numbers, not {word} in "
    )
    assert wanted(keys=json.dumps(["[true]"])).keys == frozenset({"[true]"})


def test_tags() -> None:
    assert wanted(tags="paid || sent").tags == frozenset({"paid", "sent"})
    assert wanted(tags="paid,sent").tags == frozenset({"paid", "sent"})
    assert wanted(tags="a,b || c").tags == frozenset({"a,b", "c"})
    assert wanted(tags="*").tags is None


def test_patterns() -> None:
    assert wanted(topicPattern="a.*").topic_pattern == "a.*"
    assert wanted(subscribePattern="a.*").takes_topic("abc")
    assert not wanted(subscribePattern="a.*").takes_topic("cab")


def test_assign() -> None:
    found = wanted(assign='{"a": [0, 1], "b": [2]}')
    assert found.topics == frozenset({"a", "b"})
    assert found.queues == frozenset({("a", 0), ("a", 1), ("b", 2)})
    assert found.takes_queue("a", 1)
    assert not found.takes_queue("b", 1)


def test_physical_offsets() -> None:
    options = parse(startingOffsets='{"broker-a": 4096, "broker-b": "latest", "broker-c": -2}')
    assert options.start.of("broker-a") == 4096
    assert options.start.of("broker-b") == java.LONG_MAX
    assert options.start.of("broker-c") is None
    assert options.start.of("another") is None
    assert parse(startingOffsets="earliest").start == OffsetLimit()
    assert parse(startingOffsets="Latest").start.of("any") == java.LONG_MAX
    assert parse(startingOffsets="4096").start.of("any") == 4096
    assert parse(endingOffsets="latest").stop == OffsetLimit()
    assert parse(endingOffsets="earliest").stop.of("any") == 0
    assert parse(endingOffsets='{"broker-a": 9}').stop.of("broker-a") == 9


def test_queue_offsets() -> None:
    ranges = wanted(
        startingQueueOffsets='{"a": {"0": 5, "1": "latest"}, "b": {"2": -2}}',
        endingQueueOffsets='{"a": {"0": 9}, "c": {"0": -1, "1": "earliest"}}',
    ).queue_ranges
    assert ranges == {
        ("a", 0): (5, 9),
        ("a", 1): (java.LONG_MAX, None),
        ("b", 2): (0, None),
        ("c", 0): (0, None),
        ("c", 1): (0, 0),
    }
    # Kafka's source takes queue offsets in startingOffsets.
    assert wanted(startingOffsets='{"a": {"0": 5}}').queue_ranges == {("a", 0): (5, None)}


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1700000000123", 1_700_000_000_123),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14 22:13:20", 1_700_000_000_000),
        ("2023-11-15T00:13:20.5+02:00", 1_700_000_000_500),
        ("2023-11-14T22:13:20.000001", 1_700_000_000_001),
        ("2023-11-15", 1_700_006_400_000),
        ("-5", -5),
    ],
)
def test_times(text: str, ms: int) -> None:
    assert wanted(startingTimestamp=text).since_ms == ms
    assert wanted(endingTimestamp=text).until_ms == ms


@pytest.mark.parametrize(
    ("text", "size"),
    [("64m", 64 << 20), ("1.5 GB", 3 << 29), ("2MiB", 2 << 20), ("4096", 4096), ("8K", 8192)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_count(text) == size
    assert parse(splitSize=text).split_size == size
    assert parse(batchSize=text).batch_bytes == size


def test_damage() -> None:
    assert parse(onDamage="fail").on_damage == "default"
    assert parse(onDamage="SKIP").on_damage == "skip"


def test_config(tmp_path: Path) -> None:
    expected = StoreConfig(mapped_file_size_commit_log=4096)
    assert parse(config='{"mapedFileSizeCommitLog": 4096}').config == expected
    file = tmp_path / "broker.conf"
    file.write_text("mappedFileSizeCommitLog=4096\nbrokerName=a\n")
    assert parse(config=str(file)).config == expected


def test_remarks() -> None:
    options = parse(
        **{"kafka.bootstrap.servers": "x", "kafka.group.id": "y", "checkpointLocation": "c"},
        maxBytesPerTrigger="64m",
        includeHeaders="true",
    )
    assert options.remarks == (
        "options of Kafka's client have no effect: kafka.bootstrap.servers, kafka.group.id",
        "options of a stream have no effect on a batch: maxBytesPerTrigger",
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_unknown_option_is_refused(is_stream: bool) -> None:
    given = {"path": "/a/store", "topic": "a", "nonsense": "1", "kafka.group.id": "y"}
    with pytest.raises(UsageError) as caught:
        parse_read_options(given, is_stream=is_stream)
    told = "there is no option nonsense, topic (did you mean topics?)"
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("topics", " , ", "is empty"),
        ("topics", "", "is empty"),
        ("tags", "||", "names nothing"),
        ("tags", "", "is empty"),
        ("keys", " ", "is empty"),
        ("queueIds", "0,x", "takes a whole number, not 'x'"),
        pytest.param("queueIds", "1" * 5_000, "takes a whole number", id="long queue id"),
        pytest.param("startingOffsets", "1" * 5_000, "takes a whole number", id="long offset"),
        ("topicPattern", "(", "takes a regular expression"),
        ("subscribePattern", "(", "takes a regular expression"),
        ("columns", "topic,nope", "there is no column 'nope'"),
        ("columns", "topic,topic", "a column is named twice"),
        ("columns", "topic,TOPIC", "a column is named twice"),
        ("startingOffsets", "soon", "takes JSON"),
        ("startingOffsets", '{"a": -3}', "takes offsets >= 0"),
        ("startingOffsets", '{"a": true}', "takes offsets >= 0"),
        ("endingOffsets", "[1]", "takes a JSON object"),
        ("startingQueueOffsets", '{"a": 5}', "takes JSON topic -> queue -> offset"),
        ("endingQueueOffsets", '{"a": {"x": 5}}', "takes a whole number, not 'x'"),
        ("assign", '{"a": 1}', "takes JSON topic -> list of queues"),
        ("assign", "{}", "is empty"),
        ("startingTimestamp", "yesterday", "takes milliseconds or an ISO 8601 time"),
        ("splitSize", "-1", "takes a size such as 64m"),
        ("splitSize", "0", "takes a size such as 64m"),
        ("minPartitions", "0", "takes a whole number >= 1"),
        ("batchSize", "two", "takes a size such as 64m"),
        ("onDamage", "explode", "takes fail or skip or quarantine"),
        ("onDamage", "quarantine", "quarantine needs a folder"),
        ("quarantinePath", "/q", "needs onDamage=quarantine"),
        ("schema", "avro", "takes native or kafka"),
        ("failOnDataLoss", "maybe", "takes true or false"),
        ("decompress", "1", "takes true or false"),
        ("includeHeaders", "x", "takes true or false"),
        ("config", "/no/such/file", "cannot be read"),
        ("config", '{"mappedFileSizeCommitLog": "x"}', "takes a whole number"),
        ("storageOptions", "key=x", "takes JSON"),
    ],
)
def test_bad_values(name: str, value: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**{name: value})
    assert str(caught.value).startswith(f"{name}: ")
    assert text in str(caught.value)
    # Spark passes names in lower case; the text has the documented spelling.
    with pytest.raises(UsageError) as caught:
        parse(**{name.lower(): value})
    assert str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"startingTimestamp": "2", "endingTimestamp": "1"}, "startingTimestamp: 2 is later than"),
        ({"startingOffsets": "5", "endingOffsets": "4"}, "startingOffsets: 5 is after"),
        (
            {"startingOffsets": '{"a": 5}', "endingOffsets": '{"a": 4, "b": 0}'},
            "startingOffsets: 5 of a is after endingOffsets, 4",
        ),
        (
            {"startingOffsets": '{"t": {"1": 5}}', "endingQueueOffsets": '{"t": {"1": 4}}'},
            "startingQueueOffsets: 5 of queue 1 of t is after endingQueueOffsets, 4",
        ),
    ],
)
def test_ranges_that_cannot_be_meant(options: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parse(**options)


@pytest.mark.parametrize("text", ['{"secret_key": "hush"', '["hush"]'])
def test_an_error_shows_no_storage_options(text: str) -> None:
    with pytest.raises(UsageError, match="storageOptions: takes") as caught:
        parse(storageOptions=text)
    assert "hush" not in str(caught.value)


def test_ranges_of_nothing() -> None:
    assert parse(startingTimestamp="1", endingTimestamp="1").wanted.since_ms == 1
    assert parse(startingOffsets="4", endingOffsets="4").start.of("a") == 4
    assert parse(startingOffsets="latest", endingOffsets="5").stop.of("a") == 5


def test_one_option_under_two_names() -> None:
    with pytest.raises(UsageError, match="topics and subscribe are the same option"):
        parse(topics="a", subscribe="b")
    with pytest.raises(UsageError, match="cannot be combined with"):
        parse(topics="a", assign='{"a": [0]}')


def test_errors_are_ours() -> None:
    assert issubclass(UsageError, LogquarryError)


def test_quarantine_and_schema() -> None:
    options = parse(onDamage="quarantine", quarantinePath="/q", schema="Kafka")
    assert (options.on_damage, options.quarantine_path) == ("skip", "/q")
    assert options.is_kafka
    assert "headers" not in options.names
    assert parse(schema="kafka", includeHeaders="true").names[-1] == "headers"


def test_options_of_a_stream() -> None:
    def stream(**options: str) -> ReadOptions:
        return parse_read_options({"path": "/store", **options}, is_stream=True)

    options = stream(maxBytesPerTrigger="64m", maxOffsetsPerTrigger="1000")
    assert (options.max_bytes, options.max_rows, options.remarks) == (64 << 20, 1000, ())
    for name, value in (
        ("endingOffsets", "latest"),
        ("endingTimestamp", "5"),
        ("endingQueueOffsets", "{}"),
    ):
        with pytest.raises(UsageError, match=f"^{name}: a stream has no end"):
            stream(**{name: value})
    for name in ("maxBytesPerTrigger", "maxOffsetsPerTrigger"):
        for value in ("0", "-1", "many"):
            with pytest.raises(UsageError, match=f"^{name}: takes"):
                stream(**{name: value})
