"""Stores of RocketMQ 5 with RocksDB: what is read is what their brokers served."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.disk.config_file import consumer_offsets
from logquarry.errors import CorruptFile, StoreUnavailable, UnsupportedStore, UsageError
from logquarry.format import queue_entry
from logquarry.format import rocksdb_queue as table
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb
from logquarry.read.batch_queue import unreadable_queues
from logquarry.read.log_queues import LogQueue
from logquarry.read.rocksdb_queue import RocksQueue, open_queues, rocksdb_folders
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.recover import recover
from logquarry.repair.salvage.salvage import salvage
from logquarry.repair.verify.verify import verify_store
from logquarry.store.retention.rules import RetentionRules
from tests.conformance.rocketmq5 import broker_queues, rocksdb_stores, state_of
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store

QUEUES = (
    *("5.3.3-rocksdb", "5.4.0-rocksdb", "5.5.0-rocksdb", "5.5.0-rocksdb-config-v2"),
    *("5.5.0-rocksdb-lmq", "5.5.0-rocksdb-separate", "5.5.0-kill-rocksdb"),
)
PULLED = ("5.4.0-rocksdb", "5.5.0-rocksdb-lmq", "5.5.0-rocksdb-separate", "5.5.0-kill-rocksdb")
CONFIGS = ("5.1.4-rocksdb", "5.3.3-rocksdb", "5.4.0-rocksdb", "5.5.0-rocksdb-config-v2")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return rocksdb_stores(tmp_path_factory)


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)


def _read(root: Path, topic: str, queue_id: int) -> list[lq.StoredMessage]:
    found: list[lq.StoredMessage] = []
    with lq.MessageStore.open(root) as store:
        offset = store.queue_offsets(topic, queue_id).min
        while (answer := store.get(topic, queue_id, offset)).messages:
            found += answer.messages
            offset = answer.next_offset
    return found


def _entries(store: lq.StoreReader, topic: str, queue_id: int) -> list[list[int]]:
    queue = store.queue(topic, queue_id)
    if queue is None:
        return []
    return [[o, e.physical_offset, e.size, e.tags_code] for o, e in queue.entries()]


@pytest.mark.parametrize("name", QUEUES)
def test_queues_are_those_of_the_broker(name: str, stores: dict[str, Path]) -> None:
    root = stores[name] / "store"
    before = state_of(root)
    kind = LogQueue if "kill" in name else RocksQueue
    with lq.MessageStore.open(root) as store:
        for (topic, queue_id), queue in broker_queues(stores[name]).items():
            assert _entries(store, topic, queue_id) == [unit[:4] for unit in queue["units"]]
            bounds = (queue["minOffset"], queue["maxOffset"])
            assert tuple(store.queue_offsets(topic, queue_id)) == bounds
            assert not queue["units"] or isinstance(store.queue(topic, queue_id), kind)
            for at, entry in enumerate(queue["getMessage"]):
                answer = store.get(topic, queue_id, bounds[0] + at, 1)
                assert [m.physical_offset for m in answer.messages] == [entry[1]]
    assert state_of(root) == before


@pytest.mark.parametrize("name", PULLED)
def test_clients_get_what_the_broker_gives(name: str, stores: dict[str, Path]) -> None:
    path = stores[name] / "pulled.json"
    for queue, told in json.loads(path.read_text("utf-8")).items():
        topic, _, queue_id = queue.rpartition("/")
        if topic.startswith("%LMQ%"):
            # A client finds no route to such a queue.
            continue
        found = _read(stores[name] / "store", topic, int(queue_id))
        assert [[m.queue_offset, m.physical_offset, zlib.crc32(m.body)] for m in found] == [
            [one[0], one[1], one[5]] for one in told["messages"]
        ]


def test_beside_a_broker_the_log_has_what_rocksdb_lacks(stores: dict[str, Path]) -> None:
    root = stores["5.5.0-rocksdb-live"] / "store"
    before = state_of(root)
    # This broker had written no entry to its disk.
    database = open_queues(StoreLayout.open(root))
    assert database is not None and not database.bounds and not database.dispatched_end
    with lq.MessageStore.open(root) as store:
        for (topic, queue_id), queue in broker_queues(stores["5.5.0-rocksdb-live"]).items():
            # The truth is of a later time.
            units = [unit[:4] for unit in queue["units"]]
            found = _entries(store, topic, queue_id)
            assert found == units[: len(found)]
            assert len(found) > 0 or not units
    assert state_of(root) == before


def test_the_log_continues_a_queue_of_rocksdb(stores: dict[str, Path], tmp_path: Path) -> None:
    """RocksDB has the entries up to its last flush, and the log has later messages."""
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    with lq.MessageStore.open(root) as store:
        expected = {key: _entries(store, *key) for key in store.queues()}
        first = next(iter(store.scan()))
    log = root / "commitlog" / ("0" * 20)
    layout = StoreLayout.open(root)
    database = open_queues(layout)
    assert database is not None
    data = bytearray(log.read_bytes())
    frame = bytearray(data[first.physical_offset : first.physical_offset + first.size])
    at = database.dispatched_end
    queue = expected[first.topic, first.queue_id]
    # QUEUEOFFSET and PHYSICALOFFSET follow size, magic, body CRC, queue id and flag.
    frame[20:28] = len(queue).to_bytes(8, "big")
    frame[28:36] = at.to_bytes(8, "big")
    data[at : at + len(frame)] = frame
    log.write_bytes(data)
    expected[first.topic, first.queue_id] = [*queue, [len(queue), at, len(frame), queue[0][3]]]
    with lq.MessageStore.open(root) as store:
        assert {key: _entries(store, *key) for key in store.queues()} == expected
        last = store.queue(first.topic, first.queue_id)
        assert isinstance(last, RocksQueue) and last.bounds() == (0, len(queue) + 1)
        assert last.last_physical_end == at + len(frame)
        assert store.get(first.topic, first.queue_id, len(queue)).messages[0].body == first.body


def test_times_of_a_queue(stores: dict[str, Path]) -> None:
    with lq.MessageStore.open(stores["5.5.0-rocksdb"] / "store") as store:
        messages = store.get("Orders", 0, 0, 32).messages
        for message in messages:
            found = store.offset_by_time("Orders", 0, message.store_timestamp)
            assert messages[found].store_timestamp == message.store_timestamp
        assert store.offset_by_time("Orders", 0, messages[0].store_timestamp - 1) == 0
        assert (
            store.offset_by_time("Orders", 0, messages[-1].store_timestamp + 1) == len(messages) - 1
        )


# --------------------------------------------------------------------------- configuration
@pytest.mark.parametrize("name", CONFIGS)
def test_topics_and_offsets_are_read(name: str, stores: dict[str, Path]) -> None:
    root = stores[name] / "store"
    before = state_of(root)
    with lq.MessageStore.open(root) as store:
        topics = store.layout.read_topics()
        assert topics["Orders"].read_queues == 2 and topics["Orders"].perm == 6
        lag = {(one.group, one.topic): one.messages for one in store.stats().state.consumer_lag}
        assert lag["cg", "Orders"] == 0
        with store.consumer("cg", "Orders", timeout=0, start="earliest") as consumer:
            assert list(consumer) == []
        with store.consumer("new", "Orders", timeout=0, start="earliest") as consumer:
            assert len(list(consumer)) == sum(store.queue_offsets("Orders", i).max for i in (0, 1))
    assert json.loads(run("stats", root, "--json").stdout)["consumer_lag"]
    assert state_of(root) == before


# --------------------------------------------------------------------------- without the package
@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("name", ["5.4.0-rocksdb", "5.5.0-rocksdb-config-v2"])
def test_without_the_package_the_log_is_read(name: str, stores: dict[str, Path]) -> None:
    root = stores[name] / "store"
    with lq.MessageStore.open(root) as store:
        assert len(list(store.scan())) > 0
        for (topic, queue_id), queue in broker_queues(stores[name]).items():
            assert _entries(store, topic, queue_id) == [unit[:4] for unit in queue["units"]]
        with pytest.raises(UsageError, match=r"pip install 'logquarry\[rocksdb\]'"):
            store.consumer("cg", "Orders")
        with pytest.raises(UsageError, match=r"pip install 'logquarry\[rocksdb\]'"):
            store.stats()
    for command in (["messages"], ["info"]):
        run(*command, root)
    assert "logquarry[rocksdb]" in run("stats", root, code=2).stderr


# --------------------------------------------------------------------------- damage
@pytest.mark.parametrize("part", ["CURRENT", ".sst"])
def test_damaged_files_of_rocksdb(
    part: str, stores: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The queues then come from the log, which has every message."""
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    for path in (root / "consumequeue").iterdir():
        if part in path.name:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptFile, match="RocksDB cannot read it"):
        RocksDb(StoreLayout.open(root).filesystem, "consumequeue")
    with lq.MessageStore.open(root) as store:
        for (topic, queue_id), queue in broker_queues(stores["5.5.0-rocksdb"]).items():
            assert _entries(store, topic, queue_id) == [unit[:4] for unit in queue["units"]]
        store.stats()
    assert caplog.text.count("the queues are made from the log") == 1


def test_a_damaged_block_is_an_error(stores: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    # The larger table has the bounds of all queues that the broker was asked for.
    path = min((root / "consumequeue").glob("*.sst"), key=lambda one: one.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 8] ^= 0xFF
    path.write_bytes(data)
    with lq.MessageStore.open(root) as store, pytest.raises(CorruptFile, match="consumequeue"):
        for key in store.queues():
            _entries(store, *key)
    # What info and stats leave out are queues with files.
    assert not unreadable_queues(StoreLayout.open(root))


def test_a_record_of_another_layout_is_an_error(stores: dict[str, Path], tmp_path: Path) -> None:
    rocksdict = pytest.importorskip("rocksdict")
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb-config-v2"] / "store", root)
    options: Any = rocksdict.Options(raw_mode=True)
    with rocksdict.Rdict(str(root / "config" / "rdb"), options) as database:
        database[b"\x01\x00\x01\x02\x00\x02cg"] = b"1"
    with lq.MessageStore.open(root) as store, pytest.raises(CorruptFile, match="config/rdb"):
        store.stats()


# --------------------------------------------------------------------------- verify
@pytest.mark.parametrize("name", [*QUEUES, "5.1.4-rocksdb", "5.5.0-rocksdb-double"])
def test_verify_compares_rocksdb(name: str, stores: dict[str, Path]) -> None:
    root = stores[name] / "store"
    before = state_of(root)
    found = verify_store(StoreLayout.open(root))
    assert not found.has_damage
    kinds = {"queue_missing", "abort_file"} if "kill" in name else set()
    assert found.by_kind.keys() == kinds
    queues = broker_queues(stores[name]).values()
    entries = sum(len(one["units"]) for one in queues)
    twice = 2 if name == "5.5.0-rocksdb-double" else 1
    assert found.counts["queue_entries"] == (0 if kinds else twice * entries)
    assert found.counts["queues"] == (0 if kinds else sum(bool(one["units"]) for one in queues))
    assert state_of(root) == before


def _change(database: Any, kind: str) -> None:
    """Change the RocksDB of queue 0 of Orders, which has at least 20 entries."""
    offsets = database.get_column_family("offset")
    last = table.bound_key("Orders", table.MAX, 0)
    place, number = table.BOUND.struct.unpack(offsets[last])
    key = table.entry_key("Orders", 0, 7)
    fields = list(table.ENTRY.struct.unpack(database[key]))
    if kind == "hole":
        del database[key]
    elif kind == "place":
        fields[0] += 1
    elif kind == "tags":
        fields[2] += 1
    elif kind == "time":
        fields[3] += 1
    elif kind == "surplus":
        database[table.entry_key("Orders", 0, number + 1)] = database[key]
        offsets[last] = table.BOUND.struct.pack(fields[0], number + 1)
    elif kind == "end":
        del database[table.entry_key("Orders", 0, number)]
        offsets[last] = table.BOUND.struct.pack(place, number - 1)
    elif kind == "missing":
        del offsets[last]
    elif kind == "ahead":
        (end,) = table.DISPATCHED_END.struct.unpack(offsets[table.DISPATCHED])
        offsets[table.DISPATCHED] = table.DISPATCHED_END.struct.pack(end + 1000)
    if kind in ("place", "tags", "time"):
        database[key] = table.ENTRY.struct.pack(*fields)


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
    kind: str, finding: str, reason: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    rocksdict = pytest.importorskip("rocksdict")
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb-separate"] / "store", root)
    folder = root / "consumequeue_rocksdb"
    families = {name: rocksdict.Options(raw_mode=True) for name in ("default", "offset")}
    with rocksdict.Rdict(str(folder), rocksdict.Options(raw_mode=True), families) as database:
        _change(database, kind)
    found = verify_store(StoreLayout.open(root))
    assert found.by_kind == {finding: 1} and found.has_damage
    assert reason in found.findings[0].reason
    assert found.findings[0].file.startswith("consumequeue_rocksdb")


def test_verify_reports_damaged_files_of_rocksdb(stores: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    for folder in ("consumequeue", "config/topics"):
        for path in (root / folder).glob("*.sst"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = verify_store(StoreLayout.open(root))
    assert found.by_kind == {"bad_rocksdb": 1, "bad_config": 1} and found.has_damage


@pytest.mark.parametrize("how", ["missing", "dangling link"])
def test_a_folder_without_current_is_damage(
    how: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    """Its topics and offsets are not silently empty."""
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    for folder in ("consumequeue", "config/topics"):
        (root / folder / "CURRENT").unlink()
        if how != "missing":
            (root / folder / "CURRENT").symlink_to("nowhere")
    found = verify_store(StoreLayout.open(root))
    wrong = {} if how == "missing" else {"wrong_entry": 1}
    assert found.by_kind == {"bad_rocksdb": 1, "bad_config": 1} | wrong and found.has_damage
    with lq.MessageStore.open(root) as store:
        for (topic, queue_id), queue in broker_queues(stores["5.5.0-rocksdb"]).items():
            assert _entries(store, topic, queue_id) == [unit[:4] for unit in queue["units"]]


@pytest.mark.usefixtures("no_package")
def test_verify_without_the_package(stores: dict[str, Path]) -> None:
    found = verify_store(StoreLayout.open(stores["5.5.0-rocksdb"] / "store"))
    assert found.by_kind == {"bad_rocksdb": 1} and not found.has_damage
    assert "logquarry[rocksdb]" in found.findings[0].reason


# --------------------------------------------------------------------------- rebuild
@pytest.mark.parametrize("name", QUEUES)
def test_rebuilt_queues_are_those_of_the_broker(
    name: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    """oracle/v5 has shown that brokers 5.3.3 to 5.5.0 serve each message of such queues."""
    root = tmp_path / "store"
    copy_store(stores[name] / "store", root)
    (folder,) = rocksdb_folders(StoreLayout.open(root))
    before = _records(root, folder)
    report = rebuild(root, apply=True)
    queues = broker_queues(stores[name])
    assert report.is_applied and report.quarantine is not None
    assert {(q.topic, q.queue_id, q.min_offset, q.max_offset) for q in report.queues or ()} == {
        (*key, one["minOffset"], one["maxOffset"]) for key, one in queues.items() if one["units"]
    }
    assert not verify_store(StoreLayout.open(root)).has_damage
    with lq.MessageStore.open(root) as store:
        for key, one in queues.items():
            assert _entries(store, *key) == [unit[:4] for unit in one["units"]]
    after = _records(root, folder)
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


def _records(root: Path, folder: str) -> dict[str, dict[bytes, bytes]]:
    database = RocksDb(StoreLayout.open(root).filesystem, folder)
    return {family: dict(database.items(family)) for family in (table.ENTRIES, table.OFFSETS)}


def test_rebuild_keeps_the_ends_of_expired_queues(stores: dict[str, Path], tmp_path: Path) -> None:
    rocksdict = pytest.importorskip("rocksdict")
    root = tmp_path / "store"
    copy_store(stores["5.5.0-kill-rocksdb"] / "store", root)
    rebuild(root, apply=True, index=False)
    families = {name: rocksdict.Options(raw_mode=True) for name in ("default", "offset")}
    options = rocksdict.Options(raw_mode=True)
    with rocksdict.Rdict(str(root / "consumequeue"), options, families) as database:
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


def test_rebuild_refuses_what_rocksdb_cannot_show(stores: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    with lq.MessageStore.open(root) as store:
        lost = store.get("Orders", 0, 7).messages[0]
    path = root / "commitlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    data[lost.physical_offset + 4] ^= 0xFF
    path.write_bytes(data)
    (root / "abort").touch()
    before = state_of(root)
    with pytest.raises(UnsupportedStore, match="begins again at offset 0"):
        rebuild(root, apply=True, index=False)
    after = state_of(root)
    assert {k: v for k, v in after.items() if k not in ("lock", ".", ".logquarry")} == {
        k: v for k, v in before.items() if k not in ("lock", ".", ".logquarry")
    }


def test_rebuild_refuses_a_log_that_ends_before_its_queues(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    with lq.MessageStore.open(root) as store:
        last = [message.physical_offset for message in store.scan()][-3]
    path = root / "commitlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    data[last:] = bytes(len(data) - last)
    path.write_bytes(data)
    (root / "abort").touch()
    with pytest.raises(StoreUnavailable, match="RocksDB has the messages up to"):
        rebuild(root, apply=True, index=False)


@pytest.mark.usefixtures("no_package")
def test_rebuild_without_the_package(stores: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "store"
    copy_store(stores["5.5.0-rocksdb"] / "store", root)
    with pytest.raises(UsageError, match=r"pip install 'logquarry\[rocksdb\]'"):
        rebuild(root, apply=True)
    assert rocksdb_folders(StoreLayout.open(root)) == ("consumequeue",)


# --------------------------------------------------------------------------- recover
@pytest.mark.parametrize("name", [*QUEUES, "5.5.0-rocksdb-live"])
def test_recovered_queues_are_those_of_the_broker(
    name: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    """Brokers 5.3.3 to 5.5.0 served each message of such stores (docs/compatibility.md)."""
    root = copy_store(stores[name] / "store", tmp_path / "store")
    before = state_of(root)
    plan = recover(root)
    assert plan.refused is None and state_of(root) == before
    recover(root, apply=True)
    layout = StoreLayout.open(root)
    if plan.is_needed:
        database = open_queues(layout)
        assert database is not None and database.dispatched_end == plan.log_end
    else:
        assert {k: v for k, v in state_of(root).items() if k not in (".", "lock")} == {
            k: v for k, v in before.items() if k not in (".", "lock")
        }
    assert plan.is_needed == ("kill" in name or "live" in name)
    assert not verify_store(layout).by_kind and not recover(root).is_needed
    with lq.MessageStore.open(root) as store:
        for key, one in broker_queues(stores[name]).items():
            units = [unit[:4] for unit in one["units"]]
            found = _entries(store, *key)
            assert found == (units[: len(found)] if "live" in name else units)


@pytest.mark.parametrize("part", ["MANIFEST", "CURRENT", ".sst"])
def test_recover_names_the_damage_of_rocksdb(
    part: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    root = copy_store(stores["5.5.0-rocksdb"] / "store", tmp_path / "store")
    for path in (root / "consumequeue").iterdir():
        if part in path.name:
            os.truncate(path, 0)
    reasons = {step.reason for step in recover(root).steps if step.file == "consumequeue"}
    assert len(reasons) == 1 and "RocksDB cannot read it" in min(reasons), reasons
    recover(root, apply=True)
    assert not verify_store(StoreLayout.open(root)).by_kind and not recover(root).is_needed


@pytest.mark.parametrize("kind", ["hole", "place", "tags", "surplus", "end", "missing", "ahead"])
def test_recover_mends_queues_in_rocksdb(
    kind: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    rocksdict = pytest.importorskip("rocksdict")
    root = copy_store(stores["5.5.0-rocksdb-separate"] / "store", tmp_path / "store")
    before = _records(root, "consumequeue_rocksdb")
    families = {name: rocksdict.Options(raw_mode=True) for name in ("default", "offset")}
    folder, options = root / "consumequeue_rocksdb", rocksdict.Options(raw_mode=True)
    with rocksdict.Rdict(str(folder), options, families) as database:
        _change(database, kind)
    harmed = _records(root, "consumequeue_rocksdb")
    assert verify_store(StoreLayout.open(root)).has_damage
    recover(root, apply=True)
    assert not verify_store(StoreLayout.open(root)).has_damage
    assert _records(root, "consumequeue_rocksdb")[table.ENTRIES] == before[table.ENTRIES]
    (aside,) = (root / ".logquarry" / "quarantine").glob("recover-*")
    moved = RocksDb(LocalFileSystem(str(aside)), "consumequeue_rocksdb")
    assert dict(moved.items(table.ENTRIES)) == harmed[table.ENTRIES]


def test_recover_removes_entries_behind_the_log(stores: dict[str, Path], tmp_path: Path) -> None:
    """The messages were acknowledged if the store was shut down cleanly: their loss is refused."""
    root = copy_store(stores["5.5.0-rocksdb"] / "store", tmp_path / "store")
    with lq.MessageStore.open(root) as store:
        keys = [(m.topic, m.queue_id, m.physical_offset) for m in store.scan()]
    end = keys[len(keys) // 2][2]
    path = root / "commitlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    data[end:] = bytes(len(data) - end)
    path.write_bytes(data)
    before = state_of(root)
    with pytest.raises(LossRefused) as refused:
        recover(root, apply=True)
    assert {k: v for k, v in state_of(root).items() if k not in (".", "lock")} == {
        k: v for k, v in before.items() if k not in (".", "lock")
    }
    assert refused.value.loss.messages >= len(keys) // 2
    recover(root, apply=True, accept_loss=refused.value.loss.bytes)
    database = open_queues(StoreLayout.open(root))
    assert database is not None and database.dispatched_end == end
    # The loss was accepted: the checkpoint gets the time of the last message that is left.
    assert not verify_store(StoreLayout.open(root)).by_kind
    with lq.MessageStore.open(root) as store:
        assert [m.physical_offset for m in store.scan()] == [k[2] for k in keys if k[2] < end]


def test_recover_refuses_what_rocksdb_cannot_show(stores: dict[str, Path], tmp_path: Path) -> None:
    root = copy_store(stores["5.5.0-kill-rocksdb"] / "store", tmp_path / "store")
    with lq.MessageStore.open(root) as store:
        lost = store.get("Orders", 0, 7).messages[0]
    path = root / "commitlog" / ("0" * 20)
    data = bytearray(path.read_bytes())
    data[lost.physical_offset + 4] ^= 0xFF
    path.write_bytes(data)
    before = state_of(root)
    with pytest.raises(StoreUnavailable, match="begins again at offset 0"):
        recover(root, apply=True)
    assert {k: v for k, v in state_of(root).items() if k not in (".", "lock")} == {
        k: v for k, v in before.items() if k not in (".", "lock")
    }


@pytest.mark.parametrize("name", ["5.5.0-rocksdb-separate", "5.5.0-rocksdb"])
@pytest.mark.parametrize("command", ["recover", "rebuild"])
def test_a_recovery_that_ended_between_its_renames(
    command: str, name: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    root = copy_store(stores[name] / "store", tmp_path / "store")
    (folder,) = rocksdb_folders(StoreLayout.open(root))
    built = root / ".logquarry" / "rebuild"
    built.mkdir(parents=True)
    (root / folder).rename(built / folder)
    (built / "complete").touch()
    (root / "abort").touch()
    with pytest.raises(UnsupportedStore, match="the queues are in RocksDB"):
        lq.MessageStore.open(root, mode="rw")
    with lq.MessageStore.open(root) as store:
        assert all(_entries(store, *key) for key in store.queues())
    run(*([command, root] if command == "recover" else [command, root, "--in-place"]), "--apply")
    assert rocksdb_folders(StoreLayout.open(root)) == (folder,) and not built.exists()
    run("recover", root, "--apply")
    assert not verify_store(StoreLayout.open(root)).by_kind


@pytest.mark.usefixtures("no_package")
def test_recover_without_the_package(stores: dict[str, Path], tmp_path: Path) -> None:
    root = copy_store(stores["5.5.0-kill-rocksdb"] / "store", tmp_path / "store")
    before = state_of(root)
    with pytest.raises(UsageError, match=r"pip install 'logquarry\[rocksdb\]'"):
        recover(root, apply=True)
    assert {k: v for k, v in state_of(root).items() if k not in (".", "lock")} == {
        k: v for k, v in before.items() if k not in (".", "lock")
    }


# --------------------------------------------------------------------------- retain
def test_retain_leaves_the_entries_to_the_broker(stores: dict[str, Path], tmp_path: Path) -> None:
    """Brokers 5.3.3 to 5.5.0 served such stores from the same min offsets on (matrix5.py)."""
    root = copy_store(stores["5.5.0-kill-rocksdb"] / "store", tmp_path / "store")
    recover(root, apply=True)
    queues = {path: path.read_bytes() for path in (root / "consumequeue").iterdir()}
    with lq.MessageStore.open(root) as store:
        expected = {key: _entries(store, *key) for key in store.queues()}
    plan = lq.retain(root, RetentionRules(keep_bytes=1), apply=True)
    start = plan.new_min_offset
    lost = [entry for entries in expected.values() for entry in entries if entry[1] < start]
    assert start and sum(plan.messages.values()) == len(lost)
    assert {path: path.read_bytes() for path in (root / "consumequeue").iterdir()} == queues
    with lq.MessageStore.open(root) as store:
        for key, entries in expected.items():
            kept = [entry for entry in entries if entry[1] >= start]
            assert store.queue_offsets(*key) == (kept[0][0], len(entries))
            assert [e for e in _entries(store, *key) if e[1] >= start] == kept
        assert store.stats().state.file_bytes["consumequeue"] == sum(map(len, queues.values()))
    assert not verify_store(StoreLayout.open(root)).has_damage and not recover(root).is_needed


@pytest.mark.usefixtures("no_package")
def test_retain_without_the_package(stores: dict[str, Path]) -> None:
    """The consumers that have not read the messages would not be named."""
    with pytest.raises(UsageError, match=r"pip install 'logquarry\[rocksdb\]'"):
        lq.retain(stores["5.5.0-rocksdb"] / "store", RetentionRules(keep_bytes=1))


# --------------------------------------------------------------------------- salvage
@pytest.mark.parametrize("name", CONFIGS)
def test_salvage_keeps_topics_and_offsets(
    name: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    source, root = stores[name] / "store", tmp_path / "new"
    before = state_of(source)
    left = {one.feature for one in salvage(StoreLayout.open(source), root).left_behind}
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
def test_salvage_without_the_package(stores: dict[str, Path], tmp_path: Path) -> None:
    found = salvage(StoreLayout.open(stores["5.4.0-rocksdb"] / "store"), tmp_path / "new")
    reasons = {one.feature: one.reason for one in found.left_behind}
    assert "install logquarry[rocksdb]" in reasons["rocksdb_config"]
    assert (tmp_path / "new" / "config" / "topics" / "CURRENT").exists()


@pytest.mark.parametrize("has_old_files", [False, True])
@pytest.mark.parametrize("is_crashed", [False, True])
def test_lost_last_files_of_the_log_are_named(
    stores: dict[str, Path], tmp_path: Path, *, is_crashed: bool, has_old_files: bool
) -> None:
    root = copy_store(stores["5.5.0-kill-rocksdb"] / "store", tmp_path / "store")
    rebuild(root, apply=True, index=False)
    with lq.MessageStore.open(root) as store:
        ends = {key: store.queue_offsets(*key).max for key in store.queues()}
        first = next(_entries(store, *key)[0] for key in store.queues() if key[0] == "Orders")
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
    table = {"offsetTable": {"Orders@late": {"0": ends["Orders", 0]}}}
    (root / "config" / "consumerOffset.json").write_text(json.dumps(table))
    found = salvage(StoreLayout.open(root), tmp_path / "new")
    lost = sum(
        stop - start for s in found.plan.lost for a in s.messages.values() for start, stop in a
    )
    kept = sum(story.next for story in found.plan.queues.values())
    assert lost and lost + kept == sum(ends.values())
    (moved,) = found.progress
    assert moved.was == ends["Orders", 0] and moved.now == found.plan.queues["Orders", 0].next
    reasons = {one.feature: one.reason for one in found.left_behind}
    assert "mappedFileSizeConsumeQueue" in reasons["rocksdb_queues"]
