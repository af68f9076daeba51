"""The next step of ``verify`` for stores of RocketMQ 5 that ``recover`` or ``rebuild`` refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conformance.rocketmq5 import Copied
from tests.helpers.command import run
from tests.helpers.files import overwrite


def next_of(*words: object, code: int) -> str:
    result = run(*words, code=code)
    return (result.stdout or result.stderr).splitlines()[-1]


def test_a_store_with_compaction_topics(tmp_path: Path, copied: Copied) -> None:
    store = copied("5.5.0-compaction")
    (store / "abort").touch()
    step = next_of("verify", store, code=0)
    assert step.startswith("next: start the broker on the store") and "recover " not in step
    refused = run("recover", store, code=4).stdout
    assert "start the broker" in refused and "plain store" not in refused
    overwrite(store / "commitlog" / f"{0:020d}", 100, b"harm")
    step = next_of("verify", store, code=1)
    assert step == f"next: logquarry salvage {store} --into DIR"
    run("salvage", store, "--into", tmp_path / "new", code=1)
    assert "no damage" in run("verify", tmp_path / "new").stdout


def test_batch_topics_with_queues_in_rocksdb(tmp_path: Path, copied: Copied) -> None:
    pytest.importorskip("rocksdict")
    store = copied("5.3.3-rocksdb")
    for name in "topics", "consumerOffsets", "subscriptionGroups":
        shutil.rmtree(store / "config" / name)
    topic = {
        "topicName": "Batches",
        "attributes": {"queue.type": "BatchCQ"},
        "perm": 6,
        "readQueueNums": 1,
        "writeQueueNums": 1,
    }
    table = json.dumps({"topicConfigTable": {"Batches": topic}})
    (store / "config" / "topics.json").write_text(table)
    shown = run("verify", store, code=1).stdout
    assert "does not start" not in shown and "a broker does not serve the topic" in " ".join(
        shown.split()
    )
    assert shown.splitlines()[-1] == f"next: logquarry salvage {store} --into DIR"
    assert "queue.type=BatchCQ" in run("rebuild", store, "--queues", code=4).stderr
    run("salvage", store, "--into", tmp_path / "new", code=1)
    assert "no damage" in run("verify", tmp_path / "new").stdout
