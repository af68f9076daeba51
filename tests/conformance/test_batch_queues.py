"""Batch queues of RocketMQ 5 brokers: reads give each message, and puts continue the queues."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import logquarry as lq
from logquarry.format.batch import ENTRY_SIZE
from logquarry.log.batches import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.read.batch_queue import BATCH_DTYPE
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.verification import verify_store
from logquarry.spark.options import ReadOptions
from logquarry.spark.tasks import plan_tasks, read_batches
from logquarry.store.retention.rules import RetentionRules
from tests.conformance.rocketmq5 import (
    BATCH_STORES,
    BATCH_TOPIC,
    Copied,
    Row,
    broker_messages,
    broker_queues,
    expected_frames,
)
from tests.helpers.command import run
from tests.helpers.files import bytes_of


def _row(message: lq.StoredMessage, like: Row) -> Row:
    found = {name: getattr(message, name) for name in like}
    return {**found, "properties": dict(message.properties)}


@pytest.mark.parametrize("name", BATCH_STORES)
def test_each_message_is_a_row(name: str, rocketmq5: Path) -> None:
    wanted = broker_messages(rocketmq5 / name)
    assert len(wanted) > len(expected_frames(rocketmq5 / name))
    with lq.MessageStore.open(rocketmq5 / name / "store") as store:
        found = list(store.scan())
        assert [_row(*pair) for pair in zip(found, wanted, strict=True)] == wanted
        table = store.to_arrow().read_all()
        assert table["body"].to_pylist() == [row["body"] for row in wanted]
        assert table["queue_offset"].to_pylist() == [row["queue_offset"] for row in wanted]
        assert table["tags"].to_pylist() == [row["properties"].get("TAGS") for row in wanted]
        for key in {row["properties"]["KEYS"] for row in wanted}:
            some = [row for row in wanted if key in row["properties"]["KEYS"].split()]
            if len(key.split()) == 1:
                assert [m.queue_offset for m in store.scan(keys=key)] == [
                    row["queue_offset"] for row in some
                ]


@pytest.mark.parametrize("name", BATCH_STORES)
def test_get_gives_what_a_client_pulls(name: str, rocketmq5: Path) -> None:
    wanted = broker_messages(rocketmq5 / name)
    with lq.MessageStore.open(rocketmq5 / name / "store") as store:
        for (topic, queue_id), queue in broker_queues(rocketmq5 / name).items():
            rows = [r for r in wanted if (r["topic"], r["queue_id"]) == (topic, queue_id)]
            bounds = store.queue_offsets(topic, queue_id)
            assert (bounds.min, bounds.max) == (queue["minOffset"], queue["maxOffset"])
            assert bounds.max == len(rows)
            for start in (0, 1, bounds.max // 2, bounds.max - 1):
                found = store.get(topic, queue_id, start, 7)
                part = rows[start : start + 7]
                assert [_row(*pair) for pair in zip(found.messages, part, strict=True)] == part
                assert found.next_offset == start + len(part)
            assert not store.get(topic, queue_id, bounds.max).messages
            tag = rows[0]["properties"]["TAGS"]
            got, offset = [], 0
            while offset < bounds.max:
                result = store.get(topic, queue_id, offset, 32, tag)
                got += [message.queue_offset for message in result.messages]
                offset = result.next_offset
            tagged = [r["queue_offset"] for r in rows if r["properties"].get("TAGS") == tag]
            assert got == tagged


@pytest.mark.parametrize("name", BATCH_STORES)
def test_consumers_get_each_message_once(name: str, rocketmq5: Path) -> None:
    wanted = broker_messages(rocketmq5 / name)
    with lq.MessageStore.open(rocketmq5 / name / "store") as store:
        consumer = store.consumer("group", [BATCH_TOPIC], timeout=0.01)
        found = sorted((m.queue_id, m.queue_offset) for m in consumer)
    rows = [row for row in wanted if row["topic"] == BATCH_TOPIC]
    assert found == sorted((row["queue_id"], row["queue_offset"]) for row in rows)


@pytest.mark.parametrize("name", BATCH_STORES)
def test_queues_made_from_the_log(name: str, copied: Copied, rocketmq5: Path) -> None:
    root = copied(name)
    for folder in ("batchconsumequeue", "consumequeue"):
        shutil.rmtree(root / folder)
    with lq.MessageStore.open(rocketmq5 / name / "store") as store:
        wanted = {key: store.get(*key, 0, 32).messages for key in store.queues()}
        tag = store.get(BATCH_TOPIC, 0, 0, 1).messages[0].tags
        tagged = store.get(BATCH_TOPIC, 0, 0, 32, tag).messages
    with lq.MessageStore.open(root) as store:
        assert {key: store.get(*key, 0, 32).messages for key in store.queues()} == wanted
        assert store.get(BATCH_TOPIC, 0, 0, 32, tag).messages == tagged


def test_spark_tasks_read_the_same_rows(rocketmq5: Path) -> None:
    wanted = broker_messages(rocketmq5 / "5.5.0-batchcq")
    root = str(rocketmq5 / "5.5.0-batchcq" / "store")

    def rows(options: ReadOptions) -> list[tuple[str, int, int]]:
        tasks = plan_tasks(options)
        batches = [batch for task in tasks for batch in read_batches(task)]
        found = [row for batch in batches for row in batch.to_pylist()]
        return sorted((row["topic"], row["queue_id"], row["queue_offset"]) for row in found)

    every = sorted((row["topic"], row["queue_id"], row["queue_offset"]) for row in wanted)
    assert rows(ReadOptions(paths=(root,))) == every
    assert rows(ReadOptions(paths=(root,), min_partitions=7)) == every
    part = MessageFilter(topics=frozenset({BATCH_TOPIC}), queue_offsets=(5, 20))
    some = [row for row in every if row[0] == BATCH_TOPIC and 5 <= row[2] < 20]
    assert rows(ReadOptions(paths=(root,), wanted=part)) == some


def test_query_by_key_gives_messages_of_the_batch(rocketmq5: Path) -> None:
    rows = [r for r in expected_frames(rocketmq5 / "5.5.0-batchcq") if r["sysFlag"] & 0x80]
    indexed = next(r for r in rows if "KEYS" in r["properties"])
    with lq.MessageStore.open(rocketmq5 / "5.5.0-batchcq" / "store") as store:
        key = indexed["properties"]["KEYS"].split()[0]
        (found,) = store.query(BATCH_TOPIC, key)
        assert found.keys == key and found.physical_offset == indexed["physicalOffset"]
        batch = store.query(BATCH_TOPIC, indexed["properties"]["UNIQ_KEY"])
        assert len(batch) == int(indexed["properties"]["INNER_NUM"])


def test_time_of_a_batch(rocketmq5: Path) -> None:
    rows = [r for r in broker_messages(rocketmq5 / "5.5.0-batchcq") if r["topic"] == BATCH_TOPIC]
    rows = [r for r in rows if r["queue_id"] == 0]
    with lq.MessageStore.open(rocketmq5 / "5.5.0-batchcq" / "store") as store:
        for time in {r["store_timestamp"] for r in rows}:
            first = next(r for r in rows if r["store_timestamp"] >= time)
            assert store.offset_by_time(BATCH_TOPIC, 0, time) == first["queue_offset"]
        assert store.offset_by_time(BATCH_TOPIC, 0, 0) == 0


def test_commands_count_and_show_messages(rocketmq5: Path) -> None:
    root = rocketmq5 / "5.5.0-batchcq" / "store"
    wanted = broker_messages(rocketmq5 / "5.5.0-batchcq")
    for options in ((), ("--exact",)):
        assert f"messages    {len(wanted)} in " in run("info", root, *options).stdout
    assert len(run("messages", root, "--jsonl").stdout.splitlines()) == len(wanted)
    inner = next(row for row in wanted if row["queue_offset"] and row["topic"] == BATCH_TOPIC)
    place = inner["physical_offset"]
    shown = run("messages", root, "--offset", str(place), "--jsonl").stdout.splitlines()
    assert len(shown) == sum(row["physical_offset"] == place for row in wanted)
    counted = json.loads(run("stats", root, "--json").stdout)["file_bytes"]
    files = [path for path in (root / "batchconsumequeue").rglob("*") if path.is_file()]
    assert counted["batchconsumequeue"] == sum(path.stat().st_size for path in files)
    assert counted == json.loads(run("info", root, "--json").stdout)["file_bytes"]


# ---------------------------------------------------------------------------------------- write
@pytest.mark.parametrize("name", BATCH_STORES)
def test_puts_continue_batch_queues(name: str, copied: Copied, rocketmq5: Path) -> None:
    root = copied(name)
    before = bytes_of(root / "batchconsumequeue")
    end = broker_queues(rocketmq5 / name)[BATCH_TOPIC, 1]["maxOffset"]
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.put(lq.Message(BATCH_TOPIC, b"one", queue_id=1)).queue_offset == end
        many = [
            lq.Message(BATCH_TOPIC, b"%d" % n, queue_id=1, tags="t", keys=f"k{n}") for n in range(5)
        ]
        put = store.put_batch(many)
        assert (put.queue_offset, put.message_count, len(put.starts)) == (end + 1, 5, 1)
        assert store.put(lq.Message(BATCH_TOPIC, b"last", queue_id=1)).queue_offset == end + 6
        assert store.put(lq.Message(BATCH_TOPIC, b"new", queue_id=7)).queue_offset == 0
        assert store.wait_dispatched(timeout=20)
        got = store.get(BATCH_TOPIC, 1, end).messages
        assert [m.body for m in got] == [b"one", b"0", b"1", b"2", b"3", b"4", b"last"]
        assert store.get(BATCH_TOPIC, 1, end + 3, 1).messages[0].keys == "k2"
    with lq.MessageStore.open(root) as store:
        stored = store.message_at(put.physical_offset)
        assert stored.sys_flag & 0xC0 == 0xC0
        assert stored.properties["INNER_NUM"] == "5"
        assert stored.properties["INNER_BASE"] == str(end + 1)
        assert [m.queue_offset for m in stored.unwrap()] == list(range(end + 1, end + 6))
    for path, data in before.items():
        assert (root / "batchconsumequeue" / path).read_bytes().startswith(data.rstrip(b"\0"))
    assert not (root / "consumequeue" / BATCH_TOPIC).exists()
    assert not verify_store(StoreLayout.open(root)).findings
    # A rebuild from the log gives the same bytes.
    written = bytes_of(root / "batchconsumequeue")
    rebuild(root, apply=True)
    assert bytes_of(root / "batchconsumequeue") == written


def test_a_wire_batch_without_a_unique_key_becomes_frames(copied: Copied) -> None:
    from logquarry.format import batch

    wire = batch.encode(batch.BatchItem(b"%d" % n, b"", 0) for n in range(3))
    with lq.MessageStore.open(copied("5.5.0-batchcq"), mode="rw") as store:
        put = store.put_batch(wire=wire, message=lq.Message(BATCH_TOPIC, b""))
        assert len(put.starts) == 3
        shared = lq.Message(BATCH_TOPIC, b"", properties={"UNIQ_KEY": "u"})
        inner = store.put_batch(wire=wire, message=shared)
        assert (len(inner.starts), inner.queue_offset) == (1, put.queue_offset + 3)
        with pytest.raises(lq.errors.MessageRejected, match="wire form"):
            store.put_batch(wire=b"\0" * 8 + wire, message=shared)
        assert store.put(lq.Message(BATCH_TOPIC, b"")).queue_offset == put.queue_offset + 6


def test_expired_files_of_batch_queues_are_deleted(copied: Copied) -> None:
    root = copied("5.5.0-batchcq")
    with lq.MessageStore.open(root, mode="rw") as store:
        for _ in range(60):
            store.put_batch([lq.Message(BATCH_TOPIC, b"x" * 1_000) for _ in range(4)])
    plan = lq.retain(root, RetentionRules(keep_bytes=1), apply=True)
    (_, gone), *_ = (one for one in plan.queues if one[0] == (BATCH_TOPIC, 0))
    assert gone and not (root / gone[0].path).exists()
    with lq.MessageStore.open(root) as store:
        bounds = store.queue_offsets(BATCH_TOPIC, 0)
        first = store.get(BATCH_TOPIC, 0, bounds.min).messages[0]
        assert first.queue_offset == bounds.min > 0
        assert first.physical_offset >= plan.new_min_offset
    assert not verify_store(StoreLayout.open(root)).has_damage


@pytest.mark.parametrize("name", BATCH_STORES)
def test_a_get_warns_of_a_gap(name: str, copied: Copied, caplog: pytest.LogCaptureFixture) -> None:
    """Damage has zeroed one entry in the middle of a batch queue."""
    store = copied(name)
    with lq.MessageStore.open(store) as reader:
        (topic, queue_id), *_ = [key for key in reader.queues() if key[0] == BATCH_TOPIC]
        messages = reader.queue_offsets(topic, queue_id).max
        assert len(reader.get(topic, queue_id, 0, 32).messages) == 32
    assert not [text for text in caplog.messages if "left out" in text]
    path = store / "batchconsumequeue" / topic / str(queue_id) / f"{0:020d}"
    data = bytearray(path.read_bytes())
    entry = np.frombuffer(data, BATCH_DTYPE, 3)[1]
    lost = range(int(entry["base"]), int(entry["base"] + entry["count"]))
    data[ENTRY_SIZE : 2 * ENTRY_SIZE] = bytes(ENTRY_SIZE)
    path.write_bytes(data)
    with lq.MessageStore.open(store) as reader:
        got, offset = [], 0
        while offset < reader.queue_offsets(topic, queue_id).max:
            result = reader.get(topic, queue_id, offset, 3)
            got += [message.queue_offset for message in result.messages]
            offset = result.next_offset
    assert got == [number for number in range(messages) if number not in lost]
    warnings = [text for text in caplog.messages if "left out" in text]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{path}: there is no entry at queue offset {lost.start}, but")


def test_a_get_does_not_warn_of_files_that_retention_deletes_during_a_read(
    copied: Copied, caplog: pytest.LogCaptureFixture
) -> None:
    root = copied("5.5.0-batchcq")
    with lq.MessageStore.open(root, mode="rw") as store:
        for _ in range(450):
            store.put_batch([lq.Message(BATCH_TOPIC, b"x", queue_id=0) for _ in range(4)])
    files = sorted((root / "batchconsumequeue" / BATCH_TOPIC / "0").iterdir())
    entries = np.frombuffer(files[3].read_bytes(), BATCH_DTYPE)
    stop = int(entries["base"][-1] + entries["count"][-1])
    with lq.MessageStore.open(root) as reader:
        assert reader.get(BATCH_TOPIC, 0, 0, 1).messages
        # The reader has not opened files[3] to find the first message.
        for file in files[:4]:
            file.unlink()
        found = reader.get(BATCH_TOPIC, 0, int(entries["base"][0]), 1)
        assert found.messages[0].queue_offset == stop
    assert not [text for text in caplog.messages if "left out" in text]
