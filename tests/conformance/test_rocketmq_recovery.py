"""Recovery mode ``rocketmq`` leaves the files that RocketMQ's recovery left."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.format.checkpoint import Checkpoint, encode
from logquarry.format.queue_entry import FILLER_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT
from logquarry.read.batch_queue import all_queues
from logquarry.repair.recover.plan import StepKind
from logquarry.repair.recover.rocketmq import apply_rocketmq, plan_rocketmq
from tests.conformance import test_store_facts as read_side
from tests.conformance.golden_facts import ANY_LOSS, LOG_GONE, UNCLEAN, WITH_LOG, Scenario
from tests.conformance.java_recovery import differences
from tests.helpers.files import bytes_of


@pytest.fixture(params=[*(f"unclean/{name}" for name in WITH_LOG), "clean-restart/prepad"])
def scenario(request: pytest.FixtureRequest, golden: Path) -> Scenario:
    return Scenario(golden / request.param)


@pytest.fixture
def store(scenario: Scenario, tmp_path: Path) -> Path:
    return Path(shutil.copytree(scenario.store, tmp_path / "store"))


def test_all_unclean_stores_are_here(golden: Path) -> None:
    there = sorted(path.name for path in (golden / "unclean").iterdir() if path.is_dir())
    assert there == list(UNCLEAN)


def test_as_the_real_store(scenario: Scenario, store: Path) -> None:
    recovered = scenario.folder / "store-recovered"
    assert list(differences(store, recovered, scenario.facts, scenario.config)) == []


def test_a_store_reads_as_the_real_one_and_goes_on(scenario: Scenario, store: Path) -> None:
    if not scenario.facts["load"]:
        pytest.skip("it does not load")
    config = dataclasses.replace(scenario.config, recovery="rocketmq")
    with lq.MessageStore.open(store, mode="rw", config=config, accept_loss=ANY_LOSS) as opened:
        read_side.test_get(scenario, opened)
        read_side.test_reading_a_queue_through_gives_its_messages(scenario, opened)
        found = [message.physical_offset for message in opened.scan()]
        assert found == [message["physicalOffset"] for message in scenario.expected]
        ends = {key: opened.queue_offsets(*key).max for key in opened.queues()}
        results = [opened.put(lq.Message("UnA", b"new", queue_id=n % 2)) for n in range(300)]
        opened.wait_dispatched()
        for number, result in enumerate(results):
            key = "UnA", number % 2
            assert result.queue_offset == ends.get(key, 0) + number // 2
            answer = opened.get(*key, result.queue_offset)
            assert answer.messages[0].physical_offset == result.physical_offset
            assert answer.messages[0].body == b"new"
    # After a clean shutdown the store opens with the same messages, also by RocketMQ's rules.
    with lq.MessageStore.open(store, mode="rw", config=config, accept_loss=ANY_LOSS) as opened:
        assert opened.max_offset == results[-1].physical_offset + results[-1].size
        assert [m.body for m in opened.scan()][-300:] == [b"new"] * 300


def test_a_plan_for_a_log_that_is_gone(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / LOG_GONE)
    store = Path(shutil.copytree(scenario.store, tmp_path / "store"))
    test_a_plan_carried_out_apart(scenario, store)


def test_a_plan_carried_out_apart(scenario: Scenario, store: Path) -> None:
    config = dataclasses.replace(scenario.config, recovery="rocketmq")
    plan = plan_rocketmq(store, config)
    if plan.refused is not None:
        with pytest.raises(lq.errors.StoreUnavailable, match="instead of a file"):
            apply_rocketmq(plan, Disk())
        return
    done = apply_rocketmq(plan, Disk())
    # The plan leaves out only the changes of the index.
    assert dataclasses.replace(plan, checkpoint=done.checkpoint) == done
    assert plan.checkpoint[:2] == done.checkpoint[:2]
    recovered = scenario.folder / "store-recovered"
    for folder in ("commitlog", "consumequeue", "index"):
        theirs = [p.read_bytes() for p in sorted((recovered / folder).rglob("*")) if p.is_file()]
        ours = [p.read_bytes() for p in sorted((store / folder).rglob("*")) if p.is_file()]
        assert ours == theirs
    # A second recovery finds nothing to do.
    assert plan_rocketmq(store, config).log_end == plan.log_end


def test_what_java_destroys_is_in_quarantine(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / "crc-third-last-file")
    store = Path(shutil.copytree(scenario.store, tmp_path / "store"))
    config = dataclasses.replace(scenario.config, recovery="rocketmq")
    before = bytes_of(store)
    plan = plan_rocketmq(store, config)
    aside = {step.file for step in plan.steps if step.kind is StepKind.SET_ASIDE}
    assert "commitlog/00000000000000049152" in aside
    with lq.MessageStore.open(store, mode="rw", config=config, accept_loss=ANY_LOSS):
        pass
    for name in aside:
        assert not (store / name).exists()
        kept = store / ".logquarry" / "quarantine" / name
        # Empty files (the next file of the log, made ahead) are not kept.
        assert kept.read_bytes() == before[name] if any(before[name]) else not kept.exists()


@pytest.mark.parametrize(
    ("time", "entries"), [(-(1 << 63), 23), (-(1 << 63) + 2_999, 23), (-(1 << 63) + 3_000, 174)]
)
def test_the_lowest_times_of_a_checkpoint_wrap(
    golden: Path, tmp_path: Path, time: int, entries: int
) -> None:
    # RocketMQ 4.9.3 took the first two times for the far future, and read only the last log file.
    scenario = Scenario(golden / "unclean" / "cq-and-index-gone")
    store = Path(shutil.copytree(scenario.store, tmp_path / "store"))
    (store / CHECKPOINT).write_bytes(encode(Checkpoint(time, time, time)))
    config = dataclasses.replace(scenario.config, recovery="rocketmq")
    apply_rocketmq(plan_rocketmq(store, config), Disk())
    queues = StoreLayout.open(store, scenario.config)
    found = [entry for queue in all_queues(queues) for _, entry in queue.entries()]
    assert sum(entry.size != FILLER_SIZE for entry in found) == entries
