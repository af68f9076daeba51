"""A power cut while transactions of dialect 3.1 begin and end: none is lost, none reappears."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from logquarry.config import StoreConfig
from logquarry.dialect31.prepared import TransactionEnd
from logquarry.log.layout import StoreLayout
from logquarry.message import Message
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from logquarry.testing.disk_state import DiskState
from logquarry.testing.faulty_disk import FaultyDisk
from tests.crash.ladder import count, seeds, told
from tests.crash.workload import STORE

EACH = 30
"""Crashes of one run of a store."""
STEPS = 30


class Mark(NamedTuple):
    """What was known at a moment.

    Attributes:
        begun: transactions whose begin was acknowledged.
        ended: transactions whose end was acknowledged.
        ending: transactions whose end may be in the log.
        is_beginning: whether another one may be there.
    """

    begun: frozenset[int]
    ended: frozenset[int]
    ending: frozenset[int]
    is_beginning: bool


class Point(NamedTuple):
    """A moment of a disk."""

    call: str
    mark: Mark
    state: DiskState


class Transacting:
    """Begins and ends transactions, and keeps each moment of the disk."""

    def __init__(self, root: Path, rng: random.Random, mark: Mark | None = None) -> None:
        self.root = root
        self.rng = rng
        self.begun = set(mark.begun) if mark else set[int]()
        self.ended = set(mark.ended) if mark else set[int]()
        self.ending = set(mark.ending) if mark else set[int]()
        self.is_beginning = mark is not None and mark.is_beginning
        self.points: list[Point] = []
        self.clock = lambda: 1_700_000_000_000
        self.config = StoreConfig(
            dialect="3.1",
            mapped_file_size_commit_log=rng.choice([2_048, 4_096]),
            mapped_file_size_consume_queue=100,
            max_hash_slot_num=4,
            max_index_num=20,
            tran_state_table_mapped_file_size=24 * rng.choice([3, 7]),
            tran_redo_log_mapped_file_size=20 * rng.choice([4, 9]),
            flush_disk_type="SYNC_FLUSH",
        )

    def mark(self) -> Mark:
        return Mark(
            frozenset(self.begun), frozenset(self.ended), frozenset(self.ending), self.is_beginning
        )

    def observe(self, disk: FaultyDisk) -> Callable[[str], None]:
        def note(call: str) -> None:
            before, state, after = self.mark(), disk.state(), self.mark()
            mark = Mark(
                before.begun,
                before.ended,
                before.ending | after.ending | (after.ended - before.ended),
                before.is_beginning or after.is_beginning or before.begun != after.begun,
            )
            self.points.append(Point(call, mark, state))

        return note

    def open(self, disk: FaultyDisk) -> StoreWriter:
        return StoreWriter.start(self.root / STORE, config=self.config, clock=self.clock, disk=disk)

    def run(self, store: StoreWriter, steps: int) -> None:
        rng, known = self.rng, store.prepared_transactions
        for _ in range(steps):
            still = sorted(self.begun - self.ended)
            if still and rng.random() < 0.4:
                offset = rng.choice(still)
                self.ending.add(offset)
                known.end(offset, rng.choice(list(TransactionEnd)))
                self.ended.add(offset)
                self.ending.remove(offset)
            elif rng.random() < 0.2:
                store.put(Message("t", bytes(rng.randrange(300))))
            else:
                self.is_beginning = True
                message = Message("t", bytes(rng.randrange(300)), keys="k")
                result = known.begin(message, rng.choice(["pg-a", "polygenelubricants"]))
                self.begun.add(result.physical_offset)
                self.is_beginning = False
            if rng.random() < 0.1:
                store.flush()


def recorded(root: Path, seed: int) -> Transacting:
    work = Transacting(root, random.Random(seed))
    root.mkdir(parents=True)
    disk = FaultyDisk(root)
    disk.observe = work.observe(disk)
    for _ in range(2):
        with work.open(disk) as store:
            work.run(store, STEPS // 2)
        disk.restart()
    work.observe(disk)("the end")
    return work


def check(store: StoreWriter, mark: Mark) -> set[int]:
    """Check which transactions are open after a crash, and return them."""
    found = {transaction.physical_offset for transaction in store.prepared_transactions.open()}
    assert mark.begun - mark.ended - mark.ending <= found
    assert not found & mark.ended
    assert mark.is_beginning or found <= mark.begun
    return found


def check_image(root: Path, work: Transacting, mark: Mark) -> None:
    """Transactions that are open after a crash can be ended, and then the store is whole."""
    with StoreWriter.start(root, config=work.config, clock=work.clock) as store:
        found = sorted(check(store, mark))
        for offset, end in zip(found, 10 * list(TransactionEnd), strict=False):
            store.prepared_transactions.end(offset, end)
        offset = store.prepared_transactions.begin(Message("t", b"new"), "pg").physical_offset
        left = {one.physical_offset for one in store.prepared_transactions.open()}
        assert left == {*found[20:], offset}
    report = verify_store(StoreLayout.open(root, work.config))
    # No CRC covers topic and properties: after the durable offset, a recovery keeps a frame whose
    # properties were not written, if the body is whole.
    damage = [finding for finding in report.findings if finding.severity == "damage"]
    assert not [finding for finding in damage if finding.kind != "suspect_text"]
    assert not [finding for finding in report.findings if "transaction/" in finding.file]


@pytest.mark.parametrize("seed", seeds(count(60), EACH))
def test_power_cuts(seed: int, shm: Path, tmp_path: Path) -> None:
    work = recorded(shm / "live", seed)
    rng = random.Random(seed)
    for number in range(EACH):
        point = rng.choice(work.points)
        image = shm / "image"
        with told(seed, f"crash {number} before {point.call}", image, tmp_path):
            point.state.crash(rng).write(image)
            check_image(image / STORE, work, point.mark)
        shutil.rmtree(image)


@pytest.mark.parametrize("seed", seeds(count(30), EACH))
def test_power_cuts_while_recovering(seed: int, shm: Path, tmp_path: Path) -> None:
    """A second power cut, during the recovery or the puts after it."""
    first = recorded(shm / "live", seed)
    rng = random.Random(seed)
    for number in range(EACH // 3):
        point = rng.choice(first.points)
        root, image = shm / "again", shm / "image"
        with told(seed, f"crash {number} before {point.call}", root, tmp_path):
            point.state.crash(rng).write(root)
            second = Transacting(root, rng, point.mark)
            second.config = first.config
            disk = FaultyDisk(root)
            disk.observe = second.observe(disk)
            with second.open(disk) as store:
                found = check(store, point.mark)
                # From here on it is known whether the unfinished calls have begun or ended a
                # transaction.
                second.begun, second.ended = set(found), set()
                second.ending, second.is_beginning = set(), False
                second.run(store, 4)
        last = rng.choice(second.points)
        with told(seed, f"crash {number}, then before {last.call}", image, tmp_path):
            last.state.crash(rng).write(image)
            check_image(image / STORE, second, last.mark)
        shutil.rmtree(root)
        shutil.rmtree(image)
