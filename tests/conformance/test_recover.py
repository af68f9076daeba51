"""``logquarry.recover`` on every golden store: its plan, and the files before and after."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.log.layout import StoreLayout
from logquarry.repair.recover.open_check import find_store
from logquarry.repair.recover.plan import RecoveryMode
from logquarry.repair.verification import verify_store
from logquarry.store.overview import overview
from tests.conformance.golden_facts import (
    ANY_LOSS,
    CUT_FILES,
    LOG_GONE,
    LOST_FILES,
    SOUND,
    WITH_LOG,
    Scenario,
)
from tests.helpers.command import run
from tests.helpers.files import bytes_of

REFUSED = ("cq-wrong-size", "log-wrong-size")
"""RocketMQ does not start on these."""


@pytest.mark.parametrize("name", SOUND)
def test_sound_stores_need_nothing(name: str, golden: Path) -> None:
    scenario = Scenario(golden / name)
    before = bytes_of(scenario.store)
    plan = lq.recover(scenario.store, config=scenario.config)
    assert not plan.is_needed, list(plan.lines())
    assert bytes_of(scenario.store) == before


@pytest.mark.parametrize("mode", ["safe", "rocketmq"])
def test_a_store_without_its_log_is_refused(
    mode: RecoveryMode, golden: Path, tmp_path: Path
) -> None:
    scenario = Scenario(golden / "unclean" / LOG_GONE)
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    before = bytes_of(root)
    planned = lq.recover(root, mode=mode, config=scenario.config)
    assert planned.refused is not None and "is a disk not mounted?" in planned.refused
    assert not planned.steps
    with pytest.raises(lq.errors.UnsupportedStore, match="is a disk not mounted"):
        lq.recover(root, mode=mode, config=scenario.config, apply=True)
    config = dataclasses.replace(scenario.config, recovery=mode)
    with pytest.raises(lq.errors.UnsupportedStore, match="is a disk not mounted"):
        lq.MessageStore.open(root, mode="rw", config=config)
    assert bytes_of(root) == before


@pytest.mark.parametrize("name", WITH_LOG)
def test_harmed_stores(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / name)
    root, opened = tmp_path / "store", tmp_path / "opened"
    shutil.copytree(scenario.store, root)
    shutil.copytree(scenario.store, opened)
    before = bytes_of(root)
    accept_loss = None
    if name in LOST_FILES:
        assert lq.recover(root, config=scenario.config).refused is not None
        accept_loss = ANY_LOSS
    planned = lq.recover(root, config=scenario.config, accept_loss=accept_loss)
    assert planned.is_needed
    assert bytes_of(root) == before
    done = lq.recover(root, config=scenario.config, apply=True, accept_loss=accept_loss)
    assert done == planned
    assert not (root / "abort").exists()
    assert find_store(root, scenario.config).log_end == done.log_end
    assert not lq.recover(root, config=scenario.config).is_needed
    assert not lq.recover(root, config=scenario.config, apply=True).is_needed
    # A writer that opens the store leaves the same files.
    lq.MessageStore.open(opened, mode="rw", config=scenario.config, accept_loss=accept_loss).close()
    for folder in ("commitlog", "consumequeue"):
        assert bytes_of(root / folder) == bytes_of(opened / folder)


WITH_GAPS = ("noabort-cq-behind", "noabort-one-topic-gone")
"""Stores whose queues lack messages after RocketMQ's recovery too."""


@pytest.mark.parametrize("name", [name for name in WITH_LOG if name not in REFUSED])
def test_as_rocketmq_does(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / name)
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    before = bytes_of(root)
    refused = lq.recover(root, mode="rocketmq", config=scenario.config).refused
    assert (refused is not None) == (name in CUT_FILES)
    accept_loss = ANY_LOSS if refused else None
    settings: dict[str, Any] = {"config": scenario.config, "accept_loss": accept_loss}
    planned = lq.recover(root, mode="rocketmq", **settings)
    assert planned.mode == "rocketmq" and bytes_of(root) == before
    done = lq.recover(root, mode="rocketmq", apply=True, **settings)
    assert done == planned
    assert not (root / "abort").exists()
    # test_rocketmq_recovery.py shows that apply_rocketmq leaves these files too.
    theirs = scenario.folder / "store-recovered" if planned.is_needed else scenario.store
    for folder in ("commitlog", "consumequeue"):
        assert bytes_of(root / folder) == bytes_of(theirs / folder)
    _check_readers_agree(root, done.log_end, scenario)


def _check_readers_agree(root: Path, end: int, scenario: Scenario) -> None:
    """Check that all readers end the log where the recovery ended it."""
    config = scenario.config
    size = config.mapped_file_size_commit_log
    assert size is not None
    with lq.MessageStore.open(root, config=config) as reader:
        messages = list(reader.scan())
        # A blank may follow the last message.
        assert reader.max_offset in (end, end + -end % size)
        assert all(message.physical_offset < end for message in messages)
        hint = overview(reader).hint
        if scenario.folder.name in WITH_GAPS:
            assert hint is not None and "of the log are in no queue" in hint
        else:
            assert hint is None
        for topic, queue_id in reader.queues():
            low, high = reader.queue_offsets(topic, queue_id)
            for offset in range(low, high):
                assert reader.get(topic, queue_id, offset, 1).messages[0].queue_offset == offset
    report = verify_store(StoreLayout.open(root, config))
    damage = {one.kind for one in report.findings if one.severity == "damage"}
    lacking = {"queue_behind", "queue_missing"} if scenario.folder.name in WITH_GAPS else set()
    assert damage <= lacking, report.findings
    assert report.counts["messages"] == len(messages)
    assert not lq.recover(root, mode="rocketmq", config=config).is_needed
    again = lq.recover(root, config=config)
    assert again.loss is None and again.refused is None and not again.damage
    with lq.MessageStore.open(root, mode="rw", config=config) as writer:
        assert [m.physical_offset for m in writer.scan()] == [m.physical_offset for m in messages]


@pytest.mark.parametrize("name", REFUSED)
def test_what_rocketmq_refuses(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / name)
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    before = bytes_of(root)
    plan = lq.recover(root, mode="rocketmq", config=scenario.config)
    assert plan.refused is not None
    with pytest.raises(StoreUnavailable):
        lq.recover(root, mode="rocketmq", config=scenario.config, apply=True)
    assert bytes_of(root) == before
    params = scenario.folder / "params.json"
    result = run("recover", root, "--mode", "rocketmq", "--config", params, code=4)
    assert result.stdout.splitlines()[0].startswith(f"{root}: refused: ")
