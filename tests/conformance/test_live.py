"""A reader of a store that RocketMQ is writing misses no message and changes no file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.repair.verification import verify_store
from tests.conformance.oracle import Master, free_port, master, require_oracle

MESSAGES = 400
READS = 8
ROUNDS = 3
"""How often the store is filled beside each read."""


@contextmanager
def filling(running: Master, reads: int) -> Iterator[Callable[[], None]]:
    """Append beside the block, three times for each read that it announces by a call.

    At the end the store has MESSAGES messages more for each of these times, however fast it is.
    """
    turns = threading.Semaphore(0)

    def fill() -> None:
        for number in range(ROUNDS * reads):
            turns.acquire()
            running.ask(f"fill {MESSAGES} 900 {number}")

    writer = threading.Thread(target=fill)
    writer.start()
    announced = 0

    def announce() -> None:
        nonlocal announced
        announced += 1
        turns.release(ROUNDS)

    try:
        yield announce
    finally:
        if announced < reads:
            turns.release(ROUNDS * (reads - announced))
        writer.join()


@pytest.mark.java
def test_a_reader_beside_the_real_store_sees_a_growing_prefix(tmp_path: Path) -> None:
    require_oracle()
    seen: list[int] = []
    with master(tmp_path / "store", free_port()) as running:
        running.ask(f"fill {MESSAGES} 900 99")
        with filling(running, READS) as announce:
            for _ in range(READS):
                announce()
                with lq.MessageStore.open(tmp_path / "store") as store:
                    offsets = [message.physical_offset for message in store.scan()]
                    report = verify_store(store.layout)
                assert offsets[: len(seen)] == seen, "what was read once was not read again"
                assert not report.has_damage, report.findings
                seen = offsets
        with lq.MessageStore.open(tmp_path / "store") as store:
            assert store.is_live
            assert sum(1 for _ in store.scan()) == MESSAGES * (1 + ROUNDS * READS)
            assert store.max_offset == running.ask("status")["maxPhyOffset"]
