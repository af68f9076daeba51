"""Readers of golden stores give the answers that RocketMQ gave."""

from __future__ import annotations

import base64
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logquarry.errors import MessageNotFound, UnsupportedStore, UsageError
from logquarry.log.walk import LogEnd, LogReader, Run
from logquarry.read.get_message import GetMessageStatus, GetResult
from logquarry.read.index import Index
from logquarry.read.log_end import log_bound, sound_bound
from logquarry.store.message_store import MessageStore
from logquarry.stored_message import StoredMessage
from tests.conformance.golden_facts import LOG_GONE, SOUND, Scenario

EXTRA_GETS = [
    # (what is deleted, topic, queue, offset, status, next, min, max, first messages): the answers
    # of the real store to a copy of "rollover" without these files.
    ("first-logs", "RollA", 0, 0, "MESSAGE_WAS_REMOVING", 40, 0, 185, []),
    ("first-logs", "RollA", 1, 68, "FOUND", 80, 0, 137, [792782, 803635, 807503]),
    ("first-logs", "RollA", 1, 138, "OFFSET_OVERFLOW_BADLY", 0, 0, 137, []),
    ("first-logs-and-queues", "RollA", 0, 0, "OFFSET_FOUND_NULL", 40, 0, 185, []),
    ("first-logs-and-queues", "RollA", 1, 73, "OFFSET_TOO_SMALL", 74, 74, 137, []),
    ("first-logs-and-queues", "RollA", 1, 74, "FOUND", 80, 74, 137, [792782, 803635, 807503]),
    ("first-logs-and-queues", "RollA", 1, 138, "OFFSET_OVERFLOW_BADLY", 137, 74, 137, []),
    ("middle-queue", "RollA", 0, 92, "OFFSET_FOUND_NULL", 120, 0, 185, []),
    ("middle-queue", "RollA", 0, 184, "FOUND", 185, 0, 185, [1638400]),
]
DELETED = {
    "first-logs": [f"commitlog/{65536 * n:020d}" for n in range(12)],
    "first-logs-and-queues": [
        *(f"commitlog/{65536 * n:020d}" for n in range(12)),
        *(f"consumequeue/RollA/{q}/{0:020d}" for q in (0, 1)),
    ],
    "middle-queue": [f"consumequeue/RollA/0/{1600:020d}"],
}


@pytest.fixture(scope="module", params=SOUND)
def scenario(request: pytest.FixtureRequest, golden: Path) -> Scenario:
    return Scenario(golden / request.param)


@pytest.fixture(params=["queue files", "queues from the log"])
def store(
    request: pytest.FixtureRequest, scenario: Scenario, tmp_path: Path
) -> Iterator[MessageStore]:
    path = scenario.store
    if request.param == "queues from the log":
        path = tmp_path / "store"
        shutil.copytree(scenario.store / "commitlog", path / "commitlog")
    with MessageStore.open(path, config=scenario.config) as opened:
        yield opened


def test_log_offsets(scenario: Scenario, store: MessageStore) -> None:
    log = scenario.facts["commitLog"]
    assert (store.min_offset, store.max_offset) == (log["minOffset"], log["maxOffset"])


def test_queues(scenario: Scenario, store: MessageStore) -> None:
    expected: dict[tuple[str, int], Any] = {}
    found: dict[tuple[str, int], Any] = {}
    for fact in scenario.facts["queues"]:
        name = fact["topic"], fact["queueId"]
        expected[name] = (fact["minOffset"], fact["maxOffset"], fact["entries"])
        queue = store.queue(*name)
        entries = [] if queue is None else [[offset, *unit] for offset, unit in queue.entries()]
        found[name] = (*store.queue_offsets(*name), entries)
    assert found == expected
    # In Java the schedule topic has queues without files.
    held = {name for name, (_, _, entries) in expected.items() if entries}
    assert held <= set(store.queues()) <= set(expected)
    assert store.topics == tuple(sorted({topic for topic, _ in store.queues()}))


def test_get(scenario: Scenario, store: MessageStore) -> None:
    for fact in scenario.facts["getMessage"]:
        for get in fact["gets"]:
            result = store.get(fact["topic"], fact["queueId"], get["offset"], fact["maxMsgNums"])
            assert _as_fact(get["offset"], result) == get, (fact["topic"], fact["queueId"])


def _as_fact(offset: int, result: GetResult) -> dict[str, Any]:
    return {
        "offset": offset,
        "status": result.status.value,
        "nextBeginOffset": result.next_offset,
        "minOffset": result.min_offset,
        "maxOffset": result.max_offset,
        "bytes": result.size,
        "physicalOffsets": [message.physical_offset for message in result.messages],
    }


def test_reading_a_queue_through_gives_its_messages(
    scenario: Scenario, store: MessageStore
) -> None:
    for fact in scenario.facts["queues"]:
        offset, found = fact["minOffset"], []
        while (result := store.get(fact["topic"], fact["queueId"], offset)).messages:
            found += [message.physical_offset for message in result.messages]
            offset = result.next_offset
        assert found == [entry[1] for entry in fact["entries"]]


def test_offsets_by_time(scenario: Scenario, store: MessageStore) -> None:
    for fact in scenario.facts["offsetInQueueByTime"]:
        for timestamp, offset in fact["timestampToOffset"]:
            found = store.offset_by_time(fact["topic"], fact["queueId"], timestamp)
            assert found == offset, (fact["topic"], fact["queueId"], timestamp)


@pytest.mark.parametrize("shape", ["stated", "inferred"])
def test_index_queries(scenario: Scenario, shape: str) -> None:
    config = scenario.config
    if shape == "inferred":
        config = dataclasses.replace(config, max_hash_slot_num=None, max_index_num=None)
    with MessageStore.open(scenario.store, config=config) as store:
        index = Index(store.layout)
        assert index.is_usable
        for file in index.files:
            stated = scenario.config.index_shape
            assert file.shape == stated or file.is_empty
        for fact in scenario.facts["indexQueries"]:
            asked = (fact["topic"], fact["key"])
            begin, end, count = fact["begin"], fact["end"], fact["maxNum"]
            assert index.query_offsets(*asked, count, begin, end) == fact["indexPhyOffsets"]
            found = [m.physical_offset for m in store.query(*asked, begin, end, count)]
            assert found == fact["messagePhyOffsets"]


def test_index_headers(scenario: Scenario) -> None:
    with MessageStore.open(scenario.store, config=scenario.config) as store:
        headers = [file.header for file in Index(store.layout).files]
    found = [
        {
            "beginTimestamp": header.begin_timestamp,
            "endTimestamp": header.end_timestamp,
            "beginPhyOffset": header.begin_offset,
            "endPhyOffset": header.end_offset,
            "hashSlotCount": header.slots_used,
            "indexCount": header.entry_count,
        }
        for header in headers
    ]
    assert found == scenario.facts["index"]


def test_exact_queries_give_what_the_index_gives_but_for_collisions(scenario: Scenario) -> None:
    by_offset = {line["physicalOffset"]: line for line in scenario.expected}
    with MessageStore.open(scenario.store, config=scenario.config) as store:
        for fact in scenario.facts["indexQueries"]:
            topic, key = fact["topic"], fact["key"]
            found = store.query(topic, key, fact["begin"], fact["end"], fact["maxNum"], exact=True)
            exact = [
                offset
                for offset in sorted(set(fact["messagePhyOffsets"]))
                if by_offset[offset]["topic"] == topic
                and key in _keys_of(by_offset[offset]["properties"])
            ]
            assert [message.physical_offset for message in found] == exact


def test_queries_without_an_index_search_the_log(scenario: Scenario, tmp_path: Path) -> None:
    shutil.copytree(scenario.store, tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "index")
    keyed: dict[tuple[str, str], list[int]] = {}
    for line in scenario.expected:
        if line["sysFlag"] & 0xC != 0xC:
            for key in _keys_of(line["properties"]):
                keyed.setdefault((line["topic"], key), []).append(line["physicalOffset"])
    with MessageStore.open(tmp_path / "store", config=scenario.config) as store:
        for (topic, key), offsets in list(keyed.items())[:: max(1, len(keyed) // 20)]:
            found = [message.physical_offset for message in store.query(topic, key)]
            assert found == sorted(set(offsets))[-32:]
        assert store.query("no-such-topic", "no-such-key") == []


def _keys_of(properties: dict[str, str]) -> set[str]:
    return {properties.get("UNIQ_KEY", ""), *properties.get("KEYS", "").split(" ")} - {""}


def test_single_messages(scenario: Scenario, store: MessageStore) -> None:
    for line in scenario.expected:
        message = store.message_at(line["physicalOffset"])
        assert _as_line(message) == {name: line[name] for name in _as_line(message)}
        assert store.message_by_id(line["msgId"]) == message
        assert store.message_by_id(line["msgId"].lower()) == message
    log = scenario.facts["commitLog"]
    for offset in (log["minOffset"] - 1, log["maxOffset"], log["maxOffset"] + 1, 1 << 62, -1):
        with pytest.raises(MessageNotFound, match="the log reaches from"):
            store.message_at(offset)
    first = scenario.expected[0]["physicalOffset"]
    with pytest.raises(MessageNotFound, match=f"within the one at {first}"):
        store.message_at(first + 1)


def test_what_get_reads_is_what_stands_in_the_log(scenario: Scenario) -> None:
    expected = {line["physicalOffset"]: line for line in scenario.expected}
    with MessageStore.open(scenario.store, config=scenario.config) as store:
        for topic, queue_id in store.queues():
            offset = store.queue_offsets(topic, queue_id).min
            while (result := store.get(topic, queue_id, offset)).messages:
                for message in result.messages:
                    line = expected[message.physical_offset]
                    assert _as_line(message) == {name: line[name] for name in _as_line(message)}
                offset = result.next_offset


def _as_line(message: StoredMessage) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "physicalOffset": message.physical_offset,
        "size": message.size,
        "msgId": message.message_id,
        "storeTimestamp": message.store_timestamp,
        "bornTimestamp": message.born_timestamp,
        "bornHost": message.born_host,
        "storeHost": message.store_host,
        "sysFlag": message.sys_flag,
        "flag": message.flag,
        "bodyCRC": message.body_crc,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "properties": dict(message.properties),
        "propertiesString": message.properties_string,
        "dispatchTagsCode": message.tags_code,
        "body": base64.b64encode(message.body).decode(),
    }


def test_ids_of_other_messages_are_not_found(golden: Path) -> None:
    scenario = Scenario(golden / "single")
    with MessageStore.open(scenario.store, config=scenario.config) as store:
        right = scenario.expected[0]["msgId"]
        other = "01020304" + right[8:]
        with pytest.raises(MessageNotFound, match=right):
            store.message_by_id(other)
        for text in ("", "zz" * 16, right[:-1], right + "00"):
            with pytest.raises(UsageError, match="not a message id"):
                store.message_by_id(text)


@pytest.mark.parametrize("name", DELETED)
def test_get_where_files_are_missing(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "rollover")
    shutil.copytree(scenario.store, tmp_path / "store")
    for file in DELETED[name]:
        (tmp_path / "store" / file).unlink()
    with MessageStore.open(tmp_path / "store", config=scenario.config) as store:
        for case, topic, queue_id, offset, status, following, low, high, first in EXTRA_GETS:
            if case == name:
                result = store.get(topic, queue_id, offset)
                assert result.status is GetMessageStatus[status]
                assert (result.next_offset, result.min_offset, result.max_offset) == (
                    following,
                    low,
                    high,
                )
                offsets = [message.physical_offset for message in result.messages]
                assert offsets[: len(first)] == first


def test_stale_frames_are_no_messages(golden: Path) -> None:
    """A walk of a recovered store ends where RocketMQ's log ends; it ignores bytes after that."""
    folders = [*sorted((golden / "unclean").iterdir()), golden / "clean-restart/prepad"]
    walked = 0
    for folder in folders:
        scenario = Scenario(folder, "store-recovered")
        if not folder.is_dir() or not scenario.facts["load"]:
            continue
        if folder.name == LOG_GONE:
            # RocketMQ starts with an empty log, although its checkpoint has the times of messages.
            assert scenario.expected == []
            with pytest.raises(UnsupportedStore, match="checkpoint knows of messages: is a disk"):
                MessageStore.open(scenario.store, config=scenario.config)
            continue
        with MessageStore.open(scenario.store, config=scenario.config) as store:
            bound = sound_bound(store.layout, log_bound(store.layout))
            assert bound == store.bound
            found: list[int] = []
            for event in LogReader(store.layout, bound=bound).events():
                if isinstance(event, Run):
                    found += (event.rows[:, 0] + event.window.base).tolist()
                elif isinstance(event, LogEnd):
                    assert event.offset >= scenario.facts["commitLog"]["maxOffset"]
        assert found == [line["physicalOffset"] for line in scenario.expected], folder.name
        walked += 1
    assert walked > 25


def test_opening_and_reading_changes_nothing(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "real-broker")
    store_path = tmp_path / "store"
    shutil.copytree(scenario.store, store_path)
    before = _snapshot(store_path)
    with MessageStore.open(store_path, config=scenario.config) as store:
        assert store.checkpoint is not None
        assert not store.has_abort
        assert not store.is_live
        assert store.max_offset == scenario.facts["commitLog"]["maxOffset"]
        for topic, queue_id in store.queues():
            store.get(topic, queue_id, store.queue_offsets(topic, queue_id).min)
            store.offset_by_time(topic, queue_id, 1)
        line = scenario.expected[5]
        store.message_at(line["physicalOffset"])
        store.query(line["topic"], line["uniqKey"] or "")
        store.refresh()
    assert _snapshot(store_path) == before


def _snapshot(root: Path) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {}
    for path in sorted([root, *root.rglob("*")]):
        status = path.stat()
        result[str(path)] = (
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
            status.st_ino,
            status.st_mode,
        )
    return result
