"""Replaying what was put into the golden stores through an open store gives their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from tests.conformance.golden_facts import Scenario
from tests.conformance.replay import Clock, append_facts, message_of, wire_of
from tests.conformance.test_replay import SCENARIOS, files_below, index_parts


@pytest.fixture(scope="module", params=SCENARIOS)
def replayed(
    request: pytest.FixtureRequest, golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scenario, Path]]:
    scenario = Scenario(golden / request.param)
    root = tmp_path_factory.mktemp("replay") / "store"
    puts = (scenario.folder / "puts.jsonl").read_text("utf-8").splitlines()
    clock = Clock()
    # Opened anew on the way: what was put before is found again.
    for part in (puts[: len(puts) // 2], puts[len(puts) // 2 :]):
        with lq.MessageStore.open(root, mode="rw", config=scenario.config, clock=clock) as store:
            for line in part:
                put = json.loads(line)
                expected = put["result"]["append"]
                clock.now = expected["storeTimestamp"]
                message = message_of(put["input"])
                if put["input"]["kind"] == "batch":
                    result = store.put_batch(wire=wire_of(put["input"]), message=message)
                else:
                    result = store.put(message)
                assert append_facts(result) == expected
                assert result.status.value == put["result"]["putStatus"]
    yield scenario, root


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_files_have_the_same_bytes(replayed: tuple[Scenario, Path], folder: str) -> None:
    scenario, root = replayed
    ours, theirs = files_below(root / folder), files_below(scenario.store / folder)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_index_files_have_the_same_content(replayed: tuple[Scenario, Path]) -> None:
    scenario, root = replayed
    shape = scenario.config.index_shape
    assert shape is not None
    ours, theirs = files_below(root / "index"), files_below(scenario.store / "index")
    assert len(ours) == len(theirs)
    for our_name, their_name in zip(sorted(ours), sorted(theirs), strict=True):
        assert index_parts(ours[our_name], shape) == index_parts(theirs[their_name], shape)


def test_the_store_is_closed_in_order(replayed: tuple[Scenario, Path]) -> None:
    _, root = replayed
    names = {path.name for path in root.iterdir()}
    assert names == {"checkpoint", "commitlog", "consumequeue", "index", "lock", ".logquarry"}
    assert not any(path.is_file() for path in (root / ".logquarry").rglob("*"))
