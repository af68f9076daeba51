"""Compaction topics: gets give what the broker gives; the log keeps every message."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import COMPACTED_LOG
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.conformance.rocketmq5 import broker_queues
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store

TOPIC = "Table"


@pytest.fixture
def scenario(rocketmq5: Path) -> Path:
    return rocketmq5 / "5.5.0-compaction"


@pytest.fixture
def root(scenario: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("timerwheel")
    return copy_store(scenario / "store", tmp_path / "store", ignore=ignored)


def got(store: lq.MessageStore, offset: int = 0, tag: str | None = None) -> list[lq.StoredMessage]:
    found: list[lq.StoredMessage] = []
    end = store.queue_offsets(TOPIC, 0).max
    while offset < end:
        answer = store.get(TOPIC, 0, offset, 7, tag)
        assert answer.next_offset > offset
        found.extend(answer.messages)
        offset = answer.next_offset
    return found


def test_gets_give_what_the_broker_gives(scenario: Path) -> None:
    wanted = broker_queues(scenario)[TOPIC, 0]["getMessage"]
    with lq.MessageStore.open(scenario / "store") as store:
        found = got(store)
        assert [[m.queue_offset, m.physical_offset] for m in found] == wanted
        assert len(found) == 34 < len(list(store.scan(TOPIC))) == 170
        # The last message of each key is among them.
        newest = {m.keys: m.body for m in store.scan(TOPIC)}
        assert {m.keys: m.body for m in found} == newest
        for start in (0, 100, 136, 140, 160, 169):
            assert got(store, start) == [m for m in found if m.queue_offset >= start]
        assert store.get(TOPIC, 0, 170).status.name == "OFFSET_OVERFLOW_ONE"
        assert not got(store, tag="none") and got(store, tag="t") == found


def test_consumers_get_them_once(scenario: Path) -> None:
    with lq.MessageStore.open(scenario / "store") as store:
        consumed = Counter(m.queue_offset for m in store.consumer("g", [TOPIC], timeout=0.01))
        assert consumed == Counter(m.queue_offset for m in got(store))


def test_messages_whose_frames_the_log_has_lost(root: Path) -> None:
    with lq.MessageStore.open(root) as store:
        before = got(store)
        inside = [m for m in store.scan(TOPIC) if m.queue_offset < 150]
    log = root / "commitlog" / ("0" * 20)
    data = bytearray(log.read_bytes())
    for message in inside:
        data[message.physical_offset : message.physical_offset + message.size] = bytes(message.size)
    log.write_bytes(data)
    with lq.MessageStore.open(root) as store:
        assert got(store) == before


def test_messages_that_are_not_compacted_yet_come_from_the_log(root: Path) -> None:
    with lq.MessageStore.open(root) as store:
        before = got(store)
        rest = {m.queue_offset: m for m in store.scan(TOPIC)}
    # The last file of the compacted log is lost: message 145 and later are in the log alone.
    for folder in ("compactionLog", "compactionCq"):
        (root / "compaction" / folder / TOPIC / "0" / "00000000000000082800").unlink()
    with lq.MessageStore.open(root) as store:
        found = got(store)
        assert found[:9] == before[:9]
        assert found[9:] == [rest[offset] for offset in range(145, 170)]


def test_verify_reads_the_compacted_log(root: Path) -> None:
    assert not verify_store(StoreLayout.open(root)).has_damage
    with lq.MessageStore.open(root) as store:
        harmed = got(store)[20]
    log = root / COMPACTED_LOG / TOPIC / "0" / "00000000000000082800"
    data = bytearray(log.read_bytes())
    data[harmed.physical_offset - 82800 + 100] ^= 1
    log.write_bytes(data)
    (found,) = (f for f in verify_store(StoreLayout.open(root)).findings if f.severity == "damage")
    assert (found.kind, found.offset) == ("compaction_wrong", harmed.physical_offset)
    assert found.file == str(log.relative_to(root))
    with lq.MessageStore.open(root) as store, pytest.raises(lq.errors.CorruptFrame):
        got(store)


def test_salvage_keeps_the_compacted_log(root: Path, tmp_path: Path) -> None:
    salvage_store(StoreLayout.open(root), tmp_path / "new")
    with lq.MessageStore.open(root) as old, lq.MessageStore.open(tmp_path / "new") as new:
        assert got(new) == got(old)


def test_a_topic_that_is_compacted_no_more(root: Path) -> None:
    path = root / "config" / "topics.json"
    topics = json.loads(path.read_text("utf-8"))
    topics["topicConfigTable"][TOPIC]["attributes"] = {"cleanup.policy": "DELETE"}
    path.write_text(json.dumps(topics), "utf-8")
    with lq.MessageStore.open(root) as store:
        assert len(got(store)) == 170


def test_messages_and_export_show_the_log(scenario: Path) -> None:
    rows = run("messages", scenario / "store", "--topic", TOPIC, "--jsonl").stdout.splitlines()
    assert len(rows) == 170
