"""A power cut at any moment: every message acknowledged as durable is there, and none is wrong."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.errors import StoreError
from logquarry.testing.faulty_disk import FaultyDisk
from logquarry.testing.model_store import explain
from tests.crash.checks import check_image, note_what_is_there
from tests.crash.harmed import recovery_of
from tests.crash.ladder import IS_BY_HAND, count, seeds, told
from tests.crash.workload import STORE, Workload, recorded, settings

EACH = 60
"""Crashes of one run of a store. 16 such runs notice each missing sync (mutations.py)."""


@pytest.mark.parametrize("seed", seeds(count(720), EACH))
def test_power_cuts(seed: int, shm: Path, tmp_path: Path) -> None:
    work = recorded(shm / "live", seed)
    rng = random.Random(seed)
    for number in range(EACH):
        point = rng.choice(work.points)
        image = shm / "image"
        with told(seed, f"crash {number} before {point.number} {point.call}", image, tmp_path):
            point.state.crash(rng).write(image)
            wrong = check_image(image / STORE, work.config, work.model, point.mark)
            assert not wrong, explain(wrong)
        shutil.rmtree(image)


@pytest.mark.parametrize("seed", seeds(count(720), EACH))
def test_power_cuts_and_recoveries(seed: int, shm: Path, tmp_path: Path) -> None:
    """A power cut, a recovery, more puts and a second power cut, each at any moment."""
    first = recorded(shm / "live", seed)
    rng = random.Random(seed)
    for number in range(EACH // 15 if IS_BY_HAND else 2):
        point = rng.choice(first.points)
        root = shm / "again"
        with told(seed, f"crash {number} before {point.number} {point.call}", root, tmp_path):
            point.state.crash(rng).write(root)
            second = Workload(root, rng, first.config, first.model.at(point.mark))
            second.clock.now = first.clock.now
            disk = FaultyDisk(root)
            disk.observe = second.observe(disk)
            with second.open(disk) as store:
                note_what_is_there(store, second, point.mark)
                second.run(store, 5)
            assert not second.refusals
        last = rng.choice(second.points)
        image = shm / "image"
        what = f"crash {number} before {point.number} {point.call}, then {last.number} {last.call}"
        with told(seed, what, image, tmp_path):
            last.state.crash(rng).write(image)
            third = Workload(image, rng, first.config, second.model.at(last.mark))
            with third.open(FaultyDisk(image)) as store:
                note_what_is_there(store, third, last.mark)
        shutil.rmtree(root)
        shutil.rmtree(image)


@pytest.mark.parametrize("seed", seeds(count(720), 4 * EACH))
def test_a_kill_and_then_a_power_cut(seed: int, shm: Path, tmp_path: Path) -> None:
    """Bytes that a dead process left only in the page cache are on the disk after a recovery."""
    rng = random.Random(seed)
    for number in range(EACH // 5 if IS_BY_HAND else 8):
        root = shm / "live"
        root.mkdir()
        work = Workload(root, rng, StoreConfig(**settings(rng)))
        disk = FaultyDisk(root)
        dies_at = rng.randrange(2, 400)
        disk.stop_at(dies_at)
        with told(seed, f"kill {number} before call {dies_at}", root, tmp_path):
            with contextlib.suppress(StoreError), work.open(disk) as store:
                work.run(store, 20)
            mark = work.model.mark()
            if not work.config.uses_transient_pool:
                mark = mark._replace(durable=mark.acked)
            disk.restart()
            work.refusals.clear()
            with work.open(disk) as store:
                note_what_is_there(store, work, mark)
                work.run(store, 3)
                mark, state = work.model.mark(), disk.state()
            assert not work.refusals
        image = shm / "image"
        with told(seed, f"kill {number} before call {dies_at}, power cut", image, tmp_path):
            state.crash(rng).write(image)
            last = Workload(image, rng, work.config, work.model)
            with last.open(FaultyDisk(image)) as store:
                note_what_is_there(store, last, mark)
        shutil.rmtree(root)
        shutil.rmtree(image)


@pytest.mark.parametrize("seed", seeds(count(720), EACH))
def test_power_cuts_while_harmed_stores_are_recovered(seed: int, shm: Path, tmp_path: Path) -> None:
    """After a power cut in a recovery, the next one gives the same result and loses no byte."""
    # For each commit half of the stores: each second seed has one of mode rocketmq.
    numbers = range(4) if IS_BY_HAND else [(1, 2), (0, 3)][seed % 2]
    for number in numbers:
        one = 10 * seed + number
        with told(one, "a harmed store", shm, tmp_path):
            work = recovery_of(shm, one, mode="rocketmq" if number == 3 else "safe")
            for wrong in work.crashes(random.Random(one), EACH // 20, shm / "image"):
                assert not wrong, f"{work.harmed.harms}\n{explain(wrong)}"
        for path in shm.iterdir():
            shutil.rmtree(path)


def test_a_recovery_keeps_no_bytes_of_an_entry_that_is_wrong(shm: Path) -> None:
    """Two harms hit one entry of a queue: bytes of an entry that is wrong anyway may be lost."""
    recovery_of(shm, 110001043, mode="rocketmq")
