"""Delayed messages and transactions that this library and a real broker take over in turn."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.format import broker_json, frame
from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.store.state import transactions
from logquarry.store.transaction.transaction import GIVEN_UP_TOPIC, GROUP, HALF_TOPIC, OP_TOPIC
from tests.conformance.oracle import broker, require_oracle

pytestmark = pytest.mark.java

PARAMS: dict[str, Any] = {
    "mappedFileSizeCommitLog": 131072,
    "mappedFileSizeConsumeQueue": 2000,
    "maxHashSlotNum": 500,
    "maxIndexNum": 2000,
    "messageDelayLevel": "1s 2s 3s 1h",
}
CONFIG = lq.StoreConfig.from_mapping(PARAMS)
_PATIENCE_SECONDS = 120


def wait_for(root: Path, what: str, is_there: Any) -> None:
    """Read the broker's store until a message is there."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        with lq.MessageStore.open(root, config=CONFIG) as store:
            if is_there(store):
                return
        assert time.monotonic() < deadline, f"it never came: {what}"
        time.sleep(0.2)


def bare(message: lq.StoredMessage) -> bytes:
    """The bytes of a frame, without offsets and store time."""
    nothing: dict[str, Any] = {"queue_offset": 0, "physical_offset": 0, "store_timestamp": 0}
    return frame.encode(replace(message.frame, **nothing))


def put_delayed(store: lq.StoreWriter, count: int, kind: str) -> None:
    for number in range(count):
        store.put(
            lq.Message(
                "orders",
                f"{kind}-{number}".encode(),
                queue_id=number % 3,
                tags=["a", None][number % 2],
                keys=f"{kind}{number}",
                properties={"city": "Zürich", f"p{number}": "v", "UNIQ_KEY": f"{kind}{number}"},
                flag=number,
                reconsume_times=number % 4,
                born_host=["10.0.0.1:77", "[2001:db8::1]:88"][number % 2],
                delay_level=number % 4 + 1,
                wait_store_ok=number % 5 > 0,
            )
        )


def delivered(store: lq.MessageStore) -> list[lq.StoredMessage]:
    return list(store.scan("orders"))


def test_delayed_messages_change_hands(tmp_path: Path) -> None:
    """This library, the broker, and this library again each deliver what the other left."""
    require_oracle()
    root, twin = tmp_path / "store", tmp_path / "twin"
    for path in (root, twin):
        with lq.MessageStore.open(path, mode="rw", config=CONFIG, clock=lambda: 5_000) as store:
            put_delayed(store, 40, "first")
    # What this library alone would have delivered.
    with lq.MessageStore.open(twin, mode="rw", config=CONFIG) as store:
        store.deliver_due()
        expected = {message.body: bare(message) for message in delivered(store)}
    assert len(expected) == 40
    # All are due: this library delivers half of them, the broker the rest.
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        delivery = store._services.deliveries[0]
        assert delivery.deliver(int(time.time() * 1_000), limit=20) == 20
        put_delayed(store, 8, "second")
    with broker(root, PARAMS):
        wait_for(root, "deliveries", lambda store: len(delivered(store)) >= 46)
    with lq.MessageStore.open(root, config=CONFIG) as reader:
        found = delivered(reader)
        counts = Counter(message.body for message in found)
        assert set(counts.values()) == {1}, "each once"
        assert all(
            bare(message) == expected[message.body]
            for message in found
            if message.body.startswith(b"first")
        )
        waiting = [m.body for m in reader.scan(SCHEDULE_TOPIC) if m.body not in counts]
        assert waiting == [b"second-3", b"second-7"], "those of an hour"
    # This library delivers what the broker left, and nothing that the broker delivered.
    later = int(time.time() * 1_000) + 3_600_000
    with lq.MessageStore.open(root, mode="rw", config=CONFIG, clock=lambda: later) as store:
        assert store.deliver_due() == 2
        assert {message.body for message in delivered(store)} == {*counts, *waiting}
        assert store.deliver_due() == 0


def offset(root: Path, topic: str) -> int:
    try:
        data = (root / "config" / "consumerOffset.json").read_bytes()
        table = broker_json.decode_consumer_offsets(data)
    except (FileNotFoundError, ValueError):
        # The broker is just writing the file.
        return 0
    return table.get((topic, GROUP), {}).get(0, 0)


@pytest.mark.parametrize("is_checked", [False, True], ids=["by their owners", "by a check too"])
def test_transactions_that_ended_leave_nothing_for_a_broker(
    tmp_path: Path, is_checked: bool
) -> None:
    require_oracle()
    root = tmp_path / "store"
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        for number in range(30):
            message = lq.Message("orders", b"%d" % number, queue_id=number % 4, keys=f"k{number}")
            with store.transaction(message, group="pg") as t:
                if number % 2:
                    t.commit()
        for number in range(30, 34) if is_checked else ():
            with store.transaction(lq.Message("orders", b"%d" % number)) as t:
                t.leave_open()
    later = int(time.time() * 1_000) + 6_001
    with lq.MessageStore.open(root, mode="rw", config=CONFIG, clock=lambda: later) as store:
        if is_checked:
            store.check_transactions(lambda t: ["rollback", "commit"][int(t.message.body) % 2])
        before = [bare(message) for message in store.scan()]
    # Without a check there is no file of offsets: the broker begins with the first half message.
    assert (root / "config" / "consumerOffset.json").exists() == is_checked
    halves = 38 if is_checked else 30
    with broker(root, PARAMS):
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while offset(root, HALF_TOPIC) < halves:
            assert time.monotonic() < deadline, "the broker waits for something"
            time.sleep(0.2)
    with lq.MessageStore.open(root, config=CONFIG) as reader:
        found = transactions(reader)
        ended = halves - 4 if is_checked else halves
        assert (found.committed + found.rolled_back, len(found.open)) == (ended, 0)
        assert found.committed == (17 if is_checked else 15)
        topics = {HALF_TOPIC, OP_TOPIC, GIVEN_UP_TOPIC, "orders"}
        after = [bare(message) for message in reader.scan() if message.topic in topics]
        assert after == before, "the broker had nothing to put"


def test_open_transactions_change_hands(tmp_path: Path) -> None:
    """The broker finds our open transactions, and we find those that it put back."""
    require_oracle()
    root = tmp_path / "store"
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        for number in range(3):
            message = lq.Message("orders", b"%d" % number, queue_id=number)
            with store.transaction(message, group="pg") as t:
                t.leave_open()
    with broker(root, PARAMS):
        wait_for(root, "put back", lambda store: len(list(store.scan(HALF_TOPIC))) >= 6)
    later = int(time.time() * 1_000) + 6_001
    asked: list[int] = []

    def listener(transaction: lq.OpenTransaction) -> str:
        asked.append(transaction.check_times)
        return "rollback" if transaction.queue_id == 2 else "commit"

    with lq.MessageStore.open(root, mode="rw", config=CONFIG, clock=lambda: later) as store:
        report = store.check_transactions(listener)
        assert (report.committed, report.rolled_back) == (2, 1)
        assert all(times >= 2 for times in asked), "the broker asked before"
        assert [message.body for message in delivered(store)] == [b"0", b"1"]
    with lq.MessageStore.open(root, config=CONFIG) as reader:
        assert not transactions(reader).open
