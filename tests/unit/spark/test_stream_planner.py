"""The streaming source without Spark: the messages that a query reads, batch by batch."""

from __future__ import annotations

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader
from tests.helpers.files import flip
from tests.helpers.small_store import facts, held_by_a_broker, opened
from tests.helpers.store_maker import FIRST_TIME
from tests.helpers.stream import Stream, batch_places, made
from tests.spark.golden_rows import golden_messages, harmed_stores, sound_stores, whole_messages


def places_of(messages: list[dict[str, Any]], broker: str = "store") -> list[tuple[str, int]]:
    return sorted((broker, m["physical_offset"]) for m in messages)


# ----------------------------------------------------------------------------------- golden stores
# Each batch plans all stores: with limits for 10 to 30 batches, batches end in each store.
LIMITS: list[dict[str, str]] = [
    {},
    {"maxBytesPerTrigger": "100k"},
    {"maxBytesPerTrigger": "300", "topics": "MainTopic"},
    {"maxOffsetsPerTrigger": "137"},
    {"maxOffsetsPerTrigger": "250", "maxBytesPerTrigger": "120k", "splitSize": "9k"},
    {"maxOffsetsPerTrigger": "20", "topicPattern": ".*[tT]opic.*", "tags": "TagA || TagB"},
]


@pytest.mark.parametrize("options", LIMITS, ids=str)
def test_sound_stores_give_what_a_batch_gives(golden: Path, options: dict[str, str]) -> None:
    stores = sound_stores(golden)
    if options.get("maxBytesPerTrigger") == "300":
        stores = {"real-broker": stores["real-broker"]}
    stream = Stream([str(path) for path in stores.values()], **options)
    stream.drain()
    assert stream.places == batch_places(stream)
    if not options:
        assert stream.batches == [len(stream.rows)]
    most = int(options.get("maxOffsetsPerTrigger", 1_000_000))
    assert max(stream.batches) <= most
    assert not stream.plan()


def test_rows_are_those_of_golden_files(golden: Path) -> None:
    store = golden / "real-broker" / "store"
    stream = Stream(store, maxBytesPerTrigger="64k")
    expected = golden_messages(golden / "real-broker" / "expected.jsonl")
    rows = sorted(stream.drain(), key=lambda row: row["physical_offset"])
    assert len(stream.batches) > 1
    assert [(r["topic"], r["queue_id"], r["queue_offset"], r["body"], r["keys"]) for r in rows] == [
        (m["topic"], m["queue_id"], m["queue_offset"], m["body"], m["keys"]) for m in expected
    ]


def test_harmed_stores(golden: Path) -> None:
    for scenario, store in harmed_stores(golden).items():
        before = facts(store)
        whole = places_of(whole_messages(golden, scenario))
        try:
            batch: Any = batch_places(Stream(store))
        except CorruptFrame as error:
            batch = error
        for limits in ({"splitSize": "2k"}, {"maxBytesPerTrigger": "12k", "splitSize": "2k"}):
            stream = Stream(store, onDamage="skip", **limits)
            stream.drain()
            assert stream.places == whole, scenario
            strict = Stream(store, **limits)
            if isinstance(batch, CorruptFrame):
                with pytest.raises(CorruptFrame) as caught:
                    strict.drain()
                found = caught.value.path, caught.value.offset
                assert found == (batch.path, batch.offset), scenario
            else:
                assert strict.drain() == strict.rows
                assert strict.places == batch, scenario
        assert facts(store) == before


def test_each_damage_is_told_once(golden: Path) -> None:
    store = harmed_stores(golden)["crc-third-last-file"]
    for options in ({}, {"splitSize": "1k"}, {"maxBytesPerTrigger": "900"}):
        stream = Stream(store, onDamage="skip", **options)
        stream.drain()
        assert len(stream.damage.spans) == 1, options


def test_quarantine(golden: Path, tmp_path: Path) -> None:
    store = harmed_stores(golden)["crc-third-last-file"]
    aside = tmp_path / "aside"
    stream = Stream(
        store, onDamage="quarantine", quarantinePath=str(aside), maxBytesPerTrigger="5k"
    )
    stream.drain()
    assert stream.places == places_of(whole_messages(golden, "crc-third-last-file"))
    assert [path.name for path in sorted((aside / "store").iterdir())] == [
        f"{36796:020d}.bin",
        f"{36796:020d}.json",
    ]


# ------------------------------------------------------------------------------ a log that grows
def test_a_log_that_is_written_byte_by_byte(tmp_path: Path) -> None:
    """A log as Java writes it, without a durable offset: preallocated files, unfinished frames."""
    maker = made(tmp_path / "whole", 150)
    data = bytes(maker.log)
    store = tmp_path / "store"
    (store / "commitlog").mkdir(parents=True)
    size = maker.log_file_size
    rng = random.Random(5)
    ends = [f.physical_offset + f.size for f in maker.frames]
    with held_by_a_broker(store):
        stream = Stream(store, maxBytesPerTrigger="2k")
        written = 0
        while written < len(data):
            step = rng.choice([1, 7, 60, 900, 4000])
            end = min(written + step, len(data))
            while written < end:
                base = written // size * size
                path = store / "commitlog" / f"{base:020d}"
                if not path.exists():
                    for start in (base, base + size):
                        (store / "commitlog" / f"{start:020d}").write_bytes(bytes(size))
                some = data[written : min(end, base + size)]
                with path.open("r+b") as file:
                    file.seek(written - base)
                    file.write(some)
                written += len(some)
            if rng.random() < 0.2:
                stream.restart()
            stream.drain()
            assert len(stream.rows) == sum(end <= written for end in ends)
    assert stream.places == [("store", f.physical_offset) for f in maker.frames]
    assert not stream.damage.spans


def test_our_stores_are_read_up_to_their_mark(tmp_path: Path) -> None:
    store = opened(tmp_path / "store", flush_interval_commit_log=3_600_000)
    with store:
        stream = Stream(tmp_path / "store")
        for n in range(40):
            store.put(lq.Message(topic="t", body=b"%d" % n))
        durable = StoreLayout.open(tmp_path / "store").durable_end
        stream.drain()
        assert all(row["physical_offset"] < (durable or 0) for row in stream.rows)
        few = len(stream.rows)
        store.flush()
        stream.drain()
        assert few < len(stream.rows) == 40
        store.put(lq.Message(topic="t", body=b"40"))
    before = facts(tmp_path / "store")
    stream.drain()
    assert facts(tmp_path / "store") == before
    assert [row["body"] for row in stream.rows] == [b"%d" % n for n in range(41)]


def test_sound_frames_behind_a_break_of_a_live_log_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RocketMQ's recovery leaves such stale frames; they are not messages."""
    maker = made(tmp_path / "store", 30)
    last = maker.frames[-1].physical_offset // 3000 * 3000
    broken = next(f for f in maker.frames if f.physical_offset > last)
    path = tmp_path / "store" / "commitlog" / f"{last:020d}"
    flip(path, broken.physical_offset - last + 5)
    with held_by_a_broker(tmp_path / "store"):
        stream = Stream(tmp_path / "store", onDamage="skip")
        for _ in range(4):
            stream.drain()
        sound = [
            f.physical_offset for f in maker.frames if f.physical_offset < broken.physical_offset
        ]
        assert [offset for _, offset in stream.places] == sound
        told = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == 1
        assert f"at offset {broken.physical_offset}: no frame" in told[0].getMessage()
        # The writer has written its own frame there by now.
        flip(path, broken.physical_offset - last + 5)
        stream.drain()
    assert stream.places == [("store", f.physical_offset) for f in maker.frames]


def test_damage_before_the_last_file_of_a_live_log_is_told(tmp_path: Path) -> None:
    maker = made(tmp_path / "store", 60)
    harmed = maker.frames[7]
    base = harmed.physical_offset // 3000 * 3000
    path = tmp_path / "store" / "commitlog" / f"{base:020d}"
    flip(path, harmed.physical_offset - base + 5)
    with held_by_a_broker(tmp_path / "store"):
        with pytest.raises(CorruptFrame) as caught:
            Stream(tmp_path / "store").drain()
        assert caught.value.offset == harmed.physical_offset
        stream = Stream(tmp_path / "store", onDamage="skip", maxBytesPerTrigger="1k")
        assert len(stream.drain()) == 59


def test_planning_looks_at_what_is_new_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = made(tmp_path / "store", 200)
    walked: list[int] = []
    follow = LogReader.chain_end

    def counted(reader: Any, start: int) -> int:
        end = follow(reader, start)
        walked.append(end - start)
        return end

    monkeypatch.setattr(LogReader, "chain_end", counted)
    with held_by_a_broker(tmp_path / "store"):
        stream = Stream(tmp_path / "store")
        stream.drain()
        # The last file of the log, without any message.
        assert sum(walked) <= maker.log_file_size
        del walked[:]
        for _ in range(5):
            assert not stream.plan()
        assert sum(walked) == 0


# --------------------------------------------------------------------------------- restarts, starts
def test_a_restart_in_mid_batch_reads_the_same(golden: Path) -> None:
    store = golden / "real-broker" / "store"
    stream = Stream(store, maxOffsetsPerTrigger="100")
    rng = random.Random(3)
    while stream.plan():
        assert stream.planned is not None
        some = stream.read(*stream.planned)
        for _ in range(rng.randrange(3)):
            next(some, None)
        stream.restart()
        stream.run()
    assert stream.places == batch_places(stream)


def test_latest(tmp_path: Path) -> None:
    maker = made(tmp_path / "store", 20)
    with held_by_a_broker(tmp_path / "store"):
        stream = Stream(tmp_path / "store", startingOffsets="latest")
        assert stream.drain() == []
        assert not stream.plan()
        for n in range(5):
            maker.put(body=b"new %d" % n)
        maker.write(tmp_path / "store")
        assert stream.plan()
        # The process dies before the batch ends. Spark asks the next process for a start again.
        maker.put(body=b"new 5")
        maker.write(tmp_path / "store")
        stream.restart()
        stream.run()
        assert [row["body"] for row in stream.rows] == [b"new %d" % n for n in range(5)]
        stream.drain()
        assert [row["body"] for row in stream.rows] == [b"new %d" % n for n in range(6)]
        assert stream.at is not None and stream.at.first is None


def test_starts_are_for_new_queries_only(tmp_path: Path) -> None:
    maker = made(tmp_path / "store", 40)
    middle = maker.frames[20]
    stream = Stream(
        tmp_path / "store", startingOffsets=json.dumps({"store": middle.physical_offset - 1})
    )
    assert len(stream.drain()) == 20
    stream.restart(startingOffsets="earliest")
    assert not stream.plan()
    by_time = Stream(tmp_path / "store", startingTimestamp=str(middle.store_timestamp))
    assert len(by_time.drain()) == 20
    later = maker.put(body=b"later", time=FIRST_TIME + 10**9)
    # The clock was set back: the start time filters messages, as in a batch.
    maker.put(body=b"earlier", time=FIRST_TIME)
    maker.write(tmp_path / "store")
    by_time.restart(startingTimestamp=str(FIRST_TIME + 2 * 10**9))
    by_time.drain()
    assert len(by_time.rows) == 21
    assert by_time.rows[-1]["physical_offset"] == later.physical_offset


@pytest.mark.parametrize("name", ["startingQueueOffsets", "startingOffsets"])
def test_queue_offsets(tmp_path: Path, name: str) -> None:
    maker = made(tmp_path / "store", 60)
    start = json.dumps({"a": {"0": 4, "1": -1}, "b": {"0": -2}})
    stream = Stream(tmp_path / "store", maxBytesPerTrigger="2k", **{name: start})
    stream.drain()

    def wanted(row: dict[str, Any]) -> bool:
        queue = row["topic"], row["queue_id"]
        return queue != ("a", 1) and (queue != ("a", 0) or row["queue_offset"] >= 4)

    everything = Stream(tmp_path / "store")
    expected = [row for row in everything.drain() if wanted(row)]
    assert 0 < len(expected) < len(everything.rows)
    assert stream.rows == expected
    new = maker.put("a", 1, b"new")
    maker.write(tmp_path / "store")
    stream.restart(**{name: '{"a": {"0": 100, "1": 100}}'})
    stream.drain()
    assert stream.rows[-1]["physical_offset"] == new.physical_offset
    assert len(stream.rows) == len(expected) + 1


@pytest.mark.parametrize("entries", [0, 3])
def test_latest_in_a_queue_whose_messages_have_no_entries_yet(tmp_path: Path, entries: int) -> None:
    """The dispatch is behind: the queue has no file yet, or not all of its entries."""
    maker = made(tmp_path / "store", 60)
    shutil.rmtree(tmp_path / "store/index")
    root = tmp_path / "store/consumequeue"
    for queue in root.glob("*/*"):
        if entries == 0 or queue.parts[-2:] != ("a", "1"):
            shutil.rmtree(queue)
    for file in root.glob("a/1/*"):
        data = file.read_bytes()
        file.write_bytes(data[: 20 * entries].ljust(len(data), b"\0"))
    start = json.dumps({"a": {"0": -1, "1": -1}})
    stream = Stream(tmp_path / "store", startingOffsets=start)
    stream.drain()
    assert stream.rows
    assert {(row["topic"], row["queue_id"]) for row in stream.rows}.isdisjoint({("a", 0), ("a", 1)})
    new = maker.put("a", 1, b"new")
    maker.write(tmp_path / "store")
    count = len(stream.rows)
    found = [row["physical_offset"] for row in stream.drain()[count:]]
    assert found == [new.physical_offset]


def test_latest_in_a_queue_that_begins_again_at_0(tmp_path: Path) -> None:
    """Its topic was deleted and created again, and the dispatch is behind."""
    maker = made(tmp_path / "store", 60)
    maker.put("a", 1, b"again", queue_offset=0)
    maker.write(tmp_path / "store")
    for folder in ("index", "consumequeue"):
        shutil.rmtree(tmp_path / "store" / folder)
    stream = Stream(tmp_path / "store", startingOffsets=json.dumps({"a": {"0": -1, "1": -1}}))
    stream.drain()
    new = maker.put("a", 1, b"new", queue_offset=1)
    maker.write(tmp_path / "store")
    count = len(stream.rows)
    assert [row["physical_offset"] for row in stream.drain()[count:]] == [new.physical_offset]


def test_a_start_beyond_the_end_is_the_end(tmp_path: Path) -> None:
    made(tmp_path / "store", 20)
    assert Stream(tmp_path / "store", startingOffsets='{"store": 1000000}').drain() == []


def test_brokers_of_the_options(tmp_path: Path) -> None:
    made(tmp_path / "store", 3)
    with pytest.raises(UsageError, match="there is no broker 'stroe'; there are: store"):
        Stream(tmp_path / "store", startingOffsets='{"stroe": 0}').drain()


# ------------------------------------------------------------------------------------ available now
def test_available_now_takes_what_is_there(tmp_path: Path) -> None:
    maker = made(tmp_path / "b1", 40)
    stream = Stream(f"{tmp_path}/b*", maxOffsetsPerTrigger="7")
    stream.planner.prepare_available_now()
    stream.drain(2)
    maker.put(body=b"late")
    maker.write(tmp_path / "b1")
    made(tmp_path / "b2", 5)
    stream.drain()
    assert len(stream.rows) == 40
    assert stream.planner.newest() is not None
    stream.restart()
    stream.planner.prepare_available_now()
    assert len(stream.drain()) == 46
    assert set(stream.planner.newest() or {}) == {"b1", "b2"}


def test_columns_and_kafkas_table(tmp_path: Path) -> None:
    made(tmp_path / "store", 12)
    stream = Stream(tmp_path / "store", schema="kafka", columns="key,offset", topics="a")
    assert stream.drain() == [{"key": b"k%d" % n, "offset": n // 6} for n in range(0, 12, 3)]


def test_large_batches_are_cut(golden: Path) -> None:
    store = golden / "real-broker" / "store"
    for options, least in (({}, 1), ({"minPartitions": "5"}, 5), ({"splitSize": "4k"}, 10)):
        stream = Stream(store, **options)
        assert stream.plan() and stream.planned is not None
        tasks = stream.planner.tasks(*stream.planned)
        assert len(tasks) >= least
        stream.run()
        assert stream.places == batch_places(stream)


def test_levels_are_asked_for_now_and_then(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("logquarry.spark.stream_planner.time.monotonic", lambda: now)
    stream = Stream(golden / "delay" / "store", maxOffsetsPerTrigger="3")
    for _ in range(10):
        stream.drain(1)
        now += 25
    expected = {
        m["physical_offset"]: m for m in golden_messages(golden / "delay" / "expected.jsonl")
    }
    assert stream.rows
    for row in stream.rows:
        assert row["tags_code"] == expected[row["physical_offset"]]["tags_code"]
