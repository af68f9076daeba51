"""Recovery in mode ``rocketmq`` leaves what a broker of the store's version leaves."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.format import checkpoint
from logquarry.repair.recover.rocketmq import apply_rocketmq, plan_rocketmq
from tests.conformance import broker_truth
from tests.conformance.rocketmq5 import stores5

STORES = stores5()
SCENARIOS = ("kill", "kill-no-mmap", "kill-transient")
VERSIONS = ("5.1.4", "5.3.3", "5.4.0", "5.5.0")
CUTS = 10

pytestmark = [pytest.mark.slow, pytest.mark.java]


def differences(store: Path, recovered: Path) -> Iterator[str]:
    """Recover ``store``, and yield each difference from what a broker left in ``recovered``.

    Args:
        store: a copy; is changed.
        recovered: a folder with ``store/`` after the broker's shutdown, and its truth.
    """
    plan = plan_rocketmq(store, StoreConfig())
    done = apply_rocketmq(plan, Disk())
    facts = json.loads((recovered / "facts.json").read_text("utf-8"))
    if plan.log_end != facts["maxPhyOffset"]:
        yield f"the log ends at {plan.log_end}, and in Java at {facts['maxPhyOffset']}"
    queues = json.loads((recovered / "queues.json").read_text("utf-8"))
    java_ends = {name: queue["maxOffset"] for name, queue in queues.items()}
    ends = {f"{topic}/{number}": end for (topic, number), end in plan.queue_ends.items() if end}
    if ends != java_ends:
        yield f"queues end at {ends}, and in Java at {java_ends}"
    for folder in ("commitlog", "consumequeue", "index"):
        ours, theirs = _contents(store / folder), _contents(recovered / "store" / folder)
        if folder == "index":  # The names of index files are times.
            ours, theirs = _numbered(ours), _numbered(theirs)
        for name in sorted(ours.keys() | theirs.keys(), key=str):
            if ours.get(name) != theirs.get(name):
                yield f"{folder}/{name} differs"
    pages = [(root / "checkpoint").read_bytes() for root in (store, recovered / "store")]
    mine, java = map(checkpoint.decode, pages)
    if mine[1:] != java[1:]:
        # The broker also syncs the log, and so sets the first time later.
        yield f"checkpoint {mine}, and in Java {java}"
    my_offsets, java_offsets = map(checkpoint.decode_offsets, pages)
    if not done.offsets.logics_physical:
        # Nothing in the store showed that RocketMQ 5.5 wrote it.
        java_offsets = java_offsets._replace(logics_physical=0)
    if my_offsets != java_offsets:
        yield f"checkpoint {my_offsets}, and in Java {java_offsets}"


def _numbered(files: dict[object, bytes]) -> dict[object, bytes]:
    return dict(enumerate(files.values()))


def _contents(folder: Path) -> dict[object, bytes]:
    """The files with other bytes than zeros: logs and queues have one file made ahead."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    found: dict[object, bytes] = {str(p.relative_to(folder)): p.read_bytes() for p in paths}
    return {name: data for name, data in found.items() if data.strip(b"\0")}


def _copy(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "-a", "--sparse=always", str(source), str(target)], check=True)
    return target


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_stores_as_the_broker(version: str, scenario: str, tmp_path: Path) -> None:
    folder = STORES / version / scenario
    if not (folder / "after" / "facts.json").exists():
        pytest.skip(f"no store {folder}")
    store = _copy(folder / "store", tmp_path / "store")
    assert list(differences(store, folder / "after")) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(CUTS))
def test_cut_stores_as_the_broker(seed: int, tmp_path: Path) -> None:
    version = "5.5.0"
    # Timers, transactions or delays would make the broker put messages when it starts.
    folder = STORES / version / SCENARIOS[seed % len(SCENARIOS)] / "after"
    if not folder.exists():
        pytest.skip(f"no store {folder}")
    java = tmp_path / "java"
    java.mkdir()
    _copy(folder / "store", java / "store")
    shutil.copy(folder / "broker.conf", java)
    cut(java / "store", random.Random(seed))
    store = _copy(java / "store", tmp_path / "store")
    broker_truth.serve(java, version)
    assert list(differences(store, java)) == []


def cut(store: Path, rng: random.Random) -> None:
    """A crash of the machine: the log ends at any byte, and queues lack some last entries."""
    (store / "abort").touch()
    log = sorted((store / "commitlog").iterdir())[-1]
    with lq.MessageStore.open(store) as found:
        end = found.max_offset - int(log.name)
    data = log.read_bytes()
    at = rng.randrange(end // 2, end)
    log.write_bytes(data[:at] + bytes(len(data) - at))
    for queue in sorted((store / "consumequeue").glob("*/*/*")):
        if rng.random() < 0.5:
            data = queue.read_bytes()
            entries = len(data.rstrip(b"\0")) // 20
            kept = max(0, entries - rng.choice((0, 1, 2, 5, entries))) * 20
            queue.write_bytes(data[:kept] + bytes(len(data) - kept))
