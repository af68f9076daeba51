"""RocketMQ puts into a store after a recovery in its mode: the noted log end no longer counts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import RUN, free_port, require_oracle, started

pytestmark = pytest.mark.java

PUTS = 40


@pytest.fixture(scope="module", autouse=True)
def oracle() -> None:
    require_oracle()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_log_goes_on(is_killed: bool, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "unclean" / "crc-middle")
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    end = lq.recover(root, mode="rocketmq", apply=True, config=scenario.config).log_end
    assert StoreLayout.open(root).cut_end == end
    with lq.MessageStore.open(root) as reader:
        before = [message.physical_offset for message in reader.scan()]
    params = scenario.folder / "params.json"
    running = started(RUN, "ha-master", str(free_port()), root, "--params", params)
    try:
        assert running.ask("status")["maxPhyOffset"] == end
        their_end = running.ask(f"fill {PUTS} 200 7")["status"]["maxPhyOffset"]
        if is_killed:
            # What RocketMQ has not dispatched yet, the queues tell of the messages that it cut off.
            while running.ask("status")["dispatchBehindBytes"]:
                time.sleep(0.01)
        else:
            running.quit()
    finally:
        running.kill()
    assert StoreLayout.open(root).cut_end is None
    plan = lq.recover(root, config=scenario.config)
    assert plan.log_end == their_end and plan.loss is None
    with lq.MessageStore.open(root) as reader:
        assert reader.max_offset == their_end
        found = [message.physical_offset for message in reader.scan()]
    assert found[: len(before)] == before and len(found) == len(before) + PUTS
