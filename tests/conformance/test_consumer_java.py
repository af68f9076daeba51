"""Consumers of this library and a real broker read each other's offsets."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import broker_json
from logquarry.message import Message
from tests.conformance.oracle import broker, require_oracle
from tests.conformance.test_services_java import CONFIG, PARAMS

pytestmark = pytest.mark.java


def test_offsets_go_to_a_broker_and_back(tmp_path: Path) -> None:
    require_oracle()
    root = tmp_path / "store"
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        for number in range(40):
            store.put(Message("orders", b"%d" % number, queue_id=number % 2, keys="k"))
        store.wait_dispatched()
        with store.consumer("billing", "orders") as consumer:
            taken = [int(message.body) for message in consumer.poll(7)]
            consumer.commit()
    path = root / "config/consumerOffset.json"
    ours = broker_json.decode_consumer_offsets(path.read_bytes())
    assert sorted(ours["orders", "billing"].values()) == [0, 7]
    with broker(root, PARAMS):
        pass
    # The broker has read it, and written it again with what its own groups added.
    theirs = broker_json.decode_consumer_offsets(path.read_bytes())
    assert theirs["orders", "billing"] == ours["orders", "billing"]
    with (
        lq.MessageStore.open(root, mode="rw", config=CONFIG) as store,
        store.consumer("billing", "orders", timeout=0) as consumer,
    ):
        assert consumer.estimates == () and consumer.problems == ()
        left = [int(message.body) for message in consumer]
    assert sorted(taken + left) == list(range(40))
