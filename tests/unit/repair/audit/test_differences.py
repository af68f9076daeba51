"""Rules that several audits share (``audit.differences``)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logquarry.log.walk import Span
from logquarry.repair.audit.differences import SpanSet

spans = st.lists(st.builds(Span, st.integers(0, 60), st.integers(0, 20)), max_size=6)


@given(spans)
def test_a_set_of_spans_has_the_offsets_in_them(some: list[Span]) -> None:
    places = np.arange(-2, 90)
    expected = [any(span.offset <= place < span.end for span in some) for place in places]
    assert SpanSet(some).mask(places).tolist() == expected
