"""Deliveries and commits of this library have RocketMQ's bytes."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.format import frame
from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.store.message_store import StoreWriter
from logquarry.store.transaction.transaction import HALF_TOPIC, OP_TOPIC
from logquarry.testing.clock import FakeClock
from tests.conformance.golden_facts import Scenario
from tests.conformance.replay import message_of
from tests.helpers.files import bytes_of


def opened(root: Path, config: lq.StoreConfig, clock: FakeClock) -> StoreWriter:
    return StoreWriter.start(root, config=config, clock=clock)


def test_delivery_has_the_same_bytes(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "delay-deliver")
    root = tmp_path / "store"
    clock = FakeClock()
    delivered = [m for m in scenario.expected if m["topic"] != SCHEDULE_TOPIC]
    assert len(delivered) == 30
    with opened(root, scenario.config, clock) as store:
        for line in (scenario.folder / "puts.jsonl").read_text("utf-8").splitlines():
            put = json.loads(line)
            clock.now = put["result"]["append"]["storeTimestamp"]
            store.put(message_of(put["input"]))
        store.wait_dispatched()
        delivery = store._services.deliveries[0]
        all_levels = delivery._queue_ids
        for message in delivered:
            # Java has a thread for each level: their order is chance.
            clock.now = message["storeTimestamp"]
            delivery._queue_ids = [int(message["properties"]["DELAY"]) - 1]
            assert delivery.deliver(clock.now, limit=1) == 1
        delivery._queue_ids = all_levels
        assert delivery.offsets == {1: 10, 2: 20}
        assert store.deliver_due() == 0
    for folder in ("commitlog", "consumequeue"):
        ours, theirs = bytes_of(root / folder), bytes_of(scenario.store / folder)
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if ours[name] != theirs[name]] == []
    theirs_text = (scenario.store / "config" / "delayOffset.json").read_text()
    written = (root / "config" / "delayOffset.json").read_text()
    assert written == theirs_text.replace("1:8,2:16", "1:10,2:20")


def test_what_a_broker_delivered_and_did_not_note_is_not_delivered_again(
    golden: Path, tmp_path: Path
) -> None:
    """The broker's file has offsets 8 and 16, but 10 and 20 messages were delivered."""
    scenario = Scenario(golden / "delay-deliver")
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    with lq.MessageStore.open(root, mode="rw", config=scenario.config) as store:
        assert store.deliver_due() == 0
    assert "{1:10,2:20\n" in (root / "config" / "delayOffset.json").read_text()


def test_delayed_messages_of_a_broker_are_delivered(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "delay")
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    waiting = [m for m in scenario.expected if m["topic"] == SCHEDULE_TOPIC]
    assert len(waiting) > 30
    clock = FakeClock(max(m["storeTimestamp"] for m in waiting))
    with opened(root, scenario.config, clock) as store:
        assert store.deliver_due() == 0
        clock.now += 86_400_000
        assert store.deliver_due() == len(waiting)
        assert store.deliver_due() == 0
        found = list(store.scan())[len(scenario.expected) :]
    assert len(found) == len(waiting)
    by_level: dict[int, list[lq.StoredMessage]] = {}
    for message in found:
        by_level.setdefault(int(message.properties["DELAY"]), []).append(message)
    for level, messages in by_level.items():
        asked = [m for m in waiting if m["queueId"] == level - 1]
        for ours, theirs in zip(messages, asked, strict=True):
            assert (ours.topic, str(ours.queue_id)) == (
                theirs["properties"]["REAL_TOPIC"],
                theirs["properties"]["REAL_QID"],
            )
            assert ours.properties == theirs["properties"]
            for name, field in (
                ("born_timestamp", "bornTimestamp"),
                ("born_host", "bornHost"),
                ("store_host", "storeHost"),
                ("flag", "flag"),
                ("sys_flag", "sysFlag"),
                ("reconsume_times", "reconsumeTimes"),
                ("body_crc", "bodyCRC"),
            ):
                assert getattr(ours, name) == theirs[field], name
            assert ours.prepared_transaction_offset == 0
            assert ours.body == base64.b64decode(theirs["body"] or "")


# ------------------------------------------------------------------------------------ transactions
OFFSETS_AND_TIMES: dict[str, Any] = {
    "queue_offset": 0,
    "physical_offset": 0,
    "store_timestamp": 0,
    "prepared_transaction_offset": 0,
}


def bare(message: lq.StoredMessage) -> bytes:
    """The bytes of a frame, without offsets and times."""
    return frame.encode(replace(message.frame, **OFFSETS_AND_TIMES))


@pytest.fixture(scope="module")
def broker(golden: Path) -> list[lq.StoredMessage]:
    scenario = Scenario(golden / "real-broker")
    with lq.MessageStore.open(scenario.store, config=scenario.config) as store:
        return list(store.scan())


def test_transactions_have_the_frames_of_a_broker(
    broker: list[lq.StoredMessage], tmp_path: Path
) -> None:
    """This library commits, rolls back and checks the half messages that a real client sent."""
    halves = [m for m in broker if m.topic == HALF_TOPIC]
    commits = {m.prepared_transaction_offset: m for m in broker if m.frame.sys_flag & 8}
    first = [m for m in halves if "TRANSACTION_CHECK_TIMES" not in m.properties]
    ends = [m for m in broker if m.topic == OP_TOPIC]
    ended = {int(m.body) for m in ends}
    assert (len(first), len(commits), len(ends)) == (30, 15, 30)
    answers = {
        m.keys: "commit" if m.physical_offset in commits else "rollback" for m in halves[30:]
    }
    clock = FakeClock(first[0].store_timestamp)
    config = lq.StoreConfig(
        mapped_file_size_commit_log=131_072,
        transaction_time_out=2_000,
        store_host=ends[0].born_host,
    )
    ours: dict[str, list[bytes]] = {"commit": [], "half": [], "op": []}
    root = tmp_path / "store"
    with opened(root, config, clock) as store:
        for half in first:
            properties = dict(half.properties)
            topic, queue_id = properties.pop("REAL_TOPIC"), int(properties.pop("REAL_QID"))
            message = lq.Message(
                topic,
                half.body,
                queue_id=queue_id,
                properties=properties,
                flag=half.flag,
                sys_flag=half.sys_flag,
                born_timestamp=half.born_timestamp,
                born_host=half.born_host,
                store_host=half.store_host,
                reconsume_times=half.reconsume_times,
            )
            with store.transaction(message) as t:
                if half.physical_offset in commits:
                    t.commit()
                elif half.queue_offset not in ended:
                    t.leave_open()
        clock.now += 5_000
        report = store.check_transactions(lambda t: answers[t.message.keys])
        assert (report.committed, report.rolled_back, report.unknown) == (5, 5, 0)
        report = store.check_transactions(lambda t: "unknown")
        assert report == lq.CheckReport(), "nothing is open"
        for stored in store.scan():
            kind = {HALF_TOPIC: "half", OP_TOPIC: "op"}.get(stored.topic, "commit")
            ours[kind].append(bare(stored))
    assert ours["half"] == [bare(m) for m in halves]
    assert sorted(ours["commit"]) == sorted(bare(m) for m in commits.values())
    # An op message's born time is its store time; its header does not have the half's offset.
    assert sorted(op[88:] for op in ours["op"]) == sorted(bare(m)[88:] for m in ends)
    offsets = (root / "config" / "consumerOffset.json").read_text()
    assert '"RMQ_SYS_TRANS_HALF_TOPIC@CID_RMQ_SYS_TRANS":{0:40' in offsets
    assert '"RMQ_SYS_TRANS_OP_HALF_TOPIC@CID_RMQ_SYS_TRANS":{0:30' in offsets


def test_a_brokers_transactions_are_all_ended_for_ours(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "real-broker")
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    for lost in (False, True):
        if lost:
            # Without the broker's offsets, the halves that it put back are known by their UNIQ_KEY.
            for path in (root / "config").glob("consumerOffset.json*"):
                path.unlink()
        clock = FakeClock(1_795_175_900_000)
        with opened(root, scenario.config, clock) as store:
            report = store.check_transactions(lambda t: pytest.fail(f"asked for {t}"))
            assert report == lq.CheckReport()
            assert len(list(store.scan(HALF_TOPIC))) == 40
