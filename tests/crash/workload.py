"""A store at work on a faulty disk, with its model and the state of the disk at each call.

A seed chooses the operations. The store's threads are real, so two runs of one seed may call the
disk in different orders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import logquarry as lq
from logquarry.errors import StoreError
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from logquarry.testing.disk_state import DiskState
from logquarry.testing.faulty_disk import FaultyDisk
from logquarry.testing.model_store import Mark, ModelStore, Put
from logquarry.write.put_result import PutResult, PutStatus
from logquarry.write.settling import PutFuture

STORE: Final = "store"
START: Final = 1_700_000_000_000


class Point(NamedTuple):
    """A moment at which the power may go.

    Attributes:
        number: the number of disk calls before it.
        call: the call that was about to be made.
        mark: the model a moment before.
        state: the disk.
    """

    number: int
    call: str
    mark: Mark
    state: DiskState


def settings(rng: random.Random) -> dict[str, Any]:
    """Settings of a store of small files."""
    chosen: dict[str, Any] = {
        "mapped_file_size_commit_log": rng.choice([4_096, 8_192, 16_384]),
        "mapped_file_size_consume_queue": rng.choice([60, 200, 400]),
        "max_hash_slot_num": 7,
        "max_index_num": rng.choice([12, 60]),
        "max_message_size": 3_000,
        "message_index_enable": rng.random() < 0.8,
        "flush_disk_type": "SYNC_FLUSH" if rng.random() < 0.75 else "ASYNC_FLUSH",
        # Often, so that they come between the puts.
        "flush_interval_commit_log": 3,
        "flush_commit_log_thorough_interval": 10,
        "flush_interval_consume_queue": 3,
        "flush_consume_queue_thorough_interval": rng.choice([5, 20]),
    }
    if chosen["flush_disk_type"] == "ASYNC_FLUSH" and rng.random() < 0.3:
        chosen |= {"transient_store_pool_enable": True, "commit_interval_commit_log": 3}
    return chosen


@dataclass
class Workload:
    """Puts messages, and notes the results.

    Args:
        root: the folder that the disk covers; the store is in it.
        rng: chooses.
        config: of the store.
        model: the earlier puts.
    """

    root: Path
    rng: random.Random
    config: lq.StoreConfig
    model: ModelStore = field(default_factory=ModelStore)
    clock: FakeClock = field(default_factory=lambda: FakeClock(START, step=1))
    points: list[Point] = field(default_factory=list)
    refusals: list[StoreError] = field(default_factory=list)
    sites: dict[str, int] = field(default_factory=dict)

    @property
    def is_synchronous(self) -> bool:
        """Whether PUT_OK means that the message is on the disk."""
        return self.config.flush_disk_type == "SYNC_FLUSH"

    def observe(self, disk: FaultyDisk) -> Callable[[str], None]:
        """Keeps each moment of a disk."""

        def note(call: str) -> None:
            # The durable puts are taken before the disk's state, the attempted ones after it.
            mark = self.model.mark()
            state = disk.state()
            mark = mark._replace(attempted=len(self.model.puts))
            self.points.append(Point(disk.faults.total, call, mark, state))

        return note

    def open(self, disk: FaultyDisk) -> StoreWriter:
        """The store, opened to be written."""
        return StoreWriter.start(self.root / STORE, config=self.config, clock=self.clock, disk=disk)

    # ------------------------------------------------------------------------------- messages
    def message(self) -> lq.Message:
        """A message that was never put before."""
        rng, number = self.rng, len(self.model.puts)
        size = rng.choice([0, 10, 100, 700, 2_000])
        body = b"%d:" % number + rng.randbytes(8) + bytes(size)
        keys = f"k{number}" if rng.random() < 0.8 else None
        if keys is not None and rng.random() < 0.2:
            keys += f" again{rng.randrange(3)}"
        return lq.Message(
            rng.choice(["orders", "payments"]),
            body,
            queue_id=rng.randrange(2),
            keys=keys,
            tags=rng.choice([None, "paid"]),
            wait_store_ok=rng.random() < 0.9,
        )

    # --------------------------------------------------------------------------------- actions
    def run(self, store: StoreWriter, count: int) -> None:
        """Put about this many messages, in all ways."""
        end = len(self.model.puts) + count
        while len(self.model.puts) < end:
            action = self.rng.choices(
                [self.put, self.put_async, self.put_batch, self.put_many, self.flush, self.wait],
                [10, 3, 2, 2, 1, 1],
            )[0]
            try:
                action(store)
            except StoreError as error:
                # Refused, or the result is unknown: the model has the put as attempted.
                self.refusals.append(error)

    def put(self, store: StoreWriter) -> None:
        """One message."""
        message = self.message()
        put = self.model.attempt(message)
        self._acked([put], store.put(message))

    def put_async(self, store: StoreWriter) -> None:
        """Put some messages with one wait for their flush."""
        tried: list[tuple[Put, PutFuture]] = []
        for _ in range(self.rng.randint(1, 4)):
            message = self.message()
            put = self.model.attempt(message)
            tried.append((put, store.put_async(message)))
        for put, future in tried:
            self._acked([put], future.result())

    def put_batch(self, store: StoreWriter) -> None:
        """Put some messages of one queue."""
        first = self.message()
        messages = [first]
        puts = [self.model.attempt(first)]
        for _ in range(self.rng.randint(0, 3)):
            message = self.message()._replace(
                topic=first.topic, queue_id=first.queue_id, wait_store_ok=first.wait_store_ok
            )
            messages.append(message._replace(body=bytes(message.body)[:100]))
            puts.append(self.model.attempt(messages[-1]))
        if sum(len(message.body) + 200 for message in messages) < self.config.max_message_size:
            self._acked(puts, store.put_batch(messages))

    def put_many(self, store: StoreWriter) -> None:
        """Put some messages of any queues."""
        messages = []
        puts = []
        for _ in range(self.rng.randint(1, 8)):
            messages.append(self.message())
            puts.append(self.model.attempt(messages[-1]))
        result = store.put_many(messages)
        waits = all(message.wait_store_ok for message in messages)
        durable = self.is_synchronous and waits and result.status is PutStatus.PUT_OK
        for number, put in enumerate(puts):
            self.model.acked_at(
                put,
                int(result.physical_offset[number]),
                int(result.queue_offset[number]),
                int(result.store_timestamp[number]),
                is_durable=durable,
            )

    def flush(self, store: StoreWriter) -> None:
        """Flush it all."""
        self.model.flushed(store.flush())

    def wait(self, store: StoreWriter) -> None:
        """Wait until all is dispatched."""
        store.wait_dispatched(timeout=10)

    def _acked(self, puts: list[Put], result: PutResult) -> None:
        waits = all(put.message.wait_store_ok for put in puts)
        for number, put in enumerate(puts):
            durable = self.is_synchronous and waits
            self.model.acked(put, result, is_durable=durable, number=number)


def recorded(
    root: Path,
    seed: int,
    *,
    messages: int = 40,
    openings: int = 2,
    ignored: Collection[str] = (),
) -> Workload:
    """A store that is opened, filled and closed several times, with each moment of its disk.

    Args:
        root: the folder that the disk covers; the store is in it.
        seed: chooses what is done.
        messages: about how many messages are put.
        openings: how often it is opened.
        ignored: places of the code whose syncs do nothing.
    """
    rng = random.Random(seed)
    work = Workload(root, rng, lq.StoreConfig(**settings(rng)))
    root.mkdir(parents=True, exist_ok=True)
    disk = FaultyDisk(root)
    disk.ignored.update(ignored)
    disk.observe = work.observe(disk)
    for _ in range(openings):
        with work.open(disk) as store:
            work.run(store, messages // openings)
        disk.restart()
    work.observe(disk)("the end")
    work.sites.update(disk.sites)
    assert not work.refusals
    return work
