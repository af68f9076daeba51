"""The offset of a stream in Spark's checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import UsageError
from logquarry.spark.stream_offset import LastFrame, StreamOffset

_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=8)
_PLACES = st.dictionaries(_NAMES, st.integers(0, 2**63 - 1), max_size=4)
_QUEUES = st.dictionaries(
    st.tuples(_NAMES, st.integers(-1, 10)), st.integers(1, 2**60), min_size=1, max_size=3
)


@given(
    st.builds(
        StreamOffset,
        brokers=_PLACES,
        since_ms=st.none() | st.integers(0, 2**60),
        queues=st.dictionaries(_NAMES, _QUEUES, max_size=2),
        first=st.none() | _PLACES,
        frames=st.dictionaries(
            _NAMES,
            st.builds(LastFrame, st.integers(0, 2**63 - 1), st.integers(0, 2**32 - 1)),
            max_size=4,
        ),
    )
)
def test_there_and_back(offset: StreamOffset) -> None:
    text = json.dumps(offset.to_json())
    again = StreamOffset.from_json(json.loads(text))
    assert again == offset
    assert json.dumps(again.to_json()) == text


def test_plain_offsets_are_broker_to_offset() -> None:
    assert StreamOffset(brokers={"b": 7, "a": 0}).to_json() == {"a": 0, "b": 7}


@pytest.mark.parametrize(
    "document",
    [
        {"a": "7"},
        {"a": -1},
        {"a": True},
        {"topic": {"0": 5}},
        {"/start": 5},
        {"/start": {"queueOffsets": 7}},
        {"/start": {"timestamp": "soon"}},
        {"/start": {"offsets": {"a": None}}},
        {"/start": {"lastFrames": {"a": 5}}},
        {"/start": {"lastFrames": {"a": [5]}}},
        {"/start": {"lastFrames": {"a": [5, "x"]}}},
    ],
)
def test_offsets_of_another_source(document: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="the checkpoint holds no offset of this source"):
        StreamOffset.from_json(document)
