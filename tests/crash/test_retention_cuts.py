"""A power cut while files expire: the log begins later or does not, and never has a hole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import logquarry as lq
from logquarry.disk.service import Health
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from logquarry.testing.disk_state import DiskState
from logquarry.testing.faulty_disk import FaultyDisk
from tests.crash.ladder import SEED, count, told
from tests.helpers.small_store import NOW, config

FILE = 4_096
SETTINGS = config(
    mapped_file_size_commit_log=FILE,
    mapped_file_size_consume_queue=100,
    max_index_num=20,
    flush_disk_type="SYNC_FLUSH",
)
COUNT = 60
Put = tuple[int, bytes]
Moment = tuple[int, str, int, int, DiskState]
"""Number and name of the call that comes next, puts that are durable, puts tried, the disk."""


def put(store: lq.StoreWriter, rng: random.Random, number: int) -> Put:
    message = lq.Message(
        rng.choice(["orders", "payments"]),
        b"%d:" % number + bytes(rng.choice([10, 300, 700])),
        queue_id=rng.randrange(2),
        keys=f"k{number}",
    )
    return store.put(message).physical_offset, bytes(message.body)


def check(root: Path, puts: list[Put], tried: int, bases: range) -> None:
    """Check that a store begins where a file began, and has all messages from there on."""
    with lq.MessageStore.open(root, config=SETTINGS) as store:
        found = [(message.physical_offset, message.body) for message in store.scan()]
        low = store.min_offset
        assert low in bases
        kept = [one for one in puts if one[0] >= low]
        assert found[: len(kept)] == kept
        # The message of an unfinished put may be there.
        assert len(found) - len(kept) <= max(0, tried - len(puts))
        bodies = []
        for key in store.queues():
            offset, end = store.queue_offsets(*key)
            while offset < end:
                answer = store.get(*key, offset)
                bodies += [message.body for message in answer.messages]
                offset = max(answer.next_offset, offset + 1)
        assert sorted(bodies) == sorted(body for _, body in found)
    report = verify_store(StoreLayout.open(root, SETTINGS))
    assert not report.has_damage, report.findings


def goes_on(root: Path, puts: list[Put]) -> None:
    """The next retention finishes an interrupted retention, and the store takes puts."""
    with StoreWriter.start(root, config=SETTINGS, clock=lambda: NOW + 10**6) as store:
        rng = random.Random(1)
        more = [put(store, rng, number) for number in range(1_000, 1_005)]
        store.wait_dispatched()
        store.retain(lq.RetentionRules(keep_bytes=2 * FILE), apply=True)
        # No file is deleted twice, and the rest is complete.
        assert not store.retain(lq.RetentionRules(keep_bytes=2 * FILE)).files
        low = store.min_offset
        found = [(message.physical_offset, message.body) for message in store.scan()]
        assert [one for one in [*puts, *more] if one[0] >= low] == [
            one for one in found if one in puts or one in more
        ]


def observed(disk: FaultyDisk, moments: list[Moment], now: Callable[[], tuple[int, int]]) -> None:
    def note(call: str) -> None:
        durable = now()[0]
        state = disk.state()
        moments.append((disk.faults.total, call, durable, now()[1], state))

    disk.observe = note


def test_power_cuts_at_rest(shm: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    root = shm / "live"
    with StoreWriter.start(root / "store", config=SETTINGS, clock=lambda: NOW) as store:
        puts = [put(store, rng, number) for number in range(COUNT)]
        store.wait_dispatched()
        store.flush()
    disk, moments = FaultyDisk(root), list[Moment]()
    observed(disk, moments, lambda: (COUNT, COUNT))
    rules = lq.RetentionRules(keep_bytes=2 * FILE)
    plan = lq.retain(
        root / "store", rules, apply=True, config=SETTINGS, clock=lambda: NOW, disk=disk
    )
    assert len(plan.log) > 3
    assert plan.index
    bases = range(0, plan.new_min_offset + 1, FILE)
    begins = set()
    for _ in range(count(40)):
        number, call, _, _, state = rng.choice(moments)
        image = shm / "image"
        with told(SEED, f"crash before {number} {call}", image, tmp_path):
            state.crash(rng).write(image)
            # The store was closed cleanly, so no recovery is due.
            assert not lq.recover(image / "store", config=SETTINGS).is_needed
            check(image / "store", puts, COUNT, bases)
            with lq.MessageStore.open(image / "store", config=SETTINGS) as store:
                begins.add(store.min_offset)
            goes_on(image / "store", puts)
        shutil.rmtree(image)
    assert len(begins) > 3


def test_power_cuts_while_it_runs(shm: Path, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    root = shm / "live"
    root.mkdir()
    disk, moments = FaultyDisk(root), list[Moment]()
    puts: list[Put] = []
    tried = 0
    observed(disk, moments, lambda: (len(puts), tried))
    begins = {0}
    with StoreWriter.start(root / "store", config=SETTINGS, clock=lambda: NOW, disk=disk) as store:
        for number in range(COUNT):
            tried += 1
            puts.append(put(store, rng, number))
            if number % 10 == 9:
                store.wait_dispatched()
                store.retain(lq.RetentionRules(keep_bytes=2 * FILE), apply=True)
                begins.add(store.min_offset)
    assert len(begins) > 2
    bases = range(0, max(begins) + 1, FILE)
    for _ in range(count(30)):
        at, call, durable, attempted, state = rng.choice(moments)
        image = shm / "image"
        with told(SEED, f"crash before {at} {call}", image, tmp_path):
            state.crash(rng).write(image)
            if (image / "store" / "commitlog").is_dir():
                with StoreWriter.start(image / "store", config=SETTINGS, clock=lambda: NOW):
                    pass
                check(image / "store", puts[:durable], attempted, bases)
                goes_on(image / "store", puts[:durable])
            else:
                assert not durable
        shutil.rmtree(image)


def test_no_call_of_the_disk_may_fail_silently(shm: Path) -> None:
    """Each call fails in turn: there is an error, or nothing is missing, and the store is sound."""
    rng = random.Random(SEED)
    made = shm / "made"
    with StoreWriter.start(made / "store", config=SETTINGS, clock=lambda: NOW) as store:
        puts = [put(store, rng, number) for number in range(COUNT)]
    rules = lq.RetentionRules(keep_bytes=2 * FILE)
    shutil.copytree(made, shm / "whole")
    disk = FaultyDisk(shm / "whole")
    plan = lq.retain(shm / "whole" / "store", rules, apply=True, config=SETTINGS, disk=disk)
    bases = range(0, plan.new_min_offset + 1, FILE)
    for nth in range(1, disk.faults.total + 1):
        root = shm / "failing"
        shutil.copytree(made, root)
        failing = FaultyDisk(root)
        failing.fail(nth=nth)
        try:
            lq.retain(root / "store", rules, apply=True, config=SETTINGS, disk=failing)
            is_done = True
        except lq.errors.StoreUnavailable:
            is_done = False
        failing.health = Health()
        assert not lq.recover(root / "store", config=SETTINGS).is_needed
        check(root / "store", puts, COUNT, bases)
        if is_done:
            with lq.MessageStore.open(root / "store", config=SETTINGS) as store:
                assert store.min_offset == plan.new_min_offset
        shutil.rmtree(root)
