"""``info``: its counts, and the hints if it cannot count."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from tests.conformance.golden_facts import SOUND
from tests.helpers.command import expected_messages, run
from tests.helpers.small_store import held_by_a_broker


def info(store: Path, *options: object, code: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run("info", store, "--json", *options, code=code).stdout)
    return document


def counted(document: dict[str, Any]) -> dict[tuple[str, int], tuple[int | None, int | None]]:
    return {
        (topic["topic"], queue["queue_id"]): (queue["messages"], queue["bytes"])
        for topic in document["topics"]
        for queue in topic["queues"]
        if queue["messages"] != 0
    }


@pytest.mark.parametrize("name", SOUND)
def test_agrees_with_rocketmq(golden: Path, name: str) -> None:
    scenario = golden / name
    facts = json.loads((scenario / "facts.json").read_text())
    document = info(scenario / "store", "--exact")
    assert document["commit_log"]["min_offset"] == facts["commitLog"]["minOffset"]
    assert document["commit_log"]["max_offset"] == facts["commitLog"]["maxOffset"]
    assert document["state"] == "closed" and not document["abort"]
    ours = {
        (topic["topic"], queue["queue_id"]): (queue["min_offset"], queue["max_offset"])
        for topic in document["topics"]
        for queue in topic["queues"]
    }
    for queue in facts["queues"]:
        if queue["files"]:
            found = ours[queue["topic"], queue["queueId"]]
            assert found == (queue["minOffset"], queue["maxOffset"])
    expected: dict[tuple[str, int], list[int]] = defaultdict(list)
    for message in expected_messages(scenario):
        expected[message["topic"], message["queue_id"]].append(message["size"])
    assert counted(document) == {key: (len(s), sum(s)) for key, s in expected.items()}
    assert document["messages"] == sum(map(len, expected.values()))
    assert document["bytes"] == sum(map(sum, expected.values()))


@pytest.mark.parametrize("name", SOUND)
def test_queues_tell_the_same_or_nothing(golden: Path, name: str) -> None:
    store = golden / name / "store"
    exact, quick = counted(info(store, "--exact")), info(store)
    if quick["hint"] is None:
        assert counted(quick) == exact
    else:
        assert name in ("sysflags", "multidispatch")
        told = {key: found for key, found in counted(quick).items() if found[1] is not None}
        assert told.items() <= exact.items()


@pytest.mark.parametrize(
    "name", ["cq-behind", "one-topic-gone", "noabort-cq-behind", "noabort-one-topic-gone"]
)
def test_lost_queues_are_noticed(golden: Path, name: str) -> None:
    document = info(golden / "unclean" / name / "store")
    assert document["bytes"] is None and "--exact" in document["hint"]
    assert info(golden / "unclean" / name / "store", "--exact")["messages"] == 174


def test_without_queues_the_log_tells(golden: Path) -> None:
    result = run("info", golden / "unclean" / "cq-and-index-gone" / "store", "--json")
    assert json.loads(result.stdout)["messages"] == 174
    assert "no queue files" in result.stderr


def test_transactions(golden: Path) -> None:
    found = info(golden / "real-broker" / "store", "--transactions")["transactions"]
    assert found == {
        "committed": 15,
        "rolled_back": 15,
        "put_back": 10,
        "open": 0,
        "unreadable": 0,
        "open_messages": [],
    }
    assert info(golden / "real-broker" / "store")["transactions"] is None
    text = run("info", golden / "real-broker" / "store", "--transactions").stdout
    assert "committed" in text and "half messages" in text


def test_open_transactions(golden: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(golden / "real-broker" / "store", store)
    # Without op messages, half messages have ended only if the checker put them back or gave up.
    shutil.rmtree(store / "consumequeue" / "RMQ_SYS_TRANS_OP_HALF_TOPIC")
    shutil.rmtree(store / "config")
    found = info(store, "--transactions")["transactions"]
    assert found["open"] == 40 and found["committed"] == 0
    first = found["open_messages"][0]
    assert (first["topic"], first["queue_id"], first["queue_offset"]) == ("TxTopic", 0, 0)
    assert "TxTopic" in run("info", store, "--transactions").stdout


def test_damage_met_by_a_walk(damaged_store: Path) -> None:
    result = run("info", damaged_store, "--exact", "--json")
    document = json.loads(result.stdout)
    assert [span["kind"] for span in document["damage"]] == ["bad_body_crc"]
    assert document["messages"] == 39
    assert "bad_body_crc" in result.stderr


def test_a_walk_tells_damage_in_the_last_file_of_a_closed_store(small_store: Path) -> None:
    """RocketMQ's recovery may have cut there, but the queues point to messages after it."""
    with lq.MessageStore.open(small_store) as store:
        places = [message.physical_offset for message in store.scan()]
        file_size = store.layout.commit_log.file_size
    last = [place for place in places if place >= places[-1] - places[-1] % file_size]
    broken = last[len(last) // 2]
    path = small_store / "commitlog" / f"{broken - broken % file_size:020d}"
    with path.open("r+b") as file:
        file.seek(broken % file_size)
        file.write(bytes(8))
    result = run("info", small_store, "--exact", "--json")
    document = json.loads(result.stdout)
    assert [span["offset"] for span in document["damage"]] == [broken]
    assert document["messages"] == places.index(broken)
    assert f"at offset {broken}" in result.stderr


def test_states(small_store: Path) -> None:
    assert info(small_store)["state"] == "closed"
    (small_store / "abort").touch()
    (small_store / "lock").write_bytes(b"lock")
    document = info(small_store)
    assert document["state"] == "crashed" and document["abort"]
    assert document["lock"] == {"exists": True, "held": False}
    with held_by_a_broker(small_store):
        document = info(small_store)
        assert document["state"] == "live" and document["lock"]["held"]
        assert document["bytes"] is not None
    assert (small_store / "lock").read_bytes() == b"lock"


def test_text(golden: Path) -> None:
    result = run("info", golden / "real-broker" / "store")
    assert "0 to 218681" in result.stdout and "452 in 22 queues of 9 topics" in result.stdout
    assert "1,160 keys in 1 file" in result.stdout
    line = next(x for x in result.stdout.splitlines() if x.startswith("MainTopic"))
    assert line.split() == ["MainTopic", "all", "173", "87.5", "KiB", "41.0%"]
    assert not result.stderr


def test_config_states_index_shape(golden: Path) -> None:
    scenario = golden / "single"
    told = info(scenario / "store", "--config", scenario / "params.json")["index"]
    assert {(file["max_hash_slot_num"], file["max_index_num"]) for file in told} == {(64, 256)}
