"""Stores of real brokers of RocketMQ 3.2.6 to 4.9.4: they are read, verified, recovered, written.

Each store comes with the messages that the broker's own client pulled from its queues (oracle/v4).
The broker of a killed store first recovered a copy of the store.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import MessageStore
from logquarry.stored_message import StoredMessage
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store, unpacked

ARCHIVE = Path(__file__).parents[1] / "data" / "rocketmq4.tar.xz"
VERSIONS = (
    "3.2.6",
    "4.0.0-incubating",
    "4.1.0-incubating",
    "4.2.0",
    "4.3.2",
    "4.4.0",
    "4.5.2",
    "4.6.1",
    "4.7.1",
    "4.8.0",
    "4.9.0",
    "4.9.4",
)
NAMES = [f"{version}-{end}" for version in VERSIONS for end in ("clean", "kill")]

Messages = dict[tuple[str, int, int], dict[str, Any]]
"""(topic, queue id, queue offset) -> the other fields of the message."""


@pytest.fixture(scope="session")
def rocketmq4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stores, by version and end: copy what you change."""
    return unpacked(ARCHIVE, tmp_path_factory) / "rocketmq4"


def pulled(folder: Path, end: int) -> Messages:
    """The messages that the client pulled. The broker appended those from ``end`` on later: it
    delivered messages again that consumers had not acknowledged.
    """
    found: Messages = {}
    for line in (folder / "pulled.jsonl").read_text(encoding="utf-8").splitlines():
        message = json.loads(line)
        key = message.pop("topic"), message.pop("queueId"), message.pop("queueOffset")
        if message["physicalOffset"] < end:
            found[key] = message
    return found


def messages_of(store: MessageStore, topic: str, queue_id: int) -> Iterator[StoredMessage]:
    offset, end = store.queue_offsets(topic, queue_id)
    while offset < end:
        answer = store.get(topic, queue_id, offset)
        yield from answer.messages
        offset = answer.next_offset


def readable(store: MessageStore, topics: set[str]) -> Messages:
    """The messages that the queues of these topics have."""
    found: Messages = {}
    for topic, queue_id in store.queues():
        if topic not in topics:
            continue
        for message in messages_of(store, topic, queue_id):
            content = message.content()
            found[topic, queue_id, message.queue_offset] = {
                "physicalOffset": message.physical_offset,
                "size": message.size,
                "storeTimestamp": message.store_timestamp,
                "bornTimestamp": message.born_timestamp,
                "flag": message.flag,
                "sysFlag": message.sys_flag,
                "reconsumeTimes": message.reconsume_times,
                "bodyCRC": zlib.crc32(content),
                "properties": dict(message.properties),
            }
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_queues_have_what_the_client_pulled(name: str, rocketmq4: Path, tmp_path: Path) -> None:
    root = copy_store(rocketmq4 / name / "store", tmp_path / "store")
    report = json.loads(run("recover", root, "--apply", "--json").stdout)
    # 3.2.6 took delivery times from its clock. A recovery computes them from the store times.
    assert report["needed"] == ("kill" in name or name.startswith("3.2.6"))
    with lq.MessageStore.open(root) as store:
        expected = pulled(rocketmq4 / name, store.max_offset)
        topics = {topic for topic, _, _ in expected}
        assert readable(store, topics) == expected
    assert len(topics) >= 3
    assert len(expected) > 140


@pytest.mark.parametrize("name", NAMES)
def test_sound_stores_verify_clean(name: str, rocketmq4: Path) -> None:
    root = rocketmq4 / name / "store"
    with lq.MessageStore.open(root) as store:
        report = verify_store(store.layout)
    assert not report.has_damage, report.findings


@pytest.mark.parametrize("name", NAMES)
def test_a_store_goes_on_with_more_messages(name: str, rocketmq4: Path, tmp_path: Path) -> None:
    root = copy_store(rocketmq4 / name / "store", tmp_path / "store")
    with lq.MessageStore.open(root, mode="rw") as store:
        before = store.queue_offsets("MainTopic", 0).max
        result = store.put(lq.Message("MainTopic", b"one more", queue_id=0, keys="more"))
    assert result.queue_offset == before
    with lq.MessageStore.open(root) as store:
        expected = pulled(rocketmq4 / name, result.physical_offset)
        found = readable(store, {topic for topic, _, _ in expected})
        assert found.pop(("MainTopic", 0, before))["physicalOffset"] == result.physical_offset
        assert found == expected
        assert [m.body for m in store.query("MainTopic", "more")] == [b"one more"]
