"""Salvage of stores with RocksDB: the new store is plain, and keeps topics and offsets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.config_file import consumer_offsets
from logquarry.format import queue_entry
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.salvage import salvage_store
from tests.conformance.rocketmq5 import Copied, state_of
from tests.conformance.rocksdb import CONFIGS, entries_of
from tests.helpers.command import run


@pytest.mark.parametrize("name", CONFIGS)
def test_salvage_keeps_topics_and_offsets(
    name: str, rocksdb: dict[str, Path], tmp_path: Path
) -> None:
    source, root = rocksdb[name] / "store", tmp_path / "new"
    before = state_of(source)
    left = {one.feature for one in salvage_store(StoreLayout.open(source), root).left_behind}
    assert left <= {"rocksdb_queues", "timers"}
    assert state_of(source) == before
    with lq.MessageStore.open(source) as old, lq.MessageStore.open(root) as new:
        assert not {"rocksdb_queues", "rocksdb_config"} & {f.name for f in new.features.features}
        assert new.layout.read_topics() == old.layout.read_topics()
        assert consumer_offsets(new.layout) == consumer_offsets(old.layout)
    document = json.loads((root / "config" / "consumerOffset.json").read_text("utf-8"))
    assert ("pullOffsetTable" in document) == name.endswith("v2")
    # The store is plain: it can be written, and its groups continue.
    with lq.MessageStore.open(root, mode="rw") as store:
        store.put(lq.Message("Orders", b"new"))
        assert store.wait_dispatched(timeout=20)
        with store.consumer("cg", "Orders", timeout=0) as consumer:
            assert [message.body for message in consumer] == [b"new"]


@pytest.mark.usefixtures("no_package")
def test_salvage_without_the_package(rocksdb: dict[str, Path], tmp_path: Path) -> None:
    found = salvage_store(StoreLayout.open(rocksdb["5.4.0-rocksdb"] / "store"), tmp_path / "new")
    reasons = {one.feature: one.reason for one in found.left_behind}
    assert "install logquarry[rocksdb]" in reasons["rocksdb_config"]
    assert (tmp_path / "new" / "config" / "topics" / "CURRENT").exists()


@pytest.mark.parametrize("has_old_files", [False, True])
@pytest.mark.parametrize("is_crashed", [False, True])
def test_lost_last_files_of_the_log_are_named(
    copied: Copied, tmp_path: Path, *, is_crashed: bool, has_old_files: bool
) -> None:
    root = copied("5.5.0-kill-rocksdb")
    rebuild(root, apply=True, index=False)
    with lq.MessageStore.open(root) as store:
        ends = {key: store.queue_offsets(*key).max for key in store.queues()}
        first = next(entries_of(store, *key)[0] for key in store.queues() if key[0] == "Orders")
    if not is_crashed:
        (root / "abort").unlink()
    for path in sorted((root / "commitlog").iterdir())[1:]:
        path.unlink()
    if has_old_files:
        # A broker with queue files wrote the first messages.
        old = root / "consumequeue" / "Orders" / "0" / ("0" * 20)
        old.parent.mkdir(parents=True)
        old.write_bytes(queue_entry.encode(QueueEntry(*first[1:])) + bytes(20 * 99))
    assert "missing_file" in run("messages", root, "--jsonl", code=1).stderr
    # A JSON file takes the place of the broker's RocksDB.
    shutil.rmtree(root / "config" / "consumerOffsets")
    offsets = {"offsetTable": {"Orders@late": {"0": ends["Orders", 0]}}}
    (root / "config" / "consumerOffset.json").write_text(json.dumps(offsets))
    found = salvage_store(StoreLayout.open(root), tmp_path / "new")
    lost = sum(
        stop - start for s in found.plan.lost for a in s.messages.values() for start, stop in a
    )
    kept = sum(story.next for story in found.plan.queues.values())
    assert lost and lost + kept == sum(ends.values())
    (moved,) = found.progress
    assert moved.was == ends["Orders", 0] and moved.now == found.plan.queues["Orders", 0].next
    reasons = {one.feature: one.reason for one in found.left_behind}
    assert "mappedFileSizeConsumeQueue" in reasons["rocksdb_queues"]
