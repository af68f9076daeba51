"""Consumers: which messages they get, which count as handled, and where a group continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import logquarry as lq
from logquarry.errors import BadFilter, CorruptFrame, StoreUnavailable, UsageError
from logquarry.format import broker_json
from logquarry.store.consumer import consumer as consumer_module
from logquarry.store.consumer.consumer import Consumer
from logquarry.store.consumer.source import MOST_AT_ONCE
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from tests.helpers.consumer_stores import LONG, fill, numbers, saved
from tests.helpers.failing_disk import EIO, FaultyDisk
from tests.helpers.retention_stores import FILE, put_all, retain
from tests.helpers.small_store import NOW, config, opened


@pytest.fixture(name="store")
def small_store(tmp_path: Path) -> Iterator[StoreWriter]:
    with opened(tmp_path / "store") as store:
        yield store


# ------------------------------------------------------------------------ delivered messages
def test_all_of_all_queues_in_their_order(store: StoreWriter) -> None:
    fill(store, 1_000, queues=3)
    with store.consumer("g", ["t"], timeout=0) as consumer:
        assert consumer.queues == (("t", 0), ("t", 1), ("t", 2))
        assert consumer.lag() == 1_000
        found = list(consumer)
        assert consumer.lag() == 0
    assert sorted(numbers(found)) == list(range(1_000))
    for queue_id in range(3):
        own = [m.queue_offset for m in found if m.queue_id == queue_id]
        assert own == list(range(len(own)))
    assert saved(store)["t", "g"] == {0: 334, 1: 333, 2: 333}


@pytest.mark.parametrize("tags", ["a", "a || c", "b || none", "none", "*"])
def test_tags(store: StoreWriter, tags: str) -> None:
    # There are more messages than one read takes: the consumer delivers all of each read.
    fill(store, 2 * MOST_AT_ONCE + 50)
    wanted = {"a": "a", "a || c": "ac", "b || none": "b", "none": "", "*": "abc"}[tags]
    with store.consumer("g", "t", tags=tags, timeout=0) as consumer:
        expected = [n for n in range(2 * MOST_AT_ONCE + 50) if "abc"[n % 3] in wanted]
        assert numbers(consumer) == expected
    # Messages that the filter skips count as handled too.
    assert saved(store)["t", "g"] == {0: 2 * MOST_AT_ONCE + 50}


def test_tags_of_the_same_hash_are_told_apart(store: StoreWriter) -> None:
    for tag in ("Aa", "BB", "Aa"):
        store.put(lq.Message("t", tag.encode(), tags=tag))
    store.wait_dispatched()
    with store.consumer("g", "t", tags="BB", timeout=0) as consumer:
        assert [message.body for message in consumer] == [b"BB"]


def test_a_filter(store: StoreWriter) -> None:
    fill(store, 700)
    with store.consumer("g", "t", sql="n >= 300 AND n < 600 AND TAGS = 'b'", timeout=0) as consumer:
        assert numbers(consumer) == [n for n in range(300, 600) if n % 3 == 1]
    assert saved(store)["t", "g"] == {0: 700}
    with pytest.raises(BadFilter):
        store.consumer("g", "t", sql="n >=")
    with pytest.raises(UsageError, match="not both"):
        store.consumer("g", "t", sql="n > 3", tags="a")


def test_copies_in_further_queues_count_by_their_place_there(tmp_path: Path) -> None:
    with opened(tmp_path / "s", enable_multi_dispatch=True) as store:
        for number in range(60):
            properties = {"INNER_MULTI_DISPATCH": "copies"} if number % 5 == 0 else {}
            tags = "a" if number % 2 else "b"
            store.put(lq.Message("t", b"%d" % number, tags=tags, properties=properties))
        store.wait_dispatched()
        with store.consumer("g", "copies", tags="b", timeout=0) as consumer:
            assert int(next(consumer).body) == 0
            assert int(next(consumer).body) == 10
            assert consumer.position("copies", 0) == 3
            consumer.commit()
        assert saved(store)["copies", "g"] == {0: 3}
        with store.consumer("g", "copies", tags="b", timeout=0) as consumer:
            assert numbers(consumer) == [20, 30, 40, 50]


@pytest.mark.parametrize(
    ("group", "topics", "why"),
    [
        ("a b", ["t"], "not a valid consumer group"),
        ("g@h", ["t"], "not a valid consumer group"),
        ("", ["t"], "not a valid consumer group"),
        ("g" * 121, ["t"], "not a valid consumer group"),
        ("g", [], "at least one topic"),
        ("g", ["../t"], "not a topic"),
        ("g", ["Zürich"], "not a topic"),
    ],
)
def test_names(store: StoreWriter, group: str, topics: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        store.consumer(group, topics)


def test_much_that_nobody_wants(store: StoreWriter) -> None:
    """After a read that finds nothing, the consumer reads the other queues, and does not wait."""
    with mock.patch.object(consumer_module, "_MOST_READS", 2):
        fill(store, 5 * MOST_AT_ONCE)
        last = str(5 * MOST_AT_ONCE - 1)
        with store.consumer("g", "t", sql=f"n = '{last}'", timeout=0) as consumer:
            assert numbers(consumer) == [int(last)]

        async def consume() -> list[int]:
            with store.consumer("h", "t", sql=f"n = '{last}'", timeout=0) as consumer:
                return [int(message.body) async for message in consumer]

        assert asyncio.run(consume()) == [int(last)]


def test_damage_is_told_and_can_be_passed(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 20, queues=2)
        place = store.get("t", 0, 4, 1).messages[0].physical_offset
        path = tmp_path / "s/commitlog" / f"{0:020d}"
        data = bytearray(path.read_bytes())
        data[place + 88] ^= 1
        path.write_bytes(data)
        with store.consumer("g", "t", timeout=0) as consumer:
            found: list[int] = []
            with pytest.raises(CorruptFrame, match="offset 4 of queue 0") as caught:
                numbers(_noting(consumer, found))
            assert caught.value.offset == place
            # The consumer reads the other queues, and reports the damage until it seeks past it.
            with pytest.raises(CorruptFrame):
                numbers(_noting(consumer, found))
            consumer.seek("t", 0, 5)
            numbers(_noting(consumer, found))
        assert sorted(found) == [number for number in range(20) if number != 8]


def _noting(consumer: Consumer, found: list[int]) -> Iterator[lq.StoredMessage]:
    for message in consumer:
        found.append(int(message.body))
        yield message


# ---------------------------------------------------------------------- where a group begins
def test_starts(store: StoreWriter) -> None:
    fill(store, 50)
    times = [store.get("t", 0, offset, 1).messages[0].store_timestamp for offset in range(50)]
    later = [n for n, time in enumerate(times) if time >= times[30]]
    starts: list[tuple[str | int, int | None, list[int]]] = [
        ("earliest", None, list(range(50))),
        ("latest", None, []),
        ("timestamp", times[30], later),
        (times[30], None, later),
        (times[49] + 1, None, []),
        (0, None, list(range(50))),
    ]
    for number, (start, timestamp, expected) in enumerate(starts):
        group = f"g{number}"
        with store.consumer(group, "t", start=start, timestamp=timestamp, timeout=0) as consumer:
            assert numbers(consumer) == expected
    refused: list[tuple[str | int, int | None]] = [
        ("newest", None),
        ("timestamp", None),
        ("latest", 3),
        (True, None),
    ]
    for wrong, timestamp in refused:
        with pytest.raises(UsageError, match="start"):
            store.consumer("g", "t", start=wrong, timestamp=timestamp)


def test_start_is_for_groups_without_offsets(store: StoreWriter) -> None:
    fill(store, 10)
    store.consumer("g", "t", start="latest").close()
    # The first consumer read nothing, but its group has an offset: the queue's end at that time.
    fill(store, 5)
    with store.consumer("g", "t", start="latest", timeout=0) as consumer:
        assert numbers(consumer) == [0, 1, 2, 3, 4]
    # Queue 1 is new: the group has no offset there, and "latest" does not skip its messages.
    store.put(lq.Message("t", b"7", queue_id=1))
    store.wait_dispatched()
    with store.consumer("g", "t", start="latest", timeout=0) as consumer:
        assert numbers(consumer) == [7]


def test_a_topic_that_comes_later(store: StoreWriter) -> None:
    with store.consumer("g", "t", start="latest", timeout=LONG) as consumer:
        assert consumer.poll() == []
        threading.Timer(0.05, fill, [store, 3]).start()
        assert numbers([next(consumer) for _ in range(3)]) == [0, 1, 2]


# ------------------------------------------------------------------- which messages are handled
def test_what_is_handed_out_is_handled_when_the_next_is_asked_for(store: StoreWriter) -> None:
    fill(store, 10)
    with store.consumer("g", "t") as consumer:
        assert numbers([next(consumer) for _ in range(4)]) == [0, 1, 2, 3]
    assert saved(store)["t", "g"] == {0: 3}
    with store.consumer("g", "t") as consumer:
        for message in consumer:
            assert int(message.body) == 3
            break
        for message in consumer:
            assert int(message.body) == 4
            consumer.commit()
            assert saved(store)["t", "g"] == {0: 5}
            break
    assert saved(store)["t", "g"] == {0: 5}


def test_an_exception_leaves_its_message_unhandled(store: StoreWriter) -> None:
    fill(store, 10)

    def handle_some() -> None:
        with store.consumer("g", "t") as consumer:
            for message in consumer:
                if int(message.body) == 6:
                    raise RuntimeError("it cannot be handled")

    with pytest.raises(RuntimeError):
        handle_some()
    with store.consumer("g", "t", timeout=0) as consumer:
        assert numbers(consumer) == [6, 7, 8, 9]


def test_polls(store: StoreWriter) -> None:
    fill(store, 10)
    with store.consumer("g", "t") as consumer:
        assert numbers(consumer.poll(4)) == [0, 1, 2, 3]
        assert consumer.position("t", 0) == 4
        assert numbers(consumer.poll(4)) == [4, 5, 6, 7]
    assert saved(store)["t", "g"] == {0: 4}
    with store.consumer("g", "t") as consumer:
        assert numbers(consumer.poll(3)) == [4, 5, 6]
        assert int(next(consumer).body) == 7
        assert numbers(consumer.poll(9)) == [8, 9]
        assert consumer.poll() == []
        with pytest.raises(UsageError):
            consumer.poll(0)
    assert saved(store)["t", "g"] == {0: 10}
    with pytest.raises(StoreUnavailable, match="closed"):
        consumer.poll()
    assert list(consumer) == []


def test_without_auto_commit_only_commits_count(store: StoreWriter) -> None:
    fill(store, 10)
    with store.consumer("g", "t", auto_commit=False) as consumer:
        consumer.poll(4)
        consumer.commit()
        consumer.poll(4)
        consumer.poll(1)
    assert saved(store)["t", "g"] == {0: 4}
    with store.consumer("g", "t", auto_commit=False, timeout=0) as consumer:
        assert numbers(consumer) == [4, 5, 6, 7, 8, 9]
        consumer.commit()
        consumer.commit()
    assert saved(store)["t", "g"] == {0: 10}


def test_commits_on_the_way(store: StoreWriter) -> None:
    fill(store, 40, queues=2)
    with store.consumer("g", "t", timeout=0) as consumer:
        for count, _ in enumerate(consumer, 1):
            consumer.commit()
            assert sum(saved(store)["t", "g"].values()) == count
    assert count == 40


def test_seek(store: StoreWriter) -> None:
    fill(store, 10)
    with store.consumer("g", "t", timeout=0) as consumer:
        found = []
        for message in consumer:
            found.append(int(message.body))
            if len(found) == 3:
                consumer.seek("t", 0, 8)
        assert found == [0, 1, 2, 8, 9]
        consumer.seek("t", 0, 9)
        assert numbers(consumer.poll()) == [9]
        with pytest.raises(UsageError, match="does not have"):
            consumer.seek("t", 1, 0)
        with pytest.raises(UsageError, match="offset is -1"):
            consumer.seek("t", 0, -1)


def test_seek_with_numbers_of_numpy(store: StoreWriter) -> None:
    fill(store, 10)
    with store.consumer("g", "t", timeout=0) as consumer:
        consumer.seek("t", np.array(0), np.int64(4))  # type: ignore[arg-type]
        consumer.seek("t", np.int64(0), np.int64(5))  # type: ignore[arg-type]
        consumer.commit()
        assert saved(store)["t", "g"] == {0: 5}
        assert numbers(consumer) == list(range(5, 10))
    assert saved(store)["t", "g"] == {0: 10}


def test_offsets_that_a_queue_does_not_have(
    store: StoreWriter, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store, 10)
    with store.consumer("g", "t", timeout=0) as consumer:
        # As in RocketMQ: a queue that begins at 0 may be a new queue of that name.
        consumer.seek("t", 0, 99)
        assert consumer.lag() == 10
        assert numbers(consumer) == list(range(10))
    assert "no message at offset 99" in caplog.text


def test_the_lag_does_not_count_expired_messages(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with StoreWriter.start(tmp_path / "s", config=config(), clock=clock) as store:
        put_all(store, clock)
        with store.consumer("g", "t", timeout=0) as consumer:
            consumer.commit()
    retain(tmp_path / "s", apply=True, keep_bytes=3 * FILE)
    with opened(tmp_path / "s") as store, store.consumer("g", "t", timeout=0) as consumer:
        lag = consumer.lag()
        assert consumer.position("t", 0) == 0 and store.queue_offsets("t", 0)[0] > 0
        assert lag == len(list(consumer)) > 0
        first, end = store.queue_offsets("t", 0)
        consumer.seek("t", 0, end + 1)
        assert first > 0 and consumer.lag() == 0 and not list(consumer)


# --------------------------------------------------------------------------------- the offset file
def test_groups_that_are_not_there_stay_in_the_file(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 3)
    path = tmp_path / "s/config/consumerOffset.json"
    path.parent.mkdir(exist_ok=True)
    others = {("x", "other"): {0: 7, 3: 1}, ("t", "other"): {0: 2}, ("gone", "g"): {1: 5}}
    path.write_text(broker_json.encode_consumer_offsets(others))
    with opened(tmp_path / "s") as store, store.consumer("g", "t", timeout=0) as consumer:
        assert numbers(consumer) == [0, 1, 2]
    found = broker_json.decode_consumer_offsets(path.read_bytes())
    assert found == others | {("t", "g"): {0: 3}}
    assert path.read_text() == broker_json.encode_consumer_offsets(found)
    # The store also wrote the offset at which the new group started.
    assert path.with_name("consumerOffset.json.bak").read_text() == (
        broker_json.encode_consumer_offsets(others | {("t", "g"): {0: 0}})
    )


def test_offsets_are_written_while_consuming(tmp_path: Path) -> None:
    with opened(tmp_path / "s", flush_consumer_offset_interval=5) as store:
        fill(store, 10)
        consumer = store.consumer("g", "t")
        written = threading.Event()

        def look() -> None:
            while not written.wait(0.002):
                try:
                    if saved(store).get(("t", "g")) == {0: 3}:
                        written.set()
                except FileNotFoundError:
                    pass

        thread = threading.Thread(target=look)
        for _ in range(4):
            next(consumer)
        thread.start()
        assert written.wait(LONG)
        thread.join(LONG)


def test_the_log_is_on_the_disk_before_the_offsets(tmp_path: Path) -> None:
    disk = FaultyDisk()
    # No other thread syncs in the meantime.
    with opened(tmp_path / "s", disk, flush_interval_commit_log=10**6) as store:
        fill(store, 10)
        consumer = store.consumer("g", "t", timeout=0)
        list(consumer)
        disk.order.clear()
        consumer.commit()
        assert store._engine.log.flushed_offset == store.max_offset
        assert disk.order.index("fdatasync") < disk.order.index("rename")


def test_offsets_that_cannot_be_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path / "s", disk) as store:
        fill(store, 10)
        with store.consumer("g", "t", timeout=0) as consumer:
            next(consumer)
            disk.failing["rename"] = EIO
            with pytest.raises(StoreUnavailable):
                consumer.commit()
            # The offset is committed nevertheless, and written as soon as possible.
            assert int(next(consumer).body) == 1
            disk.failing.clear()
        assert saved(store)["t", "g"] == {0: 1}
