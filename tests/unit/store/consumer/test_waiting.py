"""Consumers that wait for messages, also in a store with another writer, and what ends them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import logquarry as lq
from logquarry.disk.service import Health
from logquarry.errors import StoreUnavailable
from logquarry.store.consumer import registry as consumers_module
from logquarry.store.consumer.consumer import Consumer
from logquarry.store.consumer.registry import _Saver
from logquarry.store.consumer.source import Arrivals
from logquarry.store.message_store import StoreWriter
from tests.helpers.consumer_stores import LONG, fill, numbers, saved
from tests.helpers.small_store import facts, opened
from tests.helpers.waiting import eventually


@pytest.fixture(name="store")
def small_store(tmp_path: Path) -> Iterator[StoreWriter]:
    with opened(tmp_path / "store") as store:
        yield store


def test_a_consumer_waits_for_what_comes(store: StoreWriter) -> None:
    found: list[int] = []
    consumer = store.consumer("g", "t")

    def consume() -> None:
        for message in consumer:
            found.append(int(message.body))

    thread = threading.Thread(target=consume)
    thread.start()
    fill(store, 20)
    fill(store, 20)
    with store.consumer("other", "t", timeout=LONG) as other:
        for _ in range(40):
            next(other)
    # Before its first read a consumer has no queue, and so no lag.
    eventually(lambda: len(found) == 40)
    consumer.close()
    thread.join(LONG)
    assert not thread.is_alive()
    assert found == [*range(20), *range(20)]


def test_closing_the_store_ends_consumers(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 5)
        consumer = store.consumer("g", "t")
        found: list[int] = []

        def consume() -> None:
            for message in consumer:
                found.append(int(message.body))

        thread = threading.Thread(target=consume)
        thread.start()
        eventually(lambda: len(found) == 5)
    thread.join(LONG)
    assert not thread.is_alive() and found == list(range(5)) and consumer.is_closed
    with pytest.raises(StoreUnavailable):
        store.consumer("g", "t")


def test_async(store: StoreWriter) -> None:
    async def consume() -> list[int]:
        found = []
        with store.consumer("g", "t", timeout=LONG) as consumer:
            async for message in consumer:
                found.append(int(message.body))
                if len(found) == 300:
                    # With the next call, the message counts as handled.
                    break
            async for message in consumer:
                found.append(int(message.body))
                if len(found) == 605:
                    consumer.commit()
                    return found
        raise AssertionError("it ended")

    async def both() -> tuple[list[int], None]:
        return await asyncio.gather(consume(), asyncio.to_thread(fill, store, 605))

    found, _ = asyncio.run(asyncio.wait_for(both(), LONG))
    assert found == list(range(605))
    assert saved(store)["t", "g"] == {0: 605}


def test_an_async_consumer_can_be_cancelled_and_ends_after_its_timeout(
    store: StoreWriter,
) -> None:
    async def run() -> None:
        async def consume(timeout: float | None) -> int:
            count = 0
            with store.consumer("g", "t", timeout=timeout) as consumer:
                async for _ in consumer:
                    count += 1
            return count

        task = asyncio.create_task(consume(None))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(fill, store, 3)
        assert await consume(0) == 3

    asyncio.run(asyncio.wait_for(run(), LONG))


def test_a_store_that_is_closing_makes_no_consumers(
    store: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = store._services.close

    def closing() -> None:
        # Its thread would write offsets without end.
        with pytest.raises(StoreUnavailable):
            store.consumer("g", "t")
        close()

    monkeypatch.setattr(store._services, "close", closing)
    store.close()


def test_a_store_that_is_closed_while_a_consumer_is_made(
    store: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Consumer] = []

    class Slow(Consumer):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            made.append(self)
            store.close()

    monkeypatch.setattr(consumers_module, "Consumer", Slow)
    with pytest.raises(StoreUnavailable):
        store.consumer("g", "t")
    assert made[0].is_closed


def test_a_loop_that_is_closed_while_somebody_wakes_it() -> None:
    arrivals = Arrivals()

    async def wait() -> Callable[[], None]:
        task = asyncio.ensure_future(arrivals.wait_async(arrivals.version))
        await asyncio.sleep(0)
        assert not task.done()
        return next(iter(arrivals._callbacks))

    tell = asyncio.run(wait())
    tell()


def test_an_interrupt_in_a_wait_leaves_no_lock_taken() -> None:
    """The dispatcher's thread would wait for ever for this lock."""
    arrivals = Arrivals()
    left = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        # Python runs signal handlers at calls and returns, but not between two lines.
        nonlocal left
        left -= event in ("call", "return")
        if not left:
            raise KeyboardInterrupt
        return trace

    for number in range(1, 1_000):
        left, before = number, sys.gettrace()
        sys.settrace(trace)
        try:
            arrivals.wait(arrivals.version, 0.0)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        waking = threading.Thread(target=arrivals.wake, daemon=True)
        waking.start()
        waking.join(10)
        assert not waking.is_alive(), f"event {number}"
    assert number > 5


def test_offsets_of_a_store_that_takes_no_writes_are_given_up() -> None:
    health = Health()

    def save() -> None:
        health.require_writable()
        raise StoreUnavailable("the disk is full")

    saver = _Saver(save, health, 5_000)
    saver._run_once()
    health.poison("a sync failed")
    with pytest.raises(StoreUnavailable):
        saver._run_once()


# ----------------------------------------------------------------- a store that others write
def test_beside_a_writer(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 100, queues=2)
        with lq.MessageStore.open(tmp_path / "s") as reader:
            consumer = reader.consumer("g", ["t", "u"], tags="a || b || c", timeout=LONG)
            found = sorted(numbers([next(consumer) for _ in range(100)]))
            assert found == list(range(100))
            # New files of the log and of queues, and a new queue, while it waits.
            threading.Timer(0.02, fill, [store, 300]).start()
            assert numbers([next(consumer) for _ in range(300)]) == list(range(300))
            threading.Timer(0.02, fill, [store, 5], {"topic": "u"}).start()
            assert numbers([next(consumer) for _ in range(5)]) == list(range(5))
            with pytest.raises(StoreUnavailable, match='mode="rw"'):
                consumer.retry(next(iter(reader.scan())))


def test_reading_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 10)
        with store.consumer("g", "t") as consumer:
            consumer.poll(4)
            consumer.commit()
    before = facts(tmp_path / "s")
    for _ in range(2):
        with (
            lq.MessageStore.open(tmp_path / "s") as reader,
            reader.consumer("g", "t", timeout=0) as consumer,
        ):
            # It goes on where the group is, and its commits are not kept.
            assert numbers(consumer) == [4, 5, 6, 7, 8, 9]
            consumer.commit()
            assert consumer.poll() == []
    assert facts(tmp_path / "s") == before


def test_async_beside_a_writer(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, lq.MessageStore.open(tmp_path / "s") as reader:

        async def consume() -> int:
            count = 0
            with reader.consumer("g", "t", timeout=LONG) as consumer:
                async for _ in consumer:
                    count += 1
                    if count == 50:
                        return count
            return count

        async def both() -> int:
            count, _ = await asyncio.gather(consume(), asyncio.to_thread(fill, store, 50))
            return count

        assert asyncio.run(asyncio.wait_for(both(), LONG)) == 50
