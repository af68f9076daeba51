"""Hypothesis runs any sequence of a store's operations and compares the store with a list."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import logquarry as lq
from logquarry.store.message_store import StoreWriter
from logquarry.testing.faulty_disk import FaultyDisk
from logquarry.testing.model_store import Seen, explain
from tests.crash.checks import check_image, note_what_is_there
from tests.crash.ladder import IS_BY_HAND, SEED, count
from tests.crash.workload import STORE, Workload
from tests.crash.workload import settings as settings_of

EXAMPLES = 20
STEPS = 50


class StoreMachine(RuleBasedStateMachine):
    """A store on a disk that can lose its power, and the list that it should be."""

    def __init__(self) -> None:
        super().__init__()
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="logquarry-", dir=shm if shm.is_dir() else None))
        self.generation = 0
        self.store: StoreWriter | None = None

    @initialize(seed=st.integers(0, 1 << 32), synchronous=st.booleans())
    def begin(self, seed: int, synchronous: bool) -> None:
        rng = random.Random(seed)
        chosen = settings_of(rng) | {
            "flush_disk_type": "SYNC_FLUSH" if synchronous else "ASYNC_FLUSH",
            "transient_store_pool_enable": False,
        }
        root = self.folder / "0"
        root.mkdir()
        self.work = Workload(root, rng, lq.StoreConfig(**chosen))
        self.disk = FaultyDisk(root)
        self.store = self.work.open(self.disk)

    # ------------------------------------------------------------------------------------ rules
    def opened(self) -> StoreWriter:
        assert self.store is not None
        return self.store

    @rule()
    def put(self) -> None:
        self.work.put(self.opened())

    @rule()
    def put_async(self) -> None:
        self.work.put_async(self.opened())

    @rule()
    def put_batch(self) -> None:
        self.work.put_batch(self.opened())

    @rule()
    def put_many(self) -> None:
        self.work.put_many(self.opened())

    @rule()
    def flush(self) -> None:
        self.work.flush(self.opened())

    @rule()
    def read_all(self) -> None:
        store = self.opened()
        assert store.wait_dispatched(timeout=60)
        wrong = self.work.model.check(
            Seen.of(store, keys=self.work.config.message_index_enable is not False)
        )
        assert not wrong, explain(wrong)

    @rule(number=st.integers(0, 1 << 16))
    def read_one(self, number: int) -> None:
        acked = [put for put in self.work.model.puts if put.is_acked]
        acked = [put for put in acked if put.body not in self.work.model.absent]
        if acked:
            put = acked[number % len(acked)]
            assert put.physical_offset is not None
            message = self.opened().message_at(put.physical_offset)
            assert bytes(message.body or b"") == put.body
            assert message.queue_offset == put.queue_offset

    @rule()
    def reopen(self) -> None:
        self.opened().close()
        self.disk.restart()
        self.store = self.work.open(self.disk)

    @rule(seed=st.integers(0, 1 << 32))
    def look_at_a_crash(self, seed: int) -> None:
        """Check what a power cut and a kill would leave, and go on."""
        mark, state = self.work.model.mark(), self.disk.state()
        for image, is_killed in ((state.crash(random.Random(seed)), False), (state.killed(), True)):
            root = image.write(self.folder / "image")
            config, model = self.work.config, self.work.model
            wrong = check_image(root / STORE, config, model, mark, is_killed=is_killed)
            assert not wrong, explain(wrong)
            shutil.rmtree(root)

    @rule(seed=st.integers(0, 1 << 32))
    def lose_power(self, seed: int) -> None:
        mark, state = self.work.model.mark(), self.disk.state()
        self.opened().close()
        self.generation += 1
        root = state.crash(random.Random(seed)).write(self.folder / str(self.generation))
        self.work.root, self.disk = root, FaultyDisk(root)
        self.store = self.work.open(self.disk)
        note_what_is_there(self.store, self.work, mark)

    @invariant()
    def nothing_is_poisoned(self) -> None:
        if self.store is not None:
            assert self.disk.health.reason is None

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.folder)


def test_any_sequence() -> None:
    machine = settings(
        max_examples=count(EXAMPLES),
        stateful_step_count=100 if IS_BY_HAND else STEPS,
        deadline=None,
        derandomize=not IS_BY_HAND,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    if IS_BY_HAND:
        seeded(SEED)(StoreMachine)
    run_state_machine_as_test(StoreMachine, settings=machine)
