"""Stores of RocketMQ show their settings: a sound store needs no configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.errors import UnsupportedStore, UsageError
from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CONSUME_QUEUE
from logquarry.read.queue import ConsumeQueue
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.recover import recover
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.conformance.golden_facts import SOUND, Scenario
from tests.conformance.rocketmq5 import QUEUES, RECOVER, REFUSED, WRITE
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store

SOUND_3_1 = (
    "v3-blank/max-message-size",
    "v3-blank/reopened",
    "v3-blank/rollover",
    "v3-delay-unloaded",
    "v3-transactions",
)
# A store is not sound after a broker was killed.
SOUND_5 = sorted(set(REFUSED) - {"5.3.3-kill", "5.5.0-kill"})
ALL = [*SOUND, *SOUND_3_1, *SOUND_5]
LMQ = ["multidispatch", "5.5.0-lmq"]


@pytest.fixture
def root(request: pytest.FixtureRequest, golden: Path, rocketmq5: Path, tmp_path: Path) -> Path:
    """A copy of the store of a scenario."""
    name: str = request.param
    folder = rocketmq5 if name in REFUSED else golden
    copy_store(folder / name / "store", tmp_path / "store")
    return tmp_path / "store"


def name_of(request: pytest.FixtureRequest) -> str:
    name: str = request.node.callspec.params["root"]
    return name


def damage(root: Path) -> list[str]:
    found = verify_store(StoreLayout.open(root)).findings
    return [f"{one.kind}: {one.reason}" for one in found if one.severity == "damage"]


def queues(root: Path, log: Path | None = None) -> dict[tuple[str, int], list[tuple[int, ...]]]:
    """The entries of each queue that point into the log."""
    layout = StoreLayout.open(root)
    start = StoreLayout.open(log or root).commit_log.start
    found: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for queue in ConsumeQueue.all_of(layout):
        entries: list[tuple[int, ...]] = [
            (number, *entry)
            for number, entry in queue.entries(0, queue.max_offset)
            if entry.physical_offset >= start and not entry.is_filler
        ]
        if entries:
            found[queue.topic, queue.queue_id] = entries
    return found


@pytest.mark.parametrize("root", ALL, indirect=True)
def test_a_sound_store_needs_neither_recovery_nor_configuration(
    root: Path, request: pytest.FixtureRequest
) -> None:
    name = name_of(request)
    refused = REFUSED.get(name, frozenset())
    assert damage(root) == []
    plan = recover(root)
    assert (plan.refused is not None) is (RECOVER in refused)
    assert plan.steps == ()
    into = root.parent / "into"
    if QUEUES in refused:
        with pytest.raises(UnsupportedStore):
            rebuild(root, into=into)
    else:
        rebuild(root, into=into)
        made, had = queues(into, root), queues(root)
        if name in SOUND_3_1:
            # RocketMQ 3.x took the delivery time from its clock.
            for key in had.keys() & made.keys():
                if key[0] == SCHEDULE_TOPIC:
                    made[key], had[key] = ([e[:3] for e in q[key]] for q in (made, had))
        assert made == had
    if WRITE in refused:
        with pytest.raises(UnsupportedStore):
            lq.MessageStore.open(root, mode="rw")
        return
    before = queues(root)
    with lq.MessageStore.open(root, mode="rw") as store:
        result = store.put(lq.Message("orders", b"one more", keys="k-1"))
        store.wait_dispatched()
        assert [found.body for found in store.query("orders", "k-1")] == [b"one more"]
    assert not (root / ".logquarry" / "quarantine").exists()
    after = queues(root)
    assert after.pop(("orders", 0))[0][1] == result.physical_offset
    assert after == before
    assert damage(root) == []
    assert recover(root).steps == ()


# ------------------------------------------------------------------------------ multi-dispatch
def lmq_put(store: lq.StoreWriter) -> lq.PutResult:
    properties = {"INNER_MULTI_DISPATCH": "%LMQ%new,%LMQ%one"}
    return store.put(lq.Message("orders", b"m", queue_id=1, properties=properties))


@pytest.mark.parametrize("root", LMQ, indirect=True)
def test_a_writer_goes_on_with_multi_dispatch(root: Path) -> None:
    before = queues(root)
    with lq.MessageStore.open(root, mode="rw") as store:
        place = lmq_put(store).physical_offset
    after = queues(root)
    assert [entry[:2] for entry in after["%LMQ%new", 0]] == [(0, place)]
    assert after["%LMQ%one", 0][-1][1] == place
    assert after["%LMQ%one", 0][:-1] == before.get(("%LMQ%one", 0), [])
    assert damage(root) == []


@pytest.mark.parametrize("root", LMQ, indirect=True)
@pytest.mark.parametrize("way", ["rw", "recover", "rebuild", "salvage"])
@pytest.mark.parametrize("part", ["all", "one"])
def test_lost_queues_of_multi_dispatch_are_made_again(root: Path, way: str, part: str) -> None:
    """If all these queues are gone, only the messages name them."""
    before = queues(root)
    further = sorted({t for t, _ in before if t.startswith("%LMQ%") or t == "plainCopy"})
    gone = further if part == "all" else further[:1]
    for topic in gone:
        shutil.rmtree(root / CONSUME_QUEUE / topic)
    found = {one.split(":")[0] for one in damage(root)}
    assert found == {"queue_missing"}
    at = root
    if way == "rw":
        with lq.MessageStore.open(root, mode="rw"):
            pass
    elif way == "recover":
        assert recover(root).steps
        recover(root, apply=True)
    elif way == "rebuild":
        rebuild(root, apply=True)
    else:
        at = root.parent / "saved"
        salvage_store(StoreLayout.open(root), at)
    assert queues(at) == before
    assert damage(at) == []


@pytest.mark.parametrize("root", LMQ, indirect=True)
def test_a_crash_loses_no_queue_of_multi_dispatch(root: Path) -> None:
    before = queues(root)
    (root / "abort").touch()
    with lq.MessageStore.open(root, mode="rw"):
        pass
    assert queues(root) == before


@pytest.mark.parametrize("root", LMQ, indirect=True)
def test_a_configuration_without_multi_dispatch_contradicts_the_files(root: Path) -> None:
    config = StoreConfig.from_mapping({"enableMultiDispatch": "false"})
    with pytest.raises(UnsupportedStore, match=r"%LMQ%.*enableMultiDispatch=false"):
        lq.MessageStore.open(root, mode="rw", config=config)


# --------------------------------------------------------------------- contradicting sizes
@pytest.mark.parametrize("root", ["rollover", "single"], indirect=True)
@pytest.mark.parametrize("words", [["messages"], ["export", "--to", "out.jsonl"], ["verify"]])
def test_another_size_of_the_log_is_an_error(root: Path, words: list[str]) -> None:
    config = root.parent / "broker.conf"
    config.write_text("mappedFileSizeCommitLog=7\n")
    name, *more = words
    more = [str(root.parent / word) if word.startswith("out") else word for word in more]
    result = run(name, root, "--config", config, *more, code=2)
    assert "mappedFileSizeCommitLog in the configuration is 7" in result.stderr


def test_another_shape_of_the_index_is_an_error(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "single")
    copy_store(scenario.store, tmp_path / "store")
    config = StoreConfig(max_hash_slot_num=7, max_index_num=70)
    with pytest.raises(UsageError, match=r"slots.*gives 7 \(maxHashSlotNum\)"):
        lq.MessageStore.open(tmp_path / "store", mode="rw", config=config)
    assert not (tmp_path / "store" / ".logquarry").exists()


def test_the_record_of_the_settings_is_json(golden: Path, tmp_path: Path) -> None:
    copy_store(golden / "v3-transactions" / "store", tmp_path / "store")
    with lq.MessageStore.open(tmp_path / "store", mode="rw") as store:
        assert store.config.is_3_1
    document = json.loads((tmp_path / "store" / ".logquarry" / "settings.json").read_bytes())
    assert document["settings"]["dialect"] == "3.1"
    assert document["settings"]["max_hash_slot_num"] == 64
