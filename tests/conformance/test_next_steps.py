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


@pytest.mark.parametrize("name", ["5.5.0-compaction", "5.5.0-controller", "5.5.0-cqext"])
def test_recover_and_verify_agree_on_the_next_step(name: str, copied: Copied) -> None:
    store = copied(name)
    (store / "abort").touch()
    step = f"next: logquarry verify {store}"
    for options in (), ("--apply",):
        assert next_of("recover", store, *options, code=4) == step
    assert next_of("verify", store, code=0).startswith("next: start the broker on the store")
    overwrite(store / "commitlog" / f"{0:020d}", 100, b"harm")
    assert next_of("recover", store, code=4) == step
    assert next_of("verify", store, code=1) == f"next: logquarry salvage {store} --into DIR"


def test_a_recovery_of_a_controller_store_is_left_to_the_broker(copied: Copied) -> None:
    refused = " ".join(run("recover", copied("5.5.0-controller"), code=4).stdout.split())
    assert "Way out: start the broker on the store" in refused
    assert "copy the store without epochFileCheckpoint" in refused


def test_a_wrong_index_of_a_controller_store_is_rebuilt(copied: Copied) -> None:
    """After a change of the master, the broker can leave wrong entries in the index."""
    store = copied("5.5.0-controller")
    (store / "abort").touch()
    (index,) = (store / "index").iterdir()
    overwrite(index, 40 + 500 * 4 + 20 + 4, (77).to_bytes(8))
    step = next_of("verify", store, code=1)
    assert step == f"next: logquarry rebuild {store} --in-place --index"
    step = next_of("rebuild", store, "--in-place", "--apply", "--index", code=0)
    assert step == f"next: logquarry verify {store}"
    assert next_of("verify", store, code=0).startswith("next: start the broker on the store")


@pytest.mark.parametrize("edit", ["no CRC", "no end of line", "CRLF"])
def test_a_list_of_epochs_that_a_broker_reads_is_no_damage(edit: str, copied: Copied) -> None:
    store = copied("5.5.0-controller")
    path = store / "epochFileCheckpoint"
    text = path.read_text()
    count, _, *epochs = text.splitlines()
    edited = {
        "no CRC": "\n".join([count, "0", *epochs, ""]),
        "no end of line": text.rstrip("\n"),
        "CRLF": text.replace("\n", "\r\n"),
    }
    path.write_bytes(edited[edit].encode())
    assert "bad_epochs" not in run("verify", store).stdout


@pytest.mark.parametrize("harm", ["cut", "crc", "count", "empty", "text", "folder"])
def test_an_invalid_list_of_epochs_is_damage(harm: str, copied: Copied) -> None:
    store = copied("5.5.0-controller")
    run("verify", store)
    path = store / "epochFileCheckpoint"
    count, crc, *epochs = path.read_text().splitlines()
    harmed = {
        "cut": path.read_text()[:-2],
        "crc": "\n".join([count, crc, "1-1", ""]),
        "count": "\n".join(["7", crc, *epochs, ""]),
        "empty": "",
        "text": "no epochs\n",
    }
    if harm == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_text(harmed[harm])
    shown = run("verify", store, code=1).stdout
    assert "bad_epochs" in shown
    step = "next: put epochFileCheckpoint back from a backup, then: logquarry verify"
    assert shown.splitlines()[-1] == f"{step} {store}"
