"""A writing process is killed: every acknowledged message is there, flushed or not.

The second test does the same with stores of RocketMQ 5.5.0 (see ``test_rocketmq5.py``).
"""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.testing.model_store import ModelStore, explain
from tests.conformance import broker_truth
from tests.conformance.rocketmq5 import rocketmq5_stores, stores5
from tests.crash.broker_crashes import Crash, Ours, Source, problems
from tests.crash.checks import check_image, recovered
from tests.crash.ladder import count, seeds, told
from tests.crash.writer import SETTINGS, Order, Writer, message_of, writer

EACH = 10
"""Kills of one process' children."""
BROKER_STORES = {
    "plain": ("Orders", "Fifo"),
    "batchcq": ("BatchCq", "Plain"),
    "multipath": ("Orders", "Later"),
    "propcrc": ("Orders", "Later"),
}
"""Scenario -> topics of its store that get messages."""
VERSION = "5.5.0"
SERVED = 4


@pytest.mark.parametrize("seed", seeds(count(10), EACH))
def test_kills(seed: int, shm: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = shm / "store"
    model = ModelStore()
    acked = 0
    with writer() as process:
        for number in range(1, EACH + 1):
            settings = {"flush_disk_type": rng.choice(["SYNC_FLUSH", "ASYNC_FLUSH"])}
            config = lq.StoreConfig(**SETTINGS | settings)
            begun, after = time.monotonic(), rng.choice([0.0, 0.01, 0.05, 0.2]) * rng.random()
            wanted = rng.choice([0, 1, 20, 200])

            def stop(order: Order, begun: float = begun, after: float = after) -> bool:
                enough = len(order.acks) >= wanted  # noqa: B023 (used in this round only)
                return order.is_done or (enough and time.monotonic() - begun >= after)

            with told(seed, f"round {number}", root, tmp_path):
                order = process.order(root, number, settings, stop)
                assert not order.errors
                order.tell(model, number, is_durable=True)
                acked += len(order.acks)
                wrong = check_image(root, config, model, model.mark(), is_killed=True)
                assert not wrong, explain(wrong)
                recovered(root, config, model)
    assert acked


# ------------------------------------------------------------------------- stores of RocketMQ 5.5.0
@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    made = [Source(name, stores5() / VERSION / name) for name in BROKER_STORES]
    if all((source.folder / "pulled.json").exists() for source in made):
        return made
    folder = rocketmq5_stores(tmp_path_factory)
    return [Source(name, folder / f"{VERSION}-{name}") for name in BROKER_STORES]


@pytest.mark.parametrize("seed", seeds(count(10), EACH))
def test_kills_in_stores_of_a_broker(seed: int, sources: list[Source], tmp_path: Path) -> None:
    source = sources[seed % len(sources)]
    root = source.copy(tmp_path)
    with writer() as process:
        killed_often(source, root, seed, process)


@pytest.mark.slow
@pytest.mark.java
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", seeds(SERVED, 1))
def test_a_broker_serves_what_was_acknowledged(
    seed: int, sources: list[Source], tmp_path: Path
) -> None:
    source = sources[seed % len(sources)]
    if not (source.folder / "pulled.json").exists():
        pytest.skip("no stores of the oracle with what clients received (LOGQUARRY_STORES5)")
    root = source.copy(tmp_path)
    with writer() as process:
        ours = killed_often(source, root, seed, process)
    after = broker_truth.serve(tmp_path, VERSION)
    end, store = log_end(source), source.folder / "store"
    assert not broker_truth.not_served(source.truth, after, end=end, moved=False, root=store)
    for (topic, queue_id), rows in ours.items():
        served = {(row[0], row[5]) for row in after.pulled[f"{topic}/{queue_id}"]}
        assert {(queued, zlib.crc32(body)) for queued, _, body in rows} <= served


def killed_often(source: Source, root: Path, seed: int, process: Writer) -> Ours:
    """Kill writers of a copy of a store and recover it, and return the messages that it has."""
    rng = random.Random(seed)
    topics = BROKER_STORES[source.name]
    acked: dict[bytes, tuple[int, int]] = {}
    ours: Ours = {}
    whole = Crash(log_end(source), (), 0, is_short=False, harm=(), is_patchy=False, may_ask=False)
    for number in range(1, EACH + 1):
        settings = {"flush_disk_type": rng.choice(["SYNC_FLUSH", "SYNC_FLUSH", "ASYNC_FLUSH"])}
        begun, after = time.monotonic(), rng.choice([0.0, 0.01, 0.05, 0.2]) * rng.random()
        wanted = rng.choice([0, 1, 20, 50])

        def stop(order: Order, begun: float = begun, after: float = after) -> bool:
            enough = len(order.acks) >= wanted  # noqa: B023 (used in this round only)
            return order.is_done or (enough and time.monotonic() - begun >= after)

        with told(seed, f"{source.name}, round {number}"):
            order = process.order(root, number, settings, stop, topics)
            assert not order.errors
            for sent, physical, queued, _ in order.acks:
                body = bytes(message_of(number, sent, topics).body)
                acked[body] = physical, queued
            if rng.random() < 0.5:
                lq.recover(root, apply=True)
            with lq.MessageStore.open(root, mode="rw") as store:
                ours = messages_after(store, whole.end)
            there = {body: row[1::-1] for rows in ours.values() for row in rows for body in row[2:]}
            assert {body: there.get(body) for body in acked} == acked
            assert not list(problems(root, source, whole, ours, is_rocketmq=False))
    assert acked
    return ours


def log_end(source: Source) -> int:
    """Physical offset of the end of a source's log."""
    return int(source.frames[-1]["physicalOffset"] + source.frames[-1]["size"])


def messages_after(store: lq.MessageStore, start: int) -> Ours:
    """The messages of the log from a physical offset on."""
    ours: Ours = {}
    for message in store.scan():
        if message.physical_offset >= start:
            row = message.queue_offset, message.physical_offset, bytes(message.content())
            ours.setdefault((message.topic, message.queue_id), []).append(row)
    return ours
