"""A process that delivers, commits and checks, and is killed over and over.

``python -m tests.crash.services_writer``, as :mod:`tests.crash.writer`. It tells ``put NUMBER``,
``begun NUMBER``, ``committed NUMBER``, ``undone NUMBER`` and ``left NUMBER``, each when that is
certain. Numbers go on from order to order.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import logquarry as lq
from logquarry.errors import StoreError
from logquarry.store.transaction.checks import OpenTransaction
from tests.crash.writer import SETTINGS, Order, serve

SERVICES: Final[dict[str, Any]] = SETTINGS | {
    "mapped_file_size_commit_log": 262_144,
    # Level 1 and 2 are due at once.
    "message_delay_level": "0s 0s 1s",
    "deliver_delayed": True,
    "flush_delay_offset_interval": 20,
    "transaction_time_out": 0,
    "transaction_check_interval": 10,
    "transaction_check_max": 1_000_000,
}
MOST: Final = 3_000


def decide(transaction: OpenTransaction) -> str:
    """What the listener says of a transaction, by its number; some it does not know at once."""
    number = int(transaction.message.body.split(b":")[0])
    if transaction.check_times < number % 4:
        return "unknown"
    return "commit" if number % 2 else "rollback"


def message_of(topic: str, number: int, **fields: Any) -> lq.Message:
    """The message of a number."""
    body = b"%d:" % number + bytes(number % 7 * 100)
    return lq.Message(topic, body, queue_id=number % 2, **fields)


def write(root: Path, order: int, settings: dict[str, Any], say: Callable[[str], None]) -> None:
    """Put delayed messages and begin transactions until nobody wants more."""
    rng = random.Random(order)
    first = order * MOST
    config = lq.StoreConfig(**SERVICES | settings)
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        say("open")
        store.start_transaction_checks(decide)
        for number in range(first, first + MOST):
            store.put(message_of("delayed", number, delay_level=rng.choice([1, 1, 2, 3])))
            say(f"put {number}")
            if rng.random() < 0.5:
                with store.transaction(message_of("told", number)) as t:
                    say(f"begun {number}")
                    if rng.random() < 0.2:
                        time.sleep(0.02)
                    kind = rng.choice(["committed", "undone", "left"])
                    if kind == "committed":
                        t.commit()
                    elif kind == "left":
                        t.leave_open()
                say(f"{kind} {number}")


class ServicesOrder(Order):
    """What is known of a child.

    Attributes:
        told: numbers by what was said of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, set[int]] = {
            kind: set() for kind in ("put", "begun", "committed", "undone", "left")
        }

    def hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in self.told:
            self.told[word].add(int(rest))
        else:
            super().hear(line)


def _child(order: dict[str, Any]) -> None:
    def say(line: str) -> None:
        os.write(1, f"{line}\n".encode())

    try:
        write(Path(order["root"]), order["number"], order["settings"], say)
    except StoreError as error:
        say(f"error {error}".replace("\n", " "))
    say("end")


def main() -> None:
    """Read orders until there are no more."""
    with (
        tempfile.TemporaryDirectory() as folder,
        lq.MessageStore.open(folder, mode="rw", config=lq.StoreConfig(**SERVICES)) as store,
    ):
        store.put_many([message_of("delayed", n, delay_level=1) for n in range(20)])
        store.deliver_due()
        with store.transaction(message_of("told", 1)) as t:
            t.leave_open()
        store.check_transactions(decide)
        store.wait_dispatched()
    serve(sys.stdin, _child)


if __name__ == "__main__":
    main()
