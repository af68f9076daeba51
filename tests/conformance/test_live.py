"""A reader of a store that RocketMQ is writing misses no message and changes no file."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.repair.verify import verify_store
from tests.conformance.oracle import Master, master, require_oracle

MESSAGES = 400
READS = 8
MOST_ROUNDS = 500


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fill(running: Master, stop: threading.Event, rounds: list[int]) -> None:
    """Append until the test stops it, for a bounded time."""
    while not stop.is_set() and len(rounds) < MOST_ROUNDS:
        running.ask(f"fill {MESSAGES} 900 {len(rounds)}")
        rounds.append(MESSAGES)


@pytest.mark.java
def test_a_reader_beside_the_real_store_sees_a_growing_prefix(tmp_path: Path) -> None:
    require_oracle()
    seen: list[int] = []
    rounds: list[int] = []
    with master(tmp_path / "store", free_port()) as running:
        running.ask(f"fill {MESSAGES} 900 99")
        stop = threading.Event()
        writer = threading.Thread(target=fill, args=(running, stop, rounds))
        writer.start()
        try:
            for _ in range(READS):
                with lq.MessageStore.open(tmp_path / "store") as store:
                    offsets = [message.physical_offset for message in store.scan()]
                    report = verify_store(store.layout)
                assert offsets[: len(seen)] == seen, "what was read once was not read again"
                assert not report.has_damage, report.findings
                seen = offsets
        finally:
            stop.set()
            writer.join()
        with lq.MessageStore.open(tmp_path / "store") as store:
            assert store.is_live
            assert sum(1 for _ in store.scan()) == MESSAGES + sum(rounds)
            assert store.max_offset == running.ask("status")["maxPhyOffset"]
    assert len(rounds) > 1
