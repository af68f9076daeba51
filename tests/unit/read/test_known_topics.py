"""A read of a topic that no store knows warns, and names the nearest topic."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.batches import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.read import bulk
from logquarry.read.bulk import warn_of_unknown_topics
from logquarry.spark.options import parse_read_options
from logquarry.spark.stream_planner import Limits, StreamPlanner
from logquarry.spark.tasks import plan_tasks
from tests.helpers.small_store import opened
from tests.helpers.store_maker import StoreMaker


def made(path: Path, *topics: str) -> StoreLayout:
    maker = StoreMaker()
    for topic in topics:
        maker.put(topic)
    return StoreLayout.open(maker.write(path))


def told(caplog: pytest.LogCaptureFixture, *layouts: StoreLayout, **wanted: object) -> list[str]:
    caplog.clear()
    warn_of_unknown_topics(layouts, MessageFilter(**wanted))  # type: ignore[arg-type]
    return caplog.messages


def test_the_warning_names_the_nearest_topic(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = made(tmp_path, "orders", "Payments")
    assert told(caplog, layout, topics=frozenset({"orders"})) == []
    assert told(caplog, layout, topics=frozenset({"orders", "payment"})) == [
        f"{tmp_path}: no queue has the topic 'payment' (did you mean 'Payments'?)"
    ]
    assert told(caplog, layout, topics=frozenset({"zzzzz"})) == [
        f"{tmp_path}: no queue has the topic 'zzzzz'; there are: Payments, orders"
    ]
    assert told(caplog, layout, topic_pattern="ord.*") == []
    assert told(caplog, layout, topic_pattern="ord") == [
        f"{tmp_path}: no topic matches the pattern 'ord'; there are: Payments, orders"
    ]
    assert told(caplog, layout) == []


def test_the_topics_of_queue_ranges_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = made(tmp_path, "orders", "Payments")
    assert told(caplog, layout, queue_ranges={("orders", 0): (1, None)}) == []
    assert told(caplog, layout, queue_ranges={("payments", 0): (1, None)}) == [
        f"{tmp_path}: no queue has the topic 'payments' (did you mean 'Payments'?)"
    ]


def test_one_of_several_stores_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layouts = made(tmp_path / "a", "orders"), made(tmp_path / "b", "payments")
    assert told(caplog, *layouts, topics=frozenset({"orders", "payments"})) == []
    assert told(caplog, *layouts, topics=frozenset({"order"})) == [
        "2 stores: no queue has the topic 'order' (did you mean 'orders'?)"
    ]


def test_a_topic_of_the_configuration_or_a_new_folder_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = made(tmp_path, "orders")
    assert layout.queue_names
    (tmp_path / "config").mkdir()
    topics = {"topicConfigTable": {"empty": {"topicName": "empty"}}}
    (tmp_path / "config" / "topics.json").write_text(json.dumps(topics))
    (tmp_path / "consumequeue" / "new").mkdir()
    (tmp_path / "batchconsumequeue" / "batch").mkdir(parents=True)
    assert told(caplog, layout, topics=frozenset({"empty", "new", "batch"})) == []


def test_without_a_list_of_topics_there_is_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = StoreMaker()
    maker.put("orders")
    store = maker.write(tmp_path / "log-only")
    shutil.rmtree(store / "consumequeue")
    assert told(caplog, StoreLayout.open(store), topics=frozenset({"none"})) == []
    # The queues in RocksDB cannot be listed.
    layout = made(tmp_path / "rocks", "orders")
    monkeypatch.setattr(bulk, "rocksdb_folders", lambda layout: ("consumequeue_rocksdb",))
    monkeypatch.setattr(bulk, "open_queues", lambda layout: None)
    assert told(caplog, layout, topics=frozenset({"none"})) == []


def test_each_read_warns_and_finds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, "orders")
    with lq.MessageStore.open(tmp_path) as store:
        assert [*store.scan("order")] == []
        assert store.to_arrow("order").read_all().num_rows == 0
    options = {"path": str(tmp_path), "topics": "order"}
    assert plan_tasks(parse_read_options(options)) == []
    StreamPlanner(parse_read_options(options, is_stream=True), ["topic"]).initial()
    assert (
        caplog.messages
        == [f"{tmp_path}: no queue has the topic 'order' (did you mean 'orders'?)"] * 4
    )
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_stream_still_waits_for_a_topic(tmp_path: Path) -> None:
    maker = StoreMaker()
    maker.put("orders")
    maker.write(tmp_path)
    options = parse_read_options({"path": str(tmp_path), "topics": "late"}, is_stream=True)
    planner = StreamPlanner(options, ["topic"])
    start = planner.initial()
    maker.put("late")
    maker.write(tmp_path)
    end = planner.latest(start, Limits())
    (task,) = planner.tasks(start, end)
    assert task.length


def test_a_writer_knows_a_topic_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path / "store") as store:
        store.put(lq.Message("fresh", b"body"))
        assert len([*store.scan("fresh")]) == 1
        assert caplog.messages == []
