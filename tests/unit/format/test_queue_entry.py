"""Are consume queue units read and written as RocketMQ's own files have them?"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import java, queue_entry
from logquarry.format.queue_entry import FILLER, UNIT_SIZE, QueueEntry
from tests.conformance.golden_facts import Scenario

LONG = st.integers(java.LONG_MIN, java.LONG_MAX)


@pytest.mark.parametrize("name", ["single", "delay", "clean-restart/base"])
def test_golden_queues_decode_to_the_facts_and_encode_to_themselves(
    golden: Path, name: str
) -> None:
    scenario = Scenario(golden / name)
    compared = 0
    for queue in scenario.facts["queues"]:
        if not queue["entries"]:
            continue  # opening makes the schedule topic's queues in memory alone
        folder = scenario.store / "consumequeue" / queue["topic"] / str(queue["queueId"])
        files = {int(path.name): path.read_bytes() for path in folder.iterdir()}
        for logical, *unit in queue["entries"]:
            base = max(base for base in files if base <= logical * UNIT_SIZE)
            at = logical * UNIT_SIZE - base
            entry = queue_entry.decode_at(files[base], at)
            assert entry == tuple(unit)
            assert entry.is_written
            assert queue_entry.encode(entry) == files[base][at : at + UNIT_SIZE]
            compared += 1
    assert compared > 50


@given(LONG, st.integers(java.INT_MIN, java.INT_MAX), LONG)
def test_what_was_encoded_comes_back(offset: int, size: int, code: int) -> None:
    entry = QueueEntry(offset, size, code)
    data = queue_entry.encode(entry)
    assert len(data) == UNIT_SIZE == 20
    assert queue_entry.decode_at(b"xyz" + data, 3) == entry
    assert entry.is_written == (offset >= 0 and size > 0)


def test_what_only_pads_a_file() -> None:
    assert queue_entry.encode(FILLER).hex() == "00000000000000007fffffff0000000000000000"
    assert FILLER.is_filler
    assert FILLER.is_written
    assert not QueueEntry(0, 1, 0).is_filler
    assert not QueueEntry(0, 0, 0).is_written
