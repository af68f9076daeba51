"""A power cut while messages are delivered and transactions end: none is lost, none repeats."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

import logquarry as lq
from logquarry.store.message_store import StoreWriter
from logquarry.store.transaction.checks import OpenTransaction
from logquarry.testing.clock import FakeClock
from logquarry.testing.disk_state import DiskState
from logquarry.testing.faulty_disk import FaultyDisk
from tests.crash.ladder import count, seeds, told
from tests.crash.workload import STORE

EACH = 30
"""Crashes of one run of a store."""
CONFIG: Final[dict[str, Any]] = {
    "mapped_file_size_commit_log": 16_384,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 20,
    "max_index_num": 40,
    "message_delay_level": "1s 2s",
    # After a put without a flush wait, only the service that needs it syncs the log.
    "flush_interval_commit_log": 60_000,
    "flush_interval_consume_queue": 60_000,
    "transaction_check_max": 1_000,
}


def decide(transaction: OpenTransaction) -> str:
    """The listener's answer, by the number; some answers are UNKNOWN at first."""
    number = int(transaction.message.body)
    if transaction.check_times < number % 3:
        return "unknown"
    return "commit" if number % 2 else "rollback"


@dataclass
class Known:
    """What was acknowledged as durable so far, and what was attempted."""

    delayed: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    undone: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)

    def copy(self) -> Known:
        return Known(*(set(getattr(self, name)) for name in self.__dataclass_fields__))


@dataclass
class Run:
    """A run of a store, with moments of its disk."""

    rng: random.Random
    flush: str
    points: list[tuple[str, Known, DiskState]] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    number: int = 0
    pending: list[tuple[set[int], int]] = field(default_factory=list)
    clock: FakeClock = field(default_factory=lambda: FakeClock(1_700_000_000_000))

    def observe(self, disk: FaultyDisk) -> Callable[[str], None]:
        lock = threading.Lock()

        def note(call: str) -> None:
            with lock:
                known = self.known.copy()
                state = disk.state()
                known.tried = set(self.known.tried)
                self.points.append((call, known, state))

        return note

    def work(self, store: StoreWriter, steps: int) -> None:
        for _ in range(steps):
            rng, known, number = self.rng, self.known, self.number
            self.number += 1
            known.tried.add(number)
            body = b"%d" % number
            kinds = ["delay", "delay", "commit", "undo", "leave", "deliver", "check", "flush"]
            kind = rng.choice(kinds)
            if kind == "delay":
                store.put(lq.Message("delayed", body, delay_level=rng.choice([1, 2])))
                self.pending.append((known.delayed, number))
            elif kind == "deliver":
                self.clock.advance(rng.choice([500, 1_000, 5_000]))
                store.deliver_due()
            elif kind == "check":
                self.clock.advance(rng.choice([3_000, 6_000]))
                store.check_transactions(decide)
            elif kind != "flush":
                with store.transaction(lq.Message("told", body)) as t:
                    if kind == "commit":
                        t.commit()
                    elif kind == "leave":
                        t.leave_open()
                ends = {"commit": known.committed, "undo": known.undone, "leave": known.left}
                self.pending.append((ends[kind], number))
            if kind == "flush":
                store.flush()
            if self.flush == "SYNC_FLUSH" or kind == "flush":
                while self.pending:
                    found, number = self.pending.pop()
                    found.add(number)


def recorded(root: Path, seed: int) -> Run:
    rng = random.Random(seed)
    run = Run(rng, rng.choice(["SYNC_FLUSH", "ASYNC_FLUSH", "ASYNC_FLUSH"]))
    root.mkdir()
    disk = FaultyDisk(root)
    disk.observe = run.observe(disk)
    config = lq.StoreConfig(**CONFIG, flush_disk_type=run.flush)
    for _ in range(2):
        with StoreWriter.start(root / STORE, config=config, clock=run.clock, disk=disk) as store:
            run.work(store, 18)
        disk.restart()
    return run


def numbers(store: lq.MessageStore, topic: str) -> Counter[int]:
    return Counter(int(message.body) for message in store.scan(topic))


def check(root: Path, run: Run, known: Known) -> None:
    config = lq.StoreConfig(**CONFIG)
    clock = FakeClock(run.clock.now)
    with StoreWriter.start(root, config=config, clock=clock) as store:
        clock.advance(10_000)
        store.deliver_due()
        for _ in range(4):
            clock.advance(10_000)
            store.check_transactions(decide)
        delivered, committed = numbers(store, "delayed"), numbers(store, "told")
        waiting = numbers(store, "SCHEDULE_TOPIC_XXXX")
        assert store.check_transactions(decide) == lq.CheckReport(), "all have ended"
    assert delivered == waiting, "each once"
    assert known.delayed <= delivered.keys() <= known.tried
    assert set(committed.values()) <= {1}
    assert known.committed <= committed.keys() <= known.tried
    assert not known.undone & committed.keys()
    assert {number for number in known.left if number % 2} <= committed.keys()
    assert not {number for number in known.left if number % 2 == 0} & committed.keys()


@pytest.mark.parametrize("seed", seeds(count(60), EACH))
def test_power_cuts(seed: int, shm: Path, tmp_path: Path) -> None:
    run = recorded(shm / "live", seed)
    rng = random.Random(seed)
    for number in range(EACH):
        call, known, state = rng.choice(run.points)
        image = shm / "image"
        with told(seed, f"crash {number} before {call}", image, tmp_path):
            state.crash(rng).write(image)
            if (image / STORE).exists():
                check(image / STORE, run, known)
        shutil.rmtree(image)
