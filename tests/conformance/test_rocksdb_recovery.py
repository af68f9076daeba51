"""Rebuild and recovery of queues in RocksDB: brokers serve each message of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable, UnsupportedStore, UsageError
from logquarry.format import queue_entry as table
from logquarry.format import sys_flag
from logquarry.format.frame import HEAD
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb
from logquarry.read.rocksdb_queue import open_queues, rocksdb_folders
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify_store
from tests.conformance.rocketmq5 import LOCK, Copied, broker_entries, broker_queues, state_of
from tests.conformance.rocksdb import (
    NEEDS_EXTRA,
    QUEUES,
    change,
    changed,
    entries_in,
    entries_of,
    records,
)
from tests.helpers.command import run
from tests.helpers.files import flip, overwrite, zero


@pytest.mark.parametrize("queue_id", [0, 77])
def test_a_frame_with_a_harmed_queue_id_keeps_its_place(
    queue_id: int, copied: Copied, rocksdb: dict[str, Path]
) -> None:
    """No CRC covers the queue id in a frame, but the right queue has the frame's entry."""
    root = copied(QUEUES[0])
    (folder,) = rocksdb_folders(StoreLayout.open(root))
    before = records(root, folder)[table.ENTRIES]
    entries = {key: some for key, some in broker_entries(rocksdb[QUEUES[0]]).items() if key[1]}
    _, place, *_ = max(entries.values(), key=len)[1]
    log = min((root / "commitlog").iterdir())
    overwrite(log, place + HEAD.offsets["queue_id"], queue_id.to_bytes(4))
    assert not recover(root).is_needed
    assert rebuild(root, apply=True).is_applied
    assert records(root, folder)[table.ENTRIES] == before


@pytest.mark.parametrize("kind", [sys_flag.TRANSACTION_PREPARED, sys_flag.TRANSACTION_ROLLBACK])
@pytest.mark.parametrize("number", [1, -1])
def test_a_frame_with_a_harmed_transaction_type_keeps_its_place(
    number: int, kind: int, copied: Copied, rocksdb: dict[str, Path]
) -> None:
    """No CRC covers SYSFLAG, but the queue has the frame's entry."""
    root = copied(QUEUES[0])
    (folder,) = rocksdb_folders(StoreLayout.open(root))
    before = records(root, folder)[table.ENTRIES]
    _, place, *_ = max(broker_entries(rocksdb[QUEUES[0]]).values(), key=len)[number]
    log = min((root / "commitlog").iterdir())
    overwrite(log, place + HEAD.offsets["sys_flag"], kind.to_bytes(4))
    damage = [
        one for one in verify_store(StoreLayout.open(root)).findings if one.severity != "note"
    ]
    assert [(one.kind, one.offset) for one in damage] == [("harmed_transaction_type", place)]
    assert not recover(root).is_needed
    assert rebuild(root, apply=True).is_applied
    assert records(root, folder)[table.ENTRIES] == before


@pytest.mark.parametrize("name", QUEUES)
def test_rebuilt_queues_are_those_of_the_broker(
    name: str, copied: Copied, rocksdb: dict[str, Path]
) -> None:
    """oracle/v5 has shown that brokers 5.3.3 to 5.5.0 serve each message of such queues."""
    root = copied(name)
    (folder,) = rocksdb_folders(StoreLayout.open(root))
    before = records(root, folder)
    report = rebuild(root, apply=True)
    queues = broker_queues(rocksdb[name])
    assert report.is_applied and report.quarantine is not None
    assert {(q.topic, q.queue_id, q.min_offset, q.max_offset) for q in report.queues or ()} == {
        (*key, one["minOffset"], one["maxOffset"]) for key, one in queues.items() if one["units"]
    }
    assert not verify_store(StoreLayout.open(root)).has_damage
    wanted = broker_entries(rocksdb[name])
    with lq.MessageStore.open(root) as store:
        assert entries_in(store, wanted) == wanted
    after = records(root, folder)
    if "kill" not in name:
        assert after[table.ENTRIES] == before[table.ENTRIES]
        # The broker notes the min of the queues that clients have asked for, empty ones too.
        old, new = before[table.OFFSETS], after[table.OFFSETS]
        for record in new.keys() & old.keys():
            # For a queue that was empty then, it notes where the log began.
            shown = slice(8, None) if table.MIN in record else slice(None)
            assert new[record][shown] == old[record][shown]
        assert all(table.MIN in record for record in new.keys() ^ old.keys())
    names = {path.name.rstrip("0123456789") for path in (root / folder).iterdir()}
    assert not names & {"LOG", "rocksdict-config.json"}


def test_rebuild_keeps_the_ends_of_expired_queues(copied: Copied) -> None:
    root = copied("5.5.0-kill-rocksdb")
    rebuild(root, apply=True, index=False)
    with changed(root / "consumequeue") as database:
        gone = table.bound_key("Gone", table.MAX, 3)
        database.get_column_family("offset")[gone] = table.BOUND.struct.pack(5, 9)
    # Retention has deleted the first file of the log.
    (root / "commitlog" / ("0" * 20)).unlink()
    with lq.MessageStore.open(root) as store:
        ends = {key: store.queue_offsets(*key) for key in store.queues()}
        lows = [store.queue_offsets(*key).min for key in store.queues()]
    assert ends["Gone", 3] == (10, 10) and all(lows)
    rebuild(root, apply=True, index=False)
    with lq.MessageStore.open(root) as store:
        assert {key: store.queue_offsets(*key) for key in store.queues()} == ends
    assert not verify_store(StoreLayout.open(root)).has_damage


def test_rebuild_refuses_what_rocksdb_cannot_show(copied: Copied) -> None:
    root = copied("5.5.0-rocksdb")
    with lq.MessageStore.open(root) as store:
        lost = store.get("Orders", 0, 7).messages[0]
    flip(root / "commitlog" / ("0" * 20), lost.physical_offset + 4, 0xFF)
    (root / "abort").touch()
    before = state_of(root, *LOCK, ".logquarry")
    with pytest.raises(UnsupportedStore, match="begins again at offset 0"):
        rebuild(root, apply=True, index=False)
    assert state_of(root, *LOCK, ".logquarry") == before


def test_rebuild_refuses_a_log_that_ends_before_its_queues(copied: Copied) -> None:
    root = copied("5.5.0-rocksdb")
    with lq.MessageStore.open(root) as store:
        last = [message.physical_offset for message in store.scan()][-3]
    zero(root / "commitlog" / ("0" * 20), last)
    (root / "abort").touch()
    with pytest.raises(StoreUnavailable, match="RocksDB has the messages up to"):
        rebuild(root, apply=True, index=False)


@pytest.mark.usefixtures("no_package")
def test_rebuild_without_the_package(copied: Copied) -> None:
    root = copied("5.5.0-rocksdb")
    with pytest.raises(UsageError, match=NEEDS_EXTRA):
        rebuild(root, apply=True)
    assert rocksdb_folders(StoreLayout.open(root)) == ("consumequeue",)


@pytest.mark.parametrize("name", [*QUEUES, "5.5.0-rocksdb-live"])
def test_recovered_queues_are_those_of_the_broker(
    name: str, copied: Copied, rocksdb: dict[str, Path]
) -> None:
    """Brokers 5.3.3 to 5.5.0 served each message of such stores (docs/compatibility.md)."""
    root = copied(name)
    before, unlocked = state_of(root), state_of(root, *LOCK)
    plan = recover(root)
    assert plan.refused is None and state_of(root) == before
    recover(root, apply=True)
    layout = StoreLayout.open(root)
    if plan.is_needed:
        database = open_queues(layout)
        assert database is not None and database.dispatched_end == plan.log_end
    else:
        assert state_of(root, *LOCK) == unlocked
    assert plan.is_needed == ("kill" in name or "live" in name)
    assert not verify_store(layout).by_kind and not recover(root).is_needed
    with lq.MessageStore.open(root) as store:
        for key, units in broker_entries(rocksdb[name]).items():
            found = entries_of(store, *key)
            assert found == (units[: len(found)] if "live" in name else units)


@pytest.mark.parametrize("part", ["MANIFEST", "CURRENT", ".sst"])
def test_recover_names_the_damage_of_rocksdb(part: str, copied: Copied) -> None:
    root = copied("5.5.0-rocksdb")
    for path in (root / "consumequeue").iterdir():
        if part in path.name:
            os.truncate(path, 0)
    reasons = {step.reason for step in recover(root).steps if step.file == "consumequeue"}
    assert len(reasons) == 1 and "RocksDB cannot read it" in min(reasons), reasons
    recover(root, apply=True)
    assert not verify_store(StoreLayout.open(root)).by_kind and not recover(root).is_needed


@pytest.mark.parametrize("kind", ["hole", "place", "tags", "surplus", "end", "missing", "ahead"])
def test_recover_mends_queues_in_rocksdb(kind: str, copied: Copied) -> None:
    root = copied("5.5.0-rocksdb-separate")
    before = records(root, "consumequeue_rocksdb")
    change(root / "consumequeue_rocksdb", kind)
    harmed = records(root, "consumequeue_rocksdb")
    assert verify_store(StoreLayout.open(root)).has_damage
    recover(root, apply=True)
    assert not verify_store(StoreLayout.open(root)).has_damage
    assert records(root, "consumequeue_rocksdb")[table.ENTRIES] == before[table.ENTRIES]
    (aside,) = (root / ".logquarry" / "quarantine").glob("recover-*")
    moved = RocksDb(LocalFileSystem(str(aside)), "consumequeue_rocksdb")
    assert dict(moved.items(table.ENTRIES)) == harmed[table.ENTRIES]


def test_recover_removes_entries_behind_the_log(copied: Copied) -> None:
    """The messages were acknowledged if the store was shut down cleanly: their loss is refused."""
    root = copied("5.5.0-rocksdb")
    with lq.MessageStore.open(root) as store:
        keys = [(m.topic, m.queue_id, m.physical_offset) for m in store.scan()]
    end = keys[len(keys) // 2][2]
    zero(root / "commitlog" / ("0" * 20), end)
    before = state_of(root, *LOCK)
    with pytest.raises(LossRefused) as refused:
        recover(root, apply=True)
    assert state_of(root, *LOCK) == before
    assert refused.value.loss.messages >= len(keys) // 2
    recover(root, apply=True, accept_loss=refused.value.loss.bytes)
    database = open_queues(StoreLayout.open(root))
    assert database is not None and database.dispatched_end == end
    # The loss was accepted: the checkpoint gets the time of the last message that is left.
    assert not verify_store(StoreLayout.open(root)).by_kind
    with lq.MessageStore.open(root) as store:
        assert [m.physical_offset for m in store.scan()] == [k[2] for k in keys if k[2] < end]


def test_recover_refuses_what_rocksdb_cannot_show(copied: Copied) -> None:
    root = copied("5.5.0-kill-rocksdb")
    with lq.MessageStore.open(root) as store:
        lost = store.get("Orders", 0, 7).messages[0]
    flip(root / "commitlog" / ("0" * 20), lost.physical_offset + 4, 0xFF)
    before = state_of(root, *LOCK)
    with pytest.raises(StoreUnavailable, match="begins again at offset 0"):
        recover(root, apply=True)
    assert state_of(root, *LOCK) == before


@pytest.mark.parametrize("name", ["5.5.0-rocksdb-separate", "5.5.0-rocksdb"])
@pytest.mark.parametrize("command", ["recover", "rebuild"])
def test_a_recovery_that_ended_between_its_renames(command: str, name: str, copied: Copied) -> None:
    root = copied(name)
    (folder,) = rocksdb_folders(StoreLayout.open(root))
    built = root / ".logquarry" / "rebuild"
    built.mkdir(parents=True)
    (root / folder).rename(built / folder)
    (built / "complete").touch()
    (root / "abort").touch()
    with pytest.raises(UnsupportedStore, match="the queues are in RocksDB"):
        lq.MessageStore.open(root, mode="rw")
    with lq.MessageStore.open(root) as store:
        assert all(entries_of(store, *key) for key in store.queues())
    run(*([command, root] if command == "recover" else [command, root, "--in-place"]), "--apply")
    assert rocksdb_folders(StoreLayout.open(root)) == (folder,) and not built.exists()
    run("recover", root, "--apply")
    assert not verify_store(StoreLayout.open(root)).by_kind


@pytest.mark.usefixtures("no_package")
def test_recover_without_the_package(copied: Copied) -> None:
    root = copied("5.5.0-kill-rocksdb")
    before = state_of(root, *LOCK)
    with pytest.raises(UsageError, match=NEEDS_EXTRA):
        recover(root, apply=True)
    assert state_of(root, *LOCK) == before
