"""Batch queues and inner batches of real RocketMQ 5 brokers: read, verified, written, recovered."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, UnsupportedStore
from logquarry.format import fastjson
from logquarry.log.filters import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.read.lost_messages import lost_messages
from logquarry.repair.rebuild.build import BuildJob, Built
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.plan import StepKind
from logquarry.repair.salvage.salvage import salvage
from logquarry.repair.verify.verify import verify_store
from logquarry.spark.options import ReadOptions
from logquarry.spark.tasks import plan_tasks, read_batches
from logquarry.store.retention.rules import RetentionRules
from tests.conformance.rocketmq5 import (
    broker_messages,
    broker_queues,
    expected_frames,
    rocketmq5_stores,
)
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store

STORES = ("5.1.4-batchcq", "5.5.0-batchcq")
TOPIC = "BatchCq"

Row = dict[str, Any]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rocketmq5_stores(tmp_path_factory)


def _row(message: lq.StoredMessage, like: Row) -> Row:
    found = {name: getattr(message, name) for name in like}
    return {**found, "properties": dict(message.properties)}


@pytest.mark.parametrize("name", STORES)
def test_each_message_is_a_row(name: str, stores: Path) -> None:
    wanted = broker_messages(stores / name)
    assert len(wanted) > len(expected_frames(stores / name))
    with lq.MessageStore.open(stores / name / "store") as store:
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


@pytest.mark.parametrize("name", STORES)
def test_get_gives_what_a_client_pulls(name: str, stores: Path) -> None:
    wanted = broker_messages(stores / name)
    with lq.MessageStore.open(stores / name / "store") as store:
        for (topic, queue_id), queue in broker_queues(stores / name).items():
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


@pytest.mark.parametrize("name", STORES)
def test_consumers_get_each_message_once(name: str, stores: Path) -> None:
    wanted = broker_messages(stores / name)
    with lq.MessageStore.open(stores / name / "store") as store:
        consumer = store.consumer("group", [TOPIC], timeout=0.01)
        found = sorted((m.queue_id, m.queue_offset) for m in consumer)
    rows = [row for row in wanted if row["topic"] == TOPIC]
    assert found == sorted((row["queue_id"], row["queue_offset"]) for row in rows)


@pytest.mark.parametrize("name", STORES)
def test_queues_made_from_the_log(name: str, stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / name, tmp_path)
    for folder in ("batchconsumequeue", "consumequeue"):
        shutil.rmtree(root / folder)
    with lq.MessageStore.open(stores / name / "store") as store:
        wanted = {key: store.get(*key, 0, 32).messages for key in store.queues()}
        tag = store.get(TOPIC, 0, 0, 1).messages[0].tags
        tagged = store.get(TOPIC, 0, 0, 32, tag).messages
    with lq.MessageStore.open(root) as store:
        assert {key: store.get(*key, 0, 32).messages for key in store.queues()} == wanted
        assert store.get(TOPIC, 0, 0, 32, tag).messages == tagged


def test_spark_tasks_read_the_same_rows(stores: Path) -> None:
    wanted = broker_messages(stores / "5.5.0-batchcq")
    root = str(stores / "5.5.0-batchcq" / "store")

    def rows(options: ReadOptions) -> list[tuple[str, int, int]]:
        tasks = plan_tasks(options)
        batches = [batch for task in tasks for batch in read_batches(task)]
        found = [row for batch in batches for row in batch.to_pylist()]
        return sorted((row["topic"], row["queue_id"], row["queue_offset"]) for row in found)

    every = sorted((row["topic"], row["queue_id"], row["queue_offset"]) for row in wanted)
    assert rows(ReadOptions(paths=(root,))) == every
    assert rows(ReadOptions(paths=(root,), min_partitions=7)) == every
    part = MessageFilter(topics=frozenset({TOPIC}), queue_offsets=(5, 20))
    some = [row for row in every if row[0] == TOPIC and 5 <= row[2] < 20]
    assert rows(ReadOptions(paths=(root,), wanted=part)) == some


def test_query_by_key_gives_messages_of_the_batch(stores: Path) -> None:
    rows = [r for r in expected_frames(stores / "5.5.0-batchcq") if r["sysFlag"] & 0x80]
    indexed = next(r for r in rows if "KEYS" in r["properties"])
    with lq.MessageStore.open(stores / "5.5.0-batchcq" / "store") as store:
        key = indexed["properties"]["KEYS"].split()[0]
        (found,) = store.query(TOPIC, key)
        assert found.keys == key and found.physical_offset == indexed["physicalOffset"]
        batch = store.query(TOPIC, indexed["properties"]["UNIQ_KEY"])
        assert len(batch) == int(indexed["properties"]["INNER_NUM"])


def test_time_of_a_batch(stores: Path) -> None:
    rows = [r for r in broker_messages(stores / "5.5.0-batchcq") if r["topic"] == TOPIC]
    rows = [r for r in rows if r["queue_id"] == 0]
    with lq.MessageStore.open(stores / "5.5.0-batchcq" / "store") as store:
        for time in {r["store_timestamp"] for r in rows}:
            first = next(r for r in rows if r["store_timestamp"] >= time)
            assert store.offset_by_time(TOPIC, 0, time) == first["queue_offset"]
        assert store.offset_by_time(TOPIC, 0, 0) == 0


def test_commands_count_and_show_messages(stores: Path) -> None:
    root = stores / "5.5.0-batchcq" / "store"
    wanted = broker_messages(stores / "5.5.0-batchcq")
    for options in ((), ("--exact",)):
        assert f"messages    {len(wanted)} in " in run("info", root, *options).stdout
    assert len(run("messages", root, "--jsonl").stdout.splitlines()) == len(wanted)
    inner = next(row for row in wanted if row["queue_offset"] and row["topic"] == TOPIC)
    place = inner["physical_offset"]
    shown = run("messages", root, "--offset", str(place), "--jsonl").stdout.splitlines()
    assert len(shown) == sum(row["physical_offset"] == place for row in wanted)
    counted = json.loads(run("stats", root, "--json").stdout)["file_bytes"]
    files = [path for path in (root / "batchconsumequeue").rglob("*") if path.is_file()]
    assert counted["batchconsumequeue"] == sum(path.stat().st_size for path in files)
    assert counted == json.loads(run("info", root, "--json").stdout)["file_bytes"]


# -------------------------------------------------------------------------------------- rebuild
def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", STORES)
def test_rebuilt_queues_have_the_bytes_of_the_broker(
    name: str, stores: Path, tmp_path: Path
) -> None:
    root, into = stores / name / "store", tmp_path / "new"
    report = rebuild(root, into=into)
    for folder in (f"batchconsumequeue/{TOPIC}", "consumequeue/Plain"):
        assert _files(into / folder) == _files(root / folder)
    assert sorted(path.name for path in (into / "consumequeue").iterdir()) == ["Plain"]
    assert report.queues is not None
    assert {(q.topic, q.queue_id): q.max_offset for q in report.queues} == {
        key: queue["maxOffset"] for key, queue in broker_queues(stores / name).items()
    }


def test_lost_batch_queues_are_rebuilt_in_place(stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    wanted = _files(root / "batchconsumequeue")
    shutil.rmtree(root / "batchconsumequeue" / TOPIC / "1")
    (first, *_) = sorted((root / "batchconsumequeue" / TOPIC / "0").iterdir())
    first.write_bytes(bytes(first.stat().st_size))
    assert verify_store(StoreLayout.open(root)).has_damage
    report = rebuild(root, apply=True)
    assert _files(root / "batchconsumequeue") == wanted
    assert report.quarantine is not None
    assert (Path(report.quarantine) / "batchconsumequeue" / TOPIC / "0").is_dir()
    assert not verify_store(StoreLayout.open(root)).has_damage


def _damage(root: Path, frame: Row) -> None:
    with (root / "commitlog" / ("0" * 20)).open("r+b") as file:
        file.seek(frame["physicalOffset"])
        file.write(b"damage")


def _check_gap(root: Path, lost: Row) -> None:
    """Entries leave no gap: the entry after the lost batch begins where that batch began."""
    key, count = (TOPIC, lost["queueId"]), int(lost["properties"]["INNER_NUM"])
    folder = root / "batchconsumequeue" / TOPIC / str(lost["queueId"])
    found = [e for path in sorted(folder.iterdir()) for e in _entries(path) if any(e)]
    numbers = [struct.unpack_from(">qhii", entry, 28) for entry in found]
    bases = [base for base, *_ in numbers]
    assert [base + counted for base, counted, *_ in numbers][:-1] == bases[1:]
    (filled,) = [number for number in numbers if number[3]]
    assert (filled[0], filled[3]) == (lost["queueOffset"], count)
    assert not {f.kind for f in verify_store(StoreLayout.open(root)).findings} & {
        "queue_hole",
        "queue_misplaced",
        "queue_entry_wrong",
    }
    with lq.MessageStore.open(root) as store:
        bounds = store.queue_offsets(*key)
        offset, got = bounds.min, []
        while offset < bounds.max:
            result = store.get(*key, offset)
            got += [message.queue_offset for message in result.messages]
            offset = result.next_offset
        gap = range(lost["queueOffset"], lost["queueOffset"] + count)
        assert got == [at for at in range(bounds.max) if at not in gap]


def _inner(scenario: Path, number: int) -> Row:
    return [row for row in expected_frames(scenario) if row["sysFlag"] & 0x80][number]


def test_a_rebuild_leaves_no_gap_between_batches(stores: Path, tmp_path: Path) -> None:
    root, lost = _copy(stores / "5.5.0-batchcq", tmp_path), _inner(stores / "5.5.0-batchcq", 20)
    _damage(root, lost)
    report = rebuild(root, apply=True)
    assert sum(queue.fillers for queue in report.queues or ()) == int(
        lost["properties"]["INNER_NUM"]
    )
    lq.recover(root, apply=True, accept_loss=1 << 20)
    _check_gap(root, lost)


def test_a_queue_whose_messages_expired_continues_where_it_ended(
    stores: Path, tmp_path: Path
) -> None:
    source = stores / "5.5.0-batchcq"
    root, into = _copy(source, tmp_path), tmp_path / "new"
    log = root / "commitlog" / ("0" * 20)
    # The log now begins with a later file, which has no message.
    log.rename(log.with_name(f"{131072:020d}"))
    log.with_name(f"{131072:020d}").write_bytes(bytes(131072))
    report = rebuild(root, into=into)
    assert _files(into / "batchconsumequeue") == _files(root / "batchconsumequeue")
    ends = {(q.topic, q.queue_id): q for q in report.queues or ()}
    for key, queue in broker_queues(source).items():
        assert ends[key].is_taken_over and ends[key].max_offset == queue["maxOffset"]


def test_spark_does_not_rebuild_batch_queues(stores: Path, tmp_path: Path) -> None:
    def build(job: BuildJob, progress: object) -> Built:
        raise AssertionError("the store is refused before")

    root = stores / "5.5.0-batchcq" / "store"
    with pytest.raises(UnsupportedStore, match="without Spark"):
        rebuild(root, into=tmp_path / "new", builder=build)
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------------------------------- write
@pytest.mark.parametrize("name", STORES)
def test_puts_continue_batch_queues(name: str, stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / name, tmp_path)
    before = _files(root / "batchconsumequeue")
    end = broker_queues(stores / name)[TOPIC, 1]["maxOffset"]
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.put(lq.Message(TOPIC, b"one", queue_id=1)).queue_offset == end
        many = [lq.Message(TOPIC, b"%d" % n, queue_id=1, tags="t", keys=f"k{n}") for n in range(5)]
        put = store.put_batch(many)
        assert (put.queue_offset, put.message_count, len(put.starts)) == (end + 1, 5, 1)
        assert store.put(lq.Message(TOPIC, b"last", queue_id=1)).queue_offset == end + 6
        assert store.put(lq.Message(TOPIC, b"new", queue_id=7)).queue_offset == 0
        assert store.wait_dispatched(timeout=20)
        got = store.get(TOPIC, 1, end).messages
        assert [m.body for m in got] == [b"one", b"0", b"1", b"2", b"3", b"4", b"last"]
        assert store.get(TOPIC, 1, end + 3, 1).messages[0].keys == "k2"
    with lq.MessageStore.open(root) as store:
        stored = store.message_at(put.physical_offset)
        assert stored.sys_flag & 0xC0 == 0xC0
        assert stored.properties["INNER_NUM"] == "5"
        assert stored.properties["INNER_BASE"] == str(end + 1)
        assert [m.queue_offset for m in stored.unwrap()] == list(range(end + 1, end + 6))
    for path, data in before.items():
        assert (root / "batchconsumequeue" / path).read_bytes().startswith(data.rstrip(b"\0"))
    assert not (root / "consumequeue" / TOPIC).exists()
    assert not verify_store(StoreLayout.open(root)).findings
    # A rebuild from the log gives the same bytes.
    written = _files(root / "batchconsumequeue")
    rebuild(root, apply=True)
    assert _files(root / "batchconsumequeue") == written


def test_a_wire_batch_without_a_unique_key_becomes_frames(stores: Path, tmp_path: Path) -> None:
    from logquarry.format import batch

    wire = batch.encode(batch.BatchItem(b"%d" % n, b"", 0) for n in range(3))
    with lq.MessageStore.open(_copy(stores / "5.5.0-batchcq", tmp_path), mode="rw") as store:
        put = store.put_batch(wire=wire, message=lq.Message(TOPIC, b""))
        assert len(put.starts) == 3
        shared = lq.Message(TOPIC, b"", properties={"UNIQ_KEY": "u"})
        inner = store.put_batch(wire=wire, message=shared)
        assert (len(inner.starts), inner.queue_offset) == (1, put.queue_offset + 3)
        with pytest.raises(lq.errors.MessageRejected, match="wire form"):
            store.put_batch(wire=b"\0" * 8 + wire, message=shared)
        assert store.put(lq.Message(TOPIC, b"")).queue_offset == put.queue_offset + 6


def test_expired_files_of_batch_queues_are_deleted(stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    with lq.MessageStore.open(root, mode="rw") as store:
        for _ in range(60):
            store.put_batch([lq.Message(TOPIC, b"x" * 1_000) for _ in range(4)])
    plan = lq.retain(root, RetentionRules(keep_bytes=1), apply=True)
    (_, gone), *_ = (one for one in plan.queues if one[0] == (TOPIC, 0))
    assert gone and not (root / gone[0].path).exists()
    with lq.MessageStore.open(root) as store:
        bounds = store.queue_offsets(TOPIC, 0)
        first = store.get(TOPIC, 0, bounds.min).messages[0]
        assert first.queue_offset == bounds.min > 0
        assert first.physical_offset >= plan.new_min_offset
    assert not verify_store(StoreLayout.open(root)).has_damage


# -------------------------------------------------------------------------------------- recover
def test_queues_cut_in_the_middle_are_recovered(stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    wanted = _files(root / "batchconsumequeue")
    for queue_id, at in ((0, 10), (1, 0)):
        path = root / "batchconsumequeue" / TOPIC / str(queue_id) / ("0" * 20)
        found = _entries(path)
        found[at][:] = bytes(46)
        path.write_bytes(b"".join(found))
    (root / "abort").touch()
    plan = lq.recover(root, apply=True)
    assert {step.offset for step in plan.steps if step.kind is StepKind.BUILD_QUEUE} == {0, 460}
    assert _files(root / "batchconsumequeue") == wanted
    assert not lq.recover(root).is_needed


def test_a_recovery_keeps_entries_of_lost_batches(stores: Path, tmp_path: Path) -> None:
    scenario = stores / "5.5.0-batchcq"
    root, lost = _copy(scenario, tmp_path), _inner(scenario, 20)
    wanted = _files(root / "batchconsumequeue")
    _damage(root, lost)
    lq.recover(root, apply=True, accept_loss=1 << 20)
    assert _files(root / "batchconsumequeue") == wanted
    shutil.rmtree(root / "batchconsumequeue")
    lq.recover(root, apply=True, accept_loss=1 << 20)
    _check_gap(root, lost)


def test_simple_queues_of_a_batch_topic_are_moved_away(stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    shutil.copytree(root / "consumequeue" / "Plain", root / "consumequeue" / TOPIC)
    assert "queue_misplaced" in {f.kind for f in verify_store(StoreLayout.open(root)).findings}
    lq.recover(root, apply=True)
    assert not (root / "consumequeue" / TOPIC).exists()
    assert not verify_store(StoreLayout.open(root)).findings


def test_salvage_makes_batch_queues(stores: Path, tmp_path: Path) -> None:
    scenario = stores / "5.5.0-batchcq"
    root, lost = _copy(scenario, tmp_path), _inner(scenario, 20)
    _damage(root, lost)
    for name in ("batchconsumequeue", "config"):
        shutil.copytree(root / name, tmp_path / "kept" / name)
    (root / "config" / "topics.json").unlink()
    salvage(StoreLayout.open(root), tmp_path / "new")
    _check_gap(tmp_path / "new", lost)
    topics = fastjson.decode((tmp_path / "new" / "config" / "topics.json").read_bytes())
    assert topics["topicConfigTable"][TOPIC]["attributes"] == {"queue.type": "BatchCQ"}


# --------------------------------------------------------------------------------------- verify
def _copy(scenario: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("timerwheel*")
    return copy_store(scenario / "store", tmp_path / "store", ignore=ignored)


@pytest.mark.parametrize("name", STORES)
def test_sound_stores_have_no_damage(name: str, stores: Path) -> None:
    report = verify_store(StoreLayout.open(stores / name / "store"))
    assert not report.findings
    assert report.counts["queue_entries"] == len(expected_frames(stores / name))


def _entries(path: Path) -> list[bytearray]:
    data = path.read_bytes()
    return [bytearray(data[at : at + 46]) for at in range(0, len(data), 46)]


def _swapped(found: list[bytearray]) -> None:
    found[2], found[3] = found[3], found[2]


def _emptied(found: list[bytearray]) -> None:
    found[3][:] = bytes(46)


def _moved(found: list[bytearray]) -> None:
    found[3][:8] = struct.pack(">q", struct.unpack_from(">q", found[3])[0] + 1)


def _counted(found: list[bytearray]) -> None:
    found[2][36:38] = struct.pack(">h", struct.unpack_from(">h", found[2], 36)[0] - 1)


def _of_another_queue(found: list[bytearray]) -> None:
    found[1][:] = found[0]


def _cut(found: list[bytearray]) -> None:
    for entry in found[-8:]:
        entry[:] = bytes(46)


@pytest.mark.parametrize(
    ("harm", "file", "kinds"),
    [
        (_swapped, 0, {"queue_hole", "queue_misplaced"}),
        (_emptied, 0, {"queue_hole"}),
        (_moved, 0, {"queue_entry_wrong"}),
        (_counted, 0, {"queue_entry_wrong"}),
        (_of_another_queue, 0, {"queue_hole", "queue_misplaced"}),
        (_cut, 0, {"queue_hole"}),
    ],
)
def test_harm_to_a_batch_queue_is_found(
    harm: Any, file: int, kinds: set[str], stores: Path, tmp_path: Path
) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    path = sorted((root / "batchconsumequeue" / TOPIC / "0").iterdir())[file]
    found = _entries(path)
    harm(found)
    path.write_bytes(b"".join(found))
    report = verify_store(StoreLayout.open(root))
    assert {finding.kind for finding in report.findings} == kinds
    for finding in report.findings:
        assert finding.file == str(path.relative_to(root))
    # Reading by queue offset neither crashes nor gives a message of another offset.
    with lq.MessageStore.open(root) as store:
        offset = 0
        for _ in range(200):
            try:
                result = store.get(TOPIC, 0, offset)
            except CorruptFrame:
                offset += 1
                continue
            assert all(m.queue_offset >= offset for m in result.messages)
            if result.next_offset <= offset:
                break
            offset = result.next_offset


def test_missing_parts_of_a_batch_queue_are_found(stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    queue = root / "batchconsumequeue" / TOPIC / "1"
    last = sorted(queue.iterdir())[-1]
    last.write_bytes(bytes(last.stat().st_size))
    kinds = {finding.kind for finding in verify_store(StoreLayout.open(root)).findings}
    assert kinds == {"queue_behind"}
    shutil.rmtree(queue)
    kinds = {finding.kind for finding in verify_store(StoreLayout.open(root)).findings}
    assert kinds == {"queue_missing"}


# ----------------------------------------------------------------------------- lost parts of a log
def _cut_log(root: Path, place: int) -> None:
    """Zeros from a physical offset on, in a log of one file."""
    log = root / "commitlog" / ("0" * 20)
    data = log.read_bytes()
    log.write_bytes(data[:place] + bytes(len(data) - place))


def test_lost_messages_of_batches_are_counted(stores: Path, tmp_path: Path) -> None:
    source = stores / "5.5.0-batchcq"
    root = _copy(source, tmp_path)
    frames = expected_frames(source)
    place = frames[len(frames) // 2]["physicalOffset"]
    lost = [row for row in broker_messages(source) if row["physical_offset"] >= place]
    assert len(lost) > len(frames) - len(frames) // 2
    with lq.MessageStore.open(root) as store:
        end = store.max_offset
    _cut_log(root, place)
    assert lost_messages(StoreLayout.open(root), (), place) == (len(lost), end - place)


def test_a_rebuild_does_not_hide_lost_messages(stores: Path, tmp_path: Path) -> None:
    source = stores / "5.5.0-batchcq"
    root = _copy(source, tmp_path)
    # Only batch queues name the messages from here on.
    place = max(f["physicalOffset"] for f in expected_frames(source) if not f["sysFlag"] & 0x80)
    lost = [row for row in broker_messages(source) if row["physical_offset"] > place]
    frames = {row["physical_offset"] for row in lost}
    _cut_log(root, min(frames))
    before = _files(root)
    with pytest.raises(LossRefused) as raised:
        rebuild(root, apply=True)
    assert raised.value.loss.messages == len(lost) > len(frames)
    after = _files(root)
    after.pop("lock", None), before.pop("lock", None)
    assert after == before


def test_a_store_with_batch_queues_and_no_log_is_refused(stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    shutil.rmtree(root / "consumequeue")
    (root / "checkpoint").unlink()
    for file in (root / "commitlog").iterdir():
        file.unlink()
    with pytest.raises(UnsupportedStore, match="the queues point to"):
        lq.MessageStore.open(root)
