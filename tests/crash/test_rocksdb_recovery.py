"""A recovery of queues in RocksDB that ends at any of its renames and deletions."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb
from logquarry.read.rocksdb_queue import rocksdb_folders
from logquarry.repair.verification import verify_store
from logquarry.testing.builder import StoreBuilder
from tests.conformance.rocketmq5 import rocksdb_stores
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.golden_data import copy_store

Records = dict[bytes, bytes]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("rocksdict")
    return rocksdb_stores(tmp_path_factory)


def _records(root: Path) -> tuple[tuple[str, ...], Records, Records]:
    layout = StoreLayout.open(root)
    folders = rocksdb_folders(layout)
    database = RocksDb(layout.filesystem, folders[0])
    return folders, dict(database.items("default")), dict(database.items("offset"))


@pytest.mark.parametrize("name", ["5.5.0-kill-rocksdb", "5.5.0-rocksdb-separate"])
def test_the_next_recovery_comes_to_the_same(
    name: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    source = copy_store(stores[name] / "store", tmp_path / "store")
    (source / "abort").touch()
    for path in (source / "consumequeue_rocksdb").glob("*.sst"):
        # All tables are lost.
        path.unlink()
    whole = StoppedDisk()
    copy_store(source, tmp_path / "whole")
    lq.recover(tmp_path / "whole", apply=True, disk=whole)
    expected = _records(tmp_path / "whole")
    assert expected[1] and not verify_store(StoreLayout.open(tmp_path / "whole")).by_kind
    calls = [n for n, call in enumerate(whole.order) if call in ("rename", "unlink")]
    assert len(calls) > 10
    # Every second call, and other calls in each store.
    for number in calls[name.endswith("separate") :: 2]:
        copy = copy_store(source, tmp_path / "copy")
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, disk=StoppedDisk(number))
        lq.recover(copy, apply=True)
        assert _records(copy) == expected, f"call {number}, {whole.order[number]}"
        assert not verify_store(StoreLayout.open(copy)).by_kind
        shutil.rmtree(copy)


@pytest.mark.parametrize("wrong_time", [False, True])
def test_verify_of_a_topic_that_was_recreated(
    stores: dict[str, Path], tmp_path: Path, wrong_time: bool
) -> None:
    """Verify compared an old message's store time with the new entry, and told of each twice."""
    source = stores["5.5.0-rocksdb-separate"] / "store"
    root = copy_store(source, tmp_path / "store")
    size = next((root / "commitlog").iterdir()).stat().st_size
    shutil.rmtree(root / "commitlog")
    for name in ("index", ".logquarry", "timerwheel", "timerlog"):
        shutil.rmtree(root / name, ignore_errors=True)
    for name in ("config/consumerOffset.json", "checkpoint"):
        (root / name).unlink(missing_ok=True)

    def write(later: int) -> None:
        shutil.rmtree(root / "commitlog", ignore_errors=True)
        with StoreBuilder(root, file_size=size) as builder:
            for number in range(15):
                if number == 7:
                    builder.forget_queue("demo", 0)
                time = 1_700_000_000_000 + number * 1_000 + (later if number == 9 else 0)
                builder.put("demo", b"x%d" % number, store_timestamp=time)
        shutil.rmtree(root / "consumequeue")

    write(0)
    (root / "abort").touch()
    lq.recover(root, apply=True, accept_loss=1 << 40)
    if wrong_time:
        write(1)
    found = verify_store(StoreLayout.open(root)).findings
    epochs = [one.reason for one in found if one.kind == "new_epoch"]
    assert epochs == ["queue 0 of demo starts again at 0"]
    wrong = [one.reason for one in found if one.kind == "queue_entry_wrong"]
    assert wrong == ["queue 0 of demo: entry 2 has another store time"] * wrong_time


@pytest.mark.parametrize("seed", range(int(os.environ.get("LOGQUARRY_ROCKSDB_CUTS", "4"))))
def test_a_cut_at_any_place(seed: int, stores: dict[str, Path], tmp_path: Path) -> None:
    """RocksDB reaches further than the log, as after a power cut of a broker that flushes late."""
    chance = random.Random(seed)
    root = copy_store(stores["5.5.0-kill-rocksdb"] / "store", tmp_path / "store")
    if seed % 2:
        lq.recover(root, apply=True)
        (root / "abort").touch()
        shutil.rmtree(root / ".logquarry")
    with lq.MessageStore.open(root) as store:
        whole = [(m.topic, m.queue_id, m.queue_offset, m.physical_offset) for m in store.scan()]
    place = chance.choice(whole[1:])[-1]
    # In the head of the message; no CRC covers its properties.
    cut = place + chance.randrange(80)
    for path in sorted((root / "commitlog").iterdir()):
        data = path.read_bytes()
        room = max(0, cut - int(path.name))
        path.write_bytes(data[:room] + bytes(len(data) - len(data[:room])))
    lq.recover(root, apply=True, accept_loss=1 << 30)
    with lq.MessageStore.open(root) as store:
        kept = [(m.topic, m.queue_id, m.queue_offset, m.physical_offset) for m in store.scan()]
        assert kept == [message for message in whole if message[-1] < place]
        queued = [
            (*key, offset, entry.physical_offset)
            for key in store.queues()
            if (queue := store.queue(*key)) is not None
            for offset, entry in queue.entries()
        ]
    assert sorted(queued) == sorted(kept)
    kinds = verify_store(StoreLayout.open(root)).by_kind.keys()
    assert not {kind for kind in kinds if kind.startswith(("queue", "bad_"))}
    assert rocksdb_folders(StoreLayout.open(root)) == ("consumequeue",)
