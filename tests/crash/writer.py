"""A process that writes stores until a test kills it: ``python -m tests.crash.writer``.

It reads orders from stdin, one JSON line each, and forks a child for each. The child writes the
store until it is killed or done, and prints a line for each acknowledged message:
``pid NUMBER``, ``open``, ``ack MESSAGE PHYSICAL QUEUED TIME``, ``error TEXT``, ``end``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import logquarry as lq
from logquarry.errors import StoreError
from logquarry.testing.model_store import ModelStore

SETTINGS: Final[dict[str, Any]] = {
    "mapped_file_size_commit_log": 32_768,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 50,
    "max_index_num": 100,
    "flush_interval_consume_queue": 5,
    "flush_consume_queue_thorough_interval": 20,
    "flush_interval_commit_log": 5,
    "flush_commit_log_thorough_interval": 20,
}
MOST: Final = 3_000
"""Messages of one order."""
TOPICS: Final = ("orders", "payments")


def message_of(order: int, number: int, topics: Sequence[str] = TOPICS) -> lq.Message:
    """The message of a number; both sides make the same."""
    rng = random.Random(order * 1_000_003 + number)
    body = b"%d-%d:" % (order, number) + bytes(rng.choice([0, 50, 500, 3_000]))
    return lq.Message(
        rng.choice(topics),
        body,
        queue_id=rng.randrange(2),
        keys=f"k{order}-{number}" if rng.random() < 0.5 else None,
    )


# ------------------------------------------------------------------------------------- the child
def write(
    root: Path,
    order: int,
    settings: dict[str, Any],
    say: Callable[[str], None],
    topics: Sequence[str] = (),
) -> None:
    """Put messages until the process is killed.

    Args:
        root: the store.
        order: the number of the order.
        settings: settings of the store.
        say: prints a line.
        topics: topics of a broker's store. The messages of a batch then go to one queue, as an
            inner batch if the topic has batch queues.
    """
    rng = random.Random(order)
    with lq.MessageStore.open(root, mode="rw", config=lq.StoreConfig(**settings)) as store:
        say("open")
        number = 0
        while number < MOST:
            # The smallest file of a log has 16 KiB.
            count = rng.choice([1, 1, 1, 1, 2, 4 if topics else 9])
            batch = [message_of(order, number + more, topics or TOPICS) for more in range(count)]
            told = []
            if count == 1:
                result = store.put(batch[0])
                told = [(result.physical_offset, result.queue_offset, result.store_timestamp)]
            elif count == 2:
                for future in [store.put_async(message) for message in batch]:
                    put = future.result()
                    told.append((put.physical_offset, put.queue_offset, put.store_timestamp))
            elif topics:
                first = batch[0]
                same = [one._replace(topic=first.topic, queue_id=first.queue_id) for one in batch]
                put = store.put_batch(same)
                # An inner batch is one frame.
                starts = put.starts if len(put.starts) == count else put.starts * count
                told = [
                    (put.physical_offset + start, put.queue_offset + more, put.store_timestamp)
                    for more, start in enumerate(starts)
                ]
            else:
                many = store.put_many(batch)
                columns = many.physical_offset, many.queue_offset, many.store_timestamp
                told = list(zip(*(column.tolist() for column in columns), strict=True))
            for more, (physical, queued, time) in enumerate(told):
                say(f"ack {number + more} {physical} {queued} {time}")
            number += count


def _child(order: dict[str, Any]) -> None:
    def say(line: str) -> None:
        # One call, so that a killed child leaves no half lines.
        os.write(1, f"{line}\n".encode())

    try:
        topics = order["topics"]
        # A broker's store has its own sizes.
        settings = order["settings"] if topics else SETTINGS | order["settings"]
        write(Path(order["root"]), order["number"], settings, say, topics)
    except StoreError as error:
        say(f"error {error}".replace("\n", " "))
    say("end")


def main() -> None:
    """Read orders until there are no more."""
    config = lq.StoreConfig(**SETTINGS)
    # Lazy imports and compiled code are loaded before the first fork.
    with (
        tempfile.TemporaryDirectory() as folder,
        lq.MessageStore.open(folder, mode="rw", config=config) as store,
    ):
        store.put_many([message_of(0, number) for number in range(20)])
        store.wait_dispatched()
    serve(sys.stdin, _child)


def serve(orders: Iterable[str], child: Callable[[dict[str, Any]], None]) -> None:
    """Fork a child for each order, and print a line when it has ended."""
    os.write(1, b"ready\n")
    for line in orders:
        pid = os.fork()
        if pid == 0:
            os.write(1, b"pid %d\n" % os.getpid())
            child(json.loads(line))
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(1, b"gone\n")


# ------------------------------------------------------------------------------------ the parent
@dataclass
class Order:
    """What is known of a child.

    Attributes:
        pid: its process.
        acks: number, physical and queue offset, and store time of what it acknowledged.
        sure: how many acknowledgements came before the power cut; None for all.
        errors: what it was refused.
        is_open: whether it had the store open.
        is_done: whether it ended by itself.
    """

    pid: int = 0
    acks: list[tuple[int, int, int, int]] = field(default_factory=list)
    sure: int | None = None
    errors: list[str] = field(default_factory=list)
    is_open: bool = False
    is_done: bool = False

    def hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "pid":
            self.pid = int(rest)
        elif word == "ack":
            number, physical, queued, time = map(int, rest.split())
            self.acks.append((number, physical, queued, time))
        elif word == "error":
            self.errors.append(rest)
        elif word == "open":
            self.is_open = True
        elif word == "end":
            self.is_done = True

    def tell(self, model: ModelStore, order: int, *, is_durable: bool) -> None:
        """Add to a model: acknowledged puts, and puts that may have been attempted."""
        acked = {number: told for number, *told in self.acks}
        sure = {number for number, *_ in self.acks[: self.sure]}
        # The last call may have been for some messages.
        for number in range(max(acked, default=-1) + 12):
            put = model.attempt(message_of(order, number))
            if number in acked:
                model.acked_at(put, *acked[number], is_durable=is_durable and number in sure)


AnyOrder = TypeVar("AnyOrder", bound=Order)


class Writer:
    """The process, and its orders one after the other."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._rest = b""

    def order(
        self,
        root: Path,
        number: int,
        settings: dict[str, Any],
        stop: Callable[[Order], bool],
        topics: Sequence[str] = (),
    ) -> Order:
        """Have a store written until ``stop`` returns true; then kill the child."""
        return self.order_of(Order(), root, number, settings, stop, topics)

    def order_of(
        self,
        told: AnyOrder,
        root: Path,
        number: int,
        settings: dict[str, Any],
        stop: Callable[[AnyOrder], bool],
        topics: Sequence[str] = (),
    ) -> AnyOrder:
        """Like :meth:`order`; each line is appended to ``told``."""
        order = {"root": str(root), "number": number, "settings": settings, "topics": topics}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        is_killed = False
        for line in self.lines(0.0005):
            if line == "gone":
                return told
            if line:
                told.hear(line)
            if not is_killed and told.pid and stop(told):
                # The child may be dead already: a page that a broken disk does not deliver raises
                # SIGBUS.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(told.pid, signal.SIGKILL)
                is_killed = True
        raise AssertionError("the writer has ended")

    def lines(self, pause: float = 60.0) -> Iterator[str]:
        """The lines that it prints; an empty line after each pause."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while True:
            while b"\n" in self._rest:
                line, self._rest = self._rest.split(b"\n", 1)
                yield line.decode()
            # Not select: a run of all tests has more descriptors than select can take.
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN | select.POLLHUP)
            if waiting.poll(pause * 1_000):
                data = os.read(descriptor, 1 << 16)
                if not data:
                    return
                self._rest += data
            else:
                yield ""


@contextmanager
def writer(module: str = "tests.crash.writer") -> Iterator[Writer]:
    """A process that is ready for orders."""
    with subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    ) as process:
        made = Writer(process)
        assert next(made.lines()) == "ready"
        try:
            yield made
        finally:
            assert process.stdin is not None
            process.stdin.close()


if __name__ == "__main__":
    main()
