"""A process that delivers and commits is killed: nothing is lost, and nothing comes twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import broker_config
from logquarry.store.transactions import transactions
from tests.crash.ladder import IS_BY_HAND, count, seeds, told
from tests.crash.services_writer import SERVICES, ServicesOrder, decide
from tests.crash.writer import writer

EACH = 8
"""Kills of one process' children, over one store."""
QUIET = SERVICES | {"deliver_delayed": False}


def numbers(store: lq.MessageStore, topic: str) -> Counter[int]:
    return Counter(int(message.body.split(b":")[0]) for message in store.scan(topic=topic))


def check_files(root: Path) -> None:
    """At any moment one of each pair can be read."""
    for name, decode in (
        (broker_config.DELAY_OFFSET_FILE, broker_config.decode_delay_offsets),
        (broker_config.CONSUMER_OFFSET_FILE, broker_config.decode_consumer_offsets),
    ):
        path = root / "config" / name
        if path.exists():
            decode(path.read_bytes())
        else:
            assert not path.with_name(f"{name}.bak").exists()


@pytest.mark.timeout(0 if IS_BY_HAND else 300)
@pytest.mark.parametrize("seed", seeds(count(16), EACH))
def test_kills(seed: int, shm: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = shm / "store"
    known = ServicesOrder()
    with writer("tests.crash.services_writer") as process:
        for number in range(EACH):
            settings = {"flush_disk_type": rng.choice(["SYNC_FLUSH"] + ["ASYNC_FLUSH"] * 3)}
            wanted = rng.choice([0, 3, 30, 200])
            after = rng.choice([0.0, 0.02, 0.3]) * rng.random()
            begun = time.monotonic()

            def stop(order: ServicesOrder, begun: float = begun, after: float = after) -> bool:
                enough = len(order.told["put"]) >= wanted  # noqa: B023 (used in this round only)
                return order.is_done or (enough and time.monotonic() - begun >= after)

            with told(seed, f"round {number}", root, tmp_path):
                order = process.order_of(ServicesOrder(), root, number, settings, stop)
                assert not order.errors
                for kind, found in order.told.items():
                    known.told[kind] |= found
                if root.exists():
                    check_files(root)
    assert known.told["put"]
    with told(seed, "the end", root, tmp_path):
        check_outcome(root, known)


def check_outcome(root: Path, known: ServicesOrder) -> None:
    """Deliver and check what is left, and look."""
    now = lq.StoreConfig(**QUIET)
    with lq.MessageStore.open(root, mode="rw", config=now) as store:
        deadline = time.monotonic() + 60
        # The last ones are delayed by a second.
        while numbers(store, "delayed") != numbers(store, "SCHEDULE_TOPIC_XXXX"):
            store.deliver_due()
            assert time.monotonic() < deadline, (
                numbers(store, "SCHEDULE_TOPIC_XXXX") - numbers(store, "delayed"),
                numbers(store, "delayed") - numbers(store, "SCHEDULE_TOPIC_XXXX"),
            )
            time.sleep(0.05)
        for _ in range(6):
            store.check_transactions(decide)
            time.sleep(0.005)
        delivered, committed = numbers(store, "delayed"), numbers(store, "told")
    said = known.told
    assert set(delivered.values()) <= {1}, "nothing twice"
    assert said["put"] <= delivered.keys(), "nothing lost"
    assert set(committed.values()) <= {1}, "nothing twice"
    assert said["committed"] <= committed.keys(), "nothing lost"
    assert not said["undone"] & committed.keys(), "nothing that was undone"
    # The listener commits odd ones; even ones only their owner did, who may not have told of it.
    assert {number for number in said["left"] if number % 2} <= committed.keys()
    by_owner = {number for number in committed if number % 2 == 0}
    assert by_owner <= said["begun"] - said["undone"] - said["left"]
    with lq.MessageStore.open(root, config=lq.StoreConfig(**QUIET)) as reader:
        found = transactions(reader)
    assert not found.open and found.committed == committed.total()
