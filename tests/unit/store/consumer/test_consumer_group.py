"""Several consumers of a group: at any time one of them owns a queue; they get all messages."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.store.consumer.consumer import Consumer
from logquarry.store.consumer.group import allocate
from logquarry.store.message_store import StoreWriter
from tests.helpers.consumer_stores import LONG, fill, numbers, saved
from tests.helpers.small_store import opened


@pytest.fixture(name="store")
def small_store(tmp_path: Path) -> Iterator[StoreWriter]:
    with opened(tmp_path / "store") as store:
        yield store


def test_the_average_allocation() -> None:
    # AllocateMessageQueueAveragely: 8 queues and 3 consumers; then more consumers than queues.
    assert [allocate(range(8), 3, n) for n in range(3)] == [range(3), range(3, 6), range(6, 8)]
    assert [list(allocate([4, 9], 3, n)) for n in range(3)] == [[4], [9], []]


@given(st.integers(0, 40), st.integers(1, 12))
def test_each_queue_is_allocated_once(queues: int, members: int) -> None:
    shares = [allocate(range(queues), members, number) for number in range(members)]
    assert [queue for share in shares for queue in share] == list(range(queues))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def queues_of(*consumers: Consumer) -> list[list[int]]:
    return [[queue_id for topic, queue_id in one.queues if topic == "t"] for one in consumers]


def test_queues_change_hands_between_messages(store: StoreWriter) -> None:
    fill(store, 400, queues=4)
    first = store.consumer("g", "t", timeout=0)
    assert queues_of(first) == [[0, 1, 2, 3]]
    found = [next(first) for _ in range(5)]
    second = store.consumer("g", "t", timeout=0)
    # No consumer takes a queue that another one is reading.
    assert queues_of(first, second) == [[0, 1, 2, 3], []]
    assert second.poll() == []
    found.append(next(first))
    assert queues_of(first) == [[0, 1]]
    found += second.poll(1000)
    assert queues_of(first, second) == [[0, 1], [2, 3]]
    found += list(second)
    found += list(first)
    assert sorted(numbers(found)) == list(range(400))
    second.close()
    fill(store, 8, queues=4)
    assert sorted(numbers(first)) == list(range(8))
    assert queues_of(first) == [[0, 1, 2, 3]]
    first.close()
    assert saved(store)["t", "g"] == dict.fromkeys(range(4), 102)


def test_what_is_not_handled_comes_to_the_next_owner(store: StoreWriter) -> None:
    fill(store, 10)
    first = store.consumer("g", "t", timeout=0)
    assert int(next(first).body) == 0 and int(next(first).body) == 1
    first.close()
    with store.consumer("g", "t", timeout=0) as second:
        assert int(next(second).body) == 1


def test_a_queue_whose_offset_could_not_be_read_is_taken_later(store: StoreWriter) -> None:
    fill(store, 10)
    progress = store._consumers.progress
    failing = mock.patch.object(progress, "offset", side_effect=StoreUnavailable("for a test"))
    with failing, pytest.raises(StoreUnavailable):
        store.consumer("g", "t")
    with store.consumer("g", "t", timeout=0) as consumer:
        assert numbers(consumer) == list(range(10))
    store.put(lq.Message("u", b"1"))
    store.wait_dispatched()
    with store.consumer("h", ["t", "u"], timeout=0) as consumer:
        consumer.poll()
        with failing:
            store.put(lq.Message("u", b"2", queue_id=1))
            store.wait_dispatched()
            with pytest.raises(StoreUnavailable):
                while True:
                    consumer.poll(100)
        assert 2 in numbers(consumer)


def test_members_of_different_topics(store: StoreWriter) -> None:
    for topic in ("t", "u"):
        fill(store, 10, topic=topic, queues=2)
    one = store.consumer("g", ["t"], timeout=0)
    other = store.consumer("g", ["t", "u"], timeout=0)
    while one.poll(100) or other.poll(100):
        pass
    assert one.queues == (("t", 0),)
    assert other.queues == (("t", 1), ("u", 0), ("u", 1))


def test_groups_do_not_share(store: StoreWriter) -> None:
    fill(store, 20, queues=2)
    with (
        store.consumer("g", "t", timeout=0) as one,
        store.consumer("h", "t", timeout=0) as other,
    ):
        assert sorted(numbers(one)) == sorted(numbers(other)) == list(range(20))


def test_members_that_come_and_go(store: StoreWriter) -> None:
    """While consumers join and leave, each queue has one owner, and all messages are handled.

    A message is delivered again only if the consumer that got it did not handle it.
    """
    queues, count = 5, 4_000
    handled: Counter[int] = Counter()
    owners: dict[int, int] = {}
    wrong: list[str] = []
    lock = threading.Lock()
    all_put = threading.Event()

    def work(number: int) -> None:
        rng = random.Random(number)
        while not (all_put.is_set() and sum(handled.values()) >= count):
            with store.consumer("g", "t", timeout=0.05) as consumer:
                left = rng.randrange(1, 400)
                for message in consumer:
                    with lock:
                        before = owners.setdefault(message.queue_id, number)
                        if before != number:
                            wrong.append(f"{message.queue_id} is {before}'s and {number}'s")
                    with lock:
                        handled[int(message.body)] += 1
                        del owners[message.queue_id]
                    left -= 1
                    if not left:
                        # The last message counts as handled.
                        consumer.commit()
                        break

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    fill(store, count, queues=queues)
    all_put.set()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert handled == Counter(range(count))


def test_members_of_a_store_that_is_read(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 900, queues=6)
    found: list[int] = []

    def consume(consumer: Consumer) -> None:
        while len(found) < 900:
            found.extend(numbers(consumer))

    with lq.MessageStore.open(tmp_path / "s") as reader:
        threads = [
            threading.Thread(target=consume, args=[reader.consumer("g", "t", timeout=0.01)])
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
    assert sorted(found) == list(range(900))
