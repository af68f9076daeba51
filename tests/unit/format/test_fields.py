"""Do struct, offsets, dtype and documentation of a layout say the same?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import batch, checkpoint, frame, index, queue_entry
from logquarry.format.fields import Field, Layout

LAYOUTS = [
    (frame.HEAD, 48),
    (frame.STORE_TIME, 8),
    (frame.TAIL, 16),
    (frame.BLANK, 8),
    (queue_entry.LAYOUT, 20),
    (index.HEADER, 40),
    (index.SLOT, 4),
    (index.ENTRY, 20),
    (checkpoint.LAYOUT, 24),
    (batch.HEAD, 20),
]


@pytest.mark.parametrize(("layout", "size"), LAYOUTS, ids=lambda value: getattr(value, "name", ""))
def test_sizes(layout: Layout, size: int) -> None:
    assert layout.size == layout.struct.size == size
    assert layout.dtype().itemsize == size
    assert sum(field.width for field in layout.fields) == size


@pytest.mark.parametrize("layout", [layout for layout, _ in LAYOUTS], ids=lambda value: value.name)
@given(st.data())
def test_struct_offsets_and_dtype_agree(layout: Layout, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=layout.size, max_size=layout.size))
    by_struct = layout.struct.unpack(raw)
    record = np.frombuffer(raw, layout.dtype())[0]
    for field, value in zip(layout.fields, by_struct, strict=True):
        at = layout.offsets[field.name]
        signed = field.code != "I"
        assert int.from_bytes(raw[at : at + field.width], "big", signed=signed) == value
        assert record[field.name].item() == value


def test_the_table_names_every_field() -> None:
    layout = Layout("two", Field("first", "b", "one byte"), Field("second", "q", "eight"))
    assert layout.markdown().splitlines() == [
        "| offset | field | bytes | meaning |",
        "|---|---|---|---|",
        "| 0 | first | 1 | one byte |",
        "| 1 | second | 8 | eight |",
    ]
    assert repr(layout) == "Layout('two', 9 bytes)"
