"""Queues and index rebuilt from the log are those that RocketMQ wrote."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from logquarry.format.index import ENTRY, IndexShape
from logquarry.read.queue import UNIT_DTYPE
from logquarry.repair.rebuild.rebuild import rebuild
from tests.conformance.golden_facts import SOUND, Scenario
from tests.conformance.test_replay import index_parts
from tests.helpers.files import bytes_of

V3 = (
    "v3-blank/max-message-size",
    "v3-blank/reopened",
    "v3-blank/rollover",
    "v3-transactions",
)
RETENTION = "clean-restart/retention"


@pytest.fixture(params=SOUND)
def scenario(request: pytest.FixtureRequest, golden: Path) -> Scenario:
    return Scenario(golden / request.param)


def in_the_log(files: dict[str, bytes], log_start: int) -> dict[str, bytes]:
    """Queue files without the entries of messages that were deleted from the log's start."""
    found = {}
    for name, data in files.items():
        units = np.frombuffer(data, UNIT_DTYPE).copy()
        units[units["physical_offset"] < log_start] = 0
        found[name] = units.tobytes()
    return {name: data for name, data in found.items() if data.strip(b"\0")}


def test_queues_have_the_same_bytes(scenario: Scenario, tmp_path: Path) -> None:
    before = bytes_of(scenario.store)
    report = rebuild(scenario.store, into=tmp_path / "new", config=scenario.config)
    assert bytes_of(scenario.store) == before
    assert not report.damage and not report.left_out
    assert report.messages == len(scenario.expected)
    ours = bytes_of(tmp_path / "new" / "consumequeue")
    theirs = bytes_of(scenario.store / "consumequeue")
    log_start = min(int(path.name) for path in (scenario.store / "commitlog").iterdir())
    if log_start:
        ours, theirs = in_the_log(ours, log_start), in_the_log(theirs, log_start)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_the_index_has_the_same_content(scenario: Scenario, tmp_path: Path) -> None:
    rebuild(scenario.store, into=tmp_path / "new", config=scenario.config, queues=False)
    assert not (tmp_path / "new" / "consumequeue").exists()
    shape = scenario.config.index_shape
    assert shape is not None
    ours = bytes_of(tmp_path / "new" / "index")
    theirs = bytes_of(scenario.store / "index")
    if scenario.folder.match(RETENTION):
        # Files begin elsewhere: the first files had entries of messages that are deleted.
        start = min(int(path.name) for path in (scenario.store / "commitlog").iterdir())
        assert keys_of(ours, shape, start) == keys_of(theirs, shape, start)
        return
    for our_name, their_name in zip(sorted(ours), sorted(theirs), strict=True):
        assert index_parts(ours[our_name], shape) == index_parts(theirs[their_name], shape)


def keys_of(files: dict[str, bytes], shape: IndexShape, start: int) -> Counter[tuple[int, int]]:
    """The key hashes in some index files, with their messages' offsets."""
    found: Counter[tuple[int, int]] = Counter()
    for data in files.values():
        count = index_parts(data, shape)[0].entry_count - 1
        entries = np.frombuffer(data, ENTRY.dtype(), count, shape.entry_position(1))
        pairs = zip(entries["key_hash"].tolist(), entries["physical_offset"].tolist(), strict=True)
        found.update(pair for pair in pairs if pair[1] >= start)
    assert found
    return found


@pytest.mark.parametrize("name", V3)
def test_queues_of_3x_have_the_same_bytes(name: str, golden: Path, tmp_path: Path) -> None:
    """Except those of delayed messages: 3.x took their time from its clock, not from them."""
    scenario = Scenario(golden / name)
    rebuild(scenario.store, into=tmp_path / "new", config=scenario.config, index=False)
    ours = bytes_of(tmp_path / "new" / "consumequeue")
    theirs = bytes_of(scenario.store / "consumequeue")
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if ours[name] != theirs[name]]
    assert [name for name in differing if not name.startswith("SCHEDULE_TOPIC_XXXX")] == []


@pytest.mark.parametrize("name", ["crc-middle", "cq-and-index-gone", "one-topic-gone"])
def test_queues_of_harmed_stores_are_those_before_the_harm(
    name: str, golden: Path, tmp_path: Path
) -> None:
    scenario = Scenario(golden / "unclean" / name)
    rebuild(scenario.store, into=tmp_path / "new", config=scenario.config)
    sound = Scenario(golden / "unclean" / "abort-only")
    ours = bytes_of(tmp_path / "new" / "consumequeue")
    assert ours == bytes_of(sound.store / "consumequeue")
