"""Rows of a load: their broker and queue, rejected rows, and the segments."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.errors import CorruptFile, MessageRejected, StoreUnavailable, UsageError
from logquarry.format import java
from logquarry.ingest.load import (
    commit_load,
    plan_load,
)
from logquarry.ingest.staging import LoadPlan, Stager, place_rows
from logquarry.store.load.ledger import LoadId
from logquarry.store.load.segment import Segment, SegmentReader
from logquarry.store.message_store import StoreWriter
from tests.helpers.loads import LOAD, messages, planned, row, schema_of, staged
from tests.helpers.small_store import config
from tests.helpers.twins import both


# -------------------------------------------------------------------------------------- placing
def test_keys_choose_as_a_producer_does() -> None:
    keys = ["a", " order-7 x", "order-7", "ключ", "", None, "z" * 40]
    batch = pa.record_batch({"topic": ["t"] * 7, "keys": keys})

    def placed() -> list[tuple[int, int]]:
        found, brokers = place_rows(
            batch, brokers=3, queues=4, turn=10, rows=np.arange(batch.num_rows)
        )
        return list(zip(brokers.tolist(), found["queue_id"].to_pylist(), strict=True))

    fast, plain = both(placed)
    assert fast == plain
    for place, key in zip(fast, keys, strict=True):
        words = (key or "").split()
        if words:
            value = abs(int(java.hash_code(words[0]) - 12 * int(java.hash_code(words[0]) / 12)))
            assert place == (value % 3, value // 3)
    assert fast[1] == fast[2]
    # The turns of the fifth and the sixth row.
    assert fast[4:6] == [((10 + 4) % 12 % 3, (10 + 4) % 12 // 3), ((10 + 5) % 12 % 3, 1)]


def test_a_queue_that_is_named_stays_on_one_broker() -> None:
    batch = pa.record_batch({"topic": ["t", "u"] * 4, "queue_id": [0, 0, 1, 1, 2, 2, 0, 0]})
    found, brokers = place_rows(batch, brokers=2, queues=1, turn=0, rows=np.arange(8))
    assert found["queue_id"].to_pylist() == [0, 0, 1, 1, 2, 2, 0, 0]
    numbers = brokers.tolist()
    assert numbers[0] == numbers[6] == numbers[4] != numbers[2]
    assert numbers[1] == numbers[7]


# ------------------------------------------------------------------------------------- refusals
REFUSED: list[tuple[dict[str, Any], str]] = [
    (row(topic=None), "the topic is missing"),
    (row(body=None), "the body is missing"),
    (row(topic="a b/c"), "not a topic"),
    (row(topic="t" * 300), "not a topic"),
    (row(body=bytes(3_000)), "maxMessageSize is 3000"),
    (row(properties={"a": "x" * 40_000}), "the properties"),
    (row(properties={"DELAY": "soon"}), "DELAY is not a number"),
    (row(sys_flag=0x10), "IPv6"),
]


@pytest.mark.parametrize(("bad", "why"), REFUSED)
def test_a_bad_row_ends_the_load(tmp_path: Path, bad: dict[str, Any], why: str) -> None:
    plan = planned(tmp_path / "s")

    def refused() -> str:
        with pytest.raises(MessageRejected) as caught:
            staged(plan, [row(), row(), bad])
        return str(caught.value)

    fast, plain = both(refused)
    assert fast == plain
    assert fast.startswith("row 3 of partition 0: ")
    assert why in fast


def test_bad_rows_go_to_the_dead_letters(tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    plan = planned(tmp_path / "s", on_rejected="deadLetter", dead_letters=str(dead))
    bad = [bad for bad, _ in REFUSED]
    good = [row(body=b"%d" % number) for number in range(len(bad))]
    mixed = [each for pair in zip(good, bad, strict=True) for each in pair]
    for was_there in (False, True):
        tasks = staged(plan, mixed, [row(body=None)], good[:2])
        assert [task.rejected for task in tasks] == [len(bad), 1, 0]
        assert commit_load(plan, LOAD, tasks).was_there is was_there
    files = sorted(dead.iterdir())
    assert [path.suffix for path in files] == [".parquet"] * 2
    told = [each for path in files for each in pq.read_table(path).to_pylist()]
    assert len(told) == len(bad) + 1
    for found, (_, why) in zip(told, REFUSED, strict=False):
        assert why in found["reason"]
    assert told[2]["topic"] == "a b/c"
    assert sorted(m.body for m in messages(tmp_path / "s")) == sorted(
        each["body"] for each in good + good[:2]
    )


def test_keys_can_be_lists_of_words(tmp_path: Path) -> None:
    plan = planned(tmp_path / "s", on_rejected="deadLetter", dead_letters=str(tmp_path / "dead"))
    keys = [["a", "b"], [], ["a b"], ["c", None], None, ["d"]]
    stager = Stager(plan, LOAD, 0, clock=lambda: 5)
    stager.add(pa.RecordBatch.from_pylist([row(keys=words) for words in keys]))
    task = stager.finish()
    assert task.rejected == 2
    commit_load(plan, LOAD, [task])
    assert sorted(str(m.keys) for m in messages(tmp_path / "s")) == ["None", "None", "a b", "d"]
    (file,) = (tmp_path / "dead").iterdir()
    told = pq.read_table(file).to_pylist()
    assert [(each["keys"], each["reason"].split(",")[0]) for each in told] == [
        (["a b"], "the column keys takes words without spaces"),
        (["c", None], "each word of the column keys takes text"),
    ]


def test_queues_do_not_depend_on_the_sizes_of_batches(tmp_path: Path) -> None:
    keys: list[list[str] | None] = [None, ["a b"], None, None, ["c d"], None, None]
    rows = [row(body=b"%d" % number, keys=words) for number, words in enumerate(keys)]
    batch = pa.RecordBatch.from_pylist(rows)
    found = []
    for name, size in (("one", len(rows)), ("two", 3), ("three", 1)):
        dead = str(tmp_path / f"dead-{name}")
        plan = planned(tmp_path / name, on_rejected="deadLetter", dead_letters=dead)
        stager = Stager(plan, LOAD, 0, clock=lambda: 5)
        for start in range(0, len(rows), size):
            stager.add(batch.slice(start, size))
        commit_load(plan, LOAD, [stager.finish()])
        found.append({m.body: m.queue_id for m in messages(tmp_path / name)})
    assert len(found[0]) == 5
    assert found[0] == found[1] == found[2]


def test_a_key_that_is_not_utf8_is_refused_alone(tmp_path: Path) -> None:
    plan = planned(tmp_path / "s", on_rejected="deadLetter", dead_letters=str(tmp_path / "dead"))
    words = [b"ok", b"\xff", b"a b", b"fine"]
    values = pa.Array.from_buffers(pa.string(), 4, pa.array(words).buffers())
    keys = pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), values)
    stager = Stager(plan, LOAD, 0, clock=lambda: 5)
    rows = {"topic": ["t"] * 4, "body": [b"b"] * 4, "keys": keys}
    stager.add(pa.record_batch(rows))
    task = stager.finish()
    assert task.rejected == 2
    commit_load(plan, LOAD, [task])
    assert sorted(str(m.keys) for m in messages(tmp_path / "s")) == ["fine", "ok"]


def test_text_that_is_none_is_refused(tmp_path: Path) -> None:
    plan = planned(tmp_path / "s")
    topics = pa.array([b"t", b"\xff"], pa.binary()).view(pa.string())
    batch = pa.record_batch({"topic": topics, "body": pa.array([b"a", b"b"])})
    with pytest.raises(MessageRejected, match="row 2 of partition 0: topic is not UTF-8"):
        Stager(plan, LOAD, 0).add(batch)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"topic": ["t"]}, "need a column body"),
        ({"body": [b"b"]}, "need a column topic"),
        ({"topic": ["t"], "body": [b"b"], "colour": ["red"]}, "no column 'colour'"),
        ({"topic": ["t"], "body": [b"b"], "queue_id": ["1"]}, "queue_id takes whole numbers"),
    ],
)
def test_columns_that_are_of_no_use(tmp_path: Path, columns: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Stager(planned(tmp_path / "s"), LOAD, 0).add(pa.record_batch(columns))


def test_queue_ids_that_no_queue_can_have(tmp_path: Path) -> None:
    queue_ids = pa.array([1, 1 << 63], pa.uint64())
    batch = pa.record_batch({"topic": ["t"] * 2, "body": [b"b"] * 2, "queue_id": queue_ids})
    with pytest.raises(UsageError, match="the column queue_id is of uint64"):
        Stager(planned(tmp_path / "s"), LOAD, 0).add(batch)


def test_further_queues_are_refused(tmp_path: Path) -> None:
    """Their frames contain queue offsets, which only the holder of the store's lock knows."""
    settings = config(enable_multi_dispatch=True)
    plan = plan_load(LoadPlan(path=str(tmp_path / "s"), config=settings))
    with pytest.raises(MessageRejected, match="further queues"):
        staged(plan, [row(properties={"INNER_MULTI_DISPATCH": "a,b"})])


# ------------------------------------------------------------------------------- what is written
def test_both_ways_write_the_same(tmp_path: Path) -> None:
    numbers = iter(range(10))

    def written() -> list[tuple[Any, ...]]:
        root = tmp_path / f"s{next(numbers)}"
        plan = planned(root)
        many = [
            row(
                topic="tu"[number % 2],
                body=bytes(number * 7),
                keys=None if number % 3 else f"k{number}",
                sys_flag=[0, 0, 4, 8][number % 4],
                delay_level=2 if number % 11 == 0 else 0,
            )
            for number in range(200)
        ]
        commit_load(plan, LOAD, staged(plan, many[:120], many[120:]))
        return [
            (m.topic, m.queue_id, m.queue_offset, m.physical_offset, m.size, m.properties_string,
             m.body, m.sys_flag, m.born_timestamp)
            for m in messages(root)
        ]  # fmt: skip

    fast, plain = both(written)
    assert fast == plain
    assert len(fast) == 200
    assert {each[0] for each in fast} == {"t", "u", "SCHEDULE_TOPIC_XXXX"}


def test_it_is_what_put_many_writes(tmp_path: Path) -> None:
    many = [row(body=b"%d" % number * 20, queue_id=number % 3, keys="k") for number in range(300)]
    batch = pa.RecordBatch.from_pylist(many, schema_of(many)).append_column(
        "born_timestamp", pa.array(list(range(300)))
    )
    roots = [tmp_path / "put", tmp_path / "load"]
    for root in roots:
        plan = planned(root)
        stager = Stager(plan, LOAD, 0)
        stager.add(batch)
        tasks = stager.finish()
        with StoreWriter.start(root, config=config(), clock=lambda: 1_700_000_000_000) as store:
            if root.name == "put":
                store.put_many(batch)
            else:
                store.load_staged(LOAD, [segment for _, segment in tasks.segments])
    for folder in ("commitlog", "consumequeue"):
        files = [
            {str(p.relative_to(root)): p.read_bytes() for p in (root / folder).rglob("0*")
             if p.is_file()}
            for root in roots
        ]  # fmt: skip
        assert files[0] == files[1]
        assert len(files[0]) > 1


def test_messages_larger_than_a_write(tmp_path: Path) -> None:
    sizes = [10, 3 << 20, 10, 700_000, 700_000, 1 << 20, 0]
    settings = config(mapped_file_size_commit_log=4 << 20, max_message_size=4 << 20)

    def loaded() -> list[tuple[int, bytes]]:
        with tempfile.TemporaryDirectory(dir=tmp_path) as root:
            plan = plan_load(LoadPlan(path=root, config=settings, queues=1))
            commit_load(plan, LOAD, staged(plan, [row(body=bytes(size)) for size in sizes]))
            assert not list(plan.loads.rglob("*.frames"))
            with lq.MessageStore.open(root) as store:
                return [(message.physical_offset, message.body) for message in store.scan()]

    fast, plain = both(loaded)
    assert fast == plain and [len(body) for _, body in fast] == sizes


def test_statistics_count_only_messages_in_the_log(tmp_path: Path) -> None:
    """A failed write of the second chunk: its messages are not in the log."""
    settings = config(mapped_file_size_commit_log=4 << 20)
    plan = plan_load(LoadPlan(path=str(tmp_path / "s"), config=settings, queues=1))
    (task,) = staged(plan, [row(body=bytes(2_000)) for _ in range(600)])
    chunks = 0

    def write(disk: Disk, descriptor: int, data: memoryview | bytes, position: int) -> int:
        nonlocal chunks
        chunks += len(data) > 100_000
        if chunks == 2:
            raise OSError(errno.EIO, "broken")
        return real_write(disk, descriptor, data, position)

    real_write = Disk.write

    with StoreWriter.start(tmp_path / "s", config=settings) as store:
        with (
            mock.patch.object(Disk, "write", write),
            pytest.raises(StoreUnavailable, match="broken"),
        ):
            store.load_staged(LOAD, [segment for _, segment in task.segments])
        assert store.stats().put_messages == sum(1 for _ in store.scan()) > 0


def test_offsets_follow_on_those_of_the_store(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with StoreWriter.start(root, config=config()) as store:
        store.put_many([lq.Message("t", b"old", queue_id=1)] * 5)
    plan = planned(root)
    for version in (1, 2):
        load = LoadId("job", version)
        tasks = staged(plan, [row(queue_id=1)] * 3, [row(queue_id=0), row(queue_id=1)], load=load)
        summary = commit_load(plan, load, tasks)
        assert summary.rows == 5
    offsets = [m.queue_offset for m in messages(root) if m.queue_id == 1]
    assert offsets == list(range(13))
    assert [m.queue_offset for m in messages(root) if m.queue_id == 0] == [0, 1]


# --------------------------------------------------------------------------------------- segments
def segment_of(plan: LoadPlan) -> tuple[Path, Segment]:
    (task,) = staged(plan, [row(), row(topic="u")])
    ((_, segment),) = task.segments
    return plan.loads / LOAD.staged, segment


def test_a_segment_says_what_is_in_it(tmp_path: Path) -> None:
    folder, segment = segment_of(planned(tmp_path / "s"))
    assert segment.rows == 2
    assert sorted(topic for topic, _, _ in segment.queues) == ["t", "u"]
    assert Segment.from_json(json.loads(json.dumps(segment.to_json()))).crc == segment.crc
    reader = SegmentReader(folder, segment)
    assert len(reader.frames.data) == segment.bytes
    reader.close()


@pytest.mark.parametrize("harm", ["gone", "short", "rotten"])
def test_a_harmed_segment_is_refused(tmp_path: Path, harm: str) -> None:
    plan = planned(tmp_path / "s")
    tasks = staged(plan, [row()], [row()])
    path = plan.loads / LOAD.staged / tasks[1].segments[0][1].name
    data = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    elif harm == "short":
        path.write_bytes(data[:-1])
    else:
        data[60] ^= 1
        path.write_bytes(data)
    with pytest.raises(CorruptFile, match=path.name):
        commit_load(plan, LOAD, tasks)
    assert messages(tmp_path / "s") == []


@pytest.mark.parametrize(
    "document",
    ["", "[]", "{}", '{"written_by": "logquarry load"}',
     '{"written_by": "logquarry load", "load": {"app": "a", "version": 1, "is_named": true},'
     ' "start": 0, "loads": "../../elsewhere", "segments": []}',
     '{"written_by": "logquarry load", "load": {"app": "a", "version": 1, "is_named": true},'
     ' "start": 0, "loads": ".logquarry/loads", "segments": [{"name": "../x.frames", "size": 1,'
     ' "rows": 1, "bytes": 1, "crc": 1}]}'],
)  # fmt: skip
def test_an_intent_that_is_none_is_told(tmp_path: Path, document: str) -> None:
    """Nothing can be appended after a load whose end is unknown."""
    root = tmp_path / "s"
    with StoreWriter.start(root, config=config()) as store:
        store.put(lq.Message("t", b"b"))
    path = root / ".logquarry/loads/intent.json"
    path.parent.mkdir()
    path.write_text(document)
    with pytest.raises(CorruptFile, match=r"intent\.json"):
        StoreWriter.start(root, config=config())
    assert len(messages(root)) == 1
