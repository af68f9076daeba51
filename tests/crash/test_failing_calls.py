"""Any call of the disk fails: every acknowledged message is there, and nothing else is damaged."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreError
from logquarry.repair.verification import verify_store
from logquarry.testing.clock import FakeClock
from logquarry.testing.disk_state import HALVES, NEED_ROOM, SHORT, Fault
from logquarry.testing.faulty_disk import FaultyDisk
from logquarry.testing.model_store import ModelStore, explain
from tests.crash.checks import check_image, note_what_is_there
from tests.crash.harmed import CONFIG as HARMED_CONFIG
from tests.crash.harmed import Harmed, Outcome
from tests.crash.ladder import IS_BY_HAND, SEED, count, told
from tests.crash.workload import START, STORE, Workload

CONFIG = lq.StoreConfig(
    mapped_file_size_commit_log=2_048,
    mapped_file_size_consume_queue=100,
    max_hash_slot_num=5,
    max_index_num=8,
    flush_disk_type="SYNC_FLUSH",
)
PARTS = 4
IMAGES = 2 if IS_BY_HAND else 1
"""Power cuts of each disk."""
WAYS = [
    (error, for_ever) for error in (errno.EIO, errno.ENOSPC, SHORT) for for_ever in (False, True)
]
KINDS = [
    pytest.param(*way, id=f"{name}-{'for-ever' if way[1] else 'once'}")
    for name, way in zip(("EIO", "EIO", "ENOSPC", "ENOSPC", "short", "short"), WAYS, strict=True)
]


class Faulted(FaultyDisk):
    """Fails its nth call, if that call can fail in this way."""

    def __init__(self, root: Path, fault: Fault) -> None:
        super().__init__(root)
        self.wanted = fault
        self.is_hit = False
        self.observe = self._arm

    def _arm(self, kind: str) -> None:
        wanted = self.wanted
        if self.faults.total + 1 == wanted.nth:
            # On a full disk, closing and reading work.
            may_fail = {errno.ENOSPC: NEED_ROOM, SHORT: HALVES}.get(wanted.error, {kind})
            self.is_hit = kind in may_fail
            if wanted.error == errno.ENOSPC and wanted.for_ever:
                for each in NEED_ROOM:
                    self.fail(each, error=wanted.error, for_ever=True)
            elif self.is_hit:
                self.fail(error=wanted.error, for_ever=wanted.for_ever)


def attempted(root: Path, disk: FaultyDisk, messages: int) -> Workload:
    """Open, put, read and close, while calls fail."""
    work = Workload(root, random.Random(SEED), CONFIG, ModelStore(), FakeClock(START, step=1))
    try:
        store = work.open(disk)
    except StoreError as error:
        work.refusals.append(error)
        return work
    try:
        for number in range(messages):
            message = lq.Message(
                "t", b"%d" % number + bytes(number % 60), queue_id=number % 2, keys=f"k{number}"
            )
            put = work.model.attempt(message)
            try:
                work.model.acked(put, store.put(message), is_durable=True)
            except StoreError as error:
                work.refusals.append(error)
        try:
            store.wait_dispatched(timeout=5)
        except StoreError as error:
            work.refusals.append(error)
        # Reads still work after any failure.
        have = {bytes(message.body) for message in store.scan()}
        assert have.issuperset(work.model.mark().acked)
        try:
            store.flush()
        except StoreError as error:
            work.refusals.append(error)
    finally:
        store.close()
    return work


def check(work: Workload, disk: FaultyDisk, images: Path) -> None:
    """The folder as the process left it, after a power cut, and after one more opening."""
    root = work.root / STORE
    mark = work.model.mark()
    wrong = check_image(root, CONFIG, work.model, mark, is_killed=True, is_exact=False)
    assert not wrong, explain(wrong)
    rng = random.Random(SEED)
    state = disk.state()
    for number in range(IMAGES):
        image = state.crash(rng).write(images / str(number))
        wrong = check_image(image / STORE, CONFIG, work.model, mark, is_exact=False)
        assert not wrong, "after a power cut:\n" + explain(wrong)
    shutil.rmtree(images)
    disk.restart()
    disk.observe = None
    again = Workload(work.root, rng, CONFIG, work.model, work.clock)
    with again.open(disk) as store:
        note_what_is_there(store, again, mark)
        message = lq.Message("t", b"one more", keys="more")
        work.model.acked(work.model.attempt(message), store.put(message), is_durable=True)
        note_what_is_there(store, again, work.model.mark())
        state = disk.state()
    with lq.MessageStore.open(root, config=CONFIG) as reader:
        findings = verify_store(reader.layout).findings
        assert [found for found in findings if found.severity == "damage"] == []
    for number in range(IMAGES):
        image = state.crash(rng).write(images / str(number))
        last = Workload(image, rng, CONFIG, work.model, work.clock)
        with last.open(FaultyDisk(image)) as store:
            note_what_is_there(store, last, work.model.mark())
    shutil.rmtree(images)


def ways_of(number: int) -> list[tuple[int, bool]]:
    """One of the ways, each of them once in six numbers in sequence; by hand all of them."""
    return WAYS if IS_BY_HAND else [WAYS[(number + SEED) % len(WAYS)]]


def names_below(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*")}


def calls_of_the_workload(root: Path, messages: int) -> int:
    disk = FaultyDisk(root)
    work = attempted(root, disk, messages)
    assert not work.refusals and len(work.model.mark().durable) == messages
    return disk.faults.total


@pytest.mark.parametrize("part", range(PARTS))
def test_each_call_fails(part: int, shm: Path, tmp_path: Path) -> None:
    """Each call fails in one of the six ways; by hand in all, and N is the number of messages."""
    messages = count(6)
    (shm / "whole").mkdir()
    total = calls_of_the_workload(shm / "whole", messages)
    assert total > 100
    for number in range(1 + part, total + 1, PARTS):
        for error, for_ever in ways_of(number // PARTS):
            root = shm / str(number)
            root.mkdir()
            disk = Faulted(root, Fault(None, number, error, for_ever))
            with told(SEED, f"call {number} fails with {error}, {for_ever}", root, tmp_path):
                work = attempted(root, disk, messages)
                if disk.is_hit:
                    check(work, disk, shm / "images")
            shutil.rmtree(root)


def test_a_store_at_work_stops_at_each_call(shm: Path) -> None:
    """The process dies before a call: crash images start from what the disk has then."""
    total = calls_of_the_workload(shm, 3)
    for number in range(2, total, 17):
        root = shm / str(number)
        root.mkdir()
        disk = FaultyDisk(root)
        disk.stop_at(number)
        work = attempted(root, disk, 3)
        assert work.refusals or number > 60
        image = disk.state().killed().write(shm / f"{number}-killed")
        wrong = check_image(image / STORE, CONFIG, work.model, work.model.mark(), is_killed=True)
        assert not wrong, explain(wrong)
        stopped = disk.state()
        # If a call after the stop succeeds, model and files both continue.
        disk.restart()
        assert disk.state().synced() == stopped.synced()
        assert names_below(root) == names_below(shm / f"{number}-killed")


@pytest.mark.parametrize(("error", "for_ever"), KINDS)
def test_each_call_of_a_recovery_fails(
    error: int, for_ever: bool, shm: Path, tmp_path: Path
) -> None:
    """After a failed recovery, one on a healthy disk has the result of an undisturbed recovery.

    By hand, N is the number of stores, and all calls of each fail; otherwise some calls do.
    """
    for seed in range(SEED, SEED + count(4)):
        harmed = Harmed(shm / "harmed", random.Random(seed), least_harms=3, messages=16)
        wanted = harmed.comes_to(shm / "whole")
        image = harmed.disk.state().killed()
        disk = FaultyDisk(image.write(shm / "counted"))
        harmed.recover(shm / "counted" / STORE, disk)
        total = disk.faults.total
        assert total > 100
        step = 1 if IS_BY_HAND else 83
        # Each way and each store has other calls.
        begin = (seed + 9 * WAYS.index((error, for_ever))) % step
        for number in range(1 + begin, total + 1, step):
            root = image.write(shm / "failing")
            with told(seed, f"call {number} of {harmed.harms}", root, tmp_path):
                disk = Faulted(root, Fault(None, number, error, for_ever))
                is_refused = False
                try:
                    harmed.recover(root / STORE, disk)
                except StoreError:
                    is_refused = True
                if disk.is_hit:
                    check_recovery(harmed, wanted, disk, shm, is_refused=is_refused)
            shutil.rmtree(root)
        for path in shm.iterdir():
            shutil.rmtree(path)


def test_each_list_call_of_a_recovery_fails(shm: Path) -> None:
    """Found with failing_calls N=12, seed 12: one call raised OSError."""
    harmed = Harmed(shm / "harmed", random.Random(12), least_harms=3, messages=16)
    image = harmed.disk.state().killed()
    for number in range(1, 100):
        root = image.write(shm / "failing")
        disk = Faulted(root, Fault("list", number, errno.EIO, for_ever=True))
        try:
            harmed.recover(root / STORE, disk)
        except StoreError:
            assert disk.is_hit
        shutil.rmtree(root)
        if not disk.is_hit:
            break
    assert number > 2


def check_recovery(
    harmed: Harmed, wanted: Outcome, disk: Faulted, shm: Path, *, is_refused: bool
) -> None:
    """After a recovery that met a fault: the folder as it is, and after power cuts."""
    rng = random.Random(SEED)
    root = disk.root / STORE
    assert harmed.lacks(root) == []
    if not is_refused:
        assert_is_recovered(root, wanted)
    before = disk.state()
    disk.restart()
    disk.observe = None
    harmed.recover(root, disk)
    assert_is_recovered(root, wanted)
    assert harmed.lacks(root) == []
    again = disk.state()
    for state, is_done in ((before, not is_refused), (again, True)):
        image = state.crash(rng).write(shm / "image") / STORE
        if is_done:
            # A power cut also loses pages that a failed sync has marked as written. Nothing writes
            # those of queues and index again, and a plan finds that.
            assert Outcome.of(image).seen.log == wanted.seen.log
        if disk.wanted.error == SHORT and is_done:
            assert_is_recovered(image, wanted)
        harmed.recover(image)
        assert_is_recovered(image, wanted)
        assert harmed.lacks(image) == []
        shutil.rmtree(shm / "image")


def assert_is_recovered(root: Path, wanted: Outcome) -> None:
    plan = lq.recover(root, config=HARMED_CONFIG)
    assert plan.steps == ()
    assert Outcome.of(root) == wanted
