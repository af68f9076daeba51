"""The kernel and the reference find the same frames with a given property name."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format.arrays import PROPS_AT, PROPS_LENGTH, ROW_WIDTH
from logquarry.log import columns
from logquarry.log.codec import Window
from tests.helpers.twins import both

NAME = "NAME"
words = st.sampled_from([b"NAME", b"\x01", b"\x02", b"NAM", b"E", b"x", b"", b"NAME\x01", b"\xff"])
texts = st.lists(words, max_size=8).map(b"".join)


@given(st.lists(texts, max_size=5))
def test_frames_with_a_property(strings: list[bytes]) -> None:
    rows = np.zeros((len(strings), ROW_WIDTH), np.int32)
    at = 3
    for row, text in zip(rows, strings, strict=True):
        row[PROPS_AT], row[PROPS_LENGTH] = at, len(text)
        at += len(text)
    # The bytes around the strings do not belong to them.
    window = Window.of(b"NAM" + b"".join(strings) + b"NAME\x01", 0)
    kernel, reference = both(lambda: columns.rows_with_property(window, rows, NAME).tolist())
    assert kernel == reference
    assert reference == [
        number
        for number, text in enumerate(strings)
        if any(part.startswith(b"NAME\x01") for part in text.split(b"\x02"))
    ]
