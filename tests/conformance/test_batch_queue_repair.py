"""Batch queues of real RocketMQ 5 brokers: verified, rebuilt, recovered and salvaged."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, UnsupportedStore
from logquarry.format import broker_json, sys_flag
from logquarry.format.frame import HEAD
from logquarry.log.layout import StoreLayout
from logquarry.read.log_end import lost_messages
from logquarry.repair.rebuild.build import BuildJob, Built
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.recover.plan import StepKind
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.conformance.rocketmq5 import (
    BATCH_STORES,
    BATCH_TOPIC,
    LOCK,
    Copied,
    Row,
    broker_messages,
    broker_queues,
    expected_frames,
    state_of,
)
from tests.helpers.files import bytes_of, overwrite, zero


@pytest.fixture
def damaged(copied: Copied, rocketmq5: Path) -> tuple[Path, Row]:
    """A store whose log has one damaged frame with an inner batch, and this frame."""
    root = copied("5.5.0-batchcq")
    inner = [row for row in expected_frames(rocketmq5 / "5.5.0-batchcq") if row["sysFlag"] & 0x80]
    overwrite(root / "commitlog" / ("0" * 20), inner[20]["physicalOffset"], b"damage")
    return root, inner[20]


# -------------------------------------------------------------------------------------- rebuild
@pytest.mark.parametrize("name", BATCH_STORES)
def test_rebuilt_queues_have_the_bytes_of_the_broker(
    name: str, rocketmq5: Path, tmp_path: Path
) -> None:
    root, into = rocketmq5 / name / "store", tmp_path / "new"
    report = rebuild(root, into=into)
    for folder in (f"batchconsumequeue/{BATCH_TOPIC}", "consumequeue/Plain"):
        assert bytes_of(into / folder) == bytes_of(root / folder)
    assert sorted(path.name for path in (into / "consumequeue").iterdir()) == ["Plain"]
    assert report.queues is not None
    assert {(q.topic, q.queue_id): q.max_offset for q in report.queues} == {
        key: queue["maxOffset"] for key, queue in broker_queues(rocketmq5 / name).items()
    }


@pytest.mark.parametrize("name", BATCH_STORES)
@pytest.mark.parametrize("number", [0, 7, -1])
@pytest.mark.parametrize("is_inner", [False, True])
def test_a_frame_with_a_harmed_transaction_type_keeps_its_place(
    is_inner: bool, number: int, name: str, copied: Copied, rocketmq5: Path, tmp_path: Path
) -> None:
    """No CRC covers SYSFLAG, but the queue has the frame's entry."""
    root = copied(name)
    frames = [row for row in expected_frames(rocketmq5 / name) if row["topic"] == BATCH_TOPIC]
    row = [row for row in frames if bool(row["sysFlag"] & 0x80) is is_inner][number]
    place, flag = row["physicalOffset"], row["sysFlag"] | sys_flag.TRANSACTION_PREPARED
    log, entries = root / "commitlog" / ("0" * 20), bytes_of(root / "batchconsumequeue")
    sound = log.read_bytes()
    overwrite(log, place + HEAD.offsets["sys_flag"], flag.to_bytes(4))
    found = [one for one in verify_store(StoreLayout.open(root)).findings if one.offset == place]
    assert [one.kind for one in found] == ["harmed_transaction_type"]
    assert not lq.recover(root).is_needed
    assert rebuild(root, apply=True).is_applied
    assert bytes_of(root / "batchconsumequeue") == entries
    assert salvage_store(StoreLayout.open(root), tmp_path / "new").is_whole
    end = verify_store(StoreLayout.open(root)).counts["max_offset"]
    assert (tmp_path / "new" / "commitlog" / log.name).read_bytes()[:end] == sound[:end]


def test_lost_batch_queues_are_rebuilt_in_place(copied: Copied) -> None:
    root = copied("5.5.0-batchcq")
    wanted = bytes_of(root / "batchconsumequeue")
    shutil.rmtree(root / "batchconsumequeue" / BATCH_TOPIC / "1")
    (first, *_) = sorted((root / "batchconsumequeue" / BATCH_TOPIC / "0").iterdir())
    zero(first, 0)
    assert verify_store(StoreLayout.open(root)).has_damage
    report = rebuild(root, apply=True)
    assert bytes_of(root / "batchconsumequeue") == wanted
    assert report.quarantine is not None
    assert (Path(report.quarantine) / "batchconsumequeue" / BATCH_TOPIC / "0").is_dir()
    assert not verify_store(StoreLayout.open(root)).has_damage


def _check_gap(root: Path, lost: Row) -> None:
    """Entries leave no gap: the entry after the lost batch begins where that batch began."""
    key, count = (BATCH_TOPIC, lost["queueId"]), int(lost["properties"]["INNER_NUM"])
    folder = root / "batchconsumequeue" / BATCH_TOPIC / str(lost["queueId"])
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


def test_a_rebuild_leaves_no_gap_between_batches(damaged: tuple[Path, Row]) -> None:
    root, lost = damaged
    report = rebuild(root, apply=True)
    count = int(lost["properties"]["INNER_NUM"])
    assert sum(queue.fillers for queue in report.queues or ()) == count
    lq.recover(root, apply=True, accept_loss=1 << 20)
    _check_gap(root, lost)


def expire(root: Path) -> None:
    """Let the log begin with a later file, which has no message."""
    log = root / "commitlog"
    (log / ("0" * 20)).unlink()
    (log / f"{131072:020d}").write_bytes(bytes(131072))


def test_a_queue_whose_messages_expired_continues_where_it_ended(
    copied: Copied, rocketmq5: Path, tmp_path: Path
) -> None:
    source = rocketmq5 / "5.5.0-batchcq"
    root, into = copied("5.5.0-batchcq"), tmp_path / "new"
    expire(root)
    report = rebuild(root, into=into)
    assert bytes_of(into / "batchconsumequeue") == bytes_of(root / "batchconsumequeue")
    ends = {(q.topic, q.queue_id): q for q in report.queues or ()}
    for key, queue in broker_queues(source).items():
        assert ends[key].is_taken_over and ends[key].max_offset == queue["maxOffset"]


def test_spark_does_not_rebuild_batch_queues(rocketmq5: Path, tmp_path: Path) -> None:
    def build(job: BuildJob, progress: object) -> Built:
        raise AssertionError("the store is refused before")

    root = rocketmq5 / "5.5.0-batchcq" / "store"
    with pytest.raises(UnsupportedStore, match="without Spark"):
        rebuild(root, into=tmp_path / "new", builder=build)
    assert not (tmp_path / "new").exists()


# -------------------------------------------------------------------------------------- recover
def test_queues_cut_in_the_middle_are_recovered(copied: Copied) -> None:
    root = copied("5.5.0-batchcq")
    wanted = bytes_of(root / "batchconsumequeue")
    for queue_id, at in ((0, 10), (1, 0)):
        path = root / "batchconsumequeue" / BATCH_TOPIC / str(queue_id) / ("0" * 20)
        found = _entries(path)
        found[at][:] = bytes(46)
        path.write_bytes(b"".join(found))
    (root / "abort").touch()
    plan = lq.recover(root, apply=True)
    assert {step.offset for step in plan.steps if step.kind is StepKind.BUILD_QUEUE} == {0, 460}
    assert bytes_of(root / "batchconsumequeue") == wanted
    assert not lq.recover(root).is_needed


@pytest.mark.parametrize("is_opened", [False, True])
def test_zeroed_entries_of_lost_batches_are_recovered(is_opened: bool, copied: Copied) -> None:
    """The first file of a queue ends in zeros, and its last messages are lost."""
    root = copied("5.5.0-batchcq")
    first = root / "batchconsumequeue" / BATCH_TOPIC / "1" / ("0" * 20)
    at = 43 * 46
    for entry in _entries(first)[43:]:
        (place,) = struct.unpack_from(">q", entry)
        overwrite(root / "commitlog" / ("0" * 20), place, b"damage")
    zero(first, at)
    (root / "abort").touch()
    plan = lq.recover(root)
    folder = f"batchconsumequeue/{BATCH_TOPIC}/1"
    steps = {step.kind: step.offset for step in plan.steps if step.file == folder}
    assert steps == {StepKind.CUT: at, StepKind.BUILD_QUEUE: at}
    if is_opened:
        lq.MessageStore.open(root, mode="rw", accept_loss=1 << 20).close()
    else:
        lq.recover(root, apply=True, accept_loss=1 << 20)
    kinds = {finding.kind for finding in verify_store(StoreLayout.open(root)).findings}
    assert not {kind for kind in kinds if kind.startswith("queue")}
    with lq.MessageStore.open(root) as store:
        assert store.queue_offsets(BATCH_TOPIC, 1).max > 162


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("zeroed", [(10,), (0,), (48, 49), (3, 4, 5, 20)])
def test_zeroed_entries_of_expired_batches_get_a_bridge(
    zeroed: tuple[int, ...], is_rebuilt: bool, copied: Copied
) -> None:
    """The log has no message of the queue. A broker would end the queue at the zeroed entry."""
    root = copied("5.5.0-batchcq")
    expire(root)
    lq.recover(root, apply=True)
    path = root / "batchconsumequeue" / BATCH_TOPIC / "1" / ("0" * 20)
    wanted, found = _entries(path), _entries(path)
    for number in zeroed:
        found[number][:] = bytes(46)
    path.write_bytes(b"".join(found))
    assert "queue_hole" in {f.kind for f in verify_store(StoreLayout.open(root)).findings}
    if is_rebuilt:
        rebuild(root, apply=True)
    else:
        plan = lq.recover(root)
        (step,) = plan.steps
        assert (step.kind, step.offset) == (StepKind.BUILD_QUEUE, zeroed[0] * 46)
        lq.recover(root, apply=True)
    for number, (entry, before) in enumerate(zip(_entries(path), wanted, strict=True)):
        if number not in zeroed:
            assert entry == before
    if zeroed != (0,):
        # The bridges cover the queue offsets of the zeroed entries, and no others.
        numbers = [struct.unpack_from(">qhi", entry, 28) for entry in _entries(path)]
        assert [base + count for base, count, _ in numbers][:-1] == [b for b, *_ in numbers][1:]
    assert not verify_store(StoreLayout.open(root)).has_damage
    assert not lq.recover(root).is_needed
    with lq.MessageStore.open(root) as store:
        assert store.queue_offsets(BATCH_TOPIC, 1).max == 192
        assert not store.get(BATCH_TOPIC, 1, 0).messages


@pytest.mark.parametrize("wrong", [1, 2])
@pytest.mark.parametrize("first", [0, 10])
def test_no_bridge_leads_to_an_entry_that_is_cut_off(
    first: int, wrong: int, copied: Copied
) -> None:
    """The wrong entry after the zeroed ones would give the bridge its queue offsets."""
    root = copied("5.5.0-batchcq")
    expire(root)
    lq.recover(root, apply=True)
    path = root / "batchconsumequeue" / BATCH_TOPIC / "1" / ("0" * 20)
    found = _entries(path)
    end = struct.unpack_from(">q", found[first], 28)[0] if first else 0
    found[first][:] = found[first + 1][:] = bytes(46)
    struct.pack_into(">q", found[first + wrong], 0, 1 << 40)
    path.write_bytes(b"".join(found))
    lq.recover(root, apply=True, accept_loss=1 << 30)
    assert not lq.recover(root).is_needed
    assert not verify_store(StoreLayout.open(root)).has_damage
    with lq.MessageStore.open(root) as store:
        assert store.queue_offsets(BATCH_TOPIC, 1).max == end


def committed(root: Path, offset: int) -> None:
    table = {f"{BATCH_TOPIC}@group": {"1": offset}}
    text = json.dumps({"offsetTable": table})
    (root / "config" / "consumerOffset.json").write_text(text)


@pytest.mark.parametrize(
    ("harm", "read", "end"),
    [
        ("first", 3, 192),
        ("last short", 0, None),
        ("last short", 190, 190),
        ("last gone", 170, 170),
        ("all", 150, 150),
        ("all", 0, 0),
    ],
)
def test_an_expired_batch_queue_with_unusable_files(
    harm: str, read: int, end: int | None, copied: Copied
) -> None:
    """Its last entry, or else the offsets of consumers, show at least where it ended."""
    root = copied("5.5.0-batchcq")
    expire(root)
    lq.recover(root, apply=True)
    committed(root, read)
    first, last = sorted((root / "batchconsumequeue" / BATCH_TOPIC / "1").iterdir())
    if harm == "first":
        first.write_bytes(first.read_bytes()[:920])
    elif harm == "last short":
        last.write_bytes(last.read_bytes()[:46])
        base, count = struct.unpack_from(">qh", last.read_bytes(), 28)
        end = end or base + count
    elif harm == "last gone":
        last.write_bytes(bytes(100))
        first.write_bytes(first.read_bytes()[:920])
    else:
        first.write_bytes(b"")
        last.write_bytes(bytes(7))
    plan = lq.recover(root, apply=True)
    is_told = any("the files of queue 1 of" in line for line in plan.looked_at)
    assert is_told == (harm != "first")
    assert not lq.recover(root).is_needed
    assert not verify_store(StoreLayout.open(root)).has_damage
    with lq.MessageStore.open(root) as store:
        assert store.queue_offsets(BATCH_TOPIC, 1).max == end


@pytest.mark.parametrize("value", [0, 3, 1 << 30, 1 << 60])
@pytest.mark.parametrize("number", [0, 20, -1])
def test_a_harmed_queue_offset_of_a_batch_costs_no_message(
    number: int, value: int, copied: Copied, rocketmq5: Path, tmp_path: Path
) -> None:
    """Otherwise the topic would seem to be recreated, and the queue would lose its entries."""
    rows = expected_frames(rocketmq5 / "5.5.0-batchcq")
    row = [one for one in rows if one["topic"] == BATCH_TOPIC and one["queueId"] == 0][number]
    # Not harmed, or at the queue's end, where no next frame shows the damage.
    if value == row["queueOffset"] or (number == -1 and value in (0, 1 << 30)):
        return
    root, place = copied("5.5.0-batchcq"), row["physicalOffset"]
    wanted = bytes_of(root / "batchconsumequeue")
    log = root / "commitlog" / ("0" * 20)
    overwrite(log, place + HEAD.offsets["queue_offset"], value.to_bytes(8, "big"))
    found = lq.verify(root).findings
    assert [(one.kind, one.offset) for one in found] == [("harmed_queue_offset", place)]
    assert not lq.recover(root).is_needed
    salvage_store(StoreLayout.open(root), tmp_path / "salvaged")
    assert not lq.verify(tmp_path / "salvaged").findings
    with lq.MessageStore.open(tmp_path / "salvaged") as store:
        bounds = store.queue_offsets(BATCH_TOPIC, 0)
        got: list[int] = []
        while len(got) < bounds.max:
            answer = store.get(BATCH_TOPIC, 0, len(got)).messages
            got += [message.queue_offset for message in answer]
            assert answer
    assert got == list(range(bounds.max)) and bounds.min == 0
    assert not {left.physical_offset for left in rebuild(root, apply=True).left_out}
    assert bytes_of(root / "batchconsumequeue") == wanted
    shutil.rmtree(root / "batchconsumequeue" / BATCH_TOPIC / "0")
    lq.recover(root, apply=True)
    assert bytes_of(root / "batchconsumequeue") == wanted


def test_a_batch_without_a_place_is_named_with_its_own_queue_offset(
    copied: Copied, rocketmq5: Path, tmp_path: Path
) -> None:
    rows = expected_frames(rocketmq5 / "5.5.0-batchcq")
    row = [one for one in rows if one["topic"] == BATCH_TOPIC and one["queueId"] == 1][10]
    root, place = copied("5.5.0-batchcq"), row["physicalOffset"]
    overwrite(root / "commitlog" / ("0" * 20), place + HEAD.offsets["queue_id"], bytes(4))
    [left] = rebuild(root, into=tmp_path / "new").left_out
    assert (left.queue_id, left.queue_offset) == (0, row["queueOffset"])
    assert left.physical_offset == place and "queue id" in left.reason


def test_a_recovery_keeps_entries_of_lost_batches(damaged: tuple[Path, Row]) -> None:
    root, lost = damaged
    wanted = bytes_of(root / "batchconsumequeue")
    lq.recover(root, apply=True, accept_loss=1 << 20)
    assert bytes_of(root / "batchconsumequeue") == wanted
    shutil.rmtree(root / "batchconsumequeue")
    lq.recover(root, apply=True, accept_loss=1 << 20)
    _check_gap(root, lost)


def test_simple_queues_of_a_batch_topic_are_moved_away(copied: Copied) -> None:
    root = copied("5.5.0-batchcq")
    shutil.copytree(root / "consumequeue" / "Plain", root / "consumequeue" / BATCH_TOPIC)
    assert "queue_misplaced" in {f.kind for f in verify_store(StoreLayout.open(root)).findings}
    lq.recover(root, apply=True)
    assert not (root / "consumequeue" / BATCH_TOPIC).exists()
    assert not verify_store(StoreLayout.open(root)).findings


def test_salvage_makes_batch_queues(damaged: tuple[Path, Row], tmp_path: Path) -> None:
    root, lost = damaged
    (root / "config" / "topics.json").unlink()
    salvage_store(StoreLayout.open(root), tmp_path / "new")
    _check_gap(tmp_path / "new", lost)
    topics = broker_json.decode((tmp_path / "new" / "config" / "topics.json").read_bytes())
    assert topics["topicConfigTable"][BATCH_TOPIC]["attributes"] == {"queue.type": "BatchCQ"}


# --------------------------------------------------------------------------------------- verify
@pytest.mark.parametrize("name", BATCH_STORES)
def test_sound_stores_have_no_damage(name: str, rocketmq5: Path) -> None:
    report = verify_store(StoreLayout.open(rocketmq5 / name / "store"))
    assert not report.findings
    assert report.counts["queue_entries"] == len(expected_frames(rocketmq5 / name))


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
    ("harm", "kinds"),
    [
        (_swapped, {"queue_hole", "queue_misplaced"}),
        (_emptied, {"queue_hole"}),
        (_moved, {"queue_entry_wrong"}),
        (_counted, {"queue_entry_wrong"}),
        (_of_another_queue, {"queue_hole", "queue_misplaced"}),
        (_cut, {"queue_hole"}),
    ],
)
def test_harm_to_a_batch_queue_is_found(harm: Any, kinds: set[str], copied: Copied) -> None:
    root = copied("5.5.0-batchcq")
    path = min((root / "batchconsumequeue" / BATCH_TOPIC / "0").iterdir())
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
                result = store.get(BATCH_TOPIC, 0, offset)
            except CorruptFrame:
                offset += 1
                continue
            assert all(m.queue_offset >= offset for m in result.messages)
            if result.next_offset <= offset:
                break
            offset = result.next_offset


def test_missing_parts_of_a_batch_queue_are_found(copied: Copied) -> None:
    root = copied("5.5.0-batchcq")
    queue = root / "batchconsumequeue" / BATCH_TOPIC / "1"
    zero(max(queue.iterdir()), 0)
    kinds = {finding.kind for finding in verify_store(StoreLayout.open(root)).findings}
    assert kinds == {"queue_behind"}
    shutil.rmtree(queue)
    kinds = {finding.kind for finding in verify_store(StoreLayout.open(root)).findings}
    assert kinds == {"queue_missing"}


# ----------------------------------------------------------------------------- lost parts of a log
def test_lost_messages_of_batches_are_counted(copied: Copied, rocketmq5: Path) -> None:
    source = rocketmq5 / "5.5.0-batchcq"
    root = copied("5.5.0-batchcq")
    frames = expected_frames(source)
    place = frames[len(frames) // 2]["physicalOffset"]
    lost = [row for row in broker_messages(source) if row["physical_offset"] >= place]
    assert len(lost) > len(frames) - len(frames) // 2
    with lq.MessageStore.open(root) as store:
        end = store.max_offset
    zero(root / "commitlog" / ("0" * 20), place)
    assert lost_messages(StoreLayout.open(root), (), place) == (len(lost), end - place)


def test_a_rebuild_does_not_hide_lost_messages(copied: Copied, rocketmq5: Path) -> None:
    source = rocketmq5 / "5.5.0-batchcq"
    root = copied("5.5.0-batchcq")
    # Only batch queues name the messages from here on.
    place = max(f["physicalOffset"] for f in expected_frames(source) if not f["sysFlag"] & 0x80)
    lost = [row for row in broker_messages(source) if row["physical_offset"] > place]
    frames = {row["physical_offset"] for row in lost}
    zero(root / "commitlog" / ("0" * 20), min(frames))
    before = state_of(root, *LOCK)
    with pytest.raises(LossRefused) as raised:
        rebuild(root, apply=True)
    assert raised.value.loss.messages == len(lost) > len(frames)
    assert state_of(root, *LOCK) == before


def test_a_store_with_batch_queues_and_no_log_is_refused(copied: Copied) -> None:
    root = copied("5.5.0-batchcq")
    shutil.rmtree(root / "consumequeue")
    (root / "checkpoint").unlink()
    for file in (root / "commitlog").iterdir():
        file.unlink()
    with pytest.raises(UnsupportedStore, match="the queues point to"):
        lq.MessageStore.open(root)
