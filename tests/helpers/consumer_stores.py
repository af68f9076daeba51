"""Filled stores for tests of consumers, the numbers of their messages, and saved offsets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import logquarry as lq
from logquarry.format import broker_json
from logquarry.store.consumer.consumer import Consumer
from logquarry.store.message_store import StoreWriter

LONG = 60.0
"""Seconds: far more than any of these tests takes."""


def fill(store: StoreWriter, count: int, *, topic: str = "t", queues: int = 1) -> None:
    """Put messages 0, 1, ... into the queues in turn, with the tags a, b, c in turn."""
    end = 0
    for number in range(count):
        result = store.put(
            lq.Message(
                topic,
                b"%d" % number,
                queue_id=number % queues,
                tags="abc"[number % 3],
                properties={"n": str(number)},
            )
        )
        end = result.end_offset
    assert store.wait_dispatched(end, timeout=LONG)


def numbers(messages: Iterator[lq.StoredMessage] | list[lq.StoredMessage] | Consumer) -> list[int]:
    return [int(message.body) for message in messages]


def saved(store: lq.MessageStore) -> dict[tuple[str, str], dict[int, int]]:
    return broker_json.decode_consumer_offsets(
        (Path(store.root) / "config/consumerOffset.json").read_bytes()
    )
