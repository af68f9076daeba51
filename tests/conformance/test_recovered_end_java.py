"""RocketMQ puts into a store after a recovery."""

from __future__ import annotations

import base64
import json
import shutil
import time
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import RUN, free_port, master, require_oracle, started

pytestmark = pytest.mark.java

PUTS = 40


@pytest.fixture(scope="module", autouse=True)
def oracle() -> None:
    require_oracle()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_log_goes_on(is_killed: bool, golden: Path, tmp_path: Path) -> None:
    """The log end that a recovery in RocketMQ's mode has noted no longer counts."""
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


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_new_messages_reach_their_queues(is_rebuilt: bool, tmp_path: Path) -> None:
    """Also if the recovery has replaced the files of a queue whose messages have all expired."""
    root = tmp_path / "store"
    sizes = {"mappedFileSizeCommitLog": 1 << 14, "mappedFileSizeConsumeQueue": 200}
    config = lq.StoreConfig(mapped_file_size_commit_log=1 << 14, mapped_file_size_consume_queue=200)
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for queue_id, count in ((0, 37), (1, 200)):
            for _ in range(count):
                store.put(lq.Message("orders", bytes(150), queue_id=queue_id))
    min(root.joinpath("commitlog").iterdir()).unlink()
    shutil.rmtree(root / ".logquarry")
    root.joinpath("consumequeue/orders/0", f"{200:020d}").unlink()
    if is_rebuilt:
        rebuild(root, apply=True)
    lq.recover(root, apply=True)
    params = tmp_path / "params.json"
    params.write_text(json.dumps(sizes))
    body = base64.b64encode(b"new").decode()
    with master(root, free_port(), params) as running:
        for queue_id, end in ((0, 37), (1, 200)):
            put = running.ask(f"put orders {queue_id} {body}")["result"]
            assert put["append"]["logicsOffset"] == end
        while running.ask("status")["dispatchBehindBytes"]:
            time.sleep(0.01)
    with lq.MessageStore.open(root) as reader:
        for queue_id, end in ((0, 37), (1, 200)):
            assert [one.body for one in reader.get("orders", queue_id, end).messages] == [b"new"]
