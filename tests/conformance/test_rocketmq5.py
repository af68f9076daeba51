"""Stores of real RocketMQ 5 brokers: they are read, written, recovered and salvaged whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.errors import UnsupportedStore
from logquarry.log.layout import StoreLayout
from logquarry.read.features import find_features
from logquarry.read.timers import timers_of
from logquarry.repair.audit.timer_files import timer_faults
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.verification import verify_store
from tests.conformance.rocketmq5 import (
    FEATURES,
    REFUSED,
    Copied,
    broker_queues,
    expected_frames,
    expected_offsets,
    state_of,
)
from tests.helpers.command import run
from tests.helpers.files import bytes_of, overwrite

UNDERSTOOD = sorted(name for name in REFUSED if not REFUSED[name])
NOT_AS_ROCKETMQ = {"batch_queues", "several_log_paths"}


# ----------------------------------------------------------------------------------- reading
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_log_is_read(name: str, rocketmq5: Path) -> None:
    expected = expected_frames(rocketmq5 / name) if "kill" not in name else None
    with lq.MessageStore.open(rocketmq5 / name / "store") as store:
        found = list(store.scan())
    if expected is not None and "inner_batches" in FEATURES[name]:
        # test_batch_queues.py compares the messages inside.
        places = dict.fromkeys(m.physical_offset for m in found)
        assert list(places) == [one["physicalOffset"] for one in expected]
    elif expected is not None:
        assert [m.physical_offset for m in found] == [one["physicalOffset"] for one in expected]
        assert [m.topic for m in found] == [one["topic"] for one in expected]
        assert [m.queue_offset for m in found] == [one["queueOffset"] for one in expected]
    rows = run("messages", rocketmq5 / name / "store", "--jsonl").stdout.splitlines()
    assert len(rows) == len(found) > 0


@pytest.mark.parametrize("name", sorted(n for n in REFUSED if "kill" not in n))
def test_queues_are_read_as_by_the_broker(name: str, rocketmq5: Path) -> None:
    with lq.MessageStore.open(rocketmq5 / name / "store") as store:
        for (topic, queue_id), queue in broker_queues(rocketmq5 / name).items():
            assert store.queue_offsets(topic, queue_id).max == queue["maxOffset"], topic
            found, offset = [], 0
            while offset < queue["maxOffset"]:
                answer = store.get(topic, queue_id, offset)
                found += [[m.queue_offset, m.physical_offset] for m in answer.messages]
                offset = answer.next_offset
            # LMQ queues name messages of other topics. Of compaction topics some are left.
            units = [[u[0] + i, u[1]] for u in queue["units"] for i in range(u[4])]
            if name == "5.5.0-compaction":
                units = queue["getMessage"]
            if not topic.startswith("%LMQ%"):
                assert found == units
            assert len(found) == len(units)


def test_queues_of_multi_dispatch_in_rocksdb(rocketmq5: Path) -> None:
    root = rocketmq5 / "5.5.0-rocksdb" / "store"
    without = StoreConfig(enable_multi_dispatch=False)
    with lq.MessageStore.open(root, config=without) as store:
        for call in (store.get, store.queue_offsets):
            with pytest.raises(UnsupportedStore, match="enableMultiDispatch"):
                call("%LMQ%any", 0)
    with lq.MessageStore.open(root) as store:
        assert store.queue_offsets("%LMQ%any", 0) == (0, 0)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_sound_stores_verify_clean(name: str, rocketmq5: Path) -> None:
    report = verify_store(StoreLayout.open(rocketmq5 / name / "store"))
    assert not report.has_damage, report.findings


# ------------------------------------------------------------------------- writing and recovery
@pytest.mark.parametrize("name", [n for n in UNDERSTOOD if not FEATURES[n] & NOT_AS_ROCKETMQ])
def test_recovery_as_rocketmq_keeps_all_of_5(name: str, copied: Copied) -> None:
    root = copied(name)
    with lq.MessageStore.open(root) as store:
        before = [message.physical_offset for message in store.scan()]
    lq.recover(root, mode="rocketmq", apply=True)
    config = StoreConfig(recovery="rocketmq")
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        ours = store.put(lq.Message("Orders", b"new", keys="new"))
        assert [m.physical_offset for m in store.scan()] == [*before, ours.physical_offset]


def test_recovery_as_rocketmq_knows_only_queue_files(copied: Copied) -> None:
    for name in ("5.5.0-batchcq", "5.5.0-rocksdb-more", "5.5.0-multipath"):
        root = copied(name)
        before = state_of(root)
        with pytest.raises(UnsupportedStore):
            lq.recover(root, mode="rocketmq", apply=True)
        assert state_of(root) == before


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_what_is_understood_is_written(name: str, copied: Copied) -> None:
    root = copied(name)
    there = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with lq.MessageStore.open(root) as store:
        frames = [message.physical_offset for message in store.scan()]
    with lq.MessageStore.open(root, mode="rw") as store:
        put = store.put(lq.Message("Orders", b"new", keys="new", tags="TagNew"))
        assert store.wait_dispatched(timeout=20)
    with lq.MessageStore.open(root) as store:
        assert [m.physical_offset for m in store.scan()] == [*frames, put.physical_offset]
        assert store.get("Orders", 0, put.queue_offset).messages[0].body == b"new"
    report = verify_store(StoreLayout.open(root))
    assert not report.findings
    # The index continues with the same kinds of keys: UNIQ_KEY, KEYS and, since 5.4, the tag.
    has_tags = name >= "5.4"
    assert ("index_tags" in FEATURES[name]) == has_tags
    with lq.MessageStore.open(root) as store:
        assert len(store.query("Orders", "T#TagNew")) == int(has_tags)
    kept = root / ".logquarry" / "quarantine"
    for path, data in there.items():
        aside = kept / path.relative_to(root)
        # A crash leaves files of the log that were made ahead, all zeros.
        assert path.exists() or path.name == "abort" or aside.exists() or not data.strip(b"\0")


def test_the_bytes_after_the_log_of_a_broker_without_maps(rocketmq5: Path, copied: Copied) -> None:
    root = copied("5.5.0-no-mmap")
    before = state_of(root)
    (stale,) = verify_store(StoreLayout.open(root)).findings
    assert (stale.kind, stale.severity, stale.length) == ("stale_bytes", "note", 382)
    assert not lq.recover(root, apply=True).is_needed
    before.pop("lock", None)
    after = {path: state.data for path, state in state_of(root).items() if path != "lock"}
    assert after == {path: state.data for path, state in before.items()}
    with lq.MessageStore.open(root, mode="rw") as store:
        ours = store.put(lq.Message(topic="Orders", body=b"ours", queue_id=0))
        assert ours.physical_offset == stale.offset
        frames = expected_offsets(rocketmq5 / "5.5.0-no-mmap")
        assert [m.physical_offset for m in store.scan()] == [*frames, stale.offset]
    assert not verify_store(StoreLayout.open(root)).findings
    assert not (root / ".logquarry" / "quarantine").exists()


# ----------------------------------------------------------------------------------- salvage
# The frames of a DLedger log move: test_convert_makes_a_plain_store.
@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"5.5.0-dledger"}))
def test_salvage_carries_what_it_can_and_lists_the_rest(
    name: str, rocketmq5: Path, tmp_path: Path
) -> None:
    root, into = rocketmq5 / name / "store", tmp_path / "new"
    before = state_of(root)
    document = json.loads(run("salvage", root, "--json", code=LEAVES.get(name, 0)).stdout)
    result = run("salvage", root, "--into", into, code=LEAVES.get(name, 0))
    left = {one["feature"] for one in document["left_behind"]}
    assert bool(left) == (name in LEAVES)
    assert left == FEATURES[name] & LEFT_BEHIND
    assert all(f"left behind: {feature} " in result.stdout for feature in left)
    assert state_of(root) == before
    with lq.MessageStore.open(root) as old, lq.MessageStore.open(into) as new:
        assert [m.body for m in new.scan()] == [m.body for m in old.scan()]
    for path in document["carried"]:
        assert _content(into / path) == _content(root / path)
    # Each timer message that waits is in the new wheel.
    waiting = [one._replace(physical_offset=0) for one in timers_of(StoreLayout.open(root)).due()]
    kept = [one._replace(physical_offset=0) for one in timers_of(StoreLayout.open(into)).due()]
    assert kept == waiting and document["timers"] == len(waiting)
    assert not list(timer_faults(StoreLayout.open(into)))
    assert not verify_store(StoreLayout.open(into)).has_damage


LEFT_BEHIND = {"rocksdb_queues", "rocksdb_store", "queue_ext", "tiered", "controller"}
LEAVES = dict.fromkeys((name for name in REFUSED if FEATURES[name] & LEFT_BEHIND), 1)


def _content(path: Path) -> bytes | dict[str, bytes]:
    return path.read_bytes() if path.is_file() else bytes_of(path)


def test_damage_in_a_store_whose_checkpoint_lags(copied: Copied) -> None:
    """RocketMQ 5.5 closes a store with the time of an old message for the queues."""
    store = copied("5.5.0-propcrc")
    with lq.MessageStore.open(store) as reader:
        messages = list(reader.scan())
    overwrite(store / "checkpoint", 8, messages[0].frame.store_timestamp.to_bytes(8, "big"))
    overwrite(store / "commitlog" / ("0" * 20), messages[0].size // 2, b"damaged")
    saved = lq.salvage(store)
    assert saved.plan.lost
    assert sum(topic["messages"] for topic in saved.to_json()["topics"]) == len(messages) - 1


# ----------------------------------------------------------------------------- index with tags
@pytest.mark.parametrize("name", ["5.5.0-plain", "5.5.0-timer", "5.3.3-plain", "5.1.4-plain"])
def test_a_rebuilt_index_has_the_bytes_of_the_broker(
    name: str, copied: Copied, tmp_path: Path
) -> None:
    root = copied(name)
    rebuild(root, into=tmp_path / "built")
    theirs = [path.read_bytes() for path in sorted((root / "index").iterdir())]
    ours = [path.read_bytes() for path in sorted((tmp_path / "built" / "index").iterdir())]
    assert ours == theirs


def test_a_lost_index_is_made_with_tags(copied: Copied, rocketmq5: Path) -> None:
    root = copied("5.5.0-plain")
    with lq.MessageStore.open(root) as store:
        count = len(store.query("Orders", "T#TagA"))
    (theirs,) = (root / "index").iterdir()
    data = theirs.read_bytes()
    shutil.rmtree(root / "index")
    # 5.4 and later make rocksdbstore/ in each store.
    rebuild(root, apply=True, queues=False, config=_shape(rocketmq5 / "5.5.0-plain"))
    (ours,) = (root / "index").iterdir()
    assert ours.read_bytes() == data and count > 0


def test_a_recovered_index_has_tags(copied: Copied) -> None:
    root = copied("5.5.0-kill")
    lq.recover(root, apply=True)
    assert not verify_store(StoreLayout.open(root)).findings
    assert find_features(StoreLayout.open(root)).get("index_tags") is not None


def test_an_index_of_an_older_version_that_got_tags_later(copied: Copied, rocketmq5: Path) -> None:
    root = copied("5.3.3-plain")
    config = dataclasses.replace(_shape(rocketmq5 / "5.3.3-plain"), index_tags=True)
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for _ in range(3):
            store.put(lq.Message("Orders", b"new", keys="new", tags="TagNew"))
        assert store.wait_dispatched(timeout=20)
    assert find_features(StoreLayout.open(root)).get("index_tags") is not None
    assert not verify_store(StoreLayout.open(root)).findings


def _shape(scenario: Path) -> StoreConfig:
    return StoreConfig.from_file(scenario / "broker.conf")
