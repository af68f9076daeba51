"""A cluster of several processes gives the same results as one process: a master, two workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.verification import verify_store
from tests.conformance.golden_facts import Scenario
from tests.helpers.files import bytes_of
from tests.spark.golden_rows import golden_messages, sound_stores
from tests.spark.standalone import Cluster, Driver

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    folder = tmp_path_factory.mktemp("cluster")
    with Cluster(folder) as cluster:
        driver = Driver(cluster.master, folder)
        try:
            yield driver
        finally:
            driver.end()


def expected(store: Path) -> list[dict[str, Any]]:
    messages = golden_messages(store.parent / "expected.jsonl")
    for message in messages:
        message["body"] = message["body"].hex()
    return messages


def test_both_workers_take_part(driver: Driver) -> None:
    assert driver.do("workers") == 2


def test_reading_and_exporting(driver: Driver, golden: Path, tmp_path: Path) -> None:
    stores = sound_stores(golden)
    paths = [str(store) for store in stores.values()]
    read = driver.do("read", stores=paths, partitions=8)
    assert read["partitions"] >= 8
    exported = driver.do("export", stores=paths, out=str(tmp_path / "out"))
    for broker, store in stores.items():
        assert read["rows"][broker] == expected(store), broker
        assert exported["rows"][broker] == expected(store), broker
    assert exported["messages"] == sum(len(rows) for rows in read["rows"].values())


def test_damage_is_told_as_it_is(driver: Driver, golden: Path) -> None:
    harmed = golden / "unclean" / "crc-third-last-file" / "store"
    error = driver.do("error", store=str(harmed))
    assert error.startswith("CorruptFrame(")
    assert "at offset 36796: bad_body_crc" in error


def test_a_stream(driver: Driver, golden: Path, tmp_path: Path) -> None:
    store = golden / "real-broker" / "store"
    out, checkpoint = tmp_path / "out", tmp_path / "checkpoint"
    found = driver.do("stream", store=str(store), out=str(out), checkpoint=str(checkpoint))
    assert found["batches"] > 4
    assert found["rows"] == {"store": expected(store)}


def test_loading_two_brokers(driver: Driver, tmp_path: Path) -> None:
    settings = {"mappedFileSizeCommitLog": 1 << 20, "maxHashSlotNum": 500, "maxIndexNum": 2_000}
    rows = 20_000
    found = driver.do("load", rows=rows, out=str(tmp_path), settings=settings)
    assert found == {"written": [rows, rows, 2], "loaded": [rows, rows, 2]}
    reports = driver.do(
        "verify",
        stores=[str(tmp_path / how / "*") for how in ("written", "loaded")],
        split_size=1 << 19,
    )
    assert len(reports) == 4
    assert not [f for r in reports for f in r["findings"] if f["severity"] == "damage"]
    for broker in ("broker-0", "broker-1"):
        logs = []
        for how in ("written", "loaded"):
            with lq.MessageStore.open(tmp_path / how / broker) as store:
                logs.append([(m.topic, m.queue_id, m.queue_offset, m.body) for m in store.scan()])
                for topic, queue_id in store.queues():
                    own = [n for t, q, n, _ in logs[-1] if (t, q) == (topic, queue_id)]
                    assert own == list(range(len(own)))
                    assert store.queue_offsets(topic, queue_id) == (0, len(own))
        assert logs[0] == logs[1]
        assert logs[0]


def test_verifying(driver: Driver, golden: Path) -> None:
    stores = [
        *sorted((golden / "unclean").glob("*/store"))[::8],
        *sound_stores(golden).values(),
    ]
    reports = driver.do("verify", stores=[str(store) for store in stores], split_size=40_000)
    assert len(reports) == len(stores)
    for store, report in zip(stores, reports, strict=True):
        alone = verify_store(StoreLayout.open(store)).to_json()
        assert report == json.loads(json.dumps(alone)), store


def test_rebuilding(driver: Driver, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "single")
    settings = scenario.params
    many, alone = tmp_path / "many", tmp_path / "alone"
    count = driver.do("rebuild", store=str(scenario.store), into=str(many), settings=settings)
    report = rebuild(scenario.store, into=alone, config=scenario.config)
    assert count == report.messages == len(scenario.expected)
    queues = [bytes_of(root) for root in (many / "consumequeue", alone / "consumequeue")]
    assert queues[0] == queues[1] != {}
