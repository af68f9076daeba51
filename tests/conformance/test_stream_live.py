"""A stream from a store that RocketMQ is writing has each message once and changes no file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import logquarry as lq
from tests.conformance.oracle import free_port, master, require_oracle
from tests.conformance.test_live import MESSAGES, ROUNDS, filling
from tests.helpers.stream import Stream

READS = 12


@pytest.mark.java
def test_a_stream_beside_the_real_store(tmp_path: Path) -> None:
    require_oracle()
    rng = random.Random(6)
    with master(tmp_path / "store", free_port()) as running:
        running.ask(f"fill {MESSAGES} 900 99")
        stream = Stream(tmp_path / "store", maxBytesPerTrigger="100k")
        with filling(running, READS) as announce:
            for _ in range(READS):
                announce()
                stream.drain(rng.randrange(1, 6))
                if rng.random() < 0.3:
                    stream.restart()
        stream.drain()
        assert stream.at is not None
        assert stream.at.brokers == {"store": running.ask("status")["maxPhyOffset"]}
        assert len(stream.rows) == MESSAGES * (1 + ROUNDS * READS)
    assert not stream.damage.spans
    assert not stream.plan()
    with lq.MessageStore.open(tmp_path / "store") as store:
        assert [offset for _, offset in stream.places] == [m.physical_offset for m in store.scan()]
