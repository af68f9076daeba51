"""A store's state and the counts of its topics: counted once, then kept up to date."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.read import log_queues
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import RetainedCounter, UnitCount, count_units
from logquarry.read.queue import Units
from logquarry.store.message_store import StoreWriter
from logquarry.store.overview import count_log, overview
from logquarry.store.state import DelayLevel, GroupLag, TopicStats
from logquarry.store.transaction.transaction import HALF_TOPIC, HalfCounter
from tests.helpers.small_store import NOW, config

FILE = 16_384


def put_some(store: lq.StoreWriter, rng: random.Random, count: int, sizes: int = 900) -> None:
    for _ in range(count):
        topic = rng.choice(["orders", "payments", "x"])
        store.put(lq.Message(topic, bytes(rng.randrange(sizes)), queue_id=rng.randrange(2)))
    store.wait_dispatched()


def by_walk(store: lq.MessageStore) -> dict[str, TopicStats]:
    """Count by a walk over the frames."""
    store.refresh()
    counted = count_log(store)
    found: dict[str, TopicStats] = {}
    for (topic, queue_id), messages in counted.messages.items():
        before = found.get(topic, TopicStats(0, 0))
        size = counted.bytes[topic, queue_id]
        found[topic] = TopicStats(before.messages + messages, before.bytes + size)
    return found


def kept(store: lq.MessageStore) -> dict[str, TopicStats]:
    return {name: one for name, one in store.stats().state.retained.items() if one.messages}


@pytest.mark.parametrize("seed", range(4))
def test_what_topics_keep(tmp_path: Path, seed: int) -> None:
    """After any puts and retentions, with or without earlier calls."""
    rng = random.Random(seed)
    root = tmp_path / "store"
    with StoreWriter.start(root, config=config(), clock=lambda: NOW) as store:
        reader = lq.MessageStore.open(root, config=config())
        for _ in range(12):
            action = rng.choice(["put", "put", "retain", "ask", "ask beside"])
            if action == "put":
                put_some(store, rng, rng.randrange(1, 80))
            elif action == "retain":
                store.flush()
                keep = rng.randrange(6) * FILE // 2
                store.retain(lq.RetentionRules(keep_bytes=keep), apply=True)
            elif action == "ask":
                assert kept(store) == by_walk(store)
            else:
                reader.refresh()
                assert kept(reader) == by_walk(store)
        assert kept(store) == by_walk(store)
        walked = by_walk(store)
        reader.close()
    with lq.MessageStore.open(root, config=config()) as again:
        assert kept(again) == walked
        seen = {topic.topic: (topic.messages, topic.bytes) for topic in overview(again).topics}
        assert {name: pair for name, pair in seen.items() if pair[0]} == walked


def test_only_what_is_new_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def counting(units: Units, start: int, end: int, *, is_batch: bool = False) -> UnitCount:
        counted.append(len(units))
        return count_units(units, start, end, is_batch=is_batch)

    monkeypatch.setattr(log_queues, "count_units", counting)
    with StoreWriter.start(tmp_path / "store", config=config()) as store:
        put_some(store, random.Random(1), 200)
        store.stats()
        assert sum(counted) == 200
        counted.clear()
        store.stats()
        assert sum(counted) == 0
        put_some(store, random.Random(2), 7)
        store.stats()
        assert sum(counted) == 7
        counted.clear()
        store.flush()
        store.retain(lq.RetentionRules(keep_bytes=2 * FILE), apply=True)
        store.stats()
        # The files of queues that lost entries, and the next file of each.
        assert 0 < sum(counted) < 200


@pytest.mark.parametrize("again", [10, 30, 50])
def test_a_topic_that_came_again(tmp_path: Path, again: int) -> None:
    counter = RetainedCounter()
    sizes = []
    for number, count in enumerate((30, again)):
        root = tmp_path / str(number)
        with StoreWriter.start(root, config=config()) as store:
            for _ in range(count):
                store.put(lq.Message("t", b"x" * (100 + 1_000 * number)))
        with lq.MessageStore.open(root, config=config()) as opened:
            queue = opened.queue("t", 0)
            assert queue is not None
            (found,) = counter.count([queue], 0, opened.max_offset).values()
            assert found.bytes == sum(message.size for message in opened.scan())
            sizes.append(found.messages)
    assert sizes == [30, again]
    assert counter.count([], 0, 0) == {}


def test_the_state_of_a_store_at_rest(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreWriter.start(root, config=config(), clock=lambda: NOW) as store:
        put_some(store, random.Random(3), 100)
        for _ in range(3):
            store.put(lq.Message("later", b"x", delay_level=2))
        store.wait_dispatched()
        high = store.queue_offsets("orders", 0).max
        live = store.stats()
        # Ages are computed with the store's clock.
        assert live.state.reserve_time_ms == 0
    folder = root / "config"
    # The offset is after the end of a new queue: count all messages, because a consumer gets them.
    table = {"orders@group": {"0": high - 3}, "gone@other": {"0": 5}, "orders@old": {"0": high + 1}}
    (folder / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    (folder / "delayOffset.json").write_text('{"offsetTable":{2:1}}')
    with lq.MessageStore.open(root, config=config()) as store:
        stats = store.stats()
        state = stats.state
        assert (state.state, state.dispatch_behind, state.flush_behind) == ("closed", 0, 0)
        assert (state.min_offset, state.max_offset) == (store.min_offset, store.max_offset)
        assert state.first_timestamp == NOW
        assert state.reserve_time_ms is not None
        assert state.reserve_time_ms > 0
        lags = {lag.group: lag for lag in state.consumer_lag}
        assert lags == {
            "other": GroupLag("other", "gone", 0),
            "group": GroupLag("group", "orders", 3),
            "old": GroupLag("old", "orders", high),
        }
        assert state.delay_levels == (DelayLevel(2, 1, 3),)
        assert state.commit_log_disk_ratio is not None
        assert 0 < state.commit_log_disk_ratio < 1
        log_files = list((root / "commitlog").iterdir())
        assert state.file_bytes["commitlog"] == FILE * len(log_files)
        assert stats.put_messages == stats.get_found == 0
        assert state.retained == live.state.retained
        assert json.loads(json.dumps(stats.to_json())) == stats.to_json()
    assert live.state.state == "live"
    assert live.put_messages == 103
    (folder / "consumerOffset.json").write_text("[")
    (root / "abort").touch()
    with lq.MessageStore.open(root, config=config()) as store:
        state = store.stats().state
        assert state.state == "crashed"
        assert state.consumer_lag == ()
    # The durable offset is lost: then it is unknown how many bytes were not synced at the crash.
    shutil.rmtree(root / ".logquarry")
    with lq.MessageStore.open(root, config=config()) as store:
        assert store.stats().state.flush_behind is None


def test_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    with lq.MessageStore.open(tmp_path) as store:
        state = store.stats().state
    assert (state.min_offset, state.max_offset, state.first_timestamp) == (0, 0, None)
    assert state.retained == {}


def test_messages_by_their_sizes(tmp_path: Path) -> None:
    with StoreWriter.start(
        tmp_path / "store", config=config(mapped_file_size_commit_log=8 << 20)
    ) as store:
        for size in (10, 2_000, 2_000, 100_000, 600_000, 3_000_000):
            store.put(lq.Message("t", bytes(size)))
        store.put_batch([lq.Message("t", bytes(900)), lq.Message("t", bytes(900))])
        store.put_many([lq.Message("t", bytes(size)) for size in (10, 5_000, 700)])
        stats = store.stats()
        assert stats.sizes == (5, 2, 2, 1, 0, 1, 0)
        assert sum(stats.sizes) == stats.put_messages == 11
        assert stats.put_average_size == stats.put_bytes / 11
        store.wait_dispatched()
        store.get("t", 0, 0)
        store.get("t", 0, 99)
        stats = store.stats()
        assert stats.get_longest_ms > 0
        assert (stats.get_found, stats.get_missed) == (1, 1)
        assert stats.get_found_rates.last_10_s > 0
        assert stats.get_missed_rates.last_600_s > 0
    # The counts of the closed store remain.
    assert store.stats().put_messages == 11
    assert store.stats().state.retained == {}


@pytest.mark.parametrize("again", [1, 2, 5])
def test_half_messages_of_topics_that_came_again(tmp_path: Path, again: int) -> None:
    counter = HalfCounter()
    for name, count, size in (("t", 2, 50), ("u", again, 60)):
        root = tmp_path / name
        with StoreWriter.start(root, config=config()) as store:
            for _ in range(count):
                with store.transaction(lq.Message(name, bytes(size))) as transaction:
                    transaction.leave_open()
        with lq.MessageStore.open(root, config=config()) as opened:
            queue, log = opened.queue(HALF_TOPIC, 0), CommitLog(opened.layout)
            assert queue is not None
            assert counter.count([queue], log.sound_frame_at, {}) == {name: count}
