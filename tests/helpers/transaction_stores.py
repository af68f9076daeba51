"""Small stores with transactions, and a listener that records the checks it receives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.message import Message
from logquarry.store.message_store import StoreWriter
from logquarry.store.state import transactions
from logquarry.store.transaction.checks import OpenTransaction
from logquarry.testing.clock import FakeClock
from tests.helpers.small_store import config as small_config

NOW = 1_700_000_000_000
TIMEOUT = 6_000


def opened(root: Path, clock: FakeClock, **settings: Any) -> StoreWriter:
    config = small_config(mapped_file_size_commit_log=65_536, **settings)
    return StoreWriter.start(root, config=config, clock=clock)


def message(body: bytes = b"x", **fields: Any) -> Message:
    topic = fields.pop("topic", "orders")
    return lq.Message(topic, body, queue_id=1, tags="t", **fields)


def bodies(store: lq.MessageStore, topic: str = "orders") -> list[bytes]:
    return [found.body for found in store.scan(topic)]


def facts(root: Path) -> tuple[int, int, int, int]:
    """Numbers of committed, rolled back, put back and open transactions, by a reader."""
    with lq.MessageStore.open(root) as store:
        found = transactions(store)
    return found.committed, found.rolled_back, found.put_back, len(found.open)


class Listener:
    """Answers by the body, and records each check."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[OpenTransaction] = []

    def __call__(self, transaction: OpenTransaction) -> str:
        self.asked.append(transaction)
        return self.answers.get(transaction.message.body.decode(), "unknown")


def failing(store: StoreWriter, topic: str) -> Callable[[], None]:
    """Have puts to a topic fail from now on, until the function is called."""
    service = store._services.transactions
    append = service.append

    def refuse(put: Message) -> Any:
        if put.topic == topic:
            raise StoreUnavailable("no room")
        return append(put)

    service.append = refuse

    def mend() -> None:
        service.append = append

    return mend


def leave(store: StoreWriter, *names: str, **fields: Any) -> None:
    for name in names:
        with store.transaction(message(name.encode(), **fields)) as t:
            t.leave_open()
