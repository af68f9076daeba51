"""``logquarry.recover`` on every golden store: its plan, and the files before and after."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.repair.recover.open_check import find_store
from logquarry.repair.recover.plan import RecoveryMode
from tests.conformance.golden_facts import LOG_GONE, SOUND, WITH_LOG, Scenario
from tests.conformance.test_replay import files_below
from tests.helpers.command import run

REFUSED = ("cq-wrong-size", "log-wrong-size")
"""RocketMQ does not start on these."""


@pytest.mark.parametrize("name", SOUND)
def test_sound_stores_need_nothing(name: str, golden: Path) -> None:
    scenario = Scenario(golden / name)
    before = files_below(scenario.store)
    plan = lq.recover(scenario.store, config=scenario.config)
    assert not plan.is_needed, list(plan.lines())
    assert files_below(scenario.store) == before


@pytest.mark.parametrize("mode", ["safe", "rocketmq"])
def test_a_store_without_its_log_is_refused(
    mode: RecoveryMode, golden: Path, tmp_path: Path
) -> None:
    scenario = Scenario(golden / "unclean" / LOG_GONE)
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    before = files_below(root)
    planned = lq.recover(root, mode=mode, config=scenario.config)
    assert planned.refused is not None and "is a disk not mounted?" in planned.refused
    assert not planned.steps
    with pytest.raises(lq.errors.UnsupportedStore, match="is a disk not mounted"):
        lq.recover(root, mode=mode, config=scenario.config, apply=True)
    config = dataclasses.replace(scenario.config, recovery=mode)
    with pytest.raises(lq.errors.UnsupportedStore, match="is a disk not mounted"):
        lq.MessageStore.open(root, mode="rw", config=config)
    assert files_below(root) == before


@pytest.mark.parametrize("name", WITH_LOG)
def test_harmed_stores(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / name)
    root, opened = tmp_path / "store", tmp_path / "opened"
    shutil.copytree(scenario.store, root)
    shutil.copytree(scenario.store, opened)
    before = files_below(root)
    planned = lq.recover(root, config=scenario.config)
    assert planned.is_needed
    assert files_below(root) == before
    done = lq.recover(root, config=scenario.config, apply=True)
    assert done == planned
    assert not (root / "abort").exists()
    assert find_store(root, scenario.config).log_end == done.log_end
    assert not lq.recover(root, config=scenario.config).is_needed
    assert not lq.recover(root, config=scenario.config, apply=True).is_needed
    # A writer that opens the store leaves the same files.
    lq.MessageStore.open(opened, mode="rw", config=scenario.config).close()
    for folder in ("commitlog", "consumequeue"):
        assert files_below(root / folder) == files_below(opened / folder)


@pytest.mark.parametrize("name", [name for name in WITH_LOG if name not in REFUSED])
def test_as_rocketmq_does(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / name)
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    before = files_below(root)
    planned = lq.recover(root, mode="rocketmq", config=scenario.config)
    assert planned.mode == "rocketmq" and files_below(root) == before
    done = lq.recover(root, mode="rocketmq", config=scenario.config, apply=True)
    assert done == planned
    assert not (root / "abort").exists()
    # test_rocketmq_recovery.py shows that apply_rocketmq leaves these files too.
    theirs = scenario.folder / "store-recovered" if planned.is_needed else scenario.store
    for folder in ("commitlog", "consumequeue"):
        assert files_below(root / folder) == files_below(theirs / folder)


@pytest.mark.parametrize("name", REFUSED)
def test_what_rocketmq_refuses(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / name)
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    before = files_below(root)
    plan = lq.recover(root, mode="rocketmq", config=scenario.config)
    assert plan.refused is not None
    with pytest.raises(StoreUnavailable):
        lq.recover(root, mode="rocketmq", config=scenario.config, apply=True)
    after = files_below(root)
    after.pop("lock")
    before.pop("lock", None)
    assert after == before
    params = scenario.folder / "params.json"
    result = run("recover", root, "--mode", "rocketmq", "--config", params, code=4)
    assert result.stdout.splitlines()[0].startswith(f"{root}: refused: ")
