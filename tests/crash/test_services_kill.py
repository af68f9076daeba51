"""A process that runs all services is killed: no message is lost, and only reported ones repeat.

Old messages expire, so the parent remembers what the process printed of them.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

import pytest

import logquarry as lq
from logquarry.format import broker_json
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from logquarry.store.state import transactions
from tests.crash.ladder import count, seeds, told
from tests.crash.services_writer import (
    DELAYED,
    GROUP,
    RETRY,
    SERVICES,
    TOLD,
    Got,
    ServicesOrder,
    decide,
    number_of,
    read_offsets,
)
from tests.crash.writer import writer
from tests.helpers.waiting import eventually

EACH: Final = 10
"""Kills of one process' children, over one store."""
QUIET: Final = SERVICES | {"deliver_delayed": False}
KINDS: Final = ("put", "put", "committed", "undone", "left", "sent", "got", "expired")


def check_files(root: Path) -> None:
    """At any moment one of each pair can be read."""
    for name, decode in (
        (broker_json.DELAY_OFFSET_FILE, broker_json.decode_delay_offsets),
        (broker_json.CONSUMER_OFFSET_FILE, broker_json.decode_consumer_offsets),
    ):
        path = root / "config" / name
        if path.exists():
            decode(path.read_bytes())
        else:
            assert not path.with_name(f"{name}.bak").exists()


def check_consumed(
    before: dict[tuple[str, int], int], after: dict[tuple[str, int], int], order: ServicesOrder
) -> None:
    """Compare the messages of one life of the process with the offsets before and after it."""
    came: dict[tuple[str, int], list[int]] = defaultdict(list)
    for got in order.got:
        came[got.topic, got.queue_id].append(got.queue_offset)
    for queue, offsets in came.items():
        # A life begins at the file's offset, leaves no message out, and gives none twice.
        start = before.get(queue, 0)
        assert offsets == list(range(start, start + len(offsets))), queue
    for queue, offset in after.items():
        # Messages before the offset were handled: the consumer had asked for the next one, or
        # committed.
        start = before.get(queue, 0)
        assert start <= offset <= start + len(came[queue]), queue
    for queue, offset in order.done.items():
        assert after[queue] >= offset, "a commit is on the disk when it returns"


@pytest.mark.parametrize("seed", seeds(count(10), EACH))
def test_kills(seed: int, shm: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = shm / "store"
    known = ServicesOrder()
    with writer("tests.crash.services_writer") as process:
        for number in range(EACH):
            settings = {"flush_disk_type": rng.choice(["SYNC_FLUSH"] + ["ASYNC_FLUSH"] * 3)}
            kind, wanted = rng.choice(KINDS), rng.choice([0, 1, 3, 10, 30, 200])
            # Rare events are not waited for that long.
            wanted = min(wanted, {"got": 400, "put": 200}.get(kind, 10))
            after = rng.choice([0.0, 0.02, 0.3]) * rng.random()
            before = read_offsets(root)
            enough_at: list[float] = []

            def stop(
                order: ServicesOrder,
                kind: str = kind,
                wanted: int = wanted,
                after: float = after,
                enough_at: list[float] = enough_at,
            ) -> bool:
                if not enough_at and order.count(kind) >= wanted:
                    enough_at.append(time.monotonic())
                return order.is_done or bool(enough_at and time.monotonic() - enough_at[0] >= after)

            with told(seed, f"round {number}: {wanted} {kind}", root, tmp_path):
                order = process.order_of(ServicesOrder(), root, number, settings, stop)
                assert not order.errors
                if root.exists():
                    check_files(root)
                    check_consumed(before, read_offsets(root), order)
            known.add(order)
    assert known.told["put"]
    with told(seed, "the end", root, tmp_path):
        check_outcome(root, known)
    print(f"seed {seed}: {dict(tally(known))}")


def tally(known: ServicesOrder) -> Counter[str]:
    """How many events of each kind came."""
    return Counter({kind: len(found) for kind, found in known.told.items()}) + Counter(
        got=len(known.got), expired=len(known.expired)
    )


def check_outcome(root: Path, known: ServicesOrder) -> None:
    """Deliver, check and consume the rest, then check every message ever received."""
    said = known.told
    with StoreWriter.start(root, config=lq.StoreConfig(**QUIET)) as store:
        assert store.min_offset >= max(known.expired, default=0)
        for _ in range(6):
            store.check_transactions(decide)
            time.sleep(0.005)
        # The last messages are delayed by a second.
        eventually(lambda: not (store.deliver_due() or is_waiting(store)))
        with store.consumer(GROUP, [DELAYED, TOLD], timeout=0) as consumer:
            known.got += (
                Got(number_of(one.body), one.topic, one.queue_id, one.queue_offset)
                for one in consumer
            )
        store.wait_dispatched()
    places: dict[str, dict[int, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    for got in known.got:
        places[got.topic][got.number].add((got.queue_id, got.queue_offset))
    delivered, committed, again = places[DELAYED], places[TOLD], places[RETRY]
    # Each message has one place in the log, even if a consumer gets it twice.
    assert all(len(found) == 1 for found in delivered.values()), "nothing is delivered twice"
    assert all(len(found) == 1 for found in committed.values()), "nothing is committed twice"
    assert said["put"] <= delivered.keys(), "nothing lost"
    assert said["committed"] <= committed.keys(), "nothing lost"
    assert said["sent"] <= again.keys(), "nothing lost"
    assert not said["undone"] & committed.keys(), "nothing that was undone"
    # The listener commits odd numbers; only the owner commits even ones, and may die before saying
    # so.
    assert {number for number in said["left"] if number % 2} <= committed.keys()
    by_owner = {number for number in committed if number % 2 == 0}
    assert by_owner <= said["begun"] - said["undone"] - said["left"]
    came = Counter(got.number for got in known.got if got.topic != RETRY)
    for number, found in again.items():
        # A message is sent back at most as often as it came, and each copy is delivered once.
        assert len(found) <= came[number]
    with lq.MessageStore.open(root, config=lq.StoreConfig(**QUIET)) as reader:
        assert not transactions(reader).open
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings


def is_waiting(store: StoreWriter) -> bool:
    """Whether a delayed message is still to be delivered."""
    if store._services.deliveries[1].waiting:
        return True
    return any(level.delivered < level.max_offset for level in store.stats().state.delay_levels)
