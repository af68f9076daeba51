"""The recorded puts of the golden stores give the same bytes, at the recorded times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from logquarry.format import index
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexShape
from tests.conformance.golden_facts import Scenario
from tests.conformance.replay import OurLog, append_facts
from tests.helpers.files import bytes_of

SCENARIOS = (
    "single",
    "rollover",
    "batch",
    "ipv6",
    "sysflags",
    "delay",
    "multidispatch",
    "clean-restart/base",
)


@pytest.fixture(scope="module", params=SCENARIOS)
def replayed(
    request: pytest.FixtureRequest, golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scenario, OurLog]]:
    scenario = Scenario(golden / request.param)
    log = OurLog(tmp_path_factory.mktemp("replay"), scenario.params)
    for line in (scenario.folder / "puts.jsonl").read_text("utf-8").splitlines():
        put = json.loads(line)
        expected = put["result"]["append"]
        result = log.put(put["input"], expected["storeTimestamp"])
        assert append_facts(result) == expected
        assert result.ok is put["result"]["isOk"]
        assert result.status.value == put["result"]["putStatus"]
    log.dispatch()
    yield scenario, log
    log.close()


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_files_have_the_same_bytes(replayed: tuple[Scenario, OurLog], folder: str) -> None:
    scenario, log = replayed
    ours, theirs = bytes_of(log.root / folder), bytes_of(scenario.store / folder)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_next_offsets_of_queues_are_the_same(replayed: tuple[Scenario, OurLog]) -> None:
    scenario, log = replayed
    assert log.topic_queue_table == scenario.facts["topicQueueTable"]


def test_index_files_have_the_same_content(replayed: tuple[Scenario, OurLog]) -> None:
    scenario, log = replayed
    shape = scenario.config.index_shape
    assert shape is not None
    ours, theirs = bytes_of(log.root / "index"), bytes_of(scenario.store / "index")
    assert len(ours) == len(theirs)
    for our_name, their_name in zip(sorted(ours), sorted(theirs), strict=True):
        ours_header, *our_parts = index_parts(ours[our_name], shape)
        their_header, *their_parts = index_parts(theirs[their_name], shape)
        assert ours_header == their_header
        assert our_parts == their_parts


def index_parts(data: bytes, shape: IndexShape) -> tuple[index.IndexHeader, bytes, bytes]:
    """The header, the slots and the entries of a file, with its unused entries."""
    assert len(data) == shape.file_size
    end = HEADER.size + shape.slots * SLOT.size
    assert not np.frombuffer(data, np.uint8, ENTRY.size, end).any()
    return index.decode_header(data), data[HEADER.size : end], data[end:]
