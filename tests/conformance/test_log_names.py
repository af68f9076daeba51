"""Stores that RocketMQ wrote, with the names of their log files swapped, rotated or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import MisnamedFile
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import require_oracle
from tests.conformance.test_store_java import dumped
from tests.helpers.golden_data import copy_store

WAYS = ("first and last", "rotated", "backup", "behind the end")


def log_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "commitlog").iterdir()}


def rename(root: Path, way: str) -> int:
    """Rename log files that have messages, and return how many were renamed."""
    folder = root / "commitlog"
    files = sorted(path for path in folder.iterdir() if path.read_bytes()[:8].strip(b"\0"))
    size = files[0].stat().st_size
    names = [path.name for path in files]
    wanted = list(names)
    if way == "first and last":
        wanted[0], wanted[-1] = wanted[-1], wanted[0]
    elif way == "rotated":
        wanted = [*wanted[1:], wanted[0]]
    elif way == "backup":
        wanted[-1] = f"{wanted[-1]}.bak"
    else:
        wanted[0] = f"{int(max(log_of(root))) + 2 * size:020d}"
    for path in files:
        path.rename(root / f"between-{path.name}")
    for name, new in zip(names, wanted, strict=True):
        (root / f"between-{name}").rename(folder / new)
    return sum(name != new for name, new in zip(names, wanted, strict=True))


def check(original: Path, root: Path, config: lq.StoreConfig | None, way: str) -> None:
    sound = verify_store(StoreLayout.open(original, config))
    assert not sound.has_damage
    copy_store(original, root)
    count = rename(root, way)
    if not count:
        pytest.skip("one file with messages")
    report = verify_store(StoreLayout.open(root, config))
    assert report.by_kind["misnamed_file"] == count
    assert report.counts["messages"] == sound.counts["messages"]
    with pytest.raises(MisnamedFile), lq.MessageStore.open(root, config=config) as store:
        list(store.scan(on_damage="skip"))
    assert salvage_store(StoreLayout.open(root, config)).plan.messages == sound.counts["messages"]
    plan = lq.recover(root, config=config, apply=True)
    assert [step.kind.value for step in plan.steps].count("rename") == count
    kept = {name: data for name, data in log_of(original).items() if any(data)}
    assert {name: data for name, data in log_of(root).items() if any(data)} == kept
    assert not verify_store(StoreLayout.open(root, config)).has_damage


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", ["rollover", "single", "v3-blank/reopened"])
def test_golden_stores(scenario: str, way: str, golden: Path, tmp_path: Path) -> None:
    found = Scenario(golden / scenario)
    check(found.store, tmp_path / "store", found.config, way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scenario", ["5.3.3-kill", "5.5.0-kill", "5.5.0-plain"])
def test_stores_of_rocketmq_5(scenario: str, way: str, rocketmq5: Path, tmp_path: Path) -> None:
    check(rocketmq5 / scenario / "store", tmp_path / "store", None, way)


@pytest.mark.java
def test_the_real_store_reads_the_renamed_files(golden: Path, tmp_path: Path) -> None:
    require_oracle()
    before = Scenario(golden / "rollover")
    copy_store(before.store, tmp_path / "store")
    rename(tmp_path / "store", "rotated")
    lq.recover(tmp_path / "store", config=before.config, apply=True)
    after = dumped(tmp_path, before.params)
    assert after.expected == before.expected
