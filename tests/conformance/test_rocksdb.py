"""Stores of RocketMQ 5 with RocksDB: what is read is what their brokers served."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFile, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb
from logquarry.read.batch_queue import unreadable_queues
from logquarry.read.log_queues import LogQueue
from logquarry.read.rocksdb_queue import RocksQueue, open_queues
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify_store
from logquarry.store.retention.rules import RetentionRules
from tests.conformance.rocketmq5 import Copied, broker_entries, broker_queues, state_of
from tests.conformance.rocksdb import CONFIGS, NEEDS_EXTRA, QUEUES, change, entries_in, entries_of
from tests.helpers.command import run
from tests.helpers.files import flip, overwrite

PULLED = ("5.4.0-rocksdb", "5.5.0-rocksdb-lmq", "5.5.0-rocksdb-separate", "5.5.0-kill-rocksdb")


def _read(root: Path, topic: str, queue_id: int) -> list[lq.StoredMessage]:
    found: list[lq.StoredMessage] = []
    with lq.MessageStore.open(root) as store:
        offset = store.queue_offsets(topic, queue_id).min
        while (answer := store.get(topic, queue_id, offset)).messages:
            found += answer.messages
            offset = answer.next_offset
    return found


@pytest.mark.parametrize("name", QUEUES)
def test_queues_are_those_of_the_broker(name: str, rocksdb: dict[str, Path]) -> None:
    root = rocksdb[name] / "store"
    before = state_of(root)
    kind = LogQueue if "kill" in name else RocksQueue
    wanted = broker_entries(rocksdb[name])
    with lq.MessageStore.open(root) as store:
        assert entries_in(store, wanted) == wanted
        for (topic, queue_id), queue in broker_queues(rocksdb[name]).items():
            bounds = (queue["minOffset"], queue["maxOffset"])
            assert tuple(store.queue_offsets(topic, queue_id)) == bounds
            assert not queue["units"] or isinstance(store.queue(topic, queue_id), kind)
            for at, entry in enumerate(queue["getMessage"]):
                answer = store.get(topic, queue_id, bounds[0] + at, 1)
                assert [m.physical_offset for m in answer.messages] == [entry[1]]
    assert state_of(root) == before


@pytest.mark.parametrize("name", PULLED)
def test_clients_get_what_the_broker_gives(name: str, rocksdb: dict[str, Path]) -> None:
    path = rocksdb[name] / "pulled.json"
    for queue, told in json.loads(path.read_text("utf-8")).items():
        topic, _, queue_id = queue.rpartition("/")
        if topic.startswith("%LMQ%"):
            # A client finds no route to such a queue.
            continue
        found = _read(rocksdb[name] / "store", topic, int(queue_id))
        assert [[m.queue_offset, m.physical_offset, zlib.crc32(m.body)] for m in found] == [
            [one[0], one[1], one[5]] for one in told["messages"]
        ]


def test_beside_a_broker_the_log_has_what_rocksdb_lacks(rocksdb: dict[str, Path]) -> None:
    root = rocksdb["5.5.0-rocksdb-live"] / "store"
    before = state_of(root)
    # This broker had written no entry to its disk.
    database = open_queues(StoreLayout.open(root))
    assert database is not None and not database.bounds and not database.dispatched_end
    with lq.MessageStore.open(root) as store:
        # The truth is of a later time.
        for key, units in broker_entries(rocksdb["5.5.0-rocksdb-live"]).items():
            found = entries_of(store, *key)
            assert found == units[: len(found)]
            assert len(found) > 0 or not units
    assert state_of(root) == before


def test_the_log_continues_a_queue_of_rocksdb(copied: Copied) -> None:
    """RocksDB has the entries up to its last flush, and the log has later messages."""
    root = copied("5.5.0-rocksdb")
    with lq.MessageStore.open(root) as store:
        expected = entries_in(store, store.queues())
        first = next(iter(store.scan()))
    log = root / "commitlog" / ("0" * 20)
    database = open_queues(StoreLayout.open(root))
    assert database is not None
    frame = bytearray(log.read_bytes()[first.physical_offset :][: first.size])
    at = database.dispatched_end
    queue = expected[first.topic, first.queue_id]
    # QUEUEOFFSET and PHYSICALOFFSET follow size, magic, body CRC, queue id and flag.
    frame[20:28] = len(queue).to_bytes(8, "big")
    frame[28:36] = at.to_bytes(8, "big")
    overwrite(log, at, frame)
    expected[first.topic, first.queue_id] = [*queue, [len(queue), at, len(frame), queue[0][3]]]
    with lq.MessageStore.open(root) as store:
        assert entries_in(store, store.queues()) == expected
        last = store.queue(first.topic, first.queue_id)
        assert isinstance(last, RocksQueue) and last.bounds() == (0, len(queue) + 1)
        assert last.last_physical_end == at + len(frame)
        assert store.get(first.topic, first.queue_id, len(queue)).messages[0].body == first.body


def test_times_of_a_queue(rocksdb: dict[str, Path]) -> None:
    with lq.MessageStore.open(rocksdb["5.5.0-rocksdb"] / "store") as store:
        messages = store.get("Orders", 0, 0, 32).messages
        for message in messages:
            found = store.offset_by_time("Orders", 0, message.store_timestamp)
            assert messages[found].store_timestamp == message.store_timestamp
        assert store.offset_by_time("Orders", 0, messages[0].store_timestamp - 1) == 0
        after = messages[-1].store_timestamp + 1
        assert store.offset_by_time("Orders", 0, after) == len(messages) - 1


# --------------------------------------------------------------------------- configuration
@pytest.mark.parametrize("name", CONFIGS)
def test_topics_and_offsets_are_read(name: str, rocksdb: dict[str, Path]) -> None:
    root = rocksdb[name] / "store"
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
def test_without_the_package_the_log_is_read(name: str, rocksdb: dict[str, Path]) -> None:
    root = rocksdb[name] / "store"
    with lq.MessageStore.open(root) as store:
        assert len(list(store.scan())) > 0
        for (topic, queue_id), queue in broker_queues(rocksdb[name]).items():
            assert entries_of(store, topic, queue_id) == [unit[:4] for unit in queue["units"]]
        with pytest.raises(UsageError, match=NEEDS_EXTRA):
            store.consumer("cg", "Orders")
        with pytest.raises(UsageError, match=NEEDS_EXTRA):
            store.stats()
    for command in ("messages", "info"):
        run(command, root)
    assert "logquarry[rocksdb]" in run("stats", root, code=2).stderr


# --------------------------------------------------------------------------- damage
@pytest.mark.parametrize("part", ["CURRENT", ".sst"])
def test_damaged_files_of_rocksdb(
    part: str, copied: Copied, rocksdb: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The queues then come from the log, which has every message."""
    root = copied("5.5.0-rocksdb")
    for path in (root / "consumequeue").iterdir():
        if part in path.name:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CorruptFile, match="RocksDB cannot read it"):
        RocksDb(StoreLayout.open(root).filesystem, "consumequeue")
    wanted = broker_entries(rocksdb["5.5.0-rocksdb"])
    with lq.MessageStore.open(root) as store:
        assert entries_in(store, wanted) == wanted
        store.stats()
    assert caplog.text.count("the queues are made from the log") == 1


def test_a_damaged_block_is_an_error(copied: Copied) -> None:
    root = copied("5.5.0-rocksdb")
    # The larger table has the bounds of all queues that the broker was asked for.
    path = min((root / "consumequeue").glob("*.sst"), key=lambda one: one.stat().st_size)
    flip(path, path.stat().st_size // 8, 0xFF)
    with lq.MessageStore.open(root) as store, pytest.raises(CorruptFile, match="consumequeue"):
        for key in store.queues():
            entries_of(store, *key)
    # What info and stats leave out are queues with files.
    assert not unreadable_queues(StoreLayout.open(root))


def test_a_record_of_another_layout_is_an_error(copied: Copied) -> None:
    rocksdict = pytest.importorskip("rocksdict")
    root = copied("5.5.0-rocksdb-config-v2")
    options: Any = rocksdict.Options(raw_mode=True)
    with rocksdict.Rdict(str(root / "config" / "rdb"), options) as database:
        database[b"\x01\x00\x01\x02\x00\x02cg"] = b"1"
    with lq.MessageStore.open(root) as store, pytest.raises(CorruptFile, match="config/rdb"):
        store.stats()


# --------------------------------------------------------------------------- retain
def test_retain_leaves_the_entries_to_the_broker(copied: Copied) -> None:
    """Brokers 5.3.3 to 5.5.0 served such stores from the same min offsets on (matrix5.py)."""
    root = copied("5.5.0-kill-rocksdb")
    recover(root, apply=True)
    queues = {path: path.read_bytes() for path in (root / "consumequeue").iterdir()}
    with lq.MessageStore.open(root) as store:
        expected = entries_in(store, store.queues())
    plan = lq.retain(root, RetentionRules(keep_bytes=1), apply=True)
    start = plan.new_min_offset
    lost = [entry for entries in expected.values() for entry in entries if entry[1] < start]
    assert start and sum(plan.messages.values()) == len(lost)
    assert {path: path.read_bytes() for path in (root / "consumequeue").iterdir()} == queues
    with lq.MessageStore.open(root) as store:
        for key, entries in expected.items():
            kept = [entry for entry in entries if entry[1] >= start]
            assert store.queue_offsets(*key) == (kept[0][0], len(entries))
            assert [e for e in entries_of(store, *key) if e[1] >= start] == kept
        assert store.stats().state.file_bytes["consumequeue"] == sum(map(len, queues.values()))
    assert not verify_store(StoreLayout.open(root)).has_damage and not recover(root).is_needed


@pytest.mark.usefixtures("no_package")
def test_retain_without_the_package(rocksdb: dict[str, Path]) -> None:
    """The consumers that have not read the messages would not be named."""
    with pytest.raises(UsageError, match=NEEDS_EXTRA):
        lq.retain(rocksdb["5.5.0-rocksdb"] / "store", RetentionRules(keep_bytes=1))


def test_a_get_warns_of_a_gap(copied: Copied, caplog: pytest.LogCaptureFixture) -> None:
    root = copied("5.5.0-rocksdb-separate")
    with lq.MessageStore.open(root) as store:
        assert len(store.get("Orders", 0, 0, 20).messages) == 20
    assert not [text for text in caplog.messages if "left out" in text]
    change(root / "consumequeue_rocksdb", "hole")
    with lq.MessageStore.open(root) as store:
        got, offset = [], 0
        while offset < 20:
            result = store.get("Orders", 0, offset, 5)
            got += [message.queue_offset for message in result.messages]
            offset = result.next_offset
    assert 7 not in got and {0, 6, 8, 19} <= set(got)
    (warning,) = [text for text in caplog.messages if "left out" in text]
    assert "consumequeue_rocksdb/Orders/0: there is no entry at queue offset 7, but" in warning
