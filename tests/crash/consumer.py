"""A process that consumes stores and is killed over and over: ``python -m tests.crash.consumer``.

It reads orders, a line of JSON each, and forks a child for each of them, which puts messages and
consumes them until it is killed. The child tells of what it does: ``pid NUMBER``,
``put QUEUE OFFSET``, ``got QUEUE OFFSET`` before it handles a message, ``committed QUEUE OFFSET``
after a commit, ``sent QUEUE OFFSET`` after it sent a message back.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import logquarry as lq
from tests.crash.writer import SETTINGS

GROUP: Final = "g"
TOPIC: Final = "orders"
QUEUES: Final = 3
MOST: Final = 1_500
"""Messages of one order."""
_WARMED: Final = 100
"""So many gets load the kernels, before the first fork."""


def settings() -> lq.StoreConfig:
    """As the crash tests have them, with offsets that are written all the time."""
    return lq.StoreConfig(**SETTINGS, flush_consumer_offset_interval=3)


def message_of(number: int) -> lq.Message:
    """The message of a number."""
    return lq.Message(TOPIC, b"%d" % number, queue_id=number % QUEUES, tags="ab"[number % 2])


def consume(root: Path, seed: int) -> None:
    """Put and consume until somebody ends it."""

    def say(*words: object) -> None:
        # One call, so that a killed child leaves no half lines.
        os.write(1, " ".join(map(str, words)).encode() + b"\n")

    rng = random.Random(seed)
    with lq.MessageStore.open(root, mode="rw", config=settings()) as store:

        def put() -> None:
            for number in range(seed * MOST, (seed + 1) * MOST):
                result = store.put(message_of(number))
                say("put", number % QUEUES, result.queue_offset)

        threading.Thread(target=put, daemon=True).start()
        with store.consumer(GROUP, TOPIC) as consumer:
            for message in consumer:
                queue_id, offset = message.queue_id, message.queue_offset
                if message.topic != TOPIC:
                    continue
                say("got", queue_id, offset)
                if rng.random() < 0.02:
                    consumer.retry(message)
                    say("sent", queue_id, offset)
                if rng.random() < 0.02:
                    consumer.commit()
                    say("committed", queue_id, offset)


def main() -> None:
    """Read orders until there are no more."""
    with (
        tempfile.TemporaryDirectory() as folder,
        lq.MessageStore.open(folder, mode="rw", config=settings()) as store,
    ):
        for number in range(_WARMED):
            store.put(message_of(number))
        store.wait_dispatched()
        with store.consumer(GROUP, TOPIC, timeout=0) as consumer:
            assert len(list(consumer)) == _WARMED
    os.write(1, b"ready\n")
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.write(1, b"pid %d\n" % os.getpid())
            consume(Path(order["root"]), order["seed"])
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")


class Consuming:
    """The process, and its orders one after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def order(self, root: Path, seed: int) -> Iterator[list[str]]:
        """Have a store consumed: what the child says, until it is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"root": str(root), "seed": seed}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line == "gone\n":
                return
            yield line.split()
        raise AssertionError("the process has ended")


@contextmanager
def consuming() -> Iterator[Consuming]:
    """The process, ready for orders."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.crash.consumer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])},
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield Consuming(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


if __name__ == "__main__":
    main()
