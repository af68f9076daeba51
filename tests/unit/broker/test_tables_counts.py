"""The counts of a broker have a limited number of keys, and all messages are counted."""

from __future__ import annotations

from pathlib import Path

import logquarry as lq
from logquarry.broker import Broker
from logquarry.broker.tables import Counts
from tests.helpers.broker_client import SMALL, Client, play


def test_further_keys_are_counted_together() -> None:
    counts = Counts(most=2)
    for number in range(5):
        counts.add_put(f"t{number}", 1, 10)
        counts.add_got("t", f"g{number}", 2, 20)
        counts.add_sent_back("t", f"g{number}")
        counts.add_request(number)
    counts.add_put("t0", 1, 10)
    assert counts.put == {"t0": 2, "t1": 1, "": 3}
    assert counts.put_bytes == {"t0": 20, "t1": 10, "": 30}
    assert counts.got == {("t", "g0"): 2, ("t", "g1"): 2, ("", ""): 6}
    assert counts.got_bytes == {("t", "g0"): 20, ("t", "g1"): 20, ("", ""): 60}
    assert counts.sent_back == {("t", "g0"): 1, ("t", "g1"): 1, ("", ""): 3}
    assert counts.requests == {0: 1, 1: 1, -1: 3}


def test_a_client_with_many_groups(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        store.put(lq.Message("t", b"x"))

    async def scenario(broker: Broker, client: Client) -> None:
        for number in range(6):
            answer = await client.pull("t", 0, 0, consumerGroup=f"g{number}")
            assert answer.code == 0
        got = broker.core.counts.got
        assert len(got) == 4 and sum(got.values()) == 6
        assert got["", ""] == 3

    play(scenario, path, most_counts=3)
