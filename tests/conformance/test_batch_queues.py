"""Batch queues and inner batches of real RocketMQ 5 brokers: read, got, consumed, verified."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, UnsupportedStore
from logquarry.log.filters import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.read.lost_messages import lost_messages
from logquarry.repair.rebuild.build import BuildJob, Built
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.verify.verify import verify_store
from logquarry.spark.options import ReadOptions
from logquarry.spark.tasks import plan_tasks, read_batches
from tests.conformance.rocketmq5 import (
    broker_messages,
    broker_queues,
    expected_frames,
    unpack_rocketmq5,
)
from tests.helpers.command import run

STORES = ("5.1.4-batchcq", "5.5.0-batchcq")
TOPIC = "BatchCq"

Row = dict[str, Any]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_rocketmq5(tmp_path_factory.mktemp("batchqueues"))


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


def test_a_rebuild_refuses_a_gap_between_batches(stores: Path, tmp_path: Path) -> None:
    root = _copy(stores / "5.5.0-batchcq", tmp_path)
    lost = [r for r in expected_frames(stores / "5.5.0-batchcq") if r["sysFlag"] & 0x80][20]
    log = root / "commitlog" / ("0" * 20)
    with log.open("r+b") as file:
        file.seek(lost["physicalOffset"])
        file.write(b"damage")
    before = _files(root)
    with pytest.raises(UnsupportedStore, match="lost messages") as raised:
        rebuild(root, apply=True)
    assert raised.value.feature == "batch_queues"
    after = _files(root)
    after.pop("lock", None), before.pop("lock", None)
    assert after == before
    # The index needs no batch queues.
    assert rebuild(root, apply=True, queues=False).keys


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


# --------------------------------------------------------------------------------------- verify
def _copy(scenario: Path, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("timerwheel*")
    return Path(shutil.copytree(scenario / "store", tmp_path / "store", ignore=ignored))


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
