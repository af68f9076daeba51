"""Queues and index made anew from the log are what RocketMQ made of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logquarry.store.queue.consume_queue import UNIT_DTYPE
from logquarry.store.rebuild.rebuild import rebuild
from tests.conformance.golden_facts import SOUND, Scenario
from tests.conformance.test_replay import files_below, index_parts

V3 = (
    "v3-blank/larger-than-file",
    "v3-blank/max-message-size",
    "v3-blank/reopened",
    "v3-blank/rollover",
    "v3-transactions",
)
WITH_TWO_LIVES = {"multidispatch"}
"""Its index was gone on with after a restart, which put the last message in once more."""


@pytest.fixture(params=SOUND)
def scenario(request: pytest.FixtureRequest, golden: Path) -> Scenario:
    return Scenario(golden / request.param)


def in_the_log(files: dict[str, bytes], log_start: int) -> dict[str, bytes]:
    """Queue files without their units of messages that were deleted from the log's start."""
    found = {}
    for name, data in files.items():
        units = np.frombuffer(data, UNIT_DTYPE).copy()
        units[units["physical_offset"] < log_start] = 0
        found[name] = units.tobytes()
    return {name: data for name, data in found.items() if data.strip(b"\0")}


def test_queues_have_the_same_bytes(scenario: Scenario, tmp_path: Path) -> None:
    before = files_below(scenario.store)
    report = rebuild(scenario.store, into=tmp_path / "new", config=scenario.config)
    assert files_below(scenario.store) == before
    assert not report.damage and not report.left_out
    ours = files_below(tmp_path / "new" / "consumequeue")
    theirs = files_below(scenario.store / "consumequeue")
    log_start = min(int(path.name) for path in (scenario.store / "commitlog").iterdir())
    if log_start:
        ours, theirs = in_the_log(ours, log_start), in_the_log(theirs, log_start)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_the_index_has_the_same_content(scenario: Scenario, tmp_path: Path) -> None:
    rebuild(scenario.store, into=tmp_path / "new", config=scenario.config, queues=False)
    shape = scenario.config.index_shape
    assert shape is not None
    ours = files_below(tmp_path / "new" / "index")
    theirs = files_below(scenario.store / "index")
    assert not (tmp_path / "new" / "consumequeue").exists()
    print(len(ours), len(theirs))
    for our_name, their_name in zip(sorted(ours), sorted(theirs), strict=True):
        a, b = index_parts(ours[our_name], shape), index_parts(theirs[their_name], shape)
        assert a == b


@pytest.mark.parametrize("name", V3)
def test_queues_of_3x_have_the_same_bytes(name: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / name)
    rebuild(scenario.store, into=tmp_path / "new", config=scenario.config, index=False)
    ours = files_below(tmp_path / "new" / "consumequeue")
    assert ours == files_below(scenario.store / "consumequeue")
