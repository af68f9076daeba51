"""Consumers of a store that a real broker wrote continue at the offsets of its groups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import broker_json


@pytest.fixture(name="root")
def copied(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden / "real-broker/store", tmp_path / "store"))


def params(golden: Path) -> lq.StoreConfig:
    return lq.StoreConfig.from_mapping(json.loads((golden / "real-broker/params.json").read_text()))


def test_the_groups_go_on_where_they_were(golden: Path, root: Path) -> None:
    path = root / "config/consumerOffset.json"
    before = path.read_bytes()
    with lq.MessageStore.open(root, mode="rw", config=params(golden)) as store:
        with store.consumer("cg_main", ["MainTopic", "BatchTopic"], timeout=0) as consumer:
            assert consumer.estimates == () and consumer.problems == ()
            # All of it was consumed.
            assert list(consumer) == []
        # Nothing was committed that was not there: the file is as the broker wrote it.
        assert path.read_bytes() == before
        with store.consumer("cg_new", "MainTopic", tags="TagA || TagC", timeout=0) as consumer:
            found = {message.physical_offset for message in consumer}
    text = (golden / "real-broker/expected.jsonl").read_text("utf-8")
    expected = [json.loads(line) for line in text.splitlines()]
    wanted = {
        row["physicalOffset"]
        for row in expected
        if row["topic"] == "MainTopic" and row["properties"].get("TAGS") in ("TagA", "TagC")
    }
    assert found == wanted and wanted
    old, new = map(broker_json.decode_consumer_offsets, (before, path.read_bytes()))
    assert new == old | {("MainTopic", "cg_new"): {0: 43, 1: 43, 2: 44, 3: 43}}
    # The group wrote the offsets at which it starts before its first message.
    start = broker_json.decode_consumer_offsets(
        path.with_name("consumerOffset.json.bak").read_bytes()
    )
    assert start == old | {("MainTopic", "cg_new"): {0: 0, 1: 0, 2: 0, 3: 0}}


def test_beside_and_filtered(golden: Path) -> None:
    with (
        lq.MessageStore.open(golden / "real-broker/store") as store,
        store.consumer("cg_sql", "MainTopic", sql="KEYS IN ('key4 grp4')", timeout=0) as consumer,
    ):
        assert [message.keys for message in consumer] == ["key4 grp4"]
