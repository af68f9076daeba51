"""Verify of queues and configuration in RocksDB."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import logquarry as lq
from logquarry.cli.main import app
from logquarry.format import queue_entry as table
from logquarry.log.layout import StoreLayout
from logquarry.read.rocksdb_queue import QueueDb
from logquarry.repair.audit.other_queues import wrong_end
from logquarry.repair.verification import verify_store
from tests.conformance.rocketmq5 import Copied, broker_entries, broker_queues, state_of
from tests.conformance.rocksdb import QUEUES, change, changed, entries_in


@pytest.mark.parametrize("name", [*QUEUES, "5.1.4-rocksdb", "5.5.0-rocksdb-double"])
def test_verify_compares_rocksdb(name: str, rocksdb: dict[str, Path]) -> None:
    root = rocksdb[name] / "store"
    before = state_of(root)
    found = verify_store(StoreLayout.open(root))
    assert not found.has_damage
    kinds = {"queue_missing", "abort_file"} if "kill" in name else set()
    assert found.by_kind.keys() == kinds
    queues = broker_queues(rocksdb[name]).values()
    entries = sum(len(one["units"]) for one in queues)
    twice = 2 if name == "5.5.0-rocksdb-double" else 1
    assert found.counts["queue_entries"] == (0 if kinds else twice * entries)
    assert found.counts["queues"] == (0 if kinds else sum(bool(one["units"]) for one in queues))
    assert state_of(root) == before


@pytest.mark.parametrize(
    ("kind", "finding", "reason"),
    [
        ("hole", "queue_hole", "queue 0 of Orders: entry 7 was never written"),
        ("place", "queue_entry_wrong", "queue 0 of Orders: entry 7 points to"),
        ("tags", "queue_entry_wrong", "with tags code"),
        ("time", "queue_entry_wrong", "queue 0 of Orders: entry 7 has another store time"),
        ("surplus", "queue_misplaced", "queue 0 of Orders"),
        ("end", "queue_behind", "the log has messages up to"),
        ("missing", "queue_missing", "RocksDB lacks it"),
        ("ahead", "queue_ahead", "but the log ends at"),
    ],
)
def test_verify_finds_differences_in_rocksdb(
    kind: str, finding: str, reason: str, copied: Copied
) -> None:
    root = copied("5.5.0-rocksdb-separate")
    change(root / "consumequeue_rocksdb", kind)
    found = verify_store(StoreLayout.open(root))
    assert found.by_kind == {finding: 1} and found.has_damage
    assert reason in found.findings[0].reason
    assert found.findings[0].file.startswith("consumequeue_rocksdb")
    if kind != "ahead":
        words = f"{found.findings[0].file}: {found.findings[0].reason}"
        assert "queue 0 of Orders" in words or "consumequeue_rocksdb/Orders/0" in words


def test_a_queue_file_of_a_wrong_size_is_reported_once(copied: Copied) -> None:
    """With rocksdbCQDoubleWriteEnable, two audits compare the same queue with the log."""
    root = copied("5.5.0-rocksdb-double")
    (file,) = (root / "consumequeue/Orders/0").iterdir()
    config = lq.StoreConfig(mapped_file_size_consume_queue=file.stat().st_size)
    file.write_bytes(file.read_bytes() + bytes(20))
    found = verify_store(StoreLayout.open(root, config))
    assert found.by_kind == {"wrong_file_size": 1}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["far", "endless"])
def test_an_impossible_end_in_rocksdb_is_no_endless_queue(
    kind: str, copied: Copied, rocksdb: dict[str, Path]
) -> None:
    root = copied("5.5.0-rocksdb-separate")
    with lq.MessageStore.open(root) as store:
        sound = store.get("Orders", 0, 0, 8)
    change(root / "consumequeue_rocksdb", kind)
    kinds = {"far": "queue_end_wrong", "endless": "bad_rocksdb"}
    assert lq.verify(root).by_kind == {kinds[kind]: 1}
    with lq.MessageStore.open(root) as store:
        assert store.get("Orders", 0, 0, 8).messages == sound.messages
    if kind != "endless":
        found = lq.diff(rocksdb["5.5.0-rocksdb-separate"] / "store", root)
        queue = next(one for one in found.queues if (one.topic, one.queue_id) == ("Orders", 0))
        assert queue.state == "differs" and found.verdict != "equal"
        assert "in b, queue 0 of Orders: its end is" in queue.reason
    assert lq.recover(root, apply=True).steps
    assert not lq.verify(root).has_damage


def test_verify_reports_damaged_files_of_rocksdb(copied: Copied) -> None:
    root = copied("5.5.0-rocksdb")
    for folder in ("consumequeue", "config/topics"):
        for path in (root / folder).glob("*.sst"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = verify_store(StoreLayout.open(root))
    assert found.by_kind == {"bad_rocksdb": 1, "bad_config": 1} and found.has_damage


@pytest.mark.parametrize("how", ["missing", "dangling link"])
def test_a_folder_without_current_is_damage(
    how: str, copied: Copied, rocksdb: dict[str, Path]
) -> None:
    """Its topics and offsets are not silently empty."""
    root = copied("5.5.0-rocksdb")
    for folder in ("consumequeue", "config/topics"):
        (root / folder / "CURRENT").unlink()
        if how != "missing":
            (root / folder / "CURRENT").symlink_to("nowhere")
    found = verify_store(StoreLayout.open(root))
    wrong = {} if how == "missing" else {"wrong_entry": 2}
    assert found.by_kind == {"bad_rocksdb": 1, "bad_config": 1} | wrong and found.has_damage
    wanted = broker_entries(rocksdb["5.5.0-rocksdb"])
    with lq.MessageStore.open(root) as store:
        assert entries_in(store, wanted) == wanted


@pytest.mark.usefixtures("no_package")
def test_verify_without_the_package(rocksdb: dict[str, Path]) -> None:
    found = verify_store(StoreLayout.open(rocksdb["5.5.0-rocksdb"] / "store"))
    assert found.by_kind == {"bad_rocksdb": 1} and not found.has_damage
    assert "logquarry[rocksdb]" in found.findings[0].reason


def test_the_end_of_a_queue_without_entries(copied: Copied) -> None:
    """The end is right if all messages have expired, so that only the end is left."""
    root, key = copied("5.5.0-rocksdb-separate"), ("Orders", 0)
    layout = StoreLayout.open(root)
    with changed(root / "consumequeue_rocksdb") as database:
        offsets, bound = (
            database.get_column_family("offset"),
            table.bound_key(*key[:1], table.MAX, 0),
        )
        place, number = table.BOUND.struct.unpack(offsets[bound])
        for one in range(number + 1):
            del database[table.entry_key(*key, one)]
    found = QueueDb(layout, "consumequeue_rocksdb")
    assert wrong_end(found, key, place + 1) is None
    reason = f"queue 0 of Orders: its end is {number + 1}, and it has no entry {number}"
    assert wrong_end(found, key, place) == reason


def test_verify_reports_an_unreadable_block_of_rocksdb(copied: Copied) -> None:
    """Other commands stop at the block and advise to verify, so verify must not stop there."""
    root = copied("5.5.0-rocksdb")
    for path in (root / "consumequeue").glob("*.sst"):
        data = bytearray(path.read_bytes())
        data[:512] = bytes(512)
        path.write_bytes(data)
    found = verify_store(StoreLayout.open(root))
    assert found.by_kind == {"bad_rocksdb": 1} and found.has_damage
    assert "checksum mismatch" in found.findings[0].reason
    lq.recover(root, apply=True)
    assert not verify_store(StoreLayout.open(root)).has_damage


@pytest.mark.parametrize("folder", ["rocksdbstore", "kvStore"])
def test_verify_reads_the_other_databases(folder: str, copied: Copied) -> None:
    root = copied("5.5.0-rocksdb")
    assert not lq.verify(root).has_damage
    shutil.copytree(root / "consumequeue", root / "kvStore", dirs_exist_ok=True)
    shutil.copytree(root / "consumequeue", root / "rocksdbstore", dirs_exist_ok=True)
    assert not lq.verify(root).has_damage
    (table, *_) = (root / folder).glob("*.sst")
    table.unlink()
    report = lq.verify(root)
    [found] = [one for one in report.findings if one.severity == "damage"]
    assert (found.kind, found.file) == ("bad_rocksdb_store", folder)
    assert table.name in found.reason
    result = CliRunner().invoke(app, ["verify", str(root)])
    assert result.exit_code == 1
    assert f"next: put {folder} back from a backup, then: logquarry verify" in result.stdout


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("lost", ["*.sst", "MANIFEST-*"])
def test_lost_files_are_found_without_the_package(lost: str, copied: Copied) -> None:
    root = copied("5.5.0-rocksdb-more")
    for path in (root / "rocksdbstore").glob(lost):
        path.unlink()
    report = lq.verify(root)
    [found] = [one for one in report.findings if one.severity == "damage"]
    assert (found.kind, found.file) == ("bad_rocksdb_store", "rocksdbstore")
    assert "which" in found.reason and "missing" in found.reason


def test_a_queue_that_is_only_in_files_makes_no_damage_of_a_crash(copied: Copied) -> None:
    """With combineCQUseRocksdbForLmq, only some queues are in RocksDB."""
    root = copied("5.5.0-rocksdb-double")
    change(root / "consumequeue_rocksdb", "missing")
    with lq.MessageStore.open(root) as store:
        newest = [message for message in store.scan() if message.topic == "Later"][-1]
    with changed(root / "consumequeue_rocksdb") as database:
        offsets = database.get_column_family("offset")
        last = table.bound_key("Later", table.MAX, newest.queue_id)
        place, number = table.BOUND.struct.unpack(offsets[last])
        assert place == newest.physical_offset
        del database[table.entry_key("Later", newest.queue_id, number)]
        offsets[last] = table.BOUND.struct.pack(place, number - 1)
        offsets[table.DISPATCHED] = table.DISPATCHED_END.struct.pack(place)
    (root / "abort").touch()
    found = verify_store(StoreLayout.open(root))
    assert found.by_kind == {"abort_file": 1, "queue_behind": 1} and not found.has_damage
