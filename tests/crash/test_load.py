"""A load is killed at any moment: the log has all of it or nothing, and once after a retry."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.disk.service import Health
from logquarry.errors import StoreError
from logquarry.ingest.load import Appending, append_to_store, commit_load, plan_load
from logquarry.ingest.staging import LoadPlan, Staged, Stager
from logquarry.log.earlier_writers import read_durable
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.store.load.ledger import LoadId
from logquarry.store.load.loading import Loaded
from logquarry.store.load.segment import StagedFrames, StagedWriter
from logquarry.store.message_store import StoreWriter
from logquarry.testing.disk_state import DiskState
from logquarry.testing.faulty_disk import FaultyDisk
from tests.crash.ladder import IS_BY_HAND, SEED, count, told
from tests.helpers.small_store import config

ROWS = 40
LOAD = LoadId("job", 7)
SETTINGS = config(mapped_file_size_commit_log=4_096, max_message_size=3_000)
BEFORE = [b"before %d" % number for number in range(3)]


def rows(first: int, number: int) -> pa.RecordBatch:
    rng = random.Random(first)
    numbers = range(first, first + number)
    return pa.record_batch(
        {
            "topic": [rng.choice(["orders", "payments"]) for _ in numbers],
            "body": pa.array([b"%d:" % n + bytes(rng.choice([0, 50, 700])) for n in numbers]),
            "keys": [rng.choice([None, f"k{n} again"]) for n in numbers],
            "delay_level": pa.array([rng.choice([0, 0, 0, 3]) for _ in numbers], pa.int32()),
            "born_timestamp": pa.array([1_700_000_000_000 + n for n in numbers]),
        }
    )


def planned(root: Path, brokers: int) -> LoadPlan:
    return plan_load(LoadPlan(path=str(root), brokers=brokers, config=SETTINGS))


def staged(plan: LoadPlan) -> list[Staged]:
    tasks = []
    for partition in range(2):
        stager = Stager(plan, LOAD, partition)
        stager.add(rows(partition * ROWS, ROWS // 2))
        stager.add(rows(partition * ROWS + ROWS // 2, ROWS // 2))
        tasks.append(stager.finish())
    return tasks


def begun(root: Path, brokers: int) -> tuple[LoadPlan, list[Staged]]:
    """Stores with some messages, and a load that is staged."""
    plan = planned(root, brokers)
    for broker in range(brokers):
        plan.store(broker).parent.mkdir(parents=True, exist_ok=True)
        with StoreWriter.start(plan.store(broker), config=SETTINGS) as store:
            store.put_many([lq.Message("orders", body, keys="old") for body in BEFORE])
    return plan, staged(plan)


def committed(plan: LoadPlan, tasks: Sequence[Staged], disk: FaultyDisk | None = None) -> None:
    def run(appendings: Sequence[Appending]) -> list[Loaded]:
        return [appended(appending) for appending in appendings]

    def appended(appending: Appending) -> Loaded:
        if disk is None:
            return append_to_store(appending)
        try:
            return append_to_store(appending, disk)
        finally:
            # A disk ends with its store; these stores share one disk, so that they crash together.
            disk.health = Health()

    commit_load(plan, LOAD, tasks, run=run, disk=disk)


Facts = list[list[tuple[str, int, int, int, bytes]]]


def facts(plan: LoadPlan) -> Facts:
    """All that the stores hold, without store times; queues and index must agree with it."""
    found = []
    for broker in range(plan.brokers):
        report = verify_store(StoreLayout.open(plan.store(broker), SETTINGS))
        assert [finding for finding in report.findings if finding.severity == "damage"] == []
        with lq.MessageStore.open(plan.store(broker), config=SETTINGS) as store:
            messages = list(store.scan())
            for topic, queue_id in {(m.topic, m.queue_id) for m in messages}:
                queued = [m for m in messages if (m.topic, m.queue_id) == (topic, queue_id)]
                found_there: list[lq.StoredMessage] = []
                while len(found_there) < len(queued):
                    offset = queued[len(found_there)].queue_offset
                    answer = store.get(topic, queue_id, offset, len(queued))
                    assert answer.messages
                    found_there.extend(answer.messages)
                assert found_there == queued
        found.append(
            [(m.topic, m.queue_id, m.queue_offset, m.physical_offset, m.body) for m in messages]
        )
    return found


def opened_once(plan: LoadPlan) -> None:
    """Open each store for writes, as any writer does: that completes a load that had begun."""
    for broker in range(plan.brokers):
        with StoreWriter.start(plan.store(broker), config=SETTINGS):
            pass


class Run:
    """A load on a disk, with the disk's state before each of its calls."""

    def __init__(self, root: Path, brokers: int) -> None:
        plan, tasks = begun(root, brokers)
        self.before = facts(plan)
        self.states: list[tuple[str, DiskState]] = []
        disk = FaultyDisk(root)
        disk.observe = lambda call: self.states.append((call, disk.state()))
        committed(plan, tasks, disk)
        self.states.append(("end", disk.state()))
        self.after = facts(plan)
        assert sum(map(len, self.after)) == 2 * ROWS + len(BEFORE) * brokers


def check(root: Path, run: Run, brokers: int) -> None:
    """Open the stores that a crash left, and load once more."""
    plan = planned(root, brokers)
    opened_once(plan)
    for now, before, after in zip(facts(plan), run.before, run.after, strict=True):
        assert now in (before, after)
    committed(plan, staged(plan))
    assert facts(plan) == run.after
    left = [path for path in root.rglob("*.frames") if "staged" in path.parts]
    assert left == []
    assert not list(root.rglob("intent.json")) + list(root.rglob("decision.json"))


@pytest.mark.parametrize("brokers", [1, 2])
@pytest.mark.parametrize("how", ["killed", "power cut"])
def test_a_load_is_there_once(how: str, brokers: int, shm: Path, tmp_path: Path) -> None:
    run = Run(shm / "live", brokers)
    rng = random.Random(SEED)
    # The moments are spread over the load; kills have other moments than power cuts.
    step = max(1, len(run.states) // count(8))
    begin = step // 2 if how == "killed" else 0
    for number, (call, state) in list(enumerate(run.states))[begin::step]:
        image = shm / "image"
        with told(SEED, f"{how} before call {number}, {call}", image, tmp_path):
            (state.killed() if how == "killed" else state.crash(rng)).write(image)
            check(image, run, brokers)
        shutil.rmtree(image)


def test_a_disk_that_fails_once(shm: Path, tmp_path: Path) -> None:
    """Any call fails: the load raises, and after another try the stores have it once."""
    begun(shm / "first", 1)
    rng = random.Random(SEED)
    run = Run(shm / "live", 1)
    for number in rng.sample(range(1, len(run.states)), count(8)):
        root = shm / "copy"
        shutil.copytree(shm / "first", root)
        plan = planned(root, 1)
        tasks = staged(plan)
        disk = FaultyDisk(root)
        disk.fail(nth=number)
        with told(SEED, f"call {number} fails", root, tmp_path):
            with contextlib.suppress(StoreError, OSError):
                committed(plan, tasks, disk)
            opened_once(plan)
            assert facts(plan)[0] in (run.before[0], run.after[0])
            committed(plan, staged(plan))
            assert facts(plan) == run.after
        shutil.rmtree(root)


def test_lost_segments(shm: Path) -> None:
    """Without its segments, a load in the log stays if it is complete; otherwise it is removed."""
    root = shm / "live"
    plan, tasks = begun(root, 1)
    before = facts(plan)
    disk = FaultyDisk(root)
    seen = []

    def observe(call: str) -> None:
        if (root / ".logquarry/loads/intent.json").exists():
            seen.append(disk.state())

    disk.observe = observe
    committed(plan, tasks, disk)
    after = facts(plan)
    outcomes = []
    # By hand each moment; for each commit every seventh.
    step = 1 if IS_BY_HAND else 7
    for number, state in enumerate(seen[::step]):
        image = shm / f"image{number}"
        state.killed().write(image)
        copy = planned(image, 1)
        for path in image.rglob("*.frames"):
            path.unlink()
        if not (image / ".logquarry/loads/intent.json").exists():
            continue
        opened_once(copy)
        found = facts(copy)
        assert found in (before, after)
        outcomes.append(found == after)
        if found == before and any(
            path.stat().st_size for path in image.rglob("quarantine/commitlog/*")
        ):
            outcomes.append(False)
        # In both cases the load can be repeated.
        committed(copy, staged(copy))
        assert facts(copy) == after
        shutil.rmtree(image)
    assert True in outcomes and False in outcomes


def load_frames(root: Path) -> list[lq.StoredMessage]:
    """The messages of the load that are in the log."""
    with lq.MessageStore.open(root, config=SETTINGS) as store:
        return [message for message in store.scan() if message.body not in BEFORE]


@pytest.mark.parametrize("harm", ["topic", "properties"])
@pytest.mark.parametrize("are_segments_there", [True, False])
def test_a_torn_frame_of_a_load(shm: Path, harm: str, are_segments_there: bool) -> None:
    """A power cut has left zeros in the topic or the properties of one frame, which no CRC covers.

    Without a mend the load would append the frames from the torn one on a second time.
    """
    run = Run(shm / "live", 1)
    tried = 0
    for number, (_, state) in enumerate(run.states[::23]):
        image = shm / f"image{number}"
        state.killed().write(image)
        frames = (image / "commitlog").exists() and load_frames(image)
        loads = image / ".logquarry/loads"
        is_begun = (loads / "intent.json").exists() and not list(loads.glob("ledger/*"))
        if not is_begun or not frames or len(frames) < 6:
            continue
        torn = frames[len(frames) // 2]
        durable = read_durable(LocalFileSystem(image))
        # What was synced cannot be torn.
        if durable is None or durable.end > torn.physical_offset:
            continue
        base = torn.physical_offset - torn.physical_offset % 4_096
        data = bytearray((image / f"commitlog/{base:020d}").read_bytes())
        at = torn.physical_offset - base
        what = torn.topic.encode() if harm == "topic" else b"KEYS"
        begin = data.rfind(what, at, at + torn.size)
        if begin < 0:
            continue
        data[begin : begin + len(what)] = bytes(len(what))
        (image / f"commitlog/{base:020d}").write_bytes(data)
        if not are_segments_there:
            for path in image.rglob("*.frames"):
                path.unlink()
        plan = planned(image, 1)
        opened_once(plan)
        assert facts(plan) == (run.after if are_segments_there else run.before)
        committed(plan, staged(plan))
        assert facts(plan) == run.after
        tried += 1
    assert tried


def test_other_messages_between_those_of_a_load(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread puts a message between the load's segments; a crash leaves the load incomplete."""
    plan, tasks = begun(shm / "live", 1)
    disk = FaultyDisk(shm / "live")
    states: list[DiskState] = []
    append = StagedWriter.append
    with StoreWriter.start(plan.store(0), config=SETTINGS, disk=disk) as store:

        def append_and_put(self: StagedWriter, frames: StagedFrames, start: int = 0) -> int:
            done = append(self, frames, start)
            store.put(lq.Message("foreign", b"between"))
            states.append(disk.state())
            return done

        monkeypatch.setattr(StagedWriter, "append", append_and_put)
        store.load_staged(LOAD, [segment for task in tasks for _, segment in task.segments])
        monkeypatch.undo()
    assert len(states) > 1
    after = facts(plan)[0]
    loaded = [fact for fact in after if fact[0] != "foreign"]
    for number, state in enumerate(states):
        copy = planned(state.killed().write(shm / f"image{number}"), 1)
        opened_once(copy)
        found = facts(copy)[0]
        assert len([fact for fact in found if fact[0] == "foreign"]) == number + 1
        ours = [fact[:3] + fact[4:] for fact in found if fact[0] != "foreign"]
        assert ours == [fact[:3] + fact[4:] for fact in loaded]
