"""A process that runs all services at once; tests kill it again and again.

``python -m tests.crash.services_writer``, as :mod:`tests.crash.writer`. Delayed messages are put
and delivered, transactions are begun, ended and checked, a consumer reads the results, and old log
files expire. It prints a line for each event when the event is certain: ``put NUMBER``, ``begun
NUMBER``, ``committed NUMBER``, ``undone NUMBER``, ``left NUMBER``, ``got NUMBER TOPIC QUEUE
OFFSET`` before a message is handled, ``sent NUMBER`` after one was sent back, ``done TOPIC QUEUE
OFFSET`` after the consumer's commit, and ``expired OFFSET``. Numbers continue from order to order.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import logquarry as lq
from logquarry.errors import StoreError
from logquarry.format import broker_json
from logquarry.store.message_store import StoreWriter
from logquarry.store.transaction.checks import OpenTransaction
from tests.crash.writer import SETTINGS, Order, serve

SERVICES: Final[dict[str, Any]] = SETTINGS | {
    "mapped_file_size_commit_log": 65_536,
    # Messages of level 1 and 2 are due at once; level 3 is for messages sent back.
    "message_delay_level": "0s 0s 1s",
    "deliver_delayed": True,
    # Timer messages are due after 10 to 20 ms.
    "timer_precision_ms": 10,
    "mapped_file_size_timer_log": 10_000,
    "flush_delay_offset_interval": 20,
    "flush_consumer_offset_interval": 3,
    "transaction_time_out": 0,
    "transaction_check_interval": 10,
    "transaction_check_max": 1_000_000,
}
MOST: Final = 3_000
GROUP: Final = "g"
DELAYED: Final = "delayed"
TOLD: Final = "told"
RETRY: Final = f"%RETRY%{GROUP}"
QUEUES: Final = 2
KEEP: Final = lq.RetentionRules(keep_bytes=65_536, most_files=1)
"""Little: files of the log go all the time. One at a time: what was planned is what goes."""
_WARMED: Final = 100
"""So many gets load the kernels, before the first fork."""

Say = Callable[[str], None]


def decide(transaction: OpenTransaction) -> str:
    """The listener's answer for a transaction, by its number; some answers are UNKNOWN at first."""
    number = number_of(transaction.message.body)
    if transaction.check_times < number % 4:
        return "unknown"
    return "commit" if number % 2 else "rollback"


def message_of(topic: str, number: int, **fields: Any) -> lq.Message:
    """The message of a number."""
    body = b"%d:" % number + bytes(number % 7 * 100)
    return lq.Message(topic, body, queue_id=number % QUEUES, **fields)


def number_of(body: bytes) -> int:
    """The number of a message."""
    return int(body.split(b":")[0])


def read_offsets(root: Path) -> dict[tuple[str, int], int]:
    """The group's offsets by topic and queue; the file can be read at any time."""
    path = root / "config" / broker_json.CONSUMER_OFFSET_FILE
    if not path.exists():
        return {}
    table = broker_json.decode_consumer_offsets(path.read_bytes())
    return {
        (topic, queue_id): offset
        for (topic, group), offsets in table.items()
        if group == GROUP
        for queue_id, offset in offsets.items()
    }


def write(root: Path, order: int, settings: dict[str, Any], say: Say) -> None:
    """Run all services until the process is killed."""
    config = lq.StoreConfig(**SERVICES | settings)
    with StoreWriter.start(root, config=config) as store:
        say("open")
        store.start_transaction_checks(decide)
        ended = threading.Event()
        threads = [
            threading.Thread(target=consume, args=(store, random.Random(order + part), say, ended))
            for part in range(1 + order % 2)
        ]
        threads.append(threading.Thread(target=expire, args=(store, root, say, ended)))
        for thread in threads:
            thread.start()
        try:
            put(store, order, say)
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def put(store: StoreWriter, order: int, say: Say) -> None:
    """Put delayed messages, and begin transactions."""
    rng = random.Random(order)
    for number in range(order * MOST, (order + 1) * MOST):
        wait: dict[str, int] = rng.choice(
            [{"delay_ms": 11}, *({"delay_level": n} for n in (1, 2, 3))]
        )
        store.put(message_of(DELAYED, number, **wait))
        say(f"put {number}")
        if rng.random() < 0.5:
            with store.transaction(message_of(TOLD, number)) as t:
                say(f"begun {number}")
                if rng.random() < 0.2:
                    time.sleep(0.02)
                kind = rng.choice(["committed", "undone", "left"])
                if kind == "committed":
                    t.commit()
                elif kind == "left":
                    t.leave_open()
            say(f"{kind} {number}")


def consume(store: StoreWriter, rng: random.Random, say: Say, ended: threading.Event) -> None:
    """Consume delivered and committed messages; send some of them back, once."""
    with store.consumer(GROUP, [DELAYED, TOLD]) as consumer:
        last: lq.StoredMessage | None = None
        while not ended.is_set():
            for message in consumer.poll(rng.choice([1, 1, 8]), timeout=0.05):
                number, queue = number_of(message.body), f"{message.topic} {message.queue_id}"
                say(f"got {number} {queue} {message.queue_offset}")
                if message.topic != RETRY and rng.random() < 0.02:
                    consumer.retry(message)
                    say(f"sent {number}")
                last = message
            if last is not None and rng.random() < 0.02:
                consumer.commit()
                say(f"done {last.topic} {last.queue_id} {last.queue_offset}")


def expire(store: StoreWriter, root: Path, say: Say, ended: threading.Event) -> None:
    """Delete the log up to the first message that a group still has to read, by the plan."""
    while not ended.wait(0.005):
        plan = store.retain(KEEP)
        # The plan cannot know what a group without an offset would miss.
        begun = sum(topic in (DELAYED, TOLD) for topic, _ in read_offsets(root)) == 2 * QUEUES
        if plan.log and begun and not plan.unread:
            say(f"expired {store.retain(KEEP, apply=True).new_min_offset}")


class Got(NamedTuple):
    """A message that came to a consumer."""

    number: int
    topic: str
    queue_id: int
    queue_offset: int


class ServicesOrder(Order):
    """What is known of a child.

    Attributes:
        told: the numbers of each event.
        got: the consumed messages, in order.
        done: what a commit covers, by topic and queue.
        expired: where the log began after each deleted file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, set[int]] = {
            kind: set() for kind in ("put", "begun", "committed", "undone", "left", "sent")
        }
        self.got: list[Got] = []
        self.done: dict[tuple[str, int], int] = {}
        self.expired: list[int] = []

    def hear(self, line: str) -> None:
        word, *rest = line.split()
        if word in self.told:
            self.told[word].add(int(rest[0]))
        elif word == "got":
            self.got.append(Got(int(rest[0]), rest[1], int(rest[2]), int(rest[3])))
        elif word == "done":
            self.done[rest[0], int(rest[1])] = int(rest[2]) + 1
        elif word == "expired":
            self.expired.append(int(rest[0]))
        else:
            super().hear(line)

    def add(self, other: ServicesOrder) -> None:
        """Add the lines of another process."""
        for kind, found in other.told.items():
            self.told[kind] |= found
        self.got += other.got
        self.expired += other.expired

    def count(self, kind: str) -> int:
        """How often a line was printed."""
        return len(self.told[kind] if kind in self.told else getattr(self, kind))


def _child(order: dict[str, Any]) -> None:
    def say(line: str) -> None:
        # One call, so that a killed child leaves no half lines.
        os.write(1, f"{line}\n".encode())

    def fail(args: threading.ExceptHookArgs) -> None:
        say(f"error {args.exc_value!r}".replace("\n", " "))

    threading.excepthook = fail
    try:
        write(Path(order["root"]), order["number"], order["settings"], say)
    except StoreError as error:
        say(f"error {error}".replace("\n", " "))
    say("end")


def main() -> None:
    """Read orders until there are no more."""
    with (
        tempfile.TemporaryDirectory() as folder,
        StoreWriter.start(Path(folder), config=lq.StoreConfig(**SERVICES)) as store,
    ):
        store.put_many([message_of(DELAYED, n, delay_level=1) for n in range(_WARMED)])
        store.deliver_due()
        with store.transaction(message_of(TOLD, 1)) as t:
            t.leave_open()
        store.check_transactions(decide)
        store.retain(KEEP)
        store.wait_dispatched()
        with store.consumer(GROUP, DELAYED, timeout=0) as consumer:
            assert len(list(consumer)) == _WARMED
    serve(sys.stdin, _child)


if __name__ == "__main__":
    main()
