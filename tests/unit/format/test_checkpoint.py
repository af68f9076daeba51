"""Is the checkpoint page read and written as RocketMQ's?"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import checkpoint, java
from logquarry.format.checkpoint import Checkpoint
from tests.conformance.golden_facts import SOUND, Scenario

LONG = st.integers(java.LONG_MIN, java.LONG_MAX)


@pytest.mark.parametrize("name", SOUND)
def test_golden_checkpoints(golden: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    data = (scenario.store / "checkpoint").read_bytes()
    found = checkpoint.decode(data)
    before = scenario.facts["checkpointBefore"]
    assert list(found) == [
        before[key] for key in ("physicMsgTimestamp", "logicsMsgTimestamp", "indexMsgTimestamp")
    ]
    assert checkpoint.encode(found) == data


@given(LONG, LONG, LONG)
def test_what_was_encoded_comes_back(physic: int, logics: int, index: int) -> None:
    page = checkpoint.encode(Checkpoint(physic, logics, index))
    assert len(page) == 4096
    assert checkpoint.decode(page) == (physic, logics, index)
    assert checkpoint.decode(page[:24]) == (physic, logics, index)


@pytest.mark.parametrize("length", [0, 1, 23])
def test_too_short_a_page(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes?"):
        checkpoint.decode(bytes(length))


@given(st.integers(0, java.LONG_MAX))
def test_a_start_follows_the_mark(start: int) -> None:
    mark = checkpoint.encode_mark(checkpoint.DurableMark(start, Checkpoint(), Checkpoint()))
    data = mark + checkpoint.encode_start(start)
    assert checkpoint.decode_start(data.ljust(4096, b"\0")) == start
    assert checkpoint.decode_mark(data) == checkpoint.decode_mark(mark)
    assert checkpoint.decode_start(data[:-1]) is None
    assert checkpoint.decode_start(data[:-1] + bytes([data[-1] ^ 1])) is None


def test_an_unknown_start() -> None:
    mark = checkpoint.encode_mark(checkpoint.DurableMark(5, Checkpoint(), Checkpoint()))
    assert checkpoint.decode_start(mark.ljust(4096, b"\0")) is None
    assert checkpoint.decode_start(mark + checkpoint.encode_start(-1)) is None
